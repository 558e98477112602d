/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A driver that shows GPUs and computes nothing. Environment variables, read at every call:
 *   FAKE_CUDA_GPUS        how many (1)
 *   FAKE_CUDA_CAPABILITY  major * 10 + minor (90)
 *   FAKE_CUDA_VERSION     of the driver (99000)
 *   FAKE_CUDA_FAIL        name of a function that fails: cuModuleLoadData, cuDevicePrimaryCtxRetain
 * cuModuleGetFunction knows every function except "missing".
 */
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/driver.h"

#define X(name, symbol, arguments) CUresult name arguments __asm__(symbol);
MM_CUDA_FUNCTIONS(X)
#undef X

/* What tests look at, found with dlsym. */
atomic_int fake_contexts; /* retained */
atomic_int fake_modules;  /* loaded */
int fake_shared_bytes;    /* last asked for */

static _Thread_local CUcontext current;

static int setting(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? (int)strtol(text, NULL, 10) : otherwise;
}

static bool fails(const char *function) {
    const char *text = getenv("FAKE_CUDA_FAIL");
    return text && strcmp(text, function) == 0;
}

/* Addresses that are never followed. */
static char contexts[16], modules[16], functions[16];

CUresult cuInit(unsigned flags) {
    (void)flags;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    *version = setting("FAKE_CUDA_VERSION", 99000);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult result, const char **name) {
    *name = result == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult result, const char **text) {
    (void)result;
    *text = "as the test wants";
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = setting("FAKE_CUDA_GPUS", 1);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int bytes, CUdevice device) {
    snprintf(name, (size_t)bytes, "Fake GPU %d", device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = setting("FAKE_CUDA_CAPABILITY", 90) / 10;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = setting("FAKE_CUDA_CAPABILITY", 90) % 10;
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

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    *uuid = (CUuuid){{'f', 'a', 'k', 'e', (char)device}};
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    (void)device;
    *bytes = (size_t)141 << 30;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    if (fails("cuDevicePrimaryCtxRetain"))
        return CUDA_ERROR_OUT_OF_MEMORY;
    *context = (CUcontext)(void *)&contexts[device];
    atomic_fetch_add(&fake_contexts, 1);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    (void)device;
    atomic_fetch_sub(&fake_contexts, 1);
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    current = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = current;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    if (fails("cuModuleLoadData") || memcmp(image, "\177ELF", 4) != 0)
        return CUDA_ERROR_INVALID_IMAGE;
    *module = (CUmodule)(void *)&modules[0];
    atomic_fetch_add(&fake_modules, current != NULL);
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
    (void)module;
    atomic_fetch_sub(&fake_modules, current != NULL);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    (void)module;
    if (strcmp(name, "missing") == 0)
        return CUDA_ERROR_NOT_FOUND;
    *function = (CUfunction)(void *)&functions[0];
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    (void)function;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        fake_shared_bytes = value;
    return CUDA_SUCCESS;
}
