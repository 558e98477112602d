/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers that `megamoe bench` prints beside its own: data of a GPU model, with their source. */
#ifndef BENCH_PUBLISHED_H
#define BENCH_PUBLISHED_H

#include <stdint.h>

/* What a GPU model can do at best. */
typedef struct bench_nominal {
    const char *gpu; /* part of the model's name */
    double read_gbs;
    double mma_tflops; /* of E4M3 */
} bench_nominal;

/* Time of one forward on that GPU. */
typedef struct bench_published {
    const char *geometry; /* as --geometry has it */
    int64_t tokens;
    double public_us; /* what public kernels take */
    double target_us; /* what this project aims at */
} bench_published;

extern const char bench_published_source[];

/* NULL if nothing is known of the GPU or row. */
const bench_nominal *bench_nominal_of(const char *gpu);
const bench_published *bench_published_of(const char *gpu, const char *geometry, int64_t tokens);

#endif
