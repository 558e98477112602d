/* SPDX-License-Identifier: Apache-2.0 */
/* What the CUDA backend uses of the driver's interface, with the driver's own names and numbers. */
#ifndef MM_CUDA_DRIVER_LIST_H
#define MM_CUDA_DRIVER_LIST_H

/* X(name, value) */
#define MM_CUDA_CONSTANTS(X)                                                                       \
    X(CUDA_SUCCESS, 0)                                                                             \
    X(CUDA_ERROR_INVALID_VALUE, 1)                                                                 \
    X(CUDA_ERROR_OUT_OF_MEMORY, 2)                                                                 \
    X(CUDA_ERROR_NO_DEVICE, 100)                                                                   \
    X(CUDA_ERROR_INVALID_IMAGE, 200)                                                               \
    X(CUDA_ERROR_NO_BINARY_FOR_GPU, 209)                                                           \
    X(CUDA_ERROR_NOT_FOUND, 500)                                                                   \
    X(CUDA_ERROR_NOT_READY, 600)                                                                   \
    X(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, 720)                                                \
    X(CUDA_ERROR_NOT_SUPPORTED, 801)                                                               \
    X(CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 13)                                                          \
    X(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16)                                                \
    X(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 36)                                                   \
    X(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 37)                                             \
    X(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 38)                                                       \
    X(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75)                                            \
    X(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76)                                            \
    X(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 97)                                   \
    X(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 102)                                \
    X(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 103)                        \
    X(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 0)                                                  \
    X(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, 1)                                                      \
    X(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, 3)                                                       \
    X(CU_FUNC_ATTRIBUTE_NUM_REGS, 4)                                                               \
    X(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 8)                                          \
    X(CU_LAUNCH_ATTRIBUTE_COOPERATIVE, 2)                                                          \
    X(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, 4)                                                    \
    X(CU_MEMHOSTALLOC_PORTABLE, 1)                                                                 \
    X(CU_MEMHOSTALLOC_DEVICEMAP, 2)                                                                \
    X(CU_MEM_ALLOCATION_TYPE_PINNED, 1)                                                            \
    X(CU_MEM_LOCATION_TYPE_DEVICE, 1)                                                              \
    X(CU_MEM_HANDLE_TYPE_NONE, 0)                                                                  \
    X(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 1)                                                 \
    X(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, 3)                                                       \
    X(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, 1)                                                     \
    X(CU_STREAM_DEFAULT, 0)                                                                        \
    X(CU_STREAM_NON_BLOCKING, 1)                                                                   \
    X(CU_STREAM_CAPTURE_STATUS_NONE, 0)                                                            \
    X(CU_STREAM_CAPTURE_STATUS_ACTIVE, 1)                                                          \
    X(CU_STREAM_CAPTURE_MODE_GLOBAL, 0)                                                            \
    X(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, 1)                                                      \
    X(CU_STREAM_CAPTURE_MODE_RELAXED, 2)                                                           \
    X(CU_EVENT_DEFAULT, 0)                                                                         \
    X(CU_EVENT_DISABLE_TIMING, 2)                                                                  \
    X(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2)                                                         \
    X(CU_POINTER_ATTRIBUTE_DEVICE_POINTER, 3)                                                      \
    X(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9)                                                      \
    X(CU_MEMORYTYPE_HOST, 1)                                                                       \
    X(CU_MEMORYTYPE_DEVICE, 2)

/* X(name, symbol, arguments); every function returns CUresult. */
#define MM_CUDA_FUNCTIONS(X)                                                                       \
    X(cuInit, "cuInit", (unsigned flags))                                                          \
    X(cuDriverGetVersion, "cuDriverGetVersion", (int *version))                                    \
    X(cuGetErrorName, "cuGetErrorName", (CUresult result, const char **name))                      \
    X(cuGetErrorString, "cuGetErrorString", (CUresult result, const char **text))                  \
    X(cuDeviceGetCount, "cuDeviceGetCount", (int *count))                                          \
    X(cuDeviceGet, "cuDeviceGet", (CUdevice * device, int ordinal))                                \
    X(cuDeviceGetName, "cuDeviceGetName", (char *name, int bytes, CUdevice device))                \
    X(cuDeviceGetAttribute, "cuDeviceGetAttribute",                                                \
      (int *value, CUdevice_attribute attribute, CUdevice device))                                 \
    X(cuDeviceGetUuid, "cuDeviceGetUuid_v2", (CUuuid * uuid, CUdevice device))                     \
    X(cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer", (int *can, CUdevice device, CUdevice peer))  \
    X(cuDeviceTotalMem, "cuDeviceTotalMem_v2", (size_t * bytes, CUdevice device))                  \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain",                                        \
      (CUcontext * context, CUdevice device))                                                      \
    X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (CUdevice device))                \
    X(cuCtxSetCurrent, "cuCtxSetCurrent", (CUcontext context))                                     \
    X(cuCtxGetCurrent, "cuCtxGetCurrent", (CUcontext * context))                                   \
    X(cuCtxSynchronize, "cuCtxSynchronize", (void))                                                \
    X(cuModuleLoadData, "cuModuleLoadData", (CUmodule * module, const void *image))                \
    X(cuModuleUnload, "cuModuleUnload", (CUmodule module))                                         \
    X(cuModuleGetFunction, "cuModuleGetFunction",                                                  \
      (CUfunction * function, CUmodule module, const char *name))                                  \
    X(cuModuleGetGlobal, "cuModuleGetGlobal_v2",                                                   \
      (CUdeviceptr * address, size_t * bytes, CUmodule module, const char *name))                  \
    X(cuFuncSetAttribute, "cuFuncSetAttribute",                                                    \
      (CUfunction function, CUfunction_attribute attribute, int value))                            \
    X(cuFuncGetAttribute, "cuFuncGetAttribute",                                                    \
      (int *value, CUfunction_attribute attribute, CUfunction function))                           \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor, "cuOccupancyMaxActiveBlocksPerMultiprocessor",  \
      (int *blocks, CUfunction function, int threads, size_t shared_bytes))                        \
    X(cuLaunchKernelEx, "cuLaunchKernelEx",                                                        \
      (const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra))         \
    X(cuMemGetInfo, "cuMemGetInfo_v2", (size_t * free_bytes, size_t * total_bytes))                \
    X(cuMemAlloc, "cuMemAlloc_v2", (CUdeviceptr * address, size_t bytes))                          \
    X(cuMemFree, "cuMemFree_v2", (CUdeviceptr address))                                            \
    X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity",                              \
      (size_t * bytes, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option))  \
    X(cuMemCreate, "cuMemCreate",                                                                  \
      (CUmemGenericAllocationHandle * handle, size_t bytes, const CUmemAllocationProp *prop,       \
       unsigned long long flags))                                                                  \
    X(cuMemRelease, "cuMemRelease", (CUmemGenericAllocationHandle handle))                         \
    X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle",                                \
      (void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,       \
       unsigned long long flags))                                                                  \
    X(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle",                            \
      (CUmemGenericAllocationHandle * handle, void *shareable, CUmemAllocationHandleType type))    \
    X(cuMemAddressReserve, "cuMemAddressReserve",                                                  \
      (CUdeviceptr * address, size_t bytes, size_t alignment, CUdeviceptr wanted,                  \
       unsigned long long flags))                                                                  \
    X(cuMemAddressFree, "cuMemAddressFree", (CUdeviceptr address, size_t bytes))                   \
    X(cuMemMap, "cuMemMap",                                                                        \
      (CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,      \
       unsigned long long flags))                                                                  \
    X(cuMemUnmap, "cuMemUnmap", (CUdeviceptr address, size_t bytes))                               \
    X(cuMemSetAccess, "cuMemSetAccess",                                                            \
      (CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count))            \
    X(cuMemHostAlloc, "cuMemHostAlloc", (void **memory, size_t bytes, unsigned flags))             \
    X(cuMemFreeHost, "cuMemFreeHost", (void *memory))                                              \
    X(cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2",                                   \
      (CUdeviceptr * address, void *memory, unsigned flags))                                       \
    X(cuMemcpyHtoD, "cuMemcpyHtoD_v2", (CUdeviceptr to, const void *from, size_t bytes))           \
    X(cuMemcpyDtoH, "cuMemcpyDtoH_v2", (void *to, CUdeviceptr from, size_t bytes))                 \
    X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2",                                                   \
      (CUdeviceptr to, const void *from, size_t bytes, CUstream stream))                           \
    X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2",                                                   \
      (void *to, CUdeviceptr from, size_t bytes, CUstream stream))                                 \
    X(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2",                                                   \
      (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))                           \
    X(cuMemsetD8Async, "cuMemsetD8Async",                                                          \
      (CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream))                        \
    X(cuMemsetD32Async, "cuMemsetD32Async",                                                        \
      (CUdeviceptr to, unsigned value, size_t words, CUstream stream))                             \
    X(cuPointerGetAttribute, "cuPointerGetAttribute",                                              \
      (void *value, CUpointer_attribute attribute, CUdeviceptr address))                           \
    X(cuStreamCreate, "cuStreamCreate", (CUstream * stream, unsigned flags))                       \
    X(cuStreamDestroy, "cuStreamDestroy_v2", (CUstream stream))                                    \
    X(cuStreamSynchronize, "cuStreamSynchronize", (CUstream stream))                               \
    X(cuStreamQuery, "cuStreamQuery", (CUstream stream))                                           \
    X(cuStreamIsCapturing, "cuStreamIsCapturing",                                                  \
      (CUstream stream, CUstreamCaptureStatus * status))                                           \
    X(cuStreamBeginCapture, "cuStreamBeginCapture_v2",                                             \
      (CUstream stream, CUstreamCaptureMode mode))                                                 \
    X(cuStreamEndCapture, "cuStreamEndCapture", (CUstream stream, CUgraph * graph))                \
    X(cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags",                                  \
      (CUgraphExec * executable, CUgraph graph, unsigned long long flags))                         \
    X(cuGraphLaunch, "cuGraphLaunch", (CUgraphExec executable, CUstream stream))                   \
    X(cuGraphExecDestroy, "cuGraphExecDestroy", (CUgraphExec executable))                          \
    X(cuGraphDestroy, "cuGraphDestroy", (CUgraph graph))                                           \
    X(cuEventCreate, "cuEventCreate", (CUevent * event, unsigned flags))                           \
    X(cuEventRecord, "cuEventRecord", (CUevent event, CUstream stream))                            \
    X(cuEventSynchronize, "cuEventSynchronize", (CUevent event))                                   \
    X(cuEventElapsedTime, "cuEventElapsedTime", (float *milliseconds, CUevent start, CUevent end)) \
    X(cuEventDestroy, "cuEventDestroy_v2", (CUevent event))

/* X(struct, member, offset in bytes) */
#define MM_CUDA_OFFSETS(X)                                                                         \
    X(CUlaunchAttribute, value, 8)                                                                 \
    X(CUlaunchConfig, sharedMemBytes, 24)                                                          \
    X(CUlaunchConfig, hStream, 32)                                                                 \
    X(CUlaunchConfig, attrs, 40)                                                                   \
    X(CUlaunchConfig, numAttrs, 48)                                                                \
    X(CUmemAllocationProp, requestedHandleTypes, 4)                                                \
    X(CUmemAllocationProp, location, 8)                                                            \
    X(CUmemAllocationProp, allocFlags, 24)                                                         \
    X(CUmemAccessDesc, flags, 8)

/* X(struct, bytes) */
#define MM_CUDA_SIZES(X)                                                                           \
    X(CUlaunchAttributeValue, 64)                                                                  \
    X(CUlaunchAttribute, 72)                                                                       \
    X(CUlaunchConfig, 56)                                                                          \
    X(CUmemAllocationProp, 32)                                                                     \
    X(CUmemAccessDesc, 12)                                                                         \
    X(CUuuid, 16)

#endif
