/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The whole operation in one persistent launch. Compiled once for each format (MM_FORMAT), token
 * tile (MM_N) and way to accumulate (MM_PROMOTE).
 */
#include "cuda/kernels/combine.cuh"
#include "cuda/kernels/finish.cuh"
#include "cuda/kernels/produce.cuh"

/*
 * Registers for math and for the last warpgroup. A launch has as many as fit for each thread: 168
 * with 8 math warps, 96 with 16, and no more are there to be handed out. What fits without spills
 * was found by trying.
 */
enum {
    MATH_REGISTERS = MATH_WARPS == 16 ? 104
                     : TEAMS == 2     ? 224
                                      : 208,
    OTHER_REGISTERS = MATH_WARPS == 16 ? 64
                      : TEAMS == 2     ? 56
                                       : 88
};

/* Routes of a block that math warps help to dispatch; all where nobody else does. */
enum { HELPED_ROUTES = TEAMS == 2 ? INT32_MAX : 4 * WARPS };

/* By one thread. */
MM_DEVICE void mm_set_up_barriers(const mm_team *team) {
#pragma unroll 1
    for (int32_t i = 0; i < team->args->stages; i++) {
        mm_barrier_init(team->shared + FULL + 8 * i, 1);
        mm_barrier_init(team->shared + EMPTY + 8 * i, TEAM_WARPS);
    }
#pragma unroll 1
    for (int32_t i = 0; i < MM_CUDA_TASK_SLOTS; i++) {
        mm_barrier_init(team->shared + TASK_FULL + 8 * i, 1);
        mm_barrier_init(team->shared + TASK_EMPTY + 8 * i, TEAM_WARPS + 1);
    }
    mm_barrier_init(team->shared + OUT_FULL, TEAM_WARPS);
    mm_barrier_init(team->shared + OUT_EMPTY, 1);
    mm_barrier_init_fence();
}

MM_DEVICE void mm_set_up(const mm_block *b) {
    static_assert(TABLE_BYTES / 8 <= THREADS && MM_CUDA_RANKS_MAX <= THREADS, "a word a thread");
    const uint32_t thread = threadIdx.x;
    if (thread < TABLE_BYTES / 8)
        ((uint64_t *)(b->smem + TABLE))[thread] = ((const uint64_t *)b->args->decode_table)[thread];
    if (thread < (uint32_t)b->args->ranks)
        ((uint16_t **)(b->smem + RESULTS))[thread] =
            (uint16_t *)(b->rank->windows[thread] + b->args->window.results);
    if (thread < MM_CUDA_TIMES)
        mm_times(b)[thread] = 0;
    /* Not by the first warps, which have more to do. */
    const int32_t team = (int32_t)thread / 32 - FINISHER_WARP;
    if (thread % 32 == 0 && team >= 0 && team < TEAMS) {
        const mm_team of = mm_team_of(b->args, b->smem, b->shared, team);
        mm_set_up_barriers(&of);
    }
    if (thread == 0) {
        b->words->stop = 0;
        b->words->next = 0;
        b->words->units = 0;
        b->words->looked = 0;
    }
}

/* The place of a reader in the slots of tasks. */
typedef struct mm_slot {
    uint32_t index, parity;
} mm_slot;

MM_DEVICE void mm_slot_release(const mm_team *team, mm_slot *slot) {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        mm_barrier_arrive(team->shared + TASK_EMPTY + 8 * slot->index);
    if (++slot->index == MM_CUDA_TASK_SLOTS) {
        slot->index = 0;
        slot->parity ^= 1;
    }
}

MM_DEVICE const mm_task *mm_slot_wait(const mm_team *team, const mm_slot *slot) {
    mm_barrier_wait(team->shared + TASK_FULL + 8 * slot->index, slot->parity);
    return (const mm_task *)(team->smem + TASKS) + slot->index;
}

MM_DEVICE const mm_cuda_record *mm_slot_records(const mm_team *team, const mm_slot *slot) {
    return (const mm_cuda_record *)(team->smem + RECORDS) + slot->index * MM_N;
}

/* Places in shared memory, found anew where they are needed: kept, each takes a register. */
MM_DEVICE void mm_find_places(mm_team *team, uint8_t *smem) {
    team->shared = __reduce_max_sync(~0u, team->shared);
    team->smem = smem + (team->shared - team->block);
    if (TEAMS == 1)
        team->block = team->shared - FIRST_TEAM;
}

MM_DEVICE void mm_math(const mm_team *given, uint8_t *smem) {
    mm_team own = *given;
    const mm_team *team = &own;
    mm_position position = {0, 0};
    mm_slot slot = {0, 0};
    uint32_t out_parity = 0;
    for (;;) {
        mm_find_places(&own, smem);
        const mm_task *task = mm_slot_wait(team, &slot);
        /* The same in all lanes. A reduction says so to the compiler, which then keeps these and
         * the addresses of stages in uniform registers, where wgmma wants its descriptors. */
        const int32_t kind = (int32_t)__reduce_max_sync(~0u, (uint32_t)task->kind);
        const int32_t chunks = (int32_t)__reduce_max_sync(~0u, (uint32_t)task->chunks);
        if (kind == TASK_END)
            break;
        const int32_t scales = (int32_t)__reduce_max_sync(~0u, (uint32_t)task->scales);
        const int32_t valid = (int32_t)__reduce_max_sync(~0u, (uint32_t)task->valid);
        const bool first = kind == TASK_FC1;
        const uint32_t half = task->row / 8 % 2;
        mm_reader reader = mm_reader_of(team, position);
        float s[CHUNKS][MM_N / 2];
#pragma unroll
        for (uint32_t m = 0; m < CHUNKS; m++)
            mm_zero(s[m]);
        if (task->stamps) {
            mm_barrier_wait(reader.shared + FULL + 8 * reader.at.stage, reader.at.parity);
            if (mm_thread() % TEAM_THREADS == 0)
                mm_stamp(task->stamps, MM_CUDA_STAMP_FIRST);
        }
        mm_multiply(&reader, chunks, scales, half, valid, s);
        position = reader.at;
        mm_find_places(&own, smem);
        if (mm_thread() % TEAM_THREADS == 0)
            mm_stamp(task->stamps, MM_CUDA_STAMP_MULTIPLIED);
        const mm_tile tile = {task, mm_slot_records(team, &slot),
                              team->smem + ROW_DATA + slot.index * MM_CUDA_ROW_DATA_BYTES};
        /* The finisher has read what the tile before left. */
        mm_barrier_wait(team->shared + OUT_EMPTY, out_parity ^ 1);
        if (first) {
            mm_finish_fc1(team, &tile, s);
        } else {
            mm_finish_fc2(team, &tile, s);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            mm_barrier_arrive(team->shared + OUT_FULL);
        out_parity ^= 1;
        mm_slot_release(team, &slot);
    }
}

/* A tile of the first team has ended, and another has begun. */
MM_DEVICE void mm_count_tile(const mm_block *b, const mm_team *team, int32_t kind) {
    if (team->index || threadIdx.x % 32)
        return;
    volatile uint64_t *times = mm_times(b);
    const uint64_t now = mm_globaltimer_ns();
    const uint64_t before = times[MM_CUDA_TIME_LAST];
    times[kind == TASK_FC1 ? MM_CUDA_TIME_FC1 : MM_CUDA_TIME_FC2] +=
        now - (before ? before : times[MM_CUDA_TIME_BEGUN]);
    times[MM_CUDA_TIME_LAST] = now;
}

MM_DEVICE void mm_finisher(const mm_block *b, const mm_team *team) {
    mm_slot slot = {0, 0};
    uint32_t parity = 0;
    for (;;) {
        const mm_task *task = mm_slot_wait(team, &slot);
        if (task->kind == TASK_END)
            break;
        mm_barrier_wait(team->shared + OUT_FULL, parity);
        parity ^= 1;
        mm_count_tile(b, team, task->kind);
        if (threadIdx.x % 32 == 0)
            mm_stamp(task->stamps, MM_CUDA_STAMP_FINISHED);
        if (task->kind == TASK_FC1)
            mm_store_hidden(b, team, task);
        else
            mm_return_routes(b, team, task, mm_slot_records(team, &slot));
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            mm_stamp(task->stamps, MM_CUDA_STAMP_STORED);
            mm_barrier_arrive(team->shared + OUT_EMPTY);
        }
        mm_slot_release(team, &slot);
    }
}

/* [low, high): offsets into the window. */
MM_DEVICE void mm_forget_words(const mm_block *b, uint64_t low, uint64_t high) {
    uint8_t *window = b->rank->windows[b->rank->rank];
    for (uint64_t at = low; at < high; at += sizeof(uint32_t))
        *(uint32_t *)(window + at) = b->epoch;
}

/*
 * Nobody else writes these words meanwhile: all that is sent in this epoch has been waited for, and
 * nothing of the next one is sent before this rank has published it.
 */
MM_DEVICE void mm_forget(const mm_block *b) {
    const mm_cuda_window *window = &b->args->window;
    mm_forget_words(b, window->arrivals, window->aborted);
    mm_forget_words(b, window->returned, window->codes);
}

/* The last block to have read the epoch ends it: replays of a graph cannot change arguments.
 * Nothing else in this launch reads it, and nobody waits for this at the end. By one thread. */
MM_DEVICE void mm_end_epoch(const mm_block *b) {
    mm_cuda_state *state = b->rank->state;
    if (mm_add_acq_rel_gpu(&state->entered, 1) + 1 < (uint32_t)b->args->blocks)
        return;
    state->entered = 0;
    state->epoch = b->epoch;
}

MM_DEVICE void mm_leave(const mm_block *b) {
    __syncthreads();
    if (threadIdx.x < MM_CUDA_TIMES)
        b->rank->times[b->block * MM_CUDA_TIMES + threadIdx.x] = mm_times(b)[threadIdx.x];
    if (threadIdx.x || b->epoch % MM_CUDA_FORGET_EVERY)
        return;
    mm_cuda_state *state = b->rank->state;
    if (mm_add_acq_rel_gpu(&state->left, 1) + 1 < (uint32_t)b->args->blocks)
        return;
    mm_forget(b);
    state->left = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mm_forward(const __grid_constant__ mm_cuda_forward_args args) {
    extern __shared__ __align__(1024) uint8_t shared_memory[];
    mm_block block;
    mm_block *b = &block;
    b->args = &args;
    b->rank = &args.rank[blockIdx.x / args.blocks];
    b->block = (int32_t)(blockIdx.x % args.blocks);
    b->shared = mm_shared_address(shared_memory);
    b->smem = shared_memory;
    b->words = (mm_words *)(b->smem + WORDS);
    /* Read together: each of them may be far away. */
    const uint32_t form = *(volatile uint32_t *)&b->rank->layer->form;
    const volatile mm_cuda_state *state = b->rank->state;
    const uint32_t epoch = state->epoch;
    const int32_t tokens = state->tokens;
    const uint64_t order = state->order;
    mm_find_tables(b);
    mm_set_up(b);
    b->epoch = epoch + 1;
    b->parity = b->epoch & 1;
    const bool good = form == b->rank->form && order == UINT64_MAX;
    b->tokens = good ? tokens : 0;
    b->first = mm_share_first(args.physical, b->rank->rank, args.ranks);
    const bool few = mm_share_of(b).few;
    mm_divide_sums(b);
    mm_block *common = (mm_block *)(b->smem + BLOCK);
    if (threadIdx.x == THREADS - 32)
        *common = block;
    if (threadIdx.x == 0) {
        mm_mark(b, MM_CUDA_TIME_ENTRY);
        mm_trace_begin(b);
    }
    mm_held held;
    mm_begin(b, &held, good);
    mm_mark(b, MM_CUDA_TIME_BEGUN);
    const bool going = *(volatile int32_t *)&b->words->stop == 0;
    __syncthreads(); /* nobody stops the others before all have looked */

    const int32_t warp = threadIdx.x / 32;
    if (going && few && warp < MATH_WARPS)
        mm_send_held(b, &held);
    if (going) {
        if (warp < MATH_WARPS) {
            MM_REGISTERS_TAKE((int)MATH_REGISTERS);
            if (!few)
                mm_dispatch(b, HELPED_ROUTES);
            if (threadIdx.x == 0)
                mm_trace_block(common, MM_CUDA_STAMP_DISPATCHED);
            /* As in mm_math, for the compiler. */
            const uint32_t index = __reduce_max_sync(~0u, (uint32_t)warp / TEAM_WARPS);
            const mm_team team = mm_team_of(&args, b->smem, b->shared, (int32_t)index);
            mm_math(&team, b->smem);
            if (threadIdx.x == 0)
                mm_trace_block(common, MM_CUDA_STAMP_COMBINING);
            mm_block own = *common;
            own.args = &args;
            own.rank = &args.rank[blockIdx.x / args.blocks];
            mm_combine(&own);
            mm_mark(common, MM_CUDA_TIME_COMBINED);
        } else {
            MM_REGISTERS_GIVE((int)OTHER_REGISTERS);
            const mm_team team =
                mm_team_of(&args, b->smem, b->shared, (warp - PRODUCER_WARP) % TEAMS);
            if (warp < FINISHER_WARP) {
                if (mm_elect())
                    mm_produce(common, &team);
                __syncwarp();
            } else if (warp < FINISHER_WARP + TEAMS) {
                if (threadIdx.x == 32 * FINISHER_WARP)
                    mm_end_epoch(common);
                mm_finisher(common, &team);
            } else if (TEAMS == 1) {
                if (!few)
                    mm_dispatch(common, INT32_MAX);
                if (threadIdx.x == THREADS - 32)
                    mm_trace_block(common, MM_CUDA_STAMP_DISPATCHED_LAST);
                __syncwarp();
                mm_combine_beside(common);
            }
        }
    } else if (threadIdx.x == 0) {
        mm_end_epoch(common);
    }
    mm_leave(common);
}
