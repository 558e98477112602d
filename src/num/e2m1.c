/* SPDX-License-Identifier: Apache-2.0 */
#include "num/e2m1.h"

#include <math.h>

uint8_t mm_e2m1_from_f32(float value) {
    /* Midpoints between neighbouring codes; a tie goes to the even code. */
    static const float midpoint[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    const float magnitude = fabsf(value);
    uint8_t code = 0;
    for (int i = 0; i < 7; i++)
        if (magnitude > midpoint[i] || (magnitude == midpoint[i] && (i & 1)))
            code = (uint8_t)(i + 1);
    return (uint8_t)(code | (signbit(value) ? 8u : 0u));
}
