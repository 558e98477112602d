/* SPDX-License-Identifier: Apache-2.0 */
#include "cpu/reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "num/bf16.h"
#include "num/e4m3.h"
#include "num/e8m0.h"
#include "num/exp.h"
#include "num/input.h"
#include "num/wgmma.h"

enum { BLOCK = MM_BLOCK_CHANNELS };

/*
 * FP32 sums are taken 2^48 too large and scaled back, so that they stay normal whatever the block
 * scales of weights and activations are. Powers of two: nothing else changes.
 */
#define SUM_LIFT 0x1p48f

void mm_reference_quantize(const uint16_t *x, int32_t n, megamoe_input_scale mode,
                           mm_reference_input *input) {
    const int32_t blocks = (int32_t)mm_ceil_div(n, BLOCK);
    input->scale = 1.0f;
    input->factor = 1.0f;
    memset(input->blocks, MM_BLOCK_BYTE_ZERO, (size_t)blocks);
    const int32_t length = mode == MEGAMOE_SCALE_TOKEN ? n : BLOCK; /* values under one scale */
    for (int32_t start = 0; start < n; start += length) {
        const int32_t end = (int32_t)mm_min(start + length, n);
        float amax = 0.0f;
        bool finite = true;
        for (int32_t i = start; i < end; i++) {
            const float magnitude = fabsf(mm_bf16_to_f32(x[i]));
            finite = finite && isfinite(magnitude);
            amax = magnitude > amax ? magnitude : amax;
        }
        const int32_t exponent = mm_block_exponent(mm_f32_bits(finite ? amax : INFINITY));
        if (mode == MEGAMOE_SCALE_BLOCK)
            input->blocks[start / BLOCK] = (uint8_t)(MM_BLOCK_BYTE_ZERO + exponent);
        if (!finite) {
            memset(input->codes + start, MM_E4M3_NAN, (size_t)(end - start));
        } else if (mode == MEGAMOE_SCALE_BLOCK) {
            for (int32_t i = start; i < end; i++)
                input->codes[i] = mm_e4m3_from_f32(ldexpf(mm_bf16_to_f32(x[i]), -exponent));
        } else if (amax == 0.0f) {
            memset(input->codes + start, 0, (size_t)(end - start));
            input->scale = 0.0f;
        } else {
            const mm_token_scale token = mm_token_scale_of(amax);
            for (int32_t i = start; i < end; i++)
                input->codes[i] =
                    mm_e4m3_from_f32(mm_bf16_to_f32(x[i]) * token.lift * token.inverse);
            input->scale = token.scale;
            input->factor = token.factor;
        }
    }
}

void mm_reference_quantize_hidden(const float *h, int32_t n, mm_reference_input *input) {
    input->scale = 1.0f;
    input->factor = 1.0f;
    for (int32_t start = 0; start < n; start += BLOCK) {
        const int32_t end = (int32_t)mm_min(start + BLOCK, n);
        float amax = 0.0f;
        bool finite = true;
        for (int32_t i = start; i < end; i++) {
            finite = finite && isfinite(h[i]);
            amax = fabsf(h[i]) > amax ? fabsf(h[i]) : amax;
        }
        const int32_t exponent = mm_block_exponent(mm_f32_bits(finite ? amax : INFINITY));
        for (int32_t i = start; i < end; i++)
            input->codes[i] = finite ? mm_e4m3_from_f32(h[i] * mm_exp2i(-exponent)) : MM_E4M3_NAN;
        input->blocks[start / BLOCK] = (uint8_t)(MM_BLOCK_BYTE_ZERO + exponent);
    }
}

/* One block of n finite values with this largest magnitude. */
static void quantize_block_int8(const float *values, int32_t n, float amax, uint8_t *codes,
                                float *block_scale) {
    const mm_int8_scale block = mm_int8_scale_of(amax);
    for (int32_t i = 0; i < n; i++)
        codes[i] = (uint8_t)(int8_t)lrintf(values[i] * block.lift * block.inverse);
    *block_scale = block.scale;
}

void mm_reference_quantize_hidden_int8(const float *h, int32_t n, mm_reference_input *input) {
    input->scale = 1.0f;
    input->factor = 1.0f;
    for (int32_t start = 0; start < n; start += BLOCK) {
        const int32_t length = (int32_t)mm_min(BLOCK, n - start);
        float amax = 0.0f;
        bool finite = true;
        for (int32_t i = start; i < start + length; i++) {
            finite = finite && isfinite(h[i]);
            amax = fabsf(h[i]) > amax ? fabsf(h[i]) : amax;
        }
        if (finite && amax > 0.0f) {
            quantize_block_int8(h + start, length, amax, input->codes + start,
                                &input->block_scales[start / BLOCK]);
        } else {
            memset(input->codes + start, 0, (size_t)length);
            input->block_scales[start / BLOCK] = finite ? 0.0f : NAN;
        }
    }
}

void mm_reference_quantize_int8(const uint16_t *x, int32_t n, mm_reference_input *input) {
    for (int32_t start = 0; start < n; start += BLOCK) {
        float values[BLOCK];
        const int32_t length = (int32_t)mm_min(BLOCK, n - start);
        for (int32_t i = 0; i < length; i++)
            values[i] = mm_bf16_to_f32(x[start + i]);
        mm_reference_input block = {.codes = input->codes + start,
                                    .block_scales = &input->block_scales[start / BLOCK]};
        mm_reference_quantize_hidden_int8(values, length, &block);
    }
    input->scale = 1.0f;
    input->factor = 1.0f;
}

/* Pairs of k ascending; in a pair the odd k first (docs/numerics.md, item 10). */
static float sum_fp32(const float *high, const float *low, const uint8_t *codes, float scale,
                      int32_t n, float sum) {
    for (int32_t k = 0; k < n; k += 2)
        for (int32_t i = k + 1 < n ? k + 1 : k; i >= k; i--)
            sum = fmaf(mm_e4m3_to_f32(codes[i]) * scale, (high[i] + low[i]) * SUM_LIFT, sum);
    return sum;
}

/* One block of up to 128 k: the four steps of the first term, then those of the second. */
static float sum_wgmma(const mm_reference_row *row, const uint8_t *codes, int32_t start,
                       float sum) {
    const uint8_t *const terms[2] = {row->high_codes, row->low_codes};
    for (int term = 0; term < 2; term++) {
        if (!terms[term])
            continue;
        for (int step = 0; step < BLOCK / MM_WGMMA_K; step++) {
            uint8_t a[MM_WGMMA_K] = {0}, b[MM_WGMMA_K] = {0};
            for (int place = 0; place < MM_WGMMA_K; place++) {
                const int32_t k = start + mm_wgmma_k(step, place);
                if (k < row->n) {
                    a[place] = terms[term][k];
                    b[place] = codes[k];
                }
            }
            sum = mm_wgmma_step(a, b, sum);
        }
    }
    return sum;
}

float mm_reference_dot(const mm_reference_row *row, const mm_reference_input *input,
                       megamoe_sum sum, megamoe_accumulate accumulate) {
    float total = 0.0f;
    int32_t exponent = 0; /* of the block that the accumulator is scaled for */
    for (int32_t start = 0; start < row->n; start += BLOCK) {
        const uint8_t *codes = input->codes + start;
        const int32_t n = (int32_t)mm_min(BLOCK, row->n - start);
        const int32_t e = (int32_t)input->blocks[start / BLOCK] - MM_BLOCK_BYTE_ZERO;
        if (accumulate == MEGAMOE_ACCUMULATE_PROMOTE) {
            const float partial =
                sum == MEGAMOE_SUM_FP32
                    ? sum_fp32(row->high + start, row->low + start, codes, 1.0f, n, 0.0f)
                    : sum_wgmma(row, input->codes, start, 0.0f);
            total = fmaf(partial, mm_exp2i(e), total);
        } else if (sum == MEGAMOE_SUM_FP32) {
            total = sum_fp32(row->high + start, row->low + start, codes, mm_exp2i(e), n, total);
        } else {
            if (start > 0)
                total *= mm_exp2i(exponent - e);
            exponent = e;
            total = sum_wgmma(row, input->codes, start, total);
        }
    }
    if (sum == MEGAMOE_SUM_FP32)
        return total / SUM_LIFT;
    return accumulate == MEGAMOE_ACCUMULATE_PROMOTE ? total : total * mm_exp2i(exponent);
}

float mm_reference_dot_int8(const mm_reference_row *row, int32_t group,
                            const mm_reference_input *input) {
    float total = 0.0f;
    for (int32_t start = 0; start < row->n; start += BLOCK) {
        const int32_t end = (int32_t)mm_min(start + BLOCK, row->n);
        float partial = 0.0f;
        for (int32_t first = start; first < end; first += group) {
            float sum = 0.0f; /* multiples of one unit, less than 2^24 of them: exact */
            for (int32_t k = first; k < end && k < first + group; k++)
                sum += (float)(int8_t)input->codes[k] * (row->high[k] + row->low[k]);
            partial += sum;
        }
        total = fmaf(partial, input->block_scales[start / BLOCK], total);
    }
    return total;
}
