/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sum of Hopper's E4M3 tensor core, to the bit (docs/numerics.md).
 *
 * One step adds 32 products to an accumulator: all are aligned to the largest exponent among them
 * (a product's is the sum of its factors' exponents, a subnormal's being -6, not normalised),
 * truncated toward zero to 13 fraction bits and added exactly; the result is truncated to 14
 * significant bits. A zero sum is +0. NaN gives NaN.
 */
#ifndef MM_NUM_WGMMA_H
#define MM_NUM_WGMMA_H

#include <stdint.h>

enum { MM_WGMMA_K = 32 };

float mm_wgmma_step(const uint8_t a[MM_WGMMA_K], const uint8_t b[MM_WGMMA_K], float accumulator);

/*
 * Which k of a block of 128 is at place `place` (0..31) of step `step` (0..3): the four lanes of a
 * quad own a quarter of the block each.
 */
static inline int32_t mm_wgmma_k(int32_t step, int32_t place) {
    return 32 * (place / 8) + 8 * step + place % 8;
}

#endif
