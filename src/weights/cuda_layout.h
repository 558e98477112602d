/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA backend's layout of one expert: what the kernels of src/cuda read as multiplier operands
 * of `wgmma.m64nNk32` (A in registers) and src/weights writes.
 *
 * A chunk is 64 rows times 128 k, for the 128 lanes of one warpgroup. Lane t has warp w = t / 32,
 * g = t % 32 / 4 and c = t % 4; it holds rows 16 w + g and 16 w + g + 8:
 *   2048 bytes  plane 0, rows 16 w + g:     16 bytes for each lane, one word for each k32 step j
 *   2048 bytes  plane 1, rows 16 w + g + 8: likewise
 *   scales      MXFP4 2 bytes a lane: plane 0, plane 1
 *               NVFP4 4 bytes a lane: planes 0, 1 for steps j < 2, then planes 0, 1 for j >= 2
 * Word j of a lane holds the codes of k = 32 c + 8 j + 4 h + i, h = 0..1, i = 0..3: the magnitude
 * (3 bits) at bit 16 h + 4 i, the sign at bit 8 i + 7 for h = 0 and 8 i + 3 for h = 1. Place
 * 32 j + 16 h + 4 c + i of a token's 128 bytes carries the same k (mm_cuda_place_k).
 *
 * A tile is 256 rows: [K / 128][4 chunks]. In packed row R = 64 b + 16 w + 8 half + g of
 *   FC1 tile t  half 0 is the gate, half 1 the up of channel
 *               128 t + mm_cuda_place_k(32 b + 8 w + g), so that a warp writes 8 neighbouring bytes
 *               of FC2's input
 *   FC2 tile t  row 256 t + 128 (b / 2) + 32 w + 8 (g / 2) + 4 (b % 2) + 2 half + g % 2, so that a
 *               lane ends up with 8 neighbouring channels of its token
 * K is padded to 128 and rows to whole tiles with zero codes, scale bytes of zeros, row exponent 0
 * and bias 0.
 *
 * Scale bytes select a row of the decode table (mm_cuda_decode_table), 8 E4M3 magnitudes:
 *   MXFP4          k + 8 for a scale 2^k after the row exponent, 0..14; 15 for a group of zeros
 *   NVFP4          the 7-bit E4M3 code of the scale after the row exponent; 0 for a group of zeros
 *
 * A blob holds, each part 1024-byte aligned: FC1 tiles, FC2 tiles, FC1 row exponents (int8, in
 * packed row order, [tile][256]), FC2 row exponents, FC1 biases (F32, same order; only with
 * biases), FC2 biases, globals (F32: gate, up, down, one unused). Blobs are padded to 4096 bytes.
 */
#ifndef MM_WEIGHTS_CUDA_LAYOUT_H
#define MM_WEIGHTS_CUDA_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "megamoe/weights.h"

enum {
    MM_CUDA_TILE_ROWS = 256,
    MM_CUDA_TILE_CHANNELS = 128, /* of FC1: half of its rows are gates */
    MM_CUDA_CHUNK_K = 128,
    MM_CUDA_CHUNK_ROWS = 64,
    MM_CUDA_PLANE_BYTES = 2048,
    MM_CUDA_MXFP4_SCALE_BYTES = 256,
    MM_CUDA_NVFP4_SCALE_BYTES = 512,
    MM_CUDA_MXFP4_SCALE_ZERO = 8, /* the byte of 2^0 */
    MM_CUDA_MXFP4_SCALE_MAX = 14,
    MM_CUDA_MXFP4_SCALE_OF_ZEROS = 15,
    MM_CUDA_DECODE_TABLE_BYTES = 2 * 128 * 8 /* the largest */
};

typedef enum mm_cuda_format {
    MM_CUDA_MXFP4,
    MM_CUDA_NVFP4_EXACT,
    MM_CUDA_NVFP4_FOLDED,
    MM_CUDA_FORMATS
} mm_cuda_format;

/* The mode counts for NVFP4. */
mm_cuda_format mm_cuda_format_of(megamoe_format format, megamoe_nvfp4_mode mode);

/* Which k of a block of 128 stands at place 0..127 of its bytes. */
static inline int32_t mm_cuda_place_k(int32_t place) {
    return 32 * (place / 4 % 4) + 8 * (place / 32) + 4 * (place / 16 % 2) + place % 4;
}

typedef struct mm_cuda_layout {
    mm_cuda_format format;
    int32_t hidden_chunks;       /* of FC1: ceil(hidden / 128) */
    int32_t intermediate_chunks; /* of FC2: ceil(intermediate / 128) */
    int32_t fc1_tiles;           /* ceil(intermediate / 128) */
    int32_t fc2_tiles;           /* ceil(hidden / 256) */
    size_t stage_bytes;          /* 4 chunks: 256 rows times 128 k */
    size_t fc1_offset, fc2_offset;
    size_t fc1_exponents_offset, fc2_exponents_offset;
    size_t fc1_bias_offset, fc2_bias_offset; /* 0 without biases */
    size_t globals_offset;
    size_t blob_bytes;
} mm_cuda_layout;

/* Pure arithmetic; desc must be valid. */
mm_cuda_layout mm_cuda_layout_of(const megamoe_layer_desc *desc, megamoe_nvfp4_mode mode);

/*
 * Fills the table that the kernels decode with and returns its bytes: 8 E4M3 magnitudes for each
 * scale byte, by code. MXFP4: 16 rows. NVFP4 folded: 128 rows, code times scale rounded to nearest.
 * NVFP4 exact: 128 rows of the first term, then 128 of the second.
 */
size_t mm_cuda_decode_table(mm_cuda_format format, uint8_t table[MM_CUDA_DECODE_TABLE_BYTES]);

/* How weights that are prepared for "cuda" lie in their blobs; NULL for all others. */
const mm_cuda_layout *mm_weights_cuda_layout(const megamoe_weights *weights);

#endif
