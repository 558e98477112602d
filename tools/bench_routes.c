/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_routes.h"

#include <stdlib.h>

int64_t bench_routes_live(const bench_routes *routes, int64_t tokens) {
    return routes->live > 0 && routes->live < tokens ? routes->live : tokens;
}

void bench_routes_draw(const bench_routes *routes, int64_t tokens, int32_t rank, uint64_t draw,
                       int32_t *ids) {
    const int64_t topk = routes->routing->topk;
    routing_draw(routes->routing, 0,
                 routes->seed + (uint64_t)tokens + draw + ((uint64_t)rank << 32), tokens, ids);
    for (int64_t i = bench_routes_live(routes, tokens) * topk; i < tokens * topk; i++)
        ids[i] = -1;
}

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* Of `experts` experts, and with what is known of other ranks. */
static void add_rank(const int64_t *received, int32_t experts, int64_t tile, bench_work *work) {
    int64_t active = 0, routes = 0, tiles = 0;
    for (int32_t e = 0; e < experts; e++) {
        active += received[e] > 0;
        routes += received[e];
        tiles += tile > 0 ? (received[e] + tile - 1) / tile : 0;
    }
    work->experts = (int32_t)larger(active, work->experts);
    work->routes = larger(routes, work->routes);
    work->tiles = larger(tiles, work->tiles);
}

bool bench_routes_count(const bench_routes *routes, int64_t tokens, int32_t ranks, uint64_t draw,
                        int64_t tile, bench_work *work) {
    const int32_t all = routes->routing->experts;
    const int64_t slots = tokens * routes->routing->topk;
    *work = (bench_work){0};
    int32_t *ids = calloc((size_t)(ranks * slots) + 1, sizeof *ids);
    if (ids == NULL)
        return false;
    for (int32_t r = 0; r < ranks; r++)
        bench_routes_draw(routes, tokens, r, draw, ids + r * slots);
    work->imbalance = routing_measure(routes->routing, ids, ranks * tokens).imbalance;
    free(ids);
    for (int32_t r = 0, first = 0; r < ranks; r++) {
        const int32_t experts = all / ranks + (r < all % ranks);
        add_rank(routes->routing->received + first, experts, tile, work);
        first += experts;
    }
    return true;
}
