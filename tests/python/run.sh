#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs a Python program with an interpreter that has the modules it needs: run.sh MODULES PROGRAM...
# MODULES are separated by commas. The environment that scripts/python-env makes comes first, in
# MEGAMOE_PYTHON_ENV. Exit status 77 where no interpreter has them.
set -u
modules=$1
shift
for python in "$MEGAMOE_PYTHON_ENV/bin/python" "${PYTHON:-python3}" /usr/bin/python3; do
    if "$python" -c "
import importlib.util, sys
sys.exit(any(importlib.util.find_spec(name) is None for name in '$modules'.split(',')))" 2>/dev/null
    then
        exec "$python" "$@"
    fi
done
echo "skipped: no Python here has $modules; scripts/python-env makes one that has"
exit 77
