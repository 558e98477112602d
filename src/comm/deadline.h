/* SPDX-License-Identifier: Apache-2.0 */
/* Moments on the monotonic clock, in milliseconds. */
#ifndef MM_COMM_DEADLINE_H
#define MM_COMM_DEADLINE_H

#include <stdint.h>
#include <time.h>

static inline int64_t mm_now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* What is left until `deadline`, for poll(); 0 once it has passed. */
static inline int mm_left_ms(int64_t deadline) {
    const int64_t left = deadline - mm_now_ms();
    return left < 0 ? 0 : (left > INT32_MAX ? INT32_MAX : (int)left);
}

static inline struct timespec mm_timespec_of(int64_t ms) {
    return (struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
}

#endif
