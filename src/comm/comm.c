/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "comm/comm.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "base/error.h"
#include "base/memory.h"

enum { MAX_RANKS = 1024, CREATION_DEADLINE_SECONDS = 600 };

struct mm_meeting {
    struct mm_meeting *next;
    uint64_t number;
    int32_t joined;
    int32_t ended;
    int32_t left;
    bool broken;   /* a rank gave up waiting; its part is gone, so nobody gets them */
    void *parts[]; /* [size] */
};

/* What the ranks of one communicator share. `lock` guards everything but `aborted`. */
struct group {
    int32_t size;
    bool folded;
    atomic_bool aborted;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int32_t open; /* ranks that are not closed */
    struct mm_meeting *meetings;
    mm_abort_watch *watches;
};

struct megamoe_comm {
    struct group *group;
    int32_t rank;
    uint64_t meetings; /* joined so far */
};

static megamoe_status open_group(int32_t size, bool folded, megamoe_comm **comms) {
    for (int32_t r = 0; r < size; r++)
        comms[r] = NULL;
    struct group *group = mm_alloc(sizeof *group);
    if (!group)
        return mm_fail(MEGAMOE_ENOMEM, "a communicator of %d ranks: out of memory", size);
    group->size = size;
    group->folded = folded;
    pthread_mutex_init(&group->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&group->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    group->open = size;
    for (int32_t r = 0; r < size; r++) {
        comms[r] = mm_alloc(sizeof *comms[r]);
        if (!comms[r]) {
            group->open = r;
            if (r == 0) {
                pthread_cond_destroy(&group->changed);
                pthread_mutex_destroy(&group->lock);
                free(group);
            }
            for (int32_t i = 0; i < r; i++) {
                megamoe_comm_close(comms[i]);
                comms[i] = NULL;
            }
            return mm_fail(MEGAMOE_ENOMEM, "a communicator of %d ranks: out of memory", size);
        }
        *comms[r] = (megamoe_comm){.group = group, .rank = r};
    }
    return MEGAMOE_OK;
}

megamoe_status megamoe_comm_self(megamoe_comm **comm) {
    if (!comm)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_comm_self: comm is NULL");
    return open_group(1, false, comm);
}

static megamoe_status open_ranks(const char *what, int32_t size, bool folded,
                                 megamoe_comm **comms) {
    if (!comms || size < 1 || size > MAX_RANKS)
        return mm_fail(MEGAMOE_EINVAL, "%s: %d ranks; expected 1..%d and an array for them", what,
                       size, MAX_RANKS);
    return open_group(size, folded, comms);
}

megamoe_status megamoe_comm_threads(int32_t size, megamoe_comm **comms) {
    return open_ranks("megamoe_comm_threads", size, false, comms);
}

megamoe_status megamoe_comm_folded(int32_t size, megamoe_comm **comms) {
    return open_ranks("megamoe_comm_folded", size, true, comms);
}

void megamoe_comm_close(megamoe_comm *comm) {
    if (!comm)
        return;
    struct group *group = comm->group;
    pthread_mutex_lock(&group->lock);
    const bool last = --group->open == 0;
    pthread_mutex_unlock(&group->lock);
    if (last) {
        for (mm_meeting *m = group->meetings; m;) {
            mm_meeting *next = m->next;
            free(m);
            m = next;
        }
        pthread_cond_destroy(&group->changed);
        pthread_mutex_destroy(&group->lock);
        free(group);
    }
    free(comm);
}

int32_t megamoe_comm_rank(const megamoe_comm *comm) {
    return comm->rank;
}

int32_t megamoe_comm_size(const megamoe_comm *comm) {
    return comm->group->size;
}

void megamoe_comm_abort(megamoe_comm *comm) {
    if (!comm)
        return;
    struct group *group = comm->group;
    pthread_mutex_lock(&group->lock);
    const bool first = !atomic_exchange_explicit(&group->aborted, true, memory_order_acq_rel);
    for (const mm_abort_watch *w = group->watches; first && w; w = w->next)
        w->fn(w->user);
    pthread_cond_broadcast(&group->changed);
    pthread_mutex_unlock(&group->lock);
}

bool mm_comm_folded(const megamoe_comm *comm) {
    return comm->group->folded;
}

bool mm_comm_aborted(const megamoe_comm *comm) {
    return atomic_load_explicit(&comm->group->aborted, memory_order_acquire);
}

void mm_comm_watch(megamoe_comm *comm, mm_abort_watch *watch) {
    struct group *group = comm->group;
    pthread_mutex_lock(&group->lock);
    watch->next = group->watches;
    group->watches = watch;
    if (mm_comm_aborted(comm))
        watch->fn(watch->user);
    pthread_mutex_unlock(&group->lock);
}

void mm_comm_unwatch(megamoe_comm *comm, mm_abort_watch *watch) {
    struct group *group = comm->group;
    pthread_mutex_lock(&group->lock);
    mm_abort_watch **link = &group->watches;
    while (*link && *link != watch)
        link = &(*link)->next;
    if (*link)
        *link = watch->next;
    pthread_mutex_unlock(&group->lock);
}

static mm_meeting *find_meeting(struct group *group, uint64_t number) {
    mm_meeting *m = group->meetings;
    while (m && m->number != number)
        m = m->next;
    if (m)
        return m;
    m = mm_alloc(sizeof *m + (size_t)group->size * sizeof m->parts[0]);
    if (m) {
        m->number = number;
        m->next = group->meetings;
        group->meetings = m;
    }
    return m;
}

static void leave_locked(struct group *group, mm_meeting *meeting) {
    if (++meeting->left < group->size)
        return;
    mm_meeting **link = &group->meetings;
    while (*link != meeting)
        link = &(*link)->next;
    *link = meeting->next;
    free(meeting);
}

megamoe_status mm_meeting_join(megamoe_comm *comm, void *part, mm_meeting **meeting) {
    *meeting = NULL;
    struct group *group = comm->group;
    pthread_mutex_lock(&group->lock);
    mm_meeting *m = find_meeting(group, comm->meetings++);
    if (!m) {
        pthread_mutex_unlock(&group->lock);
        megamoe_comm_abort(comm);
        return mm_fail(MEGAMOE_ENOMEM, "rank %d: out of memory", comm->rank);
    }
    m->parts[comm->rank] = part;
    if (++m->joined == group->size)
        pthread_cond_broadcast(&group->changed);
    struct timespec deadline;
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_sec += CREATION_DEADLINE_SECONDS;
    int waited = 0;
    m->broken = m->broken || (!group->folded && mm_comm_aborted(comm));
    while (!group->folded && m->joined < group->size && !mm_comm_aborted(comm) &&
           waited != ETIMEDOUT)
        waited = pthread_cond_timedwait(&group->changed, &group->lock, &deadline);
    megamoe_status status = MEGAMOE_OK;
    if (m->broken || (!group->folded && m->joined < group->size)) {
        status = m->broken || mm_comm_aborted(comm) ? MEGAMOE_EPEER : MEGAMOE_ETIMEDOUT;
        m->broken = true;
        leave_locked(group, m);
    }
    pthread_mutex_unlock(&group->lock);
    if (status == MEGAMOE_EPEER)
        return mm_fail(status, "rank %d: another rank aborted during a collective creation",
                       comm->rank);
    if (status == MEGAMOE_ETIMEDOUT) {
        megamoe_comm_abort(comm);
        return mm_fail(status,
                       "rank %d: not all of %d ranks took part in a collective creation "
                       "within %d s",
                       comm->rank, group->size, CREATION_DEADLINE_SECONDS);
    }
    *meeting = m;
    return MEGAMOE_OK;
}

void *const *mm_meeting_parts(const megamoe_comm *comm, const mm_meeting *meeting) {
    struct group *group = comm->group;
    pthread_mutex_lock(&group->lock);
    const bool all = meeting->joined == group->size;
    pthread_mutex_unlock(&group->lock);
    return all ? meeting->parts : NULL;
}

void mm_meeting_end(megamoe_comm *comm, mm_meeting *meeting) {
    struct group *group = comm->group;
    pthread_mutex_lock(&group->lock);
    if (++meeting->ended == group->size)
        pthread_cond_broadcast(&group->changed);
    while (meeting->ended < group->size)
        pthread_cond_wait(&group->changed, &group->lock);
    leave_locked(group, meeting);
    pthread_mutex_unlock(&group->lock);
}

void mm_meeting_leave(megamoe_comm *comm, mm_meeting *meeting) {
    if (!meeting)
        return;
    struct group *group = comm->group;
    pthread_mutex_lock(&group->lock);
    leave_locked(group, meeting);
    pthread_mutex_unlock(&group->lock);
}
