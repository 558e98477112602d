/* SPDX-License-Identifier: Apache-2.0 */
/* One GPU: its primary context, its numbers and the kernels loaded into it. */
#ifndef MM_CUDA_DEVICE_H
#define MM_CUDA_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda/driver.h"
#include "megamoe/device.h"

struct mm_cuda_modules;

typedef struct mm_cuda_device {
    int32_t ordinal;
    CUdevice device;
    CUcontext context; /* the primary one, shared with whatever else the process does on the GPU */
    char model[64];
    CUuuid uuid;          /* the same in all processes, however they number GPUs */
    int32_t major, minor; /* compute capability */
    int32_t multiprocessors;
    int32_t shared_bytes; /* that a thread block may ask for */
    int32_t l2_bytes;
    int32_t clock_khz;
    int32_t memory_clock_khz, memory_bus_bits;
    int32_t driver_version; /* CUDA version of the driver: 13000 for 13.0 */
    int32_t max_ctas;       /* thread blocks of a forward, 1..multiprocessors */
    size_t memory_bytes;
    struct mm_cuda_modules *modules;
} mm_cuda_device;

/*
 * GPUs that the driver shows, of any kind. MEGAMOE_EUNSUPPORTED if this build has no kernels or the
 * machine has no driver.
 */
MEGAMOE_CHECKED megamoe_status mm_cuda_count(int32_t *count);

/*
 * Opens GPU number `ordinal`. max_ctas 0: one per multiprocessor.
 * MEGAMOE_EUNSUPPORTED where there is none, or one that the kernels do not run on.
 */
MEGAMOE_CHECKED megamoe_status mm_cuda_open(int32_t ordinal, int32_t max_ctas,
                                            mm_cuda_device **device);

/* Unloads all kernels. Accepts NULL. */
void mm_cuda_close(mm_cuda_device *device);

/*
 * Makes the device's context current in this thread and tells which was; mm_cuda_leave restores it.
 * Every public function that calls the driver stands between the two.
 */
MEGAMOE_CHECKED megamoe_status mm_cuda_enter(const mm_cuda_device *device, CUcontext *previous);
void mm_cuda_leave(CUcontext previous);

/*
 * Function `entry` of the cubin of that name, loaded at its first use and kept until the device is
 * closed. Thread: any, whichever context is current.
 */
MEGAMOE_CHECKED megamoe_status mm_cuda_function(mm_cuda_device *device, const char *cubin,
                                                const char *entry, CUfunction *function);

/* Lets a kernel be launched with that much dynamic shared memory. Inside mm_cuda_enter. */
MEGAMOE_CHECKED megamoe_status mm_cuda_allow_shared(const mm_cuda_device *device,
                                                    CUfunction function, int32_t bytes);

MEGAMOE_CHECKED megamoe_status mm_cuda_measure(mm_cuda_device *device,
                                               megamoe_device_ceilings *ceilings);

MEGAMOE_CHECKED megamoe_status mm_cuda_measure_link(mm_cuda_device *a, mm_cuda_device *b,
                                                    megamoe_link_speed *speed);

#endif
