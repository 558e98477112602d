/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe trace: what the threads of one forward did when, for Perfetto and `megamoe plot`. */
#include <inttypes.h>
#include <stdlib.h>

#include "bench_environment.h"
#include "bench_geometry.h"
#include "bench_layer.h"
#include "commands.h"
#include "gpu.h"
#include "options.h"
#include "output.h"
#include "parallel.h"
#include "rank.h"
#include "record.h"
#include "report.h"
#include "synth.h"
#include "trace_json.h"

/* Forwards before the one that is shown, and what empties L2 before it. */
enum { WARM_UPS = 3, FLUSH_BYTES = 512 << 20, GPU_DISTINCT_EXPERTS = 4, RANKS_MAX = 64 };

typedef struct request {
    const char *path, *geometry, *device, *out;
    int64_t layer, experts, tokens, threads, seed, room, token_tile, lag;
    int format, nvfp4, input_scale, accumulate;
    bool warm, json;
} request;

typedef struct trace {
    const request *request;
    bool gpu; /* the device is one */
    bench_target target;
    bench_layer layer;
    megamoe_device_info device;
    gpu *g;
    megamoe_workspace *workspace;
    int32_t rank, ranks;
    /* The batch, and the same for the device. */
    uint16_t *x;
    int32_t *ids;
    float *weights;
    void *dx, *dids, *dweights, *dy, *flush;
    /* What came out, of all ranks. */
    int64_t *counts, dropped;
    int64_t stride;      /* spans of a rank have so many places */
    megamoe_span *spans; /* [ranks][stride] */
    int64_t *loads;      /* [experts]: routes received */
    /* How it came about. */
    bench_gpu_record record; /* of a GPU */
    char date[RECORD_DATE_BYTES];
    char command[RECORD_COMMAND_BYTES];
} trace;

/* ---- opening ---- */

static int join(trace *t) {
    const megamoe_status status = megamoe_comm_from_env(NULL, &t->target.comm);
    if (status == MEGAMOE_ENOTFOUND)
        TRY_LIBRARY(megamoe_comm_self(&t->target.comm));
    else if (status != MEGAMOE_OK)
        return report_failure(status);
    t->rank = megamoe_comm_rank(t->target.comm);
    t->ranks = megamoe_comm_size(t->target.comm);
    return t->ranks <= RANKS_MAX
               ? EXIT_DONE
               : report_error("trace: %" PRId32 " ranks; expected 1..%d", t->ranks, RANKS_MAX);
}

static int open_layer(trace *t) {
    const request *r = t->request;
    if (r->path != NULL)
        return bench_layer_from_path(&t->target, r->path, r->layer, &t->layer);
    const char *name = r->geometry != NULL ? r->geometry : t->gpu ? "flash" : "A";
    const bench_geometry *geometry = bench_geometry_find(name);
    if (geometry == NULL)
        return EXIT_BAD_INPUT;
    megamoe_layer_desc desc =
        bench_geometry_layer(geometry, r->format < 0 ? MEGAMOE_FORMAT_MXFP4 : r->format + 1);
    desc.experts *= t->ranks; /* those of a geometry are one rank's */
    return bench_layer_synthetic(&t->target, geometry->what, &desc, &t->layer);
}

static int open_workspace(trace *t) {
    const request *r = t->request;
    megamoe_shape shape = MEGAMOE_INIT(megamoe_shape);
    shape.hidden = t->layer.desc.hidden;
    shape.intermediate = t->layer.desc.intermediate;
    shape.experts = t->layer.desc.experts;
    shape.topk = t->layer.desc.topk;
    shape.input_scale = (megamoe_input_scale)r->input_scale;
    megamoe_capacity capacity = MEGAMOE_INIT(megamoe_capacity);
    capacity.tokens = r->tokens;
    capacity.trace = r->room;
    TRY_LIBRARY(megamoe_workspace_create(t->target.comm, t->target.device, &shape, &capacity,
                                         &t->workspace));
    megamoe_plan plan = MEGAMOE_INIT(megamoe_plan);
    plan.token_tile = (int32_t)r->token_tile;
    plan.lag = (int32_t)r->lag;
    if (t->gpu)
        TRY_LIBRARY(megamoe_workspace_set_plan(t->workspace, &plan));
    TRY_LIBRARY(megamoe_prewarm(t->layer.layer, t->workspace));
    return EXIT_DONE;
}

static int draw_batch(trace *t) {
    const int64_t tokens = t->request->tokens, slots = tokens * t->layer.desc.topk;
    const int32_t hidden = t->layer.desc.hidden;
    const uint64_t seed = t->target.seed + ((uint64_t)t->rank << 32);
    t->x = malloc((size_t)tokens * (size_t)hidden * sizeof *t->x);
    t->ids = malloc((size_t)slots * sizeof *t->ids);
    t->weights = malloc((size_t)slots * sizeof *t->weights);
    if (t->x == NULL || t->ids == NULL || t->weights == NULL ||
        !synth_input(seed, tokens, hidden, t->x))
        return report_error("out of memory for %" PRId64 " tokens", tokens);
    synth_routes(seed, tokens, t->layer.desc.experts, t->layer.desc.topk, t->ids);
    for (int64_t i = 0; i < slots; i++)
        t->weights[i] = 1.0f / (float)t->layer.desc.topk;
    return EXIT_DONE;
}

static int to_device(trace *t, const char *what, const void *from, size_t bytes, void **to) {
    TRY(gpu_allocate(t->g, what, bytes, to));
    return from != NULL ? gpu_upload(t->g, *to, from, bytes) : EXIT_DONE;
}

static int open_batch(trace *t) {
    TRY(draw_batch(t));
    const size_t tokens = (size_t)t->request->tokens, slots = tokens * (size_t)t->layer.desc.topk;
    const size_t row_bytes = tokens * (size_t)t->layer.desc.hidden * sizeof(uint16_t);
    if (!t->gpu) {
        t->dx = t->x;
        t->dids = t->ids;
        t->dweights = t->weights;
        t->dy = t->x; /* staged before y is written */
        return EXIT_DONE;
    }
    TRY(gpu_open(&t->device, &t->g));
    TRY(to_device(t, "the input", t->x, row_bytes, &t->dx));
    TRY(to_device(t, "expert ids", t->ids, slots * sizeof *t->ids, &t->dids));
    TRY(to_device(t, "routing weights", t->weights, slots * sizeof *t->weights, &t->dweights));
    TRY(to_device(t, "the output", NULL, row_bytes, &t->dy));
    return to_device(t, "emptying L2", NULL, FLUSH_BYTES, &t->flush);
}

/* ---- running ---- */

static int stage(const trace *t) {
    const int64_t tokens = t->request->tokens;
    const megamoe_view x = {t->dx, MEGAMOE_DTYPE_BF16, tokens, 0};
    const megamoe_view ids = {t->dids, MEGAMOE_DTYPE_I32, tokens, 0};
    const megamoe_view weights = {t->dweights, MEGAMOE_DTYPE_F32, tokens, 0};
    TRY_LIBRARY(
        megamoe_stage(t->workspace, &x, &ids, &weights, tokens, t->gpu ? gpu_stream(t->g) : NULL));
    return EXIT_DONE;
}

static int forward(const trace *t) {
    const megamoe_view y = {t->dy, MEGAMOE_DTYPE_BF16, t->request->tokens, 0};
    char all[RANKS_MAX], mine = 0;
    if (t->gpu && !t->request->warm)
        TRY(gpu_fill(t->g, t->flush, 0, FLUSH_BYTES));
    if (t->gpu)
        TRY(gpu_wait(t->g));
    /* All ranks begin together. */
    TRY_LIBRARY(megamoe_comm_allgather(t->target.comm, &mine, all, sizeof mine));
    TRY_LIBRARY(
        megamoe_forward(t->layer.layer, t->workspace, &y, t->gpu ? gpu_stream(t->g) : NULL));
    if (t->gpu)
        TRY(gpu_wait(t->g));
    TRY_LIBRARY(megamoe_workspace_status(t->workspace, NULL));
    return EXIT_DONE;
}

/* Spans of all ranks: each sends as many as the rank that has most. */
static int gather_spans(trace *t) {
    int64_t mine[2], all[RANKS_MAX][2], most = 1;
    TRY_LIBRARY(megamoe_workspace_get_trace(t->workspace, NULL, 0, &mine[0], &mine[1]));
    TRY_LIBRARY(megamoe_comm_allgather(t->target.comm, mine, all, sizeof mine));
    t->counts = calloc((size_t)t->ranks, sizeof *t->counts);
    for (int32_t r = 0; t->counts != NULL && r < t->ranks; r++) {
        t->counts[r] = all[r][0];
        t->dropped += all[r][1];
        most = all[r][0] > most ? all[r][0] : most;
    }
    megamoe_span *own = calloc((size_t)most, sizeof *own);
    t->spans = calloc((size_t)(most * t->ranks), sizeof *t->spans);
    int code = t->counts != NULL && own != NULL && t->spans != NULL
                   ? EXIT_DONE
                   : report_error("out of memory for %" PRId64 " spans", most);
    if (code == EXIT_DONE) {
        int64_t count;
        megamoe_status status = megamoe_workspace_get_trace(t->workspace, own, most, &count, NULL);
        if (status == MEGAMOE_OK)
            status =
                megamoe_comm_allgather(t->target.comm, own, t->spans, (size_t)most * sizeof *own);
        code = status == MEGAMOE_OK ? EXIT_DONE : report_failure(status);
    }
    t->stride = most;
    free(own);
    return code;
}

/* Routes that each expert received: its rank tells, the others leave zeros. */
static int gather_loads(trace *t) {
    const size_t experts = (size_t)t->layer.desc.experts;
    const int64_t first = rank_part_begin((int64_t)experts, t->ranks, t->rank);
    const int64_t end = rank_part_begin((int64_t)experts, t->ranks, t->rank + 1);
    int64_t *all = calloc((size_t)t->ranks * experts, sizeof *all);
    t->loads = calloc(experts, sizeof *t->loads);
    int code =
        all != NULL && t->loads != NULL ? EXIT_DONE : report_error("out of memory for loads");
    if (code == EXIT_DONE) {
        megamoe_status status = megamoe_workspace_receive_counts(t->workspace, t->loads + first,
                                                                 (int32_t)(end - first));
        if (status == MEGAMOE_OK)
            status =
                megamoe_comm_allgather(t->target.comm, t->loads, all, experts * sizeof *t->loads);
        code = status == MEGAMOE_OK ? EXIT_DONE : report_failure(status);
    }
    for (int32_t r = 0; code == EXIT_DONE && r < t->ranks; r++)
        for (size_t e = 0; r != t->rank && e < experts; e++)
            t->loads[e] += all[(size_t)r * experts + e];
    free(all);
    return code;
}

/* ---- reporting ---- */

static json_t *loads_json(const trace *t) {
    json_t *loads = json_array();
    for (int32_t e = 0; e < t->layer.desc.experts; e++)
        json_array_append_new(loads, json_integer((json_int_t)t->loads[e]));
    return loads;
}

static double ends_at(const trace *t) {
    double end = 0;
    for (int32_t r = 0; r < t->ranks; r++)
        for (int64_t i = 0; i < t->counts[r]; i++) {
            const double at = t->spans[r * t->stride + i].end_us;
            end = at > end ? at : end;
        }
    return end;
}

static json_t *circumstances_json(const trace *t) {
    json_t *object = json_pack("{s:s, s:s, s:s, s:s}", "date", t->date, "command", t->command,
                               "device", t->device.name, "model", t->device.model);
    json_object_update_new(object, bench_environment_json(&t->device, t->gpu ? &t->record : NULL));
    return object;
}

static json_t *trace_json(const trace *t) {
    const megamoe_layer_desc *desc = &t->layer.desc;
    char title[512];
    snprintf(title, sizeof title, "%s, %s, %" PRId64 " tokens%s, %s", t->layer.name,
             megamoe_format_name(desc->format), t->request->tokens,
             t->ranks > 1 ? " on each rank" : "", t->device.model);
    json_t *events = json_array();
    for (int32_t r = 0; r < t->ranks; r++) {
        trace_rank of = {.spans = t->spans + r * t->stride, .n = t->counts[r]};
        snprintf(of.device, sizeof of.device, "%s", t->device.model);
        trace_events(&of, r, t->gpu, events);
    }
    return json_pack("{s:s, s:s, s:s, s:i, s:I, s:I, s:f, s:o, s:o, s:o}", "displayTimeUnit", "ns",
                     "title", title, "workers", t->gpu ? "multiprocessor" : "thread", "ranks",
                     t->ranks, "tokens", (json_int_t)t->request->tokens, "dropped",
                     (json_int_t)t->dropped, "total_us", ends_at(t), "loads", loads_json(t),
                     "otherData", circumstances_json(t), "traceEvents", events);
}

static int write_trace(const trace *t) {
    json_t *object = trace_json(t);
    output o;
    int code = object != NULL ? output_open(t->request->out, &o)
                              : report_error("trace: out of memory, or a name that is not UTF-8");
    if (code == EXIT_DONE) {
        if (json_dumpf(object, o.file, JSON_COMPACT | JSON_REAL_PRECISION(9)) != 0)
            code = report_error("%s: cannot be written", t->request->out);
        code = output_close(&o, code);
    }
    json_decref(object);
    return code;
}

static int report(const trace *t) {
    int64_t spans = 0;
    for (int32_t r = 0; r < t->ranks; r++)
        spans += t->counts[r];
    if (t->request->json)
        return report_json(json_pack("{s:s, s:i, s:I, s:I, s:f}", "trace", t->request->out, "ranks",
                                     t->ranks, "spans", (json_int_t)spans, "dropped",
                                     (json_int_t)t->dropped, "total_us", ends_at(t)));
    report_line("trace",
                "%s: %" PRId64 " spans of %.1f us; ui.perfetto.dev and chrome://tracing "
                "open it",
                t->request->out, spans, ends_at(t));
    if (t->dropped > 0)
        report_line("dropped", "%" PRId64 " more; --room %" PRId64 " was not enough", t->dropped,
                    t->request->room);
    return EXIT_DONE;
}

static int execute(trace *t) {
    TRY(join(t));
    TRY(rank_open_device(t->request->device, t->target.threads, t->target.comm, &t->target.device));
    t->device = (megamoe_device_info)MEGAMOE_INIT(megamoe_device_info);
    TRY_LIBRARY(megamoe_device_describe(t->target.device, &t->device));
    TRY(open_layer(t));
    TRY(open_workspace(t));
    TRY(open_batch(t));
    TRY(stage(t));
    if (t->gpu)
        bench_gpu_record_begin(t->g, &t->record);
    for (int i = 0; i <= WARM_UPS; i++)
        TRY(forward(t));
    if (t->gpu)
        bench_gpu_record_end(t->g, &t->record);
    TRY(gather_spans(t));
    TRY(gather_loads(t));
    if (t->rank > 0)
        return EXIT_DONE;
    TRY(write_trace(t));
    return report(t);
}

static void close_all(trace *t, int code) {
    if (code != EXIT_DONE && t->ranks > 1)
        megamoe_comm_abort(t->target.comm);
    megamoe_workspace_close(t->workspace);
    gpu_close(t->g);
    megamoe_layer_close(t->layer.layer);
    megamoe_device_close(t->target.device);
    megamoe_comm_close(t->target.comm);
    free(t->x);
    free(t->ids);
    free(t->weights);
    free(t->counts);
    free(t->spans);
    free(t->loads);
}

int cmd_trace(int argc, char **argv) {
    request r = {.device = "cpu",
                 .layer = ONLY_LAYER,
                 .tokens = 64,
                 .threads = parallel_cores(),
                 .seed = 1,
                 .room = 2048,
                 .format = -1};
    const option_spec options[] = {
        {"out", OPTION_TEXT, &r.out, "FILE", "the trace, JSON", 0, 0},
        {"device", OPTION_TEXT, &r.device, "cpu|cuda|cuda:N", "(cpu)", 0, 0},
        {"tokens", OPTION_INTEGER, &r.tokens, "N", "of the batch (64)", 1, 1 << 16},
        {"layer", OPTION_INTEGER, &r.layer, "L", "layer of PATH (its only one)", 0, INT32_MAX},
        {"geometry", OPTION_TEXT, &r.geometry, "NAME",
         "synthetic weights: A, B, C, flash, pro, ... (A; GPU: flash)", 0, 0},
        {"experts", OPTION_INTEGER, &r.experts, "N", "experts of the layer", 1, 65536},
        {"format", OPTION_CHOICE, &r.format, "mxfp4|nvfp4", "of synthetic weights", 0, 0},
        {"nvfp4", OPTION_CHOICE, &r.nvfp4, "exact|folded", "form of NVFP4 weights (exact)", 0, 0},
        {"input-scale", OPTION_CHOICE, &r.input_scale, "token|block",
         "one scale per token, or per 128 channels (token)", 0, 0},
        {"accumulate", OPTION_CHOICE, &r.accumulate, "mma|promote",
         "sums over all of K, or over 128 each (mma)", 0, 0},
        {"warm", OPTION_FLAG, &r.warm, NULL, "GPU: do not empty L2 before the forward", 0, 0},
        {"token-tile", OPTION_INTEGER, &r.token_tile, "N", "GPU: tokens of a tile (chosen)", 1,
         1024},
        {"lag", OPTION_INTEGER, &r.lag, "N", "GPU: token tiles by which FC2 follows FC1 (chosen)",
         1, INT32_MAX},
        {"room", OPTION_INTEGER, &r.room, "N",
         "spans kept of a thread; GPU: tiles of a team (2048)", 1, 65536},
        {"threads", OPTION_INTEGER, &r.threads, "T", "(one per core)", 1, 1024},
        {"seed", OPTION_INTEGER, &r.seed, "N", "of weights, input and routes (1)", 0,
         (double)INT64_MAX},
        OPTION_JSON(&r.json)};
    const command_syntax syntax = {"trace",
                                   "[PATH]",
                                   "Records what the threads of one forward did when.",
                                   "megamoe trace --device cuda:0 --geometry flash --out t.json && "
                                   "megamoe plot t.json --out t.svg",
                                   options,
                                   sizeof options / sizeof *options,
                                   0,
                                   1};
    const char *arguments[OPTION_MAX_ARGUMENTS];
    int code;
    if (!options_parse(&syntax, argc, argv, arguments, &code))
        return code;
    r.path = arguments[0];
    const bool on_gpu = ranks_on_gpu(r.device);
    if (r.out == NULL)
        return report_error("trace: --out is missing");
    if (r.path != NULL && r.geometry != NULL)
        return report_error("trace: PATH and --geometry exclude each other");
    if (!on_gpu && (r.warm || r.token_tile > 0 || r.lag > 0))
        return report_error("trace: --%s is for a GPU, not for --device %s",
                            r.warm             ? "warm"
                            : r.token_tile > 0 ? "token-tile"
                                               : "lag",
                            r.device);
    trace t = {.request = &r,
               .gpu = on_gpu,
               .target = {.nvfp4 = (megamoe_nvfp4_mode)r.nvfp4,
                          .accumulate = (megamoe_accumulate)r.accumulate,
                          .memory = UINT64_MAX,
                          .experts = (int32_t)r.experts,
                          .distinct = on_gpu ? GPU_DISTINCT_EXPERTS : 0,
                          .seed = (uint64_t)r.seed,
                          .threads = (int32_t)r.threads}};
    record_command(argc, argv, t.command);
    record_date(t.date);
    code = execute(&t);
    close_all(&t, code);
    return code;
}
