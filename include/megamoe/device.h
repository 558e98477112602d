/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device computes a layer: the CPU with a pool of threads.
 */
#ifndef MEGAMOE_DEVICE_H
#define MEGAMOE_DEVICE_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct megamoe_device megamoe_device;

typedef struct megamoe_device_options {
    size_t struct_size;
    int32_t threads;    /* threads that compute, the caller's included; 0: one per core available */
    int32_t first_core; /* index, among the cores available, of the first thread's core */
    bool no_pinning;    /* leave placement of threads to the operating system */
} megamoe_device_options;

/*
 * Opens the device `name`: "cpu". `options` may be NULL.
 * The environment variable MEGAMOE_CPU=scalar|avx2|avx512 caps the instruction set of the CPU
 * device; an unknown word is MEGAMOE_EINVAL.
 * Owns: the caller closes *device, after every object made with it.
 * Thread: a device is used by one call at a time.
 * Returns: MEGAMOE_EINVAL for a malformed name or options, MEGAMOE_EUNSUPPORTED for a device that
 * this build or machine lacks, MEGAMOE_ENOMEM.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_device_open(
    const char *name, const megamoe_device_options *options, megamoe_device **device);

/* Accepts NULL. */
MEGAMOE_API void megamoe_device_close(megamoe_device *device);

typedef struct megamoe_device_info {
    size_t struct_size;
    char name[64];  /* "cpu" */
    char model[64]; /* the processor's own name */
    char tier[16];  /* instruction set in use: "scalar", "avx2", "avx512" */
    int32_t threads;
    int32_t cores;   /* cores available to this process */
    bool pinned;     /* threads are bound to cores */
    bool cuda_built; /* the library was built with the CUDA backend */
} megamoe_device_info;

MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_device_describe(const megamoe_device *device,
                                                                   megamoe_device_info *info);

/* What the device can do at best, measured now with all its threads. Blocks about a second. */
typedef struct megamoe_device_ceilings {
    size_t struct_size;
    double read_gbs;   /* memory read bandwidth, 1e9 bytes per second */
    double dot_gflops; /* rate of the multiply-adds that this tier's dot products use */
} megamoe_device_ceilings;

MEGAMOE_API MEGAMOE_CHECKED megamoe_status
megamoe_device_measure(megamoe_device *device, megamoe_device_ceilings *ceilings);

#ifdef __cplusplus
}
#endif
#endif
