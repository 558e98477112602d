/* SPDX-License-Identifier: Apache-2.0 */
#include "litmus.h"

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/memory.cuh"

enum { VECTORS = LITMUS_BYTES / 16 };

MM_DEVICE void store_release_gpu(uint32_t *word, uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

MM_DEVICE void store_release_block(uint32_t *word, uint32_t value) {
    asm volatile("st.release.cta.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

/* By all threads: until thread 0 has seen *word reach `value`; false at the deadline. */
MM_DEVICE bool await(const uint32_t *word, uint32_t value, uint64_t deadline_ns) {
    bool there = true;
    if (threadIdx.x == 0) {
        const uint64_t start = mm_globaltimer_ns();
        while (there && (int32_t)(mm_load_acquire_sys(word) - value) < 0)
            there = mm_globaltimer_ns() - start < deadline_ns;
    }
    return __syncthreads_and(there);
}

/* Part `part` of `parts` of a message, with ordinary stores. */
MM_DEVICE void store(uint32_t *data, uint32_t n, uint32_t part, uint32_t parts) {
    uint4 *to = (uint4 *)data + part * (VECTORS / parts);
    for (uint32_t i = threadIdx.x; i < VECTORS / parts; i += LITMUS_THREADS)
        to[i] = make_uint4(n, n, n, n);
}

MM_DEVICE void store_bulk(uint32_t *data, uint32_t n, uint4 *staging, bool completed) {
    for (uint32_t i = threadIdx.x; i < VECTORS; i += LITMUS_THREADS)
        staging[i] = make_uint4(n, n, n, n);
    mm_fence_proxy_async_shared();
    __syncthreads();
    if (threadIdx.x)
        return;
    for (uint32_t i = 0; i < 4; i++)
        mm_bulk_store((uint8_t *)data + i * (LITMUS_BYTES / 4),
                      mm_shared_address(staging) + i * (LITMUS_BYTES / 4), LITMUS_BYTES / 4);
    if (completed)
        mm_bulk_store_wait();
    else
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/* By one thread, after the block's stores: says that message n is there. */
MM_DEVICE void tell(int32_t mode, uint32_t *flag, uint32_t *counter, uint32_t n) {
    switch (mode) {
    case LITMUS_COUNTED:
        if (mm_add_acq_rel_gpu(counter, 1) % LITMUS_TEAM != LITMUS_TEAM - 1)
            return;
        mm_fence_acq_rel_sys();
        mm_store_relaxed_sys(flag, n);
        return;
    case LITMUS_WRONG_RELAXED:
        mm_store_relaxed_sys(flag, n);
        return;
    case LITMUS_WRONG_BLOCK:
        store_release_block(flag, n);
        return;
    case LITMUS_WRONG_GPU:
        store_release_gpu(flag, n);
        return;
    default:
        mm_store_release_sys(flag, n);
        return;
    }
}

extern "C" __global__ void __launch_bounds__(LITMUS_THREADS) litmus_write(litmus_args args) {
    __shared__ alignas(128) uint4 staging[VECTORS];
    const uint32_t team = args.mode == LITMUS_COUNTED ? LITMUS_TEAM : 1;
    const uint32_t group = blockIdx.x / team, part = blockIdx.x % team;
    litmus_outbox *outbox = args.outbox;
    litmus_inbox *inbox = args.inbox;
    for (uint32_t n = 1; n <= (uint32_t)args.messages; n++) {
        const uint32_t slot = n % LITMUS_SLOTS;
        if (n > LITMUS_SLOTS && !await(outbox->read[group], n - LITMUS_SLOTS, args.deadline_ns)) {
            if (threadIdx.x == 0)
                outbox->stuck = 1;
            return;
        }
        uint32_t *data = inbox->data[group][slot];
        if (args.mode == LITMUS_BULK || args.mode == LITMUS_WRONG_BULK)
            store_bulk(data, n, staging, args.mode == LITMUS_BULK);
        else
            store(data, n, part, team);
        __syncthreads();
        if (threadIdx.x == 0)
            tell(args.mode, inbox->flags[group][slot], &outbox->counters[group][slot], n);
    }
}

/* A message by bulk copy; the barrier's phase is that of message n. */
MM_DEVICE void load_bulk(const uint32_t *data, uint32_t n, uint4 *staging, uint32_t barrier) {
    if (threadIdx.x == 0) {
        mm_fence_proxy_async_global();
        mm_barrier_arrive_expect(barrier, LITMUS_BYTES);
        mm_bulk_load(mm_shared_address(staging), data, LITMUS_BYTES, barrier, mm_policy_stream());
    }
    mm_barrier_wait(barrier, (n - 1) & 1);
}

extern "C" __global__ void __launch_bounds__(LITMUS_THREADS) litmus_read(litmus_args args) {
    __shared__ alignas(128) uint4 staging[VECTORS];
    __shared__ uint64_t barrier;
    const uint32_t group = blockIdx.x;
    const bool bulk = args.mode == LITMUS_BULK || args.mode == LITMUS_WRONG_BULK;
    litmus_inbox *inbox = args.inbox;
    if (threadIdx.x == 0) {
        mm_barrier_init(mm_shared_address(&barrier), 1);
        mm_barrier_init_fence();
    }
    __syncthreads();
    uint64_t wrong = 0;
    for (uint32_t n = 1; n <= (uint32_t)args.messages; n++) {
        const uint32_t slot = n % LITMUS_SLOTS;
        if (!await(inbox->flags[group][slot], n, args.deadline_ns)) {
            if (threadIdx.x == 0)
                inbox->stuck = 1;
            break;
        }
        const uint4 *from = (const uint4 *)inbox->data[group][slot];
        if (bulk) {
            load_bulk(inbox->data[group][slot], n, staging, mm_shared_address(&barrier));
            from = staging;
        }
        bool good = true;
        for (uint32_t i = threadIdx.x; i < VECTORS; i += LITMUS_THREADS) {
            const uint4 v = from[i];
            good = good && v.x == n && v.y == n && v.z == n && v.w == n;
        }
        wrong += !__syncthreads_and(good);
        if (threadIdx.x == 0)
            mm_store_release_sys(args.outbox->read[group], n);
    }
    if (threadIdx.x == 0 && wrong)
        atomicAdd((unsigned long long *)&inbox->wrong, (unsigned long long)wrong);
}
