/* SPDX-License-Identifier: Apache-2.0 */
/* Scales of activations. */
#include "num/input.h"

#include <math.h>
#include <stdlib.h>

#include "t.h"

T_CASE(block_exponent_is_the_smallest_that_fits) {
    /* By search: the smallest e with amax / 2^e <= 448, clamped. */
    for (uint32_t upper = 1; upper < 0x7F80; upper++) {
        const double amax = (double)mm_bf16_to_f32((uint16_t)upper);
        int expected = MM_BLOCK_EXPONENT_MIN;
        while (expected < MM_BLOCK_EXPONENT_MAX && ldexp(amax, -expected) > 448)
            expected++;
        if (!T_CHECK_MSG(mm_block_exponent(upper << 16) == expected, "amax %a: %d, expected %d",
                         amax, mm_block_exponent(upper << 16), expected))
            break;
    }
    T_EQ_INT(mm_block_exponent(0), 0);
}

T_CASE(block_exponent_at_its_boundaries) {
    T_EQ_INT(mm_block_exponent(mm_f32_bits(448.0f)), 0);
    T_EQ_INT(mm_block_exponent(mm_f32_bits(nextafterf(448.0f, 500.0f))), 1);
    T_EQ_INT(mm_block_exponent(mm_f32_bits(0x1p-149f)), MM_BLOCK_EXPONENT_MIN);
    T_EQ_INT(mm_block_exponent(mm_f32_bits(0x1.fffffep127f)), MM_BLOCK_EXPONENT_MAX);
}

T_CASE(token_scale_brings_the_largest_to_448) {
    for (uint32_t upper = 1; upper < 0x7F80; upper++) {
        const float amax = mm_bf16_to_f32((uint16_t)upper);
        const mm_token_scale s = mm_token_scale_of(amax);
        const double restored = (double)s.scale * (double)s.factor * 448;
        bool holds = mm_e4m3_from_f32(amax * s.lift * s.inverse) == 0x7E;
        holds = holds && fabs(restored - (double)amax) <= 0x1p-23 * (double)amax;
        holds = holds && s.lift * s.factor == 1.0f && (s.lift == 1.0f) == (amax >= 0x1p-100f);
        if (!T_CHECK_MSG(holds, "amax %a", (double)amax))
            break;
    }
}

T_CASE(int8_scale_brings_the_largest_to_127) {
    for (uint32_t bits = 1; bits < 0x7F800000; bits += bits < 0x00800000 ? 4097 : 65521) {
        const float amax = mm_f32_from_bits(bits);
        const mm_int8_scale s = mm_int8_scale_of(amax);
        bool holds = mm_int8_from_f32(amax * s.lift * s.inverse) == 127;
        holds = holds && mm_int8_from_f32(-amax * s.lift * s.inverse) == (uint8_t)-127;
        /* Scales below FP32's normals are multiples of 2^-149. */
        const double error = 0x1p-23 * (double)amax + 64 * 0x1p-149;
        holds = holds && fabs((double)s.scale * 127 - (double)amax) <= error;
        if (!T_CHECK_MSG(holds, "amax %a", (double)amax))
            break;
    }
}

T_CASE(int8_rounds_to_nearest_even) {
    for (int twice = -254; twice <= 254; twice++) {
        const double value = twice / 2.0;
        T_EQ_INT((int8_t)mm_int8_from_f32((float)value), (int)nearbyint(value));
        if (twice % 2 == 0 && abs(twice) < 254) {
            T_EQ_INT((int8_t)mm_int8_from_f32((float)value + 0.4375f), twice / 2);
            T_EQ_INT((int8_t)mm_int8_from_f32((float)value - 0.4375f), twice / 2);
        }
    }
}
