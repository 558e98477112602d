/* SPDX-License-Identifier: Apache-2.0 */
/* A traced forward has the bits of any other, and its spans tell of every tile once. */
#include "megamoe/trace.h"

#include <stdlib.h>
#include <string.h>

#include "gpu.h"

enum { EXPERTS = 6, TOKENS = 90, TOPK = 2, FC1_TILES = 3, FC2_TILES = 3, SPANS_MAX = 1 << 16 };

static megamoe_span spans[SPANS_MAX];

/* By worker, team and lane, then what begins first and, of these, what contains the others. */
static int in_order(const void *a, const void *b) {
    const megamoe_span *x = a, *y = b;
    if (x->worker != y->worker)
        return x->worker < y->worker ? -1 : 1;
    if (x->team != y->team)
        return x->team < y->team ? -1 : 1;
    if (x->lane != y->lane)
        return x->lane < y->lane ? -1 : 1;
    if (x->begin_us != y->begin_us)
        return x->begin_us < y->begin_us ? -1 : 1;
    if (x->end_us != y->end_us)
        return x->end_us > y->end_us ? -1 : 1;
    return (int)x->part - (int)y->part;
}

static bool same_row(const megamoe_span *a, const megamoe_span *b) {
    return a->worker == b->worker && a->team == b->team && a->lane == b->lane;
}

/* Spans of a row follow one another, but for parts inside of a tile. */
static void check_order(int64_t n) {
    qsort(spans, (size_t)n, sizeof *spans, in_order);
    double end = 0, whole = 0;
    for (int64_t i = 0; i < n; i++) {
        const megamoe_span *s = &spans[i];
        if (i == 0 || !same_row(s, &spans[i - 1]))
            end = whole = 0;
        T_CHECK(s->begin_us >= end && s->end_us >= s->begin_us);
        const bool inside = s->part == MEGAMOE_PART_MULTIPLY || s->part == MEGAMOE_PART_FINISH;
        if (inside)
            T_CHECK(s->end_us <= whole);
        if (s->part == MEGAMOE_PART_WHOLE && s->lane == MEGAMOE_LANE_MULTIPLY)
            whole = s->end_us;
        else
            end = s->end_us;
    }
}

static int64_t count(int64_t n, megamoe_span_phase phase, megamoe_span_part part) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++)
        found += spans[i].phase == phase && spans[i].part == part;
    return found;
}

/* Tokens of an expert's tiles of one product and row tile, and how many tiles these are. */
static int64_t tokens_of(int64_t n, megamoe_span_phase phase, int32_t expert, int32_t tile,
                         int64_t *tiles) {
    int64_t tokens = 0;
    *tiles = 0;
    for (int64_t i = 0; i < n; i++)
        if (spans[i].phase == phase && spans[i].part == MEGAMOE_PART_WHOLE &&
            spans[i].expert == expert && spans[i].tile == tile) {
            tokens += spans[i].tokens;
            ++*tiles;
        }
    return tokens;
}

static void check_spans(const rank *r, int32_t width, int64_t blocks) {
    int64_t n, dropped, received[EXPERTS], all_tiles = 0;
    const int32_t local = EXPERTS / r->ranks;
    T_OK(megamoe_workspace_get_trace(r->workspace, spans, SPANS_MAX, &n, &dropped));
    T_REQUIRE(n > 0 && n <= SPANS_MAX);
    T_EQ_INT(dropped, 0);
    T_OK(megamoe_workspace_receive_counts(r->workspace, received, local));
    check_order(n);
    T_EQ_INT(count(n, MEGAMOE_SPAN_COUNT, MEGAMOE_PART_WHOLE), blocks);
    T_EQ_INT(count(n, MEGAMOE_SPAN_DISPATCH, MEGAMOE_PART_WHOLE), blocks);
    T_EQ_INT(count(n, MEGAMOE_SPAN_COMBINE, MEGAMOE_PART_WHOLE), blocks);
    for (int32_t e = 0; e < local; e++)
        for (int32_t second = 0; second < 2; second++)
            for (int32_t tile = 0; tile < (second ? FC2_TILES : FC1_TILES); tile++) {
                int64_t tiles;
                T_EQ_INT(
                    tokens_of(n, second ? MEGAMOE_SPAN_FC2 : MEGAMOE_SPAN_FC1, e, tile, &tiles),
                    received[e]);
                T_EQ_INT(tiles, (received[e] + width - 1) / width);
                all_tiles += tiles;
            }
    for (int32_t part = MEGAMOE_PART_WHOLE; part <= MEGAMOE_PART_STORE; part++)
        T_EQ_INT(count(n, MEGAMOE_SPAN_FC1, (megamoe_span_part)part) +
                     count(n, MEGAMOE_SPAN_FC2, (megamoe_span_part)part),
                 all_tiles);
}

static void check_format(const gpu *g, megamoe_format format, int32_t ranks) {
    t_random random = t_random_start((uint64_t)format * 10 + (uint64_t)ranks);
    const model_recipe recipe = {format, 608, 320, EXPERTS, MEGAMOE_DTYPE_NONE, {0, 0, 0}};
    model m = model_open(&recipe, &random);
    batch b = batch_random(&m, TOKENS, TOPK, ROUTING_HOT, &random);
    const int32_t blocks = 6;
    const setup s = {.weights = m.weights,
                     .ranks = ranks,
                     .folded = ranks > 1,
                     .topk = TOPK,
                     .tokens = TOKENS,
                     .pool_rows = TOKENS * TOPK,
                     .deadline_ms = GPU_DEADLINE_MS,
                     .trace = 256};
    fleet f = gpu_fleet_open(&s, blocks);
    gpu_batch buffers = gpu_batch_open(TOKENS + 1, b.hidden, b.topk);
    uint16_t *want = gpu_rows(&b), *y = gpu_rows(&b);
    gpu_reference(&s, &b, want);
    int32_t tiles[GPU_TILES_MAX];
    const int32_t n = gpu_tiles(&f, tiles);
    for (int32_t i = 0; i < n; i++) {
        gpu_force_tile(&f, tiles[i]);
        gpu_forward(&f, &buffers, &b, y, g->stream);
        gpu_same(y, want, &b, "%d ranks, tile %d, traced", ranks, tiles[i]);
        for (int32_t r = 0; r < ranks; r++)
            check_spans(&f.rank[r], tiles[i], blocks / ranks);
    }
    free(want);
    free(y);
    gpu_batch_close(&buffers);
    fleet_close(&f);
    batch_free(&b);
    model_close(&m);
}

T_CASE(trace_tells_of_every_tile) {
    gpu g = gpu_start();
    for (int32_t ranks = 1; ranks <= 2; ranks++) {
        check_format(&g, MEGAMOE_FORMAT_MXFP4, ranks);
        check_format(&g, MEGAMOE_FORMAT_NVFP4, ranks);
    }
    gpu_end(&g);
}

T_CASE(trace_that_is_full) {
    gpu g = gpu_start();
    t_random random = t_random_start(77);
    const model_recipe recipe = {MEGAMOE_FORMAT_MXFP4, 608,      320, EXPERTS,
                                 MEGAMOE_DTYPE_NONE,   {0, 0, 0}};
    model m = model_open(&recipe, &random);
    batch b = batch_random(&m, TOKENS, TOPK, ROUTING_RANDOM, &random);
    const setup s = {.weights = m.weights,
                     .topk = TOPK,
                     .tokens = TOKENS,
                     .deadline_ms = GPU_DEADLINE_MS,
                     .trace = 1};
    fleet f = gpu_fleet_open(&s, 2);
    gpu_batch buffers = gpu_batch_open(TOKENS + 1, b.hidden, b.topk);
    uint16_t *want = gpu_rows(&b), *y = gpu_rows(&b);
    gpu_reference(&s, &b, want);
    gpu_forward(&f, &buffers, &b, y, g.stream);
    gpu_same(y, want, &b, "with a full trace");
    int64_t n, dropped;
    T_OK(megamoe_workspace_get_trace(f.rank[0].workspace, spans, SPANS_MAX, &n, &dropped));
    T_CHECK(dropped > 0);
    check_order(n);
    free(want);
    free(y);
    gpu_batch_close(&buffers);
    fleet_close(&f);
    batch_free(&b);
    model_close(&m);
    gpu_end(&g);
}
