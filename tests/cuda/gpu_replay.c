/* SPDX-License-Identifier: Apache-2.0 */
/* Graphs of stage and forward, replayed over changing batches with poisoned buffers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/workspace.h"
#include "gpu.h"
#include "layer/layer.h"

enum { TOKENS = 40, TOPK = 3, HIDDEN = 160, SETS = 8, REPLAYS = 10000, LOOK_EVERY = 10 };

/* Batches of one size, on the GPU, and what comes out of each. */
typedef struct sets {
    batch b[SETS];
    void *x[SETS], *ids[SETS], *weights[SETS];
    uint16_t *want[SETS];
} sets;

static const size_t x_bytes = (size_t)TOKENS * HIDDEN * sizeof(uint16_t);
static const size_t ids_bytes = (size_t)TOKENS * TOPK * sizeof(int32_t);
static const size_t weights_bytes = (size_t)TOKENS * TOPK * sizeof(float);

static sets open_sets(const model *m, const setup *s, t_random *r) {
    sets made;
    for (int i = 0; i < SETS; i++) {
        made.b[i] = batch_random(m, TOKENS, TOPK, (routing)(i % 3), r);
        batch_mask(&made.b[i], 7, r);
        if (i == 5) /* nothing to do for anyone */
            memset(made.b[i].ids, 0xFF, ids_bytes);
        if (i == 6)
            made.b[i].x[3 * HIDDEN] = 0x7FC0;
        made.x[i] = gpu_copy(made.b[i].x, x_bytes);
        made.ids[i] = gpu_copy(made.b[i].ids, ids_bytes);
        made.weights[i] = gpu_copy(made.b[i].weights, weights_bytes);
        made.want[i] = gpu_rows(&made.b[i]);
        gpu_reference(s, &made.b[i], made.want[i]);
    }
    return made;
}

static void close_sets(sets *s) {
    for (int i = 0; i < SETS; i++) {
        gpu_free(s->x[i]);
        gpu_free(s->ids[i]);
        gpu_free(s->weights[i]);
        free(s->want[i]);
        batch_free(&s->b[i]);
    }
}

/* The memory that a captured graph reads and writes. */
typedef struct captured {
    void *x, *ids, *weights, *y;
    CUgraph graph;
    CUgraphExec replay;
} captured;

static void enqueue(fleet *f, const captured *c, CUstream stream) {
    megamoe_forward_call calls[MAX_RANKS];
    megamoe_view y[MAX_RANKS];
    for (int32_t r = 0; r < f->ranks; r++) {
        int64_t first;
        const batch all = {.tokens = TOKENS};
        const int64_t n = share_of(&all, r, f->ranks, &first).tokens;
        const megamoe_view x = {(uint16_t *)c->x + first * HIDDEN, MEGAMOE_DTYPE_BF16, n, 0};
        const megamoe_view ids = {(int32_t *)c->ids + first * TOPK, MEGAMOE_DTYPE_I32, n, 0};
        const megamoe_view weights = {(float *)c->weights + first * TOPK, MEGAMOE_DTYPE_F32, n, 0};
        y[r] = (megamoe_view){(uint16_t *)c->y + first * HIDDEN, MEGAMOE_DTYPE_BF16, n, 0};
        T_OK(megamoe_stage(f->rank[r].workspace, &x, &ids, &weights, n, stream));
        calls[r] = (megamoe_forward_call){f->rank[r].layer, f->rank[r].workspace, &y[r], stream};
    }
    if (f->folded)
        T_OK(megamoe_forward_group(calls, f->ranks));
    else
        T_OK(megamoe_forward(f->rank[0].layer, f->rank[0].workspace, &y[0], stream));
}

static captured capture(fleet *f, CUstream stream) {
    captured c = {.x = gpu_memory(x_bytes),
                  .ids = gpu_memory(ids_bytes),
                  .weights = gpu_memory(weights_bytes),
                  .y = gpu_memory(x_bytes)};
    gpu_check(mm_cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
              "cuStreamBeginCapture");
    enqueue(f, &c, stream);
    gpu_check(mm_cu.cuStreamEndCapture(stream, &c.graph), "cuStreamEndCapture");
    gpu_check(mm_cu.cuGraphInstantiateWithFlags(&c.replay, c.graph, 0), "cuGraphInstantiate");
    return c;
}

static void release(captured *c) {
    gpu_check(mm_cu.cuGraphExecDestroy(c->replay), "cuGraphExecDestroy");
    gpu_check(mm_cu.cuGraphDestroy(c->graph), "cuGraphDestroy");
    gpu_free(c->x);
    gpu_free(c->ids);
    gpu_free(c->weights);
    gpu_free(c->y);
}

static void fill(CUdeviceptr at, uint64_t bytes, CUstream stream) {
    if (bytes)
        gpu_check(mm_cu.cuMemsetD8Async(at, 0xFF, bytes, stream), "cuMemsetD8Async");
}

/*
 * 0xFF (a NaN in every format, an id out of range, a route far outside) into all that a forward
 * must write before it reads: pools, records, returned rows, staged rows. Words that carry epochs
 * and counters are what forwards hand to each other.
 */
static void poison(const fleet *f, CUstream stream) {
    for (int32_t r = 0; r < f->ranks; r++) {
        const mm_cuda_workspace *ws = f->rank[r].workspace->cuda;
        const mm_cuda_buffers *b = &ws->buffers;
        const uint64_t rows = (uint64_t)b->rows, chunks = (uint64_t)b->hidden_chunks;
        const uint64_t h = (uint64_t)b->intermediate_chunks;
        const uint64_t tokens = (uint64_t)ws->capacity.tokens;
        const uint64_t routes = tokens * (uint64_t)ws->shape.topk;
        fill(ws->window + b->window.codes, rows * chunks * 128, stream);
        if (ws->shape.input_scale == MEGAMOE_SCALE_BLOCK)
            fill(ws->window + b->window.scales, rows * chunks, stream);
        fill(ws->window + b->window.records, rows * sizeof(mm_cuda_record), stream);
        fill(ws->window + b->window.results, routes * (uint64_t)b->results_stride * 2, stream);
        fill(ws->local + b->local.staged_codes, tokens * chunks * 128, stream);
        fill(ws->local + b->local.staged_ids, routes * sizeof(int32_t), stream);
        fill(ws->local + b->local.staged_weights, routes * sizeof(float), stream);
        fill(ws->local + b->local.order, routes * 4 * sizeof(int32_t), stream);
        fill(ws->local + b->local.hidden_codes, rows * h * 128, stream);
        fill(ws->local + b->local.hidden_scales, rows * h, stream);
    }
}

static void put(const captured *c, const sets *s, int set, CUstream stream) {
    const struct {
        void *to, *from;
        size_t bytes;
    } copies[] = {{c->x, s->x[set], x_bytes},
                  {c->ids, s->ids[set], ids_bytes},
                  {c->weights, s->weights[set], weights_bytes}};
    for (int i = 0; i < 3; i++)
        gpu_check(mm_cu.cuMemcpyDtoDAsync((CUdeviceptr)(uintptr_t)copies[i].to,
                                          (CUdeviceptr)(uintptr_t)copies[i].from, copies[i].bytes,
                                          stream),
                  "cuMemcpyDtoDAsync");
    fill((CUdeviceptr)(uintptr_t)c->y, x_bytes, stream);
}

/* Replays in batches of LOOK_EVERY, whose results are kept on the GPU until they are looked at. */
static void replay(const gpu *g, fleet *f, const captured *c, const sets *s, int32_t replays,
                   uint64_t stream) {
    t_random r = t_random_start(stream);
    uint8_t *kept = gpu_memory(LOOK_EVERY * x_bytes);
    uint16_t *y = malloc(LOOK_EVERY * x_bytes);
    T_REQUIRE(y);
    for (int32_t i = 0; i < replays; i += LOOK_EVERY) {
        int which[LOOK_EVERY];
        for (int j = 0; j < LOOK_EVERY; j++) {
            which[j] = (int)t_below(&r, SETS);
            put(c, s, which[j], g->stream);
            poison(f, g->stream);
            gpu_check(mm_cu.cuGraphLaunch(c->replay, g->stream), "cuGraphLaunch");
            gpu_check(mm_cu.cuMemcpyDtoDAsync((CUdeviceptr)(uintptr_t)(kept + (size_t)j * x_bytes),
                                              (CUdeviceptr)(uintptr_t)c->y, x_bytes, g->stream),
                      "cuMemcpyDtoDAsync");
        }
        gpu_check(mm_cu.cuStreamSynchronize(g->stream), "cuStreamSynchronize");
        gpu_read(y, kept, LOOK_EVERY * x_bytes);
        for (int j = 0; j < LOOK_EVERY; j++)
            T_REQUIRE(gpu_same(y + (size_t)j * TOKENS * HIDDEN, s->want[which[j]], &s->b[which[j]],
                               "replay %d of set %d", i + j, which[j]));
    }
    for (int32_t k = 0; k < f->ranks; k++)
        T_OK(megamoe_workspace_status(f->rank[k].workspace, NULL));
    free(y);
    gpu_free(kept);
}

static const model_recipe recipe = {MEGAMOE_FORMAT_MXFP4, HIDDEN,        224, 11,
                                    MEGAMOE_DTYPE_BF16,   {1.702f, 1, 7}};

static setup setup_of(const model *m, int32_t ranks) {
    return (setup){.weights = m->weights,
                   .device = "cuda:0",
                   .deadline_ms = GPU_DEADLINE_MS,
                   .ranks = ranks,
                   .folded = true,
                   .topk = TOPK,
                   .tokens = TOKENS,
                   .pool_rows = (int64_t)TOKENS * TOPK,
                   .input_scale = ranks == 1 ? MEGAMOE_SCALE_TOKEN : MEGAMOE_SCALE_BLOCK};
}

/* As if each route's and source's word had last been written in `epoch`. */
static void age_words(const fleet *f, uint32_t epoch) {
    for (int32_t r = 0; r < f->ranks; r++) {
        const mm_cuda_workspace *ws = f->rank[r].workspace->cuda;
        const mm_cuda_window *w = &ws->buffers.window;
        gpu_check(mm_cu.cuMemsetD32Async(ws->window + w->arrivals, epoch,
                                         (w->aborted - w->arrivals) / sizeof epoch, NULL),
                  "cuMemsetD32Async");
        gpu_check(mm_cu.cuMemsetD32Async(ws->window + w->returned, epoch,
                                         (w->codes - w->returned) / sizeof epoch, NULL),
                  "cuMemsetD32Async");
    }
    gpu_wait();
}

/* `epoch` 0: from the beginning. `aged`: all words, or 0. */
static void check_replays(int32_t ranks, int32_t replays, uint32_t epoch, uint32_t aged,
                          int32_t tile) {
    gpu g = gpu_start();
    t_random r = t_random_start(10 + (uint64_t)ranks);
    model m = model_open(&recipe, &r);
    const setup s = setup_of(&m, ranks);
    sets given = open_sets(&m, &s, &r);
    fleet f = fleet_open(&s);
    gpu_force_tile(&f, tile);
    for (int32_t k = 0; k < ranks && epoch; k++)
        T_OK(mm_cuda_workspace_set_epoch(f.rank[k].workspace->cuda, epoch));
    if (aged)
        age_words(&f, aged);
    captured c = capture(&f, g.stream);
    replay(&g, &f, &c, &given, replays, 20 + (uint64_t)ranks);
    release(&c);
    fleet_close(&f);
    close_sets(&given);
    model_close(&m);
    gpu_end(&g);
}

T_CASE(replay_ten_thousand_replays_of_one_rank) {
    check_replays(1, REPLAYS, 0, 0, 0);
}

T_CASE(replay_ten_thousand_replays_of_four_folded_ranks) {
    check_replays(4, REPLAYS, 0, 0, 0);
}

T_CASE(replay_replays_of_eight_ranks_in_the_narrowest_tile) {
    check_replays(8, REPLAYS / 10, 0, 0, 8);
}

T_CASE(replay_epochs_wrap) {
    check_replays(1, 100, 0xFFFFFFF0u, 0, 0);
    check_replays(2, 100, 0xFFFFFFF0u, 0, 0);
    check_replays(8, 100, 0xFFFFFFEFu, 0, 16);
}

/* Forwards of all numbers lie between these words and the one that would take them for its own. */
T_CASE(replay_words_of_long_ago_are_forgotten) {
    const uint32_t forget = MM_CUDA_FORGET_EVERY;
    for (uint32_t next = 1; next <= 3; next++) {
        check_replays(1, 10, forget - 2, forget + next, 0);
        check_replays(4, 10, forget - 2, forget + next, 0);
    }
}

/* A forward alone in a graph, over whatever was staged last; and calls between replays. */
T_CASE(replay_without_stage) {
    gpu g = gpu_start();
    t_random r = t_random_start(50);
    model m = model_open(&recipe, &r);
    const setup s = setup_of(&m, 2);
    sets given = open_sets(&m, &s, &r);
    fleet f = fleet_open(&s);
    gpu_batch buffers = gpu_batch_open(TOKENS, HIDDEN, TOPK);
    uint16_t *y = gpu_rows(&given.b[0]);
    gpu_forward(&f, &buffers, &given.b[0], y, g.stream);
    CUgraph graph;
    CUgraphExec replayed;
    gpu_check(mm_cu.cuStreamBeginCapture(g.stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
              "cuStreamBeginCapture");
    T_OK(gpu_compute(&f, &buffers, g.stream));
    gpu_check(mm_cu.cuStreamEndCapture(g.stream, &graph), "cuStreamEndCapture");
    gpu_check(mm_cu.cuGraphInstantiateWithFlags(&replayed, graph, 0), "cuGraphInstantiate");
    for (int i = 0; i < 200; i++) {
        const int set = (int)t_below(&r, SETS);
        gpu_batch_put(&buffers, &given.b[set]);
        gpu_stage(&f, &buffers, g.stream);
        if (i % 3)
            gpu_check(mm_cu.cuGraphLaunch(replayed, g.stream), "cuGraphLaunch");
        else
            T_OK(gpu_compute(&f, &buffers, g.stream));
        gpu_batch_result(&buffers, y);
        gpu_same(y, given.want[set], &given.b[set], "call %d of set %d", i, set);
    }
    gpu_check(mm_cu.cuGraphExecDestroy(replayed), "cuGraphExecDestroy");
    gpu_check(mm_cu.cuGraphDestroy(graph), "cuGraphDestroy");
    free(y);
    gpu_batch_close(&buffers);
    fleet_close(&f);
    close_sets(&given);
    model_close(&m);
    gpu_end(&g);
}
