/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Placing experts anew between forwards: the same bits with any map, also from graphs that were
 * captured before; what experts have received. Processes do so in gpu_processes.c.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_ranks.h"

enum { TOKENS = 130, TOPK = 3, HIDDEN = 416, EXPERTS = 11, PHYSICAL = 17, ROUNDS = 6 };

static const model_recipe recipes[] = {
    {MEGAMOE_FORMAT_MXFP4, HIDDEN, 224, EXPERTS, MEGAMOE_DTYPE_BF16, {1.702f, 1, 7}},
    {MEGAMOE_FORMAT_NVFP4, HIDDEN, 224, EXPERTS, MEGAMOE_DTYPE_NONE, {1, 0, 10}},
};

/* A layer, a batch and what the reference makes of it. */
typedef struct subject {
    model m;
    setup s;
    batch b;
    uint16_t *want;
    int64_t loads[EXPERTS]; /* of one forward */
    int32_t map[PHYSICAL];
    t_random random;
} subject;

static void subject_open(subject *x, int recipe, uint64_t stream) {
    *x = (subject){.random = t_random_start(stream)};
    x->m = model_open(&recipes[recipe], &x->random);
    random_map(&x->random, x->map, PHYSICAL, EXPERTS);
    x->s = (setup){.weights = x->m.weights,
                   .device = "cuda:0",
                   .deadline_ms = GPU_DEADLINE_MS,
                   .topk = TOPK,
                   .tokens = TOKENS,
                   .pool_rows = (int64_t)TOKENS * TOPK,
                   .input_scale = recipe ? MEGAMOE_SCALE_BLOCK : MEGAMOE_SCALE_TOKEN};
    x->s.options.physical_to_logical = x->map;
    x->s.options.physical_experts = PHYSICAL;
    x->b = batch_random(&x->m, TOKENS, TOPK, ROUTING_RANDOM, &x->random);
    batch_mask(&x->b, 7, &x->random);
    x->want = gpu_rows(&x->b);
    gpu_reference(&x->s, &x->b, x->want);
    for (int64_t i = 0; i < (int64_t)TOKENS * TOPK; i++)
        if (x->b.ids[i] >= 0)
            x->loads[x->b.ids[i]]++;
}

static void subject_close(subject *x) {
    free(x->want);
    batch_free(&x->b);
    model_close(&x->m);
}

/* ---- placing: a thread for each rank ---- */

struct placing {
    megamoe_comm *comms[MAX_RANKS]; /* of threads */
    const int32_t *map;
    int32_t physical;
    int32_t broken; /* a rank that brings no map; -1: none */
    megamoe_status status[MAX_RANKS];
    char message[MAX_RANKS][400];
    int64_t loads[MAX_RANKS][EXPERTS]; /* before */
};

static void place_rank(rank *r, void *argument) {
    static const int32_t nowhere[PHYSICAL];
    struct placing *p = argument;
    megamoe_placement placement = MEGAMOE_INIT(megamoe_placement);
    placement.physical_to_logical = r->rank == p->broken ? nowhere : p->map;
    placement.physical_experts = p->physical;
    T_STATUS(megamoe_layer_loads(p->comms[r->rank], r->layer, p->loads[r->rank], EXPERTS),
             MEGAMOE_OK);
    p->status[r->rank] = megamoe_layer_place(p->comms[r->rank], r->layer, &placement);
    snprintf(p->message[r->rank], sizeof p->message[0], "%s", megamoe_last_error());
}

static void placing_open(struct placing *p, int32_t ranks) {
    *p = (struct placing){.broken = -1};
    T_OK(megamoe_comm_threads(ranks, p->comms));
}

static void placing_close(struct placing *p, int32_t ranks) {
    for (int32_t r = 0; r < ranks; r++)
        megamoe_comm_close(p->comms[r]);
}

static void place(fleet *f, struct placing *p, const int32_t *map, int32_t physical) {
    fleet threads = *f;
    threads.folded = false;
    p->map = map;
    p->physical = physical;
    fleet_each(&threads, place_rank, p);
    for (int32_t r = 0; r < f->ranks && p->broken < 0; r++)
        T_CHECK_MSG(p->status[r] == MEGAMOE_OK, "rank %d: %s", r, p->message[r]);
}

/* What all ranks learned before they were placed. */
static void check_loads(const struct placing *p, const subject *x, int32_t ranks,
                        int32_t forwards) {
    for (int32_t r = 0; r < ranks; r++)
        for (int32_t e = 0; e < EXPERTS; e++)
            T_EQ_INT(p->loads[r][e], forwards * x->loads[e]);
}

static void check_forwards(fleet *f, const subject *x, gpu_batch *memory, CUstream stream,
                           int32_t forwards, const char *what) {
    uint16_t *y = gpu_rows(&x->b);
    for (int32_t i = 0; i < forwards; i++) {
        gpu_forward(f, memory, &x->b, y, stream);
        gpu_same(y, x->want, &x->b, "%s, %d ranks, forward %d", what, f->ranks, i);
    }
    free(y);
}

static void check_folded(int recipe, int32_t ranks) {
    subject x;
    struct placing p;
    gpu g = gpu_start();
    subject_open(&x, recipe, 200 + (uint64_t)ranks);
    x.s.ranks = ranks;
    x.s.folded = true;
    fleet f = fleet_open(&x.s);
    placing_open(&p, ranks);
    gpu_batch memory = gpu_batch_open(TOKENS, HIDDEN, TOPK);
    for (int32_t round = 0; round < ROUNDS; round++) {
        mm_place_window_bytes = round % 2 ? 1 : 64 << 20; /* one expert at a time, or all */
        check_forwards(&f, &x, &memory, g.stream, 1 + round % 3, "folded");
        random_map(&x.random, x.map, PHYSICAL, EXPERTS);
        place(&f, &p, x.map, PHYSICAL);
        check_loads(&p, &x, ranks, 1 + round % 3);
    }
    /* One that brings another map fails, and nobody's experts move. */
    int32_t other[PHYSICAL];
    random_map(&x.random, other, PHYSICAL, EXPERTS);
    p.broken = ranks - 1;
    place(&f, &p, other, PHYSICAL);
    for (int32_t r = 0; r < ranks; r++) {
        T_EQ_INT(p.status[r], r == ranks - 1 ? MEGAMOE_EINVAL : MEGAMOE_EPEER);
        T_CONTAINS(p.message[r], "logical expert 1 is nowhere");
    }
    check_forwards(&f, &x, &memory, g.stream, 1, "after a refusal");
    gpu_batch_close(&memory);
    placing_close(&p, ranks);
    fleet_close(&f);
    subject_close(&x);
    gpu_end(&g);
}

T_CASE(place_folded_ranks) {
    check_folded(0, 1);
    check_folded(1, 2);
    check_folded(0, 4);
    check_folded(1, 8);
}

/* ---- graphs ---- */

typedef struct captured {
    CUgraph graph;
    CUgraphExec replay;
} captured;

static captured capture(fleet *f, const gpu_batch *memory, CUstream stream) {
    captured c;
    gpu_check(mm_cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
              "cuStreamBeginCapture");
    gpu_stage(f, memory, stream);
    T_OK(gpu_compute(f, memory, stream));
    gpu_check(mm_cu.cuStreamEndCapture(stream, &c.graph), "cuStreamEndCapture");
    gpu_check(mm_cu.cuGraphInstantiateWithFlags(&c.replay, c.graph, 0), "cuGraphInstantiate");
    return c;
}

static void release(captured *c) {
    gpu_check(mm_cu.cuGraphExecDestroy(c->replay), "cuGraphExecDestroy");
    gpu_check(mm_cu.cuGraphDestroy(c->graph), "cuGraphDestroy");
}

static void replay(const captured *c, gpu_batch *memory, const subject *x, CUstream stream) {
    gpu_batch_put(memory, &x->b);
    gpu_check(mm_cu.cuGraphLaunch(c->replay, stream), "cuGraphLaunch");
    gpu_wait();
}

static void check_replay(const captured *c, fleet *f, gpu_batch *memory, const subject *x,
                         CUstream stream, const char *what) {
    uint16_t *y = gpu_rows(&x->b);
    replay(c, memory, x, stream);
    gpu_batch_result(memory, y);
    for (int32_t r = 0; r < f->ranks; r++)
        T_OK(megamoe_workspace_status(f->rank[r].workspace, NULL));
    gpu_same(y, x->want, &x->b, "%s, %d ranks", what, f->ranks);
    free(y);
}

/* Refused on all ranks; nothing is computed, and the workspaces live on. */
static void check_stale(const captured *c, fleet *f, gpu_batch *memory, const subject *x,
                        CUstream stream) {
    replay(c, memory, x, stream);
    T_CHECK(gpu_batch_untouched(memory));
    for (int32_t r = 0; r < f->ranks; r++) {
        T_STATUS(megamoe_workspace_status(f->rank[r].workspace, NULL), MEGAMOE_ESTATE);
        T_CONTAINS(megamoe_last_error(), "the layer of rank 0 has been placed anew since");
    }
}

static void check_graphs(int32_t ranks) {
    subject x;
    struct placing p;
    int32_t more[PHYSICAL + 1];
    gpu g = gpu_start();
    subject_open(&x, 0, 220 + (uint64_t)ranks);
    x.s.ranks = ranks;
    x.s.folded = true;
    fleet f = fleet_open(&x.s);
    placing_open(&p, ranks);
    gpu_batch memory = gpu_batch_open(TOKENS, HIDDEN, TOPK);
    gpu_batch_put(&memory, &x.b);
    captured c = capture(&f, &memory, g.stream);
    for (int32_t round = 0; round < ROUNDS; round++) {
        check_replay(&c, &f, &memory, &x, g.stream, "a replay");
        random_map(&x.random, x.map, PHYSICAL, EXPERTS);
        place(&f, &p, x.map, PHYSICAL);
        check_loads(&p, &x, ranks, 1);
    }
    check_replay(&c, &f, &memory, &x, g.stream, "a replay");

    /* With more physical experts, and again after going back: other memory. */
    random_map(&x.random, more, PHYSICAL + 1, EXPERTS);
    place(&f, &p, more, PHYSICAL + 1);
    check_stale(&c, &f, &memory, &x, g.stream);
    place(&f, &p, x.map, PHYSICAL);
    check_loads(&p, &x, ranks, 0);
    check_stale(&c, &f, &memory, &x, g.stream);
    check_forwards(&f, &x, &memory, g.stream, 1, "placed back");
    release(&c);
    c = capture(&f, &memory, g.stream);
    check_replay(&c, &f, &memory, &x, g.stream, "captured again");
    release(&c);
    gpu_batch_close(&memory);
    placing_close(&p, ranks);
    fleet_close(&f);
    subject_close(&x);
    gpu_end(&g);
}

T_CASE(place_graphs_stay_with_as_many_experts) {
    check_graphs(1);
    check_graphs(3);
}

/* A layer that was created without a map has none that graphs could look up. */
T_CASE(place_graphs_without_a_map_are_refused) {
    subject x;
    struct placing p;
    int32_t turned[EXPERTS], identity[EXPERTS];
    gpu g = gpu_start();
    subject_open(&x, 0, 230);
    x.s.ranks = 2;
    x.s.folded = true;
    x.s.options.physical_to_logical = NULL;
    x.s.options.physical_experts = 0;
    for (int32_t e = 0; e < EXPERTS; e++) {
        turned[e] = (e + 3) % EXPERTS;
        identity[e] = e;
    }
    fleet f = fleet_open(&x.s);
    placing_open(&p, 2);
    gpu_batch memory = gpu_batch_open(TOKENS, HIDDEN, TOPK);
    gpu_batch_put(&memory, &x.b);
    captured c = capture(&f, &memory, g.stream);
    place(&f, &p, identity, EXPERTS);
    check_replay(&c, &f, &memory, &x, g.stream, "nothing has moved");
    place(&f, &p, turned, EXPERTS);
    check_stale(&c, &f, &memory, &x, g.stream);
    release(&c);
    c = capture(&f, &memory, g.stream);
    place(&f, &p, identity, EXPERTS);
    check_replay(&c, &f, &memory, &x, g.stream, "back where they were");
    release(&c);
    gpu_batch_close(&memory);
    placing_close(&p, 2);
    fleet_close(&f);
    subject_close(&x);
    gpu_end(&g);
}

/* ---- ranks that are threads ---- */

typedef struct team {
    struct placing p;
    gpu_rank g[MAX_RANKS];
    const setup *s;
    megamoe_status launched[MAX_RANKS];
    fleet threads; /* to run creation and placing */
} team;

static void create_rank(rank *r, void *argument) {
    team *t = argument;
    gpu_rank_create(&t->g[r->rank], t->s);
    r->layer = t->g[r->rank].r.layer;
}

/* Launches at once: the others may still be in their placing. */
static void place_and_launch(rank *r, void *argument) {
    team *t = argument;
    gpu_rank *g = &t->g[r->rank];
    const megamoe_view y = gpu_batch_y(&g->memory, 0, g->memory.tokens);
    place_rank(r, &t->p);
    t->launched[r->rank] = megamoe_forward(g->r.layer, g->r.workspace, &y, g->stream);
}

static void check_threads(int32_t ranks, int32_t gpus) {
    static team t;
    subject x;
    subject_open(&x, 1, 240 + (uint64_t)ranks);
    t = (team){.s = &x.s, .threads = {.ranks = ranks}};
    placing_open(&t.p, ranks);
    for (int32_t r = 0; r < ranks; r++) {
        t.g[r].r = (rank){.rank = r, .ranks = ranks, .comm = t.p.comms[r]};
        t.threads.rank[r].rank = r;
        /* Ranks on one GPU leave each other blocks: they wait for each other. */
        gpu_rank_open(&t.g[r], &x.s, r % gpus, ranks > gpus ? 32 : 0);
    }
    fleet_each(&t.threads, create_rank, &t);
    for (int32_t r = 0; r < ranks; r++) {
        T_REQUIRE(t.g[r].r.workspace);
        T_OK(megamoe_prewarm(t.g[r].r.layer, t.g[r].r.workspace));
    }
    uint16_t *y = gpu_rows(&x.b);
    for (int32_t round = 0; round < ROUNDS; round++) {
        random_map(&x.random, x.map, PHYSICAL, EXPERTS);
        t.p.map = x.map;
        t.p.physical = PHYSICAL;
        for (int32_t r = 0; r < ranks; r++) {
            int64_t first;
            const batch part = share_of(&x.b, r, ranks, &first);
            gpu_rank_stage(&t.g[r], &part);
            gpu_rank_wait(&t.g[r]);
        }
        fleet_each(&t.threads, place_and_launch, &t);
        check_loads(&t.p, &x, ranks, round > 0);
        for (int32_t r = 0; r < ranks; r++) {
            int64_t first;
            (void)share_of(&x.b, r, ranks, &first);
            T_CHECK_MSG(t.p.status[r] == MEGAMOE_OK, "rank %d: %s", r, t.p.message[r]);
            T_STATUS(t.launched[r], MEGAMOE_OK);
            gpu_rank_result(&t.g[r], y + first * HIDDEN);
            T_OK(megamoe_workspace_status(t.g[r].r.workspace, NULL));
        }
        gpu_same(y, x.want, &x.b, "%d threads on %d GPUs, round %d", ranks, gpus, round);
    }
    free(y);
    for (int32_t r = 0; r < ranks; r++) {
        gpu_rank_wait(&t.g[r]);
        megamoe_workspace_close(t.g[r].r.workspace);
        t.g[r].r.workspace = NULL;
    }
    for (int32_t r = 0; r < ranks; r++)
        gpu_rank_close(&t.g[r]);
    placing_close(&t.p, ranks);
    subject_close(&x);
}

T_CASE(place_threads_on_one_gpu) {
    megamoe_device_close(gpu_open(NULL));
    check_threads(2, 1);
    check_threads(4, 1);
}

T_CASE(place_threads_on_two_gpus) {
    megamoe_device *first = gpu_open(NULL), *second = NULL;
    const megamoe_status status = megamoe_device_open("cuda:1", NULL, &second);
    megamoe_device_close(first);
    if (status != MEGAMOE_OK)
        T_SKIP("this needs two GPUs: %s", megamoe_last_error());
    megamoe_device_close(second);
    check_threads(2, 2);
    check_threads(4, 2);
}
