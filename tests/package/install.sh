#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# An installed copy is complete and others can build with it, by pkg-config and by CMake, shared and
# static: install.sh BUILD PREFIX LIBDIR CC
set -euo pipefail
build=$1 prefix=$2 libdir=$3 cc=$4
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

DESTDIR=$work/root cmake --install "$build" >"$work/log" || { cat "$work/log" && exit 1; }
installed=$work/root$prefix
library=$installed/$libdir

failed=0
for file in include/megamoe/megamoe.h bin/megamoe "$libdir/libmegamoe.so" "$libdir/libmegamoe.a" \
    "$libdir/pkgconfig/megamoe.pc" "$libdir/cmake/megamoe/megamoeConfig.cmake" \
    "$libdir/cmake/megamoe/megamoeConfigVersion.cmake" \
    share/bash-completion/completions/megamoe share/zsh/site-functions/_megamoe; do
    [ -e "$installed/$file" ] || { echo "not installed: $file" && failed=1; }
done
if command -v scdoc >/dev/null; then
    commands=$("$installed/bin/megamoe" --help | sed -n 's/^  \([a-z]*\)  .*/\1/p')
    [ -n "$commands" ] || { echo 'the tool lists no commands' && failed=1; }
    for page in man1/megamoe.1 man5/megamoe-formats.5 \
        $(sed 's|.*|man1/megamoe-&.1|' <<<"$commands"); do
        # A whole page begins with its title and ends with this section.
        file=$installed/share/man/$page name=$(basename "${page%.*}")
        grep -qs "^\.TH \"$name\"" "$file" && grep -q '^\.SH SEE ALSO' "$file" ||
            { echo "not installed, or not whole: $page" && failed=1; }
    done
fi
[ "$failed" = 0 ] || exit 1
while IFS= read -r header; do
    [ -e "$installed/include/megamoe/$(basename "$header")" ] || {
        echo "not installed: $header"
        exit 1
    }
done < <(find "$here/../../include/megamoe" -name '*.h')

version=$("$installed/bin/megamoe" --version)
echo "tool: $version"

export PKG_CONFIG_PATH=$library/pkgconfig
number=$(pkg-config --modversion megamoe)
# The prefix in the file is that of the system, not of this copy.
pc() { pkg-config --define-variable=prefix="$installed" "$@" megamoe; }

# shellcheck disable=SC2046
"$cc" -Wall -Werror "$here/consumer/main.c" $(pc --cflags --libs) -o "$work/shared"
# The archive beside shared dependencies: `pkg-config --static` would want theirs as archives too.
# shellcheck disable=SC2046
"$cc" -Wall -Werror "$here/consumer/main.c" $(pc --cflags) "$library/libmegamoe.a" \
    $(pkg-config --libs $(pc --print-requires-private)) -pthread -lm -o "$work/static"
cmake -S "$here/consumer" -B "$work/consumer" -DCMAKE_PREFIX_PATH="$installed" \
    -DCMAKE_C_COMPILER="$cc" >"$work/log" && cmake --build "$work/consumer" >>"$work/log" ||
    { cat "$work/log" && exit 1; }

run() {
    local output
    output=$("$@")
    [ "$output" = "$number" ] || { echo "$1 prints $output, not $number" && exit 1; }
    echo "$(basename "$1"): ok"
}
LD_LIBRARY_PATH=$library run "$work/shared"
run "$work/static"
run "$work/consumer/consumer_shared"
run "$work/consumer/consumer_static"
