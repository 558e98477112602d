/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "fake.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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

/* ---- pages: a handle is a memfd + 1 ---- */

enum { PAGE = 2 << 20, GPUS = 4 };

static CUresult take_one(void) {
    if (fake.allocations_left == 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    fake.allocations_left--;
    fake.allocations++;
    return CUDA_SUCCESS;
}

static CUresult device_count(int *count) {
    *count = GPUS;
    return CUDA_SUCCESS;
}

static CUresult device_get(CUdevice *device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

static CUresult device_uuid(CUuuid *uuid, CUdevice device) {
    *uuid = (CUuuid){{(char)device}};
    return CUDA_SUCCESS;
}

static CUresult device_attribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ? !fake.no_pages
             : attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
                 ? !fake.no_descriptors
                 : 0;
    return CUDA_SUCCESS;
}

static CUresult can_access(int *can, CUdevice device, CUdevice peer) {
    *can = (fake.unreachable >> device & 1) == 0 && (fake.unreachable >> peer & 1) == 0;
    return CUDA_SUCCESS;
}

static CUresult granularity(size_t *bytes, const CUmemAllocationProp *prop,
                            CUmemAllocationGranularity_flags option) {
    *bytes = PAGE;
    return prop->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
                   option == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}

static CUresult pages_create(CUmemGenericAllocationHandle *handle, size_t bytes,
                             const CUmemAllocationProp *prop, unsigned long long flags) {
    if (bytes % PAGE || flags || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        prop->allocFlags.gpuDirectRDMACapable)
        return CUDA_ERROR_INVALID_VALUE;
    const CUresult taken = take_one();
    if (taken != CUDA_SUCCESS)
        return taken;
    const int fd = memfd_create("pages", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = (CUmemGenericAllocationHandle)fd + 1;
    return CUDA_SUCCESS;
}

static int fd_of(CUmemGenericAllocationHandle handle) {
    return (int)handle - 1;
}

static CUresult pages_release(CUmemGenericAllocationHandle handle) {
    close(fd_of(handle));
    fake.allocations--;
    return CUDA_SUCCESS;
}

static CUresult pages_export(void *shareable, CUmemGenericAllocationHandle handle,
                             CUmemAllocationHandleType type, unsigned long long flags) {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags)
        return CUDA_ERROR_INVALID_VALUE;
    *(int *)shareable = dup(fd_of(handle));
    return CUDA_SUCCESS;
}

static CUresult pages_import(CUmemGenericAllocationHandle *handle, void *shareable,
                             CUmemAllocationHandleType type) {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    const CUresult taken = take_one();
    if (taken == CUDA_SUCCESS)
        *handle = (CUmemGenericAllocationHandle)dup((int)(uintptr_t)shareable) + 1;
    return taken;
}

static CUresult reserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wanted,
                        unsigned long long flags) {
    if (bytes % PAGE || alignment || wanted || flags)
        return CUDA_ERROR_INVALID_VALUE;
    const CUresult taken = take_one();
    if (taken == CUDA_SUCCESS)
        *address = (CUdeviceptr)(uintptr_t)mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS,
                                                -1, 0);
    return taken;
}

static CUresult unreserve(CUdeviceptr address, size_t bytes) {
    munmap(fake_memory(address), bytes);
    fake.allocations--;
    return CUDA_SUCCESS;
}

static CUresult pages_map(CUdeviceptr address, size_t bytes, size_t offset,
                          CUmemGenericAllocationHandle handle, unsigned long long flags) {
    struct stat status;
    if (offset || flags || fstat(fd_of(handle), &status) != 0 || (size_t)status.st_size != bytes)
        return CUDA_ERROR_INVALID_VALUE;
    /* Nothing is to be seen of it before access is given. */
    return mmap(fake_memory(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, fd_of(handle), 0) ==
                   MAP_FAILED
               ? CUDA_ERROR_INVALID_VALUE
               : CUDA_SUCCESS;
}

static CUresult pages_unmap(CUdeviceptr address, size_t bytes) {
    void *const hole = mmap(fake_memory(address), bytes, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return hole == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static CUresult set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access,
                           size_t count) {
    for (size_t i = 0; i < count; i++)
        if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
            access[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
            return CUDA_ERROR_INVALID_VALUE;
    const bool first = mprotect(fake_memory(address), bytes, PROT_READ | PROT_WRITE) == 0;
    fake.granted += (int32_t)count;
    return first ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
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
        .cuDeviceGetCount = device_count,
        .cuDeviceGet = device_get,
        .cuDeviceGetUuid = device_uuid,
        .cuDeviceGetAttribute = device_attribute,
        .cuDeviceCanAccessPeer = can_access,
        .cuMemGetAllocationGranularity = granularity,
        .cuMemCreate = pages_create,
        .cuMemRelease = pages_release,
        .cuMemExportToShareableHandle = pages_export,
        .cuMemImportFromShareableHandle = pages_import,
        .cuMemAddressReserve = reserve,
        .cuMemAddressFree = unreserve,
        .cuMemMap = pages_map,
        .cuMemUnmap = pages_unmap,
        .cuMemSetAccess = set_access,
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
    return (mm_cuda_device){.ordinal = ordinal,
                            .device = ordinal,
                            .uuid = {{(char)ordinal}},
                            .model = "Fake H200",
                            .multiprocessors = 132,
                            .max_ctas = 132,
                            .shared_bytes = 232448};
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
