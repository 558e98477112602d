/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A libcuda.so.1 for the tool's tests: one GPU whose memory is the host's, whose kernels do nothing
 * and where every event is 10 us after the last one. Large memory is reserved and not filled.
 *
 *   FAKE_CUDA_FAST_LAG=N    5 us while the last forward has FC2 follow FC1 by N token tiles
 *   FAKE_CUDA_WRONG_LAG=N   such a forward writes into its output
 *   FAKE_CUDA_DRIFT=N       events become up to half as slow again, and as fast as before, every N
 */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda/driver.h"
#include "cuda/kernels/abi.h"

#define X(name, symbol, arguments) CUresult name arguments __asm__(symbol);
MM_CUDA_FUNCTIONS(X)
#undef X
CUresult cuDeviceGetPCIBusId(char *text, int bytes, CUdevice device);
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CUstream stream, void **arguments, void **extra);

enum { MOST_FILLED = 64 << 20, MAX_MAPPINGS = 256 };

static _Thread_local CUcontext current;
static bool capturing;
static int events;
static double clock_us, pace_us = 10; /* the events' clock, and how fast it goes */

/* What handles are, but those of events. */
static char handle;
static void *const thing = &handle;

static const size_t memory_bytes = (size_t)141 << 30;

/* What a function does before it succeeds. */
#define DOES(name, arguments, ...)                                                                 \
    CUresult name arguments {                                                                      \
        __VA_ARGS__;                                                                               \
        return CUDA_SUCCESS;                                                                       \
    }
#define FAILS(name, arguments)                                                                     \
    CUresult name arguments {                                                                      \
        return CUDA_ERROR_NOT_FOUND;                                                               \
    }

/* NOLINTBEGIN(misc-unused-parameters): the driver's signatures */
#pragma GCC diagnostic ignored "-Wunused-parameter"

DOES(cuInit, (unsigned flags), )
DOES(cuDriverGetVersion, (int *version), *version = 99000)
DOES(cuGetErrorName, (CUresult result, const char **name), *name = "CUDA_ERROR_FAKE")
DOES(cuGetErrorString, (CUresult result, const char **text), *text = "of the fake driver")
DOES(cuDeviceGetCount, (int *count), *count = 1)
DOES(cuDeviceGet, (CUdevice * device, int ordinal), *device = ordinal)
DOES(cuDeviceGetName, (char *name, int bytes, CUdevice device),
     snprintf(name, (size_t)bytes, "Fake H200"))
DOES(cuDeviceGetUuid, (CUuuid * uuid, CUdevice device), *uuid = (CUuuid){{(char)device}})
DOES(cuDeviceCanAccessPeer, (int *can, CUdevice device, CUdevice peer), *can = 1)
DOES(cuDeviceTotalMem, (size_t * bytes, CUdevice device), *bytes = memory_bytes)
DOES(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device), *context = thing)
DOES(cuDevicePrimaryCtxRelease, (CUdevice device), )
DOES(cuCtxSetCurrent, (CUcontext context), current = context)
DOES(cuCtxGetCurrent, (CUcontext * context), *context = current)
DOES(cuCtxSynchronize, (void), )
DOES(cuModuleLoadData, (CUmodule * module, const void *image), *module = thing)
DOES(cuModuleUnload, (CUmodule module), )
DOES(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char *name),
     *function = thing)
DOES(cuFuncSetAttribute, (CUfunction function, CUfunction_attribute attribute, int value), )
DOES(cuFuncGetAttribute, (int *value, CUfunction_attribute attribute, CUfunction function),
     *value = 0)
DOES(cuOccupancyMaxActiveBlocksPerMultiprocessor,
     (int *blocks, CUfunction function, int threads, size_t shared_bytes), *blocks = 1)
DOES(cuMemGetInfo, (size_t * free_bytes, size_t *total_bytes),
     *free_bytes = *total_bytes = memory_bytes)
DOES(cuMemGetAllocationGranularity,
     (size_t * bytes, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option),
     *bytes = 2 << 20)
DOES(cuMemRelease, (CUmemGenericAllocationHandle pages), close((int)pages - 1))
DOES(cuMemUnmap, (CUdeviceptr address, size_t bytes), )
DOES(cuMemSetAccess,
     (CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count), )
DOES(cuMemHostGetDevicePointer, (CUdeviceptr * address, void *memory, unsigned flags),
     *address = (CUdeviceptr)(uintptr_t)memory)
DOES(cuStreamCreate, (CUstream * stream, unsigned flags), *stream = thing)
DOES(cuStreamDestroy, (CUstream stream), )
DOES(cuStreamQuery, (CUstream stream), )
DOES(cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus *status),
     *status = capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE)
DOES(cuStreamBeginCapture, (CUstream stream, CUstreamCaptureMode mode), capturing = true)
DOES(cuStreamEndCapture, (CUstream stream, CUgraph *graph), capturing = false; *graph = thing)
DOES(cuGraphInstantiateWithFlags,
     (CUgraphExec * executable, CUgraph graph, unsigned long long flags), *executable = thing)
DOES(cuGraphLaunch, (CUgraphExec executable, CUstream stream), )
DOES(cuGraphExecDestroy, (CUgraphExec executable), )
DOES(cuGraphDestroy, (CUgraph graph), )
DOES(cuEventSynchronize, (CUevent event), )
FAILS(cuModuleGetGlobal, (CUdeviceptr * address, size_t *bytes, CUmodule module, const char *name))
FAILS(cuPointerGetAttribute, (void *value, CUpointer_attribute attribute, CUdeviceptr address))
DOES(cuDeviceGetPCIBusId, (char *text, int bytes, CUdevice device),
     snprintf(text, (size_t)bytes, "0000:1B:00.0"))

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = 9;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = 0;
        break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = 132;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        *value = 232448;
        break;
    default:
        *value = 1;
    }
    return CUDA_SUCCESS;
}

static bool is_lag(const char *variable, const mm_cuda_forward_args *args) {
    const char *lag = getenv(variable);
    return lag && strtol(lag, NULL, 10) == args->lag;
}

/* Without a context nothing may be launched. Forwards alone are cooperative launches. */
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments,
                          void **extra) {
    if (config && config->numAttrs) {
        const mm_cuda_forward_args *args = arguments[0];
        pace_us = is_lag("FAKE_CUDA_FAST_LAG", args) ? 5 : 10;
        if (is_lag("FAKE_CUDA_WRONG_LAG", args))
            *(char *)args->rank[0].y = 0;
    }
    return current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CUstream stream, void **arguments, void **extra) {
    return cuLaunchKernelEx(NULL, function, arguments, extra);
}

static struct {
    void *memory;
    size_t bytes;
} mappings[MAX_MAPPINGS];

static CUresult map(size_t bytes, void **memory) {
    for (int i = 0; current && i < MAX_MAPPINGS; i++) {
        if (mappings[i].memory)
            continue;
        *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (*memory == MAP_FAILED)
            break;
        mappings[i].memory = *memory;
        mappings[i].bytes = bytes;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult unmap(void *memory) {
    for (int i = 0; i < MAX_MAPPINGS; i++)
        if (memory && mappings[i].memory == memory) {
            munmap(memory, mappings[i].bytes);
            mappings[i].memory = NULL;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes) {
    void *memory;
    const CUresult result = map(bytes, &memory);
    if (result == CUDA_SUCCESS)
        *address = (CUdeviceptr)(uintptr_t)memory;
    return result;
}

CUresult cuMemFree(CUdeviceptr address) {
    return unmap((void *)(uintptr_t)address);
}

/* Pages are a memfd, so that processes share them; a handle is its descriptor + 1. */
CUresult cuMemCreate(CUmemGenericAllocationHandle *pages, size_t bytes,
                     const CUmemAllocationProp *prop, unsigned long long flags) {
    const int fd = memfd_create("pages", MFD_CLOEXEC);
    *pages = (CUmemGenericAllocationHandle)fd + 1;
    return ftruncate(fd, (off_t)bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle pages,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    *(int *)shareable = dup((int)pages - 1);
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *pages, void *shareable,
                                        CUmemAllocationHandleType type) {
    *pages = (CUmemGenericAllocationHandle)dup((int)(uintptr_t)shareable) + 1;
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                  CUmemGenericAllocationHandle pages, unsigned long long flags) {
    void *const mapped =
        mmap((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_FIXED | MAP_NORESERVE, (int)pages - 1, (off_t)offset);
    return mapped == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment,
                             CUdeviceptr wanted, unsigned long long flags) {
    return cuMemAlloc(address, bytes);
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    return cuMemFree(address);
}

CUresult cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) {
    return map(bytes, memory);
}

CUresult cuMemFreeHost(void *memory) {
    return unmap(memory);
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) {
    memcpy((void *)(uintptr_t)to, from, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) {
    memcpy(to, (const void *)(uintptr_t)from, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    return cuMemcpyHtoD(to, from, bytes);
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return cuMemcpyDtoH(to, from, bytes);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return bytes > MOST_FILLED ? CUDA_SUCCESS
                               : cuMemcpyHtoD(to, (const void *)(uintptr_t)from, bytes);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    if (bytes <= MOST_FILLED && !capturing)
        memset((void *)(uintptr_t)to, value, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t words, CUstream stream) {
    for (size_t i = 0; words <= MOST_FILLED / 4 && i < words; i++)
        memcpy((char *)(uintptr_t)to + 4 * i, &value, 4);
    return CUDA_SUCCESS;
}

/* What waits for a stream that is being captured ends the capture. */
CUresult cuStreamSynchronize(CUstream stream) {
    return capturing ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* How much slower events are by now. */
static double drift(void) {
    const char *text = getenv("FAKE_CUDA_DRIFT");
    const int half = text ? (int)strtol(text, NULL, 10) / 2 : 0;
    return half > 0 ? 1.5 - 0.5 * abs(events % (2 * half) - half) / half : 1;
}

/* An event is a time, which the handle points to. */
CUresult cuEventCreate(CUevent *event, unsigned flags) {
    double *time = malloc(sizeof *time);
    *event = (CUevent)(void *)time;
    return time ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static double *time_of(CUevent event) {
    return (double *)(void *)event;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    events++;
    *time_of(event) = clock_us += pace_us * drift();
    return CUDA_SUCCESS;
}

DOES(cuEventDestroy, (CUevent event), free(event))
DOES(cuEventElapsedTime, (float *milliseconds, CUevent start, CUevent end),
     *milliseconds = (float)(0.001 * (*time_of(end) - *time_of(start))))
/* NOLINTEND(misc-unused-parameters) */
