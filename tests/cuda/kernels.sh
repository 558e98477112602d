#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# How the kernels were compiled, from ptxas' own words, and what their sources must not use:
# kernels.sh SOURCES LOG...
set -euo pipefail
sources=$1
shift

failed=0
refuse() {
    echo "$1"
    failed=1
}

# NVLink multicast reduces in an order of its own, and some machines have none.
if grep -rn multimem "$sources"; then
    refuse "$sources uses multimem"
fi

forwards=0
for log in "$@"; do
    name=$(basename "$log" .log)
    [ -s "${log%.log}.cubin" ] || refuse "$name: no cubin"
    if grep -E 'Potential Performance Loss|C7508|C7510|C7513|C7514' "$log"; then
        refuse "$name: what ptxas did to it is above"
    fi
    if grep -E '[1-9][0-9]* bytes (stack frame|spill stores|spill loads|lmem)' "$log"; then
        refuse "$name: local memory"
    fi
    functions=$(grep -c 'Function properties for' "$log" || true)
    clean=$(grep -c '0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads' "$log" || true)
    if [ "$functions" = 0 ] || [ "$functions" != "$clean" ]; then
        refuse "$name: $clean of $functions functions without local memory"
    fi
    if [[ $name == forward_* ]]; then
        forwards=$((forwards + 1))
        grep -q "entry function 'mm_forward'" "$log" || refuse "$name: no mm_forward"
        registers=$(sed -n 's/.*Used \([0-9]*\) registers.*/\1/p' "$log")
        echo "$name: $registers registers"
    fi
done
echo "$# cubins, $forwards of them forwards"
[ "$failed" = 0 ] || exit 1
[ "$#" -gt 0 ] || {
    echo "this build has no kernels"
    exit 77
}
