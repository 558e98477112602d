/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranks that are processes: same bits as one rank whoever is late, and what becomes of the others
 * when one dies or stops, in each phase of a forward. The linker leads calls of the phases through
 * this file.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "layer/layer.h"

#include "../comm/crew.h"
#include "fleet.h"

enum { HIDDEN = 64, TOPK = 2, EXPERTS = 8, RANKS = 4, NOTICED_MS = 1000 };

static const model_recipe small = {MEGAMOE_FORMAT_MXFP4, HIDDEN,   32, EXPERTS,
                                   MEGAMOE_DTYPE_NONE,   {0, 0, 0}};

/* ---- what happens on the way through a forward ---- */

typedef enum step {
    STEP_NONE,
    STEP_OPEN, /* of a workspace, before the others know of it */
    STEP_MEET, /* of workspaces */
    STEP_PUBLISH,
    STEP_AGREE, /* published */
    STEP_COMPUTE,
    STEP_COMBINE, /* finished */
    STEPS
} step;

static struct {
    bool delays; /* now and then, before every step */
    t_random random;
    step at; /* where `signal` is raised, in forward `epoch` */
    uint64_t epoch;
    int signal;
    int64_t *when_ms; /* shared: when that was */
} course;

static void pass(step at, uint64_t epoch) {
    if (course.delays && t_below(&course.random, 3) == 0)
        usleep(t_below(&course.random, 2000));
    if (course.at != at || course.epoch != epoch)
        return;
    *course.when_ms = crew_now_ms();
    (void)raise(course.signal);
}

#define THROUGH(type, name, parameters, arguments, at, epoch)                                      \
    type __real_##name parameters;                                                                 \
    type __wrap_##name parameters;                                                                 \
    type __wrap_##name parameters {                                                                \
        pass(at, epoch);                                                                           \
        return __real_##name arguments;                                                            \
    }

THROUGH(megamoe_status, mm_cpu_workspace_open,
        (const megamoe_shape *shape, const megamoe_capacity *capacity, const megamoe_comm *comm,
         megamoe_device *device, mm_cpu_workspace **workspace),
        (shape, capacity, comm, device, workspace), STEP_OPEN, 0)
THROUGH(megamoe_status, mm_cpu_workspace_meet,
        (mm_cpu_workspace * workspace, megamoe_comm *comm, const mm_cpu_card *cards),
        (workspace, comm, cards), STEP_MEET, 0)
THROUGH(void, mm_cpu_publish, (mm_cpu_workspace * workspace, const mm_cpu_layer *layer),
        (workspace, layer), STEP_PUBLISH, workspace->epoch + 1)
THROUGH(void, mm_cpu_agree,
        (mm_cpu_workspace * workspace, const mm_cpu_layer *layer, megamoe_workspace_detail *detail),
        (workspace, layer, detail), STEP_AGREE, workspace->epoch)
THROUGH(void, mm_cpu_compute, (mm_cpu_workspace * workspace, const mm_cpu_layer *layer),
        (workspace, layer), STEP_COMPUTE, workspace->epoch)
THROUGH(void, mm_cpu_combine, (mm_cpu_workspace * workspace, const megamoe_view *y), (workspace, y),
        STEP_COMBINE, workspace->epoch)

/* ---- one rank ---- */

/* What a case gives its ranks; y and what begins with `seen` are shared. */
typedef struct scene {
    const setup *s;
    batch b;
    uint16_t *y;
    bool delays;
    int rounds;
    /* What befalls the victim. */
    int32_t victim;
    step at;
    uint64_t epoch;
    int signal;
    int32_t deadline_ms;
    int64_t *seen_ms; /* [CREW_MAX]: by the survivors, and of the victim when it happened */
} scene;

static void open_rank(const member *m, const setup *s, rank *r) {
    *r = (rank){.rank = m->rank, .ranks = m->size};
    T_OK(crew_meet(m, 0, &r->comm));
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    T_OK(megamoe_weights_describe(s->weights, &desc));
    megamoe_device_options options = MEGAMOE_INIT(megamoe_device_options);
    options.threads = s->threads ? s->threads : 1;
    options.no_pinning = true;
    T_OK(megamoe_device_open("cpu", &options, &r->device));
    r->shape = (megamoe_shape){.struct_size = sizeof r->shape,
                               .hidden = desc.hidden,
                               .intermediate = desc.intermediate,
                               .experts = desc.experts,
                               .topk = s->topk ? s->topk : TOPK,
                               .input_scale = s->input_scale};
    r->capacity = (megamoe_capacity){.struct_size = sizeof r->capacity,
                                     .tokens = s->tokens ? s->tokens : 64,
                                     .pool_rows = s->pool_rows,
                                     .deadline_ms = s->deadline_ms ? s->deadline_ms : 20000};
    megamoe_layer_options layer = s->options;
    layer.struct_size = sizeof layer;
    T_OK(megamoe_layer_create(r->comm, r->device, s->weights, &layer, &r->layer));
}

static megamoe_status create(rank *r) {
    return megamoe_workspace_create(r->comm, r->device, &r->shape, &r->capacity, &r->workspace);
}

static void close_rank(rank *r) {
    megamoe_workspace_close(r->workspace);
    megamoe_layer_close(r->layer);
    megamoe_device_close(r->device);
    megamoe_comm_close(r->comm);
}

static megamoe_status stage_share(rank *r, const batch *b) {
    int64_t first;
    const batch part = share_of(b, r->rank, r->ranks, &first);
    const megamoe_view x = view_x(&part), ids = view_ids(&part), weights = view_weights(&part);
    return megamoe_stage(r->workspace, &x, &ids, &weights, part.tokens, NULL);
}

static megamoe_status forward_share(rank *r, const batch *b, uint16_t *y) {
    int64_t first;
    const batch part = share_of(b, r->rank, r->ranks, &first);
    const megamoe_view view = view_y(y + first * b->hidden, &part);
    return megamoe_forward(r->layer, r->workspace, &view, NULL);
}

/* ---- the same bits ---- */

static void compute_share(const member *m) {
    scene *sc = m->argument;
    course.delays = sc->delays;
    course.random = t_random_start((uint64_t)m->rank);
    rank r;
    open_rank(m, sc->s, &r);
    T_OK(create(&r));
    T_OK(megamoe_prewarm(r.layer, r.workspace));
    for (int round = 0; round < sc->rounds; round++) {
        T_OK(stage_share(&r, &sc->b));
        T_OK(forward_share(&r, &sc->b, sc->y));
        T_OK(megamoe_workspace_status(r.workspace, NULL));
    }
    close_rank(&r);
}

/* Over ranks that are processes, against one rank. */
static void check_bits(const setup *s, const batch *b, int32_t ranks, bool delays, int rounds) {
    const size_t bytes = (size_t)b->tokens * (size_t)b->hidden * sizeof(uint16_t);
    uint16_t *want = malloc(bytes + 1);
    T_REQUIRE(want);
    run_once(s, b, want);
    scene sc = {.s = s, .b = *b, .delays = delays, .rounds = rounds, .y = crew_share(bytes + 1)};
    memset(sc.y, 0xFF, bytes);
    crew_run(ranks, compute_share, &sc);
    T_EQ_MEM(sc.y, want, bytes);
    crew_unshare(sc.y, bytes + 1);
    free(want);
}

T_CASE(processes_give_the_bits_of_one_rank) {
    static const megamoe_format formats[] = {MEGAMOE_FORMAT_MXFP4, MEGAMOE_FORMAT_NVFP4};
    static const int32_t ranks[] = {2, 4, 8};
    t_random random = t_random_start(1);
    for (int i = 0; i < 2; i++) {
        model_recipe recipe = small;
        recipe.format = formats[i];
        model m = model_open(&recipe, &random);
        batch b = batch_random(&m, 29, TOPK, ROUTING_RANDOM, &random);
        batch_mask(&b, 6, &random);
        for (int k = 0; k < 3; k++) {
            setup s = {.weights = m.weights, .input_scale = MEGAMOE_SCALE_BLOCK};
            s.options.accumulate = k == 1 ? MEGAMOE_ACCUMULATE_PROMOTE : MEGAMOE_ACCUMULATE_MMA;
            check_bits(&s, &b, ranks[k], false, 2);
            s.input_scale = MEGAMOE_SCALE_TOKEN;
            s.threads = 2;
            check_bits(&s, &b, ranks[k], false, 2);
        }
        batch_free(&b);
        model_close(&m);
    }
}

T_CASE(delays_before_every_step) {
    t_random random = t_random_start(2);
    model m = model_open(&small, &random);
    batch b = batch_random(&m, 23, TOPK, ROUTING_RANDOM, &random);
    const setup s = {.weights = m.weights};
    check_bits(&s, &b, 2, true, 60);
    check_bits(&s, &b, 4, true, 60);
    check_bits(&s, &b, 8, true, 30);
    batch_free(&b);
    model_close(&m);
}

T_CASE(ranks_without_tokens_and_one_with_all_routes) {
    t_random random = t_random_start(3);
    model m = model_open(&small, &random);
    const setup s = {.weights = m.weights};
    batch few = batch_random(&m, 2, TOPK, ROUTING_RANDOM, &random);
    check_bits(&s, &few, 8, true, 5);
    batch none = batch_part(&few, 0, 0);
    check_bits(&s, &none, 4, true, 5);
    batch hot = batch_random(&m, 40, TOPK, ROUTING_RANDOM, &random);
    for (int64_t i = 0; i < hot.tokens * TOPK; i++)
        hot.ids[i] = EXPERTS - 1 - (int32_t)(i % 2); /* both with the last rank of four */
    check_bits(&s, &hot, 4, true, 5);
    batch_free(&few);
    batch_free(&hot);
    model_close(&m);
}

/* ---- over time ---- */

enum { POOL_TOKENS = 64, MAX_TOKENS = 12, MARATHON_ROUNDS = 400 };

struct marathon {
    const setup *s;
    batch pool;
    uint16_t *want;
    uint64_t epoch; /* the words begin here */
};

/* Before the first forward, as if `epoch` of them had been. */
static void set_epoch(megamoe_workspace *ws, uint64_t epoch) {
    ws->cpu->epoch = epoch;
    atomic_store(&ws->cpu->own->words->published, epoch);
    atomic_store(&ws->cpu->own->words->finished, epoch);
}

static void run_marathon(const member *m) {
    const struct marathon *race = m->argument;
    rank r;
    open_rank(m, race->s, &r);
    T_OK(create(&r));
    set_epoch(r.workspace, race->epoch);
    int32_t mine = 0, all[CREW_MAX];
    T_OK(megamoe_comm_allgather(r.comm, &mine, all, sizeof mine));
    t_random random = t_random_start(1000 + (uint64_t)m->rank);
    course.delays = m->rank == 1;
    course.random = random;
    for (int round = 0; round < MARATHON_ROUNDS; round++) {
        const int64_t n = t_below(&random, 4) ? (int64_t)t_below(&random, MAX_TOKENS + 1) : 0;
        const int64_t from = (int64_t)t_below(&random, (uint32_t)(POOL_TOKENS - n));
        const batch part = batch_part(&race->pool, from, n);
        const megamoe_view vx = view_x(&part), vi = view_ids(&part), vw = view_weights(&part);
        uint16_t y[MAX_TOKENS * HIDDEN];
        const megamoe_view vy = {y, MEGAMOE_DTYPE_BF16, n, 0};
        T_OK(megamoe_stage(r.workspace, &vx, &vi, &vw, n, NULL));
        T_OK(megamoe_forward(r.layer, r.workspace, &vy, NULL));
        T_REQUIRE(same_rows(y, race->want + from * HIDDEN, n * HIDDEN));
    }
    megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
    T_OK(megamoe_workspace_status(r.workspace, &d));
    T_EQ_HEX(d.epoch, race->epoch + MARATHON_ROUNDS);
    close_rank(&r);
}

/* The words of the CPU have 64 bits, so that they do not wrap; here they leave the lower 32. */
T_CASE(many_forwards_across_the_32nd_bit) {
    t_random random = t_random_start(4);
    model m = model_open(&small, &random);
    struct marathon race = {.pool = batch_random(&m, POOL_TOKENS, TOPK, ROUTING_RANDOM, &random),
                            .want = malloc(POOL_TOKENS * HIDDEN * sizeof(uint16_t)),
                            .epoch = UINT32_MAX - 3};
    T_REQUIRE(race.want);
    const setup alone = {.weights = m.weights};
    run_once(&alone, &race.pool, race.want);
    const setup s = {.weights = m.weights, .tokens = MAX_TOKENS};
    race.s = &s;
    crew_run(RANKS, run_marathon, &race);
    free(race.want);
    batch_free(&race.pool);
    model_close(&m);
}

/* ---- errors that all agree on ---- */

static void overflow_and_go_on(const member *m) {
    scene *sc = m->argument;
    rank r;
    open_rank(m, sc->s, &r);
    T_OK(create(&r));
    batch good = sc->b, hot = sc->b;
    hot.ids = calloc((size_t)(hot.tokens * TOPK), sizeof *hot.ids);
    for (int round = 0; round < 4; round++) {
        T_OK(stage_share(&r, round % 2 ? &good : &hot));
        T_OK(forward_share(&r, &good, sc->y));
        megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
        T_STATUS(megamoe_workspace_status(r.workspace, &d),
                 round % 2 ? MEGAMOE_OK : MEGAMOE_ECAPACITY);
        if (round % 2)
            continue;
        T_EQ_INT(d.rank, 0);
        T_EQ_INT(d.value, hot.tokens * TOPK);
        T_CONTAINS(d.message, "rank 0 receives 48 routes; its pool has 40 rows");
    }
    free(hot.ids);
    close_rank(&r);
}

T_CASE(a_pool_of_one_rank_overflows) {
    t_random random = t_random_start(5);
    model m = model_open(&small, &random);
    batch b = batch_random(&m, 24, TOPK, ROUTING_RANDOM, &random);
    uint16_t want[24 * HIDDEN];
    const setup alone = {.weights = m.weights}, s = {.weights = m.weights, .pool_rows = 40};
    run_once(&alone, &b, want);
    scene sc = {.s = &s, .b = b, .y = crew_share(sizeof want)};
    crew_run(RANKS, overflow_and_go_on, &sc);
    T_EQ_MEM(sc.y, want, sizeof want);
    crew_unshare(sc.y, sizeof want);
    batch_free(&b);
    model_close(&m);
}

static void differ(const member *m) {
    const scene *sc = m->argument;
    setup s = *sc->s;
    s.tokens = m->rank == 2 ? 33 : 32;
    rank r;
    open_rank(m, &s, &r);
    T_STATUS(create(&r), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "capacity.tokens is 32 on rank 0 and 33 on rank 2");
    /* An argument that is wrong on one rank is the error of all. */
    r.capacity.tokens = m->rank == 1 ? -5 : 32;
    T_STATUS(create(&r), m->rank == 1 ? MEGAMOE_EINVAL : MEGAMOE_EPEER);
    T_CONTAINS(megamoe_last_error(), "capacity.tokens is -5");
    if (m->rank != 1)
        T_CONTAINS(megamoe_last_error(), "on rank 1");
    r.capacity.tokens = 32;
    T_OK(create(&r));
    /* Layers are compared by each forward. */
    megamoe_layer_options options = MEGAMOE_INIT(megamoe_layer_options);
    options.weight_after_fc2 = m->rank == 3;
    megamoe_layer *other;
    T_OK(megamoe_layer_create(r.comm, r.device, s.weights, &options, &other));
    T_OK(megamoe_stage(r.workspace, NULL, NULL, NULL, 0, NULL));
    T_OK(megamoe_forward(other, r.workspace, NULL, NULL));
    T_STATUS(megamoe_workspace_status(r.workspace, NULL), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "rank 3 has other options");
    megamoe_layer_close(other);
    close_rank(&r);
}

T_CASE(ranks_that_differ_name_the_field) {
    t_random random = t_random_start(6);
    model m = model_open(&small, &random);
    const setup s = {.weights = m.weights};
    scene sc = {.s = &s};
    crew_run(RANKS, differ, &sc);
    model_close(&m);
}

/* ---- faults ---- */

static const char *phase_word(const megamoe_workspace_detail *d) {
    return d->phase == MEGAMOE_PHASE_COUNT ? "counting" : "experts";
}

/* The error of a forward in which the victim is missed. */
static void check_detail(const scene *sc, const rank *r, megamoe_status status) {
    megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
    T_STATUS(megamoe_workspace_status(r->workspace, &d), status);
    char want[64];
    /* What the victim has done before, it has done for all. */
    const bool next = sc->at == STEP_COMBINE && d.epoch == sc->epoch + 1;
    T_CHECK_MSG(d.epoch == sc->epoch || next, "epoch %d", (int)d.epoch);
    snprintf(want, sizeof want, "forward %d, rank %d, %s: ", (int)d.epoch, r->rank, phase_word(&d));
    T_CONTAINS(d.message, want);
    if (sc->signal == SIGKILL) {
        snprintf(want, sizeof want, "the process of rank %d has ended", sc->victim);
        T_EQ_INT(d.rank, sc->victim);
        T_CONTAINS(d.message, want);
    } else if (status == MEGAMOE_ETIMEDOUT) {
        snprintf(want, sizeof want, "waiting for rank %d: the deadline has passed", sc->victim);
        T_EQ_INT(d.rank, sc->victim);
        T_CONTAINS(d.message, want);
    } else
        T_CONTAINS(d.message, "has aborted");
}

static void live_through(const member *m) {
    scene *sc = m->argument;
    course.when_ms = &sc->seen_ms[m->rank];
    if (m->rank == sc->victim) {
        course.at = sc->at;
        course.epoch = sc->epoch;
        course.signal = sc->signal;
    }
    setup s = *sc->s;
    s.deadline_ms = sc->deadline_ms;
    rank r;
    open_rank(m, &s, &r);
    megamoe_status status = create(&r);
    for (int round = 0; status == MEGAMOE_OK && round < 5; round++) {
        T_OK(stage_share(&r, &sc->b));
        status = forward_share(&r, &sc->b, sc->y);
    }
    sc->seen_ms[m->rank] = crew_now_ms();
    if (r.workspace)
        check_detail(sc, &r, status);
    else
        T_EQ_INT(status, MEGAMOE_EPEER);
    T_CHECK_MSG(status == MEGAMOE_EPEER || (sc->signal == SIGSTOP && status == MEGAMOE_ETIMEDOUT),
                "%s", megamoe_status_name(status));
    if (r.workspace) {
        T_STATUS(megamoe_stage(r.workspace, NULL, NULL, NULL, 0, NULL), MEGAMOE_ESTATE);
        T_STATUS(forward_share(&r, &sc->b, sc->y), MEGAMOE_ESTATE);
    }
    close_rank(&r);
}

static const char *const step_words[STEPS] = {
    [STEP_OPEN] = "opening a workspace",  [STEP_MEET] = "sharing memory",
    [STEP_PUBLISH] = "before publishing", [STEP_AGREE] = "before agreeing",
    [STEP_COMPUTE] = "before computing",  [STEP_COMBINE] = "before combining"};

static void check_fault(step at, int signal, int32_t deadline_ms) {
    t_random random = t_random_start(7);
    model m = model_open(&small, &random);
    batch b = batch_random(&m, 16, TOPK, ROUTING_RANDOM, &random);
    const setup s = {.weights = m.weights};
    const size_t bytes = 16 * HIDDEN * sizeof(uint16_t);
    scene sc = {.s = &s,
                .b = b,
                .y = crew_share(bytes),
                .victim = 2,
                .at = at,
                .epoch = at < STEP_PUBLISH ? 0 : 3,
                .signal = signal,
                .deadline_ms = deadline_ms,
                .seen_ms = crew_share(CREW_MAX * sizeof(int64_t))};
    crew c = crew_start(RANKS, live_through, &sc);
    int codes[CREW_MAX];
    if (signal == SIGSTOP) {
        int status;
        T_REQUIRE(waitpid(c.processes[sc.victim], &status, WUNTRACED) > 0 && WIFSTOPPED(status));
        crew_pause_ms(deadline_ms + NOTICED_MS);
        kill(c.processes[sc.victim], SIGKILL);
    }
    crew_wait(&c, codes);
    int64_t latest = 0;
    for (int32_t r = 0; r < RANKS; r++) {
        T_CHECK_MSG(codes[r] == (r == sc.victim ? -SIGKILL : 0), "%s, rank %d: %d", step_words[at],
                    r, codes[r]);
        const int64_t after = sc.seen_ms[r] - sc.seen_ms[sc.victim];
        latest = r != sc.victim && after > latest ? after : latest;
    }
    printf("  %s %s: all others knew after %d ms\n", signal == SIGKILL ? "killed" : "stopped",
           step_words[at], (int)latest);
    T_CHECK(latest <= (signal == SIGSTOP ? deadline_ms : 0) + NOTICED_MS);
    crew_unshare(sc.y, bytes);
    crew_unshare(sc.seen_ms, CREW_MAX * sizeof(int64_t));
    batch_free(&b);
    model_close(&m);
}

T_CASE(a_rank_is_killed_at_each_step) {
    for (step at = STEP_OPEN; at < STEPS; at++)
        check_fault(at, SIGKILL, 20000);
}

T_CASE(a_rank_is_stopped_at_each_step) {
    for (step at = STEP_PUBLISH; at < STEPS; at++)
        check_fault(at, SIGSTOP, 400);
}

/* ---- ranks that are not in a call ---- */

static void be_elsewhere_meanwhile(const member *m) {
    scene *sc = m->argument;
    rank r;
    open_rank(m, sc->s, &r);
    T_OK(create(&r));
    T_OK(stage_share(&r, &sc->b));
    T_OK(forward_share(&r, &sc->b, sc->y));
    if (m->rank == 1)
        (void)raise(SIGKILL);
    crew_pause_ms(300);
    const int64_t start = crew_now_ms();
    T_STATUS(forward_share(&r, &sc->b, sc->y), MEGAMOE_EPEER);
    T_CHECK(crew_now_ms() - start < NOTICED_MS);
    T_CONTAINS(megamoe_last_error(), "forward 2, rank ");
    T_CONTAINS(megamoe_last_error(), "counting: the process of rank 1 has ended");
    megamoe_workspace *another;
    T_STATUS(megamoe_workspace_create(r.comm, r.device, &r.shape, &r.capacity, &another),
             MEGAMOE_EPEER);
    T_CONTAINS(megamoe_last_error(), "the process of rank 1 has ended");
    close_rank(&r);
}

/* One that is late by more than a blink, and leaves when it is done. */
static void come_late_and_leave(const member *m) {
    scene *sc = m->argument;
    rank r;
    open_rank(m, sc->s, &r);
    T_OK(create(&r));
    T_OK(stage_share(&r, &sc->b));
    if (m->rank == 0)
        crew_pause_ms(900);
    T_OK(forward_share(&r, &sc->b, sc->y));
    if (m->rank != 0) {
        const int64_t start = crew_now_ms();
        T_STATUS(forward_share(&r, &sc->b, sc->y), MEGAMOE_EPEER);
        T_CHECK(crew_now_ms() - start < NOTICED_MS);
        megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
        T_STATUS(megamoe_workspace_status(r.workspace, &d), MEGAMOE_EPEER);
        T_CHECK_MSG(strstr(d.message, "waiting for rank 0: it has closed its communicator") ||
                        strstr(d.message, "has aborted"),
                    "%s", d.message);
    }
    close_rank(&r);
}

/* The survivors of a death make a communicator of their own, with every expert on one of them. */
static void begin_again(const member *m) {
    scene *sc = m->argument;
    rank r;
    open_rank(m, sc->s, &r);
    T_OK(create(&r));
    if (m->rank == m->size - 1)
        (void)raise(SIGKILL);
    T_OK(stage_share(&r, &sc->b));
    T_STATUS(forward_share(&r, &sc->b, sc->y), MEGAMOE_EPEER);
    close_rank(&r);
    member survivor = *m;
    survivor.size = m->size - 1;
    open_rank(&survivor, sc->s, &r);
    T_OK(create(&r));
    T_OK(stage_share(&r, &sc->b));
    T_OK(forward_share(&r, &sc->b, sc->y));
    close_rank(&r);
}

static void check_end(void (*run)(const member *m), int32_t killed, bool computed) {
    t_random random = t_random_start(8);
    model m = model_open(&small, &random);
    batch b = batch_random(&m, 16, TOPK, ROUTING_RANDOM, &random);
    uint16_t want[16 * HIDDEN];
    const setup s = {.weights = m.weights};
    run_once(&s, &b, want);
    scene sc = {.s = &s, .b = b, .y = crew_share(sizeof want)};
    crew c = crew_start(RANKS, run, &sc);
    int codes[CREW_MAX];
    crew_wait(&c, codes);
    for (int32_t r = 0; r < RANKS; r++)
        T_EQ_INT(codes[r], r == killed ? -SIGKILL : 0);
    if (computed)
        T_EQ_MEM(sc.y, want, sizeof want);
    crew_unshare(sc.y, sizeof want);
    batch_free(&b);
    model_close(&m);
}

T_CASE(the_next_call_of_the_others_names_the_dead) {
    check_end(be_elsewhere_meanwhile, 1, false);
}

T_CASE(a_late_rank_is_only_late) {
    check_end(come_late_and_leave, -1, true);
}

T_CASE(survivors_begin_again) {
    check_end(begin_again, RANKS - 1, true);
}

/* ---- nothing is left ---- */

enum { NAMES_MAX = 256, NAME_BYTES = 64 };

/* Whether a process has the socket of this inode. */
static bool has_socket(pid_t process, unsigned long inode) {
    char path[64], want[64], link[64];
    snprintf(want, sizeof want, "socket:[%lu]", inode);
    for (int fd = 0; fd < 256; fd++) {
        snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)process, fd);
        const ssize_t n = readlink(path, link, sizeof link - 1);
        if (n > 0 && (link[n] = '\0', strcmp(link, want) == 0))
            return true;
    }
    return false;
}

/* Names of Unix sockets: those that processes of the crew have, or all with c NULL. */
static int list_names(const crew *c, char names[NAMES_MAX][NAME_BYTES]) {
    FILE *file = fopen("/proc/net/unix", "r");
    T_REQUIRE(file);
    char line[512];
    int n = 0;
    while (n < NAMES_MAX && fgets(line, sizeof line, file)) {
        char inode_text[24];
        bool theirs = !c;
        const bool named =
            sscanf(line, "%*s %*s %*s %*s %*s %*s %23s %63s", inode_text, names[n]) == 2;
        const unsigned long inode = named ? strtoul(inode_text, NULL, 10) : 0;
        for (int32_t r = 0; c && named && r < c->size; r++)
            theirs = theirs || has_socket(c->processes[r], inode);
        n += named && theirs;
    }
    fclose(file);
    return n;
}

static void be_killed(const member *m) {
    scene *sc = m->argument;
    rank r;
    open_rank(m, sc->s, &r);
    T_OK(create(&r));
    T_OK(stage_share(&r, &sc->b));
    T_OK(forward_share(&r, &sc->b, sc->y));
    sc->seen_ms[m->rank] = 1;
    pause();
}

T_CASE(nothing_is_left_after_all_are_killed) {
    t_random random = t_random_start(9);
    model m = model_open(&small, &random);
    batch b = batch_random(&m, 16, TOPK, ROUTING_RANDOM, &random);
    const setup s = {.weights = m.weights};
    scene sc = {.s = &s,
                .b = b,
                .y = crew_share(16 * HIDDEN * sizeof(uint16_t)),
                .seen_ms = crew_share(CREW_MAX * sizeof(int64_t))};
    const char *directory = t_path(""); /* where a library would leave files */
    setenv("TMPDIR", directory, 1);
    crew c = crew_start(RANKS, be_killed, &sc);
    for (int32_t r = 0; r < RANKS; r++)
        while (!__atomic_load_n(&sc.seen_ms[r], __ATOMIC_ACQUIRE))
            crew_pause_ms(1);
    static char names[NAMES_MAX][NAME_BYTES], all[NAMES_MAX][NAME_BYTES];
    const int n = list_names(&c, names);
    for (int32_t r = 0; r < RANKS; r++)
        kill(c.processes[r], SIGKILL);
    int codes[CREW_MAX];
    crew_wait(&c, codes);
    T_CHECK(rmdir(directory) == 0);
    T_CHECK(n > 0 && n < NAMES_MAX);
    const int left = list_names(NULL, all);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < left; k++)
            T_CHECK_MSG(strcmp(names[i], all[k]) != 0, "%s is left", names[i]);
    crew_unshare(sc.y, 16 * HIDDEN * sizeof(uint16_t));
    crew_unshare(sc.seen_ms, CREW_MAX * sizeof(int64_t));
    batch_free(&b);
    model_close(&m);
}
