#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Every source file names its licence in its first two lines: spdx.sh ROOT
set -euo pipefail
. "$(dirname "$0")/files.sh"
cd "$1"

source_files | grep -zvE '\.(md|json|scd)$|(^|/)\.gitignore$' | xargs -0 awk '
    FNR == 1 { files++; named[FILENAME] = 0 }
    FNR <= 2 && /SPDX-License-Identifier: Apache-2.0/ { named[FILENAME] = 1 }
    END {
        for (file in named)
            if (!named[file]) {
                print file ": no SPDX line"
                failed = 1
            }
        print files " files"
        exit failed || files < 50
    }'
