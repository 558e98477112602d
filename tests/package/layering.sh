#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A folder of src/ includes only headers of its own and of those above it in this list, tools/, mpi/
# and examples/ only public headers, and public headers only their neighbours: layering.sh ROOT
set -euo pipefail
cd "$1"
layers=(base num router weights checkpoint plan comm cpu cuda layer)

failed=0
refuse() {
    echo "$1 includes $2"
    failed=1
}

# Lines of "FILE HEADER" for the quoted includes under a folder.
includes_of() {
    find "$1" \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
        xargs -0r sed -n 's/^ *# *include *"\(.*\)".*/\1/;T;F;p' | paste -d ' ' - -
}

for folder in src/*/; do
    name=$(basename "$folder")
    [ -n "$(find "$folder" -name '*.[ch]' -print -quit)" ] || continue
    allowed=' megamoe '
    for layer in "${layers[@]}"; do
        allowed+="$layer "
        [ "$layer" = "$name" ] && break
    done
    [ "$layer" = "$name" ] || refuse "$folder" "what it likes: it is no known layer"
    while read -r file header; do
        [[ $allowed == *" ${header%%/*} "* && $header == */* ]] || refuse "$file" "$header"
    done < <(includes_of "$folder")
done

for folder in tools mpi examples; do
    while read -r file header; do
        [[ $header == megamoe/* || ($header != */* && -f $folder/$header) ]] || refuse "$file" "$header"
    done < <(includes_of "$folder")
done

while read -r file header; do
    [ -f "include/megamoe/$header" ] || refuse "$file" "$header"
done < <(includes_of include)
exit "$failed"
