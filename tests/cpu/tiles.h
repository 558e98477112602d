/* SPDX-License-Identifier: Apache-2.0 */
/* Tiles of random weights, and their values by the text of weights/cpu_layout.h. */
#ifndef TESTS_CPU_TILES_H
#define TESTS_CPU_TILES_H

#include "cpu/kernels.h"
#include "t.h"

/* What a problem's numbers are like. */
enum spread {
    USUAL, /* scales and activations within some binades */
    WIDE,  /* all that the quantization of activations can give and, in some tiles, all scales */
    NANS,  /* wide, and every third token has a NaN */
    SPREADS
};

size_t tile_bytes_of(mm_tile_format format, int32_t k);

/* MXFP4's are 2^MM_MXFP4_BIAS too large, as sums are. */
float weight_at(mm_tile_format format, const uint8_t *tile, int32_t row, int32_t k);

/* Codes of all values. Groups of zeros have any scale byte, or 0 as the packer writes. */
void fill_weights(t_random *r, mm_tile_format format, int32_t k, enum spread spread, uint8_t *tile);

void *need(size_t bytes);
bool same_float(float a, float b);

#endif
