#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What ranks write for each other has the scope of the system, in what the compiler makes of the
# forward: between GPUs a narrower one is wrong, and on one GPU nothing shows it.
# scopes.sh NVCC ROOT
set -euo pipefail
nvcc=$1
root=$2
[ -n "$nvcc" ] || {
    echo "this build has no kernels"
    exit 77
}
ptx=$(mktemp)
trap 'rm -f "$ptx"' EXIT

failed=0
for promote in 0 1; do
    "$nvcc" -ptx -arch=compute_90a -std=c++17 -I"$root/include" -I"$root/src" \
        -DMM_FORMAT=0 -DMM_N=16 -DMM_PROMOTE="$promote" -o "$ptx" "$root/src/cuda/kernels/forward.cu"
    # Words of one rank's thread blocks are counters, which are added to, not stored.
    if grep -nE '\bst\.(release|relaxed)\.(gpu|cta|cluster)' "$ptx"; then
        echo "promote $promote: the stores above are not visible to other GPUs"
        failed=1
    fi
    for needed in st.release.sys st.relaxed.sys ld.acquire.sys ld.relaxed.sys fence.acq_rel.sys; do
        n=$(grep -cF "$needed" "$ptx" || true)
        echo "promote $promote: $n times $needed"
        [ "$n" -gt 0 ] || failed=1
    done
done
exit "$failed"
