/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/tiles.h"

#include "cuda/cubins.h"
#include "cuda/kernels/abi.h"
#include "cuda/tile_costs.h"

static mm_plan_tile tile_of(const mm_forward_variant *variant) {
    static const struct {
        mm_cuda_format format;
        bool promote;
        int32_t tokens;
        double cost;
    } costs[] = {
#define X(format, promote, tokens, cost) {format, promote, tokens, cost},
        MM_TILE_COSTS(X)
#undef X
    };
    size_t i = 0; /* each kernel has its row */
    while (i + 1 < sizeof costs / sizeof *costs &&
           (costs[i].format != variant->format || costs[i].promote != variant->promote ||
            costs[i].tokens != variant->tile_tokens))
        i++;
    return (mm_plan_tile){variant->tile_tokens, costs[i].cost};
}

int32_t mm_cuda_tiles(mm_cuda_format format, bool promote, mm_plan_tile tiles[MM_CUDA_TILES_MAX]) {
    int32_t count = 0;
    for (int32_t i = 0; i < mm_forward_variant_count && count < MM_CUDA_TILES_MAX; i++)
        if (mm_forward_variants[i].format == format && mm_forward_variants[i].promote == promote)
            tiles[count++] = tile_of(&mm_forward_variants[i]);
    return count;
}

int32_t mm_cuda_token_tile(mm_cuda_format format, bool promote, double routes) {
    mm_plan_tile tiles[MM_CUDA_TILES_MAX] = {{0}};
    const int32_t count = mm_cuda_tiles(format, promote, tiles);
    return mm_plan_token_tile(tiles, count, MM_TILE_READING_COST, routes);
}
