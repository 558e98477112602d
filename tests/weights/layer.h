/* SPDX-License-Identifier: Apache-2.0 */
/* Random layers in memory, and their values computed apart from the library. */
#ifndef TESTS_WEIGHTS_LAYER_H
#define TESTS_WEIGHTS_LAYER_H

#include "megamoe/weights.h"
#include "t.h"

/* Scale bytes are drawn from scale_min..scale_max; bias_dtype NONE means no biases. */
typedef struct layer_shape {
    megamoe_format format;
    int32_t hidden;
    int32_t intermediate;
    int32_t experts;
    megamoe_dtype bias_dtype;
    uint8_t scale_min;
    uint8_t scale_max;
} layer_shape;

/* Strides are wider than rows and nothing is aligned. */
typedef struct test_layer {
    megamoe_layer_desc desc;
    megamoe_matrix *matrices; /* [experts][3] */
    uint8_t **memory;         /* one block for each matrix */
} test_layer;

/*
 * Some groups hold only zeros, only one magnitude or only small codes; NVFP4 has some zero scales.
 */
test_layer layer_random(const layer_shape *shape, t_random *random);
void layer_free(test_layer *layer);

megamoe_matrix *layer_matrix(const test_layer *layer, int32_t expert,
                             megamoe_projection projection);
int32_t layer_rows(const test_layer *layer, megamoe_projection projection);
int32_t layer_columns(const test_layer *layer, megamoe_projection projection);
uint8_t *layer_codes(const test_layer *layer, int32_t expert, megamoe_projection projection,
                     int32_t row);
uint8_t *layer_scales(const test_layer *layer, int32_t expert, megamoe_projection projection,
                      int32_t row);

unsigned layer_code(const test_layer *layer, int32_t expert, megamoe_projection projection,
                    int32_t row, int32_t k);
/* Without the global scale. */
double layer_block_scale(const test_layer *layer, int32_t expert, megamoe_projection projection,
                         int32_t row, int32_t k);
double layer_value(const test_layer *layer, int32_t expert, megamoe_projection projection,
                   int32_t row, int32_t k);
double layer_bias(const test_layer *layer, int32_t expert, megamoe_projection projection,
                  int32_t row);

/* Decoding by the definitions of the formats. */
double decode_e2m1(unsigned code);
double decode_e4m3(uint8_t byte); /* not NaN */
double decode_scale(megamoe_format format, uint8_t byte);
/* The two terms of an NVFP4 code. */
double decode_high(unsigned code);
double decode_low(unsigned code);
/* The E4M3 value nearest to a magnitude up to 448, of two the one with the even code. */
double round_to_e4m3(double value);

/* Every value of a matrix as megamoe_weights_unpack gives it, against `expected`. */
typedef double (*expected_fn)(const test_layer *layer, int32_t expert,
                              megamoe_projection projection, int32_t row, int32_t k);
void check_unpacked(const megamoe_weights *weights, const test_layer *layer, expected_fn expected);

/* The weight after folding, by numerics.md item 2: an expected_fn. */
double folded_value(const test_layer *layer, int32_t expert, megamoe_projection projection,
                    int32_t row, int32_t k);
/* The row exponent found by trying all. */
int brute_row_exponent(const test_layer *layer, megamoe_nvfp4_mode mode, int32_t expert,
                       megamoe_projection projection, int32_t row);

#endif
