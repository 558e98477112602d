/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "cuda/device.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>

#include "base/memory.h"
#include "cuda/cubins.h"

enum { KERNELS_MAJOR = 9, KERNELS_MINOR = 0 }; /* sm_90a runs on nothing else */

/* Place i belongs to mm_cubins[i]; NULL until it is needed. */
struct mm_cuda_modules {
    pthread_mutex_t lock;
    CUmodule loaded[];
};

static megamoe_status open_driver(void) {
    if (mm_cubin_count == 0)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "this build has no CUDA kernels: compiling them takes nvcc");
    return mm_cuda_driver_open();
}

megamoe_status mm_cuda_count(int32_t *count) {
    *count = 0;
    MM_TRY(open_driver());
    int found;
    MM_CUDA_TRY(mm_cu.cuDeviceGetCount(&found), "counting GPUs");
    *count = found;
    return MEGAMOE_OK;
}

static megamoe_status query(mm_cuda_device *d) {
    const struct {
        CUdevice_attribute attribute;
        int32_t *value;
    } numbers[] = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &d->major},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &d->minor},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &d->multiprocessors},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &d->shared_bytes},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, &d->l2_bytes},
        {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, &d->clock_khz},
        {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, &d->memory_clock_khz},
        {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, &d->memory_bus_bits},
    };
    const int32_t n = d->ordinal;
    MM_CUDA_TRY(mm_cu.cuDeviceGet(&d->device, n), "cuda:%" PRId32, n);
    MM_CUDA_TRY(mm_cu.cuDeviceGetName(d->model, sizeof d->model, d->device),
                "cuda:%" PRId32 ": its name", n);
    MM_CUDA_TRY(mm_cu.cuDeviceGetUuid(&d->uuid, d->device), "cuda:%" PRId32 ": its UUID", n);
    MM_CUDA_TRY(mm_cu.cuDeviceTotalMem(&d->memory_bytes, d->device), "cuda:%" PRId32 ": its memory",
                n);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        MM_CUDA_TRY(mm_cu.cuDeviceGetAttribute(numbers[i].value, numbers[i].attribute, d->device),
                    "cuda:%" PRId32 ": attribute %d", n, numbers[i].attribute);
    MM_CUDA_TRY(mm_cu.cuDriverGetVersion(&d->driver_version), "the driver's version");
    return MEGAMOE_OK;
}

static megamoe_status check_support(const mm_cuda_device *d) {
    if (d->major != KERNELS_MAJOR || d->minor != KERNELS_MINOR)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "cuda:%" PRId32 " is a %s of compute capability %" PRId32 ".%" PRId32
                       ": the kernels run on %d.%d (Hopper) only",
                       d->ordinal, d->model, d->major, d->minor, KERNELS_MAJOR, KERNELS_MINOR);
    /* Cubins run with every driver of their major version and with later ones. */
    const int32_t needed = mm_cubin_cuda_version / 1000;
    if (d->driver_version / 1000 < needed)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "the CUDA driver is for version %" PRId32 ".%" PRId32
                       ": the kernels of this build need %" PRId32 ".0 or later",
                       d->driver_version / 1000, d->driver_version % 1000 / 10, needed);
    return MEGAMOE_OK;
}

static megamoe_status take_max_ctas(mm_cuda_device *d, int32_t max_ctas) {
    if (max_ctas < 0 || max_ctas > d->multiprocessors)
        return mm_fail(MEGAMOE_EINVAL,
                       "max_ctas is %" PRId32 ": expected 0..%" PRId32
                       ", the multiprocessors of cuda:%" PRId32,
                       max_ctas, d->multiprocessors, d->ordinal);
    d->max_ctas = max_ctas ? max_ctas : d->multiprocessors;
    return MEGAMOE_OK;
}

megamoe_status mm_cuda_open(int32_t ordinal, int32_t max_ctas, mm_cuda_device **device) {
    *device = NULL;
    int32_t count;
    MM_TRY(mm_cuda_count(&count));
    if (ordinal >= count)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "there is no cuda:%" PRId32 ": the driver shows %" PRId32 " GPU%s", ordinal,
                       count, count == 1 ? "" : "s");
    mm_cuda_device *d = mm_alloc(sizeof *d);
    struct mm_cuda_modules *modules =
        mm_alloc(sizeof *modules + (size_t)mm_cubin_count * sizeof *modules->loaded);
    if (!d || !modules) {
        free(modules);
        free(d);
        return mm_fail(MEGAMOE_ENOMEM, "cuda:%" PRId32 ": out of memory", ordinal);
    }
    pthread_mutex_init(&modules->lock, NULL);
    d->modules = modules;
    d->ordinal = ordinal;
    megamoe_status status;
    MM_TRY_GOTO(query(d), fail);
    MM_TRY_GOTO(check_support(d), fail);
    MM_TRY_GOTO(take_max_ctas(d, max_ctas), fail);
    MM_CUDA_TRY_GOTO(mm_cu.cuDevicePrimaryCtxRetain(&d->context, d->device), fail,
                     "cuda:%" PRId32 ": its context", ordinal);
    *device = d;
    return MEGAMOE_OK;
fail:
    mm_cuda_close(d);
    return status;
}

/* The context may be gone when the process ends, so results do not matter. */
static void unload(mm_cuda_device *device) {
    CUcontext previous;
    if (mm_cu.cuCtxGetCurrent(&previous) != CUDA_SUCCESS ||
        mm_cu.cuCtxSetCurrent(device->context) != CUDA_SUCCESS)
        return;
    for (int32_t i = 0; i < mm_cubin_count; i++)
        if (device->modules->loaded[i])
            (void)mm_cu.cuModuleUnload(device->modules->loaded[i]);
    mm_cuda_leave(previous);
}

void mm_cuda_close(mm_cuda_device *device) {
    if (!device)
        return;
    if (device->context) {
        unload(device);
        (void)mm_cu.cuDevicePrimaryCtxRelease(device->device);
    }
    pthread_mutex_destroy(&device->modules->lock);
    free(device->modules);
    free(device);
}

megamoe_status mm_cuda_enter(const mm_cuda_device *device, CUcontext *previous) {
    MM_CUDA_TRY(mm_cu.cuCtxGetCurrent(previous), "the current CUDA context");
    MM_CUDA_TRY(mm_cu.cuCtxSetCurrent(device->context), "the context of cuda:%" PRId32,
                device->ordinal);
    return MEGAMOE_OK;
}

void mm_cuda_leave(CUcontext previous) {
    (void)mm_cu.cuCtxSetCurrent(previous);
}

/* Holding the lock, inside mm_cuda_enter. */
static megamoe_status find_function(mm_cuda_device *device, const mm_cubin *cubin,
                                    const char *entry, CUfunction *function) {
    CUmodule *module = &device->modules->loaded[cubin - mm_cubins];
    if (!*module)
        MM_CUDA_TRY(mm_cu.cuModuleLoadData(module, cubin->data), "loading kernels '%s'",
                    cubin->name);
    MM_CUDA_TRY(mm_cu.cuModuleGetFunction(function, *module, entry), "kernel '%s' of '%s'", entry,
                cubin->name);
    return MEGAMOE_OK;
}

megamoe_status mm_cuda_function(mm_cuda_device *device, const char *cubin, const char *entry,
                                CUfunction *function) {
    *function = NULL;
    const mm_cubin *found = mm_cubin_find(cubin);
    if (!found)
        return mm_fail(MEGAMOE_EUNSUPPORTED, "this build has no kernels '%s'", cubin);
    CUcontext previous;
    MM_TRY(mm_cuda_enter(device, &previous));
    pthread_mutex_lock(&device->modules->lock);
    const megamoe_status status = find_function(device, found, entry, function);
    pthread_mutex_unlock(&device->modules->lock);
    mm_cuda_leave(previous);
    return status;
}

megamoe_status mm_cuda_allow_shared(const mm_cuda_device *device, CUfunction function,
                                    int32_t bytes) {
    if (bytes > device->shared_bytes)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "a kernel wants %" PRId32 " bytes of shared memory: cuda:%" PRId32
                       " gives a thread block %" PRId32,
                       bytes, device->ordinal, device->shared_bytes);
    MM_CUDA_TRY(
        mm_cu.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes),
        "%" PRId32 " bytes of shared memory", bytes);
    return MEGAMOE_OK;
}
