/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Logits before temperature and bias, in the CPU order of docs/numerics.md item 10: one FP32
 * accumulator from +0; for each pair of k, ascending, an fma of the odd k, then one of the even k;
 * the last k of an odd `hidden` alone. Experts lie side by side in a vector, so every variant
 * gives the same bits.
 */
#ifndef MM_ROUTER_LOGITS_H
#define MM_ROUTER_LOGITS_H

#include <stdint.h>

#include "router/router.h"

enum { MM_LOGITS_TOKENS = 4 };

/*
 * One block of MM_ROUTER_LANES experts for 1..MM_LOGITS_TOKENS tokens. weight: [hidden][lanes];
 * x[t]: BF16 [hidden]; out[t]: [lanes].
 */
typedef void (*mm_logits_fn)(const float *weight, int32_t hidden, const uint16_t *const *x,
                             int32_t tokens, float *const *out);

typedef enum mm_logits_variant {
    MM_LOGITS_PORTABLE,
    MM_LOGITS_AVX2,
    MM_LOGITS_VARIANTS
} mm_logits_variant;

/* NULL if this build or machine lacks the variant. */
mm_logits_fn mm_logits_of(mm_logits_variant variant);

/* The fastest of this machine. */
mm_logits_fn mm_logits_best(void);

#endif
