/* SPDX-License-Identifier: Apache-2.0 */
/* Where the time of a forward went, from the marks of its thread blocks. */
#include "base/error.h"
#include "cuda/workspace.h"

#define NS_PER_US 1e3

static megamoe_status read_marks(const mm_cuda_workspace *ws, uint64_t *marks) {
    CUcontext previous;
    MM_TRY(mm_cuda_enter(ws->device, &previous));
    megamoe_status status;
    MM_CUDA_TRY_GOTO(mm_cu.cuCtxSynchronize(), done, "times of a forward: waiting for the GPU");
    MM_CUDA_TRY_GOTO(mm_cu.cuMemcpyDtoH(marks, ws->local + ws->buffers.local.times,
                                        (size_t)ws->blocks * MM_CUDA_TIMES * sizeof *marks),
                     done, "times of a forward: copying from the GPU");
    status = MEGAMOE_OK;
done:
    mm_cuda_leave(previous);
    return status;
}

static uint64_t mark_or(uint64_t mark, uint64_t other) {
    return mark ? mark : other;
}

/*
 * Marks are nanoseconds of one clock. A block that had no tile has no FIRST and no LAST, one that
 * found an error when it began no COMBINED either.
 */
static void sum_up(const uint64_t *marks, int32_t blocks, megamoe_workspace_times *times) {
    uint64_t begin = UINT64_MAX, end = 0;
    for (int32_t i = 0; i < blocks; i++) {
        const uint64_t *m = marks + (size_t)i * MM_CUDA_TIMES;
        begin = m[MM_CUDA_TIME_ENTRY] < begin ? m[MM_CUDA_TIME_ENTRY] : begin;
        const uint64_t left = mark_or(m[MM_CUDA_TIME_COMBINED], m[MM_CUDA_TIME_BEGUN]);
        end = left > end ? left : end;
    }
    const double unit = NS_PER_US * blocks;
    times->total_us = (double)(end - begin) / NS_PER_US;
    for (int32_t i = 0; i < blocks; i++) {
        const uint64_t *m = marks + (size_t)i * MM_CUDA_TIMES;
        const uint64_t begun = m[MM_CUDA_TIME_BEGUN];
        const uint64_t first = mark_or(m[MM_CUDA_TIME_FIRST], begun);
        const uint64_t last = mark_or(m[MM_CUDA_TIME_LAST], begun);
        const uint64_t left = mark_or(m[MM_CUDA_TIME_COMBINED], begun);
        const double dispatch = (double)(first - begun) / unit;
        times->begin_us += (double)(begun - m[MM_CUDA_TIME_ENTRY]) / unit;
        times->dispatch_us += dispatch;
        times->fc1_us += (double)m[MM_CUDA_TIME_FC1] / unit;
        times->fc2_us += (double)m[MM_CUDA_TIME_FC2] / unit;
        /* The first tile's time has counted from BEGUN: of FC1, unless the block had none of it. */
        if (m[MM_CUDA_TIME_FC1])
            times->fc1_us -= dispatch;
        else
            times->fc2_us -= dispatch;
        /* Rows may be summed before the last tile has been told of, so this can be negative. */
        times->combine_us += ((double)left - (double)last) / unit;
        times->idle_us += (double)(m[MM_CUDA_TIME_ENTRY] - begin + end - left) / unit;
    }
}

megamoe_status mm_cuda_workspace_times(const mm_cuda_workspace *workspace,
                                       megamoe_workspace_times *times) {
    uint64_t marks[MM_CUDA_BLOCKS_MAX * MM_CUDA_TIMES];
    *times = (megamoe_workspace_times){.struct_size = sizeof *times};
    if (!workspace->blocks)
        return mm_fail(MEGAMOE_ESTATE, "times: there was no forward yet");
    MM_TRY(read_marks(workspace, marks));
    sum_up(marks, workspace->blocks, times);
    return MEGAMOE_OK;
}
