/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe bench: the speed of a layer beside the ceilings that the device has in the same run. */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench.h"
#include "commands.h"
#include "models.h"
#include "options.h"
#include "parallel.h"
#include "rank.h"

/* Defaults that depend on the device. */
static const char cpu_tokens[] = "1,16,64", cpu_geometry[] = "A";
static const char gpu_tokens[] = "1,8,32,64,128,256,512,1024,2048,4096,8192";
static const char gpu_geometry[] = "flash";
static const double cpu_seconds = 2, cpu_memory_gb = 2;
enum { GPU_CAPACITY = 8192, GPU_ITERATIONS = 50, GPU_DISTINCT_EXPERTS = 4 };

/* "1,16,64" */
static int parse_tokens(const char *text, bench *b) {
    const char *at = text;
    do {
        char *end;
        errno = 0;
        const long long tokens = strtoll(at, &end, 10);
        if (end == at || (*end != ',' && *end != '\0') || errno != 0 || tokens < 1 ||
            tokens > BENCH_MAX_TOKENS || b->n_tokens == BENCH_MAX_POINTS)
            return report_error("--tokens %s: expected up to %d numbers from 1 to %d, with commas",
                                text, BENCH_MAX_POINTS, BENCH_MAX_TOKENS);
        b->tokens[b->n_tokens++] = tokens;
        at = *end == ',' ? end + 1 : NULL;
    } while (at != NULL);
    return EXIT_DONE;
}

/* 1 to `most` in steps of a square root of two, rounded. */
static void fill_curve(int64_t most, bench *b) {
    int64_t last = 0;
    for (int i = 0; last < most && b->n_tokens < BENCH_MAX_POINTS; i++) {
        const int64_t next = llround(exp2(i / 2.0));
        if (next == last)
            continue;
        last = next < most ? next : most;
        b->tokens[b->n_tokens++] = last;
    }
}

/* Batch sizes and the capacity that holds them. */
static int choose_tokens(const bench_request *request, bool gpu, bench *b) {
    b->capacity = request->capacity > 0 ? request->capacity : GPU_CAPACITY;
    if (gpu && request->tokens != NULL && strcmp(request->tokens, "curve") == 0) {
        fill_curve(b->capacity, b);
        return EXIT_DONE;
    }
    const char *text = request->tokens;
    if (text == NULL)
        text = gpu ? gpu_tokens : cpu_tokens;
    TRY(parse_tokens(text, b));
    for (int i = 0; gpu && i < b->n_tokens; i++) {
        if (request->capacity > 0 && b->tokens[i] > request->capacity)
            return report_error("--capacity %" PRId64 ": --tokens asks for %" PRId64,
                                request->capacity, b->tokens[i]);
        while (b->tokens[i] > b->capacity)
            b->capacity *= 2;
    }
    return EXIT_DONE;
}

static int check_request(const bench_request *request, bool gpu) {
    if ((request->path != NULL) + (request->model != NULL) + (request->geometry != NULL) > 1)
        return report_error("bench: PATH, --model and --geometry exclude each other");
    const char *of_cpu = request->mapped         ? "mapped"
                         : request->seconds >= 0 ? "seconds"
                         : request->activations  ? "activations int8"
                                                 : NULL;
    const char *of_gpu = request->capacity > 0     ? "capacity"
                         : request->iterations > 0 ? "iterations"
                         : request->token_tile > 0 ? "token-tile"
                         : request->lag > 0        ? "lag"
                                                   : NULL;
    if (gpu && of_cpu != NULL)
        return report_error("bench: --%s is for the CPU, not for --device %s", of_cpu,
                            request->device);
    if (request->activations && request->input_scale)
        return report_error("bench: --input-scale block is for E4M3, not for --activations int8");
    if (!gpu && of_gpu != NULL)
        return report_error("bench: --%s is for a GPU, not for --device %s", of_gpu,
                            request->device);
    return EXIT_DONE;
}

static void record_run(bench *b, int argc, char **argv) {
    size_t used = (size_t)snprintf(b->command, sizeof b->command, "megamoe");
    for (int i = 0; i < argc && used < sizeof b->command; i++)
        used += (size_t)snprintf(b->command + used, sizeof b->command - used, " %s", argv[i]);
    const time_t now = time(NULL);
    struct tm utc;
    strftime(b->date, sizeof b->date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
}

/*
 * Meets the other ranks if a launcher has started this process as one of several. Ranks of the CPU
 * share memory bandwidth, so there a layer is measured by one process.
 */
static int join_ranks(bench *b, bool gpu) {
    const megamoe_status status = megamoe_comm_from_env(NULL, &b->target.comm);
    if (status == MEGAMOE_ENOTFOUND)
        TRY_LIBRARY(megamoe_comm_self(&b->target.comm));
    else if (status != MEGAMOE_OK)
        return report_failure(status);
    b->rank = megamoe_comm_rank(b->target.comm);
    b->ranks = megamoe_comm_size(b->target.comm);
    if (b->ranks > 1 && !gpu)
        return report_error("bench: a launcher has started %d ranks; --device %s is measured by "
                            "one process",
                            b->ranks, b->request->device);
    return EXIT_DONE;
}

static int open_layer(bench *b, bool gpu) {
    const bench_request *request = b->request;
    const megamoe_format format = (megamoe_format)(request->format + 1);
    if (request->path != NULL)
        return bench_layer_from_path(&b->target, request->path, request->layer, &b->layer);
    if (request->model != NULL) {
        const model *m = model_find(request->model);
        if (m == NULL)
            return report_error("--model %s: unknown; megamoe synth --list shows the models",
                                request->model);
        const megamoe_layer_desc desc =
            model_layer(m, m->dense_layers, request->format < 0 ? m->published : format);
        return bench_layer_synthetic(&b->target, m->name, &desc, &b->layer);
    }
    const char *name = request->geometry;
    if (name == NULL)
        name = gpu ? gpu_geometry : cpu_geometry;
    b->geometry = bench_geometry_find(name);
    if (b->geometry == NULL)
        return EXIT_BAD_INPUT;
    megamoe_layer_desc desc =
        bench_geometry_layer(b->geometry, request->format < 0 ? MEGAMOE_FORMAT_MXFP4 : format);
    desc.experts *= b->ranks; /* those of a geometry are one rank's */
    return bench_layer_synthetic(&b->target, b->geometry->what, &desc, &b->layer);
}

static int execute(bench *b, bool gpu) {
    b->device = (megamoe_device_info)MEGAMOE_INIT(megamoe_device_info);
    TRY(join_ranks(b, gpu));
    TRY(rank_open_device(b->request->device, b->target.threads, b->target.comm, &b->target.device));
    TRY_LIBRARY(megamoe_device_describe(b->target.device, &b->device));
    TRY(open_layer(b, gpu));
    return (gpu ? bench_on_gpu : bench_on_cpu)(b);
}

static uint64_t memory_limit(const bench_request *request, bool gpu) {
    if (request->memory_gb > 0)
        return (uint64_t)(request->memory_gb * 1e9);
    return gpu ? UINT64_MAX : (uint64_t)(cpu_memory_gb * 1e9);
}

int cmd_bench(int argc, char **argv) {
    bench_request request = {.device = "cpu",
                             .layer = ONLY_LAYER,
                             .threads = parallel_cores(),
                             .seed = 1,
                             .format = -1,
                             .seconds = -1};
    const option_spec options[] = {
        {"device", OPTION_TEXT, &request.device, "cpu|cuda|cuda:N", "(cpu)", 0, 0},
        {"layer", OPTION_INTEGER, &request.layer, "L", "layer of PATH (its only one)", 0,
         INT32_MAX},
        {"model", OPTION_TEXT, &request.model, "NAME", "synthetic weights of a public model", 0, 0},
        {"geometry", OPTION_TEXT, &request.geometry, "NAME",
         "synthetic weights: A, B, C, flash, pro, ... (A; GPU: flash)", 0, 0},
        {"experts", OPTION_INTEGER, &request.experts, "N", "experts of the layer", 1, 65536},
        {"format", OPTION_CHOICE, &request.format, "mxfp4|nvfp4", "of synthetic weights", 0, 0},
        {"nvfp4", OPTION_CHOICE, &request.nvfp4, "exact|folded", "form of NVFP4 weights (exact)", 0,
         0},
        {"input-scale", OPTION_CHOICE, &request.input_scale, "token|block",
         "one scale per token, or per 128 channels (token)", 0, 0},
        {"accumulate", OPTION_CHOICE, &request.accumulate, "mma|promote",
         "sums over all of K, or over 128 each (mma)", 0, 0},
        OPTION_ACTIVATIONS(&request.activations),
        {"mapped", OPTION_FLAG, &request.mapped, NULL,
         "CPU: use a prepared file in place, mapped, instead of reading it into huge pages", 0, 0},
        {"memory", OPTION_NUMBER, &request.memory_gb, "GB", "most weights to hold (2; GPU: all)",
         1e-6, 1e6},
        {"tokens", OPTION_TEXT, &request.tokens, "LIST|curve", "batch sizes; GPU: curve", 0, 0},
        {"capacity", OPTION_INTEGER, &request.capacity, "N", "GPU: of the workspace (8192)", 1,
         BENCH_MAX_TOKENS},
        {"threads", OPTION_INTEGER, &request.threads, "T", "(one per core)", 1, 1024},
        {"seconds", OPTION_NUMBER, &request.seconds, "S", "CPU: for each batch size (2)", 0, 3600},
        {"iterations", OPTION_INTEGER, &request.iterations, "N", "GPU: for each batch size (50)", 1,
         1000},
        {"token-tile", OPTION_INTEGER, &request.token_tile, "N",
         "GPU: tokens of a tile (chosen for each batch)", 1, 1024},
        {"lag", OPTION_INTEGER, &request.lag, "N",
         "GPU: token tiles by which FC2 follows FC1 (chosen for each batch)", 1, INT32_MAX},
        {"seed", OPTION_INTEGER, &request.seed, "N", "of weights, input and routes (1)", 0,
         (double)INT64_MAX},
        OPTION_JSON(&request.json)};
    const command_syntax syntax = {"bench",
                                   "[PATH]",
                                   "Measures an expert layer beside the device's ceilings.",
                                   "megamoe bench --device cuda:0 --geometry pro --json",
                                   options,
                                   sizeof options / sizeof *options,
                                   0,
                                   1};
    bench b = {.request = &request};
    record_run(&b, argc, argv);
    const char *arguments[OPTION_MAX_ARGUMENTS];
    int code;
    if (!options_parse(&syntax, argc, argv, arguments, &code))
        return code;
    const bool gpu = ranks_on_gpu(request.device);
    request.path = arguments[0];
    TRY(check_request(&request, gpu));
    TRY(choose_tokens(&request, gpu, &b));
    if (request.seconds < 0)
        request.seconds = cpu_seconds;
    if (request.iterations == 0)
        request.iterations = GPU_ITERATIONS;
    b.target.nvfp4 = (megamoe_nvfp4_mode)request.nvfp4;
    b.target.accumulate = (megamoe_accumulate)request.accumulate;
    b.target.mapped = request.mapped;
    b.target.memory = memory_limit(&request, gpu);
    b.target.experts = (int32_t)request.experts;
    b.target.distinct = gpu ? GPU_DISTINCT_EXPERTS : 0;
    b.target.seed = (uint64_t)request.seed;
    b.target.threads = (int32_t)request.threads;
    code = execute(&b, gpu);
    if (code != EXIT_DONE && b.ranks > 1)
        megamoe_comm_abort(b.target.comm);
    megamoe_layer_close(b.layer.layer);
    megamoe_device_close(b.target.device);
    megamoe_comm_close(b.target.comm);
    return code;
}
