/* SPDX-License-Identifier: Apache-2.0 */
#include "comm/alarm.h"

void mm_alarm_open(mm_alarm *alarm) {
    atomic_init(&alarm->raised, 0);
    pthread_mutex_init(&alarm->lock, NULL);
    alarm->watches = NULL;
}

void mm_alarm_close(mm_alarm *alarm) {
    pthread_mutex_destroy(&alarm->lock);
}

bool mm_alarm_raise(mm_alarm *alarm, mm_alarm_cause cause, int32_t rank) {
    uint32_t none = 0;
    pthread_mutex_lock(&alarm->lock);
    const bool first = atomic_compare_exchange_strong_explicit(
        &alarm->raised, &none, (uint32_t)rank << 2 | (uint32_t)cause, memory_order_acq_rel,
        memory_order_relaxed);
    for (const mm_abort_watch *w = alarm->watches; first && w; w = w->next)
        w->fn(w->user);
    pthread_mutex_unlock(&alarm->lock);
    return first;
}

void mm_alarm_watch(mm_alarm *alarm, mm_abort_watch *watch) {
    int32_t rank;
    pthread_mutex_lock(&alarm->lock);
    watch->next = alarm->watches;
    alarm->watches = watch;
    if (mm_alarm_look(alarm, &rank) != MM_ALARM_NONE)
        watch->fn(watch->user);
    pthread_mutex_unlock(&alarm->lock);
}

void mm_alarm_unwatch(mm_alarm *alarm, mm_abort_watch *watch) {
    pthread_mutex_lock(&alarm->lock);
    mm_abort_watch **link = &alarm->watches;
    while (*link && *link != watch)
        link = &(*link)->next;
    if (*link)
        *link = watch->next;
    pthread_mutex_unlock(&alarm->lock);
}
