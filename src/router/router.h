/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MM_ROUTER_ROUTER_H
#define MM_ROUTER_ROUTER_H

#include "megamoe/router.h"

enum {
    /* Experts whose logits are summed side by side; weights are padded to whole blocks. */
    MM_ROUTER_LANES = 16,
    MM_ROUTER_VOCAB_MAX = 1 << 24 /* rows of a hash table */
};

struct megamoe_router {
    megamoe_router_desc desc;   /* checked, with defaults filled in */
    megamoe_dtype weight_dtype; /* of the checkpoint: how the weight is saved */
    float *weight;              /* [block of experts][hidden][MM_ROUTER_LANES] */
    float *selection_bias;      /* [experts] or NULL */
    float *linear_bias;         /* [experts] or NULL */
    int32_t *hash_table;        /* [hash_vocab][topk] or NULL */
};

static inline int32_t mm_router_blocks(const megamoe_router_desc *desc) {
    return (desc->experts - 1) / MM_ROUTER_LANES + 1;
}

/* Element [0] of an expert's weight row; the next ones follow MM_ROUTER_LANES apart. */
static inline float *mm_router_weight_row(const megamoe_router *router, int32_t expert) {
    const size_t block = (size_t)(expert / MM_ROUTER_LANES);
    return router->weight + block * (size_t)router->desc.hidden * MM_ROUTER_LANES +
           expert % MM_ROUTER_LANES;
}

/* What a router is made of; `data` is NULL where a part is absent. */
typedef struct mm_router_parts {
    megamoe_view weight;         /* BF16 or F32 [experts, hidden] */
    megamoe_view selection_bias; /* BF16 or F32, one row */
    megamoe_view linear_bias;    /* BF16 or F32, one row */
    megamoe_view hash_table;     /* I32 or I64 [hash_vocab, topk] */
} mm_router_parts;

/*
 * Fills in the defaults of `desc` and checks it. `what` begins the message, `status` is that of a
 * value that cannot be.
 */
MEGAMOE_CHECKED megamoe_status mm_router_check_desc(megamoe_router_desc *desc, const char *what,
                                                    megamoe_status status);

/* Copies the parts, which fit a checked desc. */
MEGAMOE_CHECKED megamoe_status mm_router_build(const megamoe_router_desc *desc,
                                               const mm_router_parts *parts, const char *what,
                                               megamoe_router **router);

/* The serialised form, for the prepared file. */
size_t mm_router_saved_bytes(const megamoe_router *router);
void mm_router_save(const megamoe_router *router, void *bytes);
/* `n` is what mm_router_saved_bytes gave. The bytes are not trusted, their alignment included. */
MEGAMOE_CHECKED megamoe_status mm_router_load(const void *bytes, size_t n, const char *path,
                                              megamoe_router **router);

#endif
