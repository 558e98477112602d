/* SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"

#include <stdlib.h>
#include <string.h>

megamoe_shape bench_shape(const bench *b) {
    megamoe_shape shape = MEGAMOE_INIT(megamoe_shape);
    shape.hidden = b->layer.desc.hidden;
    shape.intermediate = b->layer.desc.intermediate;
    shape.experts = b->layer.desc.experts;
    shape.topk = b->layer.desc.topk;
    shape.input_scale = (megamoe_input_scale)b->request->input_scale;
    shape.activations = (megamoe_activation_type)b->request->activations;
    return shape;
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_quantile(double *values, int64_t n, double q) {
    qsort(values, (size_t)n, sizeof *values, compare);
    return values[(int64_t)(q * (double)(n - 1) + 0.5)];
}

int32_t bench_count_experts(const int32_t *ids, int64_t n, int32_t experts, bool *seen) {
    int32_t different = 0;
    memset(seen, 0, (size_t)experts);
    for (int64_t i = 0; i < n; i++) {
        different += !seen[ids[i]];
        seen[ids[i]] = true;
    }
    return different;
}

/* The words of the options. */
static const char *input_scale_name(const bench *b) {
    return b->request->input_scale == MEGAMOE_SCALE_TOKEN ? "token" : "block";
}

static const char *activations_name(const bench *b) {
    return b->request->activations == MEGAMOE_ACTIVATIONS_INT8 ? "int8" : "e4m3";
}

static const char *accumulate_name(const bench *b) {
    return b->request->accumulate == MEGAMOE_ACCUMULATE_MMA ? "mma" : "promote";
}

static const char *nvfp4_name(const bench *b) {
    return b->layer.nvfp4 == MEGAMOE_NVFP4_EXACT ? "exact" : "folded";
}

json_t *bench_json(const bench *b) {
    const megamoe_layer_desc *desc = &b->layer.desc;
    json_t *object = json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:I}", "layer", b->layer.name,
                               "format", megamoe_format_name(desc->format), "hidden", desc->hidden,
                               "intermediate", desc->intermediate, "experts", desc->experts,
                               "experts_of_model", b->layer.all_experts, "topk", desc->topk,
                               "expert_bytes", (json_int_t)b->layer.expert_bytes);
    if (desc->format == MEGAMOE_FORMAT_NVFP4)
        json_object_set_new(object, "nvfp4", json_string(nvfp4_name(b)));
    json_object_update_new(
        object, json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:i, s:b, s:s, s:s, s:s, s:I}",
                          "activations", activations_name(b), "input_scale", input_scale_name(b),
                          "accumulate", accumulate_name(b), "device", b->device.name, "model",
                          b->device.model, "tier", b->device.tier, "threads", b->device.threads,
                          "pinned", b->device.pinned, "version", megamoe_version(), "date", b->date,
                          "command", b->command, "seed", (json_int_t)b->target.seed));
    return object;
}

void bench_print_layer(const bench *b) {
    const megamoe_layer_desc *desc = &b->layer.desc;
    char size[REPORT_SIZE_BYTES];
    report_line("layer", "%s: %s%s%s, hidden %d, intermediate %d, %d experts, top-%d, %s",
                b->layer.name, megamoe_format_name(desc->format),
                desc->format == MEGAMOE_FORMAT_NVFP4 ? " " : "",
                desc->format == MEGAMOE_FORMAT_NVFP4 ? nvfp4_name(b) : "", desc->hidden,
                desc->intermediate, desc->experts, desc->topk,
                report_size((uint64_t)desc->experts * b->layer.expert_bytes, size));
    if (desc->experts < b->layer.all_experts)
        report_line("", "a share: the first %d of %d experts", desc->experts, b->layer.all_experts);
    if (b->request->activations == MEGAMOE_ACTIVATIONS_INT8)
        report_line("options", "activations int8, scales per 128 channels");
    else
        report_line("options", "input scale per %s, accumulate %s",
                    b->request->input_scale == MEGAMOE_SCALE_TOKEN ? "token" : "128 channels",
                    accumulate_name(b));
}
