#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Writes what is shown of bench/results/: its tables of GPUs, and the pictures in docs/images.
# pages.sh [TOOL]; TOOL is the megamoe command, by default that of the release build.
#
# Of a folder h200 they are made of the files SHAPE-mxfp4.json, beside which SHAPE-FORM.json of other
# forms may lie, of SHAPE-mxfp4-curve.json by itself, and of traces SHAPE-TOKENS-trace.json.
set -eu
cd "$(dirname "$0")/.."
tool=${1:-build/release/tools/megamoe}
results=bench/results
mkdir -p docs/images

# picture NAME KIND FILE...: with the licence in its second line, and a line for each group.
picture() {
    out=docs/images/$1.svg
    kind=$2
    shift 2
    "$tool" plot "$@" --kind "$kind" --out "$out.new.svg"
    {
        head -n 1 "$out.new.svg"
        echo '<!-- SPDX-License-Identifier: Apache-2.0 -->'
        tail -n +2 "$out.new.svg" | tr -s ' \t\n' ' ' | sed 's/> *<g /> \n<g /g; s/ *$/\n/' | sed 's/ *$//'
    } >"$out"
    rm "$out.new.svg"
}

for first in "$results"/h200/*-mxfp4.json; do
    shape=$(basename "$first" -mxfp4.json)
    set -- "$first"
    for form in mxfp4-block nvfp4-exact nvfp4-folded; do
        [ ! -e "$results/h200/$shape-$form.json" ] || set -- "$@" "$results/h200/$shape-$form.json"
    done
    for kind in latency roofline ratio; do
        [ "$kind $#" = "ratio 1" ] || picture "h200-$shape-$kind" "$kind" "$@"
    done
done
for curve in "$results"/h200/*-mxfp4-curve.json; do
    [ ! -e "$curve" ] || picture "h200-$(basename "$curve" -mxfp4-curve.json)-curve" latency "$curve"
done
for trace in "$results"/h200/*-trace.json; do
    [ ! -e "$trace" ] || "$tool" plot "$trace" --out "docs/images/h200-$(basename "$trace" .json).png"
done
for folder in h200 h200-x2; do
    bench/report_gpu.py "$results/$folder" >"$results/$folder/README.md.new"
    mv "$results/$folder/README.md.new" "$results/$folder/README.md"
done
