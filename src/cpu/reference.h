/* SPDX-License-Identifier: Apache-2.0 */
/* The pieces of the scalar reference, for tests that check stage by stage. */
#ifndef MM_CPU_REFERENCE_H
#define MM_CPU_REFERENCE_H

#include "megamoe/reference.h"

/* One token as FC1 or FC2 reads it. */
typedef struct mm_reference_input {
    uint8_t *codes;      /* [n]: E4M3, or int8 */
    uint8_t *blocks;     /* E8M0 [ceil(n / 128)]; 127 (one) where the scale is per token; of E4M3 */
    float *block_scales; /* [ceil(n / 128)]; of int8 */
    float scale;         /* per token; 1 where scales are per block */
    float factor;        /* second factor of tiny tokens, else 1 */
} mm_reference_input;

/* Quantizes a BF16 row; input->codes and ->blocks have room for it. */
void mm_reference_quantize(const uint16_t *x, int32_t n, megamoe_input_scale mode,
                           mm_reference_input *input);

/* Quantizes FC2's input: one power of two per 128 channels. */
void mm_reference_quantize_hidden(const float *h, int32_t n, mm_reference_input *input);

/* The same for int8 with one F32 per 128 channels; input->codes and ->block_scales have room. */
void mm_reference_quantize_int8(const uint16_t *x, int32_t n, mm_reference_input *input);
void mm_reference_quantize_hidden_int8(const float *h, int32_t n, mm_reference_input *input);

/*
 * One row of weights (mm_weights_row) times one token, without the token's scale.
 * high_codes and low_codes (E4M3, used by MEGAMOE_SUM_WGMMA) may be NULL for MEGAMOE_SUM_FP32, and
 * low_codes where there is one term; high and low (used by MEGAMOE_SUM_FP32) likewise.
 */
typedef struct mm_reference_row {
    const float *high, *low;
    const uint8_t *high_codes, *low_codes;
    int32_t n;
} mm_reference_row;

float mm_reference_dot(const mm_reference_row *row, const mm_reference_input *input,
                       megamoe_sum sum, megamoe_accumulate accumulate);

/* The same for int8 codes: row->high + row->low are codes times the scale of `group` k each. */
float mm_reference_dot_int8(const mm_reference_row *row, int32_t group,
                            const mm_reference_input *input);

#endif
