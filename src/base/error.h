/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MM_BASE_ERROR_H
#define MM_BASE_ERROR_H

#include "megamoe/status.h"

/*
 * Records the message of a failure for this thread and returns `status`. The first detector calls
 * it; callers only propagate.
 */
MEGAMOE_CHECKED megamoe_status mm_fail(megamoe_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

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
