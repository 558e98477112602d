/* SPDX-License-Identifier: Apache-2.0 */
/* What the benchmarks of the CPU and of GPUs have in common. */
#ifndef BENCH_H
#define BENCH_H

#include "bench_geometry.h"
#include "bench_layer.h"
#include "report.h"

enum { BENCH_MAX_POINTS = 48, BENCH_MAX_TOKENS = 1 << 16 };

/* The command line. */
typedef struct bench_request {
    const char *path, *model, *geometry, *tokens, *device;
    int64_t layer, experts, threads, seed, capacity, iterations, token_tile, lag;
    int format, nvfp4, input_scale, accumulate, activations;
    double seconds, memory_gb;
    bool json, mapped;
} bench_request;

typedef struct bench {
    const bench_request *request;
    const bench_geometry *geometry; /* NULL for weights of a model or a file */
    bench_target target;
    bench_layer layer;
    megamoe_device_info device;
    int32_t rank, ranks;              /* of processes that a launcher has started; else 0 and 1 */
    int64_t tokens[BENCH_MAX_POINTS]; /* batch sizes */
    int n_tokens;
    int64_t capacity; /* of a GPU's workspace */
    char date[32];
    char command[1024];
} bench;

/* These measure all batch sizes and print the result. They return an exit code. */
int bench_on_cpu(const bench *b);
int bench_on_gpu(const bench *b);

megamoe_shape bench_shape(const bench *b);

/* Sorts. q = 0.5 is the median. */
double bench_quantile(double *values, int64_t n, double q);

/* Different experts among n ids; seen[experts] is scratch. */
int32_t bench_count_experts(const int32_t *ids, int64_t n, int32_t experts, bool *seen);

/* Layer, device and circumstances, to which the caller adds what it has measured. */
json_t *bench_json(const bench *b);
void bench_print_layer(const bench *b);

#endif
