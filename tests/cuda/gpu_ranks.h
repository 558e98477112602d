/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranks on GPUs of their own: each has a stream and memory there. Every function makes the context
 * of the rank's GPU current.
 */
#ifndef TESTS_CUDA_GPU_RANKS_H
#define TESTS_CUDA_GPU_RANKS_H

#include "../comm/crew.h"
#include "gpu.h"

typedef struct gpu_rank {
    rank r;
    CUstream stream;
    gpu_batch memory; /* of its tokens */
} gpu_rank;

/*
 * Usable GPUs, at most `most`. Asked for in a process of its own, so that this one may fork ranks
 * that use the driver; for the same reason the case is skipped if this one has used it. Skipped too
 * with fewer than `least`, but where MEGAMOE_TEST_GPU is set one GPU is a must.
 */
int32_t gpu_count(int32_t least, int32_t most);

/* The device cuda:ordinal, a stream and memory; g->r has a communicator. */
void gpu_rank_open(gpu_rank *g, const setup *s, int32_t ordinal, int32_t max_ctas);
/* Layer and workspace; collective. */
void gpu_rank_create(gpu_rank *g, const setup *s);
void gpu_rank_close(gpu_rank *g);

/* Takes these tokens and stages them. */
void gpu_rank_stage(gpu_rank *g, const batch *part);
/* Enqueues a forward of what is staged. */
megamoe_status gpu_rank_forward(gpu_rank *g);
/* Waits; y [tokens][hidden]. */
void gpu_rank_result(gpu_rank *g, uint16_t *y);
void gpu_rank_wait(gpu_rank *g);

/* The rank of a process that a crew has started, on cuda:ordinal, with all that it needs. */
void gpu_member_open(const member *m, const setup *s, int32_t ordinal, int32_t max_ctas,
                     gpu_rank *g);

#endif
