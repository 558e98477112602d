/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loads, stores and fences with a scope. Words that ranks exchange use .sys, words among the thread
 * blocks of one rank .gpu.
 */
#ifndef MM_CUDA_PTX_MEMORY_CUH
#define MM_CUDA_PTX_MEMORY_CUH

#include "cuda/ptx/barrier.cuh"

MM_DEVICE uint32_t mm_load_acquire_sys(const uint32_t *word) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

MM_DEVICE uint32_t mm_load_acquire_gpu(const uint32_t *word) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

MM_DEVICE uint32_t mm_load_relaxed_sys(const uint32_t *word) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

MM_DEVICE void mm_store_release_sys(uint32_t *word, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

MM_DEVICE void mm_store_relaxed_sys(uint32_t *word, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

/* Adds; what this thread has seen is visible to whoever sees the sum, and the reverse. */
MM_DEVICE uint32_t mm_add_acq_rel_gpu(uint32_t *word, uint32_t value) {
    uint32_t old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(word), "r"(value)
                 : "memory");
    return old;
}

MM_DEVICE uint32_t mm_add_relaxed_gpu(uint32_t *word, uint32_t value) {
    uint32_t old;
    asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(word), "r"(value)
                 : "memory");
    return old;
}

/* Adds; what this thread has seen is visible to whoever sees the sum. */
MM_DEVICE void mm_add_release_gpu(uint32_t *word, uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

MM_DEVICE void mm_fence_acq_rel_gpu(void) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

MM_DEVICE void mm_fence_acq_rel_sys(void) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

/*
 * Between ordinary accesses to global memory and those of the copy engine, either way. Without a
 * state space ptxas puts a MEMBAR of the whole GPU before it, which waits for every store of the
 * warp; this one leaves that to the release that follows.
 */
MM_DEVICE void mm_fence_proxy_async_global(void) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

/* The same for shared memory, and with the tensor cores. */
MM_DEVICE void mm_fence_proxy_async_shared(void) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* 16 bytes past L1: lines that other thread blocks write while the kernel runs. */
MM_DEVICE uint4 mm_load_16_l2(const void *pointer) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(pointer)
                 : "memory");
    return v;
}

/*
 * Loads from shared memory by its own addresses, in the order of the program: what a main loop
 * reads early costs it registers.
 */
MM_DEVICE uint4 mm_shared_load_16(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
    return v;
}

MM_DEVICE uint2 mm_shared_load_8(uint32_t address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}

MM_DEVICE uint32_t mm_shared_load_4(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}

MM_DEVICE uint32_t mm_shared_load_2(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}

MM_DEVICE uint32_t mm_shared_load_1(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}

MM_DEVICE void mm_shared_store_2(uint32_t address, uint32_t value) {
    asm volatile("{\n.reg .u16 h;\ncvt.u16.u32 h, %1;\nst.shared.u16 [%0], h;\n}" ::"r"(address),
                 "r"(value)
                 : "memory");
}

MM_DEVICE uint64_t mm_globaltimer_ns(void) {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

#endif
