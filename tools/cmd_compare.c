/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe compare: the times of two results of `megamoe bench --json`, point by point. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_result.h"
#include "commands.h"
#include "options.h"
#include "report.h"
#include "statistics.h"

enum { BOOTSTRAP_DRAWS = 2000 };

typedef struct file {
    const char *path;
    json_t *result;
} file;

/* How an interval was found; the words of the output. */
static const char by_rounds[] = "rounds", by_bootstrap[] = "bootstrap", by_medians[] = "medians";

/* ---- Reading ---- */

static bool has_good_rounds(const json_t *point) {
    size_t n;
    double *us = result_numbers(point, "rounds_us", &n);
    bool good = true;
    for (size_t i = 0; us != NULL && i < n; i++)
        good = good && us[i] > 0;
    free(us);
    return good;
}

static int check_arm(const file *f, const json_t *arm) {
    const json_t *points = json_object_get(arm, "points");
    if (json_array_size(points) == 0)
        return report_error("%s: is no result of megamoe bench --json: it has no points", f->path);
    size_t i;
    const json_t *p;
    json_array_foreach(points, i, p) {
        if (!(result_median_us(p) > 0) || !(result_number(p, "tokens") > 0))
            return report_error("%s: point %zu has no time of a forward", f->path, i);
        if (!has_good_rounds(p))
            return report_error("%s: point %zu has rounds_us that are no times", f->path, i);
    }
    return EXIT_DONE;
}

static int open_file(file *f) {
    json_error_t error;
    f->result = json_load_file(f->path, 0, &error);
    if (f->result == NULL)
        return report_json_error(f->path, &error);
    if (result_arms(f->result) == 0)
        return report_error("%s: \"arms\" is empty or no array", f->path);
    for (size_t i = 0; i < result_arms(f->result); i++) {
        json_t *arm = result_arm(f->result, i);
        const int code = check_arm(f, arm);
        json_decref(arm);
        TRY(code);
    }
    return EXIT_DONE;
}

/* ---- What is compared ---- */

/* What makes times of two layers no measure of each other. */
static int check_geometry(const file *a, const file *b) {
    static const char *const fields[] = {"hidden", "intermediate", "experts", "topk"};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        const double x = result_number(a->result, fields[i]);
        const double y = result_number(b->result, fields[i]);
        if (x != y)
            return report_error("compare: %s has %s %.0f, %s %.0f; expected one geometry", a->path,
                                fields[i], x, b->path, y);
    }
    return EXIT_DONE;
}

/* What else two arms may differ in: {field: [of A, of B]}. */
static json_t *differences(const json_t *a, const json_t *b) {
    static const char *const fields[] = {
        "model",  "device",      "tier",       "threads",     "ranks",      "format",
        "nvfp4",  "activations", "accumulate", "input_scale", "token_tile", "lag",
        "l2",     "launch",      "capacity",   "live",        "seed",       "version",
        "commit", "routing",     "iterations", "warm_ups",    "processes"};
    json_t *found = json_object();
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        json_t *x = json_object_get(a, fields[i]), *y = json_object_get(b, fields[i]);
        if ((x == NULL && y == NULL) || (x != NULL && y != NULL && json_equal(x, y)))
            continue;
        json_object_set_new(found, fields[i],
                            json_pack("[o, o]", x != NULL ? json_incref(x) : json_null(),
                                      y != NULL ? json_incref(y) : json_null()));
    }
    return found;
}

/* The arm of that name; of two results with one arm each it is that. A new reference, or NULL. */
static json_t *partner_of(const json_t *arm, const file *a, const file *b) {
    if (result_arms(a->result) == 1 && result_arms(b->result) == 1)
        return result_arm(b->result, 0);
    for (size_t i = 0; i < result_arms(b->result); i++) {
        json_t *other = result_arm(b->result, i);
        if (strcmp(result_text(other, "arm"), result_text(arm, "arm")) == 0)
            return other;
        json_decref(other);
    }
    return NULL;
}

static const json_t *point_of(const json_t *arm, double tokens) {
    size_t i;
    const json_t *p;
    json_array_foreach(json_object_get(arm, "points"), i, p) {
        if (result_number(p, "tokens") == tokens)
            return p;
    }
    return NULL;
}

/* Rounds have the same batches and arms beside them in both. */
static bool same_rounds(const json_t *a, const json_t *b) {
    static const char *const fields[] = {"seed", "iterations", "warm_ups", "processes", "live"};
    if (result_arms(a) != result_arms(b))
        return false;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (result_number(a, fields[i]) != result_number(b, fields[i]))
            return false;
    if (strcmp(result_text(a, "routing"), result_text(b, "routing")) != 0)
        return false;
    for (size_t i = 0; i < result_arms(a) && result_arms(a) > 1; i++) {
        const json_t *x = json_array_get(json_object_get(a, "arms"), i);
        const json_t *y = json_array_get(json_object_get(b, "arms"), i);
        if (strcmp(result_text(x, "arm"), result_text(y, "arm")) != 0)
            return false;
    }
    return true;
}

/* ---- Comparing ---- */

/* Of p's times to q's. `pairs`: their rounds may be paired. */
static int find_ratio(const json_t *p, const json_t *q, bool pairs, uint64_t seed,
                      statistics_interval *ratio, const char **how) {
    size_t n, m;
    double *a = result_numbers(p, "rounds_us", &n), *b = result_numbers(q, "rounds_us", &m);
    bool good = true;
    if (a == NULL || b == NULL || n == 0 || m == 0) {
        const double one = result_median_us(q) / result_median_us(p);
        *how = by_medians;
        *ratio = (statistics_interval){one, one, one, 0};
    } else if (pairs && n == m) {
        for (size_t i = 0; i < n; i++)
            b[i] /= a[i];
        *how = by_rounds;
        *ratio = statistics_of_pairs(b, n, RESULT_CONFIDENCE);
    } else {
        *how = by_bootstrap;
        good = statistics_of_medians(a, n, b, m, RESULT_CONFIDENCE, BOOTSTRAP_DRAWS, seed, ratio);
    }
    free(a);
    free(b);
    return good ? EXIT_DONE : report_error("compare: out of memory");
}

typedef struct comparison {
    file a, b;
    double fail_above; /* percent; negative: nothing fails */
    json_t *points, *arms;
    int64_t failed;
} comparison;

static int compare_point(comparison *c, const char *name, const json_t *p, const json_t *q) {
    statistics_interval ratio;
    const char *how;
    TRY(find_ratio(p, q, same_rounds(c->a.result, c->b.result),
                   (uint64_t)result_number(c->a.result, "seed"), &ratio, &how));
    const bool failed = c->fail_above >= 0 && ratio.low > 1 + c->fail_above / 100;
    const char *verdict = ratio.low > 1 ? "slower" : ratio.high < 1 ? "faster" : "same";
    c->failed += failed;
    json_array_append_new(
        c->points, json_pack("{s:s, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:s, s:s, s:b}", "arm", name,
                             "tokens", (json_int_t)result_number(p, "tokens"), "a_us",
                             result_median_us(p), "b_us", result_median_us(q), "ratio",
                             ratio.median, "low", ratio.low, "high", ratio.high, "confidence",
                             ratio.confidence, "method", how, "b_is", verdict, "failed", failed));
    return EXIT_DONE;
}

static int compare_arms(comparison *c, const json_t *x, const json_t *y) {
    const char *name = result_has(x, "arm") ? result_text(x, "arm") : "base";
    json_array_append_new(c->arms,
                          json_pack("{s:s, s:o}", "arm", name, "differs", differences(x, y)));
    size_t i;
    const json_t *p;
    json_array_foreach(json_object_get(x, "points"), i, p) {
        const json_t *q = point_of(y, result_number(p, "tokens"));
        if (q != NULL)
            TRY(compare_point(c, name, p, q));
    }
    return EXIT_DONE;
}

static int compare(comparison *c) {
    TRY(open_file(&c->a));
    TRY(open_file(&c->b));
    TRY(check_geometry(&c->a, &c->b));
    for (size_t i = 0; i < result_arms(c->a.result); i++) {
        json_t *x = result_arm(c->a.result, i), *y = partner_of(x, &c->a, &c->b);
        const int code = y != NULL ? compare_arms(c, x, y) : EXIT_DONE;
        json_decref(x);
        json_decref(y);
        TRY(code);
    }
    if (json_array_size(c->points) == 0)
        return report_error("compare: %s and %s have no arm and batch size in common", c->a.path,
                            c->b.path);
    return EXIT_DONE;
}

/* ---- Printing ---- */

static void print_differences(const comparison *c) {
    size_t i;
    const json_t *arm;
    json_array_foreach(c->arms, i, arm) {
        const char *field;
        json_t *both;
        json_object_foreach(json_object_get(arm, "differs"), field, both) {
            char *x = json_dumps(json_array_get(both, 0), JSON_ENCODE_ANY);
            char *y = json_dumps(json_array_get(both, 1), JSON_ENCODE_ANY);
            report_line(i == 0 ? "differs" : "", "%s: %s in A, %s in B (%s)", field,
                        x != NULL ? x : "?", y != NULL ? y : "?", result_text(arm, "arm"));
            free(x);
            free(y);
        }
    }
}

static void print_text(const comparison *c) {
    report_line("A", "%s, %s", c->a.path, result_text(c->a.result, "date"));
    report_line("B", "%s, %s", c->b.path, result_text(c->b.result, "date"));
    print_differences(c);
    printf("\n%7s %11s %11s %8s %8s %8s %8s %-9s %-7s %s\n", "tokens", "A us", "B us", "B by A",
           "from", "to", "confid.", "by", "B is", "arm");
    size_t i;
    const json_t *p;
    json_array_foreach(c->points, i, p) {
        printf("%7.0f %11.1f %11.1f %8.4f %8.4f %8.4f %6.1f %% %-9s %-7s %s%s\n",
               result_number(p, "tokens"), result_number(p, "a_us"), result_number(p, "b_us"),
               result_number(p, "ratio"), result_number(p, "low"), result_number(p, "high"),
               100 * result_number(p, "confidence"), result_text(p, "method"),
               result_text(p, "b_is"), result_text(p, "arm"),
               json_is_true(json_object_get(p, "failed")) ? "  FAILED" : "");
    }
    printf("\n");
    report_line(by_rounds, "median of the ratios of rounds that had the same batches");
    report_line(by_bootstrap, "ratio of medians, %d samples with replacement", BOOTSTRAP_DRAWS);
    report_line(by_medians, "ratio of medians of files without rounds: no interval");
}

static int print_json(const comparison *c) {
    json_t *object = json_pack("{s:s, s:s, s:O, s:O, s:I}", "a", c->a.path, "b", c->b.path, "arms",
                               c->arms, "points", c->points, "failed", (json_int_t)c->failed);
    if (object != NULL && c->fail_above >= 0)
        json_object_set_new(object, "fail_above_percent", json_real(c->fail_above));
    return report_json(object);
}

int cmd_compare(int argc, char **argv) {
    comparison c = {.fail_above = -1};
    bool json = false;
    const option_spec options[] = {{"fail-above", OPTION_NUMBER, &c.fail_above, "PERCENT",
                                    "exit with 1 where B is surely slower by more", 0, 1e6},
                                   OPTION_JSON(&json)};
    const command_syntax syntax = {"compare",
                                   "FILE FILE",
                                   "Compares two results of bench --json, A and B.",
                                   "megamoe compare before.json after.json --fail-above 3",
                                   options,
                                   sizeof options / sizeof *options,
                                   2,
                                   2};
    const char *arguments[OPTION_MAX_ARGUMENTS];
    int code;
    if (!options_parse(&syntax, argc, argv, arguments, &code))
        return code;
    c.a.path = arguments[0];
    c.b.path = arguments[1];
    c.points = json_array();
    c.arms = json_array();
    code = compare(&c);
    if (code == EXIT_DONE && json)
        code = print_json(&c);
    else if (code == EXIT_DONE)
        print_text(&c);
    if (code == EXIT_DONE && c.failed > 0) {
        report_error("compare: B is slower by more than %g %% at %" PRId64 " of %zu points",
                     c.fail_above, c.failed, json_array_size(c.points));
        code = EXIT_CHECK_FAILED;
    }
    json_decref(c.points);
    json_decref(c.arms);
    json_decref(c.a.result);
    json_decref(c.b.result);
    return code;
}
