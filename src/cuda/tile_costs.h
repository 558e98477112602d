/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a token tile of a forward costs, in microseconds for 32 experts of 4096 x 2048 on an H200;
 * only ratios matter. bench/tile_costs.py writes this file from what `megamoe tune --json`
 * measures.
 *
 * Source: flash-mxfp4.json flash-nvfp4-exact.json flash-nvfp4-folded.json pro-mxfp4.json
 */
#ifndef MM_CUDA_TILE_COSTS_H
#define MM_CUDA_TILE_COSTS_H

/* Of reading an expert's weights from memory. */
#define MM_TILE_READING_COST 75.4

/* X(format, promote, tokens of a tile, cost) */
#define MM_TILE_COSTS(X)                                                                           \
    X(MM_CUDA_MXFP4, 0, 8, 59.82)                                                                  \
    X(MM_CUDA_MXFP4, 0, 16, 68.21)                                                                 \
    X(MM_CUDA_MXFP4, 0, 24, 71.81)                                                                 \
    X(MM_CUDA_MXFP4, 0, 32, 75.41)                                                                 \
    X(MM_CUDA_MXFP4, 0, 40, 85.33)                                                                 \
    X(MM_CUDA_MXFP4, 0, 48, 88)                                                                    \
    X(MM_CUDA_MXFP4, 0, 64, 96)                                                                    \
    X(MM_CUDA_MXFP4, 0, 80, 112.3)                                                                 \
    X(MM_CUDA_MXFP4, 0, 96, 115.3)                                                                 \
    X(MM_CUDA_MXFP4, 0, 112, 116.7)                                                                \
    X(MM_CUDA_MXFP4, 0, 128, 129.1)                                                                \
    X(MM_CUDA_MXFP4, 0, 144, 139.9)                                                                \
    X(MM_CUDA_MXFP4, 1, 16, 90.08)                                                                 \
    X(MM_CUDA_MXFP4, 1, 32, 108.2)                                                                 \
    X(MM_CUDA_MXFP4, 1, 48, 126.2)                                                                 \
    X(MM_CUDA_NVFP4_EXACT, 0, 8, 110.4)                                                            \
    X(MM_CUDA_NVFP4_EXACT, 0, 16, 129.7)                                                           \
    X(MM_CUDA_NVFP4_EXACT, 0, 24, 135.5)                                                           \
    X(MM_CUDA_NVFP4_EXACT, 0, 32, 135.8)                                                           \
    X(MM_CUDA_NVFP4_EXACT, 0, 48, 147)                                                             \
    X(MM_CUDA_NVFP4_EXACT, 0, 64, 158.1)                                                           \
    X(MM_CUDA_NVFP4_EXACT, 0, 80, 190)                                                             \
    X(MM_CUDA_NVFP4_EXACT, 0, 96, 194.7)                                                           \
    X(MM_CUDA_NVFP4_EXACT, 1, 16, 142)                                                             \
    X(MM_CUDA_NVFP4_FOLDED, 0, 8, 69.28)                                                           \
    X(MM_CUDA_NVFP4_FOLDED, 0, 16, 71.65)                                                          \
    X(MM_CUDA_NVFP4_FOLDED, 0, 24, 74.01)                                                          \
    X(MM_CUDA_NVFP4_FOLDED, 0, 32, 76.38)                                                          \
    X(MM_CUDA_NVFP4_FOLDED, 0, 40, 85.05)                                                          \
    X(MM_CUDA_NVFP4_FOLDED, 0, 48, 90)                                                             \
    X(MM_CUDA_NVFP4_FOLDED, 0, 64, 98)                                                             \
    X(MM_CUDA_NVFP4_FOLDED, 0, 80, 113.6)                                                          \
    X(MM_CUDA_NVFP4_FOLDED, 0, 96, 117.4)                                                          \
    X(MM_CUDA_NVFP4_FOLDED, 0, 112, 128.2)                                                         \
    X(MM_CUDA_NVFP4_FOLDED, 0, 128, 133.9)                                                         \
    X(MM_CUDA_NVFP4_FOLDED, 0, 144, 179.2)                                                         \
    X(MM_CUDA_NVFP4_FOLDED, 1, 16, 90.08)                                                          \
    X(MM_CUDA_NVFP4_FOLDED, 1, 32, 108.2)

#endif
