/* SPDX-License-Identifier: Apache-2.0 */
/* A random layer with its values in double, random batches, and the operation in double. */
#ifndef TESTS_LAYER_MODEL_H
#define TESTS_LAYER_MODEL_H

#include "../weights/layer.h"
#include "megamoe/layer.h"
#include "t.h"

typedef struct model_recipe {
    megamoe_format format;
    int32_t hidden, intermediate, experts;
    megamoe_dtype bias_dtype; /* NONE: no biases */
    megamoe_activation activation;
} model_recipe;

typedef struct model {
    test_layer layer;
    megamoe_weights *weights;
    double *values[3]; /* by projection: [experts][rows][columns] */
    double *folded[3]; /* the same as folding leaves them; NULL until model_fold */
} model;

/* Weights such that gates and ups are about 1 for inputs of deviation 1. */
model model_open(const model_recipe *recipe, t_random *random);
void model_close(model *m);
void model_fold(model *m);
/* Takes codes, scales and globals that a test has changed. */
void model_reload(model *m);

/* Which experts the slots of a token name. */
typedef enum routing {
    ROUTING_RANDOM,  /* different ones */
    ROUTING_HOT,     /* one of them in every token, in every second one alone */
    ROUTING_REPEATED /* the same more than once in a token */
} routing;

typedef struct batch {
    int64_t tokens;
    int32_t hidden, topk;
    uint16_t *x;    /* BF16 [tokens][hidden], deviation 1 */
    int32_t *ids;   /* [tokens][topk] */
    float *weights; /* [tokens][topk]: positive, with a sum of 1 */
} batch;

batch batch_random(const model *m, int64_t tokens, int32_t topk, routing kind, t_random *random);
void batch_free(batch *b);
/* Masks about one slot in `one_in`. */
void batch_mask(batch *b, uint32_t one_in, t_random *random);
/* From now on token t is token t % distinct. */
void batch_repeat(batch *b, int64_t distinct);
/* Tokens first..first + n - 1 of b, in the same memory. */
batch batch_part(const batch *b, int64_t first, int64_t n);

megamoe_view view_x(const batch *b);
megamoe_view view_ids(const batch *b);
megamoe_view view_weights(const batch *b);
megamoe_view view_y(uint16_t *y, const batch *b);

uint16_t to_bf16(double value);
double from_bf16(uint16_t bits);

/* Rows of n BF16 are the same bits, where any NaN is any NaN. */
bool same_rows(const uint16_t *a, const uint16_t *b, int64_t n);

/* ---- The operation in double ---- */

typedef struct exactness {
    double *const *values; /* model.values or model.folded */
    bool weight_after_fc2;
    bool quantize_hidden; /* FC2's input goes through E4M3, or what `activations` says */
    megamoe_activation_type activations;
} exactness;

/* A token as the operation sees it: E4M3 codes times their scale. */
void quantized_token(const uint16_t *x, int32_t n, megamoe_input_scale mode, double *values);
/* The same for int8 codes with one F32 for 128 channels. */
void quantized_token_int8(const uint16_t *x, int32_t n, double *values);
/* h to E4M3 with one power of two for 128 channels, and back. */
void quantized_hidden(double *h, int32_t n);
double gated(const megamoe_activation *activation, double gate, double up);

/* One route: an expert's output for a token. */
void model_route(const model *m, const exactness *how, int32_t expert, double weight,
                 const double *x, double *out);

/*
 * y [tokens][hidden]; x [tokens][hidden] is what FC1 reads. Where how->quantize_hidden is set the
 * rows of routes are rounded to BF16.
 */
void model_forward(const model *m, const exactness *how, const batch *b, const double *x,
                   double *y);

/* The logical experts of `physical` places, each somewhere, in random order. */
void random_map(t_random *random, int32_t *map, int32_t physical, int32_t experts);

/* |a - b| / |b|, Euclidean. */
double distance(const double *a, const double *b, int64_t n);

#endif
