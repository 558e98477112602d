/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Placing experts anew between forwards, over threads and processes: the same bits with any map,
 * what is refused, and how survivors of a fault go on.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "layer/layer.h"
#include "weights/prepared.h"

#include "../comm/crew.h"
#include "fixture.h"

enum { EXPERTS = 8, PHYSICAL = 11, RANKS = 4, TOKENS_HERE = 29, ROUNDS = 10 };

static const model_recipe small = {MEGAMOE_FORMAT_MXFP4, HIDDEN,   32, EXPERTS,
                                   MEGAMOE_DTYPE_F32,    {0, 0, 0}};

/* Hashes that come out otherwise than they are, and in which this process is killed. */
static atomic_int spoiled;
static bool killed_in_hash;

mm_hash __real_mm_hash_of(const void *data, size_t bytes);
mm_hash __wrap_mm_hash_of(const void *data, size_t bytes);
mm_hash __wrap_mm_hash_of(const void *data, size_t bytes) {
    mm_hash hash = __real_mm_hash_of(data, bytes);
    if (killed_in_hash)
        (void)raise(SIGKILL);
    if (atomic_load(&spoiled) > 0 && atomic_fetch_sub(&spoiled, 1) > 0)
        hash.bytes[3] ^= 1;
    return hash;
}

static megamoe_status place(const rank *r, const int32_t *map, int32_t physical,
                            const megamoe_weights *weights) {
    megamoe_placement placement = MEGAMOE_INIT(megamoe_placement);
    placement.physical_to_logical = map;
    placement.physical_experts = map ? physical : 0;
    placement.weights = weights;
    return megamoe_layer_place(r->comm, r->layer, &placement);
}

/* ---- threads ---- */

struct placing {
    const int32_t *map, *map_of_1; /* of rank 1, if it is another */
    const megamoe_weights *weights;
    megamoe_status status[MAX_RANKS];
    char message[MAX_RANKS][320];
};

static void place_rank(rank *r, void *argument) {
    struct placing *p = argument;
    const int32_t *map = r->rank == 1 && p->map_of_1 ? p->map_of_1 : p->map;
    p->status[r->rank] = place(r, map, PHYSICAL, p->weights);
    snprintf(p->message[r->rank], sizeof p->message[0], "%s", megamoe_last_error());
}

static void place_all(fleet *f, const int32_t *map) {
    struct placing p = {.map = map};
    fleet_each(f, place_rank, &p);
    for (int32_t r = 0; r < f->ranks; r++)
        T_CHECK_MSG(p.status[r] == MEGAMOE_OK, "rank %d: %s", r, p.message[r]);
}

struct loads {
    int64_t by_rank[MAX_RANKS][EXPERTS];
    int64_t received; /* by all physical experts of all ranks */
};

static void get_loads(rank *r, void *argument) {
    struct loads *l = argument;
    T_STATUS(megamoe_layer_loads(r->comm, r->layer, l->by_rank[r->rank], EXPERTS), MEGAMOE_OK);
}

static void check_loads(fleet *f, const batch *b, int forwards) {
    struct loads l = {.received = 0};
    fleet_each(f, get_loads, &l);
    int64_t want[EXPERTS] = {0};
    for (int64_t i = 0; i < b->tokens * b->topk; i++)
        if (b->ids[i] >= 0)
            want[b->ids[i]] += forwards;
    for (int32_t r = 0; r < f->ranks; r++)
        T_EQ_MEM(l.by_rank[r], want, sizeof want);
}

static void check_maps(const megamoe_weights *weights, bool map_prepared, const batch *b,
                       const uint16_t *want, int32_t ranks, uint64_t stream) {
    t_random random = t_random_start(stream);
    int32_t map[PHYSICAL];
    uint16_t y[TOKENS_HERE * HIDDEN];
    random_map(&random, map, PHYSICAL, EXPERTS);
    setup s = {.weights = weights, .ranks = ranks, .topk = TOPK};
    s.options.map_prepared = map_prepared;
    s.options.physical_to_logical = map;
    s.options.physical_experts = PHYSICAL;
    fleet f = fleet_open(&s);
    for (int round = 0; round < ROUNDS; round++) {
        mm_place_window_bytes = round % 2 ? 1 : 64 << 20; /* one expert, or all */
        for (int i = 0; i <= round % 3; i++) {
            memset(y, 0xFF, sizeof y);
            fleet_forward(&f, b, y);
            T_CHECK_MSG(same_rows(y, want, TOKENS_HERE * HIDDEN), "%d ranks, map %d", ranks, round);
        }
        check_loads(&f, b, round % 3 + 1);
        random_map(&random, map, PHYSICAL, EXPERTS);
        place_all(&f, map);
        check_loads(&f, b, 0);
        for (int32_t r = 0; r < ranks; r++)
            T_EQ_INT(f.rank[r].layer->placement.local, mm_share_count(PHYSICAL, r, ranks));
    }
    fleet_close(&f);
}

typedef struct subject {
    model m;
    batch b;
    uint16_t want[TOKENS_HERE * HIDDEN];
} subject;

static subject *open_subject(megamoe_format format, uint64_t stream) {
    t_random random = t_random_start(stream);
    model_recipe recipe = small;
    recipe.format = format;
    subject *x = calloc(1, sizeof *x);
    T_REQUIRE(x);
    x->m = model_open(&recipe, &random);
    x->b = batch_random(&x->m, TOKENS_HERE, TOPK, ROUTING_RANDOM, &random);
    batch_mask(&x->b, 7, &random);
    const setup alone = {.weights = x->m.weights};
    run_once(&alone, &x->b, x->want);
    return x;
}

static void close_subject(subject *x) {
    batch_free(&x->b);
    model_close(&x->m);
    free(x);
}

T_CASE(any_map_gives_the_same_bits) {
    for (int32_t ranks = 1; ranks <= 5; ranks++) {
        subject *x = open_subject(ranks % 2 ? MEGAMOE_FORMAT_MXFP4 : MEGAMOE_FORMAT_NVFP4, 1);
        check_maps(x->m.weights, false, &x->b, x->want, ranks, 10 + (uint64_t)ranks);
        close_subject(x);
    }
}

/* Where it is mapped, they stay there. */
T_CASE(experts_of_a_prepared_file) {
    subject *x = open_subject(MEGAMOE_FORMAT_MXFP4, 2);
    const char *path = t_path("layer.mmoe");
    T_OK(megamoe_weights_prepare(x->m.weights, NULL, NULL, path));
    megamoe_weights *prepared;
    T_OK(megamoe_weights_open(path, &prepared));
    check_maps(prepared, false, &x->b, x->want, 3, 20);
    check_maps(prepared, true, &x->b, x->want, 3, 21);
    megamoe_weights_close(prepared);
    close_subject(x);
}

/* ---- what is refused leaves all as it was ---- */

static void check_refused(fleet *f, const subject *x, struct placing *p, megamoe_status one,
                          megamoe_status others, const char *named) {
    uint16_t y[TOKENS_HERE * HIDDEN];
    fleet_each(f, place_rank, p);
    int of_one = 0;
    for (int32_t r = 0; r < f->ranks; r++) {
        T_CHECK_MSG(p->status[r] == one || p->status[r] == others, "rank %d: %s", r,
                    megamoe_status_name(p->status[r]));
        T_CONTAINS(p->message[r], named);
        of_one += p->status[r] == one;
    }
    T_CHECK(of_one > 0);
    fleet_forward(f, &x->b, y);
    T_EQ_MEM(y, x->want, sizeof y);
}

T_CASE(refusals) {
    subject *x = open_subject(MEGAMOE_FORMAT_MXFP4, 3);
    t_random random = t_random_start(30);
    int32_t map[PHYSICAL], other[PHYSICAL];
    random_map(&random, map, PHYSICAL, EXPERTS);
    setup s = {.weights = x->m.weights, .ranks = RANKS, .topk = TOPK};
    s.options.physical_to_logical = map;
    s.options.physical_experts = PHYSICAL;
    fleet f = fleet_open(&s);
    random_map(&random, other, PHYSICAL, EXPERTS);

    struct placing differ = {.map = map, .map_of_1 = other};
    check_refused(&f, x, &differ, MEGAMOE_EINVAL, MEGAMOE_EINVAL,
                  "the layer or the map of rank 1 is another one than that of rank 0");

    int32_t nowhere[PHYSICAL];
    for (int32_t p = 0; p < PHYSICAL; p++)
        nowhere[p] = p % (EXPERTS - 1);
    struct placing lacking = {.map = map, .map_of_1 = nowhere};
    check_refused(&f, x, &lacking, MEGAMOE_EINVAL, MEGAMOE_EPEER, "logical expert 7 is nowhere");

    model_recipe recipe = small;
    recipe.intermediate = 64;
    model m = model_open(&recipe, &random);
    struct placing foreign = {.map = map, .weights = m.weights};
    check_refused(
        &f, x, &foreign, MEGAMOE_EINVAL, MEGAMOE_EINVAL,
        "the weights are those of layer 5 with 8 experts of 64 x 64, the layer is 5 with 8 of "
        "64 x 32");
    model_close(&m);

    atomic_store(&spoiled, 1);
    struct placing spoilt = {.map = other};
    check_refused(&f, x, &spoilt, MEGAMOE_ECHECK, MEGAMOE_EPEER, "as it was sent");
    T_CHECK(atomic_load(&spoiled) <= 0);
    atomic_store(&spoiled, 0);
    place_all(&f, other);

    int64_t counts[EXPERTS];
    T_STATUS(megamoe_layer_receive_counts(f.rank[0].layer, counts, 4), MEGAMOE_EINVAL);
    T_OK(megamoe_layer_receive_counts(f.rank[0].layer, counts, 3));
    T_OK(megamoe_layer_reset_counts(f.rank[0].layer));
    T_STATUS(megamoe_layer_loads(f.rank[0].comm, f.rank[0].layer, counts, 7), MEGAMOE_EINVAL);
    T_STATUS(megamoe_layer_place(NULL, f.rank[0].layer, NULL), MEGAMOE_EINVAL);
    fleet_close(&f);

    s.folded = true;
    f = fleet_open(&s);
    T_STATUS(place(&f.rank[0], other, PHYSICAL, NULL), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "folded");
    fleet_close(&f);
    close_subject(x);
}

T_CASE(a_balanced_map_is_refused_without_sense) {
    const int64_t loads[] = {1, 2, 3}, negative[] = {1, -2, 3};
    int32_t map[4];
    T_OK(megamoe_placement_balance(loads, 3, 2, 4, map));
    T_STATUS(megamoe_placement_balance(loads, 3, 2, 2, map), MEGAMOE_EINVAL);
    T_STATUS(megamoe_placement_balance(negative, 3, 2, 4, map), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "the load of expert 1 is -2");
    T_STATUS(megamoe_placement_balance(NULL, 3, 2, 4, map), MEGAMOE_EINVAL);
}

/* ---- processes ---- */

/* What a case gives its ranks; y and `done` are shared. */
typedef struct scene {
    const subject *x;
    uint16_t *y;
    atomic_int *done;
    bool replicas; /* every expert is on two of four ranks */
    int signal;    /* to the last rank, in its second forward */
} scene;

static void open_layer(const subject *x, rank *r, const int32_t *map, int32_t physical) {
    megamoe_device_options options = MEGAMOE_INIT(megamoe_device_options);
    options.threads = 1;
    options.no_pinning = true;
    T_OK(megamoe_device_open("cpu", &options, &r->device));
    megamoe_layer_options layer = MEGAMOE_INIT(megamoe_layer_options);
    layer.physical_to_logical = map;
    layer.physical_experts = map ? physical : 0;
    T_OK(megamoe_layer_create(r->comm, r->device, x->m.weights, &layer, &r->layer));
}

static void open_workspace(rank *r, int32_t physical, int32_t deadline_ms) {
    megamoe_shape shape = MEGAMOE_INIT(megamoe_shape);
    shape.hidden = HIDDEN;
    shape.intermediate = small.intermediate;
    shape.experts = EXPERTS;
    shape.physical_experts = physical;
    shape.topk = TOPK;
    megamoe_capacity capacity = MEGAMOE_INIT(megamoe_capacity);
    capacity.tokens = TOKENS_HERE;
    capacity.deadline_ms = deadline_ms;
    T_OK(megamoe_workspace_create(r->comm, r->device, &shape, &capacity, &r->workspace));
}

static megamoe_status forward(rank *r, const scene *sc) {
    int64_t first;
    const batch part = share_of(&sc->x->b, r->rank, r->ranks, &first);
    const megamoe_view x = view_x(&part), ids = view_ids(&part), weights = view_weights(&part);
    const megamoe_view y = view_y(sc->y + first * HIDDEN, &part);
    const megamoe_status status =
        megamoe_stage(r->workspace, &x, &ids, &weights, part.tokens, NULL);
    return status == MEGAMOE_OK ? megamoe_forward(r->layer, r->workspace, &y, NULL) : status;
}

static void move_between_processes(const member *m) {
    const scene *sc = m->argument;
    t_random random = t_random_start(40); /* the same on all ranks */
    int32_t map[PHYSICAL];
    random_map(&random, map, PHYSICAL, EXPERTS);
    rank r = {.rank = m->rank, .ranks = m->size};
    T_OK(crew_meet(m, 0, &r.comm));
    open_layer(sc->x, &r, map, PHYSICAL);
    open_workspace(&r, PHYSICAL, 20000);
    for (int round = 0; round < ROUNDS; round++) {
        mm_place_window_bytes = round % 2 ? 1 : 64 << 20;
        T_OK(forward(&r, sc));
        int64_t loads[EXPERTS];
        T_OK(megamoe_layer_loads(r.comm, r.layer, loads, EXPERTS));
        if (round % 3)
            random_map(&random, map, PHYSICAL, EXPERTS);
        else
            T_OK(megamoe_placement_balance(loads, EXPERTS, m->size, PHYSICAL, map));
        T_OK(place(&r, map, PHYSICAL, NULL));
    }
    memset(sc->y, 0xFF, sizeof sc->x->want);
    int32_t mine = 0, all[CREW_MAX];
    T_OK(megamoe_comm_allgather(r.comm, &mine, all, sizeof mine)); /* y is shared */
    T_OK(forward(&r, sc));
    megamoe_workspace_close(r.workspace);
    megamoe_layer_close(r.layer);
    megamoe_device_close(r.device);
    megamoe_comm_close(r.comm);
}

T_CASE(experts_move_between_processes) {
    static const int32_t ranks[] = {2, 4, 8};
    subject *x = open_subject(MEGAMOE_FORMAT_NVFP4, 4);
    scene sc = {.x = x, .y = crew_share(sizeof x->want)};
    for (int i = 0; i < 3; i++) {
        crew_run(ranks[i], move_between_processes, &sc);
        T_EQ_MEM(sc.y, x->want, sizeof x->want);
    }
    crew_unshare(sc.y, sizeof x->want);
    close_subject(x);
}

/* ---- survivors ---- */

static megamoe_status meet_again(const member *m, int32_t size, const char *job,
                                 int32_t deadline_ms, megamoe_comm **comm) {
    megamoe_comm_tcp_options options = MEGAMOE_INIT(megamoe_comm_tcp_options);
    options.rank = m->rank;
    options.size = size;
    options.port = m->port;
    options.job = job;
    options.creation_deadline_ms = deadline_ms;
    return megamoe_comm_tcp(&options, comm);
}

/* What a rank does that was taken for dead and wakes up. */
static void come_back(const member *m, rank *r, const scene *sc) {
    T_STATUS(forward(r, sc), MEGAMOE_EPEER);
    megamoe_workspace_close(r->workspace);
    megamoe_comm_close(r->comm);
    megamoe_comm *comm;
    T_CHECK(meet_again(m, m->size, "", 300, &comm) != MEGAMOE_OK);
    megamoe_layer_close(r->layer);
    megamoe_device_close(r->device);
}

static void go_on(const member *m) {
    scene *sc = m->argument;
    static const int32_t twice[] = {0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 0, 1, 2, 3};
    const int32_t physical = sc->replicas ? 2 * EXPERTS : EXPERTS;
    rank r = {.rank = m->rank, .ranks = m->size};
    T_OK(crew_meet(m, 0, &r.comm));
    open_layer(sc->x, &r, sc->replicas ? twice : NULL, physical);
    open_workspace(&r, physical, 400);
    T_OK(forward(&r, sc));
    if (m->rank == m->size - 1) {
        (void)raise(sc->signal);
        come_back(m, &r, sc);
        return;
    }
    const megamoe_status lost = forward(&r, sc);
    T_CHECK_MSG(lost == MEGAMOE_EPEER || lost == MEGAMOE_ETIMEDOUT, "%s",
                megamoe_status_name(lost));
    megamoe_workspace_close(r.workspace);
    megamoe_comm_close(r.comm);
    r.ranks = m->size - 1;
    T_OK(meet_again(m, r.ranks, "second", CREW_DEADLINE_MS, &r.comm));
    if (!sc->replicas) {
        T_STATUS(place(&r, NULL, 0, NULL), MEGAMOE_ENOTFOUND);
        T_CONTAINS(megamoe_last_error(), "logical experts 6, 7: held by no rank");
        T_OK(place(&r, NULL, 0, m->rank == 1 ? sc->x->m.weights : NULL));
    } else
        T_OK(place(&r, NULL, 0, NULL));
    open_workspace(&r, EXPERTS, 20000);
    memset(sc->y, 0xFF, sizeof sc->x->want);
    int32_t mine = 0, all[CREW_MAX];
    T_OK(megamoe_comm_allgather(r.comm, &mine, all, sizeof mine));
    T_OK(forward(&r, sc));
    T_OK(megamoe_comm_allgather(r.comm, &mine, all, sizeof mine));
    atomic_store(sc->done, 1);
    while (sc->signal == SIGSTOP && atomic_load(sc->done) == 1)
        crew_pause_ms(1); /* the lost rank comes back while this one could be hurt */
    T_OK(forward(&r, sc));
    megamoe_workspace_close(r.workspace);
    megamoe_layer_close(r.layer);
    megamoe_device_close(r.device);
    megamoe_comm_close(r.comm);
}

/* The last rank dies while it publishes or takes experts; the others still have theirs. */
static void move_and_die(const member *m) {
    scene *sc = m->argument;
    static const int32_t reversed[] = {7, 6, 5, 4, 3, 2, 1, 0};
    rank r = {.rank = m->rank, .ranks = m->size};
    T_OK(crew_meet(m, 0, &r.comm));
    open_layer(sc->x, &r, NULL, EXPERTS);
    killed_in_hash = m->rank == m->size - 1;
    T_STATUS(place(&r, reversed, EXPERTS, NULL), MEGAMOE_EPEER);
    T_CONTAINS(megamoe_last_error(), "the process of rank 3 has ended");
    megamoe_comm_close(r.comm);
    r.ranks = m->size - 1;
    T_OK(meet_again(m, r.ranks, "second", CREW_DEADLINE_MS, &r.comm));
    T_STATUS(place(&r, reversed, EXPERTS, NULL), MEGAMOE_ENOTFOUND);
    T_OK(place(&r, reversed, EXPERTS, m->rank == 2 ? sc->x->m.weights : NULL));
    open_workspace(&r, EXPERTS, 20000);
    T_OK(forward(&r, sc));
    megamoe_workspace_close(r.workspace);
    megamoe_layer_close(r.layer);
    megamoe_device_close(r.device);
    megamoe_comm_close(r.comm);
}

T_CASE(a_rank_dies_while_experts_move) {
    subject *x = open_subject(MEGAMOE_FORMAT_NVFP4, 6);
    scene sc = {.x = x, .y = crew_share(sizeof x->want)};
    crew c = crew_start(RANKS, move_and_die, &sc);
    int codes[CREW_MAX];
    crew_wait(&c, codes);
    for (int32_t r = 0; r < RANKS; r++)
        T_EQ_INT(codes[r], r == RANKS - 1 ? -SIGKILL : 0);
    T_EQ_MEM(sc.y, x->want, sizeof x->want);
    crew_unshare(sc.y, sizeof x->want);
    close_subject(x);
}

static void check_survivors(bool replicas, int signal) {
    subject *x = open_subject(MEGAMOE_FORMAT_MXFP4, 5);
    scene sc = {.x = x,
                .y = crew_share(sizeof x->want),
                .done = crew_share(sizeof(atomic_int)),
                .replicas = replicas,
                .signal = signal};
    crew c = crew_start(RANKS, go_on, &sc);
    if (signal == SIGSTOP) {
        int status;
        const pid_t stopped = c.processes[RANKS - 1];
        T_REQUIRE(waitpid(stopped, &status, WUNTRACED) > 0 && WIFSTOPPED(status));
        while (atomic_load(sc.done) == 0 && waitpid(c.processes[0], &status, WNOHANG) == 0)
            crew_pause_ms(1);
        kill(stopped, SIGCONT);
        crew_pause_ms(50);
        atomic_store(sc.done, 2);
    }
    int codes[CREW_MAX];
    crew_wait(&c, codes);
    for (int32_t r = 0; r < RANKS; r++)
        T_EQ_INT(codes[r], r == RANKS - 1 && signal == SIGKILL ? -SIGKILL : 0);
    T_EQ_MEM(sc.y, x->want, sizeof x->want);
    crew_unshare(sc.y, sizeof x->want);
    crew_unshare(sc.done, sizeof(atomic_int));
    close_subject(x);
}

T_CASE(survivors_with_replicas_of_all_experts) {
    check_survivors(true, SIGKILL);
}

T_CASE(survivors_that_lack_experts_name_them) {
    check_survivors(false, SIGKILL);
}

T_CASE(a_rank_that_was_only_stopped_stays_outside) {
    check_survivors(true, SIGSTOP);
}
