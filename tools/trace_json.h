/* SPDX-License-Identifier: Apache-2.0 */
/* The spans of a forward as events that Perfetto and Chrome's tracing show. */
#ifndef TRACE_JSON_H
#define TRACE_JSON_H

#include <jansson.h>
#include <megamoe/trace.h>
#include <stdbool.h>

/* The spans of one rank. */
typedef struct trace_rank {
    megamoe_span *spans;
    int64_t n;
    char device[96];
} trace_rank;

/*
 * Appends a rank's events: its process is `rank`, each worker's lane a thread. `gpu`: workers are
 * multiprocessors.
 */
void trace_events(const trace_rank *t, int32_t rank, bool gpu, json_t *events);

#endif
