#!/usr/bin/env bash
# Usage: test_install.sh BUILD SOURCE CC
set -euo pipefail

build=$1 source=$2 cc=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/prefix" >/dev/null
library=$(dirname "$(find "$work/prefix" -name 'libmegamoe.so' | head -1)")

mkdir "$work/project"
cp "$source/consumer.c" "$work/project/"
cp "$source/consumer.cmake" "$work/project/CMakeLists.txt"
cmake -S "$work/project" -B "$work/by-cmake" -DCMAKE_C_COMPILER="$cc" -DCMAKE_PREFIX_PATH="$work/prefix" \
    >/dev/null
cmake --build "$work/by-cmake" >/dev/null
"$work/by-cmake/consumer"

export PKG_CONFIG_PATH=$library/pkgconfig
flags=$(pkg-config --define-variable=prefix="$work/prefix" --cflags --libs megamoe)
# shellcheck disable=SC2086 # the flags are words
"$cc" "$source/consumer.c" -o "$work/by-pkg-config" $flags
LD_LIBRARY_PATH=$library "$work/by-pkg-config"

installed=$(cd "$work/prefix" && find include -type f)
if [ "$installed" != include/megamoe/megamoe.h ]; then
    echo "more than the one header is installed: $installed" >&2
    exit 1
fi
if [ -x "$work/prefix/bin/megamoe" ]; then "$work/prefix/bin/megamoe" --version; fi
