/* SPDX-License-Identifier: Apache-2.0 */
/* The tensor core's sum against the same definition in double arithmetic. */
#include <math.h>
#include <string.h>

#include "num/wgmma.h"
#include "t.h"

/* An E4M3 code's value, and its exponent, which is not normalized for subnormals. */
static double value_of(uint8_t code) {
    const int field = code >> 3 & 15, fraction = code & 7;
    if (field == 15 && fraction == 7)
        return NAN;
    const double magnitude = field ? ldexp(8 + fraction, field - 10) : ldexp(fraction, -9);
    return code & 0x80 ? -magnitude : magnitude;
}

static int exponent_of(uint8_t code) {
    return (code >> 3 & 15) ? (code >> 3 & 15) - 7 : -6;
}

/* trunc(value / unit) * unit for unit = 2^exponent. */
static double truncated(double value, int exponent) {
    return ldexp(trunc(ldexp(value, -exponent)), exponent);
}

static float expected_step(const uint8_t *a, const uint8_t *b, float accumulator) {
    double products[MM_WGMMA_K];
    int largest = -126; /* of an FP32 subnormal or zero */
    bool any = accumulator != 0;
    if (accumulator != 0 && isfinite(accumulator) && ilogbf(accumulator) > largest)
        largest = ilogbf(accumulator);
    for (int i = 0; i < MM_WGMMA_K; i++) {
        products[i] = value_of(a[i]) * value_of(b[i]);
        if (isnan(products[i]))
            return NAN;
        if (products[i] == 0)
            continue;
        any = true;
        const int exponent = exponent_of(a[i]) + exponent_of(b[i]);
        largest = exponent > largest ? exponent : largest;
    }
    if (!isfinite(accumulator))
        return accumulator;
    double sum = truncated(accumulator, largest - 13);
    for (int i = 0; i < MM_WGMMA_K; i++)
        sum += truncated(products[i], largest - 13);
    if (!any || sum == 0)
        return 0;
    return (float)truncated(sum, ilogb(sum) - 13);
}

/* To the bit, the sign of zero included; NaN is NaN. */
static bool check_step(const uint8_t *a, const uint8_t *b, float accumulator) {
    const float got = mm_wgmma_step(a, b, accumulator);
    const float want = expected_step(a, b, accumulator);
    const bool same = (isnan(got) && isnan(want)) || memcmp(&got, &want, sizeof got) == 0;
    return T_CHECK_MSG(same, "accumulator %a: %a, expected %a", (double)accumulator, (double)got,
                       (double)want);
}

static uint8_t random_code(t_random *r) {
    uint8_t code;
    do
        code = (uint8_t)t_u64(r);
    while ((code & 0x7F) == 0x7F);
    return code;
}

/* A code with its exponent field in least..most. */
static uint8_t code_between(t_random *r, unsigned least, unsigned most) {
    const unsigned field = least + t_below(r, most - least + 1);
    const unsigned fraction = t_below(r, field == 15 ? 7 : 8);
    return (uint8_t)(t_below(r, 2) << 7 | field << 3 | fraction);
}

static float random_float(t_random *r, int exponent) {
    const double magnitude = ldexp(1 + t_uniform(r), exponent);
    return (float)(t_below(r, 2) ? -magnitude : magnitude);
}

T_CASE(random_codes) {
    t_random r = t_random_start(1);
    uint8_t a[MM_WGMMA_K], b[MM_WGMMA_K];
    for (int round = 0; round < 20000; round++) {
        for (int i = 0; i < MM_WGMMA_K; i++) {
            a[i] = random_code(&r);
            b[i] = random_code(&r);
        }
        const float accumulator = round % 5 ? random_float(&r, (int)t_below(&r, 40) - 20) : 0.0f;
        if (!check_step(a, b, accumulator))
            return;
    }
}

/* Chains of steps, as a sum over K is. */
T_CASE(chains) {
    t_random r = t_random_start(2);
    uint8_t a[MM_WGMMA_K], b[MM_WGMMA_K];
    for (int chain = 0; chain < 200; chain++) {
        float accumulator = 0;
        for (int step = 0; step < 64; step++) {
            for (int i = 0; i < MM_WGMMA_K; i++) {
                a[i] = code_between(&r, 4, 12);
                b[i] = code_between(&r, 0, 15);
            }
            if (!check_step(a, b, accumulator))
                return;
            accumulator = mm_wgmma_step(a, b, accumulator);
        }
    }
}

T_CASE(sparse_and_subnormal) {
    t_random r = t_random_start(3);
    uint8_t a[MM_WGMMA_K], b[MM_WGMMA_K];
    for (int round = 0; round < 20000; round++) {
        const unsigned most = t_below(&r, 16), density = 1 + t_below(&r, 8);
        for (int i = 0; i < MM_WGMMA_K; i++) {
            const bool zero = t_below(&r, 8) >= density;
            a[i] =
                zero ? (uint8_t)(t_below(&r, 2) << 7) : code_between(&r, 0, t_below(&r, most + 1));
            b[i] = code_between(&r, 0, t_below(&r, 2) ? 0 : most);
        }
        const float accumulator = t_below(&r, 3) ? random_float(&r, (int)t_below(&r, 36) - 30) : 0;
        if (!check_step(a, b, accumulator))
            return;
    }
}

T_CASE(accumulators_of_every_exponent) {
    t_random r = t_random_start(4);
    uint8_t a[MM_WGMMA_K] = {0}, b[MM_WGMMA_K] = {0};
    for (int exponent = -149; exponent <= 127; exponent++)
        for (int round = 0; round < 24; round++) {
            for (int i = 0; i < MM_WGMMA_K; i++) {
                a[i] = round % 3 ? random_code(&r) : 0;
                b[i] = random_code(&r);
            }
            if (!check_step(a, b, random_float(&r, exponent)))
                return;
        }
}

T_CASE(extremes) {
    static const uint8_t codes[] = {0x00, 0x80, 0x01, 0x81, 0x07, 0x08, 0x88, 0x38, 0x7E, 0xFE};
    static const float accumulators[] = {0.0f,          -0.0f,      1.0f,     -1.0f,
                                         448.0f,        -448.0f,    0x1p-18f, -0x1p-18f,
                                         0x1p-149f,     -0x1p-126f, 0x1p127f, 3.402823e38f,
                                         -3.402823e38f, 200704.0f,  0x1p31f};
    enum { CODES = sizeof codes, ACCUMULATORS = sizeof accumulators / sizeof *accumulators };
    uint8_t a[MM_WGMMA_K], b[MM_WGMMA_K];
    for (int x = 0; x < CODES; x++)
        for (int y = 0; y < CODES; y++)
            for (int i = 0; i < ACCUMULATORS; i++) {
                memset(a, codes[x], sizeof a);
                memset(b, codes[y], sizeof b);
                check_step(a, b, accumulators[i]);
                a[31] ^= 0x80; /* one product of the other sign */
                check_step(a, b, accumulators[i]);
            }
}

/* Alignment is to the factors' exponents: 1.75 * 1.75 does not count as 2^1. */
T_CASE(products_are_not_normalized) {
    uint8_t a[MM_WGMMA_K] = {0}, b[MM_WGMMA_K] = {0};
    a[0] = b[0] = 0x3E;                               /* 1.75: exponent 0, so the unit is 2^-13 */
    a[1] = 0x01;                                      /* 2^-9 */
    b[1] = 0x18;                                      /* 2^-4 */
    T_EQ_F64(mm_wgmma_step(a, b, 0.0f), 1.75 * 1.75); /* 2^-13 entered, 14 bits dropped it */
    a[2] = 0xBE;                                      /* minus the first product leaves it alone */
    b[2] = 0x3E;
    T_EQ_F64(mm_wgmma_step(a, b, 0.0f), 0x1p-13);
    b[1] = 0x17; /* 15 * 2^-8 < 2^-4: the product is below the unit */
    T_EQ_F64(mm_wgmma_step(a, b, 0.0f), 0.0);
}

T_CASE(zero_sums_are_positive) {
    uint8_t a[MM_WGMMA_K], b[MM_WGMMA_K];
    memset(a, 0x80, sizeof a);
    memset(b, 0x38, sizeof b);
    T_CHECK(!signbit(mm_wgmma_step(a, b, 0.0f)));
    T_CHECK(!signbit(mm_wgmma_step(a, b, -0.0f)));
    memset(a, 0xB8, sizeof a); /* -1 each, on an accumulator of 32 */
    const float sum = mm_wgmma_step(a, b, 32.0f);
    T_CHECK(sum == 0 && !signbit(sum));
}

T_CASE(nan_at_every_place) {
    t_random r = t_random_start(5);
    uint8_t a[MM_WGMMA_K], b[MM_WGMMA_K];
    for (int place = 0; place < MM_WGMMA_K; place++)
        for (int round = 0; round < 4; round++) {
            for (int i = 0; i < MM_WGMMA_K; i++) {
                a[i] = random_code(&r);
                b[i] = round % 2 ? 0 : random_code(&r); /* zeros do not cancel NaN */
            }
            a[place] = (uint8_t)(round < 2 ? 0x7F : 0xFF);
            T_CHECK_MSG(isnan(mm_wgmma_step(a, b, 1.0f)), "NaN in a at %d", place);
            T_CHECK_MSG(isnan(mm_wgmma_step(b, a, 1.0f)), "NaN in b at %d", place);
        }
    memset(a, 0, sizeof a);
    T_CHECK(isnan(mm_wgmma_step(a, a, NAN)));
}

T_CASE(infinite_accumulators_stay) {
    uint8_t a[MM_WGMMA_K], b[MM_WGMMA_K];
    memset(a, 0x7E, sizeof a);
    memset(b, 0xFE, sizeof b);
    T_EQ_F64(mm_wgmma_step(a, b, INFINITY), INFINITY);
    T_EQ_F64(mm_wgmma_step(a, b, -INFINITY), -INFINITY);
    b[7] = 0x7F;
    T_CHECK(isnan(mm_wgmma_step(a, b, INFINITY)));
}

/* Where a product stands in its step does not matter. */
T_CASE(places_of_a_step_are_equal) {
    t_random r = t_random_start(6);
    uint8_t a[MM_WGMMA_K], b[MM_WGMMA_K], c[MM_WGMMA_K], d[MM_WGMMA_K];
    for (int round = 0; round < 2000; round++) {
        const int shift = 1 + (int)t_below(&r, 31);
        for (int i = 0; i < MM_WGMMA_K; i++) {
            a[i] = c[(i + shift) % MM_WGMMA_K] = random_code(&r);
            b[i] = d[(i + shift) % MM_WGMMA_K] = random_code(&r);
        }
        const float accumulator = random_float(&r, (int)t_below(&r, 20) - 10);
        T_EQ_F64(mm_wgmma_step(a, b, accumulator), mm_wgmma_step(c, d, accumulator));
    }
}

T_CASE(order_of_k) {
    bool seen[128] = {false};
    for (int step = 0; step < 4; step++)
        for (int place = 0; place < MM_WGMMA_K; place++) {
            const int k = mm_wgmma_k(step, place);
            T_REQUIRE(k >= 0 && k < 128 && !seen[k]);
            seen[k] = true;
            T_EQ_INT(k % 32 / 8, step); /* k = 32 c + 8 step + 0..7 */
        }
}
