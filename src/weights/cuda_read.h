/* SPDX-License-Identifier: Apache-2.0 */
/* Reads rows of the tiles of cuda_layout.h as its kernels do: through the decode table. */
#ifndef MM_WEIGHTS_CUDA_READ_H
#define MM_WEIGHTS_CUDA_READ_H

#include "weights/cuda_layout.h"

/*
 * One row of one chunk: 128 multiplier operands after the row exponent, in the order of k. `low` is
 * zero except for exact NVFP4. Every byte of a blob has a meaning (NVFP4's scale byte 127 is NaN).
 */
void mm_cuda_read_chunk(const mm_cuda_layout *layout,
                        const uint8_t table[MM_CUDA_DECODE_TABLE_BYTES], const uint8_t *blob,
                        megamoe_projection projection, int32_t row, int32_t chunk,
                        float high[MM_CUDA_CHUNK_K], float low[MM_CUDA_CHUNK_K]);

int mm_cuda_read_exponent(const mm_cuda_layout *layout, const uint8_t *blob,
                          megamoe_projection projection, int32_t row);

/* Only of a layout with biases. */
float mm_cuda_read_bias(const mm_cuda_layout *layout, const uint8_t *blob,
                        megamoe_projection projection, int32_t row);

#endif
