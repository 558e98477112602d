/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a forward is cut up for a GPU: pure functions of geometry, batch and device. Nothing here
 * shows in a result, so all of it may be tuned.
 */
#ifndef MM_PLAN_PLAN_H
#define MM_PLAN_PLAN_H

#include <stdint.h>

enum {
    MM_PLAN_STAGES_MIN = 2, /* one is read while the next arrives */
    MM_PLAN_STAGES_MAX = 12
};

/* Routes that a physical expert gets on average; `tokens` are those of all ranks. */
double mm_plan_routes(int64_t tokens, int32_t topk, int32_t physical);

/* A width of token tiles. */
typedef struct mm_plan_tile {
    int32_t tokens;
    double cost; /* of the multiplications of one tile, in units of `reading` below */
} mm_plan_tile;

/*
 * The token tile for experts with `routes` routes on average, out of the `n` (at least 1) ascending
 * widths in `tiles`. `reading` is the cost of reading an expert's weights from memory.
 */
int32_t mm_plan_token_tile(const mm_plan_tile *tiles, int32_t n, double reading, double routes);

/*
 * Stages of the ring that fit into `shared_bytes` of shared memory beside `fixed_bytes`; 0 if there
 * is no room for MM_PLAN_STAGES_MIN.
 */
int32_t mm_plan_stages(int64_t shared_bytes, int64_t fixed_bytes, int64_t stage_bytes);

/*
 * Token tiles by which FC2 follows FC1, for a rank that works on `teams` tiles at once and returns
 * `returned_bytes` of rows to other GPUs; INT32_MAX: FC2 after all of FC1.
 */
int32_t mm_plan_lag(int32_t teams, int32_t fc1_tiles, double returned_bytes);

/*
 * The lags that are worth measuring for a rank with about `token_tiles` token tiles, ascending; the
 * last is INT32_MAX. Returns how many.
 */
enum { MM_PLAN_LAGS_MAX = 4 };
int32_t mm_plan_lags(int32_t teams, int32_t fc1_tiles, double token_tiles,
                     int32_t lags[MM_PLAN_LAGS_MAX]);

/* Thread blocks for each of `here` ranks that share `blocks`; 0 if there are too few. */
int32_t mm_plan_blocks(int32_t blocks, int32_t here);

#endif
