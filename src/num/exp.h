/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The exponential of the numerics contract: the same FP32 operations on every backend, at most
 * 1 ulp from exp(x), IEEE overflow and gradual underflow, NaN through.
 */
#ifndef MM_NUM_EXP_H
#define MM_NUM_EXP_H

#include <math.h>
#include <stdint.h>

#include "num/bf16.h"

/* 2^n for n in -126..127. */
MM_NUM_INLINE float mm_exp2i(int32_t n) {
    return mm_f32_from_bits((uint32_t)(n + 127) << 23);
}

/* exp(x) = y 2^*exponent with y near 1, for x in -105..89. (For NaN y is, *exponent arbitrary.) */
MM_NUM_INLINE float mm_exp_split(float x, int32_t *exponent) {
    /* n = round(x / ln 2): the magic number leaves it in the low bits of an FP32. */
    const float shifted = fmaf(x, 0x1.715476p+0f, 0x1.8p23f);
    const float n = shifted - 0x1.8p23f;
    *exponent = (int32_t)(mm_f32_bits(shifted) - 0x4B400000u);
    /* ln 2 in two parts; the first has trailing zeros, so n * part is exact. */
    float r = fmaf(n, -0x1.62e4p-1f, x);
    r = fmaf(n, -0x1.7f7d1cp-20f, r);
    /* exp(r), minimax on |r| <= ln(2) / 2, relative error 2^-28. */
    float y = 0x1.6b6df0p-10f;
    y = fmaf(y, r, 0x1.122fbap-7f);
    y = fmaf(y, r, 0x1.555688p-5f);
    y = fmaf(y, r, 0x1.5554a4p-3f);
    y = fmaf(y, r, 0.5f);
    y = fmaf(y, r, 1.0f);
    return fmaf(y, r, 1.0f);
}

MM_NUM_INLINE float mm_expf(float x) {
    /* exp(89) overflows and exp(-105) rounds to zero; beyond them nothing changes. */
    x = x > 89.0f ? 89.0f : x;
    x = x < -105.0f ? -105.0f : x;
    int32_t exponent;
    const float y = mm_exp_split(x, &exponent);
    /* Two factors keep 2^n in range; only the second product can round. */
    const int32_t first = exponent / 2;
    return y * mm_exp2i(first) * mm_exp2i(exponent - first);
}

#endif
