/* SPDX-License-Identifier: Apache-2.0 */
/* What a link between two GPUs can do: flags there and back, and pushing data. */
#include "cuda/kernels/link.h"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/memory.cuh"

/* One thread on each GPU; `begins` on both is a barrier of two. */
extern "C" __global__ void __launch_bounds__(1) mm_link_flags(mm_link_exchange x) {
    const uint64_t start = mm_globaltimer_ns();
    for (uint32_t i = x.from + 1; i != x.from + x.rounds + 1; i++) {
        if (x.begins)
            mm_store_release_sys(x.peer->flag, i);
        uint32_t polls = 0;
        while (mm_load_acquire_sys(x.own->flag) != i)
            if (++polls % 1024 == 0 && mm_globaltimer_ns() - start > x.deadline_ns) {
                x.own->stuck = 1;
                return;
            }
        if (!x.begins)
            mm_store_release_sys(x.peer->flag, i);
    }
    x.own->elapsed_ns = mm_globaltimer_ns() - start;
}

/* Fills memory with vector stores. */
extern "C" __global__ void __launch_bounds__(MM_LINK_THREADS)
    mm_link_push_stores(uint4 *to, uint64_t bytes) {
    const uint64_t vectors = bytes / sizeof(uint4), stride = (uint64_t)gridDim.x * blockDim.x;
    const uint4 v = make_uint4(threadIdx.x, blockIdx.x, 2, 3);
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += stride)
        to[i] = v;
}

/* The same with bulk copies, by one thread of each block. */
extern "C" __global__ void __launch_bounds__(MM_LINK_THREADS)
    mm_link_push_bulk(uint8_t *to, uint64_t bytes) {
    __shared__ alignas(128) uint8_t from[MM_LINK_BULK_BYTES];
    for (uint32_t i = threadIdx.x; i < MM_LINK_BULK_BYTES; i += blockDim.x)
        from[i] = (uint8_t)i;
    mm_fence_proxy_async_shared();
    __syncthreads();
    if (threadIdx.x)
        return;
    const uint64_t stride = (uint64_t)gridDim.x * MM_LINK_BULK_BYTES;
    for (uint64_t at = (uint64_t)blockIdx.x * MM_LINK_BULK_BYTES; at < bytes; at += stride) {
        mm_bulk_store(to + at, mm_shared_address(from), MM_LINK_BULK_BYTES);
        asm volatile("cp.async.bulk.wait_group %0;" ::"n"((int)MM_LINK_BULK_DEPTH) : "memory");
    }
    mm_bulk_store_wait();
}
