/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranks that are processes: each on a GPU of its own, or two that take turns on one. Their parent
 * never uses the driver, so these cases come before all others of this program.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "cuda/workspace.h"
#include "gpu_ranks.h"

enum { TOKENS = 90, TOPK = 3, HIDDEN = 416, EXPERTS = 11, BATCHES = 6, SLOW_DEADLINE_MS = 60000 };

static const model_recipe recipe = {MEGAMOE_FORMAT_MXFP4, HIDDEN,        224, EXPERTS,
                                    MEGAMOE_DTYPE_BF16,   {1.702f, 1, 7}};
static const model_recipe recipe_nvfp4 = {MEGAMOE_FORMAT_NVFP4, HIDDEN,    224, EXPERTS,
                                          MEGAMOE_DTYPE_NONE,   {1, 0, 10}};

/* What ranks compute, made before they are forked. */
typedef struct work {
    model m;
    setup s;
    batch b[BATCHES];
    uint16_t *want[BATCHES];
    int32_t gpus, forwards, max_ctas;
    int signal;              /* that rank 1 is sent where it is lost */
    _Atomic int32_t *shared; /* [SHARED]: among all processes */
} work;

enum { SHARED_READY /* and the next, by rank */, SHARED_KILLED_MS = 2, SHARED_WORDS = 16 };

static work work_open(const model_recipe *of, megamoe_input_scale scale, int32_t gpus,
                      uint64_t stream) {
    work w = {.gpus = gpus,
              .forwards = 20,
              .signal = SIGKILL,
              .shared = crew_share(SHARED_WORDS * sizeof(int32_t))};
    t_random r = t_random_start(stream);
    w.m = model_open(of, &r);
    w.s = (setup){.weights = w.m.weights,
                  .deadline_ms = gpus > 1 ? GPU_DEADLINE_MS : SLOW_DEADLINE_MS,
                  .topk = TOPK,
                  .tokens = TOKENS,
                  .pool_rows = (int64_t)TOKENS * TOPK,
                  .input_scale = scale};
    static const int64_t sizes[BATCHES] = {TOKENS, 1, 0, 17, 64, 2};
    for (int i = 0; i < BATCHES; i++) {
        w.b[i] = batch_random(&w.m, sizes[i], TOPK, (routing)(i % 3), &r);
        batch_mask(&w.b[i], 7, &r);
        w.want[i] = gpu_rows(&w.b[i]);
        gpu_reference(&w.s, &w.b[i], w.want[i]);
    }
    return w;
}

static void work_close(work *w) {
    for (int i = 0; i < BATCHES; i++) {
        free(w->want[i]);
        batch_free(&w->b[i]);
    }
    model_close(&w->m);
    crew_unshare((void *)w->shared, SHARED_WORDS * sizeof(int32_t));
}

static void member_open(const member *m, gpu_rank *g) {
    const work *w = m->argument;
    gpu_member_open(m, &w->s, m->rank % w->gpus, w->max_ctas, g);
}

static void member_close(gpu_rank *g) {
    megamoe_comm *comm = g->r.comm;
    gpu_rank_close(g);
    megamoe_comm_close(comm);
}

/* Batches of all sizes in turn, spread over the ranks; every rank checks its rows. */
static void compute(const member *m) {
    const work *w = m->argument;
    gpu_rank g;
    member_open(m, &g);
    uint16_t *y = gpu_rows(&w->b[0]);
    for (int32_t i = 0; i < w->forwards; i++) {
        const batch *b = &w->b[i % BATCHES];
        int64_t first;
        const batch part = share_of(b, m->rank, m->size, &first);
        gpu_rank_stage(&g, &part);
        T_OK(gpu_rank_forward(&g));
        gpu_rank_result(&g, y);
        T_OK(megamoe_workspace_status(g.r.workspace, NULL));
        T_REQUIRE(gpu_same(y, w->want[i % BATCHES] + first * HIDDEN, &part,
                           "rank %d of %d, forward %d", m->rank, m->size, i));
    }
    free(y);
    member_close(&g);
}

static void check_crew(const model_recipe *of, megamoe_input_scale scale, int32_t gpus,
                       int32_t ranks, int32_t max_ctas, uint64_t stream) {
    work w = work_open(of, scale, gpus, stream);
    w.max_ctas = max_ctas;
    const int64_t start = crew_now_ms();
    crew_run(ranks, compute, &w);
    printf("  %d processes on %d GPUs: %d forwards and creation in %d ms\n", ranks, gpus,
           w.forwards, (int)(crew_now_ms() - start));
    work_close(&w);
}

T_CASE(processes_compute_on_gpus_of_their_own) {
    const int32_t gpus = gpu_count(2, 2);
    check_crew(&recipe, MEGAMOE_SCALE_TOKEN, gpus, 2, 0, 1);
    check_crew(&recipe, MEGAMOE_SCALE_BLOCK, gpus, 2, 0, 2);
    check_crew(&recipe_nvfp4, MEGAMOE_SCALE_BLOCK, gpus, 2, 0, 3);
}

/* Kernels of different processes take turns; each waits for the other's turn. */
T_CASE(processes_share_a_gpu) {
    (void)gpu_count(1, 1);
    check_crew(&recipe, MEGAMOE_SCALE_BLOCK, 1, 2, 64, 4);
}

T_CASE(processes_share_two_gpus) {
    (void)gpu_count(2, 2);
    check_crew(&recipe, MEGAMOE_SCALE_BLOCK, 2, 4, 64, 5);
}

/* ---- ranks that are late ---- */

static void be_late(const member *m) {
    const work *w = m->argument;
    gpu_rank g;
    member_open(m, &g);
    int64_t first;
    const batch part = share_of(&w->b[0], m->rank, m->size, &first);
    uint16_t *y = gpu_rows(&w->b[0]);
    gpu_rank_stage(&g, &part);
    if (m->rank == 1)
        crew_pause_ms(1000);
    T_OK(gpu_rank_forward(&g));
    gpu_rank_result(&g, y);
    T_OK(megamoe_workspace_status(g.r.workspace, NULL));
    gpu_same(y, w->want[0] + first * HIDDEN, &part, "rank %d", m->rank);
    free(y);
    member_close(&g);
}

T_CASE(processes_wait_for_a_late_rank) {
    work w = work_open(&recipe, MEGAMOE_SCALE_TOKEN, gpu_count(1, 2), 6);
    crew_run(2, be_late, &w);
    work_close(&w);
}

/* The other rank hears of it at its next call. */
static void miss_deadline(const member *m) {
    const work *w = m->argument;
    gpu_rank g;
    member_open(m, &g);
    int64_t first;
    const batch part = share_of(&w->b[0], m->rank, m->size, &first);
    gpu_rank_stage(&g, &part);
    gpu_rank_wait(&g);
    if (m->rank == 0) {
        const int64_t start = crew_now_ms();
        T_OK(gpu_rank_forward(&g));
        gpu_rank_wait(&g);
        megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
        T_STATUS(megamoe_workspace_status(g.r.workspace, &d), MEGAMOE_ETIMEDOUT);
        T_EQ_INT(d.rank, 1);
        T_EQ_INT(d.phase, MEGAMOE_PHASE_COUNT);
        const int64_t waited = crew_now_ms() - start;
        T_CHECK_MSG(waited >= 490 && waited < 1500, "%d ms", (int)waited);
    } else {
        crew_pause_ms(2500);
        T_STATUS(gpu_rank_forward(&g), MEGAMOE_EPEER);
        T_CONTAINS(megamoe_last_error(), "rank 0 has aborted");
    }
    member_close(&g);
}

T_CASE(processes_give_up_at_the_deadline) {
    work w = work_open(&recipe, MEGAMOE_SCALE_TOKEN, gpu_count(1, 2), 7);
    w.s.deadline_ms = 500;
    crew_run(2, miss_deadline, &w);
    work_close(&w);
}

/* ---- ranks that are killed, or stopped ---- */

/* This rank is where it is to be when rank 1 is lost. */
static void be_ready(const member *m) {
    const work *w = m->argument;
    atomic_store(&w->shared[SHARED_READY + m->rank], 1);
}

_Noreturn static void await_death(const member *m) {
    be_ready(m);
    for (;;)
        crew_pause_ms(1000);
}

/*
 * Publishes rank 1's part of forward 1 by hand, as its kernel would, and then does nothing more:
 * `routes` of it go to expert 0, which is rank 0's.
 */
static void publish(const gpu_rank *g, int32_t routes) {
    const mm_cuda_workspace *ws = g->r.workspace->cuda;
    const mm_cuda_window *window = &ws->buffers.window;
    const uint64_t parity = 1, place = parity * 2 + 1;
    const int32_t counts[EXPERTS] = {routes};
    const mm_cuda_cell cell = {.token = -1, .slot = -1, .key = g->r.layer->cuda.key};
    const CUdeviceptr peer = ws->windows[0];
    const CUdeviceptr to = peer + window->cells + place * sizeof cell;
    gpu_check(
        mm_cu.cuMemcpyHtoD(peer + window->counts + place * sizeof counts, counts, sizeof counts),
        "cuMemcpyHtoD");
    gpu_check(mm_cu.cuMemcpyHtoD(to, &cell, sizeof cell), "cuMemcpyHtoD");
    gpu_wait();
    gpu_check(mm_cu.cuMemsetD32Async(to + offsetof(mm_cuda_cell, epoch), 1, 1, NULL),
              "cuMemsetD32Async");
    gpu_wait();
}

/*
 * A rank is told of a death at once, of one that is stopped at the deadline; and its GPU computes
 * with others as if nothing had been.
 */
static void survive(const work *w, gpu_rank *g, megamoe_phase phase) {
    megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
    const bool stopped = w->signal == SIGSTOP;
    T_STATUS(megamoe_workspace_status(g->r.workspace, &d),
             stopped ? MEGAMOE_ETIMEDOUT : MEGAMOE_EPEER);
    const int32_t heard = (int32_t)crew_now_ms() - atomic_load(&w->shared[SHARED_KILLED_MS]);
    printf("  phase %d: heard after %d ms: %s\n", (int)d.phase, heard, d.message);
    T_CHECK_MSG(heard < 1000 + (stopped ? w->s.deadline_ms : 0), "%d ms", heard);
    if (!stopped) {
        T_EQ_INT(d.rank, 1);
        T_CONTAINS(d.message, "the process of rank 1 has ended");
    }
    if (phase != MEGAMOE_PHASE_NONE)
        T_EQ_INT(d.phase, phase);
    T_STATUS(gpu_rank_forward(g), MEGAMOE_ESTATE);

    gpu_rank alone = {.r = {.ranks = 1}};
    T_OK(megamoe_comm_self(&alone.r.comm));
    gpu_rank_open(&alone, &w->s, 0, 0);
    gpu_rank_create(&alone, &w->s);
    uint16_t *y = gpu_rows(&w->b[0]);
    gpu_rank_stage(&alone, &w->b[0]);
    T_OK(gpu_rank_forward(&alone));
    gpu_rank_result(&alone, y);
    T_OK(megamoe_workspace_status(alone.r.workspace, NULL));
    gpu_same(y, w->want[0], &w->b[0], "after the death of a rank");
    free(y);
    member_close(&alone);
}

/* Rank 0's routes that rank 1 owns, or none. */
static batch routes_to_rank_1(const work *w, bool some) {
    batch b = batch_part(&w->b[0], 0, some ? 20 : 0);
    b.ids = malloc(20 * TOPK * sizeof *b.ids);
    T_REQUIRE(b.ids);
    for (int i = 0; i < 20 * TOPK; i++)
        b.ids[i] = EXPERTS - 1 - i % TOPK;
    return b;
}

static void wait_in_phase(const member *m, megamoe_phase phase) {
    const work *w = m->argument;
    gpu_rank g;
    member_open(m, &g);
    if (m->rank == 1) {
        if (phase != MEGAMOE_PHASE_COUNT)
            publish(&g, phase == MEGAMOE_PHASE_EXPERTS ? 5 : 0);
        await_death(m);
    }
    batch b = routes_to_rank_1(w, phase == MEGAMOE_PHASE_COMBINE);
    gpu_rank_stage(&g, &b);
    T_OK(gpu_rank_forward(&g));
    be_ready(m);
    gpu_rank_wait(&g);
    survive(w, &g, phase);
    free(b.ids);
    member_close(&g);
}

static void lost_before_it_counts(const member *m) {
    wait_in_phase(m, MEGAMOE_PHASE_COUNT);
}

static void lost_before_it_dispatches(const member *m) {
    wait_in_phase(m, MEGAMOE_PHASE_EXPERTS);
}

static void lost_before_it_returns_rows(const member *m) {
    wait_in_phase(m, MEGAMOE_PHASE_COMBINE);
}

/* Between forwards: the other rank hears of it at its next call. */
static void killed_between_forwards(const member *m) {
    const work *w = m->argument;
    gpu_rank g;
    member_open(m, &g);
    int64_t first;
    const batch part = share_of(&w->b[0], m->rank, m->size, &first);
    gpu_rank_stage(&g, &part);
    T_OK(gpu_rank_forward(&g));
    gpu_rank_wait(&g);
    if (m->rank == 1)
        await_death(m);
    be_ready(m);
    while (!atomic_load(&w->shared[SHARED_KILLED_MS]))
        crew_pause_ms(1);
    crew_pause_ms(100);
    T_STATUS(gpu_rank_forward(&g), MEGAMOE_EPEER);
    T_CONTAINS(megamoe_last_error(), "the process of rank 1 has ended");
    member_close(&g);
}

/* While kernels of both run, one after the other without a pause. */
static void killed_at_work(const member *m) {
    const work *w = m->argument;
    gpu_rank g;
    member_open(m, &g);
    int64_t first;
    const batch part = share_of(&w->b[0], m->rank, m->size, &first);
    gpu_rank_stage(&g, &part);
    megamoe_status status = MEGAMOE_OK;
    be_ready(m);
    while (status == MEGAMOE_OK) {
        for (int i = 0; status == MEGAMOE_OK && i < 8; i++)
            status = gpu_rank_forward(&g);
        gpu_rank_wait(&g);
        if (status != MEGAMOE_OK || m->rank != 0)
            continue;
        megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
        status = megamoe_workspace_status(g.r.workspace, &d);
    }
    T_EQ_INT(m->rank, 0);
    T_EQ_INT(status, MEGAMOE_EPEER);
    survive(w, &g, MEGAMOE_PHASE_NONE);
    member_close(&g);
}

static void lose_one(work *w, void (*run)(const member *m), int32_t after_ms) {
    for (int i = 0; i < SHARED_WORDS; i++)
        atomic_store(&w->shared[i], 0);
    crew c = crew_start(2, run, w);
    const int64_t until = crew_now_ms() + SLOW_DEADLINE_MS;
    while (!(atomic_load(&w->shared[SHARED_READY]) && atomic_load(&w->shared[SHARED_READY + 1])) &&
           crew_now_ms() < until)
        crew_pause_ms(1);
    crew_pause_ms(after_ms);
    atomic_store(&w->shared[SHARED_KILLED_MS], (int32_t)crew_now_ms());
    kill(c.processes[1], w->signal);
    if (w->signal == SIGSTOP) {
        crew_pause_ms(w->s.deadline_ms + 1000);
        kill(c.processes[1], SIGKILL);
    }
    int codes[CREW_MAX] = {0};
    crew_wait(&c, codes);
    T_CHECK_MSG(codes[0] == 0, "the survivor: %d", codes[0]);
    T_EQ_INT(codes[1], -SIGKILL);
}

T_CASE(processes_survive_a_death_in_each_phase) {
    work w = work_open(&recipe, MEGAMOE_SCALE_TOKEN, gpu_count(1, 2), 8);
    w.s.deadline_ms = SLOW_DEADLINE_MS;
    lose_one(&w, lost_before_it_counts, 300);
    lose_one(&w, lost_before_it_dispatches, 300);
    lose_one(&w, lost_before_it_returns_rows, 300);
    lose_one(&w, killed_between_forwards, 300);
    work_close(&w);
}

T_CASE(processes_survive_one_that_is_stopped_in_each_phase) {
    work w = work_open(&recipe, MEGAMOE_SCALE_TOKEN, gpu_count(1, 2), 11);
    w.s.deadline_ms = 1500;
    w.signal = SIGSTOP;
    lose_one(&w, lost_before_it_counts, 300);
    lose_one(&w, lost_before_it_dispatches, 300);
    lose_one(&w, lost_before_it_returns_rows, 300);
    work_close(&w);
}

/* ---- a rank that closes in good order ---- */

enum { CLOSED_FORWARD, CLOSED_LATER, CLOSED_REPLAY };

static CUgraphExec capture(gpu_rank *g, CUgraph *graph) {
    CUgraphExec replay;
    gpu_check(mm_cu.cuStreamBeginCapture(g->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
              "cuStreamBeginCapture");
    T_OK(gpu_rank_forward(g));
    gpu_check(mm_cu.cuStreamEndCapture(g->stream, graph), "cuStreamEndCapture");
    gpu_check(mm_cu.cuGraphInstantiateWithFlags(&replay, *graph, 0), "cuGraphInstantiate");
    return replay;
}

static void expect_closed(gpu_rank *g, int64_t start) {
    megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
    gpu_rank_wait(g);
    T_STATUS(megamoe_workspace_status(g->r.workspace, &d), MEGAMOE_EPEER);
    T_EQ_INT(d.rank, 1);
    T_EQ_INT(d.phase, MEGAMOE_PHASE_COUNT);
    T_CONTAINS(d.message, "waiting for rank 1: it has closed its workspace");
    const int32_t waited = (int32_t)(crew_now_ms() - start);
    printf("  heard after %d ms\n", waited);
    T_CHECK_MSG(waited < 5000, "%d ms", waited);
    T_STATUS(gpu_rank_forward(g), MEGAMOE_ESTATE);
}

/* Rank 1 makes one forward. Rank 0 waits in its second one, or begins it after rank 1's end. */
static void close_early(const member *m) {
    const work *w = m->argument;
    const int32_t how = w->forwards;
    gpu_rank g;
    CUgraph graph = NULL;
    CUgraphExec replay = NULL;
    member_open(m, &g);
    int64_t first;
    const batch part = share_of(&w->b[0], m->rank, m->size, &first);
    uint16_t *y = gpu_rows(&w->b[0]);
    gpu_rank_stage(&g, &part);
    if (m->rank == 0 && how == CLOSED_REPLAY)
        replay = capture(&g, &graph);
    T_OK(gpu_rank_forward(&g));
    gpu_rank_result(&g, y);
    T_OK(megamoe_workspace_status(g.r.workspace, NULL));
    gpu_same(y, w->want[0] + first * HIDDEN, &part, "rank %d", m->rank);
    free(y);
    if (m->rank == 1) {
        while (how == CLOSED_FORWARD && !atomic_load(&w->shared[SHARED_READY]))
            crew_pause_ms(1);
        crew_pause_ms(100);
        member_close(&g);
        return;
    }
    if (how == CLOSED_FORWARD) {
        T_OK(gpu_rank_forward(&g));
        atomic_store(&w->shared[SHARED_READY], 1);
    } else
        while (!mm_comm_closed(g.r.comm, 1))
            crew_pause_ms(1);
    const int64_t start = crew_now_ms();
    if (how == CLOSED_LATER) {
        T_STATUS(gpu_rank_forward(&g), MEGAMOE_EPEER);
        T_CONTAINS(megamoe_last_error(), "waiting for rank 1: it has closed its communicator");
        T_STATUS(gpu_rank_forward(&g), MEGAMOE_ESTATE);
    } else {
        if (replay)
            gpu_check(mm_cu.cuGraphLaunch(replay, g.stream), "cuGraphLaunch");
        expect_closed(&g, start);
    }
    if (replay) {
        gpu_check(mm_cu.cuGraphExecDestroy(replay), "cuGraphExecDestroy");
        gpu_check(mm_cu.cuGraphDestroy(graph), "cuGraphDestroy");
    }
    member_close(&g);
}

T_CASE(processes_hear_of_a_rank_that_closes) {
    work w = work_open(&recipe, MEGAMOE_SCALE_TOKEN, gpu_count(1, 2), 10);
    w.s.deadline_ms = SLOW_DEADLINE_MS;
    for (w.forwards = CLOSED_FORWARD; w.forwards <= CLOSED_REPLAY; w.forwards++) {
        atomic_store(&w.shared[SHARED_READY], 0);
        crew_run(2, close_early, &w);
    }
    work_close(&w);
}

/* ---- placing ---- */

enum { PHYSICAL = 17 };

static megamoe_status place(gpu_rank *g, const int32_t *map, const megamoe_weights *weights) {
    megamoe_placement placement = MEGAMOE_INIT(megamoe_placement);
    placement.physical_to_logical = map;
    placement.physical_experts = map ? PHYSICAL : 0;
    placement.weights = weights;
    return megamoe_layer_place(g->r.comm, g->r.layer, &placement);
}

static void compute_and_place(const member *m) {
    const work *w = m->argument;
    gpu_rank g;
    member_open(m, &g);
    t_random random = t_random_start(90); /* the same on all ranks */
    uint16_t *y = gpu_rows(&w->b[0]);
    int32_t map[PHYSICAL];
    for (int32_t i = 0; i < w->forwards; i++) {
        const batch *b = &w->b[i % BATCHES];
        int64_t first, loads[EXPERTS], routes = 0, want = 0;
        const batch part = share_of(b, m->rank, m->size, &first);
        gpu_rank_stage(&g, &part);
        T_OK(gpu_rank_forward(&g));
        gpu_rank_result(&g, y);
        T_OK(megamoe_workspace_status(g.r.workspace, NULL));
        T_REQUIRE(gpu_same(y, w->want[i % BATCHES] + first * HIDDEN, &part,
                           "rank %d of %d, forward %d", m->rank, m->size, i));
        T_OK(megamoe_layer_loads(g.r.comm, g.r.layer, loads, EXPERTS));
        for (int32_t e = 0; e < EXPERTS; e++)
            routes += loads[e];
        for (int64_t k = 0; k < b->tokens * TOPK; k++)
            want += b->ids[k] >= 0;
        T_EQ_INT(routes, want);
        random_map(&random, map, PHYSICAL, EXPERTS);
        T_OK(place(&g, map, NULL));
    }
    free(y);
    member_close(&g);
}

static void check_placing(int32_t gpus, int32_t ranks, int32_t max_ctas, uint64_t stream) {
    work w = work_open(&recipe_nvfp4, MEGAMOE_SCALE_BLOCK, gpus, stream);
    t_random random = t_random_start(91);
    int32_t map[PHYSICAL];
    random_map(&random, map, PHYSICAL, EXPERTS);
    w.max_ctas = max_ctas;
    w.s.options.physical_to_logical = map;
    w.s.options.physical_experts = PHYSICAL;
    crew_run(ranks, compute_and_place, &w);
    work_close(&w);
}

T_CASE(processes_move_experts_on_one_gpu) {
    (void)gpu_count(1, 1);
    check_placing(1, 2, 64, 11);
}

T_CASE(processes_move_experts_on_two_gpus) {
    (void)gpu_count(2, 2);
    check_placing(2, 2, 0, 12);
    check_placing(2, 4, 64, 13);
}

/* Rank 0 goes on alone, with its layer and what it lacks from weights. */
static void go_on(const member *m) {
    const work *w = m->argument;
    gpu_rank g;
    member_open(m, &g);
    int64_t first;
    const batch part = share_of(&w->b[0], m->rank, m->size, &first);
    gpu_rank_stage(&g, &part);
    T_OK(gpu_rank_forward(&g));
    gpu_rank_wait(&g);
    if (m->rank == 1)
        await_death(m);
    T_OK(gpu_rank_forward(&g));
    be_ready(m);
    gpu_rank_wait(&g);
    T_STATUS(megamoe_workspace_status(g.r.workspace, NULL), MEGAMOE_EPEER);
    megamoe_workspace_close(g.r.workspace);
    g.r.workspace = NULL;
    megamoe_comm_close(g.r.comm);
    T_OK(megamoe_comm_self(&g.r.comm));
    T_STATUS(place(&g, NULL, NULL), MEGAMOE_ENOTFOUND);
    T_CONTAINS(megamoe_last_error(), "logical experts 6, 7, 8, 9, 10: held by no rank");
    T_OK(place(&g, NULL, w->m.weights));
    T_OK(megamoe_workspace_create(g.r.comm, g.r.device, &g.r.shape, &g.r.capacity, &g.r.workspace));
    uint16_t *y = gpu_rows(&w->b[0]);
    gpu_rank_stage(&g, &w->b[0]);
    T_OK(gpu_rank_forward(&g));
    gpu_rank_result(&g, y);
    T_OK(megamoe_workspace_status(g.r.workspace, NULL));
    gpu_same(y, w->want[0], &w->b[0], "alone");
    free(y);
    member_close(&g);
}

T_CASE(processes_go_on_without_a_rank) {
    work w = work_open(&recipe, MEGAMOE_SCALE_TOKEN, gpu_count(1, 2), 14);
    w.s.deadline_ms = SLOW_DEADLINE_MS;
    lose_one(&w, go_on, 300);
    work_close(&w);
}

T_CASE(processes_survive_a_death_at_work) {
    work w = work_open(&recipe, MEGAMOE_SCALE_TOKEN, gpu_count(2, 2), 9);
    w.s.deadline_ms = SLOW_DEADLINE_MS;
    for (int i = 0; i < 5; i++)
        lose_one(&w, killed_at_work, 50 + 7 * i);
    work_close(&w);
}
