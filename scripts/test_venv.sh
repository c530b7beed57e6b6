#!/usr/bin/env bash
# Makes the Python environment of the tests: numpy, safetensors, ml_dtypes, the independent writers of
# checkpoints.
set -euo pipefail

venv=$1
requirements=$(dirname "$0")/../tests/requirements.txt
if ! cmp -s "$requirements" "$venv/requirements.txt"; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$requirements"
    cp "$requirements" "$venv/requirements.txt"
fi
