/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The scalar reference: docs/numerics.md in plain C. Slow, and the definition of every result.
 */
#ifndef MEGAMOE_REFERENCE_H
#define MEGAMOE_REFERENCE_H

#include "layer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum megamoe_sum {
    MEGAMOE_SUM_FP32 = 0, /* the CPU backend's order, of E4M3 or of int8 activations */
    MEGAMOE_SUM_WGMMA = 1 /* the tensor core's integer sum */
} megamoe_sum;

typedef struct megamoe_reference_options {
    size_t struct_size;
    megamoe_sum sum;
    megamoe_accumulate accumulate;
    megamoe_nvfp4_mode nvfp4; /* ignored for prepared weights */
    bool weight_after_fc2;
    megamoe_input_scale input_scale;     /* TOKEN or BLOCK */
    int32_t threads;                     /* 0: one per core available */
    megamoe_progress progress;           /* units are routes */
    megamoe_activation_type activations; /* INT8: with MEGAMOE_SUM_FP32, not for folded NVFP4 */
} megamoe_reference_options;

/*
 * y[t] for n_tokens tokens of `topk` slots each: views as in megamoe_stage and megamoe_forward.
 * `options` may be NULL.
 * Returns: MEGAMOE_EINVAL, MEGAMOE_EUNSUPPORTED (what int8 activations are not for), MEGAMOE_EID,
 * MEGAMOE_EINEXACT, MEGAMOE_ENOMEM.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_reference_forward(
    const megamoe_weights *weights, const megamoe_reference_options *options, int32_t topk,
    const megamoe_view *x, const megamoe_view *topk_ids, const megamoe_view *topk_weights,
    int64_t n_tokens, const megamoe_view *y);

#ifdef __cplusplus
}
#endif
#endif
