/* SPDX-License-Identifier: Apache-2.0 */
/* What a GPU can do at best: reading memory, and multiplying E4M3 on tensor cores. */
#include "cuda/kernels/measure.h"
#include "cuda/ptx/wgmma.cuh"

/* In flight for each thread, so that memory's latency does not show. */
enum { VECTORS = 8 };

extern "C" __global__ void __launch_bounds__(MM_MEASURE_READ_THREADS)
    mm_measure_read(const uint4 *data, uint64_t vectors, uint32_t *sink) {
    const uint64_t stride = (uint64_t)gridDim.x * blockDim.x;
    uint32_t mixed = 0;
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + (VECTORS - 1) * stride < vectors; i += VECTORS * stride) {
        uint4 v[VECTORS];
#pragma unroll
        for (uint32_t n = 0; n < VECTORS; n++)
            v[n] = __ldcs(data + i + n * stride);
#pragma unroll
        for (uint32_t n = 0; n < VECTORS; n++)
            mixed ^= v[n].x ^ v[n].y ^ v[n].z ^ v[n].w;
    }
    for (; i < vectors; i += stride) {
        const uint4 v = __ldcs(data + i);
        mixed ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (mixed == 1) /* all words are equal, so never; but the compiler cannot know */
        sink[0] = mixed;
}

/* Four E4M3 values of random sign and significand between 0.5 and 2, as far from zero as data is.
 */
static __device__ uint32_t random_values(uint32_t index) {
    uint32_t h = index * 0x9E3779B9u;
    h = (h ^ h >> 16) * 0x85EBCA6Bu;
    h = (h ^ h >> 13) * 0xC2B2AE35u;
    h ^= h >> 16;
    return (h & 0x8F8F8F8Fu) | 0x30303030u;
}

extern "C" __global__ void __launch_bounds__(MM_MEASURE_MMA_THREADS, 1)
    mm_measure_mma(int32_t rounds, float *sink) {
    extern __shared__ uint8_t unaligned[];
    const uint32_t base = (mm_shared_address(unaligned) + 1023) / 1024 * 1024;
    uint32_t *columns = (uint32_t *)(unaligned + (base - mm_shared_address(unaligned)));
    const uint32_t words = MM_MEASURE_MMA_STAGES * MM_MEASURE_MMA_STAGE_BYTES / 4;
    for (uint32_t i = threadIdx.x; i < words; i += blockDim.x)
        columns[i] = random_values(i);
    uint32_t a[MM_MEASURE_MMA_BLOCKS][16];
#pragma unroll
    for (uint32_t i = 0; i < MM_MEASURE_MMA_BLOCKS * 16; i++)
        a[i / 16][i % 16] = random_values(words + i * blockDim.x + threadIdx.x);
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();

    float sum[MM_MEASURE_MMA_BLOCKS][MM_N / 2];
#pragma unroll
    for (uint32_t i = 0; i < MM_MEASURE_MMA_BLOCKS * MM_N / 2; i++)
        sum[i / (MM_N / 2)][i % (MM_N / 2)] = 0.0f;
    for (int32_t round = 0; round < rounds; round++) {
        for (uint32_t chunk = 0; chunk < MM_MEASURE_MMA_K / 128; chunk++) {
            uint64_t descriptors[4];
            mm_wgmma_descriptors(descriptors,
                                 base + chunk % MM_MEASURE_MMA_STAGES * MM_MEASURE_MMA_STAGE_BYTES);
            mm_wgmma_fence();
#pragma unroll
            for (uint32_t m = 0; m < MM_MEASURE_MMA_BLOCKS; m++)
#pragma unroll
                for (uint32_t j = 0; j < 4; j++)
                    mm_wgmma<MM_N>(sum[m], &a[m][4 * j], descriptors[j], chunk > 0 || j > 0);
            mm_wgmma_commit();
        }
        mm_wgmma_wait();
    }
    if (rounds < 0) { /* never; it keeps the sums */
        float total = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < MM_MEASURE_MMA_BLOCKS * MM_N / 2; i++)
            total += sum[i / (MM_N / 2)][i % (MM_N / 2)];
        sink[threadIdx.x] = total;
    }
}
