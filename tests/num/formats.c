/* SPDX-License-Identifier: Apache-2.0 */
/* Every code of every format against its definition in doubles, and rounding by search. */
#include <math.h>

#include "num/bf16.h"
#include "num/e2m1.h"
#include "num/e4m3.h"
#include "num/e8m0.h"
#include "t.h"

/* The value of a minifloat without infinities, from its fields. */
static double value_of(unsigned code, int exponent_bits, int mantissa_bits, int bias) {
    const unsigned mantissa = code & ((1u << mantissa_bits) - 1);
    const int exponent = (int)(code >> mantissa_bits & ((1u << exponent_bits) - 1));
    const double sign = code >> (exponent_bits + mantissa_bits) & 1 ? -1 : 1;
    const double fraction = ldexp(mantissa, -mantissa_bits);
    return exponent ? sign * ldexp(1 + fraction, exponent - bias)
                    : sign * ldexp(fraction, 1 - bias);
}

static double e2m1_value(unsigned code) {
    return value_of(code, 2, 1, 1);
}

static double e4m3_value(unsigned code) {
    return value_of(code, 4, 3, 7);
}

/* The nearest of codes 0..last, a tie to the even one, with the sign bit where x has it. */
static unsigned nearest(double x, double (*value)(unsigned), unsigned last, unsigned sign_bit) {
    const double magnitude = fmin(fabs(x), value(last)); /* keeps the distances exact enough */
    unsigned best = 0;
    for (unsigned code = 1; code <= last; code++) {
        const double here = fabs(magnitude - value(code));
        const double there = fabs(magnitude - value(best));
        if (here < there || (here == there && code % 2 == 0))
            best = code;
    }
    return best | (signbit(x) ? sign_bit : 0);
}

T_CASE(e2m1_of_every_code) {
    const double listed[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    for (unsigned code = 0; code < 16; code++) {
        const double value = (double)mm_e2m1_to_f32(code);
        T_EQ_F64(value, e2m1_value(code));
        T_EQ_F64(fabs(value), listed[code & 7]);
        T_EQ_INT(signbit(value) != 0, code >> 3);
        T_EQ_HEX(mm_e2m1_from_f32((float)value), code);
    }
}

static void check_e2m1(float x) {
    if (!T_CHECK_MSG(mm_e2m1_from_f32(x) == nearest((double)x, e2m1_value, 7, 8), "E2M1 of %a",
                     (double)x))
        t_leave();
}

T_CASE(e2m1_rounds_to_nearest_even) {
    for (unsigned code = 0; code < 7; code++) {
        const float middle = (float)((e2m1_value(code) + e2m1_value(code + 1)) / 2);
        for (int sign = -1; sign <= 1; sign += 2) {
            check_e2m1((float)sign * middle);
            check_e2m1((float)sign * nextafterf(middle, 0));
            check_e2m1((float)sign * nextafterf(middle, INFINITY));
        }
    }
    for (uint32_t upper = 0; upper < 0x10000; upper++)
        if ((upper & 0x7F80) != 0x7F80)
            check_e2m1(mm_bf16_to_f32((uint16_t)upper));
    T_EQ_HEX(mm_e2m1_from_f32(INFINITY), 7);
    T_EQ_HEX(mm_e2m1_from_f32(-INFINITY), 15);
}

T_CASE(e4m3_of_every_code) {
    for (unsigned code = 0; code < 256; code++) {
        const double value = (double)mm_e4m3_to_f32((uint8_t)code);
        if ((code & 0x7F) == MM_E4M3_NAN) {
            T_CHECK(isnan(value));
            continue;
        }
        T_EQ_F64(value, e4m3_value(code));
        T_EQ_INT(signbit(value) != 0, code >> 7);
        T_EQ_HEX(mm_e4m3_from_f32((float)value), code);
    }
    T_EQ_F64((double)mm_e4m3_to_f32(0x7E), 448.0);
    T_EQ_F64((double)mm_e4m3_to_f32(0x01), 0x1p-9);
}

static void check_e4m3(float x) {
    const unsigned expected = isfinite(x) ? nearest((double)x, e4m3_value, 0x7E, 0x80) : 0x7Fu;
    const unsigned got = mm_e4m3_from_f32(x);
    if (!T_CHECK_MSG(got == expected, "E4M3 of %a: 0x%02x, expected 0x%02x", (double)x, got,
                     expected))
        t_leave();
}

T_CASE(e4m3_of_every_bf16) {
    for (uint32_t bits = 0; bits < 0x10000; bits++)
        check_e4m3(mm_bf16_to_f32((uint16_t)bits));
}

T_CASE(e4m3_rounds_to_nearest_even) {
    for (unsigned code = 0; code < 0x7E; code++) {
        const float middle = (float)((e4m3_value(code) + e4m3_value(code + 1)) / 2);
        for (int sign = -1; sign <= 1; sign += 2) {
            check_e4m3((float)sign * middle);
            check_e4m3((float)sign * nextafterf(middle, 0));
            check_e4m3((float)sign * nextafterf(middle, INFINITY));
        }
    }
}

T_CASE(e4m3_of_random_floats) {
    t_random random = t_random_start(0);
    for (int i = 0; i < 200000; i++)
        check_e4m3(mm_f32_from_bits((uint32_t)t_u64(&random)));
    for (int i = 0; i < 200000; i++)
        check_e4m3((float)(t_normal(&random) * exp2((int)t_below(&random, 24) - 14)));
}

T_CASE(e4m3_saturates_but_keeps_nan_apart) {
    T_EQ_HEX(mm_e4m3_from_f32(448.0f), 0x7E);
    T_EQ_HEX(mm_e4m3_from_f32(464.0f), 0x7E);
    T_EQ_HEX(mm_e4m3_from_f32(1e38f), 0x7E);
    T_EQ_HEX(mm_e4m3_from_f32(-3.4e38f), 0xFE);
    T_EQ_HEX(mm_e4m3_from_f32(INFINITY), 0x7F);
    T_EQ_HEX(mm_e4m3_from_f32(-INFINITY), 0x7F);
    T_EQ_HEX(mm_e4m3_from_f32(NAN), 0x7F);
    T_EQ_HEX(mm_e4m3_from_f32(-NAN), 0x7F);
    T_EQ_HEX(mm_e4m3_from_f32(mm_f32_from_bits(0x7F800001u)), 0x7F);
}

T_CASE(e4m3_holds_e2m1_times_powers_of_two) {
    for (int k = -9; k <= 8; k++) {
        bool exact = true;
        for (unsigned code = 0; code < 16; code++) {
            const float value = (float)ldexp(e2m1_value(code), k);
            exact = exact && mm_e4m3_to_f32(mm_e4m3_from_f32(value)) == value;
        }
        T_CHECK_MSG(exact == (k >= -8 && k <= 6), "k = %d", k);
    }
}

T_CASE(e8m0_of_every_byte) {
    for (unsigned byte = 0; byte < 255; byte++)
        T_EQ_F64((double)mm_e8m0_to_f32((uint8_t)byte), ldexp(1, (int)byte - 127));
    T_CHECK(isnan(mm_e8m0_to_f32(255)));
}

T_CASE(bf16_of_every_code) {
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        const float value = mm_bf16_to_f32((uint16_t)bits);
        const int exponent = (int)(bits >> 7 & 0xFF);
        if (exponent < 255)
            T_EQ_F64((double)value, value_of(bits, 8, 7, 127));
        else
            T_CHECK(bits & 0x7F ? isnan(value) : isinf(value));
        T_EQ_INT(signbit(value) != 0, bits >> 15);
        const uint16_t back = mm_bf16_from_f32(value);
        /* A signalling NaN may come back quiet. */
        if (isnan(value))
            T_CHECK((back & 0x7F80) == 0x7F80 && (back & 0x7F) != 0 && back >> 15 == bits >> 15);
        else
            T_EQ_HEX(back, bits);
    }
}

static void check_bf16(uint32_t bits) {
    const double x = (double)mm_f32_from_bits(bits);
    const uint16_t got = mm_bf16_from_f32(mm_f32_from_bits(bits));
    if (isnan(x)) {
        T_CHECK_MSG((got & 0x7F80) == 0x7F80 && got & 0x7F, "BF16 of NaN 0x%08" PRIx32, bits);
        return;
    }
    /* Neighbours toward zero and away from it; 2^128 stands for infinity. */
    const uint32_t below = bits >> 16;
    const uint32_t above = below + 1;
    const double below_distance = fabs(x - value_of(below, 8, 7, 127));
    const double above_distance = fabs(x - value_of(above, 8, 7, 127));
    uint32_t expected = below_distance < above_distance ? below : above;
    if (below_distance == above_distance)
        expected = below % 2 ? above : below;
    if (isinf(x))
        expected = below;
    if (!T_CHECK_MSG(got == expected, "BF16 of %a: 0x%04x, expected 0x%04" PRIx32, x, got,
                     expected))
        t_leave();
}

T_CASE(bf16_rounds_to_nearest_even) {
    const uint32_t lower[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
    for (uint32_t upper = 0; upper < 0x10000; upper++)
        for (size_t i = 0; i < sizeof lower / sizeof *lower; i++)
            check_bf16(upper << 16 | lower[i]);
    t_random random = t_random_start(1);
    for (int i = 0; i < 1000000; i++)
        check_bf16((uint32_t)t_u64(&random));
}

T_CASE(published_row_of_deepseek) {
    const uint8_t bytes[8] = {0xa0, 0xa8, 0xec, 0x4a, 0xad, 0xaf, 0x42, 0xaa};
    const double expected[16] = {0,         -.0078125, 0,         -.0078125, -.015625, -.03125,
                                 -.0078125, .015625,   -.0234375, -.0078125, -.046875, -.0078125,
                                 .0078125,  .015625,   -.0078125, -.0078125};
    for (int k = 0; k < 16; k++) {
        const unsigned code = bytes[k / 2] >> (k % 2 ? 4 : 0) & 15u;
        T_EQ_F64((double)(mm_e2m1_to_f32(code) * mm_e8m0_to_f32(0x78)), expected[k]);
    }
}
