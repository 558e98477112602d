#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The functions that the headers declare, those of the version script, those that the shared library
# exports and those that the archive defines are the same: symbols.sh ROOT LIBRARY ARCHIVE NM
set -euo pipefail
root=$1 library=$2 archive=$3 nm=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cat "$root"/include/megamoe/*.h | tr '\n' ' ' | grep -o 'MEGAMOE_API [^;(]*(' |
    grep -o 'megamoe_[a-z0-9_]*($' | tr -d '(' | sort >"$work/declared"
grep -o '^ *[A-Za-z0-9_]*;' "$root/cmake/megamoe.map" | tr -d ' ;' | sort >"$work/mapped"
"$nm" -D --defined-only "$library" | awk '$2 != "A" {sub(/@.*/, "", $3); print $3}' |
    sort >"$work/exported"
"$nm" -g --defined-only "$archive" | awk 'NF == 3 {print $3}' | sort >"$work/archived"

failed=0
[ "$(wc -l <"$work/declared")" -gt 50 ] || { echo "too few declarations were found" && failed=1; }
if duplicates=$(uniq -d "$work/declared" | grep .); then
    echo "declared twice: $duplicates"
    failed=1
fi
for list in mapped exported archived; do
    echo "declared (<) and $list (>):"
    diff "$work/declared" "$work/$list" || failed=1
done
if grep -v '^megamoe_' "$work/exported" "$work/archived"; then
    failed=1
fi
exit "$failed"
