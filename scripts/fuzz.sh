#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs each fuzzer of build/fuzz for SECONDS, one after the other, from the inputs in
# tests/fuzz/corpus; what it finds on the way stays in build/fuzz/corpus: fuzz.sh SECONDS [NAME...]
set -eu
cd "$(dirname "$0")/.."
seconds=$1
shift
# shellcheck disable=SC2046 # names of fuzzers are words
[ $# -gt 0 ] || set -- $(ls tests/fuzz/corpus)

for name; do
    echo "== $name, $seconds s"
    mkdir -p "build/fuzz/corpus/$name"
    "build/fuzz/tests/fuzz/fuzz_$name" -max_total_time="$seconds" -timeout=20 -print_final_stats=1 \
        -artifact_prefix="build/fuzz/$name-" \
        "build/fuzz/corpus/$name" "tests/fuzz/corpus/$name"
done
