#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Limits of length, no leftovers: hygiene.sh ROOT
set -euo pipefail
. "$(dirname "$0")/files.sh"
cd "$1"

source_files | xargs -0 awk '
    function refuse(what) {
        print FILENAME ":" FNR ": " what
        failed = 1
    }
    FNR == 1 { code = FILENAME ~ /\.(c|h|cu|cuh)$/ }
    FNR == 800 { refuse("800 lines are too many") }
    /[ \t]$/ { refuse("space at the end of a line") }
    code && /\t/ { refuse("a tab") }
    code && /(^|[^A-Za-z_])(TODO|FIXME|XXX|HACK)([^A-Za-z_]|$)/ { refuse("unfinished work") }
    END { exit failed }'
