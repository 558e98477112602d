#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A wheel is built from the checkout, and in a clean environment, outside of the checkout, passes the
# tests that need numpy alone: wheel.sh ROOT [CUBINS FAKE_DRIVER]
# With CUBINS, the folder of those that this build has compiled, it has CUDA kernels, and a driver that
# computes nothing opens them; without it is for CPUs and says so.
# Takes the interpreter of scripts/python-env; exit status 77 without it.
set -euo pipefail
root=$1 cubins=${2:-} fake_driver=${3:-}
base=$MEGAMOE_PYTHON_ENV/bin/python
[ -x "$base" ] || { echo "skipped: no $MEGAMOE_PYTHON_ENV; scripts/python-env makes it" && exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

options=(-C cmake.define.MEGAMOE_CUDA=OFF)
if [ -n "$cubins" ]; then
    options=(-C cmake.define.MEGAMOE_CUDA=ON -C cmake.define.MEGAMOE_CUBINS="$cubins")
fi
unset PYTHONPATH MEGAMOE_LIBRARY
"$base" -m pip wheel -q --no-deps --no-build-isolation --no-index -w "$work" "${options[@]}" \
    -C build-dir="$work/build" "$root/python"
wheel=("$work"/megamoe-*-py3-none-linux_*.whl)
du -h "${wheel[0]}" | cut -f1

# numpy is there already, so that nothing is downloaded; torch and transformers are not.
"$base" -m venv "$work/clean"
there=$("$base" -c 'import pathlib, numpy; print(pathlib.Path(numpy.__file__).parents[1])')
here=$("$work/clean/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
ln -s "$there"/numpy "$there"/numpy[-.]* "$here/"
"$work/clean/bin/python" -m pip install -q --no-index "${wheel[0]}"

mkdir "$work/tests"
cp "$root"/tests/python/{common,test_abi,test_layer,test_quantize,test_ranks,test_cuda}.py \
    "$root/examples/python/01_numpy_layer.py" "$work/tests/"
cd "$work/tests"
python() { "$work/clean/bin/python" "$@"; }
python - "$here" "$cubins" <<'END'
import importlib.metadata, sys
import megamoe
site, cubins = sys.argv[1:]
assert megamoe.__file__.startswith(site), megamoe.__file__
assert megamoe._lib._name.startswith(site), megamoe._lib._name
assert megamoe.__version__ == importlib.metadata.version("megamoe"), megamoe.__version__
files = {str(file).partition("/")[2] for file in importlib.metadata.files("megamoe")}
assert {"py.typed", "licenses/LICENSE", "libmegamoe.so"} <= files, files
assert megamoe.cuda_built() == bool(cubins)
if not cubins:
    try:
        megamoe.Device("cuda")
        sys.exit("a build without kernels opened a GPU")
    except megamoe.UnsupportedError as error:
        assert "no CUDA kernels" in str(error), error
print("wheel:", megamoe.__version__, megamoe.Device().info()["tier"],
      "with CUDA kernels" if cubins else "without CUDA kernels")
END
for test in abi layer quantize ranks; do
    python "test_$test.py"
done
if [ -n "$cubins" ]; then
    LD_LIBRARY_PATH=$fake_driver python test_cuda.py
fi
python 01_numpy_layer.py
