#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# One full-size expert layer of a public model: from a checkpoint in the model's own file format to
# a verified result, with its speed beside the machine's ceilings.
# usage: scripts/demo.sh [BUILD_DIRECTORY]
set -eu

build=$(cd "${1:-$(dirname "$0")/../build/release}" && pwd)
tool=$build/tools/megamoe
if [ ! -x "$tool" ]; then
    echo "demo.sh: $tool is missing; build it first" >&2
    exit 2
fi
work=$(mktemp -d "$build/demo.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
cd "$work"

step() {
    printf '\n%s\n  $ megamoe' "$1"
    shift
    printf ' %s' "$@"
    printf '\n\n'
    "$tool" "$@"
}

step "1. A checkpoint: one layer of Qwen3-30B-A3B at full size, ModelOpt NVFP4, synthetic weights" \
    synth --model qwen3-30b-a3b --out checkpoint
step "2. What it holds" \
    inspect checkpoint
step "3. Packed for this machine, once; read ever after" \
    prepare checkpoint --out layer.mmoe
step "4. Run over four ranks, each row compared with the exact scalar reference" \
    run layer.mmoe --ranks 4 --tokens 64 --verify
step "5. Speed, beside what this machine can do at best" \
    bench layer.mmoe --tokens 1,16,64 --seconds 2
