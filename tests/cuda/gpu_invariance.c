/* SPDX-License-Identifier: Apache-2.0 */
/* On a GPU too a token's output is the same bits whatever is around it and wherever experts lie. */
#include <stdlib.h>

#include "gpu.h"

enum { TOKENS = 4096, TOPK = 4, HIDDEN = 256, EXPERTS = 12 };

/* A layer, a batch, and what the narrowest tile makes of it; some rows also checked otherwise. */
typedef struct subject {
    const gpu *g;
    model m;
    batch b;
    setup s;
    uint16_t *want, *y;
    gpu_batch buffers;
} subject;

static const char *const routings[] = {"random", "hot", "repeated"};

static subject open_subject(const gpu *g, int kind, int format, megamoe_accumulate accumulate,
                            uint64_t stream) {
    t_random r = t_random_start(stream);
    const model_recipe recipe = {format ? MEGAMOE_FORMAT_NVFP4 : MEGAMOE_FORMAT_MXFP4,
                                 HIDDEN,
                                 160,
                                 EXPERTS,
                                 MEGAMOE_DTYPE_BF16,
                                 {1.702f, 1, 7}};
    subject s = {.g = g, .m = model_open(&recipe, &r)};
    s.b = batch_random(&s.m, TOKENS, TOPK, (routing)kind, &r);
    batch_mask(&s.b, 9, &r);
    s.b.x[5 * HIDDEN + 3] = 0x7FC0;
    s.want = gpu_rows(&s.b);
    s.y = gpu_rows(&s.b);
    s.buffers = gpu_batch_open(TOKENS, HIDDEN, TOPK);
    s.s = (setup){.weights = s.m.weights,
                  .device = "cuda:0",
                  .deadline_ms = GPU_DEADLINE_MS,
                  .topk = TOPK,
                  .tokens = TOKENS,
                  .input_scale = kind == 1 ? MEGAMOE_SCALE_BLOCK : MEGAMOE_SCALE_TOKEN,
                  .options = {.accumulate = accumulate,
                              .nvfp4 = format == 2 ? MEGAMOE_NVFP4_FOLDED : MEGAMOE_NVFP4_EXACT}};
    return s;
}

static void close_subject(subject *s) {
    gpu_batch_close(&s->buffers);
    free(s->want);
    free(s->y);
    batch_free(&s->b);
    model_close(&s->m);
}

static void check_part(subject *s, fleet *f, int64_t first, int64_t n, const char *what,
                       int number) {
    const batch part = batch_part(&s->b, first, n);
    gpu_forward(f, &s->buffers, &part, s->y, s->g->stream);
    gpu_same(s->y, s->want + first * HIDDEN, &part, "%d tokens, %s %d", (int)n, what, number);
}

/* All tokens at once with the narrowest tile; the first of them against the reference. */
static void take_want(subject *s, fleet *f) {
    int32_t tiles[GPU_TILES_MAX];
    (void)gpu_tiles(f, tiles);
    gpu_force_tile(f, tiles[0]);
    gpu_forward(f, &s->buffers, &s->b, s->want, s->g->stream);
    const batch few = batch_part(&s->b, 0, 24);
    gpu_reference(&s->s, &few, s->y);
    gpu_same(s->want, s->y, &few, "against the reference");
}

static void check_batches(const gpu *g, int kind, int format, megamoe_accumulate accumulate) {
    t_random r = t_random_start(10 + (uint64_t)kind);
    subject s = open_subject(g, kind, format, accumulate, 20 + (uint64_t)(3 * kind + format));
    fleet f = fleet_open(&s.s);
    take_want(&s, &f);
    int32_t tiles[GPU_TILES_MAX];
    const int32_t count = gpu_tiles(&f, tiles);
    for (int32_t i = -1; i < count; i++) {
        const int32_t tile = i < 0 ? 0 : tiles[i];
        gpu_force_tile(&f, tile);
        for (int64_t n = 1; n <= TOKENS; n += 1 + n * 2 / 5)
            check_part(&s, &f, (int64_t)t_below(&r, (uint32_t)(TOKENS - n + 1)), n, routings[kind],
                       tile);
        check_part(&s, &f, 0, TOKENS, routings[kind], tile);
    }
    fleet_close(&f);
    close_subject(&s);
}

T_CASE(invariance_batches_up_to_4096_tokens_in_every_tile) {
    gpu g = gpu_start();
    for (int kind = 0; kind < 3; kind++)
        for (int format = 0; format < 3; format++)
            for (int promote = 0; promote < 2; promote++)
                check_batches(&g, kind, format, (megamoe_accumulate)promote);
    gpu_end(&g);
}

/* Room for every route at one rank. */
static fleet open_ranks(const subject *s, int32_t ranks, const int32_t *map, int32_t physical) {
    setup how = s->s;
    how.ranks = ranks;
    how.folded = true;
    how.tokens = (TOKENS + ranks - 1) / ranks;
    how.pool_rows = (int64_t)TOKENS * TOPK;
    how.options.physical_to_logical = map;
    how.options.physical_experts = physical;
    return fleet_open(&how);
}

static void check_ranks(subject *s, int32_t ranks, const int32_t *map, int32_t physical,
                        const char *what) {
    fleet f = open_ranks(s, ranks, map, physical);
    int32_t tiles[GPU_TILES_MAX];
    const int32_t count = gpu_tiles(&f, tiles);
    for (int32_t i = -1; i < count; i++) {
        gpu_force_tile(&f, i < 0 ? 0 : tiles[i]);
        /* Fewer tokens than ranks: some have none. */
        static const int64_t sizes[] = {0, 1, 3, 7, 8, 64, 333, TOKENS};
        for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++)
            check_part(s, &f, (TOKENS - sizes[j]) / 3, sizes[j], what, ranks);
    }
    fleet_close(&f);
}

T_CASE(invariance_folded_ranks) {
    gpu g = gpu_start();
    for (int i = 0; i < 9; i++) {
        const int kind = i / 3, format = i % 3;
        subject s =
            open_subject(&g, kind, format, (megamoe_accumulate)(kind == format), 40 + (uint64_t)i);
        fleet f = fleet_open(&s.s);
        take_want(&s, &f);
        fleet_close(&f);
        for (int32_t ranks = 1; ranks <= 8; ranks++)
            if (ranks <= 4 || ranks == 8)
                check_ranks(&s, ranks, NULL, 0, "folded ranks");
        close_subject(&s);
    }
    gpu_end(&g);
}

T_CASE(invariance_placement_and_replicas) {
    static const int32_t reversed[] = {11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0};
    static const int32_t replicas[] = {6, 0, 6, 1, 3, 2, 4, 5, 6, 3, 0, 7, 8, 9, 10, 11, 6};
    gpu g = gpu_start();
    for (int kind = 0; kind < 3; kind++) {
        subject s = open_subject(&g, kind, 0, MEGAMOE_ACCUMULATE_MMA, 50 + (uint64_t)kind);
        fleet f = fleet_open(&s.s);
        take_want(&s, &f);
        fleet_close(&f);
        for (int32_t ranks = 1; ranks <= 4; ranks++) {
            check_ranks(&s, ranks, reversed, 12, "reversed experts on ranks");
            check_ranks(&s, ranks, replicas, 17, "replicas on ranks");
        }
        close_subject(&s);
    }
    gpu_end(&g);
}

/* The share of multiprocessors that a forward may use. */
T_CASE(invariance_thread_blocks) {
    gpu g = gpu_start();
    subject s = open_subject(&g, 0, 0, MEGAMOE_ACCUMULATE_MMA, 60);
    fleet f = fleet_open(&s.s);
    take_want(&s, &f);
    fleet_close(&f);
    static const int32_t counts[] = {1, 2, 3, 17, 66, 131};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        fleet few = gpu_fleet_open(&s.s, counts[i]);
        check_part(&s, &few, 0, 1, "thread blocks", counts[i]);
        check_part(&s, &few, 100, 40, "thread blocks", counts[i]);
        check_part(&s, &few, 200, 1000, "thread blocks", counts[i]);
        if (counts[i] < 4) /* more of a block's own tokens than it has bits for */
            check_part(&s, &few, 0, TOKENS, "thread blocks", counts[i]);
        fleet_close(&few);
    }
    close_subject(&s);
    gpu_end(&g);
}
