/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The benchmark of a GPU: the forward alone, and staging alone, as graphs whose replays are timed
 * by events. What they read is not in L2: a larger buffer is overwritten before each replay.
 *
 * Ranks that a launcher has started measure together, each with tokens of its own. A forward takes
 * as long as it does on the rank where it takes longest; rank 0 prints.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "bench_published.h"
#include "gpu.h"
#include "progress.h"
#include "synth.h"

/* Replays before the timed ones, which bring clocks and caches to where they stay. */
enum { WARM_UPS = 20 };

/* At least this much is overwritten, and at least this many times L2. */
enum { FLUSH_BYTES = 256 << 20, FLUSH_L2_TIMES = 4 };

enum { RANKS_MAX = 64 };

typedef struct timing {
    double median_us, min_us, p90_us;
} timing;

typedef struct point {
    int64_t tokens;
    int32_t experts; /* active, of the rank that has most */
    int64_t routes;  /* received by the rank that has most */
    timing forward, stage;
    double skew_us;                /* median difference between the ranks' times of a forward */
    unsigned sm_mhz;               /* while forwards ran; 0: unknown */
    megamoe_workspace_times times; /* of the last forward */
} point;

typedef struct gpu_bench {
    const bench *b;
    gpu *g;
    gpu_facts facts;
    megamoe_device_ceilings before, after;
    megamoe_workspace *workspace;
    void *x, *y, *ids, *weights, *flush; /* device memory for the largest batch */
    size_t flush_bytes;
    int32_t *routes;   /* the ids on the host */
    int64_t *received; /* by each expert */
    double *times;     /* of every rank, and */
    double *longest;   /* ... of each call, as are */
    double *skews;
    point points[BENCH_MAX_POINTS];
} gpu_bench;

/* ---- Buffers ---- */

static int64_t most_tokens(const bench *b) {
    int64_t most = 0;
    for (int i = 0; i < b->n_tokens; i++)
        most = b->tokens[i] > most ? b->tokens[i] : most;
    return most;
}

static int upload_input(gpu_bench *gb, int64_t tokens) {
    const megamoe_layer_desc *desc = &gb->b->layer.desc;
    const size_t bytes = (size_t)tokens * (size_t)desc->hidden * sizeof(uint16_t);
    uint16_t *x = malloc(bytes + 1);
    int code = EXIT_DONE;
    if (x == NULL ||
        !synth_input(gb->b->target.seed + (uint64_t)gb->b->rank, tokens, desc->hidden, x))
        code = report_error("out of memory for %" PRId64 " tokens", tokens);
    if (code == EXIT_DONE)
        code = gpu_upload(gb->g, gb->x, x, bytes);
    free(x);
    return code;
}

static int upload_weights(gpu_bench *gb, int64_t slots) {
    float *weights = malloc(((size_t)slots + 1) * sizeof *weights);
    if (weights == NULL)
        return report_error("out of memory for %" PRId64 " routes", slots);
    for (int64_t i = 0; i < slots; i++)
        weights[i] = 1.0f / (float)gb->b->layer.desc.topk;
    const int code = gpu_upload(gb->g, gb->weights, weights, (size_t)slots * sizeof *weights);
    free(weights);
    return code;
}

static int open_buffers(gpu_bench *gb) {
    const megamoe_layer_desc *desc = &gb->b->layer.desc;
    const int64_t tokens = most_tokens(gb->b), slots = tokens * desc->topk;
    const size_t row_bytes = (size_t)tokens * (size_t)desc->hidden * sizeof(uint16_t);
    gb->flush_bytes = FLUSH_L2_TIMES * gb->facts.l2_bytes;
    if (gb->flush_bytes < FLUSH_BYTES)
        gb->flush_bytes = FLUSH_BYTES;
    gb->routes = malloc(((size_t)slots + 1) * sizeof *gb->routes);
    gb->received = malloc((size_t)desc->experts * sizeof *gb->received);
    const size_t iterations = (size_t)gb->b->request->iterations;
    gb->times = malloc(((size_t)gb->b->ranks + 1) * iterations * sizeof *gb->times);
    gb->longest = malloc(iterations * sizeof *gb->longest);
    gb->skews = malloc(iterations * sizeof *gb->skews);
    if (gb->routes == NULL || gb->received == NULL || gb->times == NULL || gb->longest == NULL ||
        gb->skews == NULL)
        return report_error("out of memory for %" PRId64 " tokens", tokens);
    TRY(gpu_allocate(gb->g, "the input", row_bytes, &gb->x));
    TRY(gpu_allocate(gb->g, "the output", row_bytes, &gb->y));
    TRY(gpu_allocate(gb->g, "expert ids", (size_t)slots * sizeof *gb->routes, &gb->ids));
    TRY(gpu_allocate(gb->g, "routing weights", (size_t)slots * sizeof(float), &gb->weights));
    TRY(gpu_allocate(gb->g, "emptying L2", gb->flush_bytes, &gb->flush));
    TRY(upload_input(gb, tokens));
    return upload_weights(gb, slots);
}

static int open_workspace(gpu_bench *gb) {
    const bench *b = gb->b;
    const megamoe_shape shape = bench_shape(b);
    megamoe_capacity capacity = MEGAMOE_INIT(megamoe_capacity);
    capacity.tokens = b->capacity;
    TRY_LIBRARY(megamoe_workspace_create(b->target.comm, b->target.device, &shape, &capacity,
                                         &gb->workspace));
    megamoe_plan plan = MEGAMOE_INIT(megamoe_plan);
    plan.token_tile = (int32_t)b->request->token_tile;
    plan.lag = (int32_t)b->request->lag;
    TRY_LIBRARY(megamoe_workspace_set_plan(gb->workspace, &plan));
    TRY_LIBRARY(megamoe_prewarm(b->layer.layer, gb->workspace));
    return EXIT_DONE;
}

/* ---- Measuring ---- */

static megamoe_status stage(const gpu_bench *gb, int64_t tokens) {
    const megamoe_view x = {gb->x, MEGAMOE_DTYPE_BF16, tokens, 0};
    const megamoe_view ids = {gb->ids, MEGAMOE_DTYPE_I32, tokens, 0};
    const megamoe_view weights = {gb->weights, MEGAMOE_DTYPE_F32, tokens, 0};
    return megamoe_stage(gb->workspace, &x, &ids, &weights, tokens, gpu_stream(gb->g));
}

static megamoe_status forward(const gpu_bench *gb, int64_t tokens) {
    const megamoe_view y = {gb->y, MEGAMOE_DTYPE_BF16, tokens, 0};
    return megamoe_forward(gb->b->layer.layer, gb->workspace, &y, gpu_stream(gb->g));
}

/* What the device has found in all that was enqueued. */
static int check(const gpu_bench *gb) {
    TRY(gpu_wait(gb->g));
    TRY_LIBRARY(megamoe_workspace_status(gb->workspace, NULL));
    return EXIT_DONE;
}

static int capture(const gpu_bench *gb, megamoe_status (*fn)(const gpu_bench *gb, int64_t tokens),
                   int64_t tokens, gpu_graph **graph) {
    TRY(gpu_capture_begin(gb->g));
    const megamoe_status status = fn(gb, tokens);
    const int code = gpu_capture_end(gb->g, graph);
    return status == MEGAMOE_OK ? code : report_failure(status);
}

/* Until all ranks are here. */
static int meet(const gpu_bench *gb) {
    char all[RANKS_MAX], mine = 0;
    TRY_LIBRARY(megamoe_comm_allgather(gb->b->target.comm, &mine, all, sizeof mine));
    return EXIT_DONE;
}

/* Of each call the time of the rank that took longest, and by how much longer than the fastest. */
static int gather_times(const gpu_bench *gb) {
    const int iterations = (int)gb->b->request->iterations;
    const double *mine = gb->times + (size_t)gb->b->ranks * (size_t)iterations;
    TRY_LIBRARY(megamoe_comm_allgather(gb->b->target.comm, mine, gb->times,
                                       (size_t)iterations * sizeof *mine));
    for (int i = 0; i < iterations; i++) {
        double longest = 0, shortest = gb->times[i];
        for (int32_t r = 0; r < gb->b->ranks; r++) {
            const double us = gb->times[r * iterations + i];
            longest = us > longest ? us : longest;
            shortest = us < shortest ? us : shortest;
        }
        gb->longest[i] = longest;
        gb->skews[i] = longest - shortest;
    }
    return EXIT_DONE;
}

/* The iterations are enqueued without waiting between them, so that launching costs no time. */
static int time_graph(const gpu_bench *gb, const gpu_graph *graph, timing *t, unsigned *sm_mhz) {
    const int iterations = (int)gb->b->request->iterations;
    double *mine = gb->times + (size_t)gb->b->ranks * (size_t)iterations;
    TRY(meet(gb));
    for (int i = -WARM_UPS; i < iterations; i++) {
        TRY(gpu_fill(gb->g, gb->flush, (unsigned char)i, gb->flush_bytes));
        if (i >= 0)
            TRY(gpu_mark(gb->g, 2 * i));
        TRY(gpu_replay(gb->g, graph));
        if (i >= 0)
            TRY(gpu_mark(gb->g, 2 * i + 1));
    }
    *sm_mhz = gpu_sm_mhz(gb->g);
    TRY(check(gb));
    for (int i = 0; i < iterations; i++)
        TRY(gpu_microseconds(gb->g, 2 * i, 2 * i + 1, &mine[i]));
    TRY(gather_times(gb));
    t->median_us = bench_quantile(gb->longest, iterations, 0.5);
    t->p90_us = bench_quantile(gb->longest, iterations, 0.9);
    t->min_us = bench_quantile(gb->longest, iterations, 0);
    return EXIT_DONE;
}

static int time_call(const gpu_bench *gb, megamoe_status (*fn)(const gpu_bench *gb, int64_t tokens),
                     int64_t tokens, timing *t, unsigned *sm_mhz) {
    gpu_graph *graph = NULL;
    int code = capture(gb, fn, tokens, &graph);
    if (code == EXIT_DONE)
        code = time_graph(gb, graph, t, sm_mhz);
    gpu_graph_close(gb->g, graph);
    return code;
}

/* The routes of a rank's tokens. */
static void draw_routes(const gpu_bench *gb, int32_t rank, int64_t tokens) {
    const bench *b = gb->b;
    synth_routes(b->target.seed + (uint64_t)tokens + ((uint64_t)rank << 32), tokens,
                 b->layer.desc.experts, b->layer.desc.topk, gb->routes);
}

/* The work of the rank that has most of it. */
static void count_work(const gpu_bench *gb, point *p) {
    const int32_t experts = gb->b->layer.desc.experts, ranks = gb->b->ranks;
    memset(gb->received, 0, (size_t)experts * sizeof *gb->received);
    for (int32_t r = 0; r < ranks; r++) {
        draw_routes(gb, r, p->tokens);
        for (int64_t i = 0; i < p->tokens * gb->b->layer.desc.topk; i++)
            gb->received[gb->routes[i]]++;
    }
    p->experts = 0;
    p->routes = 0;
    for (int32_t r = 0, e = 0; r < ranks; r++) {
        int32_t active = 0;
        int64_t routes = 0;
        for (int32_t end = e + experts / ranks + (r < experts % ranks); e < end; e++) {
            active += gb->received[e] > 0;
            routes += gb->received[e];
        }
        p->experts = active > p->experts ? active : p->experts;
        p->routes = routes > p->routes ? routes : p->routes;
    }
}

static int measure_point(gpu_bench *gb, point *p) {
    const bench *b = gb->b;
    const megamoe_layer_desc *desc = &b->layer.desc;
    const int64_t slots = p->tokens * desc->topk;
    count_work(gb, p);
    draw_routes(gb, b->rank, p->tokens);
    TRY(gpu_upload(gb->g, gb->ids, gb->routes, (size_t)slots * sizeof *gb->routes));
    TRY_LIBRARY(stage(gb, p->tokens));
    TRY_LIBRARY(forward(gb, p->tokens));
    TRY(check(gb));
    unsigned ignored;
    TRY(time_call(gb, stage, p->tokens, &p->stage, &ignored));
    TRY(time_call(gb, forward, p->tokens, &p->forward, &p->sm_mhz));
    p->skew_us = bench_quantile(gb->skews, b->request->iterations, 0.5);
    p->times = (megamoe_workspace_times)MEGAMOE_INIT(megamoe_workspace_times);
    TRY_LIBRARY(megamoe_workspace_get_times(gb->workspace, &p->times));
    return EXIT_DONE;
}

static int measure_points(gpu_bench *gb) {
    const bench *b = gb->b;
    progress bar;
    const megamoe_progress shown =
        b->rank == 0 ? progress_begin(&bar, "measuring") : (megamoe_progress){0};
    int code = EXIT_DONE;
    for (int i = 0; code == EXIT_DONE && i < b->n_tokens; i++) {
        if (shown.fn != NULL)
            shown.fn(shown.user, (uint64_t)i, (uint64_t)b->n_tokens);
        gb->points[i].tokens = b->tokens[i];
        code = measure_point(gb, &gb->points[i]);
    }
    if (b->rank == 0)
        progress_end(&bar);
    return code;
}

static int measure(gpu_bench *gb) {
    const bench *b = gb->b;
    TRY(gpu_open(&b->device, &gb->g));
    gpu_describe(gb->g, &gb->facts);
    TRY_LIBRARY(megamoe_device_measure(b->target.device, &gb->before));
    TRY(open_buffers(gb));
    TRY(open_workspace(gb));
    TRY(measure_points(gb));
    TRY_LIBRARY(megamoe_device_measure(b->target.device, &gb->after));
    return EXIT_DONE;
}

/* ---- Reporting ---- */

/* What a point amounts to. */
typedef struct figures {
    double floor_us;   /* against the ceilings of this run */
    double nominal_us; /* against those of the GPU model; 0: not known */
    double gbs;        /* weights of active experts, as a checkpoint stores them */
    double tflops;
    const bench_published *published; /* NULL if there is none */
} figures;

static double larger(double a, double b) {
    return a > b ? a : b;
}

static double mean(double a, double b) {
    return (a + b) / 2;
}

static figures figures_of(const gpu_bench *gb, const point *p) {
    const bench *b = gb->b;
    const megamoe_layer_desc *desc = &b->layer.desc;
    const double bytes = (double)p->experts * (double)b->layer.stored_bytes;
    const double operations = 6.0 * (double)p->routes * desc->hidden * desc->intermediate;
    const double read_gbs = mean(gb->before.read_gbs, gb->after.read_gbs);
    const double mma_tflops = mean(gb->before.mma_tflops, gb->after.mma_tflops);
    const bench_nominal *nominal = bench_nominal_of(b->device.model);
    figures f = {.floor_us = larger(bytes / read_gbs / 1e3, operations / mma_tflops / 1e6),
                 .gbs = bytes / p->forward.median_us / 1e3,
                 .tflops = operations / p->forward.median_us / 1e6};
    if (nominal != NULL)
        f.nominal_us =
            larger(bytes / nominal->read_gbs / 1e3, operations / nominal->mma_tflops / 1e6);
    /* Of the geometry as it is, not of one with other experts. */
    if (b->ranks == 1 && b->geometry != NULL && b->geometry->experts == desc->experts)
        f.published = bench_published_of(b->device.model, b->geometry->name, p->tokens);
    return f;
}

static json_t *timing_json(const timing *t) {
    return json_pack("{s:f, s:f, s:f}", "median", t->median_us, "min", t->min_us, "p90", t->p90_us);
}

static json_t *times_json(const megamoe_workspace_times *t) {
    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "begin", t->begin_us, "dispatch",
                     t->dispatch_us, "fc1", t->fc1_us, "fc2", t->fc2_us, "combine", t->combine_us,
                     "idle", t->idle_us, "total", t->total_us);
}

static json_t *point_json(const gpu_bench *gb, const point *p) {
    const figures f = figures_of(gb, p);
    json_t *object =
        json_pack("{s:I, s:i, s:o, s:o, s:f, s:f, s:f, s:f}", "tokens", (json_int_t)p->tokens,
                  "experts_active", p->experts, "forward_us", timing_json(&p->forward), "stage_us",
                  timing_json(&p->stage), "floor_us", f.floor_us, "floor_share",
                  f.floor_us / p->forward.median_us, "weight_gbs", f.gbs, "tflops", f.tflops);
    json_object_set_new(object, "times_us", times_json(&p->times));
    if (gb->b->ranks > 1)
        json_object_update_new(object, json_pack("{s:I, s:f}", "routes_received",
                                                 (json_int_t)p->routes, "skew_us", p->skew_us));
    if (f.nominal_us > 0)
        json_object_set_new(object, "nominal_floor_us", json_real(f.nominal_us));
    if (p->sm_mhz > 0)
        json_object_set_new(object, "sm_mhz", json_integer(p->sm_mhz));
    if (f.published != NULL)
        json_object_update_new(object, json_pack("{s:f, s:f}", "public_us", f.published->public_us,
                                                 "target_us", f.published->target_us));
    return object;
}

static json_t *gpu_json(const gpu_bench *gb) {
    const megamoe_device_info *device = &gb->b->device;
    json_t *object = json_pack("{s:i, s:i, s:i, s:I}", "multiprocessors", device->multiprocessors,
                               "max_ctas", device->max_ctas, "cuda_driver", device->driver_version,
                               "memory_bytes", (json_int_t)device->memory_bytes);
    if (gb->facts.driver[0] != '\0')
        json_object_set_new(object, "driver", json_string(gb->facts.driver));
    if (gb->facts.sm_mhz_max > 0)
        json_object_update_new(object,
                               json_pack("{s:i, s:i, s:f}", "sm_mhz_max", gb->facts.sm_mhz_max,
                                         "memory_mhz", gb->facts.memory_mhz, "power_limit_w",
                                         gb->facts.power_limit_mw / 1e3));
    return object;
}

static json_t *parts_json(const gpu_bench *gb) {
    json_t *parts = json_array();
    const char *what;
    uint64_t bytes;
    for (int32_t i = 0; megamoe_workspace_part(gb->workspace, i, &what, &bytes); i++)
        json_array_append_new(parts,
                              json_pack("{s:s, s:I}", "what", what, "bytes", (json_int_t)bytes));
    return parts;
}

static int print_json(const gpu_bench *gb) {
    const bench *b = gb->b;
    json_t *points = json_array();
    for (int i = 0; i < b->n_tokens; i++)
        json_array_append_new(points, point_json(gb, &gb->points[i]));
    json_t *object = bench_json(b);
    if (b->geometry != NULL)
        json_object_set_new(object, "geometry", json_string(b->geometry->name));
    if (b->ranks > 1)
        json_object_set_new(object, "ranks", json_integer(b->ranks));
    json_object_update_new(
        object,
        json_pack("{s:I, s:I, s:I, s:o, s:I, s:I, s:o, s:{s:[f, f], s:[f, f], s:[f, f]}}",
                  "stored_expert_bytes", (json_int_t)b->layer.stored_bytes, "capacity",
                  (json_int_t)b->capacity, "workspace_bytes",
                  (json_int_t)megamoe_workspace_bytes(gb->workspace), "workspace_parts",
                  parts_json(gb), "iterations", (json_int_t)b->request->iterations, "flush_bytes",
                  (json_int_t)gb->flush_bytes, "gpu", gpu_json(gb), "ceilings", "read_gbs",
                  gb->before.read_gbs, gb->after.read_gbs, "copy_gbs", gb->before.copy_gbs,
                  gb->after.copy_gbs, "mma_tflops", gb->before.mma_tflops, gb->after.mma_tflops));
    const bench_nominal *nominal = bench_nominal_of(b->device.model);
    if (nominal != NULL)
        json_object_set_new(object, "nominal",
                            json_pack("{s:s, s:f, s:f}", "gpu", nominal->gpu, "read_gbs",
                                      nominal->read_gbs, "mma_tflops", nominal->mma_tflops));
    json_object_set_new(object, "public_source", json_string(bench_published_source));
    json_object_set_new(object, "points", points);
    return report_json(object);
}

/* "97.4   78 %", or blanks. */
static void print_share(double floor_us, double us) {
    if (floor_us > 0)
        printf(" %8.1f %3.0f %%", floor_us, 100 * floor_us / us);
    else
        printf(" %8s %5s", "", "");
}

static void print_points(const gpu_bench *gb) {
    const bool several = gb->b->ranks > 1;
    printf("\n%6s %7s %9s %9s %9s %8s %14s %14s %8s %8s", "tokens", "experts", "median us",
           "min us", "p90 us", "stage us", "floor us   of", "nominal   of", "GB/s", "TFLOP/s");
    if (several)
        printf(" %9s\n", "skew us");
    else
        printf(" %9s %6s %9s\n", "public us", "times", "target us");
    for (int i = 0; i < gb->b->n_tokens; i++) {
        const point *p = &gb->points[i];
        const figures f = figures_of(gb, p);
        printf("%6" PRId64 " %7" PRId32 " %9.1f %9.1f %9.1f %8.1f", p->tokens, p->experts,
               p->forward.median_us, p->forward.min_us, p->forward.p90_us, p->stage.median_us);
        print_share(f.floor_us, p->forward.median_us);
        print_share(f.nominal_us, p->forward.median_us);
        printf(" %8.0f %8.1f", f.gbs, f.tflops);
        if (f.published != NULL)
            printf(" %9.1f %6.2f %9.0f", f.published->public_us,
                   f.published->public_us / p->forward.median_us, f.published->target_us);
        if (several)
            printf(" %9.1f", p->skew_us);
        printf("\n");
    }
    printf("\n");
}

/* Where the time goes, of one forward: means over thread blocks. */
static void print_times(const gpu_bench *gb) {
    printf("%6s %9s %9s %9s %9s %9s %9s %9s\n", "tokens", "begin us", "dispatch", "FC1", "FC2",
           "combine", "idle", "total us");
    for (int i = 0; i < gb->b->n_tokens; i++) {
        const megamoe_workspace_times *t = &gb->points[i].times;
        printf("%6" PRId64 " %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f\n", gb->points[i].tokens,
               t->begin_us, t->dispatch_us, t->fc1_us, t->fc2_us, t->combine_us, t->idle_us,
               t->total_us);
    }
    printf("\n");
}

static void print_workspace(const gpu_bench *gb) {
    char size[REPORT_SIZE_BYTES];
    report_line("workspace", "%s for %" PRId64 " tokens:",
                report_size(megamoe_workspace_bytes(gb->workspace), size), gb->b->capacity);
    const char *what;
    uint64_t bytes;
    for (int32_t i = 0; megamoe_workspace_part(gb->workspace, i, &what, &bytes); i++)
        report_line("", "%9s  %s", report_size(bytes, size), what);
}

static int print_text(const gpu_bench *gb) {
    const bench *b = gb->b;
    bench_print_layer(b);
    if (b->ranks > 1)
        report_line("ranks",
                    "%d processes; a forward's time is that of the slowest rank, skew is "
                    "how much longer that takes than the fastest",
                    b->ranks);
    report_line("device", "%s, %s, %d multiprocessors, driver %s", b->device.model, b->device.tier,
                b->device.multiprocessors,
                gb->facts.driver[0] != '\0' ? gb->facts.driver : "unknown");
    if (gb->facts.sm_mhz_max > 0)
        report_line("clocks", "up to %u MHz, memory %u MHz, limit %.0f W", gb->facts.sm_mhz_max,
                    gb->facts.memory_mhz, gb->facts.power_limit_mw / 1e3);
    print_workspace(gb);
    print_points(gb);
    print_times(gb);
    report_line("ceilings",
                "read %.0f and %.0f GB/s, E4M3 %.0f and %.0f TFLOP/s, measured before and after",
                gb->before.read_gbs, gb->after.read_gbs, gb->before.mma_tflops,
                gb->after.mma_tflops);
    const bench_nominal *nominal = bench_nominal_of(b->device.model);
    if (nominal != NULL) {
        report_line("nominal", "read %.0f GB/s, E4M3 %.0f TFLOP/s", nominal->read_gbs,
                    nominal->mma_tflops);
        report_line("public", "%s", bench_published_source);
    }
    return EXIT_DONE;
}

int bench_on_gpu(const bench *b) {
    gpu_bench *gb = calloc(1, sizeof *gb);
    if (gb == NULL)
        return report_error("out of memory");
    gb->b = b;
    gb->before.struct_size = gb->after.struct_size = sizeof gb->before;
    int code = measure(gb);
    if (code == EXIT_DONE && b->rank == 0)
        code = (b->request->json ? print_json : print_text)(gb);
    megamoe_workspace_close(gb->workspace);
    gpu_close(gb->g);
    free(gb->routes);
    free(gb->received);
    free(gb->times);
    free(gb->longest);
    free(gb->skews);
    free(gb);
    return code;
}
