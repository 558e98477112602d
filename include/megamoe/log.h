/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MEGAMOE_LOG_H
#define MEGAMOE_LOG_H

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum megamoe_log_level {
    MEGAMOE_LOG_NONE = 0,
    MEGAMOE_LOG_ERROR = 1,
    MEGAMOE_LOG_WARN = 2,
    MEGAMOE_LOG_INFO = 3,
    MEGAMOE_LOG_DEBUG = 4
} megamoe_log_level;

/* `message` is one line without a newline, valid during the call. */
typedef void (*megamoe_log_fn)(void *user, megamoe_log_level level, const char *message);

/*
 * Sends the library's messages up to `level` to `fn`; NULL silences it, which is the default.
 * Process-wide. Thread: safe at any time; `fn` may be called from any thread, never from inside
 * a forward.
 */
MEGAMOE_API void megamoe_log_set(megamoe_log_fn fn, void *user, megamoe_log_level level);

#ifdef __cplusplus
}
#endif
#endif
