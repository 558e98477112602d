/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a traced forward takes down (mm_cuda_traced_block, mm_cuda_traced_tile). Without a trace
 * each place that could costs one test of a pointer.
 */
#ifndef MM_CUDA_KERNELS_TRACE_CUH
#define MM_CUDA_KERNELS_TRACE_CUH

#include "cuda/kernels/shared.cuh"

/* A block's record, or NULL. */
MM_DEVICE volatile mm_cuda_traced_block *mm_traced(const mm_cuda_rank *rank, int32_t block) {
    return rank->traced_blocks ? rank->traced_blocks + block : NULL;
}

/* A forward begins. By one thread, before any tile is claimed. */
MM_DEVICE void mm_trace_begin(const mm_block *b) {
    volatile mm_cuda_traced_block *traced = mm_traced(b->rank, b->block);
    if (!traced)
        return;
    uint32_t multiprocessor;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
    traced->multiprocessor = multiprocessor;
    for (int32_t i = 0; i < MM_CUDA_BLOCK_STAMPS; i++)
        traced->stamps[i] = 0;
    for (int32_t team = 0; team < MM_CUDA_TRACED_TEAMS; team++)
        traced->tiles[team] = 0;
}

MM_DEVICE void mm_trace_block(const mm_block *b, mm_cuda_block_stamp what) {
    volatile mm_cuda_traced_block *traced = mm_traced(b->rank, b->block);
    if (traced)
        traced->stamps[what] = mm_globaltimer_ns();
}

/* By the producer: the stamps of the tile that it has claimed, NULL where none are taken. */
MM_DEVICE uint64_t *mm_trace_claim(const mm_block *b, const mm_team *team, const mm_task *task) {
    const mm_cuda_rank *rank = team->rank;
    volatile mm_cuda_traced_block *traced = mm_traced(rank, b->block);
    if (!traced)
        return NULL;
    const int64_t n = traced->tiles[team->index]++;
    if (n >= rank->traced_room)
        return NULL;
    mm_cuda_traced_tile *tile =
        rank->traced_tiles +
        ((int64_t)b->block * MM_CUDA_TRACED_TEAMS + team->index) * rank->traced_room + n;
    tile->second = task->kind == TASK_FC2;
    tile->expert = task->expert;
    tile->tile = task->tile;
    tile->tokens = task->valid;
    return tile->stamps;
}

/* By one thread. */
MM_DEVICE void mm_stamp(uint64_t *stamps, mm_cuda_stamp what) {
    if (stamps)
        *(volatile uint64_t *)(stamps + what) = mm_globaltimer_ns();
}

#endif
