/* SPDX-License-Identifier: Apache-2.0 */
/* --dry-run: what would be measured, without a forward and, of a GPU, without the GPU. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "bench.h"
#include "bench_published.h"
#include "bench_result.h"

/* The GPU whose floors are told where there is none. */
static const char usual_gpu[] = "H200";

static double larger(double a, double b) {
    return a > b ? a : b;
}

static megamoe_accumulate accumulate_of(const bench_arm *arm) {
    return arm->config.accumulate ? MEGAMOE_ACCUMULATE_PROMOTE : MEGAMOE_ACCUMULATE_MMA;
}

/* Whether there is a kernel with the tile that was asked for, or none was. */
static int check_tile(const bench_arm *arm) {
    enum { MOST = 32 };
    if (arm->config.token_tile <= 0)
        return EXIT_DONE;
    int32_t tiles[MOST];
    const int32_t found = megamoe_plan_token_tiles(&arm->layer.desc, arm->layer.nvfp4,
                                                   accumulate_of(arm), tiles, MOST);
    char list[MOST * 8] = "";
    size_t length = 0;
    for (int32_t i = 0; i < found && i < MOST; i++) {
        if (tiles[i] == arm->config.token_tile)
            return EXIT_DONE;
        length += (size_t)snprintf(list + length, sizeof list - length, "%s%" PRId32,
                                   i > 0 ? ", " : "", tiles[i]);
    }
    return report_error("there is no kernel with tiles of %" PRId64 " tokens; expected one of %s",
                        arm->config.token_tile, list);
}

/* Tokens of a GPU's tile: as asked for, or as the library chooses for this batch. 0 on a CPU. */
static int64_t tile_of(const bench *b, const bench_arm *arm, int64_t tokens) {
    if (arm->config.token_tile > 0 || !b->on_gpu)
        return arm->config.token_tile;
    return megamoe_plan_token_tile(&arm->layer.desc, arm->layer.nvfp4, accumulate_of(arm), 1,
                                   tokens);
}

static int point_json(const bench *b, const bench_arm *arm, const bench_nominal *nominal,
                      int64_t tokens, json_t *points) {
    const megamoe_layer_desc *desc = &arm->layer.desc;
    const bench_routes routes = bench_routes_of(b);
    const int64_t tile = tile_of(b, arm, tokens);
    bench_work work;
    if (!bench_routes_count(&routes, tokens, 1, 0, tile, &work))
        return report_error("out of memory for %" PRId64 " tokens", tokens);
    const double bytes = (double)work.experts *
                         (double)(b->on_gpu ? arm->layer.stored_bytes : arm->layer.expert_bytes);
    const double operations = 6.0 * (double)work.routes * desc->hidden * desc->intermediate;
    json_t *p = json_pack("{s:I, s:i, s:f, s:I, s:I, s:f}", "tokens", (json_int_t)tokens,
                          "experts_active", work.experts, "load_imbalance", work.imbalance,
                          "routes_received", (json_int_t)work.routes, "weight_bytes",
                          (json_int_t)bytes, "operations", operations);
    if (nominal != NULL)
        json_object_set_new(p, "nominal_floor_us",
                            json_real(larger(bytes / nominal->read_gbs / 1e3,
                                             operations / nominal->mma_tflops / 1e6)));
    if (tile > 0)
        json_object_update_new(p, json_pack("{s:I, s:I}", "token_tile", (json_int_t)tile,
                                            "token_tiles", (json_int_t)work.tiles));
    json_array_append_new(points, p);
    return EXIT_DONE;
}

/* The name of the GPU; what is in its way where it cannot be opened. */
static void describe_device(const bench_arm *arm, json_t *object, char model[64]) {
    megamoe_device *device = NULL;
    megamoe_device_info info = MEGAMOE_INIT(megamoe_device_info);
    megamoe_status status = megamoe_device_open(arm->config.device, NULL, &device);
    if (status == MEGAMOE_OK)
        status = megamoe_device_describe(device, &info);
    if (status == MEGAMOE_OK)
        json_object_set_new(object, "model", json_string(info.model));
    else
        json_object_set_new(object, "no_device", json_string(megamoe_last_error()));
    snprintf(model, 64, "%s", status == MEGAMOE_OK ? info.model : usual_gpu);
    megamoe_device_close(device);
}

static int arm_json(const bench *b, const bench_arm *arm, json_t *object) {
    const megamoe_layer_desc *desc = &arm->layer.desc;
    const bench_config *c = &arm->config;
    const bench_nominal *nominal = NULL;
    char model[64];
    json_object_update_new(
        object,
        json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:I}", "arm", arm->name, "format",
                  megamoe_format_name(desc->format), "device", c->device, "activations",
                  c->activations ? "int8" : "e4m3", "input_scale",
                  c->input_scale ? "block" : "token", "accumulate",
                  c->accumulate ? "promote" : "mma", "expert_bytes",
                  (json_int_t)(b->on_gpu ? arm->layer.stored_bytes : arm->layer.expert_bytes)));
    if (desc->format == MEGAMOE_FORMAT_NVFP4)
        json_object_set_new(
            object, "nvfp4",
            json_string(arm->layer.nvfp4 == MEGAMOE_NVFP4_EXACT ? "exact" : "folded"));
    if (b->on_gpu) {
        TRY(check_tile(arm));
        describe_device(arm, object, model);
        nominal = bench_nominal_of(model);
    }
    if (nominal != NULL)
        json_object_set_new(object, "nominal",
                            json_pack("{s:s, s:f, s:f}", "gpu", nominal->gpu, "read_gbs",
                                      nominal->read_gbs, "mma_tflops", nominal->mma_tflops));
    if (c->token_tile > 0)
        json_object_set_new(object, "token_tile", json_integer((json_int_t)c->token_tile));
    if (c->lag > 0)
        json_object_set_new(object, "lag", json_integer((json_int_t)c->lag));
    json_t *points = json_array();
    json_object_set_new(object, "points", points);
    for (int i = 0; i < b->n_tokens; i++)
        TRY(point_json(b, arm, nominal, b->tokens[i], points));
    return EXIT_DONE;
}

int bench_plan(bench *b, json_t **result) {
    TRY(routing_open(b->request->routing, &b->routing));
    for (int i = 0; i < b->n_arms; i++)
        TRY(bench_open_layer(b, &b->arms[i], true));
    TRY(bench_fit_routing(b));
    const bench_layer *layer = &b->arms[0].layer;
    *result = json_pack("{s:i, s:b, s:s, s:i, s:i, s:i, s:i, s:i, s:I, s:s, s:s}", "schema_version",
                        BENCH_SCHEMA_VERSION, "dry_run", 1, "layer", layer->name, "hidden",
                        layer->desc.hidden, "intermediate", layer->desc.intermediate, "experts",
                        layer->desc.experts, "experts_of_model", layer->all_experts, "topk",
                        layer->desc.topk, "seed", (json_int_t)b->request->seed, "date", b->date,
                        "command", b->command);
    json_object_set_new(*result, "routing", json_string(b->routing.name));
    if (b->geometry != NULL)
        json_object_set_new(*result, "geometry", json_string(b->geometry->name));
    if (b->n_arms == 1)
        return arm_json(b, &b->arms[0], *result);
    json_t *arms = json_array();
    json_object_set_new(*result, "arms", arms);
    for (int i = 0; i < b->n_arms; i++) {
        json_t *arm = json_object();
        json_array_append_new(arms, arm);
        TRY(arm_json(b, &b->arms[i], arm));
    }
    return EXIT_DONE;
}

static void print_arm(const json_t *arm) {
    const json_t *points = json_object_get(arm, "points");
    bench_print_layer(arm);
    if (result_has(arm, "no_device"))
        report_line("device", "none: %s", result_text(arm, "no_device"));
    else
        report_line("device", "%s",
                    result_text(arm, result_has(arm, "model") ? "model" : "device"));
    if (result_has(arm, "nominal")) {
        if (result_has(arm, "lag"))
            report_line("plan", "FC2 follows FC1 by %.0f tiles", result_number(arm, "lag"));
        else
            report_line("plan", "FC2 after all of FC1");
    }
    printf("\n%7s %8s %6s %9s %11s %11s %9s %5s %7s\n", "tokens", "experts", "load", "routes",
           "weights MB", "GFLOP", "floor us", "tile", "tiles");
    size_t i;
    const json_t *p;
    json_array_foreach(points, i, p) {
        printf("%7.0f %8.0f %6.2f %9.0f %11.1f %11.1f", result_number(p, "tokens"),
               result_number(p, "experts_active"), result_number(p, "load_imbalance"),
               result_number(p, "routes_received"), result_number(p, "weight_bytes") / 1e6,
               result_number(p, "operations") / 1e9);
        if (result_has(p, "nominal_floor_us"))
            printf(" %9.1f", result_number(p, "nominal_floor_us"));
        if (result_has(p, "token_tiles"))
            printf(" %5.0f %7.0f", result_number(p, "token_tile"), result_number(p, "token_tiles"));
        printf("\n");
    }
    printf("\n");
    if (result_has(arm, "nominal"))
        report_line("floor", "of an %s: read %.0f GB/s, E4M3 %.0f TFLOP/s",
                    result_text(json_object_get(arm, "nominal"), "gpu"),
                    result_number_in(arm, "nominal", "read_gbs"),
                    result_number_in(arm, "nominal", "mma_tflops"));
}

int bench_print_plan(const json_t *plan) {
    for (size_t i = 0; i < result_arms(plan); i++) {
        json_t *arm = result_arm(plan, i);
        if (result_arms(plan) > 1)
            report_line(i > 0 ? "\narm" : "arm", "%s", result_text(arm, "arm"));
        print_arm(arm);
        json_decref(arm);
    }
    return EXIT_DONE;
}
