/* SPDX-License-Identifier: Apache-2.0 */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

#include "cuda/cubins.h"

fake_gpu fake;

/* CUfunction is opaque: these are the addresses of names. */
static const char *const stage_name = "stage";

static CUresult allocate(void **memory, size_t bytes) {
    if (fake.allocations_left == 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    fake.allocations_left--;
    *memory = aligned_alloc(1024, (bytes + 1023) / 1024 * 1024);
    if (!*memory)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(*memory, 0xA5, bytes);
    fake.allocations++;
    return CUDA_SUCCESS;
}

static CUresult mem_alloc(CUdeviceptr *address, size_t bytes) {
    void *memory = NULL;
    const CUresult result = allocate(&memory, bytes);
    *address = (CUdeviceptr)(uintptr_t)memory;
    return result;
}

static CUresult mem_free(CUdeviceptr address) {
    free(fake_memory(address));
    fake.allocations--;
    return CUDA_SUCCESS;
}

static CUresult host_alloc(void **memory, size_t bytes, unsigned flags) {
    return flags == (CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP)
               ? allocate(memory, bytes)
               : CUDA_ERROR_INVALID_VALUE;
}

static CUresult host_free(void *memory) {
    free(memory);
    fake.allocations--;
    return CUDA_SUCCESS;
}

static CUresult host_address(CUdeviceptr *address, void *memory, unsigned flags) {
    *address = (CUdeviceptr)(uintptr_t)memory;
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static CUresult to_device(CUdeviceptr to, const void *from, size_t bytes) {
    memcpy(fake_memory(to), from, bytes);
    return CUDA_SUCCESS;
}

static CUresult to_host(void *to, CUdeviceptr from, size_t bytes) {
    memcpy(to, fake_memory(from), bytes);
    return CUDA_SUCCESS;
}

static CUresult set_bytes(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    (void)stream;
    memset(fake_memory(to), value, bytes);
    return CUDA_SUCCESS;
}

static CUresult set_words(CUdeviceptr to, unsigned value, size_t words, CUstream stream) {
    (void)stream;
    for (size_t i = 0; i < words; i++)
        ((unsigned *)fake_memory(to))[i] = value;
    return CUDA_SUCCESS;
}

static CUresult synchronize(void) {
    return CUDA_SUCCESS;
}

static CUresult function_attribute(int *value, CUfunction_attribute attribute,
                                   CUfunction function) {
    (void)function;
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? FAKE_THREADS : 0;
    return CUDA_SUCCESS;
}

static CUresult occupancy(int *blocks, CUfunction function, int threads, size_t shared_bytes) {
    (void)function;
    *blocks = threads == FAKE_THREADS && shared_bytes <= 232448 ? fake.blocks_resident : 0;
    return CUDA_SUCCESS;
}

static CUresult launch(const CUlaunchConfig *config, CUfunction function, void **arguments,
                       void **extra) {
    (void)extra;
    fake.launches++;
    fake.last.config = *config;
    fake.last.cooperative = config->numAttrs == 1 &&
                            config->attrs[0].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE &&
                            config->attrs[0].value.cooperative == 1;
    fake.last.kernel = (const char *)function;
    if (strcmp(fake.last.kernel, stage_name) == 0)
        fake.last.stage = *(const mm_cuda_stage_args *)arguments[0];
    else
        fake.last.forward = *(const mm_cuda_forward_args *)arguments[0];
    return CUDA_SUCCESS;
}

static CUresult error_name(CUresult result, const char **name) {
    *name = result == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
    return CUDA_SUCCESS;
}

static CUresult error_text(CUresult result, const char **text) {
    (void)result;
    *text = "as the fake says";
    return CUDA_SUCCESS;
}

mm_cuda_device fake_open(int32_t ordinal) {
    fake = (fake_gpu){.allocations_left = -1, .blocks_resident = 1};
    mm_cu = (mm_cuda_driver){
        .cuMemAlloc = mem_alloc,
        .cuMemFree = mem_free,
        .cuMemHostAlloc = host_alloc,
        .cuMemFreeHost = host_free,
        .cuMemHostGetDevicePointer = host_address,
        .cuMemcpyHtoD = to_device,
        .cuMemcpyDtoH = to_host,
        .cuMemsetD8Async = set_bytes,
        .cuMemsetD32Async = set_words,
        .cuCtxSynchronize = synchronize,
        .cuFuncGetAttribute = function_attribute,
        .cuOccupancyMaxActiveBlocksPerMultiprocessor = occupancy,
        .cuLaunchKernelEx = launch,
        .cuGetErrorName = error_name,
        .cuGetErrorString = error_text,
    };
    return (mm_cuda_device){
        .ordinal = ordinal, .multiprocessors = 132, .max_ctas = 132, .shared_bytes = 232448};
}

megamoe_status mm_cuda_enter(const mm_cuda_device *device, CUcontext *previous) {
    (void)device;
    *previous = NULL;
    fake.entered++;
    return MEGAMOE_OK;
}

void mm_cuda_leave(CUcontext previous) {
    (void)previous;
    fake.entered--;
}

megamoe_status mm_cuda_function(mm_cuda_device *device, const char *cubin, const char *entry,
                                CUfunction *function) {
    (void)device;
    const bool stage = strcmp(cubin, stage_name) == 0;
    if (strcmp(entry, stage ? "mm_stage" : "mm_forward") != 0)
        return mm_fail(MEGAMOE_EDEVICE, "'%s' of '%s'", entry, cubin);
    fake.functions++;
    *function = (CUfunction)(uintptr_t)cubin;
    return MEGAMOE_OK;
}

megamoe_status mm_cuda_allow_shared(const mm_cuda_device *device, CUfunction function,
                                    int32_t bytes) {
    (void)function;
    return bytes <= device->shared_bytes ? MEGAMOE_OK
                                         : mm_fail(MEGAMOE_EUNSUPPORTED, "%d bytes", bytes);
}
