/* SPDX-License-Identifier: Apache-2.0 */
/* Pictures of what other commands have written as JSON: each kind writes a script for gnuplot. */
#ifndef PLOT_H
#define PLOT_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

enum { PLOT_SERIES_MAX = 12, PLOT_LABEL_BYTES = 192 };

typedef struct plot_file {
    const char *path;
    json_t *json;
} plot_file;

/* NAN where a file does not say. */
typedef struct plot_point {
    double tokens;
    double us, floor_us;         /* median of a forward; what it cannot be faster than */
    double public_us, target_us; /* of public kernels; aimed at */
    double tflops, weight_gbs;
    double gain, gain_low, gain_high; /* another arm's time by this one's, in pairs */
} plot_point;

/* A line of a picture: the batch sizes of one arm. */
typedef struct plot_series {
    char label[PLOT_LABEL_BYTES];
    plot_point *points;
    int n;
    double read_gbs, tflops; /* ceilings of the device in the same run, or NAN */
} plot_series;

typedef struct plot_runs {
    plot_series series[PLOT_SERIES_MAX];
    int n;
    char title[256];
    char gains[PLOT_LABEL_BYTES + 64]; /* what gains are, in words */
} plot_runs;

/* Whether a file holds what `bench` has measured, of one arm or of several, or `compare`. */
bool plot_is_bench(const json_t *json);
bool plot_is_comparison(const json_t *json);

/*
 * Reads results of `bench`, every arm as a line of its own, or of one file of `compare`, whose
 * points have gains only. Returns an exit code; plot_runs_free in any case.
 */
int plot_runs_read(const plot_file *files, int n, plot_runs *runs);
void plot_runs_free(plot_runs *runs);

/* The kinds. They write a script and return an exit code. `load` and `timeline` take one file. */
int plot_latency(const plot_runs *runs, FILE *script);
int plot_roofline(const plot_runs *runs, FILE *script);
int plot_ratio(const plot_runs *runs, FILE *script);
bool plot_is_load(const json_t *json);
int plot_load(const plot_file *file, FILE *script);
/* The "topk_ids" of a safetensors file as such JSON. Prints its error, returns an exit code. */
int plot_read_routes(const char *path, json_t **json);
bool plot_is_timeline(const json_t *json);
int plot_timeline(const plot_file *file, FILE *script);

/* 'text' as a string of gnuplot, in which nothing has a meaning. */
void plot_quote(FILE *script, const char *text);

/* Lines of all series are told apart by these, in colour and without. */
const char *plot_colour(int series);
const char *plot_dashes(int series);
int plot_point_type(int series);
int plot_pattern(int series);

/* A number at `keys` "a.b", of an array the mean; else NAN. */
double plot_number(const json_t *json, const char *keys);

#endif
