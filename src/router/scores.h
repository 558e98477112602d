/* SPDX-License-Identifier: Apache-2.0 */
/* From one token's logits to its experts and their weights. */
#ifndef MM_ROUTER_SCORES_H
#define MM_ROUTER_SCORES_H

#include <stdint.h>

#include "router/router.h"

/*
 * log(1 + exp(x)) to about an FP32 ulp, by IEEE operations alone so that every machine agrees:
 * max(x, 0) + log(1 + t), t = mm_expf(-|x|), summed in FP64 and rounded once.
 */
float mm_softplus(float x);

/*
 * logits: [experts], overwritten. selection: [experts], scratch. `input_id` is the row of the hash
 * table, ignored by other routers. Writes topk ids and weights.
 */
void mm_router_choose(const megamoe_router *router, float *logits, float *selection,
                      int64_t input_id, int32_t *ids, float *weights);

#endif
