/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Graphs that two processes replay in lockstep, each on a GPU of its own: batches, their routes and
 * their sizes change from one replay to the next.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/workspace.h"
#include "gpu_ranks.h"

enum {
    TOKENS = 48,
    TOPK = 3,
    HIDDEN = 416,
    SETS = 6,
    GRAPHS = 4,
    REPLAYS = 10000,
    LOOK_EVERY = 20
};

static const model_recipe recipe = {MEGAMOE_FORMAT_MXFP4, HIDDEN,        224, 11,
                                    MEGAMOE_DTYPE_BF16,   {1.702f, 1, 7}};

static const size_t x_bytes = (size_t)TOKENS * HIDDEN * sizeof(uint16_t);
static const size_t ids_bytes = (size_t)TOKENS * TOPK * sizeof(int32_t);
static const size_t weights_bytes = (size_t)TOKENS * TOPK * sizeof(float);

/* Made before the processes are forked. */
typedef struct plan {
    setup s;
    batch sets[SETS];
    uint16_t *want[SETS];
    uint32_t epoch; /* 0: from the beginning */
    int32_t replays, gpus;
} plan;

/* Tokens of a rank in graph g: never the same on both. */
static int64_t tokens_of(int32_t number, int g) {
    static const int64_t counts[2][GRAPHS] = {{TOKENS, 0, 17, 5}, {3, TOKENS, 30, 0}};
    return counts[number][g];
}

/* What a rank's graphs read and write. */
typedef struct place {
    void *x, *ids, *weights, *y;
    void *kept; /* LOOK_EVERY results */
    void *set[SETS][3];
    CUgraph graphs[GRAPHS];
    CUgraphExec replays[GRAPHS];
} place;

static void capture(gpu_rank *g, place *p, int graph) {
    const int64_t n = tokens_of(g->r.rank, graph);
    const megamoe_view x = {p->x, MEGAMOE_DTYPE_BF16, n, 0},
                       ids = {p->ids, MEGAMOE_DTYPE_I32, n, 0};
    const megamoe_view weights = {p->weights, MEGAMOE_DTYPE_F32, n, 0};
    const megamoe_view y = {p->y, MEGAMOE_DTYPE_BF16, n, 0};
    gpu_check(mm_cu.cuStreamBeginCapture(g->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
              "cuStreamBeginCapture");
    T_OK(megamoe_stage(g->r.workspace, &x, &ids, &weights, n, g->stream));
    T_OK(megamoe_forward(g->r.layer, g->r.workspace, &y, g->stream));
    gpu_check(mm_cu.cuStreamEndCapture(g->stream, &p->graphs[graph]), "cuStreamEndCapture");
    gpu_check(mm_cu.cuGraphInstantiateWithFlags(&p->replays[graph], p->graphs[graph], 0),
              "cuGraphInstantiate");
}

static place place_open(gpu_rank *g, const plan *of) {
    place p = {.x = gpu_memory(x_bytes),
               .ids = gpu_memory(ids_bytes),
               .weights = gpu_memory(weights_bytes),
               .y = gpu_memory(x_bytes),
               .kept = gpu_memory(LOOK_EVERY * x_bytes)};
    for (int i = 0; i < SETS; i++) {
        p.set[i][0] = gpu_copy(of->sets[i].x, x_bytes);
        p.set[i][1] = gpu_copy(of->sets[i].ids, ids_bytes);
        p.set[i][2] = gpu_copy(of->sets[i].weights, weights_bytes);
    }
    for (int i = 0; i < GRAPHS; i++)
        capture(g, &p, i);
    return p;
}

static void place_close(place *p) {
    for (int i = 0; i < GRAPHS; i++) {
        gpu_check(mm_cu.cuGraphExecDestroy(p->replays[i]), "cuGraphExecDestroy");
        gpu_check(mm_cu.cuGraphDestroy(p->graphs[i]), "cuGraphDestroy");
    }
    for (int i = 0; i < SETS; i++)
        for (int k = 0; k < 3; k++)
            gpu_free(p->set[i][k]);
    void *const rest[] = {p->x, p->ids, p->weights, p->y, p->kept};
    for (int i = 0; i < 5; i++)
        gpu_free(rest[i]);
}

static CUdeviceptr address(const void *memory, size_t offset) {
    return (CUdeviceptr)(uintptr_t)memory + offset;
}

/* Enqueues one replay over a set, and the keeping of its result. */
static void enqueue(const gpu_rank *g, const place *p, int graph, int set, int slot) {
    void *const to[] = {p->x, p->ids, p->weights};
    const size_t bytes[] = {x_bytes, ids_bytes, weights_bytes};
    for (int k = 0; k < 3; k++)
        gpu_check(mm_cu.cuMemcpyDtoDAsync(address(to[k], 0), address(p->set[set][k], 0), bytes[k],
                                          g->stream),
                  "cuMemcpyDtoDAsync");
    gpu_check(mm_cu.cuMemsetD8Async(address(p->y, 0), 0xFF, x_bytes, g->stream), "cuMemsetD8Async");
    gpu_check(mm_cu.cuGraphLaunch(p->replays[graph], g->stream), "cuGraphLaunch");
    gpu_check(mm_cu.cuMemcpyDtoDAsync(address(p->kept, (size_t)slot * x_bytes), address(p->y, 0),
                                      x_bytes, g->stream),
              "cuMemcpyDtoDAsync");
}

static void check(const plan *of, int32_t number, int32_t replay, int graph, int set,
                  const uint16_t *y) {
    const batch part = batch_part(&of->sets[set], 0, tokens_of(number, graph));
    T_REQUIRE(gpu_same(y, of->want[set], &part, "rank %d, replay %d: graph %d, set %d", number,
                       replay, graph, set));
    const uint16_t *behind = y + part.tokens * HIDDEN, *end = y + (int64_t)TOKENS * HIDDEN;
    while (behind < end && *behind == 0xFFFF)
        behind++;
    T_REQUIRE(behind == end);
}

static void replay(const member *m) {
    const plan *of = m->argument;
    gpu_rank g;
    gpu_member_open(m, &of->s, m->rank % of->gpus, of->gpus > 1 ? 0 : 64, &g);
    if (of->epoch)
        T_OK(mm_cuda_workspace_set_epoch(g.r.workspace->cuda, of->epoch));
    place p = place_open(&g, of);
    char mine = 0, all[2];
    T_OK(megamoe_comm_allgather(g.r.comm, &mine, all, 1)); /* all epochs are set */
    t_random common = t_random_start(70), own = t_random_start(80 + (uint64_t)m->rank);
    uint16_t *y = malloc(LOOK_EVERY * x_bytes);
    T_REQUIRE(y);
    for (int32_t i = 0; i < of->replays; i += LOOK_EVERY) {
        int graphs[LOOK_EVERY], sets[LOOK_EVERY];
        for (int j = 0; j < LOOK_EVERY; j++) {
            graphs[j] = (int)t_below(&common, GRAPHS);
            sets[j] = (int)t_below(&own, SETS);
            enqueue(&g, &p, graphs[j], sets[j], j);
        }
        gpu_rank_wait(&g);
        gpu_read(y, p.kept, LOOK_EVERY * x_bytes);
        T_OK(megamoe_workspace_status(g.r.workspace, NULL));
        for (int j = 0; j < LOOK_EVERY; j++)
            check(of, m->rank, i + j, graphs[j], sets[j], y + (size_t)j * TOKENS * HIDDEN);
    }
    free(y);
    place_close(&p);
    megamoe_comm *comm = g.r.comm;
    gpu_rank_close(&g);
    megamoe_comm_close(comm);
}

static void check_lockstep(int32_t gpus, int32_t replays, uint32_t epoch,
                           megamoe_input_scale scale) {
    t_random r = t_random_start(60);
    model m = model_open(&recipe, &r);
    plan of = {.epoch = epoch, .replays = replays, .gpus = gpus};
    of.s = (setup){.weights = m.weights,
                   .deadline_ms = gpus > 1 ? GPU_DEADLINE_MS : 60000,
                   .topk = TOPK,
                   .tokens = TOKENS,
                   .pool_rows = 2 * (int64_t)TOKENS * TOPK,
                   .input_scale = scale};
    for (int i = 0; i < SETS; i++) {
        of.sets[i] = batch_random(&m, TOKENS, TOPK, (routing)(i % 3), &r);
        batch_mask(&of.sets[i], 5, &r);
        if (i == 4) /* nothing to do */
            memset(of.sets[i].ids, 0xFF, ids_bytes);
        of.want[i] = gpu_rows(&of.sets[i]);
        gpu_reference(&of.s, &of.sets[i], of.want[i]);
    }
    const int64_t start = crew_now_ms();
    crew_run(2, replay, &of);
    printf("  %d replays in %d ms\n", replays, (int)(crew_now_ms() - start));
    for (int i = 0; i < SETS; i++) {
        free(of.want[i]);
        batch_free(&of.sets[i]);
    }
    model_close(&m);
}

T_CASE(lockstep_ten_thousand_replays_of_two_processes) {
    check_lockstep(gpu_count(2, 2), REPLAYS, 0, MEGAMOE_SCALE_TOKEN);
}

T_CASE(lockstep_epochs_wrap) {
    check_lockstep(gpu_count(2, 2), 100, 0xFFFFFFE0u, MEGAMOE_SCALE_BLOCK);
}

T_CASE(lockstep_replays_of_ranks_that_take_turns) {
    check_lockstep(gpu_count(1, 1), 60, 0xFFFFFFF0u, MEGAMOE_SCALE_BLOCK);
}
