/* SPDX-License-Identifier: Apache-2.0 */
/* Scales of activations. */
#include "num/input.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "t.h"

T_CASE(block_exponent_is_the_smallest_of_every_eighth_that_fits) {
    for (uint32_t upper = 1; upper < 0x7F80; upper++)
        for (uint32_t low = 0; low < 3;
             low++) { /* also beside the powers of two and 1.75 of them */
            const uint32_t bits = (upper << 16) + low - 1;
            const double amax = (double)mm_f32_from_bits(bits);
            int expected = -44;
            while (expected < 44 && ldexp(amax, -expected) > 448)
                expected += 8;
            if (!T_CHECK_MSG(mm_block_exponent(bits) == expected, "amax %a: %d, expected %d", amax,
                             mm_block_exponent(bits), expected))
                return;
        }
}

T_CASE(block_exponent_at_its_boundaries) {
    T_EQ_INT(mm_block_exponent(0), MM_BLOCK_EXPONENT_USUAL);
    T_EQ_INT(mm_block_exponent(mm_f32_bits(28.0f)), MM_BLOCK_EXPONENT_USUAL);
    T_EQ_INT(mm_block_exponent(mm_f32_bits(nextafterf(28.0f, 30.0f))), MM_BLOCK_EXPONENT_USUAL + 8);
    T_EQ_INT(mm_block_exponent(mm_f32_bits(0.109375f)), MM_BLOCK_EXPONENT_USUAL - 8);
    T_EQ_INT(mm_block_exponent(mm_f32_bits(0x1p-149f)), -44);
    T_EQ_INT(mm_block_exponent(mm_f32_bits(0x1.fffffep127f)), 44);
    T_EQ_INT(mm_block_exponent(mm_f32_bits(INFINITY)), MM_BLOCK_EXPONENT_USUAL);
    T_EQ_INT(mm_block_exponent(mm_f32_bits(NAN)), MM_BLOCK_EXPONENT_USUAL);
}

/* Relative L2 error of blocks of SwiGLU values under 2^up times the smallest power of two that
 * fits.
 */
static double error_under(int up) {
    t_random random = t_random_start(1);
    double error = 0, norm = 0;
    for (int block = 0; block < 4000; block++) {
        float h[MM_BLOCK_CHANNELS], amax = 0;
        for (int i = 0; i < MM_BLOCK_CHANNELS; i++) {
            const double g = t_normal(&random), u = t_normal(&random);
            h[i] = (float)(g / (1 + exp(-g)) * u);
            amax = fmaxf(amax, fabsf(h[i]));
        }
        int exponent = up - 60;
        while (ldexpf(amax, up - exponent) > 448)
            exponent++;
        for (int i = 0; i < MM_BLOCK_CHANNELS; i++) {
            const uint8_t code = mm_e4m3_from_f32(ldexpf(h[i], -exponent));
            const double value = (double)ldexpf(mm_e4m3_to_f32(code), exponent);
            error += (value - (double)h[i]) * (value - (double)h[i]);
            norm += (double)h[i] * (double)h[i];
        }
    }
    return sqrt(error / norm);
}

T_CASE(coarse_exponents_cost_no_accuracy) {
    const double least = error_under(0);
    for (int up = 0; up <= 12; up++) {
        const double error = error_under(up);
        printf("  2^%-2d times the smallest power of two: %.3f %%\n", up, 100 * error);
        T_CHECK_MSG(up > 7 || error < 1.001 * least, "2^%d", up);
    }
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
