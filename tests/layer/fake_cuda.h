/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A CUDA backend in host memory, for what src/layer does with one: the linker sends the library's
 * calls here (tests/layer/CMakeLists.txt lists them). It computes nothing and notes what it is
 * told. Layers are real ones, on a driver whose device memory is that of the host.
 */
#ifndef TESTS_LAYER_FAKE_CUDA_H
#define TESTS_LAYER_FAKE_CUDA_H

#include "cuda/operation.h"

struct mm_cuda_workspace {
    megamoe_shape shape;
    megamoe_capacity capacity;
    int32_t rank, ranks;
    mm_cuda_device *device;
    bool met, aborted, warm;
    uint64_t epoch;
    int64_t tokens;
    bool committed; /* the batch came through the views */
    void *stream;   /* of the last call */
    bool reports;   /* mm_cuda_workspace_found gives `report`, once */
    megamoe_workspace_detail report;
    char cause[MM_COMM_CAUSE_BYTES]; /* as it was told when last asked */
};

/* Of all devices together. */
typedef struct fake_cuda {
    int32_t devices, layers, workspaces; /* open */
    int32_t memories;                    /* allocated by layers */
    int32_t uploads;                     /* of experts, by those that create layers */
    int32_t allocations_until_failure;   /* 0: none fails */
    int32_t copies_until_failure;        /* from device to device; 0: none fails */
    int32_t launches_until_failure;      /* 0: none fails */
    /* The last launch. */
    int32_t launches, ranks;
    megamoe_plan plan;
    const mm_cuda_layer *layer;
    const megamoe_view *y;
    void *stream;
} fake_cuda;

extern fake_cuda fake;

/* Of the cases first: nothing is open and nothing fails. */
void fake_start(void);

#endif
