/* SPDX-License-Identifier: Apache-2.0 */
/* Where a row's bytes stand in the tiles of cuda_layout.h. */
#ifndef MM_WEIGHTS_CUDA_TILE_H
#define MM_WEIGHTS_CUDA_TILE_H

#include "weights/cuda_layout.h"

/* A row of one projection among the tiles of FC1 (gate, up) or FC2 (down). */
typedef struct mm_cuda_row {
    int32_t tile;
    int32_t packed; /* R of cuda_layout.h, 0..MM_CUDA_TILE_ROWS - 1 */
} mm_cuda_row;

/* The inverse of mm_cuda_place_k. */
static inline int32_t mm_cuda_place_of(int32_t k) {
    return 32 * (k / 8 % 4) + 16 * (k / 4 % 2) + 4 * (k / 32) + k % 4;
}

static inline mm_cuda_row mm_cuda_row_of(megamoe_projection projection, int32_t row) {
    if (projection == MEGAMOE_DOWN) {
        const int32_t r = row % MM_CUDA_TILE_ROWS;
        const int32_t block = 2 * (r / 128) + r / 4 % 2;
        const int32_t g = 2 * (r / 8 % 4) + r % 2;
        return (mm_cuda_row){row / MM_CUDA_TILE_ROWS,
                             64 * block + 16 * (r / 32 % 4) + 8 * (r / 2 % 2) + g};
    }
    const int32_t place = mm_cuda_place_of(row % MM_CUDA_TILE_CHANNELS);
    return (mm_cuda_row){row / MM_CUDA_TILE_CHANNELS, 64 * (place / 32) + 16 * (place / 8 % 4) +
                                                          8 * (projection == MEGAMOE_UP) +
                                                          place % 8};
}

/* The row's index in the tables of exponents and biases. */
static inline size_t mm_cuda_row_index(mm_cuda_row row) {
    return (size_t)row.tile * MM_CUDA_TILE_ROWS + (size_t)row.packed;
}

static inline size_t mm_cuda_chunk_bytes(mm_cuda_format format) {
    return 2 * (size_t)MM_CUDA_PLANE_BYTES +
           (format == MM_CUDA_MXFP4 ? MM_CUDA_MXFP4_SCALE_BYTES : MM_CUDA_NVFP4_SCALE_BYTES);
}

/* Where the row's part of a stage begins: 4 lanes, a quarter of its 128 k each. */
typedef struct mm_cuda_row_offsets {
    size_t codes;  /* 64 bytes: word 4 c + j holds k = 32 c + 8 j .. 32 c + 8 j + 7 */
    size_t scales; /* of its first group; the others follow every 2 bytes, in the order of k */
} mm_cuda_row_offsets;

static inline mm_cuda_row_offsets mm_cuda_row_offsets_of(mm_cuda_format format, mm_cuda_row row) {
    const size_t packed = (size_t)row.packed;
    const size_t chunk = packed / MM_CUDA_CHUNK_ROWS * mm_cuda_chunk_bytes(format);
    const size_t plane = packed / 8 % 2;
    const size_t lane = 32 * (packed / 16 % 4) + 4 * (packed % 8);
    const size_t lane_scales = format == MM_CUDA_MXFP4 ? 2 : 4;
    return (mm_cuda_row_offsets){chunk + plane * MM_CUDA_PLANE_BYTES + lane * 16,
                                 chunk + 2 * (size_t)MM_CUDA_PLANE_BYTES + lane * lane_scales +
                                     plane};
}

#endif
