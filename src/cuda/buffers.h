/* SPDX-License-Identifier: Apache-2.0 */
/* What a rank's device memory holds and where: pure arithmetic. */
#ifndef MM_CUDA_BUFFERS_H
#define MM_CUDA_BUFFERS_H

#include "cuda/kernels/abi.h"
#include "megamoe/layer.h"

/* Offsets into a rank's local memory; 0 for what the input scale mode does not need. */
typedef struct mm_cuda_local {
    uint64_t state;   /* mm_cuda_state; at 0 */
    uint64_t windows; /* uint8_t *[ranks] */
    uint64_t staged_codes, staged_scales, staged_tiny, staged_blocks, staged_block_scales;
    uint64_t staged_ids, staged_weights;
    uint64_t view_codes; /* E4M3 [tokens][view_stride]: a caller's codes in natural order */
    uint64_t order;
    uint64_t dispatched, fc1_done, fc2_done, received, times;
    uint64_t hidden_codes, hidden_scales;
    uint64_t traced_blocks, traced_tiles; /* 0 without capacity.trace */
    uint64_t bytes;
} mm_cuda_local;

/* X(name, what it is for) */
#define MM_CUDA_PARTS(X)                                                                           \
    X(FC1_POOL, "FC1's input: codes, scales and return addresses of pool_rows routes")             \
    X(FC2_POOL, "FC2's input: codes and scales of pool_rows routes")                               \
    X(RESULTS, "a row of output for each route of this rank's tokens, before they are summed")     \
    X(BATCH, "the staged batch: codes, scales, expert ids and routing weights")                    \
    X(VIEWS, "codes in natural order, for a caller that quantizes by itself")                      \
    X(DISPATCH, "the order in which this rank sends its routes")                                   \
    X(WORDS, "flags and counters of tokens, tiles, experts and ranks")                             \
    X(TRACE, "when the thread blocks did what")

enum {
#define X(name, what) MM_CUDA_PART_##name,
    MM_CUDA_PARTS(X)
#undef X
        MM_CUDA_PART_COUNT
};

typedef struct mm_cuda_part {
    const char *what;
    uint64_t bytes;
} mm_cuda_part;

typedef struct mm_cuda_buffers {
    int32_t hidden_chunks, intermediate_chunks;
    int32_t local_max;      /* experts of the rank that has most */
    int64_t rows;           /* of each pool */
    int64_t units;          /* token tiles of 8 that routes can fill */
    int64_t results_stride; /* elements; FC2 stores whole tiles */
    int64_t view_stride;    /* bytes */
    mm_cuda_window window;
    mm_cuda_local local;
    mm_cuda_part parts[MM_CUDA_PART_COUNT];
} mm_cuda_buffers;

/* shape and capacity are complete. The same on all ranks. */
mm_cuda_buffers mm_cuda_buffers_of(const megamoe_shape *shape, const megamoe_capacity *capacity,
                                   int32_t ranks);

#endif
