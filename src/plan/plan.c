/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/plan.h"

#include <math.h>

double mm_plan_routes(int64_t tokens, int32_t topk, int32_t physical) {
    return (double)tokens * topk / physical;
}

/*
 * An expert whose routes do not fit one tile is read from memory (or L2) once more for the rest; a
 * tile wider than needed costs multiplications on padding. The first is dearer while experts are
 * read once, so the tile holds all routes of nearly every expert: with random routing their number
 * is binomial, and two deviations above the mean cover 98 % of the experts. Experts with more
 * routes than the widest tile are cut in any case, and fewest pieces are best.
 */
int32_t mm_plan_token_tile(const int32_t *tiles, int32_t n, double routes) {
    const double wanted = routes + 2 * sqrt(routes);
    for (int32_t i = 0; i < n - 1; i++)
        if (tiles[i] >= wanted)
            return tiles[i];
    return tiles[n - 1];
}

int32_t mm_plan_stages(int64_t shared_bytes, int64_t fixed_bytes, int64_t stage_bytes) {
    const int64_t stages = (shared_bytes - fixed_bytes) / stage_bytes;
    if (stages < MM_PLAN_STAGES_MIN)
        return 0;
    return stages < MM_PLAN_STAGES_MAX ? (int32_t)stages : MM_PLAN_STAGES_MAX;
}

int32_t mm_plan_blocks(int32_t blocks, int32_t here) {
    return blocks / here;
}

/*
 * A wave is one tile for every block. FC2 waits for all FC1 tiles of its tokens: one wave later the
 * last of them has begun, half a wave more lets it end.
 */
int32_t mm_plan_lag(int32_t blocks, int32_t fc1_tiles) {
    const int64_t lag =
        (3 * (int64_t)blocks + 2 * (int64_t)fc1_tiles - 1) / (2 * (int64_t)fc1_tiles);
    return lag < 1 ? 1 : (int32_t)lag;
}
