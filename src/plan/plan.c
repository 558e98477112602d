/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/plan.h"

#include <math.h>

double mm_plan_routes(int64_t tokens, int32_t topk, int32_t physical) {
    return (double)tokens * topk / physical;
}

/* Of a normal variable with this mean and deviation. */
static double probability_above(double x, double mean, double deviation) {
    return 0.5 * erfc((x - mean) / (deviation * sqrt(2.0)));
}

/*
 * Tiles of `n` tokens that an expert's routes fill, at least one. With random routing the routes
 * are binomial, close to normal with a variance of the mean; where they vary by more than a tile,
 * the last one is half full on average. This is asked at every forward, so sums are kept short.
 */
static double expected_tiles(double n, double routes) {
    const double deviation = sqrt(routes), most = routes + 6 * deviation;
    if (deviation > n)
        return (routes - 0.5) / n + 0.5;
    const double sure = fmax(0, floor((routes - 6 * deviation) / n)); /* full, nearly always */
    double tiles = 1 + sure;
    for (double full = (sure + 1) * n; full < most; full += n)
        tiles += probability_above(full + 0.5, routes, deviation);
    return tiles;
}

/*
 * An expert's first tile waits for its weights from memory or for the tensor cores, whichever takes
 * longer; the others find the weights in L2.
 */
static double expected_cost(const mm_plan_tile *tile, double reading, double routes) {
    return fmax(tile->cost, reading) + (expected_tiles(tile->tokens, routes) - 1) * tile->cost;
}

/* What a wider tile has to gain. */
static const double GAIN = 0.99;

int32_t mm_plan_token_tile(const mm_plan_tile *tiles, int32_t n, double reading, double routes) {
    int32_t best = 0;
    double least = INFINITY;
    for (int32_t i = 0; i < n; i++) {
        const double cost = expected_cost(&tiles[i], reading, routes);
        if (cost < GAIN * least) {
            least = cost;
            best = i;
        }
    }
    return tiles[best].tokens;
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

/* Token tiles whose FC1 is so many half waves. A wave is one tile for every team. */
static int32_t half_waves(int32_t halves, int32_t teams, int32_t fc1_tiles) {
    const int64_t tiles =
        (halves * (int64_t)teams + 2 * (int64_t)fc1_tiles - 1) / (2 * (int64_t)fc1_tiles);
    return tiles < 1 ? 1 : (int32_t)tiles;
}

/*
 * FC2 after all of FC1 leaves least waiting at the end. But what FC2 returns over a link should not
 * all come at the end: much of it is spread over the forward, FC2 of a token tile one and a half
 * waves after its FC1: one wave later FC1's last tile has begun, half a wave more lets it end.
 */
int32_t mm_plan_lag(int32_t teams, int32_t fc1_tiles, double returned_bytes) {
    static const double MUCH = 32 << 20;
    if (returned_bytes < MUCH)
        return INT32_MAX;
    return half_waves(3, teams, fc1_tiles);
}

int32_t mm_plan_lags(int32_t teams, int32_t fc1_tiles, double token_tiles,
                     int32_t lags[MM_PLAN_LAGS_MAX]) {
    static const int32_t halves[] = {2, 3, 6};
    int32_t n = 0;
    for (int i = 0; i < 3; i++) {
        const int32_t lag = half_waves(halves[i], teams, fc1_tiles);
        if (lag < token_tiles && (n == 0 || lag > lags[n - 1]))
            lags[n++] = lag;
    }
    lags[n++] = INT32_MAX;
    return n;
}
