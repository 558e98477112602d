/* SPDX-License-Identifier: Apache-2.0 */
/* Expert weights inside the library: where they come from and how single rows are read. */
#ifndef MM_WEIGHTS_WEIGHTS_H
#define MM_WEIGHTS_WEIGHTS_H

#include "megamoe/weights.h"

/*
 * Names a matrix for messages: "model-00001.safetensors: layers.0.ffn.experts.3.w1.weight", or its
 * scales where `scales` is set.
 */
typedef void (*mm_matrix_name_fn)(const void *owner, int32_t expert, megamoe_projection projection,
                                  bool scales, char *text, size_t text_bytes);

/* A byte of a file; the owner of the matrices numbers its files. */
typedef struct mm_place {
    size_t file;
    uint64_t offset;
} mm_place;

/* Where the first rows of a matrix and its bias begin. */
typedef struct mm_matrix_places {
    mm_place codes, scales, bias;
} mm_matrix_places;

/*
 * Takes blocks apart that hold codes and scales, in `bytes` bytes: codes in ascending k and scales,
 * each with the rows of the matrix behind each other.
 */
typedef void (*mm_unpack_fn)(megamoe_format format, const uint8_t *blocks, size_t bytes,
                             uint8_t *codes, uint8_t *scales);

/*
 * Where matrices of a checkpoint live. `release` is called once, when the weights are
 * closed; it and `name` may be NULL. With `places` and `read` the matrices are given without
 * pointers, which they get while their expert is held (hold.h). With `unpack` the codes are blocks
 * that hold the scales too, as many bytes as both.
 */
typedef struct mm_matrix_owner {
    void *owner;
    void (*release)(void *owner);
    mm_matrix_name_fn name;
    void (*places)(const void *owner, int32_t expert, megamoe_projection projection,
                   mm_matrix_places *places);
    megamoe_status (*read)(const void *owner, mm_place from, void *to, size_t bytes);
    mm_unpack_fn unpack;
} mm_matrix_owner;

/*
 * megamoe_weights_from_tensors with an owner. On failure the owner is released too.
 */
MEGAMOE_CHECKED megamoe_status mm_weights_create(const megamoe_layer_desc *desc,
                                                 const megamoe_matrix *matrices,
                                                 mm_matrix_owner owner, megamoe_weights **weights);

/* Geometry and options of a layer. A failure has `status` and begins with `where`. */
MEGAMOE_CHECKED megamoe_status mm_desc_check(const megamoe_layer_desc *desc, megamoe_status status,
                                             const char *where);

/* The mode that prepared weights have, else `wanted`. */
megamoe_nvfp4_mode mm_weights_nvfp4_mode(const megamoe_weights *weights, megamoe_nvfp4_mode wanted);

/*
 * One row as multiplier operands after the row exponent: weight = (high + low) * 2^row_exponent *
 * global scale. `low` is zero except for exact NVFP4, whose E2M1 code is split into two terms
 * (docs/numerics.md, item 2). high and low hold `in` floats each; every value is exact.
 */
void mm_weights_row(const megamoe_weights *weights, megamoe_nvfp4_mode mode, int32_t expert,
                    megamoe_projection projection, int32_t row, float *high, float *low,
                    int *row_exponent);

/* 1 for MXFP4. */
float mm_weights_global(const megamoe_weights *weights, int32_t expert,
                        megamoe_projection projection);

/* 0 where the layer has no bias. */
float mm_weights_bias(const megamoe_weights *weights, int32_t expert, megamoe_projection projection,
                      int32_t row);

/* Rows and columns of a projection. */
static inline int32_t mm_rows(const megamoe_layer_desc *desc, megamoe_projection projection) {
    return projection == MEGAMOE_DOWN ? desc->hidden : desc->intermediate;
}

static inline int32_t mm_columns(const megamoe_layer_desc *desc, megamoe_projection projection) {
    return projection == MEGAMOE_DOWN ? desc->intermediate : desc->hidden;
}

#endif
