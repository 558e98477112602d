# SPDX-License-Identifier: Apache-2.0
# For sourcing, at the root of the project: source_files lists its own text files, NUL between them.
source_files() {
    if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
        git ls-files -coz --exclude-standard
    else
        find . -type f -not -path './build*' -not -path './.git/*' -printf '%P\0'
    fi | grep -zvE '^((python/)?LICENSE|bench/results/.*|tests/fuzz/corpus/.*|docs/images/.*\.png)$' |
        while IFS= read -r -d '' file; do
            # git also lists what was deleted a moment ago.
            [ ! -f "$file" ] || printf '%s\0' "$file"
        done
}
