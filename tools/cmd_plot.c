/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe plot: pictures of what bench and trace have measured. */
#include <string.h>

#include "commands.h"
#include "gnuplot.h"
#include "options.h"
#include "plot.h"
#include "report.h"

/* X(name, width, height of its picture), in the order of --kind. */
#define KINDS(X)                                                                                   \
    X(latency, 860, 560)                                                                           \
    X(roofline, 860, 560)                                                                          \
    X(ratio, 1000, 520)                                                                            \
    X(load, 1000, 480)                                                                             \
    X(timeline, 1100, 760)

enum {
#define X(name, width, height) KIND_##name,
    KINDS(X)
#undef X
        UNKNOWN = -1
};

static const struct {
    const char *name;
    int width, height;
} kinds[] = {
#define X(name, width, height) {#name, width, height},
    KINDS(X)
#undef X
};

static bool ends_with(const char *text, const char *end) {
    const size_t n = strlen(text), m = strlen(end);
    return n > m && strcmp(text + n - m, end) == 0;
}

/* A PNG has twice as many dots as an SVG has units, for screens and printers of today. */
static int write_terminal(const char *out, int kind, const char *title, FILE *script) {
    const int width = kinds[kind].width, height = kinds[kind].height;
    if (ends_with(out, ".svg"))
        fprintf(script,
                "set terminal svg noenhanced size %d,%d font 'sans-serif,13' background 'white'\n",
                width, height);
    else if (ends_with(out, ".png"))
        fprintf(script,
                "set terminal pngcairo noenhanced size %d,%d font 'sans-serif,10' fontscale 2 "
                "linewidth 2 pointscale 2 background 'white'\n",
                2 * width, 2 * height);
    else
        return report_error("--out %s: expected a name that ends with .svg or .png", out);
    fprintf(
        script,
        "set encoding utf8\nset grid lt 1 lw 0.5 lc rgb '#dddddd'\nset border lw 1\nset title ");
    plot_quote(script, title);
    fprintf(script, "\n");
    return EXIT_DONE;
}

static int kind_of(const json_t *json) {
    if (plot_is_timeline(json))
        return KIND_timeline;
    if (plot_is_comparison(json))
        return KIND_ratio;
    if (plot_is_bench(json))
        return KIND_latency;
    return plot_is_load(json) ? KIND_load : UNKNOWN;
}

static int write_of_one(const plot_file *files, int n, int kind, const char *out, FILE *script) {
    const json_t *json = files[0].json;
    const char *title = json_string_value(json_object_get(json, "title"));
    if (n > 1)
        return report_error("plot: --kind %s shows one file, not %d", kinds[kind].name, n);
    if (!(kind == KIND_load ? plot_is_load : plot_is_timeline)(json))
        return report_error("%s: is nothing for --kind %s, which needs %s", files[0].path,
                            kinds[kind].name,
                            kind == KIND_load ? "\"loads\", or \"topk_ids\" with \"experts\""
                                              : "the \"traceEvents\" of megamoe trace");
    TRY(write_terminal(out, kind, title != NULL ? title : "", script));
    return (kind == KIND_load ? plot_load : plot_timeline)(&files[0], script);
}

static int write_script(const plot_file *files, int n, int kind, const char *out, FILE *script) {
    if (kind == UNKNOWN)
        kind = kind_of(files[0].json);
    if (kind == UNKNOWN)
        return report_error("%s: is no result of bench, no trace and no load of experts",
                            files[0].path);
    if (kind == KIND_load || kind == KIND_timeline)
        return write_of_one(files, n, kind, out, script);
    if (kind != KIND_ratio && plot_is_comparison(files[0].json))
        return report_error("%s: is a comparison, of which --kind ratio can be drawn",
                            files[0].path);
    plot_runs runs;
    int code = plot_runs_read(files, n, &runs);
    if (code == EXIT_DONE)
        code = write_terminal(out, kind, runs.title, script);
    if (code == EXIT_DONE)
        code = (kind == KIND_latency    ? plot_latency
                : kind == KIND_roofline ? plot_roofline
                                        : plot_ratio)(&runs, script);
    plot_runs_free(&runs);
    return code;
}

static int read_files(const char *const *paths, plot_file *files, int *n) {
    for (*n = 0; *n < OPTION_MAX_ARGUMENTS && paths[*n] != NULL; ++*n) {
        json_error_t error;
        if (ends_with(paths[*n], ".safetensors")) {
            files[*n].path = paths[*n];
            TRY(plot_read_routes(paths[*n], &files[*n].json));
            continue;
        }
        files[*n] = (plot_file){paths[*n], json_load_file(paths[*n], 0, &error)};
        if (files[*n].json == NULL)
            return report_json_error(paths[*n], &error);
    }
    return EXIT_DONE;
}

static int draw(const char *const *paths, int kind, const char *out) {
    plot_file files[OPTION_MAX_ARGUMENTS] = {{0}};
    int n = 0;
    FILE *script = tmpfile();
    int code = script != NULL ? read_files(paths, files, &n)
                              : report_error("plot: no temporary file can be made");
    if (code == EXIT_DONE)
        code = write_script(files, n, kind, out, script);
    if (code == EXIT_DONE)
        code = gnuplot_draw(script, out);
    for (int i = 0; i < OPTION_MAX_ARGUMENTS; i++)
        json_decref(files[i].json);
    if (script != NULL)
        fclose(script);
    return code;
}

int cmd_plot(int argc, char **argv) {
    const char *out = NULL;
    int kind = UNKNOWN;
    bool json = false;
    const option_spec options[] = {
        {"out", OPTION_TEXT, &out, "FILE", "the picture, .svg or .png", 0, 0},
        {"kind", OPTION_CHOICE, &kind, "latency|roofline|ratio|load|timeline",
         "of picture (what the first file holds)", 0, 0},
        OPTION_JSON(&json)};
    const command_syntax syntax = {"plot",
                                   "FILE...",
                                   "Draws what bench and trace have measured, with gnuplot.",
                                   "megamoe plot mxfp4.json nvfp4.json --out latency.svg",
                                   options,
                                   sizeof options / sizeof *options,
                                   1,
                                   OPTION_MAX_ARGUMENTS};
    const char *arguments[OPTION_MAX_ARGUMENTS];
    int code;
    if (!options_parse(&syntax, argc, argv, arguments, &code))
        return code;
    if (out == NULL)
        return report_error("plot: --out is missing");
    TRY(draw(arguments, kind, out));
    if (json)
        return report_json(json_pack("{s:s}", "picture", out));
    report_line("picture", "%s", out);
    return EXIT_DONE;
}
