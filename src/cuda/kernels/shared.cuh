/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one thread block of the forward kernel keeps in shared memory, and what its roles share.
 *
 *   math       a warpgroup a team for all of a tile's four 64-row chunks, or two for two each
 *   producer   a warp a team: claims tiles, waits for what they depend on, feeds the ring
 *   finisher   a warp a team: stores what math has left in shared memory, tells who waits for it
 *   dispatch   the third warpgroup's other two warps where there is one team; then they sum tokens
 */
#ifndef MM_CUDA_KERNELS_SHARED_CUH
#define MM_CUDA_KERNELS_SHARED_CUH

#include "cuda/kernels/abi.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/memory.cuh"
#include "megamoe/layer.h"
#include "weights/cuda_layout.h"

enum {
    TEAMS = MM_CUDA_TEAMS(MM_FORMAT, MM_N, MM_PROMOTE),
    CHUNKS = MM_CUDA_CHUNKS(MM_FORMAT, MM_N, MM_PROMOTE), /* of a warpgroup */
    PAIRS = CHUNKS / 2, /* of chunks: 128 rows, of which FC1 makes 64 channels */
    TEAM_WARPS = 16 / CHUNKS,
    TEAM_THREADS = 32 * TEAM_WARPS,
    MATH_WARPS = TEAMS * TEAM_WARPS,
    /* Groups of eight columns that FC1's activation takes at once. */
    AT_ONCE = MATH_WARPS == 8 && MM_N % 16 == 0 ? 2 : 1,
    PRODUCER_WARP = MATH_WARPS,         /* of the first team; the next is the second's */
    FINISHER_WARP = MATH_WARPS + TEAMS, /* likewise */
    WARPS = MATH_WARPS + 4,
    THREADS = 32 * WARPS,

    EXACT = MM_FORMAT == MM_CUDA_NVFP4_EXACT, /* two terms */
    NVFP4 = MM_FORMAT != MM_CUDA_MXFP4,
    CHUNK_SCALE_BYTES = NVFP4 ? MM_CUDA_NVFP4_SCALE_BYTES : MM_CUDA_MXFP4_SCALE_BYTES,
    CHUNK_BYTES = 2 * MM_CUDA_PLANE_BYTES + CHUNK_SCALE_BYTES,
    WEIGHT_BYTES = 4 * CHUNK_BYTES, /* of a stage */
    TOKEN_BYTES = MM_N * 128,
    STAGE_BYTES = TOKEN_BYTES + WEIGHT_BYTES, /* tokens first: they need the alignment */
    TABLE_BYTES = 8 * (NVFP4 ? (EXACT ? 256 : 128) : 16),
    SCALE_ROWS = (MM_N + 15) / 16 * 16, /* rows whose scales a stage holds */
    RECORD_BYTES = (int)sizeof(mm_cuda_record),
    STAGES_MAX = 12
};

/* Places in the block's shared memory. */
enum {
    TABLE = 0,
    WORDS = TABLE + TABLE_BYTES,             /* mm_words */
    NEEDS = WORDS + 48,                      /* int32 [MM_CUDA_RANKS_MAX] */
    RESULTS = NEEDS + 4 * MM_CUDA_RANKS_MAX, /* uint16 * [MM_CUDA_RANKS_MAX]: of every rank */
    TIMES = RESULTS + 8 * MM_CUDA_RANKS_MAX, /* uint64 [MM_CUDA_TIMES] */
    BLOCK = TIMES + 8 * MM_CUDA_TIMES,       /* mm_block, for roles with few registers */
    ORDER = BLOCK + 128,                     /* int4 [ORDER_ROUTES] */
    ORDER_ROUTES = 48,
    SUMMED = ORDER + 16 * ORDER_ROUTES, /* a bit for each of the block's own tokens */
    CLAIMABLE = 1024,                   /* tokens that have one */
    FIRST_TEAM = (SUMMED + CLAIMABLE / 8 + 1023) / 1024 * 1024
};

/* Places in a team's. */
enum {
    OUT = 0,                    /* [MM_N][128]: FC2's input on its way out */
    RECORDS = OUT + MM_N * 128, /* [MM_CUDA_TASK_SLOTS][MM_N] */
    /* Row exponents, biases and globals of a tile: [MM_CUDA_TASK_SLOTS]. */
    ROW_DATA = RECORDS + MM_CUDA_TASK_SLOTS * MM_N * RECORD_BYTES,
    ROW_BIASES = MM_CUDA_TILE_ROWS,
    ROW_GLOBALS = ROW_BIASES + MM_CUDA_TILE_ROWS * 4,
    /* uint32 [8 slices of the channels][MM_N] */
    LARGEST = ROW_DATA + MM_CUDA_TASK_SLOTS * MM_CUDA_ROW_DATA_BYTES,
    INVERSES = LARGEST + 8 * MM_N * 4, /* float [MM_N]: what h is multiplied by */
    EXPONENTS = INVERSES + MM_N * 4,   /* uint8 [MM_N]: of FC2's input */
    TASKS = EXPONENTS + MM_N,          /* mm_task [MM_CUDA_TASK_SLOTS] */
    BARRIERS = TASKS + MM_CUDA_TASK_SLOTS * 64,
    FULL = BARRIERS,
    EMPTY = FULL + 8 * STAGES_MAX,
    TASK_FULL = EMPTY + 8 * STAGES_MAX,
    TASK_EMPTY = TASK_FULL + 8 * MM_CUDA_TASK_SLOTS,
    OUT_FULL = TASK_EMPTY + 8 * MM_CUDA_TASK_SLOTS,
    OUT_EMPTY = OUT_FULL + 8,
    RING = (OUT_EMPTY + 8 + 1023) / 1024 * 1024
};

enum { TASK_FC1, TASK_FC2, TASK_END };

/* What a tile of FC1 adds to its counter: 1, and where a token's exponent is not the usual one,
 * another count. */
enum { FC1_UNUSUAL = 1 << 16 };

/* How the scales of tokens enter a sum; SCALES_ONE: all of them are one power of two. */
enum { SCALES_NONE, SCALES_ONE, SCALES_EXPONENTS, SCALES_FLOATS };

/* A tile: 256 packed rows of weights times up to MM_N tokens of one expert. */
typedef struct mm_task {
    int32_t kind;
    int32_t expert;   /* local */
    int32_t tile;     /* of rows */
    int32_t chunks;   /* of K */
    int32_t row;      /* of its first token in the pools */
    int32_t valid;    /* tokens */
    int32_t unit;     /* the token tile, for counters */
    int32_t scales;   /* how they enter its sums */
    uint64_t *stamps; /* of a traced forward, or NULL */
    int32_t unused_too[6];
} mm_task;

/* Words that the threads of a block share. */
typedef struct mm_words {
    int32_t stop;  /* nothing more is to be computed */
    int32_t next;  /* of this block's routes to dispatch */
    int32_t units; /* token tiles of this rank */
    /* The top-k sum (combine.cuh). */
    int32_t span;      /* segments of a part */
    int32_t parts;     /* of a token */
    int32_t own;       /* tokens that are this block's; 0: parts are dealt out */
    int32_t next_own;  /* of those, that math is to look at */
    int32_t combining; /* math has come to sum */
    uint32_t looked;   /* when a thread that waits last looked at host_abort, in ticks */
} mm_words;

static_assert(sizeof(mm_words) <= NEEDS - WORDS, "words overlap what follows them");

/* One block's view of the forward. */
typedef struct mm_block {
    const mm_cuda_forward_args *args;
    const mm_cuda_rank *rank;
    uint8_t *smem; /* aligned to 1024 */
    mm_words *words;
    uint32_t shared; /* its shared-memory address */
    uint32_t epoch;
    uint32_t parity;
    int32_t block;
    int32_t tokens; /* staged */
    int32_t first;  /* this rank's first physical expert */
    /* Tables, [physical] each. */
    int32_t *mine;   /* routes of this rank to each expert */
    int32_t *total;  /* routes of all ranks to each */
    int32_t *start;  /* first row of each expert in its owner's pool */
    int32_t *cursor; /* row of this block's next route to each */
    int32_t *own;    /* place of this block's next route to each, in `order` */
    int32_t *tiles;  /* [local + 1]: first token tile of each local expert */
} mm_block;

/* One team's part of a block, for whoever works for it. The compiler knows that `args` and `rank`
 * are the kernel's own, in constant memory; of those in mm_block it does not. */
typedef struct mm_team {
    const mm_cuda_forward_args *args;
    const mm_cuda_rank *rank;
    uint8_t *smem;   /* the team's shared memory */
    uint32_t shared; /* its address */
    uint32_t block;  /* and that of the block's */
    int32_t index;
} mm_team;

/* FP32 scales of blocks need sums that begin anew with each block. */
MM_DEVICE uint32_t mm_scale_bytes(const mm_cuda_forward_args *args) {
    return MM_PROMOTE && args->input_scale == MEGAMOE_SCALE_BLOCK_F32 ? 4 : 1;
}

/* Stage scales follow the ring. */
MM_DEVICE uint32_t mm_stage_scales(const mm_cuda_forward_args *args) {
    return RING + (uint32_t)args->stages * STAGE_BYTES;
}

MM_DEVICE uint32_t mm_team_bytes(const mm_cuda_forward_args *args) {
    const uint32_t scales = (uint32_t)args->stages * SCALE_ROWS * mm_scale_bytes(args);
    return (mm_stage_scales(args) + scales + 1023) & ~1023u;
}

/* `smem` and `shared`: of the block, as a pointer and as an address. */
MM_DEVICE mm_team mm_team_of(const mm_cuda_forward_args *args, uint8_t *smem, uint32_t shared,
                             int32_t index) {
    const uint32_t place = FIRST_TEAM + (TEAMS > 1 ? (uint32_t)index * mm_team_bytes(args) : 0);
    const mm_cuda_rank *rank = &args->rank[blockIdx.x / (uint32_t)args->blocks];
    mm_team team = {args, rank, smem + place, shared + place, shared, index};
    return team;
}

/* Tables follow the teams. */
MM_DEVICE void mm_find_tables(mm_block *b) {
    int32_t *tables = (int32_t *)(b->smem + FIRST_TEAM + TEAMS * mm_team_bytes(b->args));
    b->mine = tables;
    b->total = b->mine + b->args->physical;
    b->start = b->total + b->args->physical;
    b->cursor = b->start + b->args->physical;
    b->own = b->cursor + b->args->physical;
    b->tiles = b->own + b->args->physical;
}

/* Places of scales inside a pool's 16 rows. */
MM_DEVICE int64_t mm_scale_place(int64_t row) {
    const int64_t column = row & 15;
    return (row & ~(int64_t)15) + 4 * (column / 2 % 4) + 2 * (column / 8) + column % 2;
}

MM_DEVICE int32_t mm_share_first(int32_t n, int32_t rank, int32_t ranks) {
    const int32_t longer = n % ranks;
    return rank * (n / ranks) + (rank < longer ? rank : longer);
}

MM_DEVICE int32_t mm_share_owner(int32_t n, int32_t index, int32_t ranks) {
    const int32_t longer = n % ranks, share = n / ranks;
    const int32_t in_longer = longer * (share + 1);
    return index < in_longer ? index / (share + 1) : longer + (index - in_longer) / share;
}

/* ---- times: kept by the first thread ---- */

MM_DEVICE volatile uint64_t *mm_times(const mm_block *b) {
    return (volatile uint64_t *)(b->smem + TIMES);
}

MM_DEVICE void mm_mark(const mm_block *b, mm_cuda_time what) {
    if (threadIdx.x == 0)
        mm_times(b)[what] = mm_globaltimer_ns();
}

/* ---- giving up ---- */

/* The first to report in this launch is heard. */
MM_DEVICE void mm_report(const mm_block *b, int32_t status, int32_t phase, int32_t rank,
                         int32_t token, int32_t slot, int64_t value) {
    volatile mm_cuda_found *found = b->rank->found;
    found->status = status;
    found->phase = phase;
    found->rank = rank;
    found->token = token;
    found->slot = slot;
    found->value = value;
    mm_fence_acq_rel_sys();
    found->epoch = b->epoch;
    mm_fence_acq_rel_sys();
}

MM_DEVICE uint32_t *mm_aborted_word(const mm_block *b, int32_t rank) {
    return (uint32_t *)(b->rank->windows[rank] + b->args->window.aborted);
}

/* This rank waits for `rank` no longer: tells all ranks, once, and stops this block. */
MM_DEVICE void mm_give_up(const mm_block *b, int32_t status, int32_t phase, int32_t rank) {
    if (atomicExch(&b->rank->state->gave_up, 1) == 0) {
        mm_report(b, status, phase, rank, -1, -1, 0);
        for (int32_t r = 0; r < b->args->ranks; r++)
            mm_store_relaxed_sys(mm_aborted_word(b, r), 1);
    }
    *(volatile int32_t *)&b->words->stop = 1;
}

enum {
    POLLS_PER_LOOK = 256,
    TICK = 22 /* 2^22 ns */
};

/* Whether the host has aborted. Of a block, one thread looks in a tick: the host's memory lies
 * behind a bus, and a thousand warps may wait. */
MM_DEVICE bool mm_host_aborted(const mm_block *b, uint64_t now) {
    const uint32_t tick = (uint32_t)(now >> TICK);
    return atomicExch(&b->words->looked, tick) != tick && *b->rank->host_abort != 0;
}

/*
 * One more fruitless poll of a word that `rank` writes. False once this rank has given up. `start`
 * is 0 before the first.
 */
MM_DEVICE bool mm_keep_waiting(const mm_block *b, uint32_t *polls, uint64_t *start, int32_t phase,
                               int32_t rank) {
    if (++*polls % POLLS_PER_LOOK)
        return true;
    const uint64_t now = mm_globaltimer_ns();
    if (*start == 0)
        *start = now;
    const bool aborted =
        mm_load_relaxed_sys(mm_aborted_word(b, b->rank->rank)) != 0 || mm_host_aborted(b, now);
    if (!aborted && now - *start <= b->args->deadline_ns)
        return true;
    mm_give_up(b, aborted ? MEGAMOE_EPEER : MEGAMOE_ETIMEDOUT, phase, aborted ? -1 : rank);
    return false;
}

#endif
