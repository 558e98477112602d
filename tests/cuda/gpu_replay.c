/* SPDX-License-Identifier: Apache-2.0 */
/* Graphs of stage and forward, replayed over changing batches with poisoned buffers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/workspace.h"
#include "gpu.h"
#include "layer/layer.h"

enum { TOPK = 3, HIDDEN = 160, SETS = 8, REPLAYS = 10000, LOOK_EVERY = 10 };

/* Graphs of so many tokens, of which the reference computes the first `distinct`. */
typedef struct batch_size {
    int64_t tokens, distinct;
} batch_size;

/* Blocks hold a few routes from the beginning on; many they sort, and sum tokens of their own. */
static const batch_size few = {40, 40}, many = {2500, 48};

/* Batches of one size, on the GPU, and what comes out of each. */
typedef struct sets {
    size_t x_bytes, ids_bytes, weights_bytes; /* of each */
    batch b[SETS];
    void *x[SETS], *ids[SETS], *weights[SETS];
    uint16_t *want[SETS];
} sets;

static sets open_sets(const model *m, const setup *s, const batch_size *size, t_random *r) {
    const size_t tokens = (size_t)size->tokens;
    sets made = {.x_bytes = tokens * HIDDEN * sizeof(uint16_t),
                 .ids_bytes = tokens * TOPK * sizeof(int32_t),
                 .weights_bytes = tokens * TOPK * sizeof(float)};
    for (int i = 0; i < SETS; i++) {
        batch *b = &made.b[i];
        *b = batch_random(m, size->tokens, TOPK, (routing)(i % 3), r);
        batch_mask(b, 7, r);
        if (i == 5) /* nothing to do for anyone */
            memset(b->ids, 0xFF, made.ids_bytes);
        if (i == 6)
            b->x[3 * HIDDEN] = 0x7FC0;
        batch_repeat(b, size->distinct);
        made.x[i] = gpu_copy(b->x, made.x_bytes);
        made.ids[i] = gpu_copy(b->ids, made.ids_bytes);
        made.weights[i] = gpu_copy(b->weights, made.weights_bytes);
        made.want[i] = gpu_rows(b);
        gpu_reference_repeated(s, b, size->distinct, made.want[i]);
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
    int64_t tokens;
    void *x, *ids, *weights, *y;
    CUgraph graph;
    CUgraphExec replay;
} captured;

static void enqueue(fleet *f, const captured *c, CUstream stream) {
    megamoe_forward_call calls[MAX_RANKS];
    megamoe_view y[MAX_RANKS];
    for (int32_t r = 0; r < f->ranks; r++) {
        int64_t first;
        const batch all = {.tokens = c->tokens};
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

static captured capture(fleet *f, const sets *s, CUstream stream) {
    captured c = {.tokens = s->b[0].tokens,
                  .x = gpu_memory(s->x_bytes),
                  .ids = gpu_memory(s->ids_bytes),
                  .weights = gpu_memory(s->weights_bytes),
                  .y = gpu_memory(s->x_bytes)};
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
        if (ws->ranks > 1)
            fill(ws->window + b->window.counts,
                 2 * (uint64_t)ws->ranks * (uint64_t)ws->shape.physical_experts * sizeof(int32_t),
                 stream);
        fill(ws->window + b->window.codes, rows * chunks * 128, stream);
        if (ws->shape.input_scale == MEGAMOE_SCALE_BLOCK)
            fill(ws->window + b->window.scales, rows * chunks, stream);
        fill(ws->window + b->window.records, rows * sizeof(mm_cuda_record), stream);
        fill(ws->window + b->window.results, routes * (uint64_t)b->results_stride * 2, stream);
        fill(ws->local + b->local.staged_codes, tokens * chunks * 128, stream);
        if (ws->shape.input_scale == MEGAMOE_SCALE_TOKEN)
            fill(ws->local + b->local.staged_scales, tokens * sizeof(float), stream);
        else
            fill(ws->local + b->local.staged_blocks, tokens * chunks, stream);
        fill(ws->local + b->local.staged_tiny, tokens, stream);
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
    } copies[] = {{c->x, s->x[set], s->x_bytes},
                  {c->ids, s->ids[set], s->ids_bytes},
                  {c->weights, s->weights[set], s->weights_bytes}};
    for (int i = 0; i < 3; i++)
        gpu_check(mm_cu.cuMemcpyDtoDAsync((CUdeviceptr)(uintptr_t)copies[i].to,
                                          (CUdeviceptr)(uintptr_t)copies[i].from, copies[i].bytes,
                                          stream),
                  "cuMemcpyDtoDAsync");
    fill((CUdeviceptr)(uintptr_t)c->y, s->x_bytes, stream);
}

/* Replays in batches of LOOK_EVERY, whose results are kept on the GPU until they are looked at. */
static void replay(const gpu *g, fleet *f, const captured *c, const sets *s, int32_t replays,
                   uint64_t stream) {
    t_random r = t_random_start(stream);
    const size_t x_bytes = s->x_bytes;
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
            T_REQUIRE(gpu_same(y + (size_t)j * x_bytes / sizeof *y, s->want[which[j]],
                               &s->b[which[j]], "replay %d of set %d", i + j, which[j]));
    }
    for (int32_t k = 0; k < f->ranks; k++)
        T_OK(megamoe_workspace_status(f->rank[k].workspace, NULL));
    free(y);
    gpu_free(kept);
}

static const model_recipe mxfp4 = {MEGAMOE_FORMAT_MXFP4, HIDDEN,        224, 11,
                                   MEGAMOE_DTYPE_BF16,   {1.702f, 1, 7}};
static const model_recipe nvfp4 = {MEGAMOE_FORMAT_NVFP4, HIDDEN,    224, 11,
                                   MEGAMOE_DTYPE_NONE,   {0, 0, 10}};

static setup setup_of(const model *m, int32_t ranks, int64_t tokens) {
    return (setup){.weights = m->weights,
                   .device = "cuda:0",
                   .deadline_ms = GPU_DEADLINE_MS,
                   .ranks = ranks,
                   .folded = true,
                   .topk = TOPK,
                   .tokens = tokens,
                   .pool_rows = tokens * TOPK,
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

typedef struct replays {
    const model_recipe *recipe;
    megamoe_nvfp4_mode nvfp4;
    const batch_size *size;
    int32_t ranks, count, tile;
    uint32_t epoch; /* 0: from the beginning */
    uint32_t aged;  /* of all words, or 0 */
} replays;

static void check_replays(const replays *p) {
    gpu g = gpu_start();
    t_random r = t_random_start(10 + (uint64_t)p->ranks);
    model m = model_open(p->recipe, &r);
    setup s = setup_of(&m, p->ranks, p->size->tokens);
    s.options.nvfp4 = p->nvfp4;
    sets given = open_sets(&m, &s, p->size, &r);
    fleet f = fleet_open(&s);
    gpu_force_tile(&f, p->tile);
    for (int32_t k = 0; k < p->ranks && p->epoch; k++)
        T_OK(mm_cuda_workspace_set_epoch(f.rank[k].workspace->cuda, p->epoch));
    if (p->aged)
        age_words(&f, p->aged);
    captured c = capture(&f, &given, g.stream);
    replay(&g, &f, &c, &given, p->count, 20 + (uint64_t)p->ranks);
    release(&c);
    fleet_close(&f);
    close_sets(&given);
    model_close(&m);
    gpu_end(&g);
}

/* Of few tokens, with MXFP4. */
static void check_few(int32_t ranks, int32_t count, int32_t tile, uint32_t epoch, uint32_t aged) {
    check_replays(&(replays){&mxfp4, MEGAMOE_NVFP4_EXACT, &few, ranks, count, tile, epoch, aged});
}

T_CASE(replay_ten_thousand_replays_of_one_rank) {
    check_few(1, REPLAYS, 0, 0, 0);
}

T_CASE(replay_ten_thousand_replays_of_four_folded_ranks) {
    check_few(4, REPLAYS, 0, 0, 0);
}

T_CASE(replay_replays_of_eight_ranks_in_the_narrowest_tile) {
    check_few(8, REPLAYS / 10, 8, 0, 0);
}

/* In tiles of two teams, and of one. */
T_CASE(replay_many_tokens) {
    for (int32_t ranks = 1; ranks <= 4; ranks *= 2)
        for (int32_t tile = 40; tile <= 96; tile += 56)
            check_replays(&(replays){.recipe = &mxfp4,
                                     .size = &many,
                                     .ranks = ranks,
                                     .count = REPLAYS / 20,
                                     .tile = tile});
}

T_CASE(replay_nvfp4) {
    for (int32_t ranks = 1; ranks <= 4; ranks *= 2)
        for (int mode = 0; mode < 2; mode++) {
            replays p = {.recipe = &nvfp4,
                         .nvfp4 = mode ? MEGAMOE_NVFP4_FOLDED : MEGAMOE_NVFP4_EXACT,
                         .size = &few,
                         .ranks = ranks,
                         .count = REPLAYS / 10};
            check_replays(&p);
            p.size = &many;
            p.count = REPLAYS / 50;
            check_replays(&p);
        }
}

T_CASE(replay_epochs_wrap) {
    check_few(1, 100, 0, 0xFFFFFFF0u, 0);
    check_few(2, 100, 0, 0xFFFFFFF0u, 0);
    check_few(8, 100, 16, 0xFFFFFFEFu, 0);
}

/* Forwards of all numbers lie between these words and the one that would take them for its own. */
T_CASE(replay_words_of_long_ago_are_forgotten) {
    const uint32_t forget = MM_CUDA_FORGET_EVERY;
    for (uint32_t next = 1; next <= 3; next++) {
        check_few(1, 10, 0, forget - 2, forget + next);
        check_few(4, 10, 0, forget - 2, forget + next);
    }
}

/* A forward alone in a graph, over whatever was staged last; and calls between replays. */
T_CASE(replay_without_stage) {
    gpu g = gpu_start();
    t_random r = t_random_start(50);
    model m = model_open(&mxfp4, &r);
    const setup s = setup_of(&m, 2, few.tokens);
    sets given = open_sets(&m, &s, &few, &r);
    fleet f = fleet_open(&s);
    gpu_batch buffers = gpu_batch_open(few.tokens, HIDDEN, TOPK);
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
