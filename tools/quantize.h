/* SPDX-License-Identifier: Apache-2.0 */
/* From FP32 weights to 4-bit codes and block scales, round to nearest. */
#ifndef QUANTIZE_H
#define QUANTIZE_H

#include <stddef.h>
#include <stdint.h>

enum { MXFP4_BLOCK = 32, NVFP4_BLOCK = 16 };

/* n is a multiple of the block. codes: n / 2 bytes. scales: one byte a block. */
void quantize_mxfp4(const float *weights, size_t n, uint8_t *codes, uint8_t *scales);
void quantize_nvfp4(const float *weights, size_t n, float global, uint8_t *codes, uint8_t *scales);

/* The global scale of a matrix whose largest magnitude is `largest`. */
float quantize_nvfp4_global(float largest);

float quantize_largest(const float *weights, size_t n);

uint16_t quantize_bf16(float value);

#endif
