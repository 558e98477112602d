/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What each thread block, or thread, was doing during one forward, from the Chrome trace that
 * `megamoe trace` writes. A row is a worker; its teams share the row's height.
 */
#include <stdlib.h>
#include <string.h>

#include "plot.h"
#include "report.h"

/* X(category, what the key says, colour): from light to dark as far as they can meet. */
#define CATEGORIES(X)                                                                              \
    X("count", "count, agree", "#d8d8d8")                                                          \
    X("dispatch", "dispatch", "#c98a3c")                                                           \
    X("fc1", "FC1", "#174f86")                                                                     \
    X("fc2", "FC2", "#9fcdec")                                                                     \
    X("combine", "combine", "#000000")

static const struct {
    const char *name, *title, *colour;
} categories[] = {
#define X(name, title, colour) {name, title, colour},
    CATEGORIES(X)
#undef X
};

enum { APART = 1000 /* spans */ };

enum { CATEGORY_COUNT = sizeof categories / sizeof *categories, NONE = -1 };

typedef struct span {
    double begin, end;
    int category;
    json_int_t process, worker;
    int team, row;
} span;

typedef struct timeline {
    span *spans;
    size_t n;
    int rows, teams;
    bool several; /* processes */
} timeline;

bool plot_is_timeline(const json_t *json) {
    return json_is_array(json_object_get(json, "traceEvents"));
}

static int category_of(const json_t *event) {
    const char *phase = json_string_value(json_object_get(event, "ph"));
    const char *name = json_string_value(json_object_get(event, "cat"));
    if (phase == NULL || name == NULL || strcmp(phase, "X") != 0)
        return NONE;
    for (int i = 0; i < CATEGORY_COUNT; i++)
        if (strcmp(categories[i].name, name) == 0)
            return i;
    return NONE;
}

static int read_spans(const json_t *events, const char *path, timeline *t) {
    t->spans = calloc(json_array_size(events) + 1, sizeof *t->spans);
    if (t->spans == NULL)
        return report_error("out of memory");
    for (size_t i = 0; i < json_array_size(events); i++) {
        const json_t *event = json_array_get(events, i);
        const json_t *arguments = json_object_get(event, "args");
        const json_t *worker = json_object_get(arguments, "worker");
        span s = {.category = category_of(event), .team = NONE};
        if (s.category == NONE)
            continue;
        const double begin = plot_number(event, "ts"), lasts = plot_number(event, "dur");
        if (!(lasts >= 0) || !(begin == begin))
            return report_error("%s: event %zu has no \"ts\" or no \"dur\"", path, i);
        s.begin = begin;
        s.end = begin + lasts;
        s.process = json_integer_value(json_object_get(event, "pid"));
        s.worker = json_integer_value(worker != NULL ? worker : json_object_get(event, "tid"));
        if (json_is_integer(json_object_get(arguments, "team")))
            s.team = (int)json_integer_value(json_object_get(arguments, "team"));
        t->teams = s.team >= t->teams ? s.team + 1 : t->teams;
        t->spans[t->n++] = s;
    }
    return t->n > 0
               ? EXIT_DONE
               : report_error("%s: has no spans of a forward; megamoe trace writes them", path);
}

static int by_worker(const void *a, const void *b) {
    const span *x = a, *y = b;
    if (x->process != y->process)
        return x->process < y->process ? -1 : 1;
    if (x->worker != y->worker)
        return x->worker < y->worker ? -1 : 1;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

static void number_rows(timeline *t) {
    qsort(t->spans, t->n, sizeof *t->spans, by_worker);
    for (size_t i = 0; i < t->n; i++) {
        const span *before = i > 0 ? &t->spans[i - 1] : NULL;
        if (before != NULL && before->process != t->spans[i].process)
            t->several = true;
        if (before == NULL || before->process != t->spans[i].process ||
            before->worker != t->spans[i].worker)
            t->rows++;
        t->spans[i].row = t->rows - 1;
    }
}

/* x, y and the corners of a span's box. */
static void write_spans(const timeline *t, int category, FILE *script) {
    fprintf(script, "$spans%d << END\n", category);
    for (size_t i = 0; i < t->n; i++) {
        const span *s = &t->spans[i];
        if (s->category != category)
            continue;
        const double gap = t->rows <= 64 ? 0.06 : 0;
        double low = s->row - 0.5 + gap, high = s->row + 0.5 - gap;
        if (s->team != NONE && t->teams > 1) {
            const double share = (high - low) / t->teams;
            low += s->team * share;
            high = low + share;
        }
        fprintf(script, "%.9g %.9g %.9g %.9g %.9g %.9g\n", (s->begin + s->end) / 2,
                (low + high) / 2, s->begin, s->end, low, high);
    }
    fprintf(script, "END\n");
}

/* The rows of several processes have the ranks' names in the middle, and lines between them. */
static void write_ranks(const timeline *t, FILE *script) {
    const char *comma = "set ytics (";
    for (size_t i = 0, begin = 0; i < t->n; i++) {
        if (i + 1 < t->n && t->spans[i + 1].process == t->spans[i].process)
            continue;
        const double first = t->spans[begin].row, last = t->spans[i].row;
        fprintf(script, "%s'rank %" JSON_INTEGER_FORMAT "' %.9g", comma, t->spans[i].process,
                (first + last) / 2);
        comma = ", ";
        begin = i + 1;
    }
    fprintf(script, ")\n");
    for (size_t i = 1; i < t->n; i++)
        if (t->spans[i].process != t->spans[i - 1].process)
            fprintf(script,
                    "set arrow from graph 0, first %.9g to graph 1, first %.9g nohead front\n",
                    t->spans[i].row - 0.5, t->spans[i].row - 0.5);
}

static void write_axes(const timeline *t, const json_t *json, FILE *script) {
    double end = 0;
    for (size_t i = 0; i < t->n; i++)
        end = t->spans[i].end > end ? t->spans[i].end : end;
    const char *worker = json_string_value(json_object_get(json, "workers"));
    fprintf(script,
            "set xrange [0:%.9g]\nset yrange [%d.5:-0.5]\nset xlabel 'microseconds'\nset ylabel ",
            end > 0 ? end * 1.01 : 1, t->rows - 1);
    plot_quote(script, t->several ? "" : worker != NULL ? worker : "worker");
    fprintf(script, "\nset tics out nomirror\nset grid noytics\nset key outside top center "
                    "horizontal\n");
    /* Few tiles are kept apart. */
    fprintf(script, "set style fill solid 1 %s\n",
            t->n <= APART ? "border lc rgb '#ffffff'" : "noborder");
    if (t->several)
        write_ranks(t, script);
    else if (t->rows <= 16)
        fprintf(script, "set ytics 1\n");
}

int plot_timeline(const plot_file *file, FILE *script) {
    timeline t = {.n = 0};
    const int code = read_spans(json_object_get(file->json, "traceEvents"), file->path, &t);
    if (code == EXIT_DONE) {
        number_rows(&t);
        for (int i = 0; i < CATEGORY_COUNT; i++)
            write_spans(&t, i, script);
        write_axes(&t, file->json, script);
        const char *comma = "plot";
        for (int i = 0; i < CATEGORY_COUNT; i++) {
            bool any = false;
            for (size_t k = 0; k < t.n && !any; k++)
                any = t.spans[k].category == i;
            if (!any)
                continue;
            fprintf(script,
                    "%s $spans%d using 1:2:3:4:5:6 with boxxyerror lw 0.4 lc rgb '%s' title '%s'",
                    comma, i, categories[i].colour, categories[i].title);
            comma = ",";
        }
        fprintf(script, "\n");
    }
    free(t.spans);
    return code;
}
