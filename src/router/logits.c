/* SPDX-License-Identifier: Apache-2.0 */
#include "router/logits.h"

#include <math.h>
#include <string.h>

#include "num/bf16.h"

enum { LANES = MM_ROUTER_LANES };

/* `tokens` is a constant where this is inlined, so the accumulators stay in registers. */
static inline __attribute__((always_inline)) void sum_tokens(const float *weight, int32_t hidden,
                                                             const uint16_t *const *x,
                                                             int32_t tokens, float *const *out) {
    float sum[MM_LOGITS_TOKENS][LANES];
    for (int32_t t = 0; t < tokens; t++)
        for (int i = 0; i < LANES; i++)
            sum[t][i] = 0.0f;
    const float *w = weight;
    int32_t k = 0;
    for (; k + 1 < hidden; k += 2, w += 2 * LANES)
        for (int32_t t = 0; t < tokens; t++) {
            const float even = mm_bf16_to_f32(x[t][k]);
            const float odd = mm_bf16_to_f32(x[t][k + 1]);
            for (int i = 0; i < LANES; i++)
                sum[t][i] = fmaf(even, w[i], fmaf(odd, w[LANES + i], sum[t][i]));
        }
    if (k < hidden)
        for (int32_t t = 0; t < tokens; t++) {
            const float last = mm_bf16_to_f32(x[t][k]);
            for (int i = 0; i < LANES; i++)
                sum[t][i] = fmaf(last, w[i], sum[t][i]);
        }
    for (int32_t t = 0; t < tokens; t++)
        memcpy(out[t], sum[t], sizeof sum[t]);
}

static inline __attribute__((always_inline)) void sum_block(const float *weight, int32_t hidden,
                                                            const uint16_t *const *x,
                                                            int32_t tokens, float *const *out) {
    if (tokens == MM_LOGITS_TOKENS) {
        sum_tokens(weight, hidden, x, MM_LOGITS_TOKENS, out);
        return;
    }
    for (int32_t t = 0; t < tokens; t++)
        sum_tokens(weight, hidden, x + t, 1, out + t);
}

static void sum_portable(const float *weight, int32_t hidden, const uint16_t *const *x,
                         int32_t tokens, float *const *out) {
    sum_block(weight, hidden, x, tokens, out);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static void sum_avx2(const float *weight, int32_t hidden,
                                                         const uint16_t *const *x, int32_t tokens,
                                                         float *const *out) {
    sum_block(weight, hidden, x, tokens, out);
}
#endif

mm_logits_fn mm_logits_of(mm_logits_variant variant) {
#if defined(__x86_64__)
    if (variant == MM_LOGITS_AVX2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? sum_avx2 : NULL;
#endif
    return variant == MM_LOGITS_PORTABLE ? sum_portable : NULL;
}

mm_logits_fn mm_logits_best(void) {
    const mm_logits_fn avx2 = mm_logits_of(MM_LOGITS_AVX2);
    return avx2 ? avx2 : sum_portable;
}
