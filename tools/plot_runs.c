/* SPDX-License-Identifier: Apache-2.0 */
/* Reads what `bench` has measured, on CPUs and on GPUs. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "plot.h"
#include "report.h"

static const char *text_of(const json_t *run, const char *key) {
    const char *text = json_string_value(json_object_get(run, key));
    return text != NULL ? text : "";
}

bool plot_is_bench(const json_t *json) {
    return (json_is_array(json_object_get(json, "points")) ||
            json_is_array(json_object_get(json, "arms"))) &&
           !plot_is_comparison(json);
}

bool plot_is_comparison(const json_t *json) {
    return json_is_array(json_object_get(json, "points")) &&
           json_is_string(json_object_get(json, "a")) && json_is_string(json_object_get(json, "b"));
}

/* ---- runs of files ---- */

/* One arm with what it shares with others of its file. */
typedef struct arm {
    const plot_file *file;
    json_t *json; /* a reference of its own */
} arm;

typedef struct arms {
    arm list[PLOT_SERIES_MAX];
    int n;
} arms;

static int add_arm(arms *all, const plot_file *file, const json_t *own) {
    if (all->n == PLOT_SERIES_MAX)
        return report_error("plot: the files hold more than %d runs or arms, which a picture can "
                            "show",
                            PLOT_SERIES_MAX);
    json_t *json = json_copy(file->json);
    if (json == NULL || (own != NULL && json_object_update(json, (json_t *)own) != 0)) {
        json_decref(json);
        return report_error("%s: its arms are no objects", file->path);
    }
    all->list[all->n++] = (arm){file, json};
    return EXIT_DONE;
}

static int add_arms(arms *all, const plot_file *file) {
    if (!plot_is_bench(file->json))
        return report_error("%s: holds no result of megamoe bench --json (\"points\" or "
                            "\"arms\")",
                            file->path);
    const json_t *own = json_object_get(file->json, "arms");
    if (!json_is_array(own))
        return add_arm(all, file, NULL);
    for (size_t i = 0; i < json_array_size(own); i++)
        TRY(add_arm(all, file, json_array_get(own, i)));
    return json_array_size(own) > 0 ? EXIT_DONE : report_error("%s: has no arms", file->path);
}

static void close_arms(arms *all) {
    for (int i = 0; i < all->n; i++)
        json_decref(all->list[i].json);
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

/* What the file says of an arm's times by those of the base beside them: gains are the inverse. */
static void take_ratios(const json_t *run, plot_series *s) {
    const json_t *ratios = json_object_get(run, "ratios");
    for (size_t i = 0; i < json_array_size(ratios); i++) {
        const json_t *ratio = json_array_get(ratios, i);
        if (strcmp(text_of(ratio, "arm"), text_of(run, "arm")) != 0)
            continue;
        for (int k = 0; k < s->n; k++)
            if (s->points[k].tokens == plot_number(ratio, "tokens")) {
                s->points[k].gain = 1 / plot_number(ratio, "median");
                s->points[k].gain_low = 1 / plot_number(ratio, "high");
                s->points[k].gain_high = 1 / plot_number(ratio, "low");
            }
    }
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
    take_ratios(run, s);
    const json_t *ceilings = json_object_get(run, "ceilings");
    s->read_gbs = ceilings != NULL ? plot_number(ceilings, "read_gbs") : read;
    s->tflops = ceilings != NULL ? plot_number(ceilings, "mma_tflops") : dot;
    return EXIT_DONE;
}

/* ---- names ---- */

/* What runs may differ in, in words; empty for what goes without saying. */
enum { LAYER, SHAPE, WEIGHTS, ARITHMETIC, RANKS, THREADS, MODEL, FACETS };

typedef struct facet_words {
    char words[FACETS][96];
} facet_words;

static facet_words facets_of(const json_t *run) {
    facet_words f = {0};
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

static bool differs(const facet_words *all, int n, int facet) {
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

static void name_series(const facet_words *all, int n, int i, plot_series *s) {
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

/* Runs of one name are told apart by their arms, else by their files. */
static void tell_apart(const arms *all, plot_runs *plot, bool by_file) {
    bool same[PLOT_SERIES_MAX] = {false};
    for (int i = 0; i < plot->n; i++)
        for (int k = 0; k < plot->n; k++)
            same[i] =
                same[i] || (i != k && strcmp(plot->series[i].label, plot->series[k].label) == 0);
    for (int i = 0; i < plot->n; i++)
        if (same[i])
            append(plot->series[i].label, PLOT_LABEL_BYTES, ", ",
                   by_file ? base_name(all->list[i].file->path)
                           : text_of(all->list[i].json, "arm"));
}

static void name_all(const arms *all, const facet_words *facets, plot_runs *plot) {
    for (int i = 0; i < plot->n; i++)
        name_series(facets, plot->n, i, &plot->series[i]);
    tell_apart(all, plot, false);
    tell_apart(all, plot, true);
    static const int common[] = {LAYER, SHAPE, RANKS, MODEL};
    for (size_t k = 0; k < sizeof common / sizeof *common; k++)
        if (!differs(facets, plot->n, common[k]))
            append(plot->title, sizeof plot->title, ", ", facets[0].words[common[k]]);
    const json_t *ratio = json_array_get(json_object_get(all->list[0].json, "ratios"), 0);
    if (ratio == NULL) {
        snprintf(plot->gains, sizeof plot->gains,
                 "time with E4M3 / time, median of pairs, p10 to p90");
        return;
    }
    snprintf(plot->gains, sizeof plot->gains, "time of %.160s / time, median of pairs, %.0f %%",
             text_of(ratio, "base"), 100 * plot_number(ratio, "confidence"));
}

static int read_arms(const arms *all, plot_runs *plot) {
    facet_words facets[PLOT_SERIES_MAX] = {0};
    for (int i = 0; i < all->n; i++) {
        const arm *r = &all->list[i];
        plot->n++;
        TRY(read_points(r->file->path, r->json, &plot->series[i]));
        facets[i] = facets_of(r->json);
    }
    name_all(all, facets, plot);
    return EXIT_DONE;
}

/* Every arm that both results have is a run. */
static int read_comparison(const plot_file *file, plot_runs *plot) {
    const json_t *points = json_object_get(file->json, "points");
    snprintf(plot->gains, sizeof plot->gains, "time of %.80s / time of %.80s, median of pairs",
             base_name(text_of(file->json, "a")), base_name(text_of(file->json, "b")));
    for (size_t i = 0; i < json_array_size(points); i++) {
        const json_t *p = json_array_get(points, i);
        const plot_point point = {.tokens = plot_number(p, "tokens"),
                                  .us = plot_number(p, "b_us"),
                                  .gain = 1 / plot_number(p, "ratio"),
                                  .gain_low = 1 / plot_number(p, "high"),
                                  .gain_high = 1 / plot_number(p, "low")};
        int k = 0;
        while (k < plot->n && strcmp(plot->series[k].label, text_of(p, "arm")) != 0)
            k++;
        if (k == PLOT_SERIES_MAX || !(point.tokens > 0) || !(point.gain > 0))
            return report_error("%s: point %zu has no \"tokens\", no \"ratio\", or is of more than "
                                "%d arms",
                                file->path, i, PLOT_SERIES_MAX);
        plot_series *s = &plot->series[k];
        plot_point *grown = realloc(s->points, ((size_t)s->n + 1) * sizeof *grown);
        if (grown == NULL)
            return report_error("out of memory");
        if (k == plot->n)
            snprintf(plot->series[plot->n++].label, PLOT_LABEL_BYTES, "%s", text_of(p, "arm"));
        s->points = grown;
        s->points[s->n++] = point;
    }
    return plot->n > 0 ? EXIT_DONE : report_error("%s: has no points", file->path);
}

int plot_runs_read(const plot_file *files, int n, plot_runs *plot) {
    *plot = (plot_runs){.n = 0};
    if (n == 1 && plot_is_comparison(files[0].json))
        return read_comparison(&files[0], plot);
    arms all = {.n = 0};
    int code = EXIT_DONE;
    for (int i = 0; code == EXIT_DONE && i < n; i++)
        code = add_arms(&all, &files[i]);
    if (code == EXIT_DONE)
        code = read_arms(&all, plot);
    close_arms(&all);
    return code;
}

void plot_runs_free(plot_runs *plot) {
    for (int i = 0; i < plot->n; i++)
        free(plot->series[i].points);
}
