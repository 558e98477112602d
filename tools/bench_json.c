/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The result as one JSON object (docs/schema/bench.schema.json). What arms share stands at the top.
 * So does what belongs to an arm where there is one only; of several each is in "arms".
 */
#include <string.h>

#include "bench.h"
#include "bench_published.h"

static const char *const l2_names[] = {"cold", "clean", "warm"};
static const char *const launch_names[] = {"graph", "eager"};

static double larger(double a, double b) {
    return a > b ? a : b;
}

static double mean(double a, double b) {
    return (a + b) / 2;
}

static json_t *timing_json(const bench_timing *t) {
    return json_pack("{s:f, s:f, s:f}", "median", t->median_us, "min", t->min_us, "p90", t->p90_us);
}

static json_t *rounds_json(const bench_point *p) {
    json_t *rounds = json_array();
    for (int64_t i = 0; i < p->rounds; i++)
        json_array_append_new(rounds, json_real(p->rounds_us[i]));
    return rounds;
}

/* ---- Points of a GPU ---- */

static json_t *times_json(const megamoe_workspace_times *t) {
    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "begin", t->begin_us, "dispatch",
                     t->dispatch_us, "fc1", t->fc1_us, "fc2", t->fc2_us, "combine", t->combine_us,
                     "idle", t->idle_us, "total", t->total_us);
}

/* Of the geometry as it is, not of one with other experts. */
static const bench_published *published_of(const bench *b, const bench_arm *arm,
                                           const bench_point *p) {
    if (b->ranks > 1 || b->geometry == NULL || b->geometry->experts != arm->layer.desc.experts ||
        b->request->live > 0 || b->routing.kind != ROUTING_RANDOM)
        return NULL;
    return bench_published_of(arm->info.model, b->geometry->name, p->tokens);
}

static json_t *gpu_point_json(const bench *b, const bench_arm *arm, const bench_point *p) {
    const megamoe_layer_desc *desc = &arm->layer.desc;
    const bench_arm *owner = bench_device_owner(b, arm);
    const double bytes = (double)p->work.experts * (double)arm->layer.stored_bytes;
    const double operations = 6.0 * (double)p->work.routes * desc->hidden * desc->intermediate;
    const double floor_us =
        larger(bytes / mean(owner->before.read_gbs, owner->after.read_gbs) / 1e3,
               operations / mean(owner->before.mma_tflops, owner->after.mma_tflops) / 1e6);
    const double us = p->forward.median_us;
    json_t *object =
        json_pack("{s:I, s:i, s:f, s:I, s:o, s:o, s:o, s:f, s:f, s:f, s:f, s:o, s:o}", "tokens",
                  (json_int_t)p->tokens, "experts_active", p->work.experts, "load_imbalance",
                  p->work.imbalance, "routes_received", (json_int_t)p->work.routes, "forward_us",
                  timing_json(&p->forward), "rounds_us", rounds_json(p), "stage_us",
                  timing_json(&p->stage), "floor_us", floor_us, "floor_share", floor_us / us,
                  "weight_gbs", bytes / us / 1e3, "tflops", operations / us / 1e6, "times_us",
                  times_json(&p->times), "clocks_held_by", bench_holds_json(p->holds));
    const bench_nominal *nominal = bench_nominal_of(arm->info.model);
    if (nominal != NULL)
        json_object_set_new(object, "nominal_floor_us",
                            json_real(larger(bytes / nominal->read_gbs / 1e3,
                                             operations / nominal->mma_tflops / 1e6)));
    if (b->ranks > 1)
        json_object_set_new(object, "skew_us", json_real(p->skew_us));
    if (p->sm_mhz_min > 0)
        json_object_update_new(object, json_pack("{s:i, s:i}", "sm_mhz", (int)p->sm_mhz_min,
                                                 "sm_mhz_most", (int)p->sm_mhz_max));
    const bench_published *published = published_of(b, arm, p);
    if (published != NULL)
        json_object_update_new(object, json_pack("{s:f, s:f}", "public_us", published->public_us,
                                                 "target_us", published->target_us));
    return object;
}

/* ---- Points of the CPU ---- */

/* The rate of the multiply-adds that the kernels use. */
static double dot_peak(const bench_arm *arm, const megamoe_device_ceilings *ceilings) {
    return arm->config.activations ? ceilings->int8_gops : ceilings->dot_gflops;
}

static json_t *cpu_point_json(const bench *b, const bench_arm *arm, const bench_point *p) {
    const megamoe_layer_desc *desc = &arm->layer.desc;
    const bench_point *owner = &bench_device_owner(b, arm)->points[p - arm->points];
    const double gflops =
        6.0 * desc->hidden * desc->intermediate * p->routes / p->forward.median_us / 1e3;
    const double dot[] = {dot_peak(arm, &owner->before), dot_peak(arm, &owner->after)};
    return json_pack(
        "{s:I, s:I, s:f, s:f, s:f, s:o, s:f, s:f, s:f, s:f, s:f, s:f, s:[f, f], s:[f, f]}",
        "tokens", (json_int_t)p->tokens, "runs", (json_int_t)(p->rounds * b->request->iterations),
        "median_ms", p->forward.median_us / 1e3, "min_ms", p->forward.min_us / 1e3, "p90_ms",
        p->forward.p90_us / 1e3, "rounds_us", rounds_json(p), "experts_touched", p->experts,
        "load_imbalance", p->imbalance, "weight_gbs", p->gbs, "gflops", gflops, "read_share",
        p->gbs / mean(owner->before.read_gbs, owner->after.read_gbs), "dot_share",
        gflops / mean(dot[0], dot[1]), "read_gbs", owner->before.read_gbs, owner->after.read_gbs,
        "dot_gflops", dot[0], dot[1]);
}

/* ---- Arms ---- */

static json_t *parts_json(const megamoe_workspace *workspace) {
    json_t *parts = json_array();
    const char *what;
    uint64_t bytes;
    for (int32_t i = 0; megamoe_workspace_part(workspace, i, &what, &bytes); i++)
        json_array_append_new(parts,
                              json_pack("{s:s, s:I}", "what", what, "bytes", (json_int_t)bytes));
    return parts;
}

static void add_gpu(const bench *b, const bench_arm *arm, json_t *object) {
    const megamoe_device_ceilings *before = &bench_device_owner(b, arm)->before;
    const megamoe_device_ceilings *after = &bench_device_owner(b, arm)->after;
    const megamoe_workspace *workspace = bench_gpu_workspace(arm->gpu);
    json_object_update_new(
        object,
        json_pack("{s:I, s:I, s:o, s:I, s:s, s:s, s:o, s:{s:[f, f], s:[f, f], s:[f, f]}}",
                  "stored_expert_bytes", (json_int_t)arm->layer.stored_bytes, "workspace_bytes",
                  (json_int_t)megamoe_workspace_bytes(workspace), "workspace_parts",
                  parts_json(workspace), "flush_bytes", (json_int_t)bench_gpu_flush_bytes(arm->gpu),
                  "l2", l2_names[arm->config.l2], "launch", launch_names[arm->config.launch], "gpu",
                  bench_gpu_json(&arm->info, &arm->record), "ceilings", "read_gbs",
                  before->read_gbs, after->read_gbs, "copy_gbs", before->copy_gbs, after->copy_gbs,
                  "mma_tflops", before->mma_tflops, after->mma_tflops));
    if (arm->config.token_tile > 0)
        json_object_set_new(object, "token_tile", json_integer((json_int_t)arm->config.token_tile));
    if (arm->config.lag > 0)
        json_object_set_new(object, "lag", json_integer((json_int_t)arm->config.lag));
    const bench_nominal *nominal = bench_nominal_of(arm->info.model);
    if (nominal != NULL)
        json_object_set_new(object, "nominal",
                            json_pack("{s:s, s:f, s:f}", "gpu", nominal->gpu, "read_gbs",
                                      nominal->read_gbs, "mma_tflops", nominal->mma_tflops));
}

static json_t *arm_json(const bench *b, const bench_arm *arm) {
    const bench_config *c = &arm->config;
    const megamoe_layer_desc *desc = &arm->layer.desc;
    json_t *object =
        json_pack("{s:s, s:s, s:I}", "arm", arm->name, "format", megamoe_format_name(desc->format),
                  "expert_bytes", (json_int_t)arm->layer.expert_bytes);
    if (desc->format == MEGAMOE_FORMAT_NVFP4)
        json_object_set_new(
            object, "nvfp4",
            json_string(arm->layer.nvfp4 == MEGAMOE_NVFP4_EXACT ? "exact" : "folded"));
    json_object_update_new(object,
                           json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:i, s:b, s:s, s:s}",
                                     "activations", c->activations ? "int8" : "e4m3", "input_scale",
                                     c->input_scale ? "block" : "token", "accumulate",
                                     c->accumulate ? "promote" : "mma", "device", arm->info.name,
                                     "model", arm->info.model, "tier", arm->info.tier, "threads",
                                     arm->info.threads, "pinned", arm->info.pinned, "version",
                                     megamoe_version(), "commit", megamoe_build_commit()));
    if (b->on_gpu)
        add_gpu(b, arm, object);
    json_t *points = json_array();
    for (int i = 0; i < b->n_tokens; i++)
        json_array_append_new(
            points, (b->on_gpu ? gpu_point_json : cpu_point_json)(b, arm, &arm->points[i]));
    json_object_set_new(object, "points", points);
    return object;
}

json_t *bench_json(const bench *b) {
    const bench_request *request = b->request;
    const bench_layer *layer = &b->arms[0].layer;
    json_t *object = json_pack(
        "{s:i, s:s, s:i, s:i, s:i, s:i, s:i, s:s, s:s, s:I, s:I, s:I, s:f, s:f, s:o}",
        "schema_version", BENCH_SCHEMA_VERSION, "layer", layer->name, "hidden", layer->desc.hidden,
        "intermediate", layer->desc.intermediate, "experts", layer->desc.experts,
        "experts_of_model", layer->all_experts, "topk", layer->desc.topk, "date", b->date,
        "command", b->command, "seed", (json_int_t)request->seed, "iterations",
        (json_int_t)request->iterations, "warm_ups", (json_int_t)request->warm_ups, "cooldown_s",
        request->cooldown, "padding_us", request->padding, "host", bench_host_json());
    if (b->geometry != NULL)
        json_object_set_new(object, "geometry", json_string(b->geometry->name));
    if (b->ranks > 1)
        json_object_set_new(object, "ranks", json_integer(b->ranks));
    json_object_set_new(object, "routing", json_string(b->routing.name));
    if (request->live > 0)
        json_object_set_new(object, "live", json_integer((json_int_t)request->live));
    if (b->on_gpu)
        json_object_update_new(object, json_pack("{s:I, s:s}", "capacity", (json_int_t)b->capacity,
                                                 "public_source", bench_published_source));
    if (b->n_arms == 1) {
        json_object_update_new(object, arm_json(b, &b->arms[0]));
        return object;
    }
    json_t *arms = json_array();
    for (int i = 0; i < b->n_arms; i++)
        json_array_append_new(arms, arm_json(b, &b->arms[i]));
    json_object_set_new(object, "arms", arms);
    return object;
}
