/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "comm/comm.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "t.h"

enum { RANKS = 5 };

T_CASE(self_is_one_rank) {
    megamoe_comm *comm;
    T_OK(megamoe_comm_self(&comm));
    T_EQ_INT(megamoe_comm_rank(comm), 0);
    T_EQ_INT(megamoe_comm_size(comm), 1);
    T_CHECK(!mm_comm_folded(comm));
    T_CHECK(!mm_comm_aborted(comm));
    megamoe_comm_close(comm);
    T_STATUS(megamoe_comm_self(NULL), MEGAMOE_EINVAL);
}

T_CASE(ranks_know_their_numbers) {
    megamoe_comm *comms[RANKS];
    for (int folded = 0; folded < 2; folded++) {
        T_OK(folded ? megamoe_comm_folded(RANKS, comms) : megamoe_comm_threads(RANKS, comms));
        for (int32_t r = 0; r < RANKS; r++) {
            T_EQ_INT(megamoe_comm_rank(comms[r]), r);
            T_EQ_INT(megamoe_comm_size(comms[r]), RANKS);
            T_EQ_INT(mm_comm_folded(comms[r]), folded);
        }
        for (int32_t r = 0; r < RANKS; r++) /* in any order */
            megamoe_comm_close(comms[(r + 2) % RANKS]);
    }
}

T_CASE(sizes_out_of_range) {
    megamoe_comm *comms[1];
    static const int32_t sizes[] = {0, -1, INT32_MIN, 1025, INT32_MAX};
    for (int i = 0; i < 5; i++) {
        T_STATUS(megamoe_comm_threads(sizes[i], comms), MEGAMOE_EINVAL);
        T_STATUS(megamoe_comm_folded(sizes[i], comms), MEGAMOE_EINVAL);
    }
    T_STATUS(megamoe_comm_threads(2, NULL), MEGAMOE_EINVAL);
    megamoe_comm_close(NULL);
    megamoe_comm_abort(NULL);
}

T_CASE(an_abort_reaches_all_ranks) {
    megamoe_comm *comms[RANKS];
    T_OK(megamoe_comm_threads(RANKS, comms));
    megamoe_comm_abort(comms[3]);
    for (int32_t r = 0; r < RANKS; r++) {
        T_CHECK(mm_comm_aborted(comms[r]));
        megamoe_comm_close(comms[r]);
    }
}

static void count(void *user) {
    ++*(int *)user;
}

/* Once each, whether they were set before the abort or after it, and not after they are unset. */
T_CASE(an_abort_calls_its_watches) {
    megamoe_comm *comms[2];
    int calls[4] = {0};
    mm_abort_watch watches[4];
    for (int i = 0; i < 4; i++)
        watches[i] = (mm_abort_watch){.fn = count, .user = &calls[i]};
    T_OK(megamoe_comm_threads(2, comms));
    for (int i = 0; i < 3; i++)
        mm_comm_watch(comms[i % 2], &watches[i]);
    mm_comm_unwatch(comms[1], &watches[1]);
    megamoe_comm_abort(comms[1]);
    megamoe_comm_abort(comms[0]);
    mm_comm_watch(comms[1], &watches[3]);
    static const int expected[] = {1, 0, 1, 1};
    for (int i = 0; i < 4; i++) {
        T_EQ_INT(calls[i], expected[i]);
        mm_comm_unwatch(comms[i % 2], &watches[i]); /* one of them is not set */
    }
    for (int32_t r = 0; r < 2; r++)
        megamoe_comm_close(comms[r]);
}

/* ---- meetings ---- */

struct visitor {
    megamoe_comm *comm;
    int rounds;
    int64_t delay_ms;
    bool aborts;
    megamoe_status status;
    pthread_t thread;
};

static void pause_ms(int64_t ms) {
    const struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

/* Every meeting gives the parts of that meeting, of all ranks. */
static void *meet_often(void *argument) {
    struct visitor *v = argument;
    const int32_t rank = megamoe_comm_rank(v->comm);
    t_random random = t_random_start((uint64_t)rank);
    for (int round = 0; round < v->rounds; round++) {
        const int mine = 1000 * round + rank;
        mm_meeting *meeting;
        if (!T_STATUS(mm_meeting_join(v->comm, &mine, sizeof mine, &meeting), MEGAMOE_OK))
            return NULL;
        const int *parts = mm_meeting_parts(v->comm, meeting);
        for (int32_t r = 0; r < RANKS; r++)
            T_EQ_INT(parts[r], 1000 * round + r);
        int all[RANKS];
        if (round % 3 == 0 &&
            T_STATUS(megamoe_comm_allgather(v->comm, &mine, all, sizeof mine), MEGAMOE_OK))
            T_EQ_MEM(all, parts, sizeof all);
        mm_meeting_leave(v->comm, meeting);
        if (t_below(&random, 50) == 0)
            pause_ms(1);
    }
    return NULL;
}

static void start_all(struct visitor visitors[RANKS], void *(*fn)(void *)) {
    for (int32_t r = 0; r < RANKS; r++)
        T_REQUIRE(pthread_create(&visitors[r].thread, NULL, fn, &visitors[r]) == 0);
    for (int32_t r = 0; r < RANKS; r++)
        pthread_join(visitors[r].thread, NULL);
}

T_CASE(meetings_of_threads) {
    megamoe_comm *comms[RANKS];
    struct visitor visitors[RANKS];
    memset(visitors, 0, sizeof visitors);
    T_OK(megamoe_comm_threads(RANKS, comms));
    for (int32_t r = 0; r < RANKS; r++)
        visitors[r] = (struct visitor){.comm = comms[r], .rounds = 500};
    start_all(visitors, meet_often);
    for (int32_t r = 0; r < RANKS; r++)
        megamoe_comm_close(comms[r]);
}

T_CASE(meetings_of_folded_ranks_do_not_block) {
    megamoe_comm *comms[RANKS];
    mm_meeting *meetings[RANKS][2];
    int all[RANKS] = {0};
    T_OK(megamoe_comm_folded(RANKS, comms));
    T_STATUS(megamoe_comm_allgather(comms[0], all, all, sizeof all[0]), MEGAMOE_EINVAL);
    for (int32_t r = 0; r < RANKS; r++)
        for (int i = 0; i < 2; i++) {
            const int mine = 10 * i + r;
            T_OK(mm_meeting_join(comms[r], &mine, sizeof mine, &meetings[r][i]));
            T_CHECK((mm_meeting_parts(comms[r], meetings[r][i]) != NULL) == (r == RANKS - 1));
        }
    for (int32_t r = 0; r < RANKS; r++)
        for (int i = 0; i < 2; i++) {
            const int *parts = mm_meeting_parts(comms[r], meetings[r][i]);
            T_REQUIRE(parts);
            T_EQ_INT(parts[2], 10 * i + 2);
        }
    for (int32_t r = 0; r < RANKS; r++)
        for (int i = 0; i < 2; i++)
            mm_meeting_leave(comms[r], meetings[r][i]);
    mm_meeting_leave(comms[0], NULL);
    for (int32_t r = 0; r < RANKS; r++)
        megamoe_comm_close(comms[r]);
}

/* A rank in another call than the others is found by what it brings. */
T_CASE(parts_of_different_sizes) {
    megamoe_comm *comms[2];
    mm_meeting *meeting, *none;
    const char part[8] = "";
    T_OK(megamoe_comm_folded(2, comms));
    T_OK(mm_meeting_join(comms[0], part, 8, &meeting));
    T_STATUS(mm_meeting_join(comms[1], part, 4, &none), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "rank 1 brings 4 bytes to collective call 1 and rank 0 8");
    T_CHECK(!none);
    T_CHECK(mm_comm_aborted(comms[0]));
    char cause[MM_COMM_CAUSE_BYTES];
    T_EQ_INT(mm_comm_cause(comms[0], cause), 1);
    T_EQ_STR(cause, "rank 1 has aborted");
    mm_meeting_leave(comms[0], meeting);
    for (int32_t r = 0; r < 2; r++)
        megamoe_comm_close(comms[r]);
}

/* A meeting that not all join goes with the communicator. */
T_CASE(unfinished_meetings_are_freed) {
    megamoe_comm *comms[RANKS];
    mm_meeting *first, *meeting;
    const int part = 0;
    T_OK(megamoe_comm_folded(RANKS, comms));
    T_OK(mm_meeting_join(comms[0], &part, sizeof part, &first));
    T_OK(mm_meeting_join(comms[1], &part, sizeof part, &meeting));
    mm_meeting_leave(comms[1], meeting);
    mm_meeting_leave(comms[0], first);
    for (int32_t r = 0; r < RANKS; r++)
        megamoe_comm_close(comms[r]);
}

static void *meet_once(void *argument) {
    struct visitor *v = argument;
    mm_meeting *meeting;
    pause_ms(v->delay_ms);
    if (v->aborts)
        megamoe_comm_abort(v->comm);
    v->status = mm_meeting_join(v->comm, &v->rounds, sizeof v->rounds, &meeting);
    if (v->status == MEGAMOE_OK)
        mm_meeting_leave(v->comm, meeting);
    else
        T_CHECK(!meeting);
    return NULL;
}

/* The last rank to come aborts first. All get the error: the parts of those who left are gone. */
T_CASE(an_abort_ends_a_meeting_for_all) {
    for (int round = 0; round < 5; round++) {
        megamoe_comm *comms[RANKS];
        struct visitor visitors[RANKS];
        memset(visitors, 0, sizeof visitors);
        T_OK(megamoe_comm_threads(RANKS, comms));
        for (int32_t r = 0; r < RANKS; r++)
            visitors[r] = (struct visitor){.comm = comms[r],
                                           .delay_ms = r == round ? 20 : 0,
                                           .aborts = r == round,
                                           .status = MEGAMOE_OK};
        start_all(visitors, meet_once);
        for (int32_t r = 0; r < RANKS; r++) {
            T_EQ_INT(visitors[r].status, MEGAMOE_EPEER);
            megamoe_comm_close(comms[r]);
        }
    }
}
