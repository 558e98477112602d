/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures staging and forward of one layer on a CPU device: an arm of `megamoe bench`. Functions
 * that return an int print their error and return an exit code.
 */
#ifndef BENCH_CPU_H
#define BENCH_CPU_H

#include <megamoe/layer.h>

#include "bench_routes.h"

typedef struct bench_cpu_options {
    /* These stay open until bench_cpu_close. */
    megamoe_comm *comm;
    megamoe_device *device;
    megamoe_layer *layer;
    megamoe_shape shape;
    int64_t tokens; /* of the largest batch */
    bench_routes routes;
    uint64_t seed; /* of the input */
} bench_cpu_options;

typedef struct bench_cpu bench_cpu;

/* bench_cpu_close is due in any case. */
int bench_cpu_open(const bench_cpu_options *options, bench_cpu **opened);

/* Accepts NULL. */
void bench_cpu_close(bench_cpu *m);

/* Makes a workspace for batches of so many tokens and backs it with memory. */
int bench_cpu_set_batch(bench_cpu *m, int64_t tokens);

/* One forward. */
typedef struct bench_cpu_sample {
    double us;
    routing_load load;
} bench_cpu_sample;

/* Draws a batch with experts of its own, so that weights come from memory, and computes it. */
int bench_cpu_time(bench_cpu *m, uint64_t draw, bench_cpu_sample *sample);

#endif
