#!/bin/sh
# Renews deploy/requirements.lock and deploy/torch.txt; `make lock` calls it.
#
# The lock has the version and the hashes of everything that the image installs, for Python 3.11 and
# newer on any platform. torch and torchvision are pinned in torch.txt, by version alone: each index
# (CPU, or a CUDA version) has builds, and CUDA libraries, of its own with hashes of their own.
set -eu
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# What builds the wheel in the image belongs to what is installed there.
sed -n 's/^requires = \["\(.*\)"\]$/\1/p' pyproject.toml > "$scratch/build.txt"
compile() {
  uv pip compile pyproject.toml "$scratch/build.txt" --quiet --universal --python-version 3.11 \
    --no-annotate --no-header "$@"
}

compile -o "$scratch/all.txt"
sed -n 's/ .*//; /^torch==/p; /^torchvision==/p' "$scratch/all.txt" > "$scratch/torch.txt"
set -- $(sed -n 's/^\(\(torch\|torchvision\|triton\|cuda-[a-z-]*\|nvidia-[a-z0-9-]*\)\)==.*/--no-emit-package=\1/p' \
  "$scratch/all.txt")
{
  echo "# Made by deploy/lock.sh (make lock): all that the image installs but torch and torchvision."
  compile --generate-hashes "$@"
} > "$scratch/requirements.lock"
mv "$scratch/torch.txt" "$scratch/requirements.lock" deploy/
