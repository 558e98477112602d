/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MM_BASE_DEVICE_H
#define MM_BASE_DEVICE_H

#include "base/pool.h"
#include "megamoe/device.h"

struct mm_kernels;
struct mm_cuda_device;

struct megamoe_device {
    mm_pool *pool;                    /* of a GPU's host too: packing runs there */
    const struct mm_kernels *kernels; /* of the CPU tier in use */
    bool pinned;
    struct mm_cuda_device *cuda; /* NULL on the CPU */
};

#endif
