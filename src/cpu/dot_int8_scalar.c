/* SPDX-License-Identifier: Apache-2.0 */
/* Dot kernels of int8 activations in plain C, the readable form of their order in kernels.h. */
#include <math.h>
#include <string.h>

#include "cpu/kernels.h"
#include "num/bf16.h"
#include "num/e2m1.h"

/* Of 128 columns of one tile. */
struct chunk {
    int16_t weights[MM_CHUNK_K][MM_TILE_ROWS];               /* doubled */
    float scales[MM_CHUNK_K / MM_SLICE_K / 2][MM_TILE_ROWS]; /* of groups, halved */
};

static float mxfp4_scale(uint8_t byte) {
    const int field = MM_INT8_MXFP4_FIELD - byte;
    return mm_f32_from_bits((uint32_t)(field > 0 ? field : 0) << 23);
}

static float nvfp4_scale(uint8_t byte) {
    const uint32_t field = (uint32_t)(MM_INT8_NVFP4_FIELD - (byte >> 3));
    return (1.0f + (float)(byte & 7) / 8.0f) * mm_f32_from_bits(field << 23);
}

/* Reads the chunk of chunk_k columns at `from` and returns where the next one starts. */
static const uint8_t *decode(const uint8_t *from, int32_t chunk_k, int32_t group_k,
                             struct chunk *to) {
    const int32_t groups = MM_CHUNK_K / group_k;
    for (int32_t group = 0; group < chunk_k / group_k; group++)
        for (int32_t row = 0; row < MM_TILE_ROWS; row++) {
            const uint8_t byte =
                from[(row / MM_TILE_HALF * groups + group) * MM_TILE_HALF + row % MM_TILE_HALF];
            to->scales[group][row] = group_k == 32 ? mxfp4_scale(byte) : nvfp4_scale(byte);
        }
    const uint8_t *codes = from + groups * MM_TILE_ROWS;
    for (int32_t k = 0; k < chunk_k; k++)
        for (int32_t row = 0; row < MM_TILE_ROWS; row++) {
            const int32_t place = k % MM_SLICE_K / 2; /* among the even or the odd k of a slice */
            const uint8_t byte =
                codes[k / MM_SLICE_K * MM_SLICE_BYTES + row * 4 + k % 2 * 2 + place / 2];
            const unsigned code = byte >> 4 * (place % 2) & 15u;
            to->weights[k][row] = (int16_t)(2 * mm_e2m1_to_f32(code));
        }
    return codes + chunk_k / MM_SLICE_K * MM_SLICE_BYTES;
}

/* The group's codes of one token, in the order of k. */
static void read_codes(const uint32_t *x, int32_t tokens, int32_t group_k,
                       int16_t codes[MM_K_MULTIPLE]) {
    static const int32_t places[2][4] = {{0, 4, 1, 5}, {2, 6, 3, 7}};
    for (int32_t word = 0; word < group_k / 4; word++)
        for (int32_t byte = 0; byte < 4; byte++)
            codes[word / 2 * MM_SLICE_K + places[word % 2][byte]] =
                (int8_t)(x[word * tokens] >> 8 * byte & 0xFFu);
}

static void dot_tile(const mm_dot *d, const uint8_t *weights, int32_t group_k, float *out) {
    const int32_t tokens = d->tokens;
    const uint32_t *x = d->x;
    const float *chunk_scale = d->chunk_scale;
    memset(out, 0, (size_t)tokens * MM_TILE_ROWS * sizeof *out);
    for (int32_t k = 0; k < d->k; k += MM_CHUNK_K, chunk_scale += tokens) {
        const int32_t chunk_k = d->k - k < MM_CHUNK_K ? d->k - k : MM_CHUNK_K;
        struct chunk chunk;
        weights = decode(weights, chunk_k, group_k, &chunk);
        float partial[MM_PANEL_TOKENS][MM_TILE_ROWS] = {{0}};
        for (int32_t group = 0; group < chunk_k / group_k; group++) {
            for (int32_t t = 0; t < tokens; t++) {
                int16_t codes[MM_K_MULTIPLE];
                read_codes(x + tokens + t, tokens, group_k, codes);
                int32_t sum[MM_TILE_ROWS] = {0};
                for (int32_t i = 0; i < group_k; i++)
                    for (int32_t row = 0; row < MM_TILE_ROWS; row++)
                        sum[row] += (int32_t)chunk.weights[group * group_k + i][row] * codes[i];
                for (int32_t row = 0; row < MM_TILE_ROWS; row++) /* the product is exact */
                    partial[t][row] += (float)sum[row] * chunk.scales[group][row];
            }
            x += mm_int8_panel_words(group_k, group_k) * tokens;
        }
        for (int32_t t = 0; t < tokens; t++)
            for (int32_t row = 0; row < MM_TILE_ROWS; row++) {
                float *total = &out[t * MM_TILE_ROWS + row];
                *total = fmaf(partial[t][row], chunk_scale[t], *total);
            }
    }
}

static void dot(const mm_dot *d, int32_t group_k) {
    for (int32_t tile = 0; tile < d->tiles; tile++)
        dot_tile(d, d->weights + (size_t)tile * d->tile_bytes, group_k,
                 d->out + (size_t)tile * (size_t)d->tokens * MM_TILE_ROWS);
}

void mm_dot_mxfp4_int8_scalar(const mm_dot *d) {
    dot(d, 32);
}

void mm_dot_nvfp4_int8_scalar(const mm_dot *d) {
    dot(d, 16);
}

void mm_dot_peak_int8_scalar(int64_t rounds, double *flops) {
    enum { CHAINS = 64 };
    int16_t w[CHAINS];
    int32_t sum[CHAINS];
    for (int32_t i = 0; i < CHAINS; i++) {
        w[i] = (int16_t)i;
        sum[i] = i;
    }
    for (int64_t round = 0; round < rounds; round++) {
        const int16_t x = (int16_t)(round & 0x7F);
        for (int32_t i = 0; i < CHAINS; i++)
            sum[i] = (int32_t)((uint32_t)sum[i] + (uint32_t)((int32_t)w[i] * x));
    }
    for (int32_t i = 1; i < CHAINS; i++)
        sum[0] ^= sum[i];
    volatile int32_t keep = sum[0];
    (void)keep;
    *flops = (double)rounds * CHAINS * 2;
}
