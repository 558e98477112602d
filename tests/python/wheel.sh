#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A wheel is built from the checkout, holds the library, and works on its own: wheel.sh ROOT
# Takes the interpreter of scripts/python-env; exit status 77 without it.
set -euo pipefail
root=$1 python=$MEGAMOE_PYTHON_ENV/bin/python
[ -x "$python" ] || { echo "skipped: no $MEGAMOE_PYTHON_ENV; scripts/python-env makes it" && exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m pip wheel -q --no-deps --no-build-isolation --no-index -w "$work" \
    -C cmake.define.MEGAMOE_CUDA=OFF -C build-dir="$work/build" "$root/python"
"$python" -m pip install -q --no-deps --no-index --target "$work/site" "$work"/megamoe-*-py3-none-*.whl
unset MEGAMOE_LIBRARY
export PYTHONPATH=$work/site
cd "$work"
"$python" - "$work/site" <<'END'
import importlib.metadata, sys
import megamoe
assert megamoe.__file__.startswith(sys.argv[1]), megamoe.__file__
assert megamoe._lib._name.startswith(sys.argv[1]), megamoe._lib._name
assert megamoe.__version__ == importlib.metadata.version("megamoe"), megamoe.__version__
print("wheel:", megamoe.__version__, megamoe.Device().info()["tier"])
END
"$python" "$root/tests/python/test_layer.py"
