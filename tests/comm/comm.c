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
    int values[2];
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
        /* By turns: one part may still be read while the next meeting forms, not the one after. */
        int *mine = &v->values[round % 2];
        *mine = 1000 * round + rank;
        mm_meeting *meeting;
        if (!T_STATUS(mm_meeting_join(v->comm, mine, &meeting), MEGAMOE_OK))
            return NULL;
        void *const *parts = mm_meeting_parts(v->comm, meeting);
        T_CHECK(parts);
        for (int32_t r = 0; r < RANKS && parts; r++)
            T_EQ_INT(*(const int *)parts[r], 1000 * round + r);
        if (round % 3)
            mm_meeting_leave(v->comm, meeting);
        else
            mm_meeting_end(v->comm, meeting);
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
    int parts[RANKS];
    T_OK(megamoe_comm_folded(RANKS, comms));
    for (int32_t r = 0; r < RANKS; r++)
        for (int i = 0; i < 2; i++) {
            T_OK(mm_meeting_join(comms[r], &parts[(r + i) % RANKS], &meetings[r][i]));
            const bool all = r == RANKS - 1;
            T_CHECK((mm_meeting_parts(comms[r], meetings[r][i]) != NULL) == all);
        }
    for (int32_t r = 0; r < RANKS; r++)
        for (int i = 0; i < 2; i++) {
            void *const *all = mm_meeting_parts(comms[r], meetings[r][i]);
            T_REQUIRE(all);
            T_CHECK(all[2] == &parts[(2 + i) % RANKS]);
        }
    for (int32_t r = 0; r < RANKS; r++)
        for (int i = 0; i < 2; i++)
            mm_meeting_leave(comms[r], meetings[r][i]);
    mm_meeting_leave(comms[0], NULL);
    for (int32_t r = 0; r < RANKS; r++)
        megamoe_comm_close(comms[r]);
}

struct brief {
    megamoe_comm *comm;
    pthread_t thread;
};

/* Parts on the stack: they go when all have read them, though a rank aborts meanwhile. */
static void *meet_and_go(void *argument) {
    megamoe_comm *comm = ((struct brief *)argument)->comm;
    const int32_t rank = megamoe_comm_rank(comm);
    volatile int part = rank;
    mm_meeting *meeting;
    if (!T_STATUS(mm_meeting_join(comm, (void *)&part, &meeting), MEGAMOE_OK))
        return NULL;
    if (rank == 2)
        megamoe_comm_abort(comm);
    if (rank == 3)
        pause_ms(5);
    void *const *parts = mm_meeting_parts(comm, meeting);
    for (int32_t r = 0; r < RANKS; r++)
        T_EQ_INT(*(volatile int *)parts[r], r);
    mm_meeting_end(comm, meeting);
    part = -1;
    return NULL;
}

T_CASE(the_end_of_a_meeting_waits_for_all) {
    for (int round = 0; round < 20; round++) {
        megamoe_comm *comms[RANKS];
        struct brief visitors[RANKS];
        T_OK(megamoe_comm_threads(RANKS, comms));
        for (int32_t r = 0; r < RANKS; r++) {
            visitors[r].comm = comms[r];
            T_REQUIRE(pthread_create(&visitors[r].thread, NULL, meet_and_go, &visitors[r]) == 0);
        }
        for (int32_t r = 0; r < RANKS; r++)
            pthread_join(visitors[r].thread, NULL);
        for (int32_t r = 0; r < RANKS; r++)
            megamoe_comm_close(comms[r]);
    }
}

/* A meeting that not all join goes with the communicator. */
T_CASE(unfinished_meetings_are_freed) {
    megamoe_comm *comms[RANKS];
    mm_meeting *meeting;
    T_OK(megamoe_comm_folded(RANKS, comms));
    T_OK(mm_meeting_join(comms[0], NULL, &meeting));
    T_OK(mm_meeting_join(comms[1], NULL, &meeting));
    mm_meeting_leave(comms[1], meeting);
    for (int32_t r = 0; r < RANKS; r++)
        megamoe_comm_close(comms[r]);
}

static void *meet_once(void *argument) {
    struct visitor *v = argument;
    mm_meeting *meeting;
    pause_ms(v->delay_ms);
    if (v->aborts)
        megamoe_comm_abort(v->comm);
    v->status = mm_meeting_join(v->comm, v, &meeting);
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
