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

bool bench_routes_count(const bench_routes *routes, int64_t tokens, int32_t ranks, uint64_t draw,
                        bench_work *work) {
    const int64_t slots = tokens * routes->topk;
    int32_t *ids = malloc(((size_t)slots + 1) * sizeof *ids);
    int64_t *received = calloc((size_t)routes->experts, sizeof *received);
    *work = (bench_work){0};
    for (int32_t r = 0; ids != NULL && received != NULL && r < ranks; r++) {
        bench_routes_draw(routes, tokens, r, draw, ids);
        for (int64_t i = 0; i < slots; i++)
            if (ids[i] >= 0)
                received[ids[i]]++;
    }
    for (int32_t r = 0, e = 0; received != NULL && r < ranks; r++) {
        bench_work of_rank = {0};
        for (const int32_t end = e + routes->experts / ranks + (r < routes->experts % ranks);
             e < end; e++) {
            of_rank.experts += received[e] > 0;
            of_rank.routes += received[e];
        }
        work->experts = of_rank.experts > work->experts ? of_rank.experts : work->experts;
        work->routes = of_rank.routes > work->routes ? of_rank.routes : work->routes;
    }
    const bool good = ids != NULL && received != NULL;
    free(ids);
    free(received);
    return good;
}
