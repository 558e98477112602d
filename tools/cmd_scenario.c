/* SPDX-License-Identifier: Apache-2.0 */
/*
 * megamoe scenario: what the steps of an engine cost in a stack of expert layers, while requests
 * arrive.
 */
#include <inttypes.h>

#include "bench_geometry.h"
#include "commands.h"
#include "models.h"
#include "options.h"
#include "parallel.h"
#include "rank.h"
#include "report.h"
#include "scenario.h"

/* Synthetic experts repeat after so many; each is packed and lies in memory by itself. */
enum { DISTINCT_EXPERTS = 4 };

/* What depends on the device, where the command line does not say it. */
typedef struct defaults {
    const char *geometry, *prompt, *output;
    int64_t layers, sequences, requests, chunk;
} defaults;

static const defaults of_cpu = {"tiny", "16-64", "8-32", 2, 8, 24, 64};
static const defaults of_gpu = {"flash", "lognormal:1024:0.7", "lognormal:128:0.7", 8, 64, 256,
                                2048};

static const double cpu_memory_gb = 2, gpu_memory_share = 0.8;

static void set_defaults(scenario_request *r, const defaults *d) {
    if (r->path == NULL && r->model == NULL && r->geometry == NULL)
        r->geometry = d->geometry;
    r->prompt = r->prompt != NULL ? r->prompt : d->prompt;
    r->output = r->output != NULL ? r->output : d->output;
    r->layers = r->layers > 0 ? r->layers : d->layers;
    r->sequences = r->sequences > 0 ? r->sequences : d->sequences;
    r->requests = r->requests > 0 ? r->requests : d->requests;
    if (r->chunk == 0)
        r->chunk = d->chunk > r->sequences ? d->chunk : r->sequences;
}

static int parse_lengths(const char *option, const char *text, lengths *l) {
    if (lengths_parse(text, l))
        return EXIT_DONE;
    return report_error("--%s %s: expected N, A-B or lognormal:MEDIAN:SIGMA, in tokens from 1 to "
                        "%d",
                        option, text, LENGTH_MAX);
}

static int check_request(const scenario_request *r, bool on_gpu) {
    if ((r->path != NULL) + (r->model != NULL) + (r->geometry != NULL) > 1)
        return report_error("scenario: PATH, --model and --geometry exclude each other");
    if (r->path != NULL && r->format >= 0)
        return report_error("scenario: --format is for synthetic weights, not for %s", r->path);
    if (on_gpu && r->activations)
        return report_error("scenario: --activations int8 is for the CPU, not for --device %s",
                            r->device);
    if (r->activations && r->input_scale)
        return report_error(
            "scenario: --input-scale block is for E4M3, not for --activations int8");
    return EXIT_DONE;
}

static int set_options(const scenario_request *r, simulation_options *o) {
    *o = (simulation_options){.workload = (workload)r->workload,
                              .requests = r->requests,
                              .arrivals = r->arrivals,
                              .sequences = r->sequences,
                              .chunk = r->chunk,
                              .steps = r->steps,
                              .seed = (uint64_t)r->seed};
    if (o->workload == WORKLOAD_MIXED && r->chunk < r->sequences)
        return report_error("--chunk %" PRId64 ": a step of --sequences %" PRId64
                            " may need as many tokens",
                            r->chunk, r->sequences);
    TRY(parse_lengths("prompt-tokens", r->prompt, &o->prompt));
    return parse_lengths("output-tokens", r->output, &o->output);
}

/* The layers of PATH, --model or --geometry. */
static int describe_layer(const scenario_request *r, int32_t ranks, stack_options *options) {
    const megamoe_format format = (megamoe_format)(r->format + 1);
    options->path = r->path;
    if (r->path != NULL)
        return EXIT_DONE;
    if (r->model != NULL) {
        const model *m = model_find(r->model);
        if (m == NULL)
            return report_error("--model %s: unknown; megamoe synth --list shows the models",
                                r->model);
        options->name = m->name;
        options->desc = model_layer(m, m->dense_layers, r->format < 0 ? m->published : format);
        return EXIT_DONE;
    }
    const bench_geometry *g = bench_geometry_find(r->geometry);
    if (g == NULL)
        return EXIT_BAD_INPUT;
    options->name = g->what;
    options->desc = bench_geometry_layer(g, r->format < 0 ? MEGAMOE_FORMAT_MXFP4 : format);
    options->desc.experts *= ranks; /* those of a geometry are one rank's */
    return EXIT_DONE;
}

static uint64_t memory_limit(const scenario *s) {
    if (s->request->memory_gb > 0)
        return (uint64_t)(s->request->memory_gb * 1e9);
    if (s->device.memory_bytes > 0)
        return (uint64_t)(gpu_memory_share * (double)s->device.memory_bytes);
    return (uint64_t)(cpu_memory_gb * 1e9);
}

/* Meets the other ranks if a launcher has started this process as one of several. */
static int join_ranks(bench_target *target) {
    const megamoe_status status = megamoe_comm_from_env(NULL, &target->comm);
    if (status == MEGAMOE_ENOTFOUND)
        TRY_LIBRARY(megamoe_comm_self(&target->comm));
    else if (status != MEGAMOE_OK)
        return report_failure(status);
    const int32_t ranks = megamoe_comm_size(target->comm);
    target->threads = target->threads > ranks ? target->threads / ranks : 1;
    return EXIT_DONE;
}

static int execute(scenario *s, bench_target *target) {
    const scenario_request *r = s->request;
    stack_options options = {.layers = (int32_t)r->layers,
                             .tokens = simulation_most_tokens(&s->options),
                             .input_scale = (megamoe_input_scale)r->input_scale,
                             .activations = (megamoe_activation_type)r->activations};
    TRY(join_ranks(target));
    TRY(describe_layer(r, megamoe_comm_size(target->comm), &options));
    TRY(rank_open_device(r->device, target->threads, target->comm, &target->device));
    s->device = (megamoe_device_info)MEGAMOE_INIT(megamoe_device_info);
    TRY_LIBRARY(megamoe_device_describe(target->device, &s->device));
    target->memory = memory_limit(s);
    options.target = *target;
    TRY(stack_open(&options, &s->device, &s->routing, &s->stack));
    if (s->stack.gpu != NULL)
        bench_gpu_record_begin(s->stack.gpu, &s->record);
    const int code = simulation_run(&s->options, stack_step, &s->stack, &s->simulation);
    if (code == SIMULATION_NO_MEMORY)
        return report_error("out of memory for %" PRId64 " requests", r->requests);
    TRY(code);
    if (s->stack.gpu != NULL)
        bench_gpu_record_end(s->stack.gpu, &s->record);
    if (s->stack.rank != 0)
        return EXIT_DONE; /* the rest is for one */
    return (r->json ? scenario_print_json : scenario_print_text)(s);
}

int cmd_scenario(int argc, char **argv) {
    scenario_request request = {.device = "cpu",
                                .routing = "random",
                                .threads = parallel_cores(),
                                .steps = 1000,
                                .seed = 1,
                                .format = -1};
    const option_spec options[] = {
        {"workload", OPTION_CHOICE, &request.workload, WORKLOADS,
         "what the requests compute (decode)", 0, 0},
        {"device", OPTION_TEXT, &request.device, "cpu|cuda|cuda:N", "(cpu)", 0, 0},
        {"model", OPTION_TEXT, &request.model, "NAME", "layers of a public model", 0, 0},
        {"geometry", OPTION_TEXT, &request.geometry, "NAME",
         "layers of a shape that bench knows (tiny; GPU: flash)", 0, 0},
        {"layers", OPTION_INTEGER, &request.layers, "L", "layers of the stack (2; GPU: 8)", 1,
         1000},
        {"experts", OPTION_INTEGER, &request.experts, "N", "experts of each layer", 1, 65536},
        {"format", OPTION_CHOICE, &request.format, "mxfp4|nvfp4", "of the weights", 0, 0},
        {"nvfp4", OPTION_CHOICE, &request.nvfp4, "exact|folded", "form of NVFP4 weights (exact)", 0,
         0},
        {"input-scale", OPTION_CHOICE, &request.input_scale, "token|block",
         "one scale per token, or per 128 channels (token)", 0, 0},
        {"accumulate", OPTION_CHOICE, &request.accumulate, "mma|promote",
         "sums over all of K, or over 128 each (mma)", 0, 0},
        OPTION_ACTIVATIONS(&request.activations),
        {"memory", OPTION_NUMBER, &request.memory_gb, "GB",
         "most weights to hold (2; GPU: most of its memory)", 1e-6, 1e6},
        OPTION_ROUTING(&request.routing),
        {"sequences", OPTION_INTEGER, &request.sequences, "C",
         "requests at once at most (8; GPU: 64)", 1, 1 << 16},
        {"requests", OPTION_INTEGER, &request.requests, "N", "(24; GPU: 256)", 1, 1 << 24},
        {"arrivals", OPTION_NUMBER, &request.arrivals, "RATE",
         "requests per second, a Poisson process (all at once)", 1e-6, 1e9},
        {"prompt-tokens", OPTION_TEXT, &request.prompt, "N|A-B|lognormal:MEDIAN:SIGMA",
         "(16-64; GPU: lognormal:1024:0.7)", 0, 0},
        {"output-tokens", OPTION_TEXT, &request.output, "N|A-B|lognormal:MEDIAN:SIGMA",
         "(8-32; GPU: lognormal:128:0.7)", 0, 0},
        {"chunk", OPTION_INTEGER, &request.chunk, "N",
         "tokens of a step with prompts at most (64; GPU: 2048)", 1, 1 << 16},
        {"steps", OPTION_INTEGER, &request.steps, "N", "end after so many (1000)", 1, 1 << 24},
        {"threads", OPTION_INTEGER, &request.threads, "T", "(one per core)", 1, 1024},
        {"seed", OPTION_INTEGER, &request.seed, "N",
         "of weights, input, routes, arrivals and lengths (1)", 0, (double)INT64_MAX},
        OPTION_JSON(&request.json)};
    const command_syntax syntax = {
        "scenario",
        "[PATH]",
        "Measures the steps of a stack of expert layers while requests arrive.",
        "megamoe scenario --workload mixed --device cuda --sequences 128 --arrivals 200 --json",
        options,
        sizeof options / sizeof *options,
        0,
        1};
    scenario s = {.request = &request};
    record_command(argc, argv, s.command);
    record_date(s.date);
    const char *arguments[OPTION_MAX_ARGUMENTS];
    int code;
    if (!options_parse(&syntax, argc, argv, arguments, &code))
        return code;
    request.path = arguments[0];
    const bool on_gpu = ranks_on_gpu(request.device);
    TRY(check_request(&request, on_gpu));
    set_defaults(&request, on_gpu ? &of_gpu : &of_cpu);
    TRY(set_options(&request, &s.options));
    bench_target target = {.nvfp4 = (megamoe_nvfp4_mode)request.nvfp4,
                           .accumulate = (megamoe_accumulate)request.accumulate,
                           .experts = (int32_t)request.experts,
                           .distinct = DISTINCT_EXPERTS,
                           .seed = (uint64_t)request.seed,
                           .threads = (int32_t)request.threads};
    code = routing_open(request.routing, &s.routing);
    if (code == EXIT_DONE)
        code = execute(&s, &target);
    if (code != EXIT_DONE && s.stack.ranks > 1)
        megamoe_comm_abort(target.comm);
    stack_close(&s.stack);
    simulation_close(&s.simulation);
    routing_close(&s.routing);
    megamoe_device_close(target.device);
    megamoe_comm_close(target.comm);
    return code;
}
