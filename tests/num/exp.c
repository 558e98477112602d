/* SPDX-License-Identifier: Apache-2.0 */
#include "num/exp.h"

#include <math.h>

#include "num/gated.h"
#include "t.h"

/* Distance between FP32 neighbours at a positive value, subnormals included. */
static double ulp_at(double value) {
    if (value < 0x1p-126)
        return 0x1p-149;
    int exponent;
    frexp(value, &exponent);
    return ldexp(1, exponent - 24);
}

static void check_exp(float x) {
    const double expected = exp((double)x);
    const float got = mm_expf(x);
    bool holds;
    if (isnan(x))
        holds = isnan(got);
    else if (isinf((float)expected))
        holds = isinf(got) || got == 0x1.fffffep127f;
    else
        holds = fabs((double)got - expected) <= ulp_at(expected);
    if (!T_CHECK_MSG(holds, "exp(%a) = %a, expected %a", (double)x, (double)got, expected))
        t_leave();
}

T_CASE(within_one_ulp_over_all_floats) {
    for (uint64_t bits = 0; bits < (uint64_t)1 << 32; bits += 631)
        check_exp(mm_f32_from_bits((uint32_t)bits));
}

T_CASE(within_one_ulp_where_it_matters) {
    for (int i = -1100000; i <= 900000; i++)
        check_exp((float)i * 1e-4f);
}

T_CASE(overflow_begins_where_it_should) {
    for (float x = 88.7f; x < 88.75f; x = nextafterf(x, INFINITY))
        if (!T_CHECK_MSG(isinf(mm_expf(x)) == isinf((float)exp((double)x)), "x = %a", (double)x))
            break;
    T_EQ_F64((double)mm_expf(89.0f), (double)INFINITY);
    T_EQ_F64((double)mm_expf(1e30f), (double)INFINITY);
    T_EQ_F64((double)mm_expf(INFINITY), (double)INFINITY);
}

T_CASE(underflow_is_gradual_and_ends_where_it_should) {
    for (float x = -103.9f; x > -104.05f; x = nextafterf(x, -INFINITY))
        if (!T_CHECK_MSG((mm_expf(x) == 0) == ((float)exp((double)x) == 0), "x = %a", (double)x))
            break;
    T_EQ_F64((double)mm_expf(-103.5f), 0x1p-149);
    T_EQ_F64((double)mm_expf(-105.0f), 0.0);
    T_EQ_F64((double)mm_expf(-1e30f), 0.0);
    T_EQ_F64((double)mm_expf(-INFINITY), 0.0);
}

T_CASE(exact_points) {
    T_EQ_F64((double)mm_expf(0.0f), 1.0);
    T_EQ_F64((double)mm_expf(-0.0f), 1.0);
    T_EQ_F64((double)mm_expf(0x1p-126f), 1.0);
    T_CHECK(isnan(mm_expf(NAN)));
    T_CHECK(isnan(mm_expf(-NAN)));
}

T_CASE(never_decreases) {
    float last = 0;
    for (float x = -104.0f; x < 89.0f; x += 0.0001f) {
        const float now = mm_expf(x);
        if (!T_CHECK_MSG(now >= last, "at %a", (double)x))
            break;
        last = now;
    }
}

T_CASE(powers_of_two) {
    for (int32_t n = -126; n <= 127; n++)
        T_EQ_F64((double)mm_exp2i(n), ldexp(1, n));
}

/* Published values for gate 12, up -12. */
T_CASE(gated_activation) {
    T_NEAR((double)mm_gated(12, -12, 1, 0, 10), -99.9955, 1e-4);
    T_NEAR((double)mm_gated(12, -12, 1.702f, 1, 7), -41.9997, 1e-4);
    T_NEAR((double)mm_gated(12, -12, 1, 0, INFINITY), -143.9991, 1e-4);
}

T_CASE(gated_activation_clamps_as_the_models_do) {
    /* The gate has no lower clamp; up has both. */
    T_EQ_F64((double)mm_gated(-20, 1, 1, 0, 10), (double)mm_gated(-20, 1, 1, 0, INFINITY));
    T_CHECK(mm_gated(-20, 1, 1, 0, 10) != mm_gated(-10, 1, 1, 0, 10));
    T_EQ_F64((double)mm_gated(3, -50, 1, 0, 10), (double)mm_gated(3, -10, 1, 0, 10));
    T_EQ_F64((double)mm_gated(3, 50, 1, 0, 10), (double)mm_gated(3, 10, 1, 0, 10));
    T_EQ_F64((double)mm_gated(0, 5, 1, 0, 10), 0.0);
    T_CHECK(isnan(mm_gated(NAN, 1, 1, 0, 10)));
    T_CHECK(isnan(mm_gated(1, NAN, 1, 0, 10)));
}
