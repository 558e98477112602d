/* SPDX-License-Identifier: Apache-2.0 */
/* Rounding wider weights to MXFP4 and NVFP4, as docs/numerics.md, item 8, says. */
#ifndef MM_WEIGHTS_QUANTIZE_H
#define MM_WEIGHTS_QUANTIZE_H

#include <stdint.h>

#include "megamoe/weights.h"

/*
 * Weights are finite doubles with at most 28 significant bits (an E4M3 times an F32, a BF16), so
 * that every comparison below is exact. The largest magnitude of n of them; NaN or infinity if
 * there is one.
 */
double mm_largest(const double *weights, int32_t n);

/* The global scale of a matrix whose largest magnitude is `largest`; 1 for MXFP4. */
float mm_quantize_global(megamoe_format format, double largest);

/* One row of n weights, a multiple of the group. codes: n / 2 bytes; scales: one for each group. */
void mm_quantize_row(megamoe_format format, const double *weights, int32_t n, float global,
                     uint8_t *codes, uint8_t *scales);

#endif
