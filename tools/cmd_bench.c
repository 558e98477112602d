/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe bench: the speed of a layer beside the ceilings that the machine has in the same run. */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench_layer.h"
#include "commands.h"
#include "options.h"
#include "parallel.h"
#include "report.h"
#include "synth.h"

enum { MAX_POINTS = 16, MAX_TOKENS = 1 << 16, WARM_UPS = 2, LEAST_RUNS = 5, MOST_RUNS = 100000 };

/* Shapes with a name of their own. */
static const model geometries[] = {
    {.name = "geometry A",
     .naming = NAMES_DEEPSEEK_V4,
     .published = MEGAMOE_FORMAT_MXFP4,
     .hidden = 2048,
     .intermediate = 768,
     .experts = 128,
     .topk = 8},
    {.name = "geometry B",
     .naming = NAMES_DEEPSEEK_V4,
     .published = MEGAMOE_FORMAT_MXFP4,
     .hidden = 2880,
     .intermediate = 2880,
     .experts = 32,
     .topk = 4},
    {.name = "geometry C",
     .naming = NAMES_DEEPSEEK_V4,
     .published = MEGAMOE_FORMAT_MXFP4,
     .hidden = 4096,
     .intermediate = 2048,
     .experts = 32,
     .topk = 6},
};

typedef struct point {
    int64_t tokens;
    int64_t runs;
    double median_ms, min_ms, p90_ms;
    double experts; /* touched, mean */
    double gbs;     /* median */
    double gflops;
    megamoe_device_ceilings before, after;
} point;

typedef struct bench {
    bench_target target;
    bench_layer layer;
    megamoe_device_info device;
    double seconds;
    point points[MAX_POINTS];
    int n_points;
    char date[32];
    char command[1024];
} bench;

static double now_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts. q = 0.5 is the median. */
static double quantile_of(double *values, int64_t n, double q) {
    qsort(values, (size_t)n, sizeof *values, compare);
    return values[(int64_t)(q * (double)(n - 1) + 0.5)];
}

static int32_t count_different(const int32_t *ids, int64_t n, int32_t experts, bool *seen) {
    int32_t different = 0;
    memset(seen, 0, (size_t)experts);
    for (int64_t i = 0; i < n; i++) {
        different += !seen[ids[i]];
        seen[ids[i]] = true;
    }
    return different;
}

/* Buffers of one point. */
typedef struct batch {
    uint16_t *x, *y;
    int32_t *ids;
    float *weights;
    bool *seen;
    double *times, *rates; /* seconds and bytes per second of each run */
} batch;

static bool batch_open(const megamoe_layer_desc *desc, int64_t tokens, uint64_t seed, batch *b) {
    const size_t elements = (size_t)tokens * (size_t)desc->hidden;
    const size_t slots = (size_t)tokens * (size_t)desc->topk;
    *b = (batch){.x = malloc(elements * sizeof *b->x),
                 .y = malloc(elements * sizeof *b->y),
                 .ids = malloc(slots * sizeof *b->ids),
                 .weights = malloc(slots * sizeof *b->weights),
                 .seen = malloc((size_t)desc->experts * sizeof *b->seen),
                 .times = malloc(MOST_RUNS * sizeof *b->times),
                 .rates = malloc(MOST_RUNS * sizeof *b->rates)};
    if (!b->x || !b->y || !b->ids || !b->weights || !b->seen || !b->times || !b->rates)
        return false;
    for (size_t i = 0; i < slots; i++)
        b->weights[i] = 1.0f / (float)desc->topk;
    return synth_input(seed, tokens, desc->hidden, b->x);
}

static void batch_close(batch *b) {
    free(b->x);
    free(b->y);
    free(b->ids);
    free(b->weights);
    free(b->seen);
    free(b->times);
    free(b->rates);
}

/* Every run has experts of its own, so that weights come from memory. */
static megamoe_status measure_runs(const bench *b, megamoe_workspace *workspace, batch *data,
                                   point *p) {
    const megamoe_layer_desc *desc = &b->layer.desc;
    const int64_t slots = p->tokens * desc->topk;
    const megamoe_view x = {data->x, MEGAMOE_DTYPE_BF16, p->tokens, 0};
    const megamoe_view ids = {data->ids, MEGAMOE_DTYPE_I32, p->tokens, 0};
    const megamoe_view weights = {data->weights, MEGAMOE_DTYPE_F32, p->tokens, 0};
    const megamoe_view y = {data->y, MEGAMOE_DTYPE_BF16, p->tokens, 0};
    const double deadline = now_seconds() + b->seconds;
    for (int64_t run = -WARM_UPS; run < MOST_RUNS; run++) {
        synth_routes(b->target.seed + (uint64_t)(run + WARM_UPS), p->tokens, desc->experts,
                     desc->topk, data->ids);
        const double start = now_seconds();
        megamoe_status status = megamoe_stage(workspace, &x, &ids, &weights, p->tokens, NULL);
        if (status == MEGAMOE_OK)
            status = megamoe_forward(b->layer.layer, workspace, &y, NULL);
        const double end = now_seconds();
        if (status == MEGAMOE_OK)
            status = megamoe_workspace_status(workspace, NULL);
        if (status != MEGAMOE_OK)
            return status;
        if (run < 0)
            continue;
        const int32_t experts = count_different(data->ids, slots, desc->experts, data->seen);
        data->times[run] = end - start;
        data->rates[run] = (double)experts * (double)b->layer.expert_bytes / data->times[run];
        p->experts += experts;
        p->runs = run + 1;
        if (end > deadline && p->runs >= LEAST_RUNS)
            break;
    }
    p->experts /= (double)p->runs;
    p->gbs = quantile_of(data->rates, p->runs, 0.5) / 1e9;
    p->median_ms = quantile_of(data->times, p->runs, 0.5) * 1e3;
    p->p90_ms = quantile_of(data->times, p->runs, 0.9) * 1e3;
    p->min_ms = quantile_of(data->times, p->runs, 0) * 1e3;
    p->gflops = 2.0 * 3 * desc->hidden * desc->intermediate * (double)slots / p->median_ms / 1e6;
    return MEGAMOE_OK;
}

static int measure_point(const bench *b, point *p) {
    const megamoe_layer_desc *desc = &b->layer.desc;
    megamoe_shape shape = MEGAMOE_INIT(megamoe_shape);
    shape.hidden = desc->hidden;
    shape.intermediate = desc->intermediate;
    shape.experts = desc->experts;
    shape.topk = desc->topk;
    megamoe_capacity capacity = MEGAMOE_INIT(megamoe_capacity);
    capacity.tokens = p->tokens;
    batch data;
    megamoe_workspace *workspace = NULL;
    int code = EXIT_DONE;
    if (!batch_open(desc, p->tokens, b->target.seed, &data)) {
        code = report_error("out of memory for %" PRId64 " tokens", p->tokens);
    } else {
        megamoe_status status = megamoe_workspace_create(b->target.comm, b->target.device, &shape,
                                                         &capacity, &workspace);
        if (status == MEGAMOE_OK)
            status = megamoe_prewarm(b->layer.layer, workspace);
        if (status == MEGAMOE_OK)
            status = measure_runs(b, workspace, &data, p);
        if (status != MEGAMOE_OK)
            code = report_failure(status);
    }
    megamoe_workspace_close(workspace);
    batch_close(&data);
    return code;
}

/* The ceilings drift on shared machines, so each point lies between two measurements of them. */
static int measure_points(bench *b) {
    megamoe_device_ceilings ceilings = MEGAMOE_INIT(megamoe_device_ceilings);
    megamoe_status status = megamoe_device_measure(b->target.device, &ceilings);
    for (int i = 0; status == MEGAMOE_OK && i < b->n_points; i++) {
        point *p = &b->points[i];
        p->before = ceilings;
        const int code = measure_point(b, p);
        if (code != EXIT_DONE)
            return code;
        status = megamoe_device_measure(b->target.device, &ceilings);
        p->after = ceilings;
    }
    return status == MEGAMOE_OK ? EXIT_DONE : report_failure(status);
}

static double read_share(const point *p) {
    return p->gbs / ((p->before.read_gbs + p->after.read_gbs) / 2);
}

static double dot_share(const point *p) {
    return p->gflops / ((p->before.dot_gflops + p->after.dot_gflops) / 2);
}

static int print_json(const bench *b) {
    const megamoe_layer_desc *desc = &b->layer.desc;
    json_t *points = json_array();
    for (int i = 0; i < b->n_points; i++) {
        const point *p = &b->points[i];
        json_array_append_new(
            points,
            json_pack("{s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:[f, f], s:[f, f]}",
                      "tokens", (json_int_t)p->tokens, "runs", (json_int_t)p->runs, "median_ms",
                      p->median_ms, "min_ms", p->min_ms, "p90_ms", p->p90_ms, "experts_touched",
                      p->experts, "weight_gbs", p->gbs, "gflops", p->gflops, "read_share",
                      read_share(p), "dot_share", dot_share(p), "read_gbs", p->before.read_gbs,
                      p->after.read_gbs, "dot_gflops", p->before.dot_gflops, p->after.dot_gflops));
    }
    json_t *object = json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:I}", "layer", b->layer.name,
                               "format", megamoe_format_name(desc->format), "hidden", desc->hidden,
                               "intermediate", desc->intermediate, "experts", desc->experts,
                               "experts_of_model", b->layer.all_experts, "topk", desc->topk,
                               "expert_bytes", (json_int_t)b->layer.expert_bytes);
    json_object_update_new(
        object,
        json_pack("{s:s, s:s, s:s, s:i, s:b, s:s, s:s, s:s, s:I, s:o}", "device", b->device.name,
                  "model", b->device.model, "tier", b->device.tier, "threads", b->device.threads,
                  "pinned", b->device.pinned, "version", megamoe_version(), "date", b->date,
                  "command", b->command, "seed", (json_int_t)b->target.seed, "points", points));
    return report_json(object);
}

static int print_text(const bench *b) {
    const megamoe_layer_desc *desc = &b->layer.desc;
    char size[REPORT_SIZE_BYTES];
    report_line("layer", "%s: %s, hidden %d, intermediate %d, %d experts, top-%d, %s",
                b->layer.name, megamoe_format_name(desc->format), desc->hidden, desc->intermediate,
                desc->experts, desc->topk,
                report_size((uint64_t)desc->experts * b->layer.expert_bytes, size));
    if (desc->experts < b->layer.all_experts)
        report_line("", "a share: the first %d of %d experts, as --memory allows", desc->experts,
                    b->layer.all_experts);
    report_line("device", "%s, %s, %d thread%s", b->device.model, b->device.tier, b->device.threads,
                b->device.threads == 1 ? "" : "s");
    printf("\n%7s %10s %10s %10s %8s %7s %7s %9s %7s %7s\n", "tokens", "median ms", "min ms",
           "p90 ms", "experts", "GB/s", "of read", "GFLOP/s", "of dot", "runs");
    double read[2] = {1e300, 0}, dot[2] = {1e300, 0};
    for (int i = 0; i < b->n_points; i++) {
        const point *p = &b->points[i];
        printf("%7" PRId64 " %10.3f %10.3f %10.3f %8.1f %7.1f %5.0f %% %9.1f %5.0f %% %7" PRId64
               "\n",
               p->tokens, p->median_ms, p->min_ms, p->p90_ms, p->experts, p->gbs,
               100 * read_share(p), p->gflops, 100 * dot_share(p), p->runs);
        const megamoe_device_ceilings *both[] = {&p->before, &p->after};
        for (int j = 0; j < 2; j++) {
            read[0] = both[j]->read_gbs < read[0] ? both[j]->read_gbs : read[0];
            read[1] = both[j]->read_gbs > read[1] ? both[j]->read_gbs : read[1];
            dot[0] = both[j]->dot_gflops < dot[0] ? both[j]->dot_gflops : dot[0];
            dot[1] = both[j]->dot_gflops > dot[1] ? both[j]->dot_gflops : dot[1];
        }
    }
    printf("\n");
    report_line("ceilings",
                "read %.1f..%.1f GB/s, dot %.0f..%.0f GFLOP/s, measured before and "
                "after each line",
                read[0], read[1], dot[0], dot[1]);
    return EXIT_DONE;
}

/* "1,16,64" */
static int parse_tokens(const char *text, bench *b) {
    const char *at = text;
    do {
        char *end;
        errno = 0;
        const long long tokens = strtoll(at, &end, 10);
        if (end == at || (*end != ',' && *end != '\0') || errno != 0 || tokens < 1 ||
            tokens > MAX_TOKENS || b->n_points == MAX_POINTS)
            return report_error("--tokens %s: expected up to %d numbers from 1 to %d, with commas",
                                text, MAX_POINTS, MAX_TOKENS);
        b->points[b->n_points++].tokens = tokens;
        at = *end == ',' ? end + 1 : NULL;
    } while (at != NULL);
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

typedef struct bench_request {
    const char *path, *model, *tokens;
    int64_t layer, threads, seed;
    int device, geometry, format, nvfp4;
    double seconds, memory_gb;
    bool json, mapped;
} bench_request;

static int open_layer(bench *b, const bench_request *request) {
    if (request->path != NULL)
        return bench_layer_from_path(&b->target, request->path, request->layer, &b->layer);
    const model *m = request->model ? model_find(request->model) : &geometries[request->geometry];
    if (m == NULL)
        return report_error("--model %s: unknown; megamoe synth --list shows the models",
                            request->model);
    return bench_layer_synthetic(
        &b->target, m, request->format < 0 ? m->published : (megamoe_format)(request->format + 1),
        &b->layer);
}

static int execute(bench *b, const bench_request *request) {
    megamoe_device_options options = MEGAMOE_INIT(megamoe_device_options);
    options.threads = (int32_t)request->threads;
    b->device = (megamoe_device_info)MEGAMOE_INIT(megamoe_device_info);
    megamoe_status status = megamoe_comm_self(&b->target.comm);
    if (status == MEGAMOE_OK)
        status = megamoe_device_open("cpu", &options, &b->target.device);
    if (status == MEGAMOE_OK)
        status = megamoe_device_describe(b->target.device, &b->device);
    if (status != MEGAMOE_OK)
        return report_failure(status);
    int code = open_layer(b, request);
    if (code == EXIT_DONE)
        code = measure_points(b);
    if (code == EXIT_DONE)
        code = request->json ? print_json(b) : print_text(b);
    return code;
}

int cmd_bench(int argc, char **argv) {
    bench_request request = {.tokens = "1,16,64",
                             .layer = ONLY_LAYER,
                             .threads = parallel_cores(),
                             .seed = 1,
                             .geometry = -1,
                             .format = -1,
                             .seconds = 2,
                             .memory_gb = 2};
    const option_spec options[] = {
        {"layer", OPTION_INTEGER, &request.layer, "L", "layer of PATH (its only one)", 0,
         INT32_MAX},
        {"model", OPTION_TEXT, &request.model, "NAME", "synthetic weights of a public model", 0, 0},
        {"geometry", OPTION_CHOICE, &request.geometry, "A|B|C",
         "2048/768/128/8, 2880/2880/32/4, "
         "4096/2048/32/6 (A)",
         0, 0},
        {"format", OPTION_CHOICE, &request.format, "mxfp4|nvfp4", "of synthetic weights", 0, 0},
        {"nvfp4", OPTION_CHOICE, &request.nvfp4, "exact|folded", "form of NVFP4 weights (exact)", 0,
         0},
        {"mapped", OPTION_FLAG, &request.mapped, NULL,
         "use a prepared file as it is mapped instead of a copy in huge pages", 0, 0},
        {"memory", OPTION_NUMBER, &request.memory_gb, "GB", "most weights to hold (2)", 1e-6, 1e6},
        {"device", OPTION_CHOICE, &request.device, "cpu", "(cpu)", 0, 0},
        {"tokens", OPTION_TEXT, &request.tokens, "LIST", "batch sizes (1,16,64)", 0, 0},
        {"threads", OPTION_INTEGER, &request.threads, "T", "(one per core)", 1, 1024},
        {"seconds", OPTION_NUMBER, &request.seconds, "S", "for each batch size (2)", 0, 3600},
        {"seed", OPTION_INTEGER, &request.seed, "N", "of weights, input and routes (1)", 0,
         (double)INT64_MAX},
        OPTION_JSON(&request.json)};
    const command_syntax syntax = {
        "bench",
        "[PATH]",
        "Measures an expert layer beside the machine's ceilings.",
        "megamoe bench --model deepseek-v4-flash --tokens 1,16,64 --threads 2 --json",
        options,
        sizeof options / sizeof *options,
        0,
        1};
    bench b = {0};
    record_run(&b, argc, argv);
    const char *arguments[OPTION_MAX_ARGUMENTS];
    int code;
    if (!options_parse(&syntax, argc, argv, arguments, &code))
        return code;
    request.path = arguments[0];
    if ((request.path != NULL) + (request.model != NULL) + (request.geometry >= 0) > 1)
        return report_error("bench: PATH, --model and --geometry exclude each other");
    if (request.geometry < 0)
        request.geometry = 0;
    code = parse_tokens(request.tokens, &b);
    if (code != EXIT_DONE)
        return code;
    b.seconds = request.seconds;
    b.target.nvfp4 = (megamoe_nvfp4_mode)request.nvfp4;
    b.target.mapped = request.mapped;
    b.target.memory = (uint64_t)(request.memory_gb * 1e9);
    b.target.seed = (uint64_t)request.seed;
    b.target.threads = (int32_t)request.threads;
    code = execute(&b, &request);
    megamoe_layer_close(b.layer.layer);
    megamoe_device_close(b.target.device);
    megamoe_comm_close(b.target.comm);
    return code;
}
