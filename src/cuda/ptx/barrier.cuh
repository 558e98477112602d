/* SPDX-License-Identifier: Apache-2.0 */
/* mbarrier objects in shared memory, named barriers, register budgets. */
#ifndef MM_CUDA_PTX_BARRIER_CUH
#define MM_CUDA_PTX_BARRIER_CUH

#include <stdint.h>

#define MM_DEVICE static __device__ __forceinline__

MM_DEVICE uint32_t mm_shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

MM_DEVICE void mm_barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/* Makes initialised barriers visible to the copy engine. */
MM_DEVICE void mm_barrier_init_fence(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

MM_DEVICE void mm_barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* One arrival that also announces `bytes` of bulk copies. */
MM_DEVICE void mm_barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

/* Whether the phase of this parity has completed. */
MM_DEVICE bool mm_barrier_test(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done;
}

MM_DEVICE void mm_barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n.reg .pred p;\n"
                 "WAIT_%=:\n"
                 "mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
                 "@p bra DONE_%=;\n"
                 "bra WAIT_%=;\n"
                 "DONE_%=:\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/*
 * True in one lane of a warp whose lanes are all here. The compiler then knows that what depends on
 * it is done by one thread, whose values it can keep in uniform registers.
 */
MM_DEVICE bool mm_elect(void) {
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\n"
                 "elect.sync _|p, 0xFFFFFFFF;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(elected));
    return elected;
}

/* Named barrier `index` among `threads` threads; 0 is __syncthreads. */
#define MM_NAMED_BARRIER(index, threads)                                                           \
    asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(threads) : "memory")

/* The register pool of a launch is shared: what some warpgroups give back, others may take. */
#define MM_REGISTERS_GIVE(count) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count))
#define MM_REGISTERS_TAKE(count) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count))

#endif
