/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device computes a layer: the CPU with a pool of threads, or a Hopper GPU. The CUDA driver is
 * looked for when it is first asked for; the same library runs on machines that have none.
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
    int32_t max_ctas;   /* cuda: thread blocks that a forward may use; 0: one per multiprocessor */
} megamoe_device_options;

/*
 * Opens the device `name`: "cpu", "cuda:N" for the N-th GPU that the CUDA driver shows, or "cuda",
 * which is "cuda:0". `options` may be NULL. A GPU is used through its primary context, and every
 * call leaves the calling thread's current context as it was; its threads are the host's, which
 * pack weights.
 * The environment variable MEGAMOE_CPU=scalar|avx2|avx512 caps the instruction set of the CPU
 * device; an unknown word is MEGAMOE_EINVAL.
 * Owns: the caller closes *device, after every object made with it.
 * Thread: a device is used by one call at a time.
 * Returns: MEGAMOE_EINVAL for a malformed name or options, MEGAMOE_EUNSUPPORTED for a device that
 * this build or machine lacks or that is no Hopper GPU, MEGAMOE_EDEVICE, MEGAMOE_ENOMEM.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_device_open(
    const char *name, const megamoe_device_options *options, megamoe_device **device);

/* Accepts NULL. */
MEGAMOE_API void megamoe_device_close(megamoe_device *device);

/*
 * Devices of a kind that have a name: 1 for "cpu", the GPUs that the driver shows for "cuda", be
 * they Hopper or not.
 * Thread: any.
 * Returns: MEGAMOE_EUNSUPPORTED where this build has no CUDA backend or the machine no driver or no
 * GPU; megamoe_last_error() says which. MEGAMOE_EINVAL for another kind.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_device_count(const char *kind, int32_t *count);

typedef struct megamoe_device_info {
    size_t struct_size;
    char name[64];   /* "cpu", "cuda:0" */
    char model[64];  /* the processor's own name */
    char tier[16];   /* instruction set in use: "scalar", "avx2", "avx512"; "sm_90a" */
    int32_t threads; /* of the host */
    int32_t cores;   /* cores available to this process */
    bool pinned;     /* threads are bound to cores */
    bool cuda_built; /* the library was built with the CUDA backend */
    /* Of a GPU, else 0: */
    int32_t multiprocessors;
    int32_t max_ctas; /* thread blocks that a forward may use */
    int32_t capability_major, capability_minor;
    int32_t driver_version; /* CUDA version of the driver: 13000 for 13.0 */
    uint64_t memory_bytes;
} megamoe_device_info;

MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_device_describe(const megamoe_device *device,
                                                                   megamoe_device_info *info);

/*
 * What the device can do at best, measured now with all its threads. Blocks about a second. A GPU
 * needs 4 GiB of its memory free meanwhile.
 */
typedef struct megamoe_device_ceilings {
    size_t struct_size;
    double read_gbs;   /* memory read bandwidth, 1e9 bytes per second */
    double dot_gflops; /* CPU: rate of the multiply-adds that this tier's dot products use */
    double copy_gbs;   /* GPU: copy within its memory, bytes read and bytes written together */
    double mma_tflops; /* GPU: rate of E4M3 multiplications on tensor cores, 1e12 per second */
    double int8_gops;  /* CPU: as dot_gflops, of the dot products of int8 activations */
} megamoe_device_ceilings;

MEGAMOE_API MEGAMOE_CHECKED megamoe_status
megamoe_device_measure(megamoe_device *device, megamoe_device_ceilings *ceilings);

/*
 * What two GPUs can do together, measured now with memory as ranks share it. Blocks about a second
 * and needs 256 MiB of each one's memory.
 */
enum { MEGAMOE_LINK_POINTS = 8 };

typedef struct megamoe_link_speed {
    size_t struct_size;
    double round_trip_us; /* of a flag that one stores and the other answers */
    double barrier_us;    /* of two: each stores a flag and waits for the other's */
    /* Writing into the other's memory, by number of multiprocessors; 1e9 bytes per second. */
    struct {
        int32_t multiprocessors;
        double bulk_gbs, store_gbs;           /* one into the other: bulk copies, vector stores */
        double bulk_both_gbs, store_both_gbs; /* each into the other at once: of each direction */
    } push[MEGAMOE_LINK_POINTS];
} megamoe_link_speed;

/*
 * Returns: MEGAMOE_EINVAL (not two GPUs), MEGAMOE_EUNSUPPORTED (no peer access), MEGAMOE_ENOMEM,
 * MEGAMOE_EDEVICE.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_device_measure_link(megamoe_device *a,
                                                                       megamoe_device *b,
                                                                       megamoe_link_speed *speed);

#ifdef __cplusplus
}
#endif
#endif
