/* SPDX-License-Identifier: Apache-2.0 */
/* How the ranks of a communicator learn that one of them has given up or is gone. */
#ifndef MM_COMM_ALARM_H
#define MM_COMM_ALARM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef enum mm_alarm_cause {
    MM_ALARM_NONE = 0,
    MM_ALARM_ABORTED = 1, /* megamoe_comm_abort, or a deadline of a rank */
    MM_ALARM_ENDED = 2    /* a process ended without closing its communicator */
} mm_alarm_cause;

/* For waits that cannot look at the alarm: `fn` passes it on to them. */
typedef struct mm_abort_watch {
    /* Called once, under the alarm's lock, by whichever thread raises it; must not wait. */
    void (*fn)(void *user);
    void *user;
    struct mm_abort_watch *next;
} mm_abort_watch;

typedef struct mm_alarm {
    _Atomic uint32_t raised; /* 0, or cause and rank of the first time */
    pthread_mutex_t lock;    /* guards the watches */
    mm_abort_watch *watches;
} mm_alarm;

void mm_alarm_open(mm_alarm *alarm);
void mm_alarm_close(mm_alarm *alarm);

/* The first time counts. Returns whether this was it. Thread: any. */
bool mm_alarm_raise(mm_alarm *alarm, mm_alarm_cause cause, int32_t rank);

/* MM_ALARM_NONE, or why it was raised and whose rank that was. Cheap enough for a spin loop. */
static inline mm_alarm_cause mm_alarm_look(const mm_alarm *alarm, int32_t *whose) {
    const uint32_t raised = atomic_load_explicit(&alarm->raised, memory_order_acquire);
    *whose = raised ? (int32_t)(raised >> 2) : -1;
    return (mm_alarm_cause)(raised & 3);
}

/* `watch` stays in place until it is removed. Of a raised alarm fn is called now. */
void mm_alarm_watch(mm_alarm *alarm, mm_abort_watch *watch);

/* Once it has returned, fn is not running and will not be called. A watch not set is ignored. */
void mm_alarm_unwatch(mm_alarm *alarm, mm_abort_watch *watch);

#endif
