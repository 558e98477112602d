/* SPDX-License-Identifier: Apache-2.0 */
/* Opening GPUs, against the driver of fake_driver.c. */
#define _GNU_SOURCE
#include "cuda/device.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/cubins.h"
#include "t.h"

static void need_kernels(void) {
    if (mm_cubin_count == 0)
        T_SKIP("this build has no kernels");
    unsetenv("FAKE_CUDA_GPUS");
    unsetenv("FAKE_CUDA_CAPABILITY");
    unsetenv("FAKE_CUDA_VERSION");
    unsetenv("FAKE_CUDA_FAIL");
}

/* A variable of the fake driver. */
static void *of_driver(const char *name) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    void *found = driver ? dlsym(driver, name) : NULL;
    T_REQUIRE(found != NULL);
    return found;
}

static int count_of(const char *name) {
    return atomic_load((atomic_int *)of_driver(name));
}

static void fails(const char *name, megamoe_status status, const char *part) {
    megamoe_device *device = (megamoe_device *)&device;
    T_STATUS(megamoe_device_open(name, NULL, &device), status);
    T_CONTAINS(megamoe_last_error(), part);
    T_CHECK(device == NULL);
}

T_CASE(a_build_without_kernels_says_so) {
    if (mm_cubin_count > 0)
        T_SKIP("this build has kernels");
    fails("cuda", MEGAMOE_EUNSUPPORTED, "this build has no CUDA kernels");
    int32_t count;
    T_STATUS(megamoe_device_count("cuda", &count), MEGAMOE_EUNSUPPORTED);
}

T_CASE(opens_and_describes) {
    need_kernels();
    setenv("FAKE_CUDA_GPUS", "2", 1);
    int32_t count;
    T_OK(megamoe_device_count("cuda", &count));
    T_EQ_INT(count, 2);
    static const char *const names[] = {"cuda", "cuda:0", "cuda:1"};
    for (int i = 0; i < 3; i++) {
        const megamoe_device_options options = {
            .struct_size = sizeof options, .threads = 1, .max_ctas = 4 * i};
        megamoe_device *device;
        T_OK(megamoe_device_open(names[i], &options, &device));
        megamoe_device_info info = MEGAMOE_INIT(megamoe_device_info);
        T_OK(megamoe_device_describe(device, &info));
        T_EQ_STR(info.name, i < 2 ? "cuda:0" : "cuda:1");
        T_EQ_STR(info.model, i < 2 ? "Fake GPU 0" : "Fake GPU 1");
        T_EQ_STR(info.tier, "sm_90a");
        T_EQ_INT(info.threads, 1);
        T_EQ_INT(info.cuda_built, 1);
        T_EQ_INT(info.multiprocessors, 132);
        T_EQ_INT(info.max_ctas, i == 0 ? 132 : 4 * i);
        T_EQ_INT(10 * info.capability_major + info.capability_minor, 90);
        T_EQ_INT(info.driver_version, 99000);
        T_EQ_INT((int64_t)info.memory_bytes, (int64_t)141 << 30);
        T_EQ_INT(count_of("fake_contexts"), 1);
        megamoe_device_close(device);
        T_EQ_INT(count_of("fake_contexts"), 0);
    }
}

T_CASE(refuses_what_it_cannot_use) {
    need_kernels();
    fails("cuda:1", MEGAMOE_EUNSUPPORTED, "no cuda:1: the driver shows 1 GPU");
    setenv("FAKE_CUDA_GPUS", "0", 1);
    fails("cuda", MEGAMOE_EUNSUPPORTED, "no cuda:0: the driver shows 0 GPUs");
    unsetenv("FAKE_CUDA_GPUS");
    setenv("FAKE_CUDA_CAPABILITY", "100", 1);
    fails("cuda", MEGAMOE_EUNSUPPORTED, "cuda:0 is a Fake GPU 0 of compute capability 10.0");
    unsetenv("FAKE_CUDA_CAPABILITY");
    setenv("FAKE_CUDA_VERSION", "11080", 1);
    fails("cuda", MEGAMOE_EUNSUPPORTED, "the CUDA driver is for version 11.8");
    unsetenv("FAKE_CUDA_VERSION");
    setenv("FAKE_CUDA_FAIL", "cuDevicePrimaryCtxRetain", 1);
    fails("cuda", MEGAMOE_ENOMEM, "CUDA_ERROR_OUT_OF_MEMORY (2, as the test wants)");
    T_EQ_INT(count_of("fake_contexts"), 0);
}

T_CASE(refuses_too_many_blocks) {
    need_kernels();
    for (int i = 0; i < 2; i++) {
        const megamoe_device_options options = {.struct_size = sizeof options,
                                                .max_ctas = i ? -1 : 133};
        megamoe_device *device;
        T_STATUS(megamoe_device_open("cuda", &options, &device), MEGAMOE_EINVAL);
        T_CONTAINS(megamoe_last_error(), "expected 0..132");
    }
}

T_CASE(host_options_are_checked_too) {
    need_kernels();
    const megamoe_device_options options = {.struct_size = sizeof options, .threads = -1};
    megamoe_device *device;
    T_STATUS(megamoe_device_open("cuda", &options, &device), MEGAMOE_EINVAL);
    T_CHECK(device == NULL);
    T_EQ_INT(count_of("fake_contexts"), 0);
}

T_CASE(a_context_comes_back) {
    need_kernels();
    mm_cuda_device *device;
    T_OK(mm_cuda_open(0, 0, &device));
    CUcontext mine = (CUcontext)(void *)&device;
    T_EQ_INT(mm_cu.cuCtxSetCurrent(mine), CUDA_SUCCESS);
    CUcontext previous, now;
    T_OK(mm_cuda_enter(device, &previous));
    T_CHECK(mm_cu.cuCtxGetCurrent(&now) == CUDA_SUCCESS && now == device->context);
    mm_cuda_leave(previous);
    CUfunction function;
    T_OK(mm_cuda_function(device, mm_cubins[0].name, "mm_forward", &function));
    T_CHECK(mm_cu.cuCtxGetCurrent(&now) == CUDA_SUCCESS && now == mine);
    mm_cuda_close(device);
    T_CHECK(mm_cu.cuCtxGetCurrent(&now) == CUDA_SUCCESS && now == mine);
    T_EQ_INT(mm_cu.cuCtxSetCurrent(NULL), CUDA_SUCCESS);
}

T_CASE(kernels_are_loaded_once) {
    need_kernels();
    mm_cuda_device *device;
    T_OK(mm_cuda_open(0, 0, &device));
    T_EQ_INT(count_of("fake_modules"), 0);
    for (int i = 0; i < 2; i++) {
        CUfunction function;
        T_OK(mm_cuda_function(device, mm_cubins[0].name, "mm_forward", &function));
        T_CHECK(function != NULL);
        T_EQ_INT(count_of("fake_modules"), 1);
        T_OK(mm_cuda_allow_shared(device, function, 200000));
        T_EQ_INT(*(int *)of_driver("fake_shared_bytes"), 200000);
        T_STATUS(mm_cuda_allow_shared(device, function, 232449), MEGAMOE_EUNSUPPORTED);
        T_CONTAINS(megamoe_last_error(), "232449 bytes of shared memory");
    }
    mm_cuda_close(device);
    T_EQ_INT(count_of("fake_modules"), 0);
}

T_CASE(kernels_that_do_not_load_are_named) {
    need_kernels();
    mm_cuda_device *device;
    T_OK(mm_cuda_open(0, 0, &device));
    CUfunction function = (CUfunction)(void *)&device;
    T_STATUS(mm_cuda_function(device, "nothing", "mm_forward", &function), MEGAMOE_EUNSUPPORTED);
    T_CONTAINS(megamoe_last_error(), "no kernels 'nothing'");
    T_CHECK(function == NULL);
    T_STATUS(mm_cuda_function(device, mm_cubins[0].name, "missing", &function), MEGAMOE_EDEVICE);
    T_CONTAINS(megamoe_last_error(), "kernel 'missing' of");
    if (mm_cubin_count > 1) {
        setenv("FAKE_CUDA_FAIL", "cuModuleLoadData", 1);
        T_STATUS(mm_cuda_function(device, mm_cubins[1].name, "mm_forward", &function),
                 MEGAMOE_EDEVICE);
        T_CONTAINS(megamoe_last_error(), mm_cubins[1].name);
    }
    mm_cuda_close(device);
    T_EQ_INT(count_of("fake_modules"), 0);
}

static void *load(void *argument) {
    CUfunction function;
    const megamoe_status status =
        mm_cuda_function(argument, mm_cubins[0].name, "mm_forward", &function);
    T_STATUS(status, MEGAMOE_OK);
    return NULL;
}

T_CASE(threads_load_together) {
    need_kernels();
    mm_cuda_device *device;
    T_OK(mm_cuda_open(0, 0, &device));
    pthread_t threads[8];
    for (int i = 0; i < 8; i++)
        T_REQUIRE(pthread_create(&threads[i], NULL, load, device) == 0);
    for (int i = 0; i < 8; i++)
        pthread_join(threads[i], NULL);
    T_EQ_INT(count_of("fake_modules"), 1);
    mm_cuda_close(device);
}
