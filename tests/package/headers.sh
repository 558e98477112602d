#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Each public header compiles alone as C11, C17 and C++17, without a warning: headers.sh ROOT CC
set -euo pipefail
root=$1 cc=$2
flags=(-Wall -Wextra -Wpedantic -Wshadow -Werror -fsyntax-only -I "$root/include")

languages=('c -std=c11' 'c -std=c17')
if echo 'int main() {}' | "$cc" -x c++ -fsyntax-only - 2>/dev/null; then
    languages+=('c++ -std=c++17')
else
    echo "$cc does not compile C++"
fi

failed=0
for header in "$root"/include/megamoe/*.h; do
    name=megamoe/$(basename "$header")
    for language in "${languages[@]}"; do
        # Twice, so that a missing guard shows.
        # shellcheck disable=SC2086
        printf '#include "%s"\n#include "%s"\nint use(void);\n' "$name" "$name" |
            "$cc" "${flags[@]}" -x $language - || { echo "$name: $language" && failed=1; }
    done
done
[ "$failed" = 0 ] && [ "${#languages[@]}" -lt 3 ] && exit 77
exit "$failed"
