/* SPDX-License-Identifier: Apache-2.0 */
/* The benchmark of the CPU: one forward after the other for some seconds, with ceilings around. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "bench.h"
#include "synth.h"

enum { WARM_UPS = 2, LEAST_RUNS = 5, MOST_RUNS = 100000 };

typedef struct point {
    int64_t tokens;
    int64_t runs;
    double median_ms, min_ms, p90_ms;
    double experts; /* touched, mean */
    double gbs;     /* median */
    double gflops;
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
    const double deadline = now_seconds() + b->request->seconds;
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
        const int32_t experts = bench_count_experts(data->ids, slots, desc->experts, data->seen);
        data->times[run] = end - start;
        data->rates[run] = (double)experts * (double)b->layer.expert_bytes / data->times[run];
        p->experts += experts;
        p->runs = run + 1;
        if (end > deadline && p->runs >= LEAST_RUNS)
            break;
    }
    p->experts /= (double)p->runs;
    p->gbs = bench_quantile(data->rates, p->runs, 0.5) / 1e9;
    p->median_ms = bench_quantile(data->times, p->runs, 0.5) * 1e3;
    p->p90_ms = bench_quantile(data->times, p->runs, 0.9) * 1e3;
    p->min_ms = bench_quantile(data->times, p->runs, 0) * 1e3;
    p->gflops = 2.0 * 3 * desc->hidden * desc->intermediate * (double)slots / p->median_ms / 1e6;
    return MEGAMOE_OK;
}

static int measure_point(const bench *b, point *p) {
    const megamoe_layer_desc *desc = &b->layer.desc;
    const megamoe_shape shape = bench_shape(b);
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

static double dot_share(const point *p) {
    return p->gflops / ((p->before.dot_gflops + p->after.dot_gflops) / 2);
}

static int print_json(const bench *b, const point *all) {
    json_t *points = json_array();
    for (int i = 0; i < b->n_tokens; i++) {
        const point *p = &all[i];
        json_array_append_new(
            points,
            json_pack("{s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:[f, f], s:[f, f]}",
                      "tokens", (json_int_t)p->tokens, "runs", (json_int_t)p->runs, "median_ms",
                      p->median_ms, "min_ms", p->min_ms, "p90_ms", p->p90_ms, "experts_touched",
                      p->experts, "weight_gbs", p->gbs, "gflops", p->gflops, "read_share",
                      read_share(p), "dot_share", dot_share(p), "read_gbs", p->before.read_gbs,
                      p->after.read_gbs, "dot_gflops", p->before.dot_gflops, p->after.dot_gflops));
    }
    json_t *object = bench_json(b);
    json_object_set_new(object, "points", points);
    return report_json(object);
}

static int print_text(const bench *b, const point *all) {
    bench_print_layer(b);
    report_line("device", "%s, %s, %d thread%s", b->device.model, b->device.tier, b->device.threads,
                b->device.threads == 1 ? "" : "s");
    printf("\n%7s %10s %10s %10s %8s %7s %7s %9s %7s %7s\n", "tokens", "median ms", "min ms",
           "p90 ms", "experts", "GB/s", "of read", "GFLOP/s", "of dot", "runs");
    double read[2] = {1e300, 0}, dot[2] = {1e300, 0};
    for (int i = 0; i < b->n_tokens; i++) {
        const point *p = &all[i];
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

int bench_on_cpu(const bench *b) {
    point points[BENCH_MAX_POINTS] = {0};
    TRY(measure_points(b, points));
    return (b->request->json ? print_json : print_text)(b, points);
}
