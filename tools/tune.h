/* SPDX-License-Identifier: Apache-2.0 */
/*
 * megamoe tune: which plan of a forward is the fastest for how many tokens. From cmd_tune.c: plans
 * are measured (tune_measure.c), printed (tune_report.c) and stored; or what is stored is shown
 * (tune_cache.c).
 */
#ifndef TUNE_H
#define TUNE_H

#include <megamoe/tune.h>

#include "bench.h"
#include "statistics.h"

enum { TUNE_MAX_CANDIDATES = 128, TUNE_PATH_BYTES = 4096 };

typedef struct tune_candidate {
    megamoe_plan plan;
    bool same;    /* its output has the bits of the built-in choice's */
    int rounds;   /* in which it was measured; 0: not at all */
    double us;    /* median over those rounds */
    double ratio; /* median of the paired ratios, time of the built-in choice / its time */
} tune_candidate;

/* One number of tokens. */
typedef struct tune_point {
    int64_t tokens;
    bench_work work;
    int n;
    tune_candidate candidates[TUNE_MAX_CANDIDATES]; /* the built-in choice first */
    int best;                                       /* index of the fastest */
    statistics_interval gain; /* of it, measured anew beside the built-in choice */
    double default_us, us;    /* meanwhile */
    bool wins;                /* the gain is outside of the noise */
} tune_point;

typedef struct tune {
    bench *b; /* with one arm, whose layer and workspace are tuned */
    int64_t rounds, iterations;
    char path[TUNE_PATH_BYTES]; /* of the file of plans */
    bool json, dry_run;
    megamoe_tuned_key key;
    tune_point points[BENCH_MAX_POINTS];
} tune;

/* Which entries of the file. Zeros and NULL are all. */
typedef struct tune_filter {
    const bench_geometry *geometry;
    megamoe_format format;
    int64_t capacity;
    const char *routing;
} tune_filter;

/* Functions below return an exit code; they have printed their error. */

/* Lists the candidates of all points, and measures them unless this is a dry run. */
int tune_measure(tune *t);

/* The result, a row or an object for each point. */
int tune_print(const tune *t);

/* What stands in the file, and removing it. */
int tune_show(const char *path, const tune_filter *filter, bool json);
int tune_forget(const char *path, const tune_filter *filter, bool json);

/* NULL: out of memory. */
json_t *tune_key_json(const megamoe_tuned_key *key);
/* "8192 tokens ..., " one line of text. */
void tune_print_key(const megamoe_tuned_key *key);
/* "13" or "all". Returns `text`. */
enum { TUNE_LAG_BYTES = 16 };
const char *tune_lag(int32_t lag, char text[TUNE_LAG_BYTES]);

#endif
