/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "comm/group.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "comm/deadline.h"

struct mm_gathering {
    struct mm_gathering *next;
    uint64_t number;
    size_t bytes;
    int32_t first; /* the rank that came first, whose number of bytes counts */
    int32_t joined, left;
    bool broken;                /* a rank gave up waiting: nobody gets anything */
    _Alignas(16) uint8_t all[]; /* [size][bytes] */
};

/* `lock` guards everything but the alarm. */
struct mm_group {
    int32_t size;
    mm_alarm alarm;
    mm_abort_watch waker; /* of ranks that wait for `changed` */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int32_t open; /* members that are not closed */
    mm_gathering *gatherings;
};

static void wake(void *user) {
    struct mm_group *group = user;
    pthread_mutex_lock(&group->lock);
    pthread_cond_broadcast(&group->changed);
    pthread_mutex_unlock(&group->lock);
}

megamoe_status mm_group_open(int32_t size, mm_group **group) {
    struct mm_group *g = *group = mm_alloc(sizeof *g);
    if (!g)
        return mm_fail(MEGAMOE_ENOMEM, "a communicator of %d ranks: out of memory", size);
    g->size = g->open = size;
    pthread_mutex_init(&g->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&g->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    mm_alarm_open(&g->alarm);
    g->waker = (mm_abort_watch){.fn = wake, .user = g};
    mm_alarm_watch(&g->alarm, &g->waker);
    return MEGAMOE_OK;
}

void mm_group_close(mm_group *group) {
    pthread_mutex_lock(&group->lock);
    const bool last = --group->open == 0;
    pthread_mutex_unlock(&group->lock);
    if (!last)
        return;
    for (mm_gathering *g = group->gatherings; g;) {
        mm_gathering *next = g->next;
        free(g);
        g = next;
    }
    mm_alarm_close(&group->alarm);
    pthread_cond_destroy(&group->changed);
    pthread_mutex_destroy(&group->lock);
    free(group);
}

mm_alarm *mm_group_alarm(mm_group *group) {
    return &group->alarm;
}

/* The gathering of that number, begun by whoever comes first; NULL when out of memory. */
static mm_gathering *find(mm_group *group, int32_t rank, uint64_t number, size_t bytes) {
    mm_gathering *g = group->gatherings;
    while (g && g->number != number)
        g = g->next;
    if (g)
        return g;
    size_t all;
    if (!mm_mul_size((size_t)group->size, bytes, &all) || !mm_add_size(all, sizeof *g, &all) ||
        !(g = mm_alloc(all)))
        return NULL;
    g->number = number;
    g->bytes = bytes;
    g->first = rank;
    g->next = group->gatherings;
    group->gatherings = g;
    return g;
}

static megamoe_status join_locked(mm_group *group, int32_t rank, uint64_t number, const void *mine,
                                  size_t bytes, mm_gathering **gathering) {
    mm_gathering *g = *gathering = find(group, rank, number, bytes);
    if (!g)
        return mm_fail(MEGAMOE_ENOMEM, "rank %d: out of memory", rank);
    if (g->bytes != bytes) {
        *gathering = NULL;
        return mm_fail(MEGAMOE_EINVAL,
                       "rank %d brings %zu bytes to collective call %llu and rank %d %zu; all "
                       "ranks make the same collective calls in the same order",
                       rank, bytes, (unsigned long long)number + 1, g->first, g->bytes);
    }
    memcpy(g->all + (size_t)rank * bytes, mine, bytes);
    if (++g->joined == group->size)
        pthread_cond_broadcast(&group->changed);
    return MEGAMOE_OK;
}

megamoe_status mm_gathering_join(mm_group *group, int32_t rank, uint64_t number, const void *mine,
                                 size_t bytes, mm_gathering **gathering) {
    pthread_mutex_lock(&group->lock);
    const megamoe_status status = join_locked(group, rank, number, mine, bytes, gathering);
    pthread_mutex_unlock(&group->lock);
    return status;
}

const void *mm_gathering_all(mm_group *group, const mm_gathering *gathering) {
    pthread_mutex_lock(&group->lock);
    const bool complete = gathering->joined == group->size;
    pthread_mutex_unlock(&group->lock);
    return complete ? gathering->all : NULL;
}

static void leave_locked(mm_group *group, mm_gathering *gathering) {
    if (++gathering->left < group->size)
        return;
    mm_gathering **link = &group->gatherings;
    while (*link != gathering)
        link = &(*link)->next;
    *link = gathering->next;
    free(gathering);
}

void mm_gathering_leave(mm_group *group, mm_gathering *gathering) {
    if (!gathering)
        return;
    pthread_mutex_lock(&group->lock);
    leave_locked(group, gathering);
    pthread_mutex_unlock(&group->lock);
}

/* MEGAMOE_OK once all have joined. Either all ranks get that or none: who gives up breaks it. */
static megamoe_status wait_locked(mm_group *group, mm_gathering *g, int32_t timeout_ms) {
    const struct timespec deadline = mm_timespec_of(mm_now_ms() + timeout_ms);
    int32_t by;
    int waited = 0;
    g->broken = g->broken || mm_alarm_look(&group->alarm, &by) != MM_ALARM_NONE;
    while (!g->broken && g->joined < group->size && waited != ETIMEDOUT &&
           mm_alarm_look(&group->alarm, &by) == MM_ALARM_NONE)
        waited = pthread_cond_timedwait(&group->changed, &group->lock, &deadline);
    if (!g->broken && g->joined == group->size)
        return MEGAMOE_OK;
    const bool peer = g->broken || mm_alarm_look(&group->alarm, &by) != MM_ALARM_NONE;
    g->broken = true;
    return peer ? MEGAMOE_EPEER : MEGAMOE_ETIMEDOUT;
}

megamoe_status mm_group_allgather(mm_group *group, int32_t rank, uint64_t number, const void *mine,
                                  void *all, size_t bytes, int32_t timeout_ms) {
    mm_gathering *g;
    pthread_mutex_lock(&group->lock);
    const megamoe_status joined = join_locked(group, rank, number, mine, bytes, &g);
    megamoe_status status = joined;
    if (joined == MEGAMOE_OK) {
        status = wait_locked(group, g, timeout_ms);
        if (status == MEGAMOE_OK)
            memcpy(all, g->all, (size_t)group->size * bytes);
        leave_locked(group, g);
    }
    pthread_mutex_unlock(&group->lock);
    if (status == MEGAMOE_OK)
        return MEGAMOE_OK;
    /* Before this rank's own alarm, so that the first cause is told. */
    int32_t by;
    const bool aborted = mm_alarm_look(&group->alarm, &by) != MM_ALARM_NONE;
    (void)mm_alarm_raise(&group->alarm, MM_ALARM_ABORTED, rank);
    if (joined != MEGAMOE_OK)
        return status;
    if (status == MEGAMOE_ETIMEDOUT)
        return mm_fail(status,
                       "rank %d: not all of %d ranks took part in a collective call within %d ms",
                       rank, group->size, timeout_ms);
    return aborted
               ? mm_fail(status, "rank %d: rank %d aborted during a collective call", rank, by)
               : mm_fail(status, "rank %d: another rank aborted during a collective call", rank);
}
