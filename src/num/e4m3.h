/* SPDX-License-Identifier: Apache-2.0 */
/* E4M3 (fn): largest value 448, smallest 2^-9, no infinity; 0x7F and 0xFF are NaN. */
#ifndef MM_NUM_E4M3_H
#define MM_NUM_E4M3_H

#include <stdint.h>

#include "num/bf16.h"

enum { MM_E4M3_NAN = 0x7F };
#define MM_E4M3_MAX 448.0f

MM_NUM_INLINE float mm_e4m3_to_f32(uint8_t code) {
    const uint32_t magnitude = code & 0x7Fu;
    /* The fields of E4M3 lie inside those of FP32; 2^120 moves the exponent's bias. */
    const float value = mm_f32_from_bits(magnitude << 20) * 0x1p120f;
    const uint32_t bits = magnitude == MM_E4M3_NAN ? 0x7FC00000u : mm_f32_bits(value);
    return mm_f32_from_bits(bits | (uint32_t)(code & 0x80u) << 24);
}

/*
 * Round to nearest even. Finite magnitudes beyond 448 saturate; NaN and infinity give 0x7F, which
 * no finite value gives.
 */
MM_NUM_INLINE uint8_t mm_e4m3_from_f32(float value) {
    const uint32_t bits = mm_f32_bits(value);
    const uint32_t sign = bits >> 24 & 0x80u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    /* Subnormal results: adding 2^14 leaves the value in units of 2^-9 in the low bits, rounded. */
    const uint32_t subnormal = mm_f32_bits(mm_f32_from_bits(magnitude) + 0x1p14f) - 0x46800000u;
    const uint32_t normal = (magnitude + 0x7FFFFu + (magnitude >> 20 & 1u) - (120u << 23)) >> 20;
    uint32_t code = magnitude < 0x3C800000u ? subnormal : normal; /* 2^-6 */
    code = magnitude > 0x43E00000u ? 0x7Eu : code;                /* beyond 448 */
    return (uint8_t)(magnitude >= 0x7F800000u ? (uint32_t)MM_E4M3_NAN : sign | code);
}

#endif
