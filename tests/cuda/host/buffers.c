/* SPDX-License-Identifier: Apache-2.0 */
/* Where a workspace's buffers lie: the sizes of abi.h, nothing overlaps, everything is aligned. */
#include "cuda/buffers.h"

#include <stdlib.h>

#include "t.h"

typedef struct place {
    uint64_t start, bytes;
} place;

static int by_start(const void *a, const void *b) {
    const uint64_t x = ((const place *)a)->start, y = ((const place *)b)->start;
    return (x > y) - (x < y);
}

/* Buffers follow one another and fill [0, bytes) with gaps of less than 1024. */
static void check_places(place *places, size_t n, uint64_t bytes) {
    size_t used = 0;
    for (size_t i = 0; i < n; i++)
        if (places[i].bytes)
            places[used++] = places[i];
        else
            T_EQ_INT(places[i].start, 0);
    qsort(places, used, sizeof *places, by_start);
    uint64_t end = 0;
    for (size_t i = 0; i < used; i++) {
        T_EQ_INT(places[i].start % 1024, 0);
        T_CHECK(places[i].start >= end && places[i].start < end + 1024);
        end = places[i].start + places[i].bytes;
    }
    T_CHECK(bytes >= end && bytes < end + 1024);
}

static void check(const megamoe_shape *s, const megamoe_capacity *c, int32_t ranks) {
    const mm_cuda_buffers b = mm_cuda_buffers_of(s, c, ranks);
    const uint64_t tokens = (uint64_t)c->tokens, routes = tokens * (uint64_t)s->topk;
    const uint64_t r = (uint64_t)ranks, physical = (uint64_t)s->physical_experts;
    const uint64_t rows = (uint64_t)b.rows, units = (uint64_t)b.units;
    const uint64_t hidden = ((uint64_t)s->hidden + 127) / 128;
    const uint64_t intermediate = ((uint64_t)s->intermediate + 127) / 128;
    const uint64_t local = (physical + r - 1) / r, pool = (uint64_t)c->pool_rows;
    T_EQ_INT(b.hidden_chunks, hidden);
    T_EQ_INT(b.intermediate_chunks, intermediate);
    T_EQ_INT(b.local_max, local);
    T_EQ_INT(rows, (pool + 15) / 16 * 16 + 16 * local + 144);
    T_EQ_INT(units, pool / 8 + local + 1);
    T_EQ_INT(b.results_stride, ((uint64_t)s->hidden + 255) / 256 * 256);
    T_CHECK(b.view_stride >= s->hidden && b.view_stride % 16 == 0);

    const bool token = s->input_scale == MEGAMOE_SCALE_TOKEN;
    const bool block = s->input_scale == MEGAMOE_SCALE_BLOCK;
    const bool block_f32 = s->input_scale == MEGAMOE_SCALE_BLOCK_F32;
    const mm_cuda_window *w = &b.window;
    place window[] = {
        {w->cells, 2 * r * 32},
        {w->counts, 2 * r * physical * 4},
        {w->arrivals, local * r * 4},
        {w->aborted, 4},
        {w->codes, hidden * rows * 128},
        {w->scales, token ? 0 : hidden * rows * (block_f32 ? 4 : 1)},
        {w->records, rows * 16},
        {w->results, routes * (uint64_t)b.results_stride * 2},
        {w->returned, routes * 4},
    };
    check_places(window, sizeof window / sizeof *window, w->bytes);

    const mm_cuda_local *l = &b.local;
    T_EQ_INT(l->state, 0);
    place places[] = {
        {l->state, sizeof(mm_cuda_state)},
        {l->windows, r * 8},
        {l->staged_codes, tokens * hidden * 128},
        {l->staged_scales, token ? tokens * 4 : 0},
        {l->staged_tiny, tokens},
        {l->staged_blocks, block ? tokens * hidden : 0},
        {l->staged_block_scales, block_f32 ? tokens * hidden * 4 : 0},
        {l->staged_ids, routes * 4},
        {l->staged_weights, routes * 4},
        {l->view_codes, tokens * (uint64_t)b.view_stride},
        {l->order, routes * 16},
        {l->dispatched, 2 * physical * 4},
        {l->fc1_done, 2 * units * 4},
        {l->fc2_done, 2 * units * 4},
        {l->received, local * 4},
        {l->times, MM_CUDA_BLOCKS_MAX * MM_CUDA_TIMES * 8},
        {l->hidden_codes, intermediate * rows * 128},
        {l->hidden_scales, intermediate * rows},
        {l->traced_blocks, c->trace ? MM_CUDA_BLOCKS_MAX * sizeof(mm_cuda_traced_block) : 0},
        {l->traced_tiles, MM_CUDA_BLOCKS_MAX * MM_CUDA_TRACED_TEAMS * (uint64_t)c->trace *
                              sizeof(mm_cuda_traced_tile)},
    };
    check_places(places, sizeof places / sizeof *places, l->bytes);

    uint64_t sum = 0;
    for (int32_t i = 0; i < MM_CUDA_PART_COUNT; i++) {
        T_CHECK(b.parts[i].what[0]);
        T_EQ_INT(b.parts[i].bytes > 0, i != MM_CUDA_PART_TRACE || c->trace);
        sum += b.parts[i].bytes;
    }
    T_EQ_INT(sum, w->bytes + l->bytes);
}

T_CASE(buffers_have_their_sizes_and_do_not_overlap) {
    const struct {
        int32_t hidden, intermediate, physical, topk, ranks;
        int64_t tokens, pool_rows;
    } cases[] = {
        {4096, 2048, 256, 6, 8, 8192, 98304},
        {7168, 3072, 384, 6, 8, 1, 1},
        {1, 1, 1, 1, 1, 1, 1},
        {2880, 2880, 128, 4, 1, 100, 400},
        {2048, 512, 512, 10, 2, 333, 6660},
        {129, 257, 10, 3, 4, 5, 30},
        {1 << 20, 1 << 20, 1024, 16, 64, 1 << 24, INT32_MAX},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int32_t scale = MEGAMOE_SCALE_TOKEN; scale <= MEGAMOE_SCALE_BLOCK_F32; scale++) {
            const megamoe_shape shape = {.hidden = cases[i].hidden,
                                         .intermediate = cases[i].intermediate,
                                         .experts = cases[i].physical,
                                         .topk = cases[i].topk,
                                         .input_scale = (megamoe_input_scale)scale,
                                         .physical_experts = cases[i].physical};
            const megamoe_capacity capacity = {
                .tokens = cases[i].tokens, .pool_rows = cases[i].pool_rows, .trace = scale ? 0 : 7};
            check(&shape, &capacity, cases[i].ranks);
        }
}

/* Every route fits, wherever experts' rows begin, and so does what a tile reads beyond its own. */
T_CASE(pools_hold_the_worst_split) {
    const megamoe_shape shape = {
        .hidden = 128, .intermediate = 128, .experts = 24, .topk = 4, .physical_experts = 24};
    const megamoe_capacity capacity = {.tokens = 64, .pool_rows = 250};
    const mm_cuda_buffers b = mm_cuda_buffers_of(&shape, &capacity, 4);
    t_random random = t_random_start(0);
    for (int32_t trial = 0; trial < 1000; trial++) {
        int32_t left = 250, rows = 0, units = 0;
        for (int32_t e = 0; e < b.local_max; e++) {
            const int32_t routes =
                e == b.local_max - 1 ? left : (int32_t)t_below(&random, (uint32_t)left + 1);
            left -= routes;
            rows += (routes + 15) / 16 * 16;
            units += (routes + 7) / 8;
        }
        T_CHECK(rows + 144 <= b.rows);
        T_CHECK(units < b.units);
    }
}
