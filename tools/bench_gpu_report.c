/* SPDX-License-Identifier: Apache-2.0 */
/* The benchmark of a GPU: all batch sizes, and what they amount to. Rank 0 prints. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"
#include "bench_gpu.h"
#include "bench_published.h"
#include "progress.h"

enum { WARM_UPS = 20 };

typedef struct timing {
    double median_us, min_us, p90_us;
} timing;

typedef struct point {
    int64_t tokens;
    bench_work work;
    timing forward, stage;
    double skew_us;                /* median difference between the ranks' times of a forward */
    nvml_state state;              /* while forwards ran */
    megamoe_workspace_times times; /* of the last forward */
} point;

typedef struct gpu_bench {
    const bench *b;
    bench_gpu *arm;
    gpu_facts facts;
    megamoe_device_ceilings before, after;
    double *times, *skews; /* of each call */
    point points[BENCH_MAX_POINTS];
} gpu_bench;

/* ---- Measuring ---- */

static int64_t most_tokens(const bench *b) {
    int64_t most = 0;
    for (int i = 0; i < b->n_tokens; i++)
        most = b->tokens[i] > most ? b->tokens[i] : most;
    return most;
}

static bench_gpu_options options_of(const bench *b) {
    return (bench_gpu_options){.comm = b->target.comm,
                               .device = b->target.device,
                               .layer = b->layer.layer,
                               .shape = bench_shape(b),
                               .capacity = b->capacity,
                               .tokens = most_tokens(b),
                               .routes = {.seed = b->target.seed,
                                          .experts = b->layer.desc.experts,
                                          .topk = b->layer.desc.topk},
                               .seed = b->target.seed,
                               .warm_ups = WARM_UPS};
}

static int time_call(const gpu_bench *gb, bench_call call, timing *t, nvml_state *state) {
    const int n = (int)gb->b->request->iterations;
    TRY(bench_gpu_time(gb->arm, call, n, gb->times, gb->skews, state));
    t->median_us = bench_quantile(gb->times, n, 0.5);
    t->p90_us = bench_quantile(gb->times, n, 0.9);
    t->min_us = bench_quantile(gb->times, n, 0);
    return EXIT_DONE;
}

static int measure_point(gpu_bench *gb, const bench_gpu_options *options, point *p) {
    if (!bench_routes_count(&options->routes, p->tokens, gb->b->ranks, 0, &p->work))
        return report_error("out of memory for %" PRId64 " tokens", p->tokens);
    TRY(bench_gpu_set_batch(gb->arm, p->tokens));
    TRY(time_call(gb, BENCH_STAGE, &p->stage, NULL));
    TRY(time_call(gb, BENCH_FORWARD, &p->forward, &p->state));
    p->skew_us = bench_quantile(gb->skews, gb->b->request->iterations, 0.5);
    return bench_gpu_get_times(gb->arm, &p->times);
}

static int measure_points(gpu_bench *gb, const bench_gpu_options *options) {
    const bench *b = gb->b;
    progress bar;
    const megamoe_progress shown =
        b->rank == 0 ? progress_begin(&bar, "measuring") : (megamoe_progress){0};
    int code = EXIT_DONE;
    for (int i = 0; code == EXIT_DONE && i < b->n_tokens; i++) {
        if (shown.fn != NULL)
            shown.fn(shown.user, (uint64_t)i, (uint64_t)b->n_tokens);
        gb->points[i].tokens = b->tokens[i];
        code = measure_point(gb, options, &gb->points[i]);
    }
    if (b->rank == 0)
        progress_end(&bar);
    return code;
}

static int measure(gpu_bench *gb) {
    const bench *b = gb->b;
    const bench_gpu_options options = options_of(b);
    const size_t iterations = (size_t)b->request->iterations;
    gb->times = malloc(iterations * sizeof *gb->times);
    gb->skews = malloc(iterations * sizeof *gb->skews);
    if (gb->times == NULL || gb->skews == NULL)
        return report_error("out of memory for %zu iterations", iterations);
    TRY_LIBRARY(megamoe_device_measure(b->target.device, &gb->before));
    TRY(bench_gpu_open(&options, &gb->arm));
    gpu_describe(bench_gpu_device(gb->arm), &gb->facts);
    megamoe_plan plan = MEGAMOE_INIT(megamoe_plan);
    plan.token_tile = (int32_t)b->request->token_tile;
    plan.lag = (int32_t)b->request->lag;
    TRY(bench_gpu_set_plan(gb->arm, &plan));
    TRY(measure_points(gb, &options));
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
    const double bytes = (double)p->work.experts * (double)b->layer.stored_bytes;
    const double operations = 6.0 * (double)p->work.routes * desc->hidden * desc->intermediate;
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
                  "experts_active", p->work.experts, "forward_us", timing_json(&p->forward),
                  "stage_us", timing_json(&p->stage), "floor_us", f.floor_us, "floor_share",
                  f.floor_us / p->forward.median_us, "weight_gbs", f.gbs, "tflops", f.tflops);
    json_object_set_new(object, "times_us", times_json(&p->times));
    if (gb->b->ranks > 1)
        json_object_update_new(object,
                               json_pack("{s:I, s:f}", "routes_received",
                                         (json_int_t)p->work.routes, "skew_us", p->skew_us));
    if (f.nominal_us > 0)
        json_object_set_new(object, "nominal_floor_us", json_real(f.nominal_us));
    if (p->state.sm_mhz > 0)
        json_object_set_new(object, "sm_mhz", json_integer(p->state.sm_mhz));
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
    if (gb->facts.nvml.driver[0] != '\0')
        json_object_set_new(object, "driver", json_string(gb->facts.nvml.driver));
    if (gb->facts.nvml.sm_mhz_max > 0)
        json_object_update_new(object,
                               json_pack("{s:i, s:i, s:f}", "sm_mhz_max", gb->facts.nvml.sm_mhz_max,
                                         "memory_mhz", gb->facts.nvml.memory_mhz, "power_limit_w",
                                         gb->facts.nvml.power_limit_mw / 1e3));
    return object;
}

static json_t *parts_json(const gpu_bench *gb) {
    json_t *parts = json_array();
    const char *what;
    uint64_t bytes;
    for (int32_t i = 0; megamoe_workspace_part(bench_gpu_workspace(gb->arm), i, &what, &bytes); i++)
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
        object, json_pack("{s:I, s:I, s:I, s:o, s:I, s:I, s:o, s:{s:[f, f], s:[f, f], s:[f, f]}}",
                          "stored_expert_bytes", (json_int_t)b->layer.stored_bytes, "capacity",
                          (json_int_t)b->capacity, "workspace_bytes",
                          (json_int_t)megamoe_workspace_bytes(bench_gpu_workspace(gb->arm)),
                          "workspace_parts", parts_json(gb), "iterations",
                          (json_int_t)b->request->iterations, "flush_bytes",
                          (json_int_t)bench_gpu_flush_bytes(gb->arm), "gpu", gpu_json(gb),
                          "ceilings", "read_gbs", gb->before.read_gbs, gb->after.read_gbs,
                          "copy_gbs", gb->before.copy_gbs, gb->after.copy_gbs, "mma_tflops",
                          gb->before.mma_tflops, gb->after.mma_tflops));
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
        printf("%6" PRId64 " %7" PRId32 " %9.1f %9.1f %9.1f %8.1f", p->tokens, p->work.experts,
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
                report_size(megamoe_workspace_bytes(bench_gpu_workspace(gb->arm)), size),
                gb->b->capacity);
    const char *what;
    uint64_t bytes;
    for (int32_t i = 0; megamoe_workspace_part(bench_gpu_workspace(gb->arm), i, &what, &bytes); i++)
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
                gb->facts.nvml.driver[0] != '\0' ? gb->facts.nvml.driver : "unknown");
    if (gb->facts.nvml.sm_mhz_max > 0)
        report_line("clocks", "up to %u MHz, memory %u MHz, limit %.0f W",
                    gb->facts.nvml.sm_mhz_max, gb->facts.nvml.memory_mhz,
                    gb->facts.nvml.power_limit_mw / 1e3);
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
    bench_gpu_close(gb->arm);
    free(gb->times);
    free(gb->skews);
    free(gb);
    return code;
}
