/* SPDX-License-Identifier: Apache-2.0 */
#include "megamoe/trace.h"

#include "base/error.h"
#include "cpu/trace.h"
#include "layer/layer.h"

megamoe_status megamoe_workspace_get_trace(const megamoe_workspace *workspace, megamoe_span *spans,
                                           int64_t n, int64_t *count, int64_t *dropped) {
    if (!workspace || !count)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_workspace_get_trace: %s is NULL",
                       workspace ? "count" : "workspace");
    *count = 0;
    if (n < 0 || (n > 0 && !spans))
        return mm_fail(MEGAMOE_EINVAL, "megamoe_workspace_get_trace: %lld spans at %s",
                       (long long)n, spans ? "a place" : "NULL");
    if (!workspace->capacity.trace)
        return mm_fail(MEGAMOE_ESTATE, "trace: the workspace keeps none; create it with "
                                       "capacity.trace above 0");
    if (!mm_workspace_epoch(workspace))
        return mm_fail(MEGAMOE_ESTATE, "trace: there was no forward yet");
    int64_t lost = 0;
    if (workspace->cuda)
        MM_TRY(mm_cuda_workspace_trace(workspace->cuda, spans, n, count, &lost));
    else
        mm_cpu_workspace_trace(workspace->cpu, spans, n, count, &lost);
    if (dropped)
        *dropped = lost;
    return MEGAMOE_OK;
}
