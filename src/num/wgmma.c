/* SPDX-License-Identifier: Apache-2.0 */
#include "num/wgmma.h"

#include <math.h>
#include <stdbool.h>

#include "num/bf16.h"
#include "num/e4m3.h"

/* value = sign * significand * 2^(exponent - 3) */
struct factor {
    int32_t significand;
    int32_t exponent;
};

static struct factor split(uint8_t code) {
    const int32_t field = code >> 3 & 15;
    const int32_t fraction = code & 7;
    const int32_t magnitude = field ? 8 + fraction : fraction;
    return (struct factor){code & 0x80u ? -magnitude : magnitude, field ? field - 7 : -6};
}

/* Integer times 2^shift, toward zero. Of a zero, shift may be anything. */
static int64_t aligned(int64_t value, int32_t shift) {
    if (value == 0 || shift <= -63)
        return 0;
    if (shift >= 0)
        return value * ((int64_t)1 << shift);
    return value / ((int64_t)1 << -shift);
}

float mm_wgmma_step(const uint8_t a[MM_WGMMA_K], const uint8_t b[MM_WGMMA_K], float accumulator) {
    enum { FRACTION_BITS = 13, FP32_EXPONENT_MIN = -126, NONE = -1000 };
    int32_t products[MM_WGMMA_K], exponents[MM_WGMMA_K];
    int32_t largest = NONE;
    bool nan = isnan(accumulator);
    for (int i = 0; i < MM_WGMMA_K; i++) {
        nan |= (a[i] & 0x7F) == MM_E4M3_NAN || (b[i] & 0x7F) == MM_E4M3_NAN;
        const struct factor x = split(a[i]), y = split(b[i]);
        products[i] = x.significand * y.significand; /* times 2^(exponents[i] - 6) */
        exponents[i] = x.exponent + y.exponent;
        if (products[i] && exponents[i] > largest)
            largest = exponents[i];
    }
    if (nan || isinf(accumulator))
        return nan ? NAN : accumulator;
    int32_t significand = 0; /* of the accumulator, times 2^(exponent - 23) */
    int32_t exponent = 0;
    if (accumulator != 0.0f) {
        int e;
        significand = (int32_t)ldexpf(frexpf(accumulator, &e), 24);
        exponent = e - 1;
        /* A subnormal's exponent is not normalised. */
        const int32_t counted = exponent < FP32_EXPONENT_MIN ? FP32_EXPONENT_MIN : exponent;
        if (counted > largest)
            largest = counted;
    }
    if (largest == NONE)
        return 0.0f;
    /* In units of 2^(largest - FRACTION_BITS). */
    int64_t sum = aligned(significand, exponent - 23 - largest + FRACTION_BITS);
    for (int i = 0; i < MM_WGMMA_K; i++)
        sum += aligned(products[i], exponents[i] - 6 - largest + FRACTION_BITS);
    if (sum == 0)
        return 0.0f;
    int64_t magnitude = sum < 0 ? -sum : sum;
    int32_t drop = 0;
    while (magnitude >> drop >= (int64_t)1 << (FRACTION_BITS + 1))
        drop++;
    magnitude = magnitude >> drop << drop;
    const float result = ldexpf((float)magnitude, largest - FRACTION_BITS);
    return sum < 0 ? -result : result;
}
