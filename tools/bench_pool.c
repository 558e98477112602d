/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_pool.h"

#include <stdlib.h>
#include <string.h>

#include "bench_result.h"
#include "report.h"
#include "statistics.h"

/* What a point has of each process while it is pooled. */
static const char medians[] = "processes_us", least[] = "pooled_min_us", p90s[] = "pooled_p90_us";

/* Of all arms of a result, those that have another value excepted. The others belong to one arm. */
static const char *const shared[] = {"schema_version", "layer",    "geometry",   "hidden",
                                     "intermediate",   "experts",  "topk",       "experts_of_model",
                                     "seed",           "live",     "capacity",   "public_source",
                                     "host",           "warm_ups", "iterations", "cooldown_s",
                                     "padding_us",     "routing"};

/* Fields that must be the same. */
static const char *const geometry[] = {"hidden", "intermediate", "topk"};

static double experts_of_rank(const json_t *result) {
    const double experts = result_number(result, "experts");
    return result_has(result, "ranks") ? experts / result_number(result, "ranks") : experts;
}

static int check_geometry(const json_t *a, const json_t *b) {
    for (size_t i = 0; i < sizeof geometry / sizeof *geometry; i++) {
        const double x = result_number(a, geometry[i]), y = result_number(b, geometry[i]);
        if (x != y)
            return report_error("bench: arms differ in %s: %.0f and %.0f", geometry[i], x, y);
    }
    if (experts_of_rank(a) != experts_of_rank(b))
        return report_error("bench: arms have %g and %g experts for each rank", experts_of_rank(a),
                            experts_of_rank(b));
    return EXIT_DONE;
}

static int check_points(const json_t *a, const json_t *b) {
    bool good = json_array_size(a) == json_array_size(b);
    for (size_t i = 0; good && i < json_array_size(a); i++)
        good = result_number(json_array_get(a, i), "tokens") ==
               result_number(json_array_get(b, i), "tokens");
    return good ? EXIT_DONE : report_error("bench: processes have measured different batch sizes");
}

/* ---- Points ---- */

/* What one process has measured. */
static void add_process(json_t *into, const json_t *p) {
    json_array_append_new(json_object_get(into, medians), json_real(result_median_us(p)));
    json_array_append_new(json_object_get(into, least), json_real(result_min_us(p)));
    json_array_append_new(json_object_get(into, p90s), json_real(result_p90_us(p)));
}

static void begin_point(json_t *p) {
    json_object_update_new(p, json_pack("{s:[], s:[], s:[]}", medians, least, p90s));
    add_process(p, p);
}

static void add_point(json_t *into, const json_t *p) {
    add_process(into, p);
    json_array_extend(json_object_get(into, "rounds_us"), json_object_get(p, "rounds_us"));
    if (result_has(p, "runs"))
        json_object_set_new(
            into, "runs",
            json_integer((json_int_t)(result_number(into, "runs") + result_number(p, "runs"))));
}

/* Rates and shares, which are by the median. */
static void scale(json_t *p, double by) {
    static const char *const up[] = {"floor_share", "weight_gbs", "tflops",
                                     "gflops",      "read_share", "dot_share"};
    for (size_t i = 0; i < sizeof up / sizeof *up; i++)
        if (result_has(p, up[i]))
            json_object_set_new(p, up[i], json_real(result_number(p, up[i]) * by));
}

static double median_of(const json_t *p, const char *name) {
    size_t n;
    double *values = result_numbers(p, name, &n);
    const double median = values != NULL && n > 0 ? statistics_median(values, n) : 0;
    free(values);
    return median;
}

static double least_of(const json_t *p, const char *name) {
    size_t n;
    double *values = result_numbers(p, name, &n);
    const double value = values != NULL && n > 0 ? statistics_quantile(values, n, 0) : 0;
    free(values);
    return value;
}

/* Another build may not tell its rounds: each of its processes is one. */
static void finish_point(json_t *p) {
    if (!result_has(p, "rounds_us"))
        json_object_set_new(p, "rounds_us", json_deep_copy(json_object_get(p, medians)));
    const double us = median_of(p, "rounds_us"), min_us = least_of(p, least);
    const double p90_us = median_of(p, p90s);
    scale(p, result_median_us(p) / us);
    if (result_has(p, "forward_us"))
        json_object_set_new(
            p, "forward_us",
            json_pack("{s:f, s:f, s:f}", "median", us, "min", min_us, "p90", p90_us));
    else
        json_object_update_new(p, json_pack("{s:f, s:f, s:f}", "median_ms", us / 1e3, "min_ms",
                                            min_us / 1e3, "p90_ms", p90_us / 1e3));
    json_object_del(p, least);
    json_object_del(p, p90s);
}

/* ---- Results ---- */

/* The points of the i-th arm. */
static json_t *points_of(const json_t *result, size_t i) {
    const json_t *arms = json_object_get(result, "arms");
    return json_object_get(arms != NULL ? json_array_get(arms, i) : result, "points");
}

int bench_pool_add(json_t **pooled, json_t *result) {
    const bool first = *pooled == NULL;
    if (first)
        *pooled = json_incref(result);
    TRY(check_geometry(*pooled, result));
    if (result_arms(*pooled) != result_arms(result))
        return report_error("bench: processes have measured %zu and %zu arms", result_arms(*pooled),
                            result_arms(result));
    for (size_t i = 0; i < result_arms(result); i++) {
        const json_t *into = points_of(*pooled, i), *from = points_of(result, i);
        TRY(check_points(into, from));
        for (size_t j = 0; j < json_array_size(into); j++) {
            if (first)
                begin_point(json_array_get(into, j));
            else
                add_point(json_array_get(into, j), json_array_get(from, j));
        }
    }
    return EXIT_DONE;
}

int bench_pool_finish(json_t *pooled) {
    for (size_t i = 0; i < result_arms(pooled); i++) {
        size_t j;
        json_t *p;
        json_array_foreach(points_of(pooled, i), j, p) {
            finish_point(p);
        }
    }
    return EXIT_DONE;
}

int bench_pool_join(json_t *const *arms, int n, json_t **result) {
    json_t *joined = json_object(), *array = json_array();
    *result = joined;
    json_object_set_new(joined, "arms", array);
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++)
        if (result_has(arms[0], shared[i]))
            json_object_set(joined, shared[i], json_object_get(arms[0], shared[i]));
    for (int i = 0; i < n; i++) {
        TRY(check_geometry(arms[0], arms[i]));
        TRY(check_points(points_of(arms[0], 0), points_of(arms[i], 0)));
        json_t *arm = json_copy(arms[i]);
        for (size_t j = 0; j < sizeof shared / sizeof *shared; j++)
            if (strcmp(shared[j], "host") == 0 ||
                json_equal(json_object_get(arm, shared[j]), json_object_get(joined, shared[j])))
                json_object_del(arm, shared[j]);
        json_array_append_new(array, arm);
    }
    return EXIT_DONE;
}
