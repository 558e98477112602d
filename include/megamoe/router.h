/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routers: from a token's BF16 row to its top-k experts and their weights. Host memory only.
 *
 * logits = x . W^T in FP32, summed in the CPU order of docs/numerics.md item 10, divided by
 * gate_temperature, plus `linear_bias` if there is one. A rule turns logits into scores:
 *   SOFTMAX           exp(l - max) / sum over all experts
 *   SIGMOID           1 / (1 + exp(-l))
 *   SQRT_SOFTPLUS     sqrt(log(1 + exp(l)))
 *   SOFTMAX_SELECTED  the logits select; softmax over the chosen ones only
 * Selection uses score + selection_bias, descending, ties to the lowest id. With groups > 1 each
 * group is scored by the sum of its two largest selection scores (DeepSeek-V3) and only the
 * best groups_kept groups take part. Weights are the chosen scores, without the bias; with
 * `normalize` they are divided by their sum, then multiplied by `scaling`.
 * A hash layer takes the ids from a table indexed by token id; its weights still come from scores.
 * A row with a NaN score gets ids 0..k-1 (a hash layer its table's) and NaN weights.
 */
#ifndef MEGAMOE_ROUTER_H
#define MEGAMOE_ROUTER_H

#include "device.h"
#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct megamoe_router megamoe_router;

typedef enum megamoe_router_rule {
    MEGAMOE_ROUTER_SOFTMAX = 1,
    MEGAMOE_ROUTER_SIGMOID = 2,
    MEGAMOE_ROUTER_SQRT_SOFTPLUS = 3,
    MEGAMOE_ROUTER_SOFTMAX_SELECTED = 4
} megamoe_router_rule;

/* "softmax", "sigmoid", "sqrt-softplus", "softmax-selected". */
MEGAMOE_API const char *megamoe_router_rule_name(megamoe_router_rule rule);

typedef struct megamoe_router_desc {
    size_t struct_size;
    megamoe_router_rule rule;
    int32_t hidden;
    int32_t experts;
    int32_t topk;
    int32_t groups;          /* 0 or 1: no groups */
    int32_t groups_kept;     /* of `groups` */
    bool normalize;          /* divide the chosen scores by their sum */
    float normalize_epsilon; /* added to that sum; usually 0 or 1e-20 */
    float scaling;           /* 0 means 1 */
    float gate_temperature;  /* 0 means 1 */
    int64_t hash_vocab;      /* rows of the hash table; 0: not a hash layer */
} megamoe_router_desc;

/*
 * weight: BF16 or F32 [experts, hidden]. selection_bias, linear_bias: BF16 or F32 [experts] (one
 * row each) or NULL. hash_table: I32 or I64 [hash_vocab, topk] for hash layers, else NULL.
 * Owns: everything is copied; the caller closes *router.
 * Returns: MEGAMOE_EINVAL, MEGAMOE_EFORMAT (a hash table entry that is no expert), MEGAMOE_ENOMEM.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_router_create(
    const megamoe_router_desc *desc, const megamoe_view *weight, const megamoe_view *selection_bias,
    const megamoe_view *linear_bias, const megamoe_view *hash_table, megamoe_router **router);

/* Accepts NULL. */
MEGAMOE_API void megamoe_router_close(megamoe_router *router);

MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_router_describe(const megamoe_router *router,
                                                                   megamoe_router_desc *desc);

/*
 * Routes n_tokens rows. x: BF16 [n, hidden]. input_ids: I32 or I64 [n] (one row), required for
 * hash layers, else NULL or ignored. topk_ids: I32 or I64 [n, topk], topk_weights: F32 [n, topk],
 * both written. A token's result does not depend on the other tokens.
 * Thread: `router` may be shared; `device` lends its threads, NULL computes on the caller's.
 * Returns: MEGAMOE_EINVAL (shapes, dtypes), MEGAMOE_EID (a token id outside the hash table, named).
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status
megamoe_router_route(const megamoe_router *router, megamoe_device *device, const megamoe_view *x,
                     const megamoe_view *input_ids, int64_t n_tokens, const megamoe_view *topk_ids,
                     const megamoe_view *topk_weights);

#ifdef __cplusplus
}
#endif
#endif
