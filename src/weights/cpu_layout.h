/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CPU's layout of one expert: what the kernels of src/cpu read and src/weights writes.
 *
 * A tile is 32 rows times all of K, one contiguous stream. Its two halves are 16 rows each:
 *   FC1 tile t  half 0 = gate rows 16t..16t+15, half 1 = up rows 16t..16t+15
 *   FC2 tile t  half 0 = rows 32t..32t+15,      half 1 = rows 32t+16..32t+31
 * K is padded to a multiple of 32 and rows to whole tiles with zero codes, row exponent 0, bias 0.
 *
 * MXFP4 and NVFP4 tiles are a sequence of chunks of 128 k (the last one 32, 64, 96 or 128):
 *   scales, always as if the chunk were whole
 *     MXFP4  128 bytes: [half 2][group of 32 k: 4][row 16]
 *     NVFP4  256 bytes: [half 2][group of 16 k: 8][row 16]
 *   slices of 8 k, 128 bytes each: [half 2][row 16][4 bytes]
 *     the 4 bytes are a little-endian word: the code of k = 2i is in bits 4i..4i+3, that of
 *     k = 2i+1 in bits 16+4i..19+4i, i = 0..3
 * Scale bytes, after the row exponent (weight = code * scale * 2^row_exponent * global):
 *   MXFP4  s: code * 2^(MM_MXFP4_SCALE_ZERO - s); this holds MM_MXFP4_BIAS more than the scale, so
 *          a sum is 2^MM_MXFP4_BIAS times too large. Subtracting s from the exponent field of
 *          BF16(code * 2^MM_MXFP4_SCALE_ZERO) gives the operand.
 *   NVFP4  s: code * (1 + (s & 7) / 8) * 2^(MM_NVFP4_SCALE_ZERO - (s >> 3)); no bias
 *   A group whose codes or whose scale are zero has zero codes and any scale byte. The packer
 *   writes MM_MXFP4_SCALE_OF_ZEROS, also for padding: a kernel is fastest with scales that are near
 *   each other.
 *
 * E4M3 tiles (folded NVFP4) have no scales: for each pair of k 64 bytes, [half 2][row 16][k 2].
 *
 * A blob holds, each part 64-byte aligned: FC1 tiles, FC2 tiles, FC1 row exponents (int8, in tile
 * row order: [tile][half][16]), FC2 row exponents, FC1 biases (F32, same order; only with biases),
 * FC2 biases, globals (F32: gate, up, down, one unused). Blobs are padded to 4096 bytes.
 */
#ifndef MM_WEIGHTS_CPU_LAYOUT_H
#define MM_WEIGHTS_CPU_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "megamoe/weights.h"

enum {
    MM_TILE_ROWS = 32,
    MM_TILE_HALF = 16,
    MM_CHUNK_K = 128,
    MM_K_MULTIPLE = 32,
    MM_SLICE_K = 8,
    MM_SLICE_BYTES = 128,
    MM_MXFP4_SCALE_BYTES = 128,
    MM_NVFP4_SCALE_BYTES = 256,
    MM_MXFP4_SCALE_ZERO = 125,
    MM_MXFP4_BIAS = 48,
    MM_MXFP4_SCALE_OF_ZEROS = MM_MXFP4_SCALE_ZERO - MM_MXFP4_BIAS,
    MM_NVFP4_SCALE_ZERO = 9
};

/* What a tile holds. */
typedef enum mm_tile_format {
    MM_TILE_MXFP4,
    MM_TILE_NVFP4,
    MM_TILE_E4M3,
    MM_TILE_FORMATS
} mm_tile_format;

/* Bytes of a tile of k columns, k a multiple of MM_K_MULTIPLE. */
size_t mm_tile_bytes(mm_tile_format format, int32_t k);

typedef struct mm_cpu_layout {
    mm_tile_format format;
    int32_t hidden_k;       /* padded K of FC1 */
    int32_t intermediate_k; /* padded K of FC2 */
    int32_t fc1_tiles;
    int32_t fc2_tiles;
    size_t fc1_tile_bytes;
    size_t fc2_tile_bytes;
    size_t fc1_offset, fc2_offset;
    size_t fc1_exponents_offset, fc2_exponents_offset;
    size_t fc1_bias_offset, fc2_bias_offset; /* 0 without biases */
    size_t globals_offset;
    size_t blob_bytes;
} mm_cpu_layout;

/* Pure arithmetic; desc must be valid. */
mm_cpu_layout mm_cpu_layout_of(const megamoe_layer_desc *desc, megamoe_nvfp4_mode mode);

/* Pointers into one blob. */
typedef struct mm_cpu_expert {
    const uint8_t *fc1, *fc2;
    const int8_t *fc1_exponents, *fc2_exponents;
    const float *fc1_bias, *fc2_bias; /* NULL without biases */
    float global[3];                  /* by megamoe_projection */
} mm_cpu_expert;

mm_cpu_expert mm_cpu_expert_of(const mm_cpu_layout *layout, const uint8_t *blob);

/*
 * Packs one expert of checkpoint weights into a zeroed blob of layout->blob_bytes.
 * MEGAMOE_EINEXACT if a group lies so far below its row's largest that CPU sums would lose it
 * (more than MM_MXFP4_BIAS + 68 binades below the window's base), named by tensor, row and block.
 */
MEGAMOE_CHECKED megamoe_status mm_cpu_pack_expert(const megamoe_weights *weights,
                                                  const mm_cpu_layout *layout, int32_t expert,
                                                  uint8_t *blob);

/*
 * The packed blob of one expert of prepared weights while it is held (hold.h); NULL for weights in
 * checkpoint form.
 */
const uint8_t *mm_weights_blob(const megamoe_weights *weights, int32_t expert);

#endif
