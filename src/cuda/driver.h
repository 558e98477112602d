/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA driver, opened when it is first needed. Nothing is linked and no header of the toolkit
 * is used; types bear the driver's names. tests/cuda checks them against cuda.h where there is one.
 */
#ifndef MM_CUDA_DRIVER_H
#define MM_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "cuda/driver_list.h"

typedef int CUresult, CUdevice, CUdevice_attribute, CUfunction_attribute, CUpointer_attribute;
typedef int CUmemAllocationType, CUmemAllocationHandleType, CUmemLocationType, CUmemAccess_flags;
typedef int CUmemAllocationGranularity_flags;
typedef int CUstreamCaptureStatus, CUstreamCaptureMode, CUlaunchAttributeID;
typedef unsigned long long CUdeviceptr, CUmemGenericAllocationHandle;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;

enum {
#define X(name, value) name = (value),
    MM_CUDA_CONSTANTS(X)
#undef X
};

typedef struct CUuuid {
    char bytes[16];
} CUuuid;

typedef struct CUmemLocation {
    CUmemLocationType type;
    int id;
} CUmemLocation;

typedef struct CUmemAllocationProp {
    CUmemAllocationType type;
    CUmemAllocationHandleType requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType, gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct CUmemAccessDesc {
    CUmemLocation location;
    CUmemAccess_flags flags;
} CUmemAccessDesc;

typedef union CUlaunchAttributeValue {
    char pad[64];
    int cooperative;
    struct {
        unsigned x, y, z;
    } clusterDim;
} CUlaunchAttributeValue;

typedef struct CUlaunchAttribute {
    CUlaunchAttributeID id;
    char pad[4];
    CUlaunchAttributeValue value;
} CUlaunchAttribute;

typedef struct CUlaunchConfig {
    unsigned gridDimX, gridDimY, gridDimZ;
    unsigned blockDimX, blockDimY, blockDimZ;
    unsigned sharedMemBytes;
    CUstream hStream;
    CUlaunchAttribute *attrs;
    unsigned numAttrs;
} CUlaunchConfig;

typedef struct mm_cuda_driver {
#define X(name, symbol, arguments) CUresult(*name) arguments;
    MM_CUDA_FUNCTIONS(X)
#undef X
} mm_cuda_driver;

/* Filled by the first mm_cuda_driver_open that succeeds, constant from then on. */
extern mm_cuda_driver mm_cu;

/*
 * Opens libcuda.so.1 and initialises the driver once in the process; later calls return what the
 * first one found. It is never closed. Thread: any.
 * MEGAMOE_EUNSUPPORTED without a driver or with one that lacks a function, MEGAMOE_EDEVICE if the
 * driver cannot be initialised.
 */
MEGAMOE_CHECKED megamoe_status mm_cuda_driver_open(void);

/* Fills a table from the library of that name and initialises nothing. */
MEGAMOE_CHECKED megamoe_status mm_cuda_driver_load(const char *library, mm_cuda_driver *driver);

/*
 * Records "what: CUDA_ERROR_NAME (the driver's text)". MEGAMOE_ENOMEM if the device has no memory
 * left, else MEGAMOE_EDEVICE.
 */
MEGAMOE_CHECKED megamoe_status mm_cuda_fail(CUresult result, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#ifdef __clang_analyzer__
static inline megamoe_status mm_cuda_failed(megamoe_status status) {
    if (status == MEGAMOE_OK)
        __builtin_unreachable();
    return status;
}
#define mm_cuda_fail(...) mm_cuda_failed(mm_cuda_fail(__VA_ARGS__))
#endif

/* MM_CUDA_TRY(mm_cu.cuMemAlloc(&address, bytes), "%zu bytes for the pool", bytes); */
#define MM_CUDA_TRY(call, ...)                                                                     \
    do {                                                                                           \
        const CUresult mm_cuda_result = (call);                                                    \
        if (mm_cuda_result != CUDA_SUCCESS)                                                        \
            return mm_cuda_fail(mm_cuda_result, __VA_ARGS__);                                      \
    } while (0)

/* For functions with a local `status` and one label that frees everything. */
#define MM_CUDA_TRY_GOTO(call, label, ...)                                                         \
    do {                                                                                           \
        const CUresult mm_cuda_result = (call);                                                    \
        if (mm_cuda_result != CUDA_SUCCESS) {                                                      \
            status = mm_cuda_fail(mm_cuda_result, __VA_ARGS__);                                    \
            goto label;                                                                            \
        }                                                                                          \
    } while (0)

#endif
