/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the host gives the kernels. Included by C and by CUDA; plain integers and pointers only.
 *
 * Each rank has a window, laid out alike on all ranks, that other ranks write into, and local
 * memory that only its own kernels touch. Every word that another rank writes has one writer and
 * carries the epoch, the number of the forward on this workspace; nothing remote is incremented or
 * cleared. Epochs wrap. A word is one of this epoch, or of the last MM_CUDA_FORGET_EVERY: a rank
 * then makes its older words as if of the present epoch, so that none is there to be taken for new
 * when its number comes again.
 *
 * Token pools are [K / 128][rows][128]: each expert's rows are contiguous and begin at a multiple
 * of 16. The eight 16-byte pieces of a row's 128 bytes are stored at piece ^ (row % 8), the tensor
 * core's 128-byte swizzle; the order of the bytes is that of src/weights/cuda_layout.h.
 * Scales of a pool are [K / 128][rows]; inside 16 rows, row 8 j + 2 q + b stands at 4 q + 2 j + b.
 * Exponent bytes hold the exponent + 48.
 */
#ifndef MM_CUDA_KERNELS_ABI_H
#define MM_CUDA_KERNELS_ABI_H

#include <stdint.h>

enum {
    MM_CUDA_FOLDED_MAX = 8, /* ranks of one launch */
    MM_CUDA_RANKS_MAX = 64,
    MM_CUDA_EXPERTS_MAX = 1024, /* physical */
    MM_CUDA_BLOCKS_MAX = 256,   /* of a rank */
    MM_CUDA_ROW_MULTIPLE = 16,  /* of the start of an expert's rows in a pool */
    MM_CUDA_ROWS_BEYOND = 144,  /* a tile may read, but never uses, this many rows more */
    MM_CUDA_EXPONENT_BIAS = 48, /* of exponent bytes in pools */
    MM_CUDA_TASK_SLOTS = 4,
    MM_CUDA_FORGET_EVERY = 1 << 30,              /* epochs */
    MM_CUDA_ROW_DATA_BYTES = 256 + 256 * 4 + 16, /* of a tile: exponents, biases, globals */
    MM_CUDA_TINY = 1 << 30 /* in mm_cuda_record.rank: the second token factor is 2^-64 */
};

/* What travels with a row of FC1's input. */
typedef struct mm_cuda_record {
    float scale;   /* of the token; 1 where scales are per block */
    float weight;  /* of the route */
    int32_t rank;  /* of the token; MM_CUDA_TINY may be added */
    int32_t route; /* token * topk + slot */
} mm_cuda_record;

/* What a rank tells every other at the beginning of a forward; `epoch` is written last. */
typedef struct mm_cuda_cell {
    uint32_t epoch;
    int32_t status; /* megamoe_status of the staged batch */
    int32_t token, slot;
    int64_t value;
    uint64_t key; /* of the layer */
} mm_cuda_cell;

/* Offsets into a window. */
typedef struct mm_cuda_window {
    uint64_t cells;    /* mm_cuda_cell [parity 2][ranks] */
    uint64_t counts;   /* int32 [parity 2][ranks][physical]: routes of a rank to each expert */
    uint64_t arrivals; /* uint32 [local experts][ranks]: epoch in which a source's rows are in */
    uint64_t aborted;  /* uint32: not zero once a rank has given up */
    uint64_t codes;    /* pool of FC1's input */
    uint64_t scales;   /* its exponent bytes (SCALE_BLOCK) or floats (SCALE_BLOCK_F32) */
    uint64_t records;  /* mm_cuda_record [rows] */
    uint64_t results;  /* BF16 [tokens * topk][results_stride]: rows that experts return */
    uint64_t returned; /* uint32 [tokens * topk]: epoch in which a row is complete */
    uint64_t bytes;
} mm_cuda_window;

/*
 * What stays in its place as long as the layer lives, whatever its experts do: a graph finds here
 * what is so when it is replayed.
 */
typedef struct mm_cuda_layer_words {
    uint64_t key; /* equal on ranks whose layers fit together */
    /* Of the memory and the counts that arguments have; 0 while experts change places. A forward
     * that was captured under another form is refused before it reads what they name. */
    uint32_t form;
    uint32_t unused;
    uint64_t received[MM_CUDA_EXPERTS_MAX]; /* routes, by local expert, over all forwards */
} mm_cuda_layer_words;

/* Local memory that lives as long as the workspace; zeroed at its creation. */
typedef struct mm_cuda_state {
    uint32_t epoch;     /* of the last forward that all thread blocks have entered */
    uint32_t entered;   /* thread blocks that have read it for the current one */
    uint32_t claims[2]; /* by parity: tasks handed out after every team's first */
    uint32_t gave_up;   /* not zero once a thread block has reported that this rank waits no more */
    /* The staged batch. The error, if any, is that of the lowest `order`. */
    int32_t tokens;
    uint32_t lock;
    uint32_t left;  /* thread blocks that have left a forward in which words are forgotten */
    uint64_t order; /* UINT64_MAX: none; else token * (topk + 1) + slot, or + topk for a scale */
    int64_t value;
} mm_cuda_state;

/* Host-mapped; what a forward found. `epoch` is written last. */
typedef struct mm_cuda_found {
    uint32_t epoch; /* in which it was found */
    int32_t status; /* megamoe_status */
    int32_t phase;  /* megamoe_phase */
    int32_t rank;
    int32_t token, slot;
    int64_t value;
} mm_cuda_found;

/* When a thread block did what, by %globaltimer; the differences that FC1 and
 * FC2 took are summed over its tiles. */
typedef enum mm_cuda_time {
    MM_CUDA_TIME_ENTRY,
    MM_CUDA_TIME_BEGUN,    /* counted, agreed and sorted */
    MM_CUDA_TIME_FIRST,    /* the tokens of its first tile were there */
    MM_CUDA_TIME_FC1,      /* nanoseconds, waiting for tokens included */
    MM_CUDA_TIME_FC2,      /* likewise */
    MM_CUDA_TIME_LAST,     /* its last tile's sums were finished */
    MM_CUDA_TIME_COMBINED, /* its tokens were summed */
    MM_CUDA_TIMES = 8
} mm_cuda_time;

/* What a traced forward takes down of each tile, by %globaltimer. */
typedef enum mm_cuda_stamp {
    MM_CUDA_STAMP_CLAIMED,
    MM_CUDA_STAMP_READY,      /* its tokens are there */
    MM_CUDA_STAMP_LOADED,     /* all of its copies have been asked for */
    MM_CUDA_STAMP_FIRST,      /* its first stage is full */
    MM_CUDA_STAMP_MULTIPLIED, /* the main loop has ended */
    MM_CUDA_STAMP_FINISHED,   /* its results are in shared memory */
    MM_CUDA_STAMP_STORED,     /* and where they are needed */
    MM_CUDA_STAMPS
} mm_cuda_stamp;

typedef struct mm_cuda_traced_tile {
    uint64_t stamps[MM_CUDA_STAMPS];
    int32_t second; /* 0: FC1, 1: FC2 */
    int32_t expert, tile, tokens;
} mm_cuda_traced_tile;

enum { MM_CUDA_TRACED_TEAMS = 2 }; /* for which there is room */

/* And of each thread block, beside mm_cuda_time. */
typedef enum mm_cuda_block_stamp {
    MM_CUDA_STAMP_DISPATCHED,      /* by the math warps */
    MM_CUDA_STAMP_DISPATCHED_LAST, /* by the dispatch warps, where there are any */
    MM_CUDA_STAMP_COMBINING,
    MM_CUDA_BLOCK_STAMPS
} mm_cuda_block_stamp;

typedef struct mm_cuda_traced_block {
    uint64_t stamps[MM_CUDA_BLOCK_STAMPS]; /* 0 for what did not happen */
    uint32_t multiprocessor;
    uint32_t tiles[MM_CUDA_TRACED_TEAMS]; /* claimed; records begin with the first */
    uint32_t unused;
} mm_cuda_traced_block;

/* The staged batch of one rank: [tokens] rows. */
typedef struct mm_cuda_staged {
    uint8_t *codes;      /* [chunks * 128], in the order of cuda_layout.h, not swizzled */
    float *scales;       /* SCALE_TOKEN: [1] */
    uint8_t *tiny;       /* [1]: the second token factor is 2^-64 */
    uint8_t *blocks;     /* SCALE_BLOCK: E8M0 [chunks] */
    float *block_scales; /* SCALE_BLOCK_F32: [chunks] */
    int32_t *ids;        /* [topk] */
    float *weights;      /* [topk] */
} mm_cuda_staged;

/* One rank of a forward. */
typedef struct mm_cuda_rank {
    int32_t rank;
    int32_t local;                /* experts of this rank */
    const uint8_t *blobs;         /* [local] */
    const int32_t *replica_start; /* [experts + 1]; NULL: physical = logical */
    const int32_t *replicas;      /* [physical] */
    uint8_t *const *windows;      /* [ranks], device memory: every rank's window */
    mm_cuda_state *state;
    mm_cuda_found *found;
    const volatile uint32_t *host_abort; /* host-mapped: not zero after megamoe_comm_abort */
    mm_cuda_staged staged;
    int32_t *order;       /* int32 [tokens * topk][4]: scratch of dispatch */
    uint32_t *dispatched; /* [parity 2][physical]: routes stored */
    uint32_t *fc1_done;   /* [parity 2][units]: row tiles of a token tile that are finished */
    uint32_t *fc2_done;   /* [parity 2][units] */
    int32_t *received;    /* [local]: routes, for megamoe_workspace_receive_counts */
    uint64_t *times;      /* [blocks][MM_CUDA_TIMES] */
    mm_cuda_traced_block *traced_blocks; /* [blocks]; NULL: no trace is kept */
    mm_cuda_traced_tile *traced_tiles;   /* [blocks][MM_CUDA_TRACED_TEAMS][traced_room] */
    int64_t traced_room;
    uint8_t *hidden_codes;  /* pool of FC2's input */
    uint8_t *hidden_scales; /* its exponent bytes */
    uint16_t *y;            /* BF16 [tokens][y_stride] */
    int64_t y_stride;
    mm_cuda_layer_words *layer;
    uint32_t form; /* of the layer when this was launched or captured */
} mm_cuda_rank;

/* A forward of `here` ranks in one launch of here * blocks thread blocks. */
typedef struct mm_cuda_forward_args {
    int32_t here, blocks;
    int32_t ranks, physical, topk;
    int32_t hidden; /* without padding */
    int32_t hidden_chunks, intermediate_chunks, fc1_tiles, fc2_tiles;
    int32_t input_scale; /* megamoe_input_scale */
    int32_t weight_after_fc2;
    int32_t has_bias;
    int32_t stages;    /* of a team's ring in shared memory */
    int32_t lag;       /* token tiles by which FC2 follows FC1; more than there are: all */
    int32_t pool_rows; /* routes that a rank can receive */
    int64_t rows;      /* of each pool, padding included */
    int64_t units;     /* token tiles for which there are counters */
    int64_t results_stride;
    uint64_t deadline_ns;
    float alpha, offset, limit;
    uint64_t blob_bytes, fc1_offset, fc2_offset;
    uint64_t fc1_exponents_offset, fc2_exponents_offset;
    uint64_t fc1_bias_offset, fc2_bias_offset, globals_offset;
    const uint8_t *decode_table;
    mm_cuda_window window;
    mm_cuda_rank rank[MM_CUDA_FOLDED_MAX];
} mm_cuda_forward_args;

/* Staging. `x` is BF16 [n][x_stride], or NULL for the views of the workspace. */
typedef struct mm_cuda_stage_args {
    int32_t tokens, hidden, chunks, topk, experts;
    int32_t input_scale;
    const uint16_t *x;
    int64_t x_stride;
    const void *ids; /* NULL with x NULL */
    int64_t ids_stride;
    int32_t ids_are_64;
    const void *weights;
    int64_t weights_stride;
    int32_t weights_are_bf16;
    const uint8_t *view_codes; /* E4M3 [n][view_stride], natural order */
    int64_t view_stride;
    mm_cuda_staged staged;
    mm_cuda_state *state;
} mm_cuda_stage_args;

/*
 * Teams of a thread block: each works on a tile of its own, with a ring of its own, so that one
 * multiplies while the other finishes. Two where the registers suffice. `format` is mm_cuda_format.
 */
#define MM_CUDA_TEAMS(format, n, promote)                                                          \
    ((format) != 1 && !(promote) && (n) <= ((format) == 0 ? 80 : 64) ? 2 : 1)

/* 64-row chunks of a tile's four that a warpgroup multiplies: a team has two warpgroups or one. */
#define MM_CUDA_CHUNKS(format, n, promote)                                                         \
    (MM_CUDA_TEAMS(format, n, promote) == 2 && (n) > 40 ? 4 : 2)

/* Bytes of the parts of shared memory; n is the token tile. */
static inline uint32_t mm_cuda_stage_smem(uint32_t n, uint32_t weight_bytes, uint32_t scale_bytes) {
    return n * 128 + weight_bytes + (n + 15) / 16 * 16 * scale_bytes;
}

/* What a team has beside its ring. */
static inline uint32_t mm_cuda_team_smem(uint32_t n) {
    return n * 128 /* FC2's input on its way out */ +
           MM_CUDA_TASK_SLOTS * (n * 16 + 64 + MM_CUDA_ROW_DATA_BYTES) +
           14 * n * 4 /* largest magnitudes, scales */ + 3072 /* barriers, padding of the ring */;
}

/* What a block has beside its teams. The tables of experts come last. */
static inline uint32_t mm_cuda_block_smem(uint32_t table_bytes, uint32_t physical) {
    return table_bytes + 3072 /* words, routes in order, padding */ + (6 * physical + 16) * 4;
}

#endif
