/* SPDX-License-Identifier: Apache-2.0 */
/* E8M0, the block scale of MXFP4: 2^(byte - 127); 255 is NaN and refused where weights are read. */
#ifndef MM_NUM_E8M0_H
#define MM_NUM_E8M0_H

#include <stdint.h>

#include "num/bf16.h"

enum { MM_E8M0_BIAS = 127, MM_E8M0_NAN = 255 };

/* Exact for every byte: 0 is an FP32 subnormal. */
static inline float mm_e8m0_to_f32(uint8_t byte) {
    if (byte == 0)
        return mm_f32_from_bits(0x00400000u);
    return mm_f32_from_bits(byte == MM_E8M0_NAN ? 0x7FC00000u : (uint32_t)byte << 23);
}

#endif
