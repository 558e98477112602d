/* SPDX-License-Identifier: Apache-2.0 */
/* E2M1, the 4-bit float of MXFP4 and NVFP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign. */
#ifndef MM_NUM_E2M1_H
#define MM_NUM_E2M1_H

#include <stdint.h>

static inline float mm_e2m1_to_f32(unsigned code) {
    static const float magnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return code & 8u ? -magnitude[code & 7u] : magnitude[code & 7u];
}

/* Round to nearest, ties to the even code; magnitudes beyond 6 saturate. NaN is not an input. */
uint8_t mm_e2m1_from_f32(float value);

#endif
