/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks over time: repeated forwards, deadlines, aborts, and that a forward allocates nothing. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "fleet.h"

enum { HIDDEN = 64, TOPK = 2, EXPERTS = 6 };

static const model_recipe small = {MEGAMOE_FORMAT_MXFP4, HIDDEN,   32, EXPERTS,
                                   MEGAMOE_DTYPE_NONE,   {0, 0, 0}};

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* ---- many forwards ---- */

enum { POOL_TOKENS = 64, MAX_TOKENS = 12, RANKS = 4 };

/* Tokens with known results, of which every forward takes some. */
struct marathon {
    batch pool;
    uint16_t *want;
    int rounds;
};

/*
 * Each rank draws its tokens by itself; sometimes none, sometimes it keeps its batch, sometimes it
 * is late.
 */
static void run_marathon(rank *r, void *argument) {
    const struct marathon *race = argument;
    t_random random = t_random_start(1000 + (uint64_t)r->rank);
    uint16_t x[MAX_TOKENS * HIDDEN], y[MAX_TOKENS * HIDDEN];
    int32_t ids[MAX_TOKENS * TOPK];
    float weights[MAX_TOKENS * TOPK];
    int64_t from[MAX_TOKENS];
    int64_t n = 0;
    for (int round = 0; round < race->rounds; round++) {
        if (round == 0 || t_below(&random, 8)) {
            n = t_below(&random, 4) ? (int64_t)t_below(&random, MAX_TOKENS + 1) : 0;
            for (int64_t i = 0; i < n; i++) {
                from[i] = (int64_t)t_below(&random, POOL_TOKENS);
                const batch one = batch_part(&race->pool, from[i], 1);
                memcpy(x + i * HIDDEN, one.x, HIDDEN * sizeof *x);
                memcpy(ids + i * TOPK, one.ids, TOPK * sizeof *ids);
                memcpy(weights + i * TOPK, one.weights, TOPK * sizeof *weights);
            }
            const batch part = {n, HIDDEN, TOPK, x, ids, weights};
            const megamoe_view vx = view_x(&part), vi = view_ids(&part), vw = view_weights(&part);
            if (!T_STATUS(megamoe_stage(r->workspace, &vx, &vi, &vw, n, NULL), MEGAMOE_OK))
                megamoe_comm_abort(r->comm);
            /* Inputs belong to the caller again once they are staged. */
            memset(x, 0xFF, sizeof x);
            memset(ids, 0x7F, sizeof ids);
        }
        for (uint32_t spin = t_below(&random, 64) ? 0 : t_below(&random, 100000); spin; spin--)
            atomic_signal_fence(memory_order_seq_cst);
        memset(y, 0xFF, sizeof y);
        const megamoe_view vy = {y, MEGAMOE_DTYPE_BF16, n, 0};
        if (!T_STATUS(megamoe_forward(r->layer, r->workspace, &vy, NULL), MEGAMOE_OK))
            return;
        for (int64_t i = 0; i < n; i++)
            if (!T_CHECK_MSG(same_rows(y + i * HIDDEN, race->want + from[i] * HIDDEN, HIDDEN),
                             "round %d, rank %d, token %d", round, r->rank, (int)i)) {
                megamoe_comm_abort(r->comm);
                return;
            }
    }
}

static void check_marathon(int32_t threads, int rounds) {
    t_random random = t_random_start(1);
    model m = model_open(&small, &random);
    struct marathon race = {batch_random(&m, POOL_TOKENS, TOPK, ROUTING_RANDOM, &random), NULL,
                            rounds};
    batch_mask(&race.pool, 6, &random);
    race.want = malloc(POOL_TOKENS * HIDDEN * sizeof *race.want);
    T_REQUIRE(race.want);
    const setup alone = {.weights = m.weights};
    run_once(&alone, &race.pool, race.want);
    const setup s = {
        .weights = m.weights, .ranks = RANKS, .threads = threads, .tokens = MAX_TOKENS};
    fleet f = fleet_open(&s);
    fleet_each(&f, run_marathon, &race);
    fleet_close(&f);
    free(race.want);
    batch_free(&race.pool);
    model_close(&m);
}

T_CASE(thousands_of_forwards) {
    check_marathon(1, 4000);
}

T_CASE(forwards_of_ranks_with_two_threads) {
    check_marathon(2, 300);
}

/* ---- errors of one rank among good forwards ---- */

static void run_with_errors(rank *r, void *argument) {
    const struct marathon *race = argument;
    for (int round = 0; round < race->rounds; round++) {
        const int culprit = round % (2 * RANKS); /* half of the rounds have none */
        int64_t n = 3;
        batch part = batch_part(&race->pool, (round + r->rank) % (POOL_TOKENS - 3), n);
        int32_t ids[3 * TOPK];
        memcpy(ids, part.ids, sizeof ids);
        if (culprit == r->rank)
            ids[round % (3 * TOPK)] = EXPERTS;
        uint16_t y[3 * HIDDEN];
        memset(y, 0xFF, sizeof y);
        const megamoe_view vx = view_x(&part), vw = view_weights(&part), vy = view_y(y, &part);
        const megamoe_view vi = {ids, MEGAMOE_DTYPE_I32, n, 0};
        if (!T_STATUS(megamoe_stage(r->workspace, &vx, &vi, &vw, n, NULL), MEGAMOE_OK) ||
            !T_STATUS(megamoe_forward(r->layer, r->workspace, &vy, NULL), MEGAMOE_OK)) {
            megamoe_comm_abort(r->comm);
            return;
        }
        megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
        T_STATUS(megamoe_workspace_status(r->workspace, &d),
                 culprit < RANKS ? MEGAMOE_EID : MEGAMOE_OK);
        T_EQ_INT(d.rank, culprit < RANKS ? culprit : -1);
        T_EQ_INT((int64_t)d.epoch, round + 1);
        const uint16_t *want = race->want + (round + r->rank) % (POOL_TOKENS - 3) * HIDDEN;
        if (culprit < RANKS)
            T_EQ_HEX(y[0] & y[3 * HIDDEN - 1], 0xFFFF);
        else
            T_CHECK_MSG(same_rows(y, want, 3 * HIDDEN), "round %d, rank %d", round, r->rank);
    }
}

T_CASE(errors_among_good_forwards) {
    t_random random = t_random_start(2);
    model m = model_open(&small, &random);
    struct marathon race = {batch_random(&m, POOL_TOKENS, TOPK, ROUTING_RANDOM, &random), NULL,
                            400};
    race.want = malloc(POOL_TOKENS * HIDDEN * sizeof *race.want);
    T_REQUIRE(race.want);
    const setup alone = {.weights = m.weights};
    run_once(&alone, &race.pool, race.want);
    const setup s = {.weights = m.weights, .ranks = RANKS, .tokens = MAX_TOKENS};
    fleet f = fleet_open(&s);
    fleet_each(&f, run_with_errors, &race);
    fleet_close(&f);
    free(race.want);
    batch_free(&race.pool);
    model_close(&m);
}

/* ---- deadlines and aborts ---- */

struct absence {
    batch b;
    int32_t absent;
    bool abort; /* the absent rank aborts instead of staying away */
    megamoe_status status[MAX_RANKS];
    int64_t waited[MAX_RANKS];
    uint16_t *y;
};

static void stay_away(rank *r, void *argument) {
    struct absence *a = argument;
    int64_t first;
    const batch part = share_of(&a->b, r->rank, r->ranks, &first);
    const megamoe_view vx = view_x(&part), vi = view_ids(&part), vw = view_weights(&part);
    const megamoe_view vy = view_y(a->y + first * HIDDEN, &part);
    T_STATUS(megamoe_stage(r->workspace, &vx, &vi, &vw, part.tokens, NULL), MEGAMOE_OK);
    if (r->rank == a->absent) {
        const struct timespec some = {0, 100 * 1000000};
        nanosleep(&some, NULL);
        if (a->abort)
            megamoe_comm_abort(r->comm);
        return;
    }
    const int64_t start = now_ms();
    a->status[r->rank] = megamoe_forward(r->layer, r->workspace, &vy, NULL);
    a->waited[r->rank] = now_ms() - start;
}

static void check_absence(bool aborting, int32_t deadline_ms) {
    t_random random = t_random_start(3);
    model m = model_open(&small, &random);
    struct absence a = {
        .b = batch_random(&m, 7, TOPK, ROUTING_RANDOM, &random), .absent = 1, .abort = aborting};
    uint16_t y[7 * HIDDEN];
    memset(y, 0xA5, sizeof y);
    a.y = y;
    const setup s = {.weights = m.weights, .ranks = 3, .deadline_ms = deadline_ms};
    fleet f = fleet_open(&s);
    fleet_each(&f, stay_away, &a);
    for (int32_t r = 0; r < 3; r += 2) {
        megamoe_workspace *ws = f.rank[r].workspace;
        const megamoe_status expected = aborting ? MEGAMOE_EPEER : MEGAMOE_ETIMEDOUT;
        /* Of two that wait for a third, the first to give up ends the other's wait. */
        T_CHECK_MSG(a.status[r] == expected || a.status[r] == MEGAMOE_EPEER, "rank %d: %s", r,
                    megamoe_status_name(a.status[r]));
        T_CHECK_MSG(a.waited[r] < (aborting ? 100 : deadline_ms) + 1000, "rank %d: %d ms", r,
                    (int)a.waited[r]);
        megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
        for (int again = 0; again < 2; again++) { /* a dead workspace stays dead */
            T_STATUS(megamoe_workspace_status(ws, &d), a.status[r]);
            T_EQ_INT(d.phase, MEGAMOE_PHASE_COUNT);
            T_EQ_INT((int64_t)d.epoch, 1);
            if (a.status[r] == MEGAMOE_ETIMEDOUT)
                T_EQ_INT(d.rank, 1);
        }
        T_STATUS(megamoe_stage(ws, NULL, NULL, NULL, 0, NULL), MEGAMOE_ESTATE);
        T_STATUS(megamoe_commit_staged(ws, 0, NULL), MEGAMOE_ESTATE);
        T_STATUS(megamoe_forward(f.rank[r].layer, ws, NULL, NULL), MEGAMOE_ESTATE);
        T_CONTAINS(megamoe_last_error(), "dead");
    }
    if (!aborting)
        T_CHECK(a.status[0] == MEGAMOE_ETIMEDOUT || a.status[2] == MEGAMOE_ETIMEDOUT);
    /* The one that comes late learns it at once, and does not touch the others. */
    const megamoe_view vy = {y, MEGAMOE_DTYPE_BF16, 7, 0};
    const int64_t start = now_ms();
    T_STATUS(megamoe_forward(f.rank[1].layer, f.rank[1].workspace, &vy, NULL), MEGAMOE_EPEER);
    T_CHECK(now_ms() - start < 1000);
    for (int i = 0; i < 7 * HIDDEN; i++)
        T_EQ_HEX(y[i], 0xA5A5);
    fleet_close(&f);
    batch_free(&a.b);
    model_close(&m);
}

T_CASE(a_rank_that_never_comes) {
    check_absence(false, 300);
}

T_CASE(a_rank_that_aborts) {
    check_absence(true, 60000);
}

struct lone_creator {
    megamoe_status status[MAX_RANKS];
};

static void create_unless_last(rank *r, void *argument) {
    struct lone_creator *c = argument;
    if (r->rank == r->ranks - 1) {
        const struct timespec some = {0, 50 * 1000000};
        nanosleep(&some, NULL);
        megamoe_comm_abort(r->comm);
    }
    /* The last one joins when the others have given up; it must not use what they brought. */
    c->status[r->rank] =
        megamoe_workspace_create(r->comm, r->device, &r->shape, &r->capacity, &r->workspace);
}

T_CASE(an_abort_ends_creation) {
    t_random random = t_random_start(4);
    model m = model_open(&small, &random);
    for (int round = 0; round < 5; round++) {
        const setup s = {.weights = m.weights, .ranks = 3};
        fleet f = fleet_open_comms(&s);
        struct lone_creator c;
        fleet_each(&f, create_unless_last, &c);
        for (int32_t r = 0; r < 3; r++) {
            T_EQ_INT(c.status[r], MEGAMOE_EPEER);
            T_CHECK(!f.rank[r].workspace);
        }
        fleet_close(&f);
    }
    model_close(&m);
}

/* ---- memory ---- */

/* The linker sends the library's calls here. */
static atomic_long allocations;

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
void *__real_aligned_alloc(size_t alignment, size_t bytes);
void *__real_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);

void *__wrap_malloc(size_t bytes) {
    atomic_fetch_add(&allocations, 1);
    return __real_malloc(bytes);
}

void *__wrap_calloc(size_t n, size_t bytes) {
    atomic_fetch_add(&allocations, 1);
    return __real_calloc(n, bytes);
}

void *__wrap_realloc(void *memory, size_t bytes) {
    atomic_fetch_add(&allocations, 1);
    return __real_realloc(memory, bytes);
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes) {
    atomic_fetch_add(&allocations, 1);
    return __real_aligned_alloc(alignment, bytes);
}

void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    atomic_fetch_add(&allocations, 1);
    return __real_mmap(at, bytes, protection, flags, fd, offset);
}

T_CASE(a_forward_allocates_nothing) {
    t_random random = t_random_start(5);
    model m = model_open(&small, &random);
    batch b = batch_random(&m, 40, TOPK, ROUTING_RANDOM, &random);
    uint16_t y[40 * HIDDEN];
    for (int folded = 0; folded < 2; folded++) {
        const setup s = {
            .weights = m.weights, .ranks = folded ? 4 : 0, .folded = folded, .threads = 2};
        fleet f = fleet_open(&s);
        fleet_forward(&f, &b, y);
        const long before = atomic_load(&allocations);
        T_CHECK(before > 0); /* the wrappers are in place */
        for (int round = 0; round < 3; round++) {
            b.ids[3] = round == 1 ? EXPERTS : 0; /* an error allocates nothing either */
            megamoe_status status[MAX_RANKS];
            fleet_stage(&f, &b);
            fleet_compute(&f, &b, y, status);
            for (int32_t r = 0; r < f.ranks; r++)
                T_CHECK(megamoe_workspace_status(f.rank[r].workspace, NULL) ==
                        (round == 1 ? MEGAMOE_EID : MEGAMOE_OK));
        }
        T_EQ_INT(atomic_load(&allocations) - before, 0);
        fleet_close(&f);
    }
    batch_free(&b);
    model_close(&m);
}
