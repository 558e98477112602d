/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a token tile of a forward costs, in microseconds for 32 experts of 4096 x 2048 on an H200;
 * only ratios matter. bench/tile_costs.py writes this file from what `megamoe tune --json`
 * measures.
 *
 * Source: by hand (docs/kernel-notes.md).
 */
#ifndef MM_CUDA_TILE_COSTS_H
#define MM_CUDA_TILE_COSTS_H

/* Of reading an expert's weights from memory. */
#define MM_TILE_READING_COST 97

/* X(format, promote, teams, of a tile, of each of its tokens) */
#define MM_TILE_COSTS(X)                                                                           \
    X(MM_CUDA_MXFP4, 0, 1, 72, 1.13)                                                               \
    X(MM_CUDA_MXFP4, 0, 2, 78, 0.75)                                                               \
    X(MM_CUDA_MXFP4, 1, 1, 72, 1.13)                                                               \
    X(MM_CUDA_NVFP4_EXACT, 0, 1, 110, 2)                                                           \
    X(MM_CUDA_NVFP4_EXACT, 1, 1, 110, 2)                                                           \
    X(MM_CUDA_NVFP4_FOLDED, 0, 1, 72, 1.13)                                                        \
    X(MM_CUDA_NVFP4_FOLDED, 0, 2, 78, 0.75)                                                        \
    X(MM_CUDA_NVFP4_FOLDED, 1, 1, 72, 1.13)

#endif
