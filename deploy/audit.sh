#!/bin/sh
# Asks a public service for known holes in what the image installs; `make audit` and releases call it.
# Any hole, of whatever severity, ends it with an error. Flower decides the versions of fastapi,
# starlette and uvicorn, which serve the public port, so these are named first.
set -eu
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
${PYTHON:-python3} -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet --disable-pip-version-check pip-audit

echo "at the public port:"
for name in fastapi starlette uvicorn flwr; do
  grep "^$name==" deploy/requirements.lock | cut -d ' ' -f 1
done
"$scratch/venv/bin/pip-audit" --require-hashes --disable-pip -r deploy/requirements.lock
"$scratch/venv/bin/pip-audit" --no-deps --disable-pip -r deploy/torch.txt
