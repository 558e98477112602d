/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a token tile of a forward costs, in microseconds for 32 experts of 4096 x 2048 on an H200;
 * only ratios matter. bench/tile_costs.py writes this file from what `megamoe tune --json`
 * measures.
 *
 * Source: flash-mxfp4.json flash-nvfp4-exact.json flash-nvfp4-folded.json
 */
#ifndef MM_CUDA_TILE_COSTS_H
#define MM_CUDA_TILE_COSTS_H

/* Of reading an expert's weights from memory. */
#define MM_TILE_READING_COST 75.4

/* X(format, promote, teams, of a tile, of each of its tokens) */
#define MM_TILE_COSTS(X)                                                                           \
    X(MM_CUDA_MXFP4, 0, 1, 66.04, 0.513)                                                           \
    X(MM_CUDA_MXFP4, 0, 2, 61.01, 0.45)                                                            \
    X(MM_CUDA_MXFP4, 1, 1, 72, 1.13)                                                               \
    X(MM_CUDA_NVFP4_EXACT, 0, 1, 113.6, 0.695)                                                     \
    X(MM_CUDA_NVFP4_EXACT, 1, 1, 110, 2)                                                           \
    X(MM_CUDA_NVFP4_FOLDED, 0, 1, 67.88, 0.516)                                                    \
    X(MM_CUDA_NVFP4_FOLDED, 0, 2, 66.91, 0.296)                                                    \
    X(MM_CUDA_NVFP4_FOLDED, 1, 1, 72, 1.13)

#endif
