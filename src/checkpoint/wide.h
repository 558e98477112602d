/* SPDX-License-Identifier: Apache-2.0 */
/* Experts wider than 4 bits: recognised and described, run only after they are quantized by name.
 */
#ifndef MM_CHECKPOINT_WIDE_H
#define MM_CHECKPOINT_WIDE_H

#include "checkpoint/family.h"

/* A layer of them, as far as its family has filled it in. Zero-initialised is empty. */
struct mm_wide_layer {
    const char *format; /* "fp8", "bf16" */
    int32_t block_rows; /* values that share a scale; 0: there are no scales */
    int32_t block_columns;
    /*
     * The description in the format to quantize to, matrices with nothing but their biases, and
     * as sources the values (F8_E4M3 or BF16 [rows, columns]) and their scales (F32 or F8_E8M0
     * [blocks, blocks], or NULL).
     */
    mm_layer_tensors tensors;
};

/*
 * Reads one row of a matrix, exact: every value is a double. NaN and infinity stay what they are.
 * `values` has room for two rows, the second of which is used on the way.
 */
MEGAMOE_CHECKED megamoe_status mm_wide_row(const mm_wide_layer *wide,
                                           const mm_matrix_source *matrix, int64_t row,
                                           double *values);

#endif
