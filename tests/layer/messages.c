/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranks that only send each other messages: processes whose transport is a post office in memory
 * that they share, which the library does not know of.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "layer/layer.h"

#include "../comm/crew.h"
#include "fixture.h"

enum { EXPERTS = 8, RANKS = 4, TOKENS_HERE = 29, BOX_BYTES = 1 << 20, SPOILT_BEFORE_END = 200 };

/* ---- the post office ---- */

typedef struct office {
    atomic_uint arrived, round, closed; /* of a barrier; closed: somebody has given up */
    size_t offsets[CREW_MAX][CREW_MAX], bytes[CREW_MAX][CREW_MAX];
    uint8_t boxes[CREW_MAX][BOX_BYTES];
} office;

typedef struct counter {
    office *office;
    int32_t rank, size;
    int closes;
    bool spoils;   /* a byte near the end of what it sends to each rank */
    bool misnames; /* the token, or the route, that its messages begin with */
    bool delays;   /* now and then, before a message */
    t_random random;
    int falls_in, signal; /* raised before so many more messages; 0: none */
} counter;

static void leave_home(counter *c) {
    if (c->delays && t_below(&c->random, 3) == 0)
        crew_pause_ms((int64_t)t_below(&c->random, 3));
    if (c->falls_in > 0 && --c->falls_in == 0)
        (void)raise(c->signal);
}

static int gather_all(const counter *c, int64_t until) {
    office *o = c->office;
    const unsigned round = atomic_load(&o->round);
    if (atomic_fetch_add(&o->arrived, 1) + 1 == (unsigned)c->size) {
        atomic_store(&o->arrived, 0);
        atomic_fetch_add(&o->round, 1);
    }
    while (atomic_load(&o->round) == round) {
        if (crew_now_ms() > until || atomic_load(&o->closed))
            return 7;
        crew_pause_ms(0);
    }
    return 0;
}

static int all_to_all(void *user, const void *send, const size_t *send_bytes,
                      const size_t *send_offsets, void *receive, const size_t *receive_bytes,
                      const size_t *receive_offsets, int32_t timeout_ms) {
    counter *c = user;
    office *o = c->office;
    leave_home(c);
    const int64_t until = crew_now_ms() + timeout_ms;
    size_t used = 0;
    T_EQ_INT(send_bytes[c->rank], 0);
    for (int32_t r = 0; r < c->size; r++) {
        T_REQUIRE(used + send_bytes[r] <= BOX_BYTES);
        o->offsets[c->rank][r] = used;
        o->bytes[c->rank][r] = send_bytes[r];
        memcpy(o->boxes[c->rank] + used, (const uint8_t *)send + send_offsets[r], send_bytes[r]);
        if (c->misnames && send_bytes[r])
            memset(o->boxes[c->rank] + used, 0x7F, sizeof(int64_t));
        used += send_bytes[r];
        if (c->spoils && send_bytes[r])
            o->boxes[c->rank][used - SPOILT_BEFORE_END] ^= 1;
    }
    int error = gather_all(c, until);
    for (int32_t r = 0; r < c->size && error == 0; r++) {
        T_EQ_INT(receive_bytes[r], o->bytes[r][c->rank]);
        memcpy((uint8_t *)receive + receive_offsets[r], o->boxes[r] + o->offsets[r][c->rank],
               receive_bytes[r]);
    }
    return error ? error : gather_all(c, until);
}

static int all_gather(void *user, const void *mine, void *all, size_t bytes, int32_t timeout_ms) {
    counter *c = user;
    leave_home(c);
    const int64_t until = crew_now_ms() + timeout_ms;
    T_REQUIRE(bytes <= BOX_BYTES);
    memcpy(c->office->boxes[c->rank], mine, bytes);
    const int error = gather_all(c, until);
    for (int32_t r = 0; r < c->size && error == 0; r++)
        memcpy((uint8_t *)all + (size_t)r * bytes, c->office->boxes[r], bytes);
    return error ? error : gather_all(c, until);
}

static void give_up(void *user) {
    atomic_store(&((counter *)user)->office->closed, 1);
}

static void close_counter(void *user) {
    ((counter *)user)->closes++;
}

static megamoe_status meet(counter *c, megamoe_comm **comm) {
    megamoe_transport transport = MEGAMOE_INIT(megamoe_transport);
    transport.rank = c->rank;
    transport.size = c->size;
    transport.creation_deadline_ms = CREW_DEADLINE_MS;
    transport.user = c;
    transport.allgather = all_gather;
    transport.alltoallv = all_to_all;
    transport.abort = give_up;
    transport.close = close_counter;
    return megamoe_comm_transport(&transport, comm);
}

/* ---- ranks ---- */

/* What a case gives its ranks; y, the office and seen_ms are shared. */
typedef struct scene {
    const model *m;
    batch b;
    uint16_t *y;
    office *office;
    setup s;
    bool delays;
    int message, signal; /* of the third forward, before which rank 2 is sent it */
    int64_t *seen_ms;
} scene;

static void open_rank(const member *m, const scene *sc, counter *c, rank *r) {
    *c = (counter){.office = sc->office,
                   .rank = m->rank,
                   .size = m->size,
                   .delays = sc->delays,
                   .random = t_random_start(100 + (uint64_t)m->rank)};
    *r = (rank){.rank = m->rank, .ranks = m->size};
    T_OK(meet(c, &r->comm));
    T_EQ_INT(megamoe_comm_rank(r->comm), m->rank);
    T_EQ_INT(megamoe_comm_size(r->comm), m->size);
    megamoe_device_options device = MEGAMOE_INIT(megamoe_device_options);
    device.threads = 1;
    device.no_pinning = true;
    T_OK(megamoe_device_open("cpu", &device, &r->device));
    megamoe_layer_options layer = sc->s.options;
    layer.struct_size = sizeof layer;
    T_OK(megamoe_layer_create(r->comm, r->device, sc->m->weights, &layer, &r->layer));
    megamoe_shape shape = MEGAMOE_INIT(megamoe_shape);
    shape.hidden = HIDDEN;
    shape.intermediate = 32;
    shape.experts = EXPERTS;
    shape.physical_experts = sc->s.options.physical_experts;
    shape.topk = TOPK;
    shape.input_scale = sc->s.input_scale;
    megamoe_capacity capacity = MEGAMOE_INIT(megamoe_capacity);
    capacity.tokens = TOKENS_HERE;
    capacity.pool_rows = sc->s.pool_rows;
    capacity.deadline_ms = sc->s.deadline_ms ? sc->s.deadline_ms : CREW_DEADLINE_MS;
    T_OK(megamoe_workspace_create(r->comm, r->device, &shape, &capacity, &r->workspace));
    T_OK(megamoe_prewarm(r->layer, r->workspace));
}

static void close_rank(counter *c, rank *r) {
    megamoe_workspace_close(r->workspace);
    megamoe_layer_close(r->layer);
    megamoe_device_close(r->device);
    T_EQ_INT(c->closes, 0);
    megamoe_comm_close(r->comm);
    T_EQ_INT(c->closes, 1);
}

static megamoe_status forward(rank *r, const batch *b, uint16_t *y) {
    int64_t first;
    const batch part = share_of(b, r->rank, r->ranks, &first);
    const megamoe_view x = view_x(&part), ids = view_ids(&part), weights = view_weights(&part);
    const megamoe_view view = view_y(y + first * b->hidden, &part);
    const megamoe_status status =
        megamoe_stage(r->workspace, &x, &ids, &weights, part.tokens, NULL);
    return status == MEGAMOE_OK ? megamoe_forward(r->layer, r->workspace, &view, NULL) : status;
}

static scene open_scene(const model *m, t_random *random) {
    scene sc = {.m = m,
                .b = batch_random(m, TOKENS_HERE, TOPK, ROUTING_RANDOM, random),
                .y = crew_share(TOKENS_HERE * HIDDEN * sizeof(uint16_t)),
                .office = crew_share(sizeof(office)),
                .seen_ms = crew_share(CREW_MAX * sizeof(int64_t))};
    batch_mask(&sc.b, 7, random);
    return sc;
}

static void close_scene(scene *sc) {
    batch_free(&sc->b);
    crew_unshare(sc->y, TOKENS_HERE * HIDDEN * sizeof(uint16_t));
    crew_unshare(sc->office, sizeof(office));
    crew_unshare(sc->seen_ms, CREW_MAX * sizeof(int64_t));
}

static model open_model(megamoe_format format, t_random *random) {
    const model_recipe recipe = {format, HIDDEN, 32, EXPERTS, MEGAMOE_DTYPE_NONE, {0, 0, 0}};
    return model_open(&recipe, random);
}

/* ---- the same bits ---- */

/* Fewer tokens from forward to forward, so that what is left of earlier ones would show. */
static void compute_shares(const member *m) {
    const scene *sc = m->argument;
    counter c;
    rank r;
    open_rank(m, sc, &c, &r);
    for (int64_t less = 3; less >= 0; less--) {
        const batch part = batch_part(&sc->b, 5 * less, TOKENS_HERE - 5 * less);
        T_OK(forward(&r, &part, sc->y + 5 * less * HIDDEN));
        T_OK(megamoe_workspace_status(r.workspace, NULL));
    }
    const batch none = batch_part(&sc->b, 0, 0);
    T_OK(forward(&r, &none, sc->y));
    int64_t loads[EXPERTS];
    T_OK(megamoe_layer_loads(r.comm, r.layer, loads, EXPERTS));
    close_rank(&c, &r);
}

T_CASE(messages_give_the_bits_of_one_rank) {
    static const int32_t ranks[] = {1, 2, 4, 8};
    static const int32_t replicas[] = {3, 0, 3, 1, 2, 4, 7, 5, 6, 3, 0};
    t_random random = t_random_start(1);
    for (int i = 0; i < 8; i++) {
        model m = open_model(i % 2 ? MEGAMOE_FORMAT_NVFP4 : MEGAMOE_FORMAT_MXFP4, &random);
        scene sc = open_scene(&m, &random);
        sc.s = (setup){.weights = m.weights,
                       .input_scale = i / 2 % 2 ? MEGAMOE_SCALE_BLOCK : MEGAMOE_SCALE_TOKEN};
        sc.s.options.accumulate = i / 4 ? MEGAMOE_ACCUMULATE_PROMOTE : MEGAMOE_ACCUMULATE_MMA;
        uint16_t want[TOKENS_HERE * HIDDEN];
        run_once(&sc.s, &sc.b, want);
        if (i % 3 == 0) {
            sc.s.options.physical_to_logical = replicas;
            sc.s.options.physical_experts = 11;
        }
        crew_run(ranks[i % 4], compute_shares, &sc);
        T_EQ_MEM(sc.y, want, sizeof want);
        close_scene(&sc);
        model_close(&m);
    }
}

/* ---- placing ---- */

enum { PHYSICAL = 11, ROUNDS = 6 };

static megamoe_status place(rank *r, const int32_t *map) {
    megamoe_placement placement = MEGAMOE_INIT(megamoe_placement);
    placement.physical_to_logical = map;
    placement.physical_experts = PHYSICAL;
    return megamoe_layer_place(r->comm, r->layer, &placement);
}

static void place_and_compute(const member *m) {
    const scene *sc = m->argument;
    counter c;
    rank r;
    int32_t map[PHYSICAL];
    t_random random = t_random_start(50); /* the same on all ranks */
    open_rank(m, sc, &c, &r);
    for (int round = 0; round < ROUNDS; round++) {
        mm_place_window_bytes = round % 2 ? 1 : 64 << 20; /* one expert at a time, or all */
        T_OK(forward(&r, &sc->b, sc->y));
        int64_t loads[EXPERTS], routes = 0, want = 0;
        T_OK(megamoe_layer_loads(r.comm, r.layer, loads, EXPERTS));
        for (int32_t e = 0; e < EXPERTS; e++)
            routes += loads[e];
        for (int64_t i = 0; i < sc->b.tokens * TOPK; i++)
            want += sc->b.ids[i] >= 0;
        T_EQ_INT(routes, want);
        random_map(&random, map, PHYSICAL, EXPERTS);
        T_OK(place(&r, map));
    }
    /* What fails on one rank is refused on all, which go on as before. */
    if (m->rank == 0)
        map[0] = EXPERTS;
    T_STATUS(place(&r, map), m->rank == 0 ? MEGAMOE_EINVAL : MEGAMOE_EPEER);
    T_CONTAINS(megamoe_last_error(), "physical_to_logical[0] is 8");
    int32_t mine = 0, all[CREW_MAX];
    T_OK(megamoe_comm_allgather(r.comm, &mine, all, sizeof mine)); /* y is shared */
    if (m->rank == 0)
        memset(sc->y, 0xFF, TOKENS_HERE * HIDDEN * sizeof *sc->y);
    T_OK(megamoe_comm_allgather(r.comm, &mine, all, sizeof mine));
    T_OK(forward(&r, &sc->b, sc->y));
    close_rank(&c, &r);
}

T_CASE(experts_move_by_messages) {
    static const int32_t ranks[] = {1, 2, 3, 4, 8};
    static const int32_t replicas[PHYSICAL] = {3, 0, 3, 1, 2, 4, 7, 5, 6, 3, 0};
    t_random random = t_random_start(5);
    for (int i = 0; i < 5; i++) {
        model m = open_model(i % 2 ? MEGAMOE_FORMAT_NVFP4 : MEGAMOE_FORMAT_MXFP4, &random);
        scene sc = open_scene(&m, &random);
        sc.s = (setup){.weights = m.weights};
        uint16_t want[TOKENS_HERE * HIDDEN];
        run_once(&sc.s, &sc.b, want);
        sc.s.options.physical_to_logical = replicas;
        sc.s.options.physical_experts = PHYSICAL;
        crew_run(ranks[i], place_and_compute, &sc);
        T_EQ_MEM(sc.y, want, sizeof want);
        close_scene(&sc);
        model_close(&m);
    }
}

/* An expert that is spoiled on its way: its rank says so, and all keep what they have. */
static void spoil_and_compute(const member *m) {
    static const int32_t map[PHYSICAL] = {7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3};
    const scene *sc = m->argument;
    counter c;
    rank r;
    open_rank(m, sc, &c, &r);
    c.spoils = m->rank == 1;
    T_STATUS(place(&r, map), m->rank == 0 ? MEGAMOE_ECHECK : MEGAMOE_EPEER);
    T_CONTAINS(megamoe_last_error(), "has not arrived from rank 1 as it was sent");
    c.spoils = false;
    T_OK(forward(&r, &sc->b, sc->y));
    T_OK(place(&r, map));
    T_OK(forward(&r, &sc->b, sc->y));
    close_rank(&c, &r);
}

T_CASE(a_spoilt_expert_is_refused) {
    static const int32_t twice[PHYSICAL] = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2};
    t_random random = t_random_start(6);
    model m = open_model(MEGAMOE_FORMAT_MXFP4, &random);
    scene sc = open_scene(&m, &random);
    sc.s = (setup){.weights = m.weights};
    uint16_t want[TOKENS_HERE * HIDDEN];
    run_once(&sc.s, &sc.b, want);
    sc.s.options.physical_to_logical = twice;
    sc.s.options.physical_experts = PHYSICAL;
    crew_run(2, spoil_and_compute, &sc);
    T_EQ_MEM(sc.y, want, sizeof want);
    close_scene(&sc);
    model_close(&m);
}

/* Nothing is written where a message that was spoiled on its way would have it. */
static void misname_and_compute(const member *m) {
    const scene *sc = m->argument;
    counter c;
    rank r;
    open_rank(m, sc, &c, &r);
    T_OK(forward(&r, &sc->b, sc->y));
    c.misnames = m->rank == 1;
    T_STATUS(forward(&r, &sc->b, sc->y), MEGAMOE_EPEER);
    if (m->rank == 0)
        T_CONTAINS(megamoe_last_error(), "from rank 1 have not come as they were sent");
    close_rank(&c, &r);
}

T_CASE(a_spoilt_message_ends_the_forward) {
    t_random random = t_random_start(7);
    model m = open_model(MEGAMOE_FORMAT_MXFP4, &random);
    scene sc = open_scene(&m, &random);
    sc.s = (setup){.weights = m.weights};
    crew_run(2, misname_and_compute, &sc);
    close_scene(&sc);
    model_close(&m);
}

static void compute_late(const member *m) {
    const scene *sc = m->argument;
    counter c;
    rank r;
    open_rank(m, sc, &c, &r);
    for (int round = 0; round < 40; round++)
        T_OK(forward(&r, &sc->b, sc->y));
    close_rank(&c, &r);
}

T_CASE(delays_before_every_message) {
    static const int32_t ranks[] = {2, 4, 8};
    t_random random = t_random_start(4);
    model m = open_model(MEGAMOE_FORMAT_MXFP4, &random);
    for (int i = 0; i < 3; i++) {
        scene sc = open_scene(&m, &random);
        sc.s = (setup){.weights = m.weights};
        sc.delays = true;
        uint16_t want[TOKENS_HERE * HIDDEN];
        run_once(&sc.s, &sc.b, want);
        crew_run(ranks[i], compute_late, &sc);
        T_EQ_MEM(sc.y, want, sizeof want);
        close_scene(&sc);
    }
    model_close(&m);
}

/* ---- errors and faults ---- */

static const char *const phases[] = {"counting", "dispatching", "combining"};
enum { MESSAGES = sizeof phases / sizeof *phases /* of a forward */, DEADLINE_MS = 300 };

static void overflow_and_go_on(const member *m) {
    const scene *sc = m->argument;
    counter c;
    rank r;
    open_rank(m, sc, &c, &r);
    batch hot = sc->b;
    hot.ids = calloc((size_t)(hot.tokens * TOPK), sizeof *hot.ids);
    for (int round = 0; round < 4; round++) {
        T_OK(forward(&r, round % 2 ? &sc->b : &hot, sc->y));
        T_STATUS(megamoe_workspace_status(r.workspace, NULL),
                 round % 2 ? MEGAMOE_OK : MEGAMOE_ECAPACITY);
        if (round % 2 == 0)
            T_CONTAINS(megamoe_last_error(), "rank 0 receives 58 routes; its pool has 50 rows");
    }
    free(hot.ids);
    close_rank(&c, &r);
}

T_CASE(an_error_of_one_is_that_of_all) {
    t_random random = t_random_start(2);
    model m = open_model(MEGAMOE_FORMAT_MXFP4, &random);
    scene sc = open_scene(&m, &random);
    sc.s = (setup){.weights = m.weights, .pool_rows = 50};
    uint16_t want[TOKENS_HERE * HIDDEN];
    run_once(&sc.s, &sc.b, want);
    crew_run(RANKS, overflow_and_go_on, &sc);
    T_EQ_MEM(sc.y, want, sizeof want);
    close_scene(&sc);
    model_close(&m);
}

static void lose_one(const member *m) {
    const scene *sc = m->argument;
    counter c;
    rank r;
    open_rank(m, sc, &c, &r);
    T_OK(forward(&r, &sc->b, sc->y));
    T_OK(forward(&r, &sc->b, sc->y));
    if (m->rank == 2) {
        c.falls_in = 1 + sc->message;
        c.signal = sc->signal;
    }
    const int64_t start = crew_now_ms();
    const megamoe_status status = forward(&r, &sc->b, sc->y);
    sc->seen_ms[m->rank] = crew_now_ms() - start;
    T_CHECK(status == MEGAMOE_ETIMEDOUT || status == MEGAMOE_EPEER);
    char want[64];
    snprintf(want, sizeof want, "forward 3, %s: rank ", phases[sc->message]);
    T_CONTAINS(megamoe_last_error(), want);
    T_STATUS(forward(&r, &sc->b, sc->y), MEGAMOE_ESTATE);
    int32_t mine = 0, all[CREW_MAX];
    T_STATUS(megamoe_comm_allgather(r.comm, &mine, all, sizeof mine), MEGAMOE_EPEER);
    close_rank(&c, &r);
}

static void check_loss(const model *m, t_random *random, int message, int signal) {
    scene sc = open_scene(m, random);
    sc.s = (setup){.weights = m->weights, .deadline_ms = DEADLINE_MS};
    sc.message = message;
    sc.signal = signal;
    crew c = crew_start(RANKS, lose_one, &sc);
    int codes[CREW_MAX], status;
    if (signal == SIGSTOP) {
        T_REQUIRE(waitpid(c.processes[2], &status, WUNTRACED) > 0 && WIFSTOPPED(status));
        crew_pause_ms(DEADLINE_MS + 1000);
        kill(c.processes[2], SIGKILL);
    }
    crew_wait(&c, codes);
    for (int32_t r = 0; r < RANKS; r++) {
        T_CHECK_MSG(codes[r] == (r == 2 ? -SIGKILL : 0), "%s, rank %d: %d", phases[message], r,
                    codes[r]);
        T_CHECK(sc.seen_ms[r] <= DEADLINE_MS + 1000);
    }
    close_scene(&sc);
}

T_CASE(a_lost_rank_ends_with_the_deadline) {
    t_random random = t_random_start(3);
    model m = open_model(MEGAMOE_FORMAT_MXFP4, &random);
    for (int message = 0; message < MESSAGES; message++) {
        check_loss(&m, &random, message, SIGKILL);
        check_loss(&m, &random, message, SIGSTOP);
    }
    model_close(&m);
}

T_CASE(transports_that_are_incomplete) {
    megamoe_comm *comm;
    counter c = {.size = 1};
    megamoe_transport t = MEGAMOE_INIT(megamoe_transport);
    t.size = 1;
    t.user = &c;
    t.allgather = all_gather;
    T_STATUS(megamoe_comm_transport(&t, &comm), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "alltoallv is NULL");
    T_STATUS(megamoe_comm_transport(NULL, &comm), MEGAMOE_EINVAL);
    t.rank = 1;
    T_STATUS(megamoe_comm_transport(&t, &comm), MEGAMOE_EINVAL);
    T_EQ_INT(c.closes, 0);
}
