/* SPDX-License-Identifier: Apache-2.0 */
/* The activation's reciprocal is that of IEEE division, wherever the kernel uses it. */
#include "gpu.h"
#include "num/bf16.h"
#include "reciprocals.h"

GPU_CUBIN(reciprocals)

T_CASE(reciprocals_are_rounded_to_nearest) {
    gpu g = gpu_start();
    if (!reciprocals_image())
        T_SKIP("this build has no CUDA kernels");
    CUmodule module;
    CUfunction function;
    gpu_check(mm_cu.cuModuleLoadData(&module, reciprocals_image()), "cuModuleLoadData");
    gpu_check(mm_cu.cuModuleGetFunction(&function, module, "reciprocals"), "cuModuleGetFunction");
    reciprocals_found found = {0};
    void *memory = gpu_copy(&found, sizeof found);
    const CUlaunchConfig config = {.gridDimX = RECIPROCALS_BLOCKS,
                                   .gridDimY = 1,
                                   .gridDimZ = 1,
                                   .blockDimX = RECIPROCALS_THREADS,
                                   .blockDimY = 1,
                                   .blockDimZ = 1,
                                   .hStream = g.stream};
    void *arguments[] = {&memory};
    gpu_check(mm_cu.cuLaunchKernelEx(&config, function, arguments, NULL), "cuLaunchKernelEx");
    gpu_wait();
    gpu_read(&found, memory, sizeof found);
    T_EQ_INT(found.tried, ((uint64_t)60 << 23) + 1);
    T_CHECK_MSG(found.wrong == 0, "%llu of %llu wrong, one of them that of %a",
                (unsigned long long)found.wrong, (unsigned long long)found.tried,
                (double)mm_f32_from_bits(found.last));
    gpu_free(memory);
    gpu_check(mm_cu.cuModuleUnload(module), "cuModuleUnload");
    gpu_end(&g);
}
