/* SPDX-License-Identifier: Apache-2.0 */
/* Reads what `bench` has measured, on CPUs and on GPUs. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "plot.h"
#include "report.h"

bool plot_is_bench(const json_t *json) {
    return json_is_array(json_object_get(json, "points"));
}

static const char *text_of(const json_t *run, const char *key) {
    const char *text = json_string_value(json_object_get(run, key));
    return text != NULL ? text : "";
}

/* ---- points ---- */

static double larger(double a, double b) {
    return isnan(a) || b > a ? b : a;
}

static plot_point gpu_point(const json_t *p) {
    return (plot_point){.us = plot_number(p, "forward_us.median"),
                        .floor_us = plot_number(p, "floor_us"),
                        .tflops = plot_number(p, "tflops")};
}

static plot_point cpu_point(const json_t *p) {
    const double us = 1e3 * plot_number(p, "median_ms");
    return (plot_point){.us = us,
                        .floor_us =
                            us * larger(plot_number(p, "read_share"), plot_number(p, "dot_share")),
                        .tflops = plot_number(p, "gflops") / 1e3};
}

static plot_point point_of(const json_t *p) {
    plot_point point = json_object_get(p, "forward_us") != NULL ? gpu_point(p) : cpu_point(p);
    point.tokens = plot_number(p, "tokens");
    point.public_us = plot_number(p, "public_us");
    point.target_us = plot_number(p, "target_us");
    point.weight_gbs = plot_number(p, "weight_gbs");
    point.gain = plot_number(p, "gain");
    point.gain_low = plot_number(p, "gain_p10");
    point.gain_high = plot_number(p, "gain_p90");
    return point;
}

static int by_tokens(const void *a, const void *b) {
    const double x = ((const plot_point *)a)->tokens, y = ((const plot_point *)b)->tokens;
    return (x > y) - (x < y);
}

static int read_points(const char *path, const json_t *run, plot_series *s) {
    const json_t *points = json_object_get(run, "points");
    const size_t n = json_array_size(points);
    if (n == 0)
        return report_error("%s: has no points", path);
    s->points = calloc(n, sizeof *s->points);
    if (s->points == NULL)
        return report_error("out of memory");
    double read = 0, dot = 0;
    for (size_t i = 0; i < n; i++) {
        const json_t *p = json_array_get(points, i);
        s->points[i] = point_of(p);
        if (!(s->points[i].tokens > 0) || !(s->points[i].us > 0))
            return report_error("%s: point %zu has no tokens or no time; expected a number above 0 "
                                "as \"tokens\" and as \"forward_us\".\"median\" or \"median_ms\"",
                                path, i);
        read += plot_number(p, "read_gbs") / (double)n;
        dot += plot_number(p, "dot_gflops") / 1e3 / (double)n;
    }
    s->n = (int)n;
    qsort(s->points, n, sizeof *s->points, by_tokens);
    const json_t *ceilings = json_object_get(run, "ceilings");
    s->read_gbs = ceilings != NULL ? plot_number(ceilings, "read_gbs") : read;
    s->tflops = ceilings != NULL ? plot_number(ceilings, "mma_tflops") : dot;
    return EXIT_DONE;
}

/* ---- names ---- */

/* What runs may differ in, in words; empty for what goes without saying. */
enum { LAYER, SHAPE, WEIGHTS, ARITHMETIC, RANKS, THREADS, MODEL, FACETS };

typedef struct facets {
    char words[FACETS][96];
} facets;

static facets facets_of(const json_t *run) {
    facets f = {0};
    enum { BYTES = sizeof f.words[0] };
    snprintf(f.words[LAYER], BYTES, "%s", text_of(run, "layer"));
    snprintf(f.words[SHAPE], BYTES, "%.0f x %.0f, %.0f experts, top-%.0f",
             plot_number(run, "hidden"), plot_number(run, "intermediate"),
             plot_number(run, "experts"), plot_number(run, "topk"));
    const bool nvfp4 = strcmp(text_of(run, "format"), "nvfp4") == 0;
    snprintf(f.words[WEIGHTS], BYTES, "%s%s%s", nvfp4 ? "NVFP4" : "MXFP4",
             *text_of(run, "nvfp4") != '\0' ? " " : "", text_of(run, "nvfp4"));
    const bool int8 = strcmp(text_of(run, "activations"), "int8") == 0;
    const bool block = strcmp(text_of(run, "input_scale"), "block") == 0;
    const bool promote = strcmp(text_of(run, "accumulate"), "promote") == 0;
    snprintf(f.words[ARITHMETIC], BYTES, "%s%s%s", int8 ? " int8" : "",
             block ? " scales per 128" : "", promote ? " promote" : "");
    const double ranks = plot_number(run, "ranks"), threads = plot_number(run, "threads");
    if (ranks > 1)
        snprintf(f.words[RANKS], BYTES, "%.0f ranks", ranks);
    if (!isnan(threads))
        snprintf(f.words[THREADS], BYTES, "%.0f thread%s", threads, threads > 1 ? "s" : "");
    snprintf(f.words[MODEL], BYTES, "%s", text_of(run, "model"));
    return f;
}

static bool differs(const facets *all, int n, int facet) {
    for (int i = 1; i < n; i++)
        if (strcmp(all[i].words[facet], all[0].words[facet]) != 0)
            return true;
    return false;
}

static void append(char *text, size_t bytes, const char *between, const char *word) {
    if (*word == '\0')
        return;
    const size_t used = strlen(text);
    snprintf(text + used, bytes - used, "%s%s", used > 0 ? between : "", word);
}

static void name_series(const facets *all, int n, int i, plot_series *s) {
    append(s->label, sizeof s->label, "", all[i].words[WEIGHTS]);
    append(s->label, sizeof s->label, "", all[i].words[ARITHMETIC]);
    static const int others[] = {LAYER, RANKS, THREADS, MODEL};
    for (size_t k = 0; k < sizeof others / sizeof *others; k++)
        if (differs(all, n, others[k]))
            append(s->label, sizeof s->label, ", ", all[i].words[others[k]]);
}

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

/* Runs of one name are told apart by their files. */
static void tell_apart(const plot_file *files, plot_runs *runs) {
    bool same[PLOT_SERIES_MAX] = {false};
    for (int i = 0; i < runs->n; i++)
        for (int k = 0; k < runs->n; k++)
            same[i] =
                same[i] || (i != k && strcmp(runs->series[i].label, runs->series[k].label) == 0);
    for (int i = 0; i < runs->n; i++)
        if (same[i])
            append(runs->series[i].label, PLOT_LABEL_BYTES, ", ", base_name(files[i].path));
}

static void name_all(const plot_file *files, const facets *all, plot_runs *runs) {
    for (int i = 0; i < runs->n; i++)
        name_series(all, runs->n, i, &runs->series[i]);
    tell_apart(files, runs);
    static const int common[] = {LAYER, SHAPE, RANKS, MODEL};
    for (size_t k = 0; k < sizeof common / sizeof *common; k++)
        if (!differs(all, runs->n, common[k]))
            append(runs->title, sizeof runs->title, ", ", all[0].words[common[k]]);
}

int plot_runs_read(const plot_file *files, int n, plot_runs *runs) {
    facets all[PLOT_SERIES_MAX] = {0};
    *runs = (plot_runs){.n = 0};
    if (n > PLOT_SERIES_MAX)
        return report_error("plot: %d files; a picture shows up to %d", n, PLOT_SERIES_MAX);
    for (int i = 0; i < n; i++) {
        if (!plot_is_bench(files[i].json))
            return report_error("%s: holds no result of megamoe bench --json (\"points\")",
                                files[i].path);
        runs->n++;
        TRY(read_points(files[i].path, files[i].json, &runs->series[i]));
        all[i] = facets_of(files[i].json);
    }
    name_all(files, all, runs);
    return EXIT_DONE;
}

void plot_runs_free(plot_runs *runs) {
    for (int i = 0; i < runs->n; i++)
        free(runs->series[i].points);
}
