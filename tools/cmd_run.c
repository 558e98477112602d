/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe run: one forward of a layer over ranks. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "inputs.h"
#include "options.h"
#include "parallel.h"
#include "progress.h"
#include "ranks.h"
#include "report.h"
#include "source.h"

enum { MAX_RANKS = 64 };

typedef struct run {
    source source;
    inputs inputs;
    ranks_report report;
    ranks_options options;
    uint16_t *y;
    int64_t differing; /* rows that the reference computes differently; -1: not compared */
    const char *out;
    megamoe_comm *comm; /* of ranks that a launcher has started; else NULL */
} run;

/* FNV-1a, 64 bits: tells runs apart at a glance. */
static uint64_t checksum(const void *data, size_t bytes) {
    const uint8_t *at = data;
    uint64_t hash = 0xcbf29ce484222325;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ at[i]) * 0x100000001b3;
    return hash;
}

static bool bf16_is_nan(uint16_t bits) {
    return (bits & 0x7fff) > 0x7f80;
}

static bool rows_equal(const uint16_t *a, const uint16_t *b, int32_t n) {
    for (int32_t i = 0; i < n; i++)
        if (a[i] != b[i] && !(bf16_is_nan(a[i]) && bf16_is_nan(b[i])))
            return false;
    return true;
}

static int compare_with_reference(run *r, int32_t threads) {
    const inputs *in = &r->inputs;
    const int32_t hidden = r->source.layer.hidden;
    uint16_t *expected = malloc((size_t)in->tokens * (size_t)hidden * sizeof *expected + 1);
    if (expected == NULL)
        return report_error("out of memory");
    const megamoe_view x = {in->x, MEGAMOE_DTYPE_BF16, in->tokens, 0};
    const megamoe_view ids = {in->topk_ids, in->topk_ids_dtype, in->tokens, 0};
    const megamoe_view weights = {in->topk_weights, MEGAMOE_DTYPE_F32, in->tokens, 0};
    const megamoe_view y = {expected, MEGAMOE_DTYPE_BF16, in->tokens, 0};
    progress bar;
    megamoe_reference_options options = MEGAMOE_INIT(megamoe_reference_options);
    options.sum = ranks_on_gpu(r->options.device) ? MEGAMOE_SUM_WGMMA : MEGAMOE_SUM_FP32;
    options.nvfp4 = r->options.nvfp4;
    options.input_scale = r->options.input_scale;
    options.accumulate = r->options.accumulate;
    options.activations = r->options.activations;
    options.threads = threads;
    options.progress = progress_begin(&bar, "reference");
    const megamoe_status status = megamoe_reference_forward(r->source.weights, &options, in->topk,
                                                            &x, &ids, &weights, in->tokens, &y);
    progress_end(&bar);
    if (status != MEGAMOE_OK) {
        free(expected);
        return report_failure(status);
    }
    r->differing = 0;
    for (int64_t token = 0; token < in->tokens; token++)
        if (!rows_equal(r->y + token * hidden, expected + token * hidden, hidden))
            r->differing++;
    free(expected);
    return r->differing == 0 ? EXIT_DONE : EXIT_CHECK_FAILED;
}

static megamoe_status fill_output(void *user, size_t index, void *data, uint64_t bytes) {
    const run *r = user;
    const void *const tensors[] = {r->y, r->inputs.topk_ids, r->inputs.topk_weights};
    if (bytes > 0)
        memcpy(data, tensors[index], bytes);
    return MEGAMOE_OK;
}

static int write_output(run *r) {
    const int64_t tokens = r->inputs.tokens, topk = r->inputs.topk;
    const megamoe_tensor_spec specs[] = {
        {"output", "BF16", 2, {tokens, r->source.layer.hidden}},
        {"topk_ids", megamoe_dtype_name(r->inputs.topk_ids_dtype), 2, {tokens, topk}},
        {"topk_weights", "F32", 2, {tokens, topk}}};
    const megamoe_status status = megamoe_tensors_save(r->out, specs, sizeof specs / sizeof *specs,
                                                       fill_output, r, (megamoe_progress){0});
    return status == MEGAMOE_OK ? EXIT_DONE : report_failure(status);
}

static int print_json(const run *r, uint64_t sum) {
    const megamoe_layer_desc *layer = &r->source.layer;
    const ranks_report *report = &r->report;
    char hash[24];
    snprintf(hash, sizeof hash, "%016" PRIx64, sum);
    json_t *object =
        json_pack("{s:s, s:i, s:s, s:b, s:i, s:i, s:i, s:i}", "path", r->source.path, "layer",
                  layer->layer, "format", megamoe_format_name(layer->format), "prepared",
                  r->source.prepared, "hidden", layer->hidden, "intermediate", layer->intermediate,
                  "experts", layer->experts, "topk", r->inputs.topk);
    json_object_update_new(
        object,
        json_pack("{s:s, s:s, s:i, s:i, s:I, s:f, s:f, s:I, s:I, s:s}", "device",
                  report->device.name, "tier", report->device.tier, "ranks", r->options.ranks,
                  "threads_per_rank", report->device.threads, "tokens",
                  (json_int_t)r->inputs.tokens, "create_ms", report->create_ms, "forward_ms",
                  report->forward_ms, "layer_bytes", (json_int_t)report->layer_bytes,
                  "workspace_bytes", (json_int_t)report->workspace_bytes, "checksum", hash));
    json_object_set_new(
        object, "received",
        json_pack("{s:I, s:I, s:I, s:I}", "rank_min", (json_int_t)report->routes_min, "rank_max",
                  (json_int_t)report->routes_max, "expert_min", (json_int_t)report->expert_min,
                  "expert_max", (json_int_t)report->expert_max));
    if (r->differing >= 0)
        json_object_set_new(object, "verify",
                            json_pack("{s:b, s:I, s:I}", "equal", r->differing == 0, "rows",
                                      (json_int_t)r->inputs.tokens, "rows_differing",
                                      (json_int_t)r->differing));
    if (r->out != NULL && r->differing <= 0)
        json_object_set_new(object, "output", json_string(r->out));
    return report_json(object);
}

static int print_text(const run *r, uint64_t sum) {
    const megamoe_layer_desc *layer = &r->source.layer;
    const ranks_report *report = &r->report;
    report_line("layer", "%d of %s%s", layer->layer, r->source.path,
                r->source.prepared ? " (prepared)" : "");
    report_line("shape", "%s, hidden %d, intermediate %d, %d experts, top-%d",
                megamoe_format_name(layer->format), layer->hidden, layer->intermediate,
                layer->experts, r->inputs.topk);
    const char *plural = r->options.ranks == 1 ? "" : "s";
    if (ranks_on_gpu(r->options.device))
        report_line("device", "%s, %s, %s, %d rank%s", report->device.name, report->device.model,
                    report->device.tier, r->options.ranks, plural);
    else
        report_line("device", "%s %s, %d rank%s of %d thread%s", report->device.name,
                    report->device.tier, r->options.ranks, plural, report->device.threads,
                    report->device.threads == 1 ? "" : "s");
    report_line("tokens", "%" PRId64, r->inputs.tokens);
    report_line("received",
                "%" PRId64 "..%" PRId64 " routes by a rank, %" PRId64 "..%" PRId64 " by an expert",
                report->routes_min, report->routes_max, report->expert_min, report->expert_max);
    report_line("time", "%.2f ms forward, %.0f ms to create the layer", report->forward_ms,
                report->create_ms);
    report_line("checksum", "%016" PRIx64, sum);
    if (r->differing >= 0)
        report_line("verify", "%" PRId64 " of %" PRId64 " rows equal the reference to the bit",
                    r->inputs.tokens - r->differing, r->inputs.tokens);
    if (r->out != NULL && r->differing <= 0)
        report_line("output", "%s", r->out);
    return EXIT_DONE;
}

typedef struct run_request {
    const char *path, *input, *out, *device;
    int64_t layer, tokens, seed, ranks, threads;
    int nvfp4, input_scale, accumulate, activations;
    bool verify, json;
} run_request;

static int32_t threads_of(const run_request *request) {
    return request->threads != 0 ? (int32_t)request->threads : parallel_cores();
}

static int execute(run *r, const run_request *request) {
    const int32_t threads = threads_of(request);
    int code = source_open(request->path, &r->source);
    if (code == EXIT_DONE)
        code = source_open_layer(&r->source, request->layer);
    if (code == EXIT_DONE)
        code = request->input != NULL
                   ? inputs_read(request->input, &r->source, &r->inputs)
                   : inputs_draw(request->tokens, (uint64_t)request->seed, &r->source, &r->inputs);
    if (code == EXIT_DONE)
        code = inputs_route(&r->source, threads, &r->inputs);
    if (code != EXIT_DONE)
        return code;
    const size_t elements = (size_t)r->inputs.tokens * (size_t)r->source.layer.hidden;
    r->y = malloc(elements * sizeof *r->y + 1);
    if (r->y == NULL)
        return report_error("out of memory");
    code = r->comm != NULL ? ranks_forward_in_processes(r->comm, &r->source, &r->inputs,
                                                        &r->options, r->y, &r->report)
                           : ranks_forward(&r->source, &r->inputs, &r->options, r->y, &r->report);
    if (r->comm != NULL && megamoe_comm_rank(r->comm) != 0)
        return code; /* the rest is for one */
    if (code == EXIT_DONE && request->verify)
        code = compare_with_reference(r, threads);
    if (code == EXIT_DONE && r->out != NULL)
        code = write_output(r);
    if (code == EXIT_BAD_INPUT)
        return code;
    const uint64_t sum = checksum(r->y, elements * sizeof *r->y);
    if ((request->json ? print_json : print_text)(r, sum) != EXIT_DONE)
        return EXIT_BAD_INPUT;
    if (code == EXIT_CHECK_FAILED)
        report_error("%" PRId64 " of %" PRId64 " rows differ from the reference", r->differing,
                     r->inputs.tokens);
    return code;
}

/*
 * Meets the other ranks if a launcher has started this process as one of several. Ranks that
 * compute as threads are then asked for twice.
 */
static int join_ranks(run *r, const run_request *request) {
    const megamoe_status status = megamoe_comm_from_env(NULL, &r->comm);
    if (status == MEGAMOE_ENOTFOUND)
        return EXIT_DONE;
    if (status != MEGAMOE_OK)
        return report_failure(status);
    if (megamoe_comm_size(r->comm) == 1) {
        megamoe_comm_close(r->comm);
        r->comm = NULL;
        return EXIT_DONE;
    }
    if (request->ranks != 0)
        return report_error("run: a launcher has started %d ranks; --ranks is for a process of its "
                            "own",
                            megamoe_comm_size(r->comm));
    r->options.ranks = megamoe_comm_size(r->comm);
    r->options.threads = (int32_t)request->threads;
    return EXIT_DONE;
}

int cmd_run(int argc, char **argv) {
    run_request request = {.device = "cpu", .layer = ONLY_LAYER, .seed = 1};
    const option_spec options[] = {
        {"layer", OPTION_INTEGER, &request.layer, "L", "layer of a checkpoint (its only one)", 0,
         INT32_MAX},
        {"device", OPTION_TEXT, &request.device, "cpu|cuda|cuda:N", "(cpu)", 0, 0},
        {"ranks", OPTION_INTEGER, &request.ranks, "R", "ranks that share the experts (1)", 1,
         MAX_RANKS},
        {"threads", OPTION_INTEGER, &request.threads, "T", "of all ranks (one per core)", 1, 1024},
        {"tokens", OPTION_INTEGER, &request.tokens, "N", "draw N input rows (16)", 1, 1 << 20},
        {"input", OPTION_TEXT, &request.input, "FILE", "safetensors: hidden_states, topk_ids, ...",
         0, 0},
        {"seed", OPTION_INTEGER, &request.seed, "N", "of the drawn input (1)", 0,
         (double)INT64_MAX},
        {"nvfp4", OPTION_CHOICE, &request.nvfp4, "exact|folded", "form of NVFP4 weights (exact)", 0,
         0},
        {"input-scale", OPTION_CHOICE, &request.input_scale, "token|block",
         "one scale per token, or per 128 channels (token)", 0, 0},
        {"accumulate", OPTION_CHOICE, &request.accumulate, "mma|promote",
         "sums over all of K, or over 128 each (mma)", 0, 0},
        OPTION_ACTIVATIONS(&request.activations),
        {"output", OPTION_TEXT, &request.out, "FILE", "safetensors: output, topk_ids, ...", 0, 0},
        {"verify", OPTION_FLAG, &request.verify, NULL, "compare with the scalar reference", 0, 0},
        OPTION_JSON(&request.json)};
    const command_syntax syntax = {
        "run",
        "PATH",
        "Runs an expert layer of a checkpoint or prepared file over ranks.",
        "megamoe run qwen --layer 0 --ranks 4 --tokens 64 --verify --output out.safetensors",
        options,
        sizeof options / sizeof *options,
        1,
        1};
    const char *arguments[OPTION_MAX_ARGUMENTS];
    int code;
    if (!options_parse(&syntax, argc, argv, arguments, &code))
        return code;
    if (request.input != NULL && request.tokens != 0)
        return report_error("run: --tokens and --input exclude each other");
    if (request.activations && ranks_on_gpu(request.device))
        return report_error("run: --activations int8 is for the CPU, not for --device %s",
                            request.device);
    if (request.activations && request.input_scale)
        return report_error("run: --input-scale block is for E4M3, not for --activations int8");
    if (request.tokens == 0)
        request.tokens = 16;
    request.path = arguments[0];
    run r = {.differing = -1,
             .out = request.out,
             .options = {.device = request.device,
                         .ranks = request.ranks != 0 ? (int32_t)request.ranks : 1,
                         .threads = threads_of(&request),
                         .nvfp4 = (megamoe_nvfp4_mode)request.nvfp4,
                         .input_scale = (megamoe_input_scale)request.input_scale,
                         .accumulate = (megamoe_accumulate)request.accumulate,
                         .activations = (megamoe_activation_type)request.activations}};
    code = join_ranks(&r, &request);
    if (code == EXIT_DONE)
        code = execute(&r, &request);
    free(r.y);
    inputs_close(&r.inputs);
    source_close(&r.source);
    megamoe_comm_close(r.comm);
    return code;
}
