/* SPDX-License-Identifier: Apache-2.0 */
#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

static pthread_mutex_t sink_lock = PTHREAD_MUTEX_INITIALIZER;
static megamoe_log_fn sink_fn;
static void *sink_user;
static atomic_int sink_level; /* read without the lock to drop messages cheaply */

void megamoe_log_set(megamoe_log_fn fn, void *user, megamoe_log_level level) {
    pthread_mutex_lock(&sink_lock);
    sink_fn = fn;
    sink_user = user;
    atomic_store_explicit(&sink_level, fn ? (int)level : 0, memory_order_relaxed);
    pthread_mutex_unlock(&sink_lock);
}

void mm_log(megamoe_log_level level, const char *format, ...) {
    if ((int)level > atomic_load_explicit(&sink_level, memory_order_relaxed))
        return;
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    pthread_mutex_lock(&sink_lock);
    if (sink_fn)
        sink_fn(sink_user, level, text);
    pthread_mutex_unlock(&sink_lock);
}
