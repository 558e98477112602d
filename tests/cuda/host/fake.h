/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A GPU that is host memory: addresses are pointers, copies and fills happen at once, launches are
 * written down. Pages that can be shared are a memfd, so that processes really share them; GPU n's
 * UUID begins with n. It stands in for src/cuda/device.c and the driver, so that the host's half of
 * the CUDA backend runs anywhere.
 */
#ifndef FAKE_H
#define FAKE_H

#include <stdbool.h>

#include "cuda/operation.h"

enum { FAKE_THREADS = 384 /* of a block of a forward */ };

typedef struct fake_launch {
    CUlaunchConfig config;
    bool cooperative;
    const char *kernel; /* "stage" or the cubin of a forward */
    mm_cuda_stage_args stage;
    mm_cuda_forward_args forward;
} fake_launch;

typedef struct fake_gpu {
    int32_t allocations;      /* in use: memory, pinned memory, handles, mappings */
    int32_t allocations_left; /* that succeed before the next fails; negative: all do */
    bool no_pages;            /* it has no virtual memory management */
    bool no_descriptors;      /* ... or exports nothing */
    uint64_t unreachable;     /* bit n: GPU n has no peer access */
    int32_t granted;          /* other GPUs that were given access */
    int32_t functions;        /* loads of kernels so far */
    int32_t blocks_resident;  /* per multiprocessor, for occupancy */
    int32_t entered;          /* mm_cuda_enter without mm_cuda_leave */
    int32_t launches;
    fake_launch last;
} fake_gpu;

extern fake_gpu fake;

/* A fresh GPU like an H200, number `ordinal`; memory of the one before is forgotten. */
mm_cuda_device fake_open(int32_t ordinal);

static inline void *fake_memory(uint64_t address) {
    return (void *)(uintptr_t)address;
}

#endif
