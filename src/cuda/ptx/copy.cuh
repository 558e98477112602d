/* SPDX-License-Identifier: Apache-2.0 */
/* The bulk copy engine: contiguous bytes, multiples of 16, between global and shared memory. */
#ifndef MM_CUDA_PTX_COPY_CUH
#define MM_CUDA_PTX_COPY_CUH

#include "cuda/ptx/barrier.cuh"

/* L2 policies: what will be read again soon, and what will not. */
MM_DEVICE uint64_t mm_policy_keep(void) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

MM_DEVICE uint64_t mm_policy_stream(void) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* `barrier` counts the bytes. */
MM_DEVICE void mm_bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier,
                            uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}

MM_DEVICE void mm_bulk_store(void *to, uint32_t from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until this thread's stores are complete, not only read from shared memory. */
MM_DEVICE void mm_bulk_store_wait(void) {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif
