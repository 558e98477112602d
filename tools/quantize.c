/* SPDX-License-Identifier: Apache-2.0 */
#include "quantize.h"

#include <math.h>
#include <string.h>

static const float largest_e2m1 = 6;
static const float largest_e4m3 = 448;
static const float smallest_e4m3 = 0x1p-9f;

/* The E2M1 code of x. A value in the middle goes to the even code; -0 keeps its sign. */
static uint8_t e2m1_code(float x) {
    const float a = fabsf(x);
    const int magnitude = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) +
                          (a >= 3.5f) + (a > 5.0f);
    return (uint8_t)(magnitude | (x < 0) << 3);
}

static void pack_codes(const float *weights, size_t n, float factor, uint8_t *codes) {
    for (size_t i = 0; i < n; i += 2)
        codes[i / 2] =
            (uint8_t)(e2m1_code(weights[i] * factor) | e2m1_code(weights[i + 1] * factor) << 4);
}

float quantize_largest(const float *weights, size_t n) {
    float largest = 0;
    for (size_t i = 0; i < n; i++) {
        const float a = fabsf(weights[i]);
        largest = a > largest ? a : largest;
    }
    return largest;
}

void quantize_mxfp4(const float *weights, size_t n, uint8_t *codes, uint8_t *scales) {
    for (size_t i = 0; i < n; i += MXFP4_BLOCK) {
        /* The smallest power of two under which no code saturates. */
        int exponent = 0;
        const float largest = quantize_largest(weights + i, MXFP4_BLOCK);
        const float fraction = frexpf(largest, &exponent); /* in 0.5..1 */
        exponent -= fraction > 0.75f ? 2 : 3;
        if (largest == 0 || exponent < -126)
            exponent = -126;
        scales[i / MXFP4_BLOCK] = (uint8_t)(exponent + 127);
        pack_codes(weights + i, MXFP4_BLOCK, ldexpf(1, -exponent), codes + i / 2);
    }
}

/* The E4M3 code of x in smallest_e4m3..largest_e4m3, ties to even. *value is what it stands for. */
static uint8_t e4m3_code(float x, float *value) {
    int exponent;
    frexpf(x, &exponent);
    exponent = exponent - 1 < -6 ? -6 : exponent - 1; /* subnormals share the smallest one */
    const int mantissa = (int)rintf(ldexpf(x, 3 - exponent));
    *value = ldexpf((float)mantissa, exponent - 3);
    /* Eighths beyond the first carry into the exponent field; a subnormal's has none. */
    return (uint8_t)(((exponent + 6) << 3) + mantissa);
}

float quantize_nvfp4_global(float largest) {
    return largest > 0 ? largest / (largest_e2m1 * largest_e4m3) : 1;
}

void quantize_nvfp4(const float *weights, size_t n, float global, uint8_t *codes, uint8_t *scales) {
    for (size_t i = 0; i < n; i += NVFP4_BLOCK) {
        const float largest = quantize_largest(weights + i, NVFP4_BLOCK);
        float scale = largest / largest_e2m1 / global;
        if (largest == 0)
            scale = 1;
        scale = fminf(fmaxf(scale, smallest_e4m3), largest_e4m3);
        float rounded;
        scales[i / NVFP4_BLOCK] = e4m3_code(scale, &rounded);
        pack_codes(weights + i, NVFP4_BLOCK, 1 / (rounded * global), codes + i / 2);
    }
}

uint16_t quantize_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
