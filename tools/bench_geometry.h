/* SPDX-License-Identifier: Apache-2.0 */
/* Shapes that `megamoe bench --geometry` knows by name. */
#ifndef BENCH_GEOMETRY_H
#define BENCH_GEOMETRY_H

#include <megamoe/weights.h>

typedef struct bench_geometry {
    const char *name;
    const char *what;
    int32_t hidden, intermediate;
    int32_t experts; /* of one rank, where the model's are spread over eight */
    int32_t topk;
    megamoe_activation activation;
    bool has_bias;
} bench_geometry;

/* Prints the error and returns NULL if there is none of that name. */
const bench_geometry *bench_geometry_find(const char *name);

megamoe_layer_desc bench_geometry_layer(const bench_geometry *g, megamoe_format format);

#endif
