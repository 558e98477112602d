/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dot kernels in plain C, the readable form of the order in kernels.h. The product of an E4M3
 * activation and a weight is exact in FP32, so a multiplication and an addition are its fma.
 */
#include <math.h>
#include <string.h>

#include "cpu/kernels.h"
#include "num/bf16.h"
#include "num/e2m1.h"
#include "num/e4m3.h"

/* The weights of one chunk of a tile. */
typedef float weight_rows[MM_CHUNK_K][MM_TILE_ROWS];

/* Reads the chunk of chunk_k columns at `chunk` and returns where the next one starts. */
typedef const uint8_t *(*decode_fn)(const uint8_t *chunk, int32_t chunk_k, weight_rows w);

/* 2^exponent; zero below FP32's normals, which only groups of zero codes use. */
static float power_of_two(int32_t exponent) {
    return mm_f32_from_bits(exponent > -127 ? (uint32_t)(exponent + 127) << 23 : 0u);
}

static float mxfp4_scale(uint8_t byte) {
    return power_of_two(MM_MXFP4_SCALE_ZERO - byte);
}

static float nvfp4_scale(uint8_t byte) {
    return (1.0f + (float)(byte & 7) / 8.0f) * power_of_two(MM_NVFP4_SCALE_ZERO - (byte >> 3));
}

/* `slices` of 8 k with one scale for each row: codes to rows k = 0, 1, ... of w. */
static void decode_group(const uint8_t *codes, int32_t slices, const float scale[MM_TILE_ROWS],
                         float (*w)[MM_TILE_ROWS]) {
    for (int32_t slice = 0; slice < slices; slice++)
        for (int32_t row = 0; row < MM_TILE_ROWS; row++) {
            const uint8_t *bytes = codes + slice * MM_SLICE_BYTES + row * 4;
            for (int32_t i = 0; i < 4; i++) {
                const int32_t k = slice * MM_SLICE_K + 2 * i;
                const unsigned even = bytes[i / 2] >> 4 * (i % 2) & 15u;
                const unsigned odd = bytes[2 + i / 2] >> 4 * (i % 2) & 15u;
                w[k][row] = mm_e2m1_to_f32(even) * scale[row];
                w[k + 1][row] = mm_e2m1_to_f32(odd) * scale[row];
            }
        }
}

/* A chunk of codes with a scale byte for every group_k columns of a row. */
static const uint8_t *decode_groups(const uint8_t *chunk, int32_t chunk_k, int32_t group_k,
                                    float (*scale_of)(uint8_t byte), weight_rows w) {
    const int32_t groups = MM_CHUNK_K / group_k;
    const uint8_t *codes = chunk + groups * MM_TILE_ROWS;
    for (int32_t group = 0; group < chunk_k / group_k; group++) {
        float scale[MM_TILE_ROWS];
        for (int32_t row = 0; row < MM_TILE_ROWS; row++) {
            const int32_t half = row / MM_TILE_HALF;
            scale[row] =
                scale_of(chunk[(half * groups + group) * MM_TILE_HALF + row % MM_TILE_HALF]);
        }
        decode_group(codes, group_k / MM_SLICE_K, scale, w + group * group_k);
        codes += group_k / MM_SLICE_K * MM_SLICE_BYTES;
    }
    return codes;
}

static const uint8_t *decode_mxfp4(const uint8_t *chunk, int32_t chunk_k, weight_rows w) {
    return decode_groups(chunk, chunk_k, 32, mxfp4_scale, w);
}

static const uint8_t *decode_nvfp4(const uint8_t *chunk, int32_t chunk_k, weight_rows w) {
    return decode_groups(chunk, chunk_k, 16, nvfp4_scale, w);
}

static const uint8_t *decode_e4m3(const uint8_t *chunk, int32_t chunk_k, weight_rows w) {
    for (int32_t k = 0; k < chunk_k; k++)
        for (int32_t row = 0; row < MM_TILE_ROWS; row++)
            w[k][row] = mm_e4m3_to_f32(chunk[(k / 2 * MM_TILE_ROWS + row) * 2 + k % 2]);
    return chunk + chunk_k * MM_TILE_ROWS;
}

static void add_product(float sum[MM_TILE_ROWS], float x, const float w[MM_TILE_ROWS]) {
    for (int32_t row = 0; row < MM_TILE_ROWS; row++)
        sum[row] += x * w[row];
}

static void dot_tile(const mm_dot *d, const uint8_t *chunk, float *out, decode_fn decode) {
    memset(out, 0, (size_t)d->tokens * MM_TILE_ROWS * sizeof *out);
    const uint32_t *x = d->x;
    const float *chunk_scale = d->chunk_scale;
    for (int32_t k = 0; k < d->k; k += MM_CHUNK_K) {
        const int32_t chunk_k = d->k - k < MM_CHUNK_K ? d->k - k : MM_CHUNK_K;
        weight_rows w;
        chunk = decode(chunk, chunk_k, w);
        for (int32_t token = 0; token < d->tokens; token++) {
            float *total = out + token * MM_TILE_ROWS;
            float partial[MM_TILE_ROWS] = {0};
            float *sum = chunk_scale ? partial : total;
            for (int32_t pair = 0; pair < chunk_k / 2; pair++) {
                const uint32_t both = x[pair * d->tokens + token];
                add_product(sum, mm_f32_from_bits(both & 0xFFFF0000u), w[2 * pair + 1]);
                add_product(sum, mm_f32_from_bits(both << 16), w[2 * pair]);
            }
            if (chunk_scale)
                for (int32_t row = 0; row < MM_TILE_ROWS; row++)
                    total[row] = fmaf(partial[row], chunk_scale[token], total[row]);
        }
        x += chunk_k / 2 * d->tokens;
        if (chunk_scale)
            chunk_scale += d->tokens;
    }
}

static void dot(const mm_dot *d, decode_fn decode) {
    for (int32_t tile = 0; tile < d->tiles; tile++)
        dot_tile(d, d->weights + (size_t)tile * d->tile_bytes,
                 d->out + (size_t)tile * (size_t)d->tokens * MM_TILE_ROWS, decode);
}

void mm_dot_mxfp4_scalar(const mm_dot *d) {
    dot(d, decode_mxfp4);
}

void mm_dot_nvfp4_scalar(const mm_dot *d) {
    dot(d, decode_nvfp4);
}

void mm_dot_e4m3_scalar(const mm_dot *d) {
    dot(d, decode_e4m3);
}

void mm_dot_peak_scalar(int64_t rounds, double *flops) {
    enum { CHAINS = 40 };
    float sum[CHAINS];
    for (int32_t i = 0; i < CHAINS; i++)
        sum[i] = (float)i; /* equal chains would be merged */
    const float x = 1.0f / (float)rounds;
    for (int64_t round = 0; round < rounds; round++)
        for (int32_t i = 0; i < CHAINS; i++)
            sum[i] = sum[i] * x + x;
    for (int32_t i = 1; i < CHAINS; i++)
        sum[0] += sum[i];
    volatile float keep = sum[0];
    (void)keep;
    *flops = (double)rounds * CHAINS * 2;
}
