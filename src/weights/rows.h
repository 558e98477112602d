/* SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic of one row: its groups, its exponent, and what E4M3 operands hold exactly. */
#ifndef MM_WEIGHTS_ROWS_H
#define MM_WEIGHTS_ROWS_H

#include <stdbool.h>
#include <stdint.h>

#include "megamoe/weights.h"

enum {
    MM_MAX_DIMENSION = 65536, /* of hidden and intermediate */
    MM_MAX_EXPERTS = 4096,
    MM_MAX_GROUP = 32,
    MM_MAX_GROUPS = MM_MAX_DIMENSION / 16, /* of one row */
    MM_ROW_EXPONENT_MAX = 96,              /* and the smallest is its negative */
    MM_ONLY_ZEROS = 1                      /* the set of code magnitudes {0} */
};

/* Consecutive k that share a scale. */
static inline int32_t mm_group_size(megamoe_format format) {
    return format == MEGAMOE_FORMAT_MXFP4 ? 32 : 16;
}

/* A block scale other than zero: (1 + eighths / 8) * 2^exponent. */
typedef struct mm_scale {
    int exponent;
    int eighths;
} mm_scale;

/* False for zero. `byte` is one that mm_scales_check accepts. */
bool mm_scale_split(megamoe_format format, uint8_t byte, mm_scale *scale);

/* The two terms of an NVFP4 code; they sum to its value. */
float mm_e2m1_high(unsigned code);
float mm_e2m1_low(unsigned code);

/*
 * The set of code magnitudes in each group of a row: bit i stands for the magnitude of code i.
 * `present` holds columns / group size entries.
 */
void mm_row_present(megamoe_format format, const uint8_t *codes, int32_t columns, uint8_t *present);

/* The smallest exponent that keeps every term of the row at or below 448; 0 for a zero row. */
int mm_row_exponent(megamoe_format format, megamoe_nvfp4_mode mode, const uint8_t *scales,
                    const uint8_t *present, int32_t groups);

/*
 * The set of code magnitudes whose terms are exact in E4M3 under `scale`, from which the row
 * exponent has been subtracted.
 */
uint8_t mm_exact_magnitudes(megamoe_format format, mm_scale scale);

/*
 * The E4M3 operand of every NVFP4 code when the scale is folded into it. The row exponent has been
 * subtracted from `scale`; where that leaves more than 448, the group's largest code is 0.5, and
 * codes count twice under half of the scale.
 */
void mm_fold_codes(mm_scale scale, uint8_t folded[16]);

#endif
