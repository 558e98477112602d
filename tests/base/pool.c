/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "base/pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "t.h"

enum { MAX_THREADS = 9 };

typedef struct work {
    int32_t threads;           /* expected */
    int64_t value;             /* each thread adds it to its own sum */
    int64_t sums[MAX_THREADS]; /* not atomic: each run orders the next after it */
    int32_t calls[MAX_THREADS];
} work;

static void add(void *argument, int32_t thread, int32_t threads) {
    work *w = argument;
    T_EQ_INT(threads, w->threads);
    w->sums[thread] += w->value;
    w->calls[thread]++;
}

static void subtract(void *argument, int32_t thread, int32_t threads) {
    work *w = argument;
    T_EQ_INT(threads, w->threads);
    w->sums[thread] -= w->value;
    w->calls[thread]++;
}

T_CASE(thousands_of_runs_of_changing_work) {
    t_random random = t_random_start(0);
    for (int32_t threads = 1; threads <= MAX_THREADS; threads += threads < 4 ? 1 : 5) {
        mm_pool *pool;
        T_OK(mm_pool_open(threads, 0, false, &pool));
        T_EQ_INT(mm_pool_threads(pool), threads);
        work both[2] = {{.threads = threads}, {.threads = threads}};
        int64_t expected[2] = {0};
        const int32_t runs = threads == 2 ? 10000 : 1000;
        for (int32_t run = 0; run < runs; run++) {
            const uint32_t which = t_below(&random, 2);
            const bool adds = t_below(&random, 2);
            both[which].value = run;
            expected[which] += adds ? run : -run;
            mm_pool_run(pool, adds ? add : subtract, &both[which]);
            /* What the threads wrote is visible, and all have returned. */
            for (int32_t i = 0; i < threads; i++)
                if (both[which].sums[i] != expected[which])
                    T_EQ_INT(both[which].sums[i], expected[which]);
            if (run % 500 == 499)
                usleep(2000); /* long enough for the workers to fall asleep */
        }
        for (int32_t i = 0; i < threads; i++)
            T_EQ_INT(both[0].calls[i] + both[1].calls[i], runs);
        mm_pool_close(pool);
    }
}

T_CASE(no_pool_is_the_caller_alone) {
    work w = {.threads = 1, .value = 3};
    mm_pool_run(NULL, add, &w);
    T_EQ_INT(w.calls[0], 1);
    T_EQ_INT(w.sums[0], 3);
    T_EQ_INT(mm_pool_threads(NULL), 1);
    mm_pool_close(NULL);
}

static void note_thread(void *argument, int32_t thread, int32_t threads) {
    (void)threads;
    pthread_t *ids = argument;
    ids[thread] = pthread_self();
}

T_CASE(an_index_stays_with_its_thread_and_0_is_the_caller) {
    mm_pool *pool;
    T_OK(mm_pool_open(4, 0, false, &pool));
    pthread_t first[4], again[4];
    mm_pool_run(pool, note_thread, first);
    mm_pool_run(pool, note_thread, again);
    T_CHECK(pthread_equal(first[0], pthread_self()));
    for (int i = 0; i < 4; i++) {
        T_CHECK(pthread_equal(first[i], again[i]));
        for (int j = 0; j < i; j++)
            T_CHECK(!pthread_equal(first[i], first[j]));
    }
    mm_pool_close(pool);
}

static void note_affinity(void *argument, int32_t thread, int32_t threads) {
    (void)threads;
    cpu_set_t *sets = argument;
    sched_getaffinity(0, sizeof sets[thread], &sets[thread]);
}

T_CASE(pinned_threads_have_a_core_each) {
    enum { LIMIT = 64 };
    const int32_t cores = mm_pool_cores();
    if (cores < 2)
        T_SKIP("one core only");
    const int32_t threads = cores < LIMIT ? cores : LIMIT;
    cpu_set_t before;
    sched_getaffinity(0, sizeof before, &before);
    mm_pool *pool;
    T_OK(mm_pool_open(threads, 0, true, &pool));
    static cpu_set_t sets[LIMIT];
    mm_pool_run(pool, note_affinity, sets);
    T_CHECK(CPU_EQUAL(&sets[0], &before));
    for (int32_t i = 1; i < threads; i++) {
        T_EQ_INT(CPU_COUNT(&sets[i]), 1);
        for (int32_t j = 1; j < i; j++)
            T_CHECK(!CPU_EQUAL(&sets[i], &sets[j]));
    }
    mm_pool_close(pool);
}

T_CASE(more_threads_than_cores_are_not_pinned) {
    mm_pool *pool;
    T_OK(mm_pool_open(3, mm_pool_cores(), true, &pool));
    cpu_set_t sets[3];
    mm_pool_run(pool, note_affinity, sets);
    for (int i = 1; i < 3; i++)
        T_CHECK(CPU_EQUAL(&sets[i], &sets[0]));
    mm_pool_close(pool);
}

T_CASE(zero_threads_means_one_per_core) {
    mm_pool *pool;
    T_OK(mm_pool_open(0, 0, false, &pool));
    T_EQ_INT(mm_pool_threads(pool), mm_pool_cores());
    mm_pool_close(pool);
}

T_CASE(impossible_pools_are_refused) {
    mm_pool *pool = (mm_pool *)1;
    T_STATUS(mm_pool_open(-1, 0, false, &pool), MEGAMOE_EINVAL);
    T_CHECK(pool == NULL);
    T_STATUS(mm_pool_open(1 << 20, 0, false, &pool), MEGAMOE_EINVAL);
    T_STATUS(mm_pool_open(1, -1, false, &pool), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "first core -1");
}

T_CASE(pools_open_and_close_without_work) {
    for (int i = 0; i < 200; i++) {
        mm_pool *pool;
        T_OK(mm_pool_open(1 + i % 4, 0, i % 2, &pool));
        mm_pool_close(pool);
    }
}
