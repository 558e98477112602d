/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The benchmark of the CPU: one forward after the other for some seconds, with ceilings around.
 * With int8 activations every second forward has E4M3 ones, so that what disturbs meets both.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "bench.h"
#include "synth.h"

enum { WARM_UPS = 2, LEAST_RUNS = 5, MOST_RUNS = 100000 };

/* What forwards alternate between. */
enum { ASKED, E4M3, MOST_ARMS };

typedef struct point {
    int64_t tokens;
    int64_t runs;
    double median_ms, min_ms, p90_ms;
    double experts; /* touched, mean */
    double gbs;     /* median */
    double gflops;
    /* With int8 activations: the median with E4M3, and its times by those of the forwards beside.
     */
    double e4m3_ms;
    double gain, gain_p10, gain_p90;
    megamoe_device_ceilings before, after;
} point;

static double now_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Buffers of one point. */
typedef struct batch {
    uint16_t *x, *y;
    int32_t *ids;
    float *weights;
    bool *seen;
    double *times[MOST_ARMS]; /* seconds of each run */
    double *rates, *gains;    /* bytes per second of each run; times with E4M3 by times asked */
    megamoe_workspace *workspaces[MOST_ARMS];
    int arms;
} batch;

static bool is_int8(const bench *b) {
    return b->request->activations == MEGAMOE_ACTIVATIONS_INT8;
}

static bool batch_open(const megamoe_layer_desc *desc, int64_t tokens, uint64_t seed, batch *b) {
    const size_t elements = (size_t)tokens * (size_t)desc->hidden;
    const size_t slots = (size_t)tokens * (size_t)desc->topk;
    *b = (batch){.x = malloc(elements * sizeof *b->x),
                 .y = malloc(elements * sizeof *b->y),
                 .ids = malloc(slots * sizeof *b->ids),
                 .weights = malloc(slots * sizeof *b->weights),
                 .seen = malloc((size_t)desc->experts * sizeof *b->seen),
                 .rates = malloc(MOST_RUNS * sizeof *b->rates),
                 .gains = malloc(MOST_RUNS * sizeof *b->gains)};
    for (int arm = 0; arm < MOST_ARMS; arm++)
        b->times[arm] = malloc(MOST_RUNS * sizeof *b->times[arm]);
    if (!b->x || !b->y || !b->ids || !b->weights || !b->seen || !b->rates || !b->gains ||
        !b->times[ASKED] || !b->times[E4M3])
        return false;
    for (size_t i = 0; i < slots; i++)
        b->weights[i] = 1.0f / (float)desc->topk;
    return synth_input(seed, tokens, desc->hidden, b->x);
}

static void batch_close(batch *b) {
    for (int arm = 0; arm < MOST_ARMS; arm++) {
        megamoe_workspace_close(b->workspaces[arm]);
        free(b->times[arm]);
    }
    free(b->x);
    free(b->y);
    free(b->ids);
    free(b->weights);
    free(b->seen);
    free(b->rates);
    free(b->gains);
}

/* One forward of one arm, with experts of its own so that weights come from memory. */
static megamoe_status measure_run(const bench *b, batch *data, int arm, int64_t run, point *p) {
    const megamoe_layer_desc *desc = &b->layer.desc;
    megamoe_workspace *workspace = data->workspaces[arm];
    const megamoe_view x = {data->x, MEGAMOE_DTYPE_BF16, p->tokens, 0};
    const megamoe_view ids = {data->ids, MEGAMOE_DTYPE_I32, p->tokens, 0};
    const megamoe_view weights = {data->weights, MEGAMOE_DTYPE_F32, p->tokens, 0};
    const megamoe_view y = {data->y, MEGAMOE_DTYPE_BF16, p->tokens, 0};
    synth_routes(b->target.seed + (uint64_t)((run + WARM_UPS) * data->arms + arm), p->tokens,
                 desc->experts, desc->topk, data->ids);
    const double start = now_seconds();
    megamoe_status status = megamoe_stage(workspace, &x, &ids, &weights, p->tokens, NULL);
    if (status == MEGAMOE_OK)
        status = megamoe_forward(b->layer.layer, workspace, &y, NULL);
    const double seconds = now_seconds() - start;
    if (status == MEGAMOE_OK)
        status = megamoe_workspace_status(workspace, NULL);
    if (status != MEGAMOE_OK || run < 0)
        return status;
    data->times[arm][run] = seconds;
    if (arm != ASKED)
        return MEGAMOE_OK;
    const int32_t experts =
        bench_count_experts(data->ids, p->tokens * desc->topk, desc->experts, data->seen);
    data->rates[run] = (double)experts * (double)b->layer.expert_bytes / seconds;
    p->experts += experts;
    return MEGAMOE_OK;
}

static void summarize(const megamoe_layer_desc *desc, const batch *data, point *p) {
    const int64_t slots = p->tokens * desc->topk;
    for (int64_t run = 0; data->arms > 1 && run < p->runs; run++)
        data->gains[run] = data->times[E4M3][run] / data->times[ASKED][run];
    p->experts /= (double)p->runs;
    p->gbs = bench_quantile(data->rates, p->runs, 0.5) / 1e9;
    p->median_ms = bench_quantile(data->times[ASKED], p->runs, 0.5) * 1e3;
    p->p90_ms = bench_quantile(data->times[ASKED], p->runs, 0.9) * 1e3;
    p->min_ms = bench_quantile(data->times[ASKED], p->runs, 0) * 1e3;
    p->gflops = 2.0 * 3 * desc->hidden * desc->intermediate * (double)slots / p->median_ms / 1e6;
    if (data->arms == 1)
        return;
    p->e4m3_ms = bench_quantile(data->times[E4M3], p->runs, 0.5) * 1e3;
    p->gain = bench_quantile(data->gains, p->runs, 0.5);
    p->gain_p10 = bench_quantile(data->gains, p->runs, 0.1);
    p->gain_p90 = bench_quantile(data->gains, p->runs, 0.9);
}

static megamoe_status measure_runs(const bench *b, batch *data, point *p) {
    const double deadline = now_seconds() + b->request->seconds * data->arms;
    for (int64_t run = -WARM_UPS; run < MOST_RUNS; run++) {
        for (int i = 0; i < data->arms; i++) {
            const int arm = (int)((run + WARM_UPS + i) % data->arms); /* none is always the first */
            const megamoe_status status = measure_run(b, data, arm, run, p);
            if (status != MEGAMOE_OK)
                return status;
        }
        p->runs = run + 1;
        if (now_seconds() > deadline && p->runs >= LEAST_RUNS)
            break;
    }
    summarize(&b->layer.desc, data, p);
    return MEGAMOE_OK;
}

static megamoe_status open_workspaces(const bench *b, int64_t tokens, batch *data) {
    megamoe_shape shape = bench_shape(b);
    megamoe_capacity capacity = MEGAMOE_INIT(megamoe_capacity);
    capacity.tokens = tokens;
    data->arms = is_int8(b) ? 2 : 1;
    megamoe_status status = MEGAMOE_OK;
    for (int arm = 0; status == MEGAMOE_OK && arm < data->arms; arm++) {
        if (arm == E4M3)
            shape.activations = MEGAMOE_ACTIVATIONS_E4M3;
        status = megamoe_workspace_create(b->target.comm, b->target.device, &shape, &capacity,
                                          &data->workspaces[arm]);
        if (status == MEGAMOE_OK)
            status = megamoe_prewarm(b->layer.layer, data->workspaces[arm]);
    }
    return status;
}

static int measure_point(const bench *b, point *p) {
    batch data;
    int code = EXIT_DONE;
    if (!batch_open(&b->layer.desc, p->tokens, b->target.seed, &data)) {
        code = report_error("out of memory for %" PRId64 " tokens", p->tokens);
    } else {
        megamoe_status status = open_workspaces(b, p->tokens, &data);
        if (status == MEGAMOE_OK)
            status = measure_runs(b, &data, p);
        if (status != MEGAMOE_OK)
            code = report_failure(status);
    }
    batch_close(&data);
    return code;
}

/* The ceilings drift on shared machines, so each point lies between two measurements of them. */
static int measure_points(const bench *b, point *points) {
    megamoe_device_ceilings ceilings = MEGAMOE_INIT(megamoe_device_ceilings);
    megamoe_status status = megamoe_device_measure(b->target.device, &ceilings);
    for (int i = 0; status == MEGAMOE_OK && i < b->n_tokens; i++) {
        point *p = &points[i];
        p->tokens = b->tokens[i];
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

/* The rate of the multiply-adds that the kernels use. */
static double dot_peak(const bench *b, const megamoe_device_ceilings *ceilings) {
    return is_int8(b) ? ceilings->int8_gops : ceilings->dot_gflops;
}

static double dot_share(const bench *b, const point *p) {
    return p->gflops / ((dot_peak(b, &p->before) + dot_peak(b, &p->after)) / 2);
}

static json_t *point_json(const bench *b, const point *p) {
    json_t *object =
        json_pack("{s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:[f, f], s:[f, f]}",
                  "tokens", (json_int_t)p->tokens, "runs", (json_int_t)p->runs, "median_ms",
                  p->median_ms, "min_ms", p->min_ms, "p90_ms", p->p90_ms, "experts_touched",
                  p->experts, "weight_gbs", p->gbs, "gflops", p->gflops, "read_share",
                  read_share(p), "dot_share", dot_share(b, p), "read_gbs", p->before.read_gbs,
                  p->after.read_gbs, "dot_gflops", dot_peak(b, &p->before), dot_peak(b, &p->after));
    if (is_int8(b))
        json_object_update_new(object, json_pack("{s:f, s:f, s:f, s:f}", "e4m3_median_ms",
                                                 p->e4m3_ms, "gain", p->gain, "gain_p10",
                                                 p->gain_p10, "gain_p90", p->gain_p90));
    return object;
}

static int print_json(const bench *b, const point *all) {
    json_t *points = json_array();
    for (int i = 0; i < b->n_tokens; i++)
        json_array_append_new(points, point_json(b, &all[i]));
    json_t *object = bench_json(b);
    json_object_set_new(object, "points", points);
    return report_json(object);
}

/* Widens a range that starts empty. */
static void include(double range[2], double value) {
    range[0] = value < range[0] ? value : range[0];
    range[1] = value > range[1] ? value : range[1];
}

static int print_text(const bench *b, const point *all) {
    bench_print_layer(b);
    report_line("device", "%s, %s, %d thread%s", b->device.model, b->device.tier, b->device.threads,
                b->device.threads == 1 ? "" : "s");
    printf("\n%7s %10s %10s %10s %8s %7s %7s %9s %7s %7s", "tokens", "median ms", "min ms",
           "p90 ms", "experts", "GB/s", "of read", "GFLOP/s", "of dot", "runs");
    if (is_int8(b))
        printf(" %10s %7s", "E4M3 ms", "gain");
    printf("\n");
    double read[2] = {1e300, 0}, dot[2] = {1e300, 0};
    for (int i = 0; i < b->n_tokens; i++) {
        const point *p = &all[i];
        printf("%7" PRId64 " %10.3f %10.3f %10.3f %8.1f %7.1f %5.0f %% %9.1f %5.0f %% %7" PRId64,
               p->tokens, p->median_ms, p->min_ms, p->p90_ms, p->experts, p->gbs,
               100 * read_share(p), p->gflops, 100 * dot_share(b, p), p->runs);
        if (is_int8(b))
            printf(" %10.3f %7.2f", p->e4m3_ms, p->gain);
        printf("\n");
        const megamoe_device_ceilings *both[] = {&p->before, &p->after};
        for (int j = 0; j < 2; j++) {
            include(read, both[j]->read_gbs);
            include(dot, dot_peak(b, both[j]));
        }
    }
    printf("\n");
    report_line("ceilings",
                "read %.1f..%.1f GB/s, dot %.0f..%.0f GFLOP/s, measured before and "
                "after each line",
                read[0], read[1], dot[0], dot[1]);
    if (is_int8(b))
        report_line("gain", "median of each forward's time with E4M3 by the time of the one beside "
                            "it with int8");
    return EXIT_DONE;
}

int bench_on_cpu(const bench *b) {
    point points[BENCH_MAX_POINTS] = {0};
    TRY(measure_points(b, points));
    return (b->request->json ? print_json : print_text)(b, points);
}
