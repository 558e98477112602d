/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_routes.h"

#include <stdlib.h>

#include "synth.h"

int64_t bench_routes_live(const bench_routes *routes, int64_t tokens) {
    return routes->live > 0 && routes->live < tokens ? routes->live : tokens;
}

void bench_routes_draw(const bench_routes *routes, int64_t tokens, int32_t rank, uint64_t draw,
                       int32_t *ids) {
    synth_routes(routes->seed + (uint64_t)tokens + draw + ((uint64_t)rank << 32), tokens,
                 routes->experts, routes->topk, ids);
    for (int64_t i = bench_routes_live(routes, tokens) * routes->topk; i < tokens * routes->topk;
         i++)
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
    const int64_t slots = tokens * routes->topk;
    int32_t *ids = malloc(((size_t)slots + 1) * sizeof *ids);
    int64_t *received = calloc((size_t)routes->experts, sizeof *received);
    const bool good = ids != NULL && received != NULL;
    *work = (bench_work){0};
    for (int32_t r = 0; good && r < ranks; r++) {
        bench_routes_draw(routes, tokens, r, draw, ids);
        for (int64_t i = 0; i < slots; i++)
            if (ids[i] >= 0)
                received[ids[i]]++;
    }
    for (int32_t r = 0, first = 0; good && r < ranks; r++) {
        const int32_t experts = routes->experts / ranks + (r < routes->experts % ranks);
        add_rank(received + first, experts, tile, work);
        first += experts;
    }
    free(ids);
    free(received);
    return good;
}
