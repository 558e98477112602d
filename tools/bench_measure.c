/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures the arms by turns: in every round each of them once, in an order that changes from round
 * to round, so that what drifts or disturbs meets all.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench.h"
#include "monotonic.h"
#include "order.h"
#include "progress.h"
#include "statistics.h"

/* CPU: forwards of each arm before the first round, and rounds that time does not end. */
enum { FIRST_FORWARDS = 2, LEAST_ROUNDS = 5 };

/* What one arm has measured of a batch size: one value for each call, but where it says more. */
typedef struct samples {
    double *forward, *stage, *skews, *rates;
    double experts, routes, imbalance; /* sums */
    int64_t n;
} samples;

static void sleep_seconds(double seconds) {
    struct timespec rest = {.tv_sec = (time_t)seconds};
    rest.tv_nsec = (long)((seconds - (double)rest.tv_sec) * 1e9);
    while (seconds > 0 && clock_nanosleep(CLOCK_MONOTONIC, 0, &rest, &rest) == EINTR)
        ;
}

/* ---- One arm in one round ---- */

static int round_on_gpu(bench *b, bench_arm *arm, bench_point *p, samples *s) {
    const int n = (int)b->request->iterations;
    nvml_state state;
    TRY(bench_gpu_time(arm->gpu, BENCH_STAGE, n, s->stage + s->n, NULL, NULL));
    TRY(bench_gpu_time(arm->gpu, BENCH_FORWARD, n, s->forward + s->n, s->skews + s->n, &state));
    if (p->sm_mhz_min == 0 || state.sm_mhz < p->sm_mhz_min)
        p->sm_mhz_min = state.sm_mhz;
    if (state.sm_mhz > p->sm_mhz_max)
        p->sm_mhz_max = state.sm_mhz;
    p->holds |= state.holds;
    return EXIT_DONE;
}

static int round_on_cpu(bench *b, bench_arm *arm, bench_point *p, samples *s) {
    const int64_t n = b->request->iterations, untimed = b->request->warm_ups;
    const uint64_t calls = (uint64_t)(n + untimed);
    for (int64_t i = -untimed; i < n; i++) {
        bench_cpu_sample sample;
        /* No two forwards have a batch in common, so none finds another's weights in a cache. */
        const uint64_t call = (uint64_t)p->rounds * calls + (uint64_t)(i + untimed);
        const uint64_t draw =
            (call + FIRST_FORWARDS) * (uint64_t)b->n_arms + (uint64_t)(arm - b->arms);
        sleep_seconds(b->request->padding / 1e6);
        TRY(bench_cpu_time(arm->cpu, draw, &sample));
        if (i < 0)
            continue;
        s->forward[s->n + i] = sample.us;
        s->rates[s->n + i] =
            (double)sample.load.active * (double)arm->layer.expert_bytes / sample.us;
        s->experts += sample.load.active;
        s->routes += (double)sample.load.routes;
        s->imbalance += sample.load.imbalance;
    }
    return EXIT_DONE;
}

/* `scratch` holds a round. */
static int measure_round(bench *b, bench_arm *arm, bench_point *p, samples *s, double *scratch) {
    const size_t n = (size_t)b->request->iterations;
    sleep_seconds(b->request->cooldown);
    TRY((b->on_gpu ? round_on_gpu : round_on_cpu)(b, arm, p, s));
    memcpy(scratch, s->forward + s->n, n * sizeof *scratch);
    p->rounds_us[p->rounds++] = statistics_median(scratch, n);
    s->n += (int64_t)n;
    return EXIT_DONE;
}

/* ---- One batch size ---- */

static int64_t most_rounds(const bench *b) {
    return b->request->rounds > 0 ? b->request->rounds : BENCH_MAX_ROUNDS;
}

static int open_samples(const bench *b, bench_point *p, samples *s) {
    const size_t rounds = (size_t)most_rounds(b), n = rounds * (size_t)b->request->iterations;
    *s = (samples){.forward = malloc(n * sizeof(double)),
                   .stage = malloc(n * sizeof(double)),
                   .skews = malloc(n * sizeof(double)),
                   .rates = malloc(n * sizeof(double))};
    p->rounds_us = malloc(rounds * sizeof(double));
    if (s->forward == NULL || s->stage == NULL || s->skews == NULL || s->rates == NULL ||
        p->rounds_us == NULL)
        return report_error("out of memory for %zu times", n);
    return EXIT_DONE;
}

static void close_samples(samples *s) {
    free(s->forward);
    free(s->stage);
    free(s->skews);
    free(s->rates);
}

static bench_timing timing_of(double *us, size_t n) {
    return (bench_timing){.median_us = statistics_median(us, n),
                          .min_us = statistics_quantile(us, n, 0),
                          .p90_us = statistics_quantile(us, n, 0.9)};
}

static int summarize(const bench *b, bench_point *p, samples *s) {
    const size_t n = (size_t)s->n, rounds = (size_t)p->rounds;
    double *medians = malloc(rounds * sizeof *medians);
    if (medians == NULL)
        return report_error("out of memory for %zu rounds", rounds);
    memcpy(medians, p->rounds_us, rounds * sizeof *medians);
    p->forward = timing_of(s->forward, n);
    p->forward.median_us = statistics_median(medians, rounds);
    free(medians);
    if (b->on_gpu) {
        p->stage = timing_of(s->stage, n);
        p->skew_us = statistics_median(s->skews, n);
    } else {
        p->gbs = statistics_median(s->rates, n) / 1e3;
        p->experts = s->experts / (double)n;
        p->routes = s->routes / (double)n;
        p->imbalance = s->imbalance / (double)n;
    }
    return EXIT_DONE;
}

static int set_batch(const bench *b, bench_arm *arm, bench_point *p) {
    const bench_routes routes = bench_routes_of(b);
    if (b->on_gpu) {
        if (!bench_routes_count(&routes, p->tokens, b->ranks, 0, 0, &p->work))
            return report_error("out of memory for %" PRId64 " tokens", p->tokens);
        return bench_gpu_set_batch(arm->gpu, p->tokens);
    }
    TRY(bench_cpu_set_batch(arm->cpu, p->tokens));
    for (uint64_t i = 0; i < FIRST_FORWARDS; i++) {
        bench_cpu_sample ignored;
        const uint64_t draw = i * (uint64_t)b->n_arms + (uint64_t)(arm - b->arms);
        TRY(bench_cpu_time(arm->cpu, draw, &ignored));
    }
    return EXIT_DONE;
}

static int measure_rounds(bench *b, int index, samples *all, double *scratch) {
    const bench_request *request = b->request;
    const double end = monotonic_ms() + 1e3 * request->seconds * b->n_arms;
    for (int64_t round = 0; round < most_rounds(b); round++) {
        for (int i = 0; i < b->n_arms; i++) {
            const int n = order_of_round((uint64_t)request->seed, round, b->n_arms, i);
            TRY(measure_round(b, &b->arms[n], &b->arms[n].points[index], &all[n], scratch));
        }
        if (request->rounds == 0 && round + 1 >= LEAST_ROUNDS && monotonic_ms() > end)
            break;
    }
    return EXIT_DONE;
}

/* The ceilings of a CPU drift on shared machines, so each of its points lies between two. */
static int measure_ceilings(bench *b, int index, bool after) {
    for (int i = 0; !b->on_gpu && i < b->n_arms; i++) {
        bench_point *p = &b->arms[i].points[index];
        megamoe_device_ceilings *ceilings = after ? &p->after : &p->before;
        *ceilings = (megamoe_device_ceilings)MEGAMOE_INIT(megamoe_device_ceilings);
        if (!b->arms[i].owns_device)
            continue;
        if (!after && index > 0)
            *ceilings = b->arms[i].points[index - 1].after;
        else
            TRY_LIBRARY(megamoe_device_measure(b->arms[i].device, ceilings));
    }
    return EXIT_DONE;
}

static int measure_arms(bench *b, int index, samples *all, double *scratch) {
    TRY(measure_ceilings(b, index, false));
    for (int i = 0; i < b->n_arms; i++) {
        bench_point *p = &b->arms[i].points[index];
        p->tokens = b->tokens[index];
        TRY(open_samples(b, p, &all[i]));
        TRY(set_batch(b, &b->arms[i], p));
    }
    TRY(measure_rounds(b, index, all, scratch));
    for (int i = 0; i < b->n_arms; i++) {
        bench_point *p = &b->arms[i].points[index];
        TRY(summarize(b, p, &all[i]));
        if (b->on_gpu)
            TRY(bench_gpu_get_times(b->arms[i].gpu, &p->times));
    }
    return measure_ceilings(b, index, true);
}

static int measure_point(bench *b, int index) {
    samples all[BENCH_MAX_ARMS] = {0};
    double *scratch = malloc((size_t)b->request->iterations * sizeof *scratch);
    int code = scratch != NULL ? measure_arms(b, index, all, scratch)
                               : report_error("out of memory for %" PRId64 " iterations",
                                              b->request->iterations);
    for (int i = 0; i < BENCH_MAX_ARMS; i++)
        close_samples(&all[i]);
    free(scratch);
    return code;
}

int bench_measure(bench *b) {
    progress bar;
    const megamoe_progress shown =
        b->on_gpu && b->rank == 0 ? progress_begin(&bar, "measuring") : (megamoe_progress){0};
    int code = EXIT_DONE;
    for (int i = 0; code == EXIT_DONE && i < b->n_tokens; i++) {
        if (shown.fn != NULL)
            shown.fn(shown.user, (uint64_t)i, (uint64_t)b->n_tokens);
        code = measure_point(b, i);
    }
    if (b->on_gpu && b->rank == 0)
        progress_end(&bar);
    for (int i = 0; code == EXIT_DONE && b->on_gpu && i < b->n_arms; i++) {
        bench_arm *arm = &b->arms[i];
        bench_gpu_record_end(bench_gpu_device(arm->gpu), &arm->record);
        if (arm->owns_device)
            TRY_LIBRARY(megamoe_device_measure(arm->device, &arm->after));
    }
    return code;
}
