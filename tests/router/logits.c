/* SPDX-License-Identifier: Apache-2.0 */
#include "router/logits.h"

#include <math.h>
#include <stdlib.h>

#include "num/bf16.h"
#include "t.h"

enum { LANES = MM_ROUTER_LANES, HIDDEN = 131 };

/* The documented order, one expert at a time. */
static float one_sum(const float *weight, int lane, int32_t hidden, const uint16_t *x) {
    float sum = 0;
    for (int32_t k = 0; k < hidden; k += 2) {
        if (k + 1 < hidden)
            sum = fmaf(mm_bf16_to_f32(x[k + 1]), weight[(k + 1) * LANES + lane], sum);
        sum = fmaf(mm_bf16_to_f32(x[k]), weight[k * LANES + lane], sum);
    }
    return sum;
}

static void check_variant(mm_logits_variant variant) {
    const mm_logits_fn fn = mm_logits_of(variant);
    if (!fn)
        T_SKIP("this machine does not run variant %d", (int)variant);
    t_random random = t_random_start(1);
    static float weight[HIDDEN * LANES];
    static uint16_t x[MM_LOGITS_TOKENS][HIDDEN];
    static float got[MM_LOGITS_TOKENS][LANES + 1];
    for (int32_t hidden = 1; hidden <= HIDDEN; hidden++) {
        for (int i = 0; i < hidden * LANES; i++)
            weight[i] = (float)(t_normal(&random) * exp2(t_below(&random, 24)));
        const uint16_t *rows[MM_LOGITS_TOKENS];
        float *out[MM_LOGITS_TOKENS];
        for (int t = 0; t < MM_LOGITS_TOKENS; t++) {
            for (int32_t k = 0; k < hidden; k++)
                x[t][k] = mm_bf16_from_f32((float)(t_normal(&random) * exp2(t_below(&random, 24))));
            rows[t] = x[t];
            out[t] = got[t];
        }
        for (int32_t tokens = 1; tokens <= MM_LOGITS_TOKENS; tokens++) {
            for (int t = 0; t < MM_LOGITS_TOKENS; t++)
                for (int i = 0; i <= LANES; i++)
                    got[t][i] = -1;
            fn(weight, hidden, rows, tokens, out);
            for (int t = 0; t < MM_LOGITS_TOKENS; t++) {
                T_EQ_F64((double)got[t][LANES], -1.0);
                for (int i = 0; i < LANES; i++) {
                    const float expected = t < tokens ? one_sum(weight, i, hidden, x[t]) : -1.0f;
                    T_EQ_HEX(mm_f32_bits(got[t][i]), mm_f32_bits(expected));
                }
            }
        }
    }
}

T_CASE(portable_sums_in_the_documented_order) {
    check_variant(MM_LOGITS_PORTABLE);
}

T_CASE(avx2_sums_in_the_documented_order) {
    check_variant(MM_LOGITS_AVX2);
}

T_CASE(order_matters) {
    /* 2^24 + 1 - 2^24: the odd element of a pair comes first, so 1 meets 2^24 and is lost. */
    static float weight[4 * LANES];
    for (int i = 0; i < LANES; i++) {
        weight[0 * LANES + i] = 1;
        weight[1 * LANES + i] = 0x1p24f;
        weight[2 * LANES + i] = 1;
        weight[3 * LANES + i] = -0x1p24f;
    }
    const uint16_t one = mm_bf16_from_f32(1);
    const uint16_t x[4] = {one, one, one, one};
    const uint16_t *rows[1] = {x};
    float got[LANES];
    float *out[1] = {got};
    mm_logits_best()(weight, 4, rows, 1, out);
    for (int i = 0; i < LANES; i++)
        T_EQ_F64((double)got[i], 1.0);
}
