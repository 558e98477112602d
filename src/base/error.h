/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MM_BASE_ERROR_H
#define MM_BASE_ERROR_H

#include <stdatomic.h>
#include <stdbool.h>

#include "megamoe/status.h"

enum { MM_ERROR_TEXT = 1024 };

/*
 * Records the message of a failure for this thread and returns `status`. The first detector calls
 * it; callers only propagate.
 */
MEGAMOE_CHECKED megamoe_status mm_fail(megamoe_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/*
 * A failure on its way from threads that share a task to the one that returns it.
 * Zero-initialised is empty.
 */
typedef struct mm_carried {
    atomic_bool taken;
    megamoe_status status;
    char text[MM_ERROR_TEXT];
} mm_carried;

/* On a thread whose last error is `status`; the first failure is kept, MEGAMOE_OK is none. */
void mm_carry(mm_carried *carried, megamoe_status status);

/* When all of them are done: makes the failure this thread's last error and returns its status. */
MEGAMOE_CHECKED megamoe_status mm_carried_status(const mm_carried *carried);

#ifdef __clang_analyzer__
/* The analyzer sees one file at a time: tell it that a failure is never MEGAMOE_OK. */
static inline megamoe_status mm_failed(megamoe_status status) {
    if (status == MEGAMOE_OK)
        __builtin_unreachable();
    return status;
}
#define mm_fail(...) mm_failed(mm_fail(__VA_ARGS__))
#endif

#define MM_TRY(expression)                                                                         \
    do {                                                                                           \
        const megamoe_status mm_try_status = (expression);                                         \
        if (mm_try_status != MEGAMOE_OK)                                                           \
            return mm_try_status;                                                                  \
    } while (0)

/* For functions with a local `status` and one label that frees everything. */
#define MM_TRY_GOTO(expression, label)                                                             \
    do {                                                                                           \
        status = (expression);                                                                     \
        if (status != MEGAMOE_OK)                                                                  \
            goto label;                                                                            \
    } while (0)

#endif
