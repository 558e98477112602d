/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "cuda/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define X(type, member, bytes)                                                                     \
    _Static_assert(offsetof(type, member) == (bytes), "as the driver has it");
MM_CUDA_OFFSETS(X)
#undef X
#define X(type, bytes) _Static_assert(sizeof(type) == (bytes), "as the driver has it");
MM_CUDA_SIZES(X)
#undef X

mm_cuda_driver mm_cu;

/* What the only attempt in this process found; written inside pthread_once. */
static megamoe_status opened;
static char why_not[512];

/* ISO C has no conversion between pointers to objects and to functions; POSIX has. */
#define FIND(library, symbol, function)                                                            \
    do {                                                                                           \
        void *found = dlsym((library), (symbol));                                                  \
        if (!found)                                                                                \
            return (symbol);                                                                       \
        memcpy(&(function), &found, sizeof found);                                                 \
    } while (0)

/* The first symbol that the library lacks, or NULL. */
static const char *fill(void *library, mm_cuda_driver *driver) {
#define X(name, symbol, arguments) FIND(library, symbol, driver->name);
    MM_CUDA_FUNCTIONS(X)
#undef X
    return NULL;
}

megamoe_status mm_cuda_driver_load(const char *library, mm_cuda_driver *driver) {
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return mm_fail(MEGAMOE_EUNSUPPORTED, "no CUDA driver: %s", dlerror());
    const char *lacking = fill(handle, driver);
    if (!lacking)
        return MEGAMOE_OK;
    dlclose(handle);
    return mm_fail(MEGAMOE_EUNSUPPORTED, "%s lacks %s: expected the driver of CUDA 12 or later",
                   library, lacking);
}

static megamoe_status open_driver(void) {
    MM_TRY(mm_cuda_driver_load("libcuda.so.1", &mm_cu));
    const CUresult result = mm_cu.cuInit(0);
    if (result == CUDA_ERROR_NO_DEVICE)
        return mm_fail(MEGAMOE_EUNSUPPORTED, "the CUDA driver finds no GPU");
    MM_CUDA_TRY(result, "initialising the CUDA driver");
    return MEGAMOE_OK;
}

static void open_once(void) {
    opened = open_driver();
    snprintf(why_not, sizeof why_not, "%s", opened == MEGAMOE_OK ? "" : megamoe_last_error());
}

megamoe_status mm_cuda_driver_open(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_once);
    return opened == MEGAMOE_OK ? MEGAMOE_OK : mm_fail(opened, "%s", why_not);
}

megamoe_status(mm_cuda_fail)(CUresult result, const char *format, ...) {
    char what[512];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    const char *name = NULL, *text = NULL;
    if (mm_cu.cuGetErrorName(result, &name) != CUDA_SUCCESS || !name)
        name = "unknown error";
    if (mm_cu.cuGetErrorString(result, &text) != CUDA_SUCCESS || !text)
        text = "no description";
    return mm_fail(result == CUDA_ERROR_OUT_OF_MEMORY ? MEGAMOE_ENOMEM : MEGAMOE_EDEVICE,
                   "%s: %s (%d, %s)", what, name, result, text);
}
