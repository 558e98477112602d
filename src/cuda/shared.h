/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Device memory of a rank that the kernels of other ranks write into, on the same GPU or another,
 * in the same process or another. Addresses differ between processes, offsets do not.
 *
 * Where there are several ranks it is allocated as pages with a handle, which can be mapped for
 * other GPUs and exported to other processes as a file descriptor. Mappings keep the pages: they
 * outlive the process that has exported them. A GPU without such memory serves ranks of one process
 * that all are on it. NVLink multicast is not used.
 */
#ifndef MM_CUDA_SHARED_H
#define MM_CUDA_SHARED_H

#include "comm/comm.h"
#include "cuda/device.h"
#include "cuda/kernels/abi.h"

typedef struct mm_cuda_shared {
    CUdeviceptr own;
    size_t bytes; /* of `own`: whole pages if it is paged */
    bool paged;   /* else from cuMemAlloc */
    int fd;       /* of ranks that are processes, until they have met; else -1 */
    CUdeviceptr peers[MM_CUDA_RANKS_MAX]; /* those of other processes; 0: none */
} mm_cuda_shared;

/* What the other ranks need to know of it. */
typedef struct mm_cuda_shared_card {
    uint64_t address; /* in its own process */
    uint64_t bytes;
    CUuuid uuid;     /* of the GPU */
    int32_t ordinal; /* in its own process */
    bool paged;
    bool instance; /* the GPU is a MIG instance */
} mm_cuda_shared_card;

/*
 * All inside mm_cuda_enter of `device`.
 * Open is local. Owns: mm_cuda_shared_close, also after a failure.
 * Returns: MEGAMOE_ENOMEM, MEGAMOE_EDEVICE, MEGAMOE_EUNSUPPORTED (a GPU that cannot share memory
 * between processes).
 */
MEGAMOE_CHECKED megamoe_status mm_cuda_shared_open(const megamoe_comm *comm,
                                                   const mm_cuda_device *device, size_t bytes,
                                                   mm_cuda_shared *shared);

mm_cuda_shared_card mm_cuda_shared_card_of(const mm_cuda_shared *shared,
                                           const mm_cuda_device *device);

/*
 * Once all ranks have opened theirs; collective where they are processes. addresses[r] becomes that
 * of rank r's memory in this process. Memory of other GPUs in this process may be used once their
 * ranks have done this too.
 * Returns: MEGAMOE_EUNSUPPORTED (a GPU that this one cannot reach), MEGAMOE_EIO, MEGAMOE_EDEVICE,
 * or what mm_comm_share_fds returns.
 */
MEGAMOE_CHECKED megamoe_status mm_cuda_shared_meet(megamoe_comm *comm, const mm_cuda_device *device,
                                                   mm_cuda_shared *shared,
                                                   const mm_cuda_shared_card *cards,
                                                   CUdeviceptr *addresses);

/* No kernel uses it any more. */
void mm_cuda_shared_close(mm_cuda_shared *shared);

#endif
