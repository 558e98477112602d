/* SPDX-License-Identifier: Apache-2.0 */
/* BF16: the upper half of an FP32. */
#ifndef MM_NUM_BF16_H
#define MM_NUM_BF16_H

#include <stdint.h>
#include <string.h>

#include "num/inline.h"

MM_NUM_INLINE uint32_t mm_f32_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

MM_NUM_INLINE float mm_f32_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

MM_NUM_INLINE float mm_bf16_to_f32(uint16_t bits) {
    return mm_f32_from_bits((uint32_t)bits << 16);
}

/* Round to nearest even; NaN stays NaN. */
MM_NUM_INLINE uint16_t mm_bf16_from_f32(float value) {
    const uint32_t bits = mm_f32_bits(value);
    const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    const uint32_t nan = bits >> 16 | 0x40u;
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
}

#endif
