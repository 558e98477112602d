/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and measuring a real GPU. */
#include <stdio.h>

#include "base/device.h"
#include "cuda/cubins.h"
#include "cuda/device.h"
#include "gpu.h"

T_CASE(device_describes_itself) {
    megamoe_device *device = gpu_open(NULL);
    megamoe_device_info info = MEGAMOE_INIT(megamoe_device_info);
    T_OK(megamoe_device_describe(device, &info));
    printf("  %s, %d multiprocessors, driver %d\n", info.model, info.multiprocessors,
           info.driver_version);
    T_EQ_STR(info.name, "cuda:0");
    T_EQ_STR(info.tier, "sm_90a");
    T_CHECK(info.multiprocessors > 0 && info.max_ctas == info.multiprocessors);
    T_CHECK(info.memory_bytes > (uint64_t)1 << 30);
    megamoe_device_close(device);
}

T_CASE(device_every_cubin_loads) {
    megamoe_device *device = gpu_open(NULL);
    CUfunction function;
    for (int32_t i = 0; i < mm_forward_variant_count; i++)
        T_STATUS(
            mm_cuda_function(device->cuda, mm_forward_variants[i].cubin, "mm_forward", &function),
            MEGAMOE_OK);
    megamoe_device_close(device);
}

T_CASE(device_measures) {
    megamoe_device *device = gpu_open(NULL);
    megamoe_device_ceilings c = MEGAMOE_INIT(megamoe_device_ceilings);
    T_OK(megamoe_device_measure(device, &c));
    printf("  read %.0f GB/s, copy %.0f GB/s, %.0f TFLOP/s\n", c.read_gbs, c.copy_gbs,
           c.mma_tflops);
    T_CHECK_MSG(c.read_gbs > 500 && c.read_gbs < 20000, "%g GB/s", c.read_gbs);
    T_CHECK_MSG(c.copy_gbs > 500 && c.copy_gbs < 20000, "%g GB/s", c.copy_gbs);
    T_CHECK_MSG(c.mma_tflops > 200 && c.mma_tflops < 4000, "%g TFLOP/s", c.mma_tflops);
    T_EQ_F64(c.dot_gflops, 0);
    megamoe_device_close(device);
}
