/* SPDX-License-Identifier: Apache-2.0 */
/* Which experts the tokens of a measured batch go to: the one place where their ids are made. */
#ifndef BENCH_ROUTES_H
#define BENCH_ROUTES_H

#include "routing.h"

typedef struct bench_routes {
    const routing_profile *routing; /* fits the layer; borrowed */
    uint64_t seed;
    int64_t live; /* tokens of a batch that go to experts; the ids of the others are -1; 0: all */
} bench_routes;

/* Tokens of a batch of `tokens` that go to experts. */
int64_t bench_routes_live(const bench_routes *routes, int64_t tokens);

/* ids[tokens][topk] of one rank's tokens. Another `draw` is another batch of the same kind. */
void bench_routes_draw(const bench_routes *routes, int64_t tokens, int32_t rank, uint64_t draw,
                       int32_t *ids);

/* The work of the rank that has most of it, where each rank owns a contiguous part of the experts.
 */
typedef struct bench_work {
    int32_t experts; /* that received a token */
    int64_t routes;  /* received */
    int64_t tiles;   /* of so many routes of one expert */
    /* Of all ranks: the routes of the expert that received most by the mean over experts. */
    double imbalance;
} bench_work;

/* tile: routes of a tile; 0: tiles are not counted. False: out of memory. */
bool bench_routes_count(const bench_routes *routes, int64_t tokens, int32_t ranks, uint64_t draw,
                        int64_t tile, bench_work *work);

#endif
