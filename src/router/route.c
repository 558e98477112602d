/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdlib.h>

#include "base/device.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/view.h"
#include "router/logits.h"
#include "router/router.h"
#include "router/scores.h"

enum { CHUNK_TOKENS = 256 }; /* whose logits are in memory at once */

/* A chunk of tokens: first all threads sum logits, then all choose experts. */
typedef struct chunk {
    const megamoe_router *router;
    const megamoe_view *x;
    const megamoe_view *input_ids;
    const megamoe_view *topk_ids;
    const megamoe_view *topk_weights;
    mm_logits_fn sum_block;
    int64_t first;
    int32_t tokens;
    size_t lanes;     /* experts rounded up to whole blocks */
    float *logits;    /* [tokens][lanes] */
    float *selection; /* [threads][lanes] */
    int32_t *ids;     /* [threads][topk] */
    float *weights;   /* [threads][topk] */
} chunk;

/*
 * Work is cut into (block of experts, panel of tokens), so that one token still employs all
 * threads; a thread's panels of one block follow each other and find its weights in the cache.
 */
static void sum_logits(void *argument, int32_t thread, int32_t threads) {
    const chunk *c = argument;
    const int64_t hidden = c->router->desc.hidden;
    const int64_t panels = mm_ceil_div(c->tokens, MM_LOGITS_TOKENS);
    const int64_t units = panels * mm_router_blocks(&c->router->desc);
    for (int64_t unit = units * thread / threads; unit < units * (thread + 1) / threads; unit++) {
        const int64_t block = unit / panels;
        const int64_t first = unit % panels * MM_LOGITS_TOKENS;
        const int32_t tokens = (int32_t)mm_min(MM_LOGITS_TOKENS, c->tokens - first);
        const uint16_t *x[MM_LOGITS_TOKENS];
        float *out[MM_LOGITS_TOKENS];
        for (int32_t t = 0; t < tokens; t++) {
            x[t] = mm_view_row(c->x, c->first + first + t, hidden);
            out[t] = c->logits + (size_t)(first + t) * c->lanes + block * MM_ROUTER_LANES;
        }
        c->sum_block(mm_router_weight_row(c->router, (int32_t)block * MM_ROUTER_LANES),
                     (int32_t)hidden, x, tokens, out);
    }
}

static void choose_experts(void *argument, int32_t thread, int32_t threads) {
    const chunk *c = argument;
    const int32_t topk = c->router->desc.topk;
    float *selection = c->selection + (size_t)thread * c->lanes;
    int32_t *ids = c->ids + (size_t)thread * (size_t)topk;
    float *weights = c->weights + (size_t)thread * (size_t)topk;
    const int64_t end = (int64_t)c->tokens * (thread + 1) / threads;
    for (int64_t t = (int64_t)c->tokens * thread / threads; t < end; t++) {
        const int64_t row = c->first + t;
        const int64_t input_id =
            c->router->hash_table ? mm_view_integer(c->input_ids, 0, row, row + 1) : 0;
        mm_router_choose(c->router, c->logits + (size_t)t * c->lanes, selection, input_id, ids,
                         weights);
        void *to_ids = mm_view_row(c->topk_ids, row, topk);
        float *to_weights = mm_view_row(c->topk_weights, row, topk);
        for (int32_t slot = 0; slot < topk; slot++) {
            if (c->topk_ids->dtype == MEGAMOE_DTYPE_I64)
                ((int64_t *)to_ids)[slot] = ids[slot];
            else
                ((int32_t *)to_ids)[slot] = ids[slot];
            to_weights[slot] = weights[slot];
        }
    }
}

static megamoe_status check_input_ids(const megamoe_router *router, const megamoe_view *input_ids,
                                      int64_t n_tokens) {
    const int64_t vocab = router->desc.hash_vocab;
    if (vocab == 0)
        return MEGAMOE_OK;
    MM_TRY(mm_view_check(input_ids, "router: input_ids", MEGAMOE_DTYPE_I32, MEGAMOE_DTYPE_I64,
                         n_tokens > 0, n_tokens));
    for (int64_t t = 0; t < n_tokens; t++) {
        const int64_t id = mm_view_integer(input_ids, 0, t, n_tokens);
        if (id < 0 || id >= vocab)
            return mm_fail(MEGAMOE_EID,
                           "router: input_ids: token %" PRId64 " has id %" PRId64
                           ", outside the hash table's 0..%" PRId64,
                           t, id, vocab - 1);
    }
    return MEGAMOE_OK;
}

megamoe_status megamoe_router_route(const megamoe_router *router, megamoe_device *device,
                                    const megamoe_view *x, const megamoe_view *input_ids,
                                    int64_t n_tokens, const megamoe_view *topk_ids,
                                    const megamoe_view *topk_weights) {
    if (!router || n_tokens < 0)
        return mm_fail(MEGAMOE_EINVAL, "router: %s", router ? "negative n_tokens" : "NULL");
    const megamoe_router_desc *desc = &router->desc;
    MM_TRY(mm_view_check(x, "router: x", MEGAMOE_DTYPE_BF16, MEGAMOE_DTYPE_NONE, n_tokens,
                         desc->hidden));
    MM_TRY(mm_view_check(topk_ids, "router: topk_ids", MEGAMOE_DTYPE_I32, MEGAMOE_DTYPE_I64,
                         n_tokens, desc->topk));
    MM_TRY(mm_view_check(topk_weights, "router: topk_weights", MEGAMOE_DTYPE_F32,
                         MEGAMOE_DTYPE_NONE, n_tokens, desc->topk));
    MM_TRY(check_input_ids(router, input_ids, n_tokens));

    mm_pool *pool = device ? device->pool : NULL;
    const size_t threads = (size_t)mm_pool_threads(pool);
    const size_t topk = (size_t)desc->topk;
    const size_t rows = (size_t)mm_min(n_tokens, CHUNK_TOKENS);
    chunk c = {.router = router,
               .x = x,
               .input_ids = input_ids,
               .topk_ids = topk_ids,
               .topk_weights = topk_weights,
               .sum_block = mm_logits_best(),
               .lanes = (size_t)mm_router_blocks(desc) * MM_ROUTER_LANES};
    c.logits = mm_alloc(rows * c.lanes * sizeof *c.logits);
    c.selection = mm_alloc(threads * c.lanes * sizeof *c.selection);
    c.ids = mm_alloc(threads * topk * sizeof *c.ids);
    c.weights = mm_alloc(threads * topk * sizeof *c.weights);
    megamoe_status status = MEGAMOE_OK;
    if (!c.logits || !c.selection || !c.ids || !c.weights)
        status = mm_fail(MEGAMOE_ENOMEM, "router: %zu rows of logits: out of memory", rows);
    for (; status == MEGAMOE_OK && c.first < n_tokens; c.first += c.tokens) {
        c.tokens = (int32_t)mm_min(n_tokens - c.first, CHUNK_TOKENS);
        mm_pool_run(pool, sum_logits, &c);
        mm_pool_run(pool, choose_experts, &c);
    }
    free(c.logits);
    free(c.selection);
    free(c.ids);
    free(c.weights);
    return status;
}
