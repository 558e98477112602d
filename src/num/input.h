/* SPDX-License-Identifier: Apache-2.0 */
/* How activations become E4M3 or int8: the scales of docs/numerics.md, item 1. */
#ifndef MM_NUM_INPUT_H
#define MM_NUM_INPUT_H

#include <stdint.h>

#include "num/bf16.h"
#include "num/e4m3.h"

enum {
    MM_BLOCK_EXPONENT_MIN = -48, /* of callers' scales */
    MM_BLOCK_EXPONENT_MAX = 47,
    MM_BLOCK_EXPONENT_USUAL = -4, /* of most blocks; of those of zeros, or that are not finite */
    MM_BLOCK_BYTE_ZERO = 127,     /* E8M0 byte of exponent 0 */
    MM_BLOCK_CHANNELS = 128       /* channels under one scale of a block */
};

/*
 * The exponent of a block whose largest magnitude has these FP32 bits: the smallest of -44, -36,
 * ..., -4, 4, ..., 44 for which amax / 2^e fits E4M3, and then is above 1.75 unless the smallest of
 * all serves; the usual one where amax is 0, infinite or NaN. A grid as coarse costs no accuracy,
 * since E4M3 has 15 binades of normal values, and a token's blocks seldom differ on it.
 */
MM_NUM_INLINE int32_t mm_block_exponent(uint32_t amax_bits) {
    const int32_t e = (int32_t)(amax_bits >> 23) - 127 - 8 + ((amax_bits & 0x7FFFFFu) > 0x600000u);
    const int32_t up = ((e + 11) & -8) - 4;
    const int32_t low = up < -44 ? -44 : up;
    const int32_t clamped = low > 44 ? 44 : low;
    /* Positive and finite. */
    return amax_bits - 1 < 0x7F800000u - 1 ? clamped : MM_BLOCK_EXPONENT_USUAL;
}

/*
 * One scale for a token: x is multiplied by `lift`, then by `inverse`, to give codes; `scale` and
 * `factor` (the inverse of lift) enter the epilogue in this order.
 */
typedef struct mm_token_scale {
    float lift, inverse;
    float scale, factor;
} mm_token_scale;

/* amax: the row's largest magnitude, finite and not zero. */
MM_NUM_INLINE mm_token_scale mm_token_scale_of(float amax) {
    const int tiny = amax < 0x1p-100f;
    const float lift = tiny ? 0x1p64f : 1.0f;
    const float lifted = amax * lift;
    return (mm_token_scale){.lift = lift,
                            .inverse = MM_E4M3_MAX / lifted,
                            .scale = lifted / MM_E4M3_MAX,
                            .factor = tiny ? 0x1p-64f : 1.0f};
}

/* One scale for a block of int8 codes: x is multiplied by `lift`, then by `inverse`, and rounded.
 */
typedef struct mm_int8_scale {
    float lift, inverse;
    float scale;
} mm_int8_scale;

/* amax: the block's largest magnitude, finite and not zero. */
MM_NUM_INLINE mm_int8_scale mm_int8_scale_of(float amax) {
    const float most = 127.0f;
    const int tiny = amax < 0x1p-100f;
    const float lift = tiny ? 0x1p64f : 1.0f;
    const float lifted = amax * lift;
    return (mm_int8_scale){
        .lift = lift, .inverse = most / lifted, .scale = lifted / most * (tiny ? 0x1p-64f : 1.0f)};
}

/* Round to nearest even, for magnitudes below 127.5: the low bits of a sum with 1.5 * 2^23. */
MM_NUM_INLINE uint8_t mm_int8_from_f32(float value) {
    return (uint8_t)mm_f32_bits(value + 0x1.8p23f);
}

#endif
