#!/usr/bin/env bash
# Installs the Debian packages that are missing to build (build) or also to test (test). Does nothing, and
# needs no rights, when all are there.
set -euo pipefail

packages=(gcc cmake ninja-build pkg-config libjansson-dev)
if [ "${1:-build}" = test ]; then
    packages+=(g++ libcmocka-dev python3 python3-venv binutils git)
fi

missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' ||
        missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "missing: ${missing[*]}; install them as root, or install sudo" >&2
        exit 1
    fi
    as_root=(sudo)
fi
echo "installing: ${missing[*]}"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
