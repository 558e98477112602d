/* SPDX-License-Identifier: Apache-2.0 */
/* mm_reciprocal for all of its domain: a significand a thread. */
#include "reciprocals.h"

#include "cuda/ptx/arithmetic.cuh"

extern "C" __global__ void reciprocals(reciprocals_found *found) {
    const uint32_t significand = blockIdx.x * RECIPROCALS_THREADS + threadIdx.x;
    unsigned long long tried = 0, wrong = 0;
    for (uint32_t exponent = 0; exponent <= 60; exponent++) {
        const float y = __uint_as_float((127 + exponent) << 23 | significand);
        if (y > 0x1p60f)
            break;
        tried++;
        /* FP64 has more than twice as many bits: to round twice is to round once. */
        if (mm_reciprocal(y) != (float)(1.0 / (double)y)) {
            wrong++;
            found->last = __float_as_uint(y);
        }
    }
    atomicAdd((unsigned long long *)&found->tried, tried);
    if (wrong)
        atomicAdd((unsigned long long *)&found->wrong, wrong);
}
