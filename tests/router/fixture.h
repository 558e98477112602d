/* SPDX-License-Identifier: Apache-2.0 */
/* A router with known weights, and what it should answer, in doubles and by sorting. */
#ifndef TEST_ROUTER_FIXTURE_H
#define TEST_ROUTER_FIXTURE_H

#include "megamoe/router.h"
#include "t.h"

typedef struct fixture {
    megamoe_router_desc desc;
    uint16_t *weight;      /* BF16 [experts][hidden], small multiples of 1/64 */
    float *selection_bias; /* [experts] or NULL */
    float *linear_bias;    /* [experts] or NULL */
    int64_t *hash_table;   /* [hash_vocab][topk] or NULL */
    megamoe_router *router;
} fixture;

enum { WITH_SELECTION_BIAS = 1, WITH_LINEAR_BIAS = 2 };

/* Random weights for `desc`; ends the case if the router cannot be created. */
fixture fixture_open(megamoe_router_desc desc, int biases, t_random *random);
void fixture_close(fixture *f);

/* n rows of BF16 small multiples of 1/8, so that logits are exact; the caller frees. */
uint16_t *fixture_tokens(const fixture *f, int64_t n, t_random *random);

/*
 * Routes n rows on `threads` threads (0: no device) into I32 ids and F32 weights, which hold n *
 * topk each.
 */
void fixture_route(const fixture *f, int32_t threads, const uint16_t *x, const int64_t *input_ids,
                   int64_t n, int32_t *ids, float *weights);

/* Checks one token's ids and weights against the rule computed in double. */
void fixture_check(const fixture *f, const uint16_t *x, int64_t input_id, const int32_t *ids,
                   const float *weights);

#endif
