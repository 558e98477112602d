/* SPDX-License-Identifier: Apache-2.0 */
/* Opens what arms measure: devices and layers, shared where they are the same. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "models.h"
#include "rank.h"

enum { GPU_DISTINCT_EXPERTS = 4 };

static const char cpu_geometry[] = "A", gpu_geometry[] = "flash";
static const double cpu_memory_gb = 2;
static const char *const tiers[] = {NULL, "scalar", "avx2", "avx512"};

/* The variable by which a user caps the instruction set, and what that user has set. */
static const char tier_variable[] = "MEGAMOE_CPU";

/*
 * Meets the other ranks if a launcher has started this process as one of several. Ranks of the CPU
 * share memory bandwidth, so there a layer is measured by one process.
 */
static int join_ranks(bench *b) {
    const megamoe_status status = megamoe_comm_from_env(NULL, &b->comm);
    if (status == MEGAMOE_ENOTFOUND)
        TRY_LIBRARY(megamoe_comm_self(&b->comm));
    else if (status != MEGAMOE_OK)
        return report_failure(status);
    b->rank = megamoe_comm_rank(b->comm);
    b->ranks = megamoe_comm_size(b->comm);
    if (b->ranks > 1 && !b->on_gpu)
        return report_error("bench: a launcher has started %d ranks; --device %s is measured by "
                            "one process",
                            b->ranks, b->request->base.device);
    return EXIT_DONE;
}

/* ---- Devices ---- */

static bool same_device(const bench_config *a, const bench_config *b) {
    return strcmp(a->device, b->device) == 0 && a->tier == b->tier && a->threads == b->threads;
}

/* With the instruction set asked for, which the library takes from its environment. */
static int open_tier(const bench *b, bench_arm *arm) {
    const char *const wanted = tiers[arm->config.tier];
    const char *const found = getenv(tier_variable);
    char *const before = found != NULL ? strdup(found) : NULL;
    if (wanted != NULL)
        (void)setenv(tier_variable, wanted, 1);
    const int code =
        rank_open_device(arm->config.device, (int32_t)arm->config.threads, b->comm, &arm->device);
    if (wanted != NULL && before != NULL)
        (void)setenv(tier_variable, before, 1);
    else if (wanted != NULL)
        (void)unsetenv(tier_variable);
    free(before);
    TRY(code);
    TRY_LIBRARY(megamoe_device_describe(arm->device, &arm->info));
    if (wanted != NULL && strcmp(arm->info.tier, wanted) != 0)
        return report_error("bench: tier %s: this machine has %s", wanted, arm->info.tier);
    return EXIT_DONE;
}

static int open_device(bench *b, int i) {
    bench_arm *arm = &b->arms[i];
    arm->info = (megamoe_device_info)MEGAMOE_INIT(megamoe_device_info);
    arm->before = arm->after = (megamoe_device_ceilings)MEGAMOE_INIT(megamoe_device_ceilings);
    for (int j = 0; j < i; j++) {
        if (same_device(&b->arms[j].config, &arm->config)) {
            arm->device = b->arms[j].device;
            arm->info = b->arms[j].info;
            return EXIT_DONE;
        }
    }
    arm->owns_device = true;
    return open_tier(b, arm);
}

const bench_arm *bench_device_owner(const bench *b, const bench_arm *arm) {
    const bench_arm *owner = b->arms;
    while (!owner->owns_device || owner->device != arm->device)
        owner++;
    return owner;
}

/* ---- Layers ---- */

static bool same_layer(const bench_arm *a, const bench_arm *b) {
    return a->device == b->device && a->config.format == b->config.format &&
           a->config.nvfp4 == b->config.nvfp4 && a->config.accumulate == b->config.accumulate &&
           a->config.mapped == b->config.mapped;
}

static uint64_t memory_limit(const bench *b) {
    if (b->request->memory_gb > 0)
        return (uint64_t)(b->request->memory_gb * 1e9);
    return b->on_gpu ? UINT64_MAX : (uint64_t)(cpu_memory_gb * 1e9);
}

static bench_target target_of(const bench *b, const bench_arm *arm, bool describe) {
    return (bench_target){.comm = b->comm,
                          .device = arm->device,
                          .nvfp4 = (megamoe_nvfp4_mode)arm->config.nvfp4,
                          .accumulate = (megamoe_accumulate)arm->config.accumulate,
                          .mapped = arm->config.mapped,
                          .memory = memory_limit(b),
                          .experts = (int32_t)b->request->experts,
                          .distinct = b->on_gpu ? GPU_DISTINCT_EXPERTS : 0,
                          .seed = (uint64_t)b->request->seed,
                          .threads = (int32_t)arm->config.threads,
                          .describe = describe};
}

int bench_open_layer(bench *b, bench_arm *arm, bool describe) {
    const bench_request *request = b->request;
    const bench_target target = target_of(b, arm, describe);
    const bool given = arm->config.format != BENCH_FORMAT_OF_SOURCE;
    const megamoe_format format = (megamoe_format)(arm->config.format + 1);
    if (request->path != NULL)
        return bench_layer_from_path(&target, request->path, request->layer, &arm->layer);
    if (request->model != NULL) {
        const model *m = model_find(request->model);
        if (m == NULL)
            return report_error("--model %s: unknown; megamoe synth --list shows the models",
                                request->model);
        const megamoe_layer_desc desc =
            model_layer(m, m->dense_layers, given ? format : m->published);
        return bench_layer_synthetic(&target, m->name, &desc, &arm->layer);
    }
    const char *name = request->geometry;
    if (name == NULL)
        name = b->on_gpu ? gpu_geometry : cpu_geometry;
    b->geometry = bench_geometry_find(name);
    if (b->geometry == NULL)
        return EXIT_BAD_INPUT;
    megamoe_layer_desc desc =
        bench_geometry_layer(b->geometry, given ? format : MEGAMOE_FORMAT_MXFP4);
    desc.experts *= b->ranks; /* those of a geometry are one rank's */
    return bench_layer_synthetic(&target, b->geometry->what, &desc, &arm->layer);
}

static int open_layer(bench *b, int i) {
    bench_arm *arm = &b->arms[i];
    for (int j = 0; j < i; j++) {
        if (same_layer(&b->arms[j], arm)) {
            arm->layer = b->arms[j].layer;
            return EXIT_DONE;
        }
    }
    arm->owns_layer = true;
    TRY(bench_open_layer(b, arm, false));
    if (arm->layer.desc.experts != b->arms[0].layer.desc.experts)
        return report_error("bench --arm %s: %d experts fit into --memory, and %d of the base; "
                            "expected as many: give --experts %d",
                            arm->name, arm->layer.desc.experts, b->arms[0].layer.desc.experts,
                            arm->layer.desc.experts < b->arms[0].layer.desc.experts
                                ? arm->layer.desc.experts
                                : b->arms[0].layer.desc.experts);
    return EXIT_DONE;
}

/* ---- Arms ---- */

bench_routes bench_routes_of(const bench *b) {
    return (bench_routes){
        .routing = &b->routing, .seed = (uint64_t)b->request->seed, .live = b->request->live};
}

int bench_fit_routing(bench *b) {
    const megamoe_layer_desc *desc = &b->arms[0].layer.desc;
    return routing_fit(&b->routing, (uint64_t)b->request->seed, desc->experts, desc->topk);
}

static megamoe_shape shape_of(const bench_arm *arm) {
    megamoe_shape shape = MEGAMOE_INIT(megamoe_shape);
    shape.hidden = arm->layer.desc.hidden;
    shape.intermediate = arm->layer.desc.intermediate;
    shape.experts = arm->layer.desc.experts;
    shape.topk = arm->layer.desc.topk;
    shape.input_scale = (megamoe_input_scale)arm->config.input_scale;
    shape.activations = (megamoe_activation_type)arm->config.activations;
    return shape;
}

static int64_t most_tokens(const bench *b) {
    int64_t most = 0;
    for (int i = 0; i < b->n_tokens; i++)
        most = b->tokens[i] > most ? b->tokens[i] : most;
    return most;
}

static int open_on_gpu(const bench *b, bench_arm *arm) {
    const bench_gpu_options options = {.comm = b->comm,
                                       .device = arm->device,
                                       .layer = arm->layer.layer,
                                       .shape = shape_of(arm),
                                       .capacity = b->capacity,
                                       .tokens = most_tokens(b),
                                       .routes = bench_routes_of(b),
                                       .seed = (uint64_t)b->request->seed,
                                       .l2 = (bench_l2)arm->config.l2,
                                       .launch = (bench_launch)arm->config.launch,
                                       .warm_ups = (int)b->request->warm_ups,
                                       .padding_us = b->request->padding};
    TRY(bench_gpu_open(&options, &arm->gpu));
    bench_gpu_record_begin(bench_gpu_device(arm->gpu), &arm->record);
    megamoe_plan plan = MEGAMOE_INIT(megamoe_plan);
    plan.token_tile = (int32_t)arm->config.token_tile;
    plan.lag = (int32_t)arm->config.lag;
    return bench_gpu_set_plan(arm->gpu, &plan);
}

static int open_on_cpu(const bench *b, bench_arm *arm) {
    const bench_cpu_options options = {.comm = b->comm,
                                       .device = arm->device,
                                       .layer = arm->layer.layer,
                                       .shape = shape_of(arm),
                                       .tokens = most_tokens(b),
                                       .routes = bench_routes_of(b),
                                       .seed = (uint64_t)b->request->seed};
    return bench_cpu_open(&options, &arm->cpu);
}

int bench_open(bench *b) {
    TRY(join_ranks(b));
    TRY(routing_open(b->request->routing, &b->routing));
    for (int i = 0; i < b->n_arms; i++)
        TRY(open_device(b, i));
    for (int i = 0; i < b->n_arms; i++)
        TRY(open_layer(b, i));
    TRY(bench_fit_routing(b));
    /* Before the arms take memory that measuring needs. */
    for (int i = 0; b->on_gpu && i < b->n_arms; i++)
        if (b->arms[i].owns_device)
            TRY_LIBRARY(megamoe_device_measure(b->arms[i].device, &b->arms[i].before));
    for (int i = 0; i < b->n_arms; i++)
        TRY((b->on_gpu ? open_on_gpu : open_on_cpu)(b, &b->arms[i]));
    return EXIT_DONE;
}

void bench_close(bench *b) {
    for (int i = 0; i < b->n_arms; i++) {
        bench_arm *arm = &b->arms[i];
        bench_gpu_close(arm->gpu);
        bench_cpu_close(arm->cpu);
        for (int j = 0; j < b->n_tokens; j++)
            free(arm->points[j].rounds_us);
    }
    for (int i = 0; i < b->n_arms; i++)
        if (b->arms[i].owns_layer)
            megamoe_layer_close(b->arms[i].layer.layer);
    for (int i = 0; i < b->n_arms; i++)
        if (b->arms[i].owns_device)
            megamoe_device_close(b->arms[i].device);
    routing_close(&b->routing);
    megamoe_comm_close(b->comm);
}
