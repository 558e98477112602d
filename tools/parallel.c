/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "parallel.h"

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>

enum { MAX_THREADS = 64 };

int32_t parallel_cores(void) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return 1;
    return CPU_COUNT(&allowed);
}

struct part {
    parallel_fn fn;
    void *user;
    int64_t begin, end;
    pthread_t thread;
    bool started;
};

static void *run_part(void *argument) {
    const struct part *part = argument;
    part->fn(part->user, part->begin, part->end);
    return NULL;
}

void parallel_for(int32_t threads, int64_t n, parallel_fn fn, void *user) {
    struct part parts[MAX_THREADS];
    if (threads > MAX_THREADS)
        threads = MAX_THREADS;
    if (threads > n)
        threads = (int32_t)n;
    for (int32_t i = 1; i < threads; i++) {
        parts[i] = (struct part){
            .fn = fn, .user = user, .begin = n * i / threads, .end = n * (i + 1) / threads};
        parts[i].started = pthread_create(&parts[i].thread, NULL, run_part, &parts[i]) == 0;
    }
    fn(user, 0, threads > 1 ? n / threads : n);
    for (int32_t i = 1; i < threads; i++) {
        if (parts[i].started)
            pthread_join(parts[i].thread, NULL);
        else
            run_part(&parts[i]);
    }
}
