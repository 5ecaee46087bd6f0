#!/bin/sh
# Renews the versions and hashes of all that the image installs, and of what builds and checks it;
# `make lock` calls it. They hold for Python 3.11 and newer on any platform.
#
#   requirements.lock   all but PyTorch
#   torch.lock          PyTorch as PyPI has it, with the CUDA libraries that it needs on Linux
#   tools.lock          what lists the image's packages, builds a release and asks for known holes
#
# Every other index has builds of PyTorch of its own. With TORCH_INDEX nothing is renewed, but one
# more file made, for Linux, such as torch-cpu.lock for https://download.pytorch.org/whl/cpu.
set -eu
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

compile() { uv pip compile --quiet --python-version 3.11 --no-annotate --no-header --generate-hashes "$@"; }
made="# Made by deploy/lock.sh (make lock):"

if [ -n "${TORCH_INDEX:-}" ]; then
  name=torch-$(basename "$TORCH_INDEX").lock
  sed -n 's/^\(torch\|torchvision\)==\([^ ]*\).*/\1==\2/p' deploy/torch.lock > "$scratch/torch.in"
  # What the image has already keeps its version, and is not in the file.
  sed -n 's/^\([a-z0-9-]*==[^\\]*\).*/\1/p' deploy/requirements.lock > "$scratch/has.txt"
  # Of two builds of one version that with the longer name, such as 2.15.0+cpu, is the newer one.
  compile "$scratch/torch.in" --python-platform linux --constraint "$scratch/has.txt" \
    --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple \
    --index-strategy unsafe-best-match \
    $(sed 's/==.*//; s/^/--no-emit-package=/' "$scratch/has.txt") > "$scratch/$name"
  { echo "$made PyTorch from $TORCH_INDEX."; cat "$scratch/$name"; } > "deploy/$name"
  exit
fi

# What builds the wheel in the image belongs to what is installed there.
sed -n 's/^requires = \["\(.*\)"\]$/\1/p' pyproject.toml > "$scratch/build.txt"
compile pyproject.toml "$scratch/build.txt" --universal > "$scratch/all.txt"
awk -v torch="$scratch/torch.lock" -v rest="$scratch/requirements.lock" -v made="$made" '
  BEGIN { print made " PyTorch as PyPI has it." > torch; print made " all but PyTorch." > rest }
  /^[a-z]/ { to = /^(torch|torchvision|triton|cuda-[a-z-]*|nvidia-[a-z0-9-]*)==/ ? torch : rest }
  { print > to }' "$scratch/all.txt"
{
  echo "$made tools."
  printf '%s\n' build cyclonedx-bom pip-audit | cat - "$scratch/build.txt" | compile - --universal
} > "$scratch/tools.lock"
mv "$scratch"/*.lock deploy/
