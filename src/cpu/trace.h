/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Spans of a forward on the CPU. Each thread writes its own; a workspace without a trace has none
 * of this, and takes no times.
 */
#ifndef MM_CPU_TRACE_H
#define MM_CPU_TRACE_H

#include "cpu/operation.h"
#include "megamoe/trace.h"

/* Of one thread. */
struct mm_cpu_spans {
    _Alignas(MM_CACHE_LINE) int64_t count; /* more than there is room for if some were dropped */
};

struct mm_cpu_trace {
    int32_t threads;
    int64_t room;            /* spans of a thread */
    int64_t begun_ns;        /* the forward */
    megamoe_span *spans;     /* [threads][room] */
    struct mm_cpu_spans *of; /* [threads] */
};

/* The time, or 0 without a trace. */
int64_t mm_cpu_trace_now(const mm_cpu_workspace *workspace);

/* A forward begins: forgets the one before. */
void mm_cpu_trace_begin(const mm_cpu_workspace *workspace);

/* A span from begin_ns to now. `task` is NULL outside of FC1 and FC2. Thread: `thread` alone. */
void mm_cpu_trace_add(const mm_cpu_workspace *workspace, int32_t thread, int64_t begin_ns,
                      megamoe_span_phase phase, const mm_task *task);

/* As megamoe_workspace_get_trace has it. */
void mm_cpu_workspace_trace(const mm_cpu_workspace *workspace, megamoe_span *spans, int64_t n,
                            int64_t *count, int64_t *dropped);

#endif
