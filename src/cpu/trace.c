/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "cpu/trace.h"

#include <time.h>

int64_t mm_cpu_trace_now(const mm_cpu_workspace *ws) {
    if (!ws->trace)
        return 0;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void mm_cpu_trace_begin(const mm_cpu_workspace *ws) {
    if (!ws->trace)
        return;
    ws->trace->begun_ns = mm_cpu_trace_now(ws);
    for (int32_t t = 0; t < ws->trace->threads; t++)
        ws->trace->of[t].count = 0;
}

void mm_cpu_trace_add(const mm_cpu_workspace *ws, int32_t thread, int64_t begin_ns,
                      megamoe_span_phase phase, const mm_task *task) {
    struct mm_cpu_trace *trace = ws->trace;
    if (!trace)
        return;
    const int64_t at = trace->of[thread].count++;
    if (at >= trace->room)
        return;
    const int32_t expert = task ? task->expert : -1;
    trace->spans[thread * trace->room + at] = (megamoe_span){
        .begin_us = (double)(begin_ns - trace->begun_ns) / 1e3,
        .end_us = (double)(mm_cpu_trace_now(ws) - trace->begun_ns) / 1e3,
        .phase = phase,
        .part = MEGAMOE_PART_WHOLE,
        .lane = MEGAMOE_LANE_WORKER,
        .worker = thread,
        .team = -1,
        .expert = expert,
        .tile = task ? task->first : -1,
        .tokens = task ? (int32_t)(ws->segments[expert + 1] - ws->segments[expert]) : -1};
}

void mm_cpu_workspace_trace(const mm_cpu_workspace *ws, megamoe_span *spans, int64_t n,
                            int64_t *count, int64_t *dropped) {
    const struct mm_cpu_trace *trace = ws->trace;
    *count = *dropped = 0;
    for (int32_t t = 0; t < trace->threads; t++) {
        const int64_t kept = mm_min(trace->of[t].count, trace->room);
        *dropped += trace->of[t].count - kept;
        for (int64_t i = 0; i < kept; i++, ++*count)
            if (*count < n)
                spans[*count] = trace->spans[t * trace->room + i];
    }
}
