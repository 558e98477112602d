/* SPDX-License-Identifier: Apache-2.0 */
/* FP32 operations without branches. */
#ifndef MM_CUDA_PTX_ARITHMETIC_CUH
#define MM_CUDA_PTX_ARITHMETIC_CUH

#include "cuda/ptx/barrier.cuh"

/* 1 / y rounded to nearest, for y in 1..2^60 (all of them: tests/cuda/gpu_reciprocals.c). */
MM_DEVICE float mm_reciprocal(float y) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(y));
    return __fmaf_rn(__fmaf_rn(-y, r, 1.0f), r, r);
}

/* The smaller and the larger, or NaN. */
MM_DEVICE float mm_min(float x, float y) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
    return result;
}

MM_DEVICE float mm_max(float x, float y) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
    return result;
}

#endif
