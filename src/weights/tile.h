/* SPDX-License-Identifier: Apache-2.0 */
/* Where a row's bytes stand in the tiles of cpu_layout.h. */
#ifndef MM_WEIGHTS_TILE_H
#define MM_WEIGHTS_TILE_H

#include "weights/cpu_layout.h"

/* A row of one projection among the tiles of FC1 (gate, up) or FC2 (down). */
typedef struct mm_tile_row {
    int32_t tile;
    int32_t half;
    int32_t lane; /* 0..MM_TILE_HALF - 1 */
} mm_tile_row;

static inline mm_tile_row mm_tile_row_of(megamoe_projection projection, int32_t row) {
    if (projection == MEGAMOE_DOWN)
        return (mm_tile_row){row / MM_TILE_ROWS, row / MM_TILE_HALF % 2, row % MM_TILE_HALF};
    return (mm_tile_row){row / MM_TILE_HALF, projection == MEGAMOE_UP, row % MM_TILE_HALF};
}

/* The row's index in the tables of exponents and biases. */
static inline size_t mm_tile_row_index(mm_tile_row row) {
    return (size_t)row.tile * MM_TILE_ROWS + (size_t)(row.half * MM_TILE_HALF + row.lane);
}

static inline size_t mm_chunk_scale_bytes(mm_tile_format format) {
    return format == MM_TILE_MXFP4 ? MM_MXFP4_SCALE_BYTES : MM_NVFP4_SCALE_BYTES;
}

/* A whole chunk with its scales; not for E4M3 tiles. */
static inline size_t mm_chunk_bytes(mm_tile_format format) {
    return mm_chunk_scale_bytes(format) + MM_CHUNK_K / MM_SLICE_K * MM_SLICE_BYTES;
}

/* The scale byte of a group of `size` k, inside the tile; not for E4M3 tiles. */
static inline size_t mm_tile_scale_offset(mm_tile_format format, mm_tile_row row, int32_t group,
                                          int32_t size) {
    const int32_t in_chunk = MM_CHUNK_K / size;
    const size_t scales = mm_chunk_scale_bytes(format);
    return (size_t)(group / in_chunk) * mm_chunk_bytes(format) + (size_t)row.half * (scales / 2) +
           (size_t)(group % in_chunk * MM_TILE_HALF + row.lane);
}

/* The 4 bytes of the row's codes 8 * slice .. 8 * slice + 7; not for E4M3 tiles. */
static inline size_t mm_tile_word_offset(mm_tile_format format, mm_tile_row row, int32_t slice) {
    const int32_t in_chunk = MM_CHUNK_K / MM_SLICE_K;
    return (size_t)(slice / in_chunk + 1) * mm_chunk_scale_bytes(format) +
           (size_t)slice * MM_SLICE_BYTES + (size_t)row.half * (MM_SLICE_BYTES / 2) +
           (size_t)row.lane * 4;
}

/* One element of an E4M3 tile. */
static inline size_t mm_tile_e4m3_offset(mm_tile_row row, int32_t k) {
    return (size_t)(k / 2) * (2 * MM_TILE_ROWS) + (size_t)row.half * MM_TILE_ROWS +
           (size_t)row.lane * 2 + (size_t)(k % 2);
}

#endif
