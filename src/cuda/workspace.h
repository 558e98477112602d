/* SPDX-License-Identifier: Apache-2.0 */
/* Inside of a workspace: src/cuda and its tests only. */
#ifndef MM_CUDA_WORKSPACE_H
#define MM_CUDA_WORKSPACE_H

#include "base/memory.h"
#include "cuda/buffers.h"
#include "cuda/operation.h"
#include "cuda/shared.h"

/* Pinned memory that kernels reach: what they report, and the word that stops them. */
typedef struct mm_cuda_page {
    mm_cuda_found found;
    _Alignas(MM_CACHE_LINE) uint32_t aborted;
} mm_cuda_page;

/* A variant of the forward kernel as this workspace launches it. */
typedef struct mm_cuda_kernel {
    CUfunction function; /* NULL until it is needed */
    int threads;         /* of a block */
    int32_t teams;       /* of a block */
    int32_t stages;      /* of a team's ring */
    uint32_t shared_bytes;
} mm_cuda_kernel;

struct mm_cuda_workspace {
    megamoe_shape shape;
    megamoe_capacity capacity;
    int32_t rank, ranks;
    mm_cuda_device *device;
    mm_cuda_buffers buffers;
    mm_cuda_shared shared;
    CUdeviceptr window; /* the shared memory */
    CUdeviceptr local;
    volatile mm_cuda_page *page;
    CUdeviceptr page_address;               /* the same for kernels */
    CUdeviceptr windows[MM_CUDA_RANKS_MAX]; /* by rank, once `met` */
    bool met;
    int64_t tokens;          /* of the staged batch */
    uint64_t epoch;          /* forwards enqueued */
    int32_t blocks;          /* of the last one */
    uint32_t seen;           /* epoch of the last record that was reported */
    CUfunction stage;        /* NULL until it is needed */
    mm_cuda_kernel *kernels; /* [mm_forward_variant_count] */
};

/*
 * Makes the next forward number epoch + 1, as if `epoch` of them had ended. Before the first
 * forward, on all ranks alike; for tests of what happens when epochs wrap.
 */
MEGAMOE_CHECKED megamoe_status mm_cuda_workspace_set_epoch(mm_cuda_workspace *workspace,
                                                           uint32_t epoch);

/* Pure: the words for a record; `cause` as mm_cuda_workspace_found has it. */
void mm_cuda_found_describe(const mm_cuda_workspace *workspace, const mm_cuda_found *found,
                            const char *cause, megamoe_workspace_detail *detail);

#endif
