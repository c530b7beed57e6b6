#!/usr/bin/env bash
# Makes the Debian package and looks at what is in it. Usage: test_package.sh BUILD
set -euo pipefail

build=$1
if ! command -v dpkg-deb >/dev/null || ! command -v dpkg-shlibdeps >/dev/null; then
    echo "skipped install_package: dpkg-deb or dpkg-shlibdeps (dpkg-dev) is not installed"
    exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cpack --config "$build/CPackConfig.cmake" -G DEB -B "$work" >"$work/log" || { cat "$work/log" && exit 1; }
package=$(find "$work" -maxdepth 1 -name 'megamoe_*.deb')
dpkg-deb --info "$package"
dpkg-deb --extract "$package" "$work/unpacked"
(cd "$work/unpacked" && find . ! -type d | sort) | tee "$work/files"

wanted='./usr/bin/megamoe
./usr/include/megamoe/megamoe.h
./usr/lib/(.*/)?libmegamoe\.so
./usr/lib/(.*/)?libmegamoe\.so\.[0-9.]*
./usr/lib/(.*/)?cmake/megamoe/megamoe-config\.cmake
./usr/lib/(.*/)?cmake/megamoe/megamoe-targets\.cmake
./usr/lib/(.*/)?pkgconfig/megamoe\.pc
./usr/share/bash-completion/completions/megamoe
./usr/share/man/man1/megamoe\.1\.gz
./usr/share/doc/megamoe/copyright
./usr/share/doc/megamoe/formats\.md'
status=0
while read -r pattern; do
    grep -qxE -- "${pattern}" "$work/files" || { echo "the package lacks $pattern" >&2 && status=1; }
done <<<"$wanted"
if grep -E 'sm100_on_model|\.a$|/test' "$work/files"; then
    echo "the package holds what only tests need" >&2
    status=1
fi
fields=$(dpkg-deb --field "$package" Depends)
for library in libc6 libjansson4; do
    [[ $fields =~ $library ]] || { echo "the package does not depend on $library: $fields" >&2 && status=1; }
done
# what is in the package runs from where it was unpacked, without the build
"$work/unpacked/usr/bin/megamoe" --version
exit "$status"
