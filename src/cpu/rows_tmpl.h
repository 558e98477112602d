/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The row-wise kernels of one tier. Included once by each of rows_scalar.c, rows_avx2.c and
 * rows_avx512.c, which define MM_ROWS(name); the compiler vectorises the loops for the flags of
 * that file. All operations are IEEE, so every tier gives the same bits.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "cpu/kernels.h"
#include "num/bf16.h"
#include "num/e4m3.h"
#include "num/e8m0.h"
#include "num/gated.h"
#include "num/input.h"

#ifndef MM_ROWS
#error "define MM_ROWS(name)"
#endif

/* Bits of the largest magnitude of n BF16 values, as BF16. Beyond 0x7F7F the row is not finite. */
static uint32_t largest_bf16(const uint16_t *x, int32_t n) {
    uint16_t largest = 0;
    for (int32_t i = 0; i < n; i++) {
        const uint16_t magnitude = x[i] & 0x7FFFu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

void MM_ROWS(quantize_token)(const uint16_t *x, int32_t n, uint8_t *codes, float *scale,
                             float *factor) {
    const uint32_t largest = largest_bf16(x, n);
    if (largest == 0 || largest >= 0x7F80u) {
        memset(codes, largest ? MM_E4M3_NAN : 0, (size_t)n);
        *scale = largest ? 1.0f : 0.0f;
        *factor = 1.0f;
        return;
    }
    const mm_token_scale token = mm_token_scale_of(mm_bf16_to_f32((uint16_t)largest));
    const float lift = token.lift, inverse = token.inverse;
    for (int32_t i = 0; i < n; i++)
        codes[i] = mm_e4m3_from_f32(mm_bf16_to_f32(x[i]) * lift * inverse);
    *scale = token.scale;
    *factor = token.factor;
}

void MM_ROWS(quantize_blocks)(const uint16_t *x, int32_t n, uint8_t *codes, uint8_t *scales) {
    for (int32_t start = 0; start < n; start += MM_BLOCK) {
        const int32_t count = n - start < MM_BLOCK ? n - start : MM_BLOCK;
        const uint16_t *from = x + start;
        uint8_t *to = codes + start;
        const uint32_t largest = largest_bf16(from, count);
        const int32_t exponent = mm_block_exponent(largest << 16);
        scales[start / MM_BLOCK] = (uint8_t)(exponent + MM_BLOCK_BYTE_ZERO);
        if (largest >= 0x7F80u) {
            memset(to, MM_E4M3_NAN, (size_t)count);
            continue;
        }
        const float inverse = mm_exp2i(-exponent);
        for (int32_t i = 0; i < count; i++)
            to[i] = mm_e4m3_from_f32(mm_bf16_to_f32(from[i]) * inverse);
    }
}

void MM_ROWS(expand)(const uint8_t *codes, const uint8_t *scales, int32_t n, int32_t k,
                     uint32_t *panel, int32_t tokens, int32_t column) {
    for (int32_t start = 0; start < k; start += MM_CHUNK_K) {
        const int32_t count = k - start < MM_CHUNK_K ? k - start : MM_CHUNK_K;
        const int32_t present = n - start < count ? n - start : count;
        const float scale = scales ? mm_e8m0_to_f32(scales[start / MM_CHUNK_K]) : 1.0f;
        uint16_t values[MM_CHUNK_K];
        for (int32_t i = 0; i < present; i++)
            values[i] = (uint16_t)(mm_f32_bits(mm_e4m3_to_f32(codes[start + i]) * scale) >> 16);
        for (int32_t i = present > 0 ? present : 0; i < count; i++)
            values[i] = 0;
        uint32_t *to = panel + (size_t)(start / 2) * (size_t)tokens + column;
        for (int32_t p = 0; p < count / 2; p++)
            to[(size_t)p * (size_t)tokens] = (uint32_t)values[2 * p] | (uint32_t)values[2 * p + 1]
                                                                           << 16;
    }
}

/* An int8 block of zeros (`largest` 0), or one that is not finite. */
static void blank_int8(uint8_t *codes, int32_t n, uint32_t largest, float *scale) {
    for (int32_t i = 0; i < n; i++)
        codes[i] = 0;
    *scale = largest ? NAN : 0.0f;
}

void MM_ROWS(quantize_int8)(const uint16_t *x, int32_t n, uint8_t *codes, float *scales) {
    for (int32_t start = 0; start < n; start += MM_BLOCK) {
        const int32_t count = n - start < MM_BLOCK ? n - start : MM_BLOCK;
        const uint16_t *from = x + start;
        uint8_t *to = codes + start;
        const uint32_t largest = largest_bf16(from, count);
        if (largest == 0 || largest >= 0x7F80u) {
            blank_int8(to, count, largest, &scales[start / MM_BLOCK]);
            continue;
        }
        const mm_int8_scale block = mm_int8_scale_of(mm_bf16_to_f32((uint16_t)largest));
        const float lift = block.lift, inverse = block.inverse;
        for (int32_t i = 0; i < count; i++)
            to[i] = mm_int8_from_f32(mm_bf16_to_f32(from[i]) * lift * inverse);
        scales[start / MM_BLOCK] = block.scale;
    }
}

void MM_ROWS(expand_int8)(const uint8_t *codes, int32_t n, int32_t k, int32_t group_k,
                          uint32_t *panel, int32_t tokens, int32_t column) {
    uint32_t *to = panel + column;
    for (int32_t start = 0; start < k; start += group_k) {
        uint8_t group[MM_K_MULTIPLE] = {0};
        if (n > start)
            memcpy(group, codes + start, (size_t)(n - start < group_k ? n - start : group_k));
        int32_t sum = 0;
        for (int32_t i = 0; i < group_k; i++)
            sum += (int8_t)group[i];
        to[0] = (uint32_t)(-MM_INT8_OFFSET * sum);
        to += tokens;
        for (int32_t i = 0; i < group_k; i += MM_SLICE_K, to += 2 * (size_t)tokens) {
            const uint8_t *x = group + i;
            to[0] =
                (uint32_t)x[0] | (uint32_t)x[4] << 8 | (uint32_t)x[1] << 16 | (uint32_t)x[5] << 24;
            to[tokens] =
                (uint32_t)x[2] | (uint32_t)x[6] << 8 | (uint32_t)x[3] << 16 | (uint32_t)x[7] << 24;
        }
    }
}

/* The row factors of one tile. In a loop of their own: bytes would halve the vectors of the rest.
 */
static void row_factors(const int8_t *exponents, float factors[MM_TILE_ROWS]) {
    for (int32_t i = 0; i < MM_TILE_ROWS; i++)
        factors[i] = mm_exp2i(exponents[i]);
}

/* The part of an epilogue that is the same everywhere. */
static inline float scaled(float sum, float sum_scale, float token_scale, float token_factor,
                           float global, float row_factor, float bias) {
    return fmaf(sum * sum_scale * token_scale * token_factor * global, row_factor, bias);
}

void MM_ROWS(activate)(const mm_activate *a) {
    static const float no_bias[MM_TILE_ROWS];
    const float sum_scale = a->sum_scale, gate_global = a->gate_global, up_global = a->up_global;
    const float alpha = a->alpha, offset = a->offset, limit = a->limit;
    for (int32_t tile = 0; tile < a->tiles; tile++) {
        float factors[MM_TILE_ROWS];
        row_factors(a->exponents + tile * MM_TILE_ROWS, factors);
        const float *bias = a->bias ? a->bias + tile * MM_TILE_ROWS : no_bias;
        for (int32_t token = 0; token < a->tokens; token++) {
            const float *sums = a->sums + (size_t)(tile * a->tokens + token) * MM_TILE_ROWS;
            float *h = a->h + token * MM_BLOCK + tile * MM_TILE_HALF;
            const float scale = a->token_scale[token], factor = a->token_factor[token];
            const float weight = a->route_weight ? a->route_weight[token] : 1.0f;
            for (int32_t i = 0; i < MM_TILE_HALF; i++) {
                const int32_t j = i + MM_TILE_HALF;
                const float g =
                    scaled(sums[i], sum_scale, scale, factor, gate_global, factors[i], bias[i]);
                const float u =
                    scaled(sums[j], sum_scale, scale, factor, up_global, factors[j], bias[j]);
                h[i] = mm_gated(g, u, alpha, offset, limit) * weight;
            }
        }
    }
}

/* Bits of the largest magnitude of n values. From 0x7F800000 on not all are finite. */
static uint32_t largest_f32(const float *h, int32_t n) {
    uint32_t largest = 0;
    for (int32_t i = 0; i < n; i++) {
        const uint32_t magnitude = mm_f32_bits(h[i]) & 0x7FFFFFFFu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

void MM_ROWS(quantize_hidden)(const float *h, int32_t n, uint8_t *codes, uint8_t *scale) {
    const uint32_t largest = largest_f32(h, n);
    const int32_t exponent = mm_block_exponent(largest);
    *scale = (uint8_t)(exponent + MM_BLOCK_BYTE_ZERO);
    if (largest >= 0x7F800000u) {
        memset(codes, MM_E4M3_NAN, (size_t)n);
        return;
    }
    const float inverse = mm_exp2i(-exponent);
    for (int32_t i = 0; i < n; i++)
        codes[i] = mm_e4m3_from_f32(h[i] * inverse);
}

void MM_ROWS(quantize_hidden_int8)(const float *h, int32_t n, uint8_t *codes, float *scale) {
    const uint32_t largest = largest_f32(h, n);
    if (largest == 0 || largest >= 0x7F800000u) {
        blank_int8(codes, n, largest, scale);
        return;
    }
    const mm_int8_scale block = mm_int8_scale_of(mm_f32_from_bits(largest));
    const float lift = block.lift, inverse = block.inverse;
    for (int32_t i = 0; i < n; i++)
        codes[i] = mm_int8_from_f32(h[i] * lift * inverse);
    *scale = block.scale;
}

void MM_ROWS(finish)(const mm_finish *f) {
    static const float no_bias[MM_TILE_ROWS];
    const float *bias = f->bias ? f->bias : no_bias;
    const float sum_scale = f->sum_scale, global = f->global;
    float factors[MM_TILE_ROWS];
    row_factors(f->exponents, factors);
    for (int32_t token = 0; token < f->tokens; token++) {
        const float *sums = f->sums + (size_t)token * MM_TILE_ROWS;
        const float weight = f->route_weight[token];
        const float bias_weight = f->weight_after ? 1.0f : weight;
        const float row_weight = f->weight_after ? weight : 1.0f;
        uint16_t values[MM_TILE_ROWS];
        for (int32_t i = 0; i < MM_TILE_ROWS; i++) {
            const float value =
                scaled(sums[i], sum_scale, 1.0f, 1.0f, global, factors[i], bias_weight * bias[i]);
            values[i] = mm_bf16_from_f32(value * row_weight);
        }
        memcpy(f->out[token], values, (size_t)f->rows * sizeof values[0]);
    }
}

void MM_ROWS(combine)(const uint16_t *const *routes, int32_t n_routes, int32_t n, uint16_t *y) {
    enum { STRIP = 128 };
    for (int32_t start = 0; start < n; start += STRIP) {
        const int32_t count = n - start < STRIP ? n - start : STRIP;
        float sum[STRIP] = {0};
        for (int32_t r = 0; r < n_routes; r++) {
            const uint16_t *row = routes[r] + start;
            for (int32_t i = 0; i < count; i++)
                sum[i] += mm_bf16_to_f32(row[i]);
        }
        for (int32_t i = 0; i < count; i++)
            y[start + i] = mm_bf16_from_f32(sum[i]);
    }
}
