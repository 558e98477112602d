/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How many routes the experts have received: a heat map of experts by rank, layer, step or whatever
 * the rows are; bars where there is one row. From "loads", one number an expert or rows of them, or
 * from recorded routes, "topk_ids" of each token with the number of "experts".
 */
#include <stdlib.h>
#include <string.h>

#include "plot.h"
#include "report.h"

enum { ROWS_MAX = 4096, EXPERTS_MAX = 65536, BANDS_MAX = 64 };

typedef struct load {
    int rows, experts;
    double *routes; /* [rows][experts] */
    char what[64];  /* the rows are */
} load;

bool plot_is_load(const json_t *json) {
    return json_is_array(json_object_get(json, "loads")) ||
           json_is_array(json_object_get(json, "topk_ids"));
}

static int make(load *l, size_t rows, size_t experts, const char *path) {
    if (rows < 1 || rows > ROWS_MAX || experts < 1 || experts > EXPERTS_MAX)
        return report_error("%s: %zu rows of %zu experts; expected 1..%d and 1..%d", path, rows,
                            experts, ROWS_MAX, EXPERTS_MAX);
    l->rows = (int)rows;
    l->experts = (int)experts;
    l->routes = calloc(rows * experts, sizeof *l->routes);
    return l->routes != NULL ? EXIT_DONE : report_error("out of memory");
}

static int read_row(const json_t *row, const char *path, int r, load *l) {
    if (json_array_size(row) != (size_t)l->experts)
        return report_error("%s: row %d of \"loads\" has %zu experts; the first has %d", path, r,
                            json_array_size(row), l->experts);
    for (int e = 0; e < l->experts; e++) {
        const json_t *routes = json_array_get(row, (size_t)e);
        if (!json_is_number(routes) || json_number_value(routes) < 0)
            return report_error("%s: expert %d in row %d of \"loads\" is not a number from 0", path,
                                e, r);
        l->routes[r * l->experts + e] = json_number_value(routes);
    }
    return EXIT_DONE;
}

static int read_loads(const json_t *loads, const char *path, load *l) {
    const json_t *first = json_array_get(loads, 0);
    if (!json_is_array(first)) {
        TRY(make(l, 1, json_array_size(loads), path));
        return read_row(loads, path, 0, l);
    }
    TRY(make(l, json_array_size(loads), json_array_size(first), path));
    for (int r = 0; r < l->rows; r++)
        TRY(read_row(json_array_get(loads, (size_t)r), path, r, l));
    return EXIT_DONE;
}

/* Consecutive tokens make up a row, so that what changes in time shows. */
static int read_routes(const json_t *json, const char *path, load *l) {
    const json_t *tokens = json_object_get(json, "topk_ids");
    const size_t n = json_array_size(tokens);
    const json_int_t experts = json_integer_value(json_object_get(json, "experts"));
    if (experts < 1)
        return report_error("%s: recorded routes need \"experts\", their number", path);
    TRY(make(l, n < BANDS_MAX ? n : BANDS_MAX, (size_t)experts, path));
    snprintf(l->what, sizeof l->what, "%s", n > BANDS_MAX ? "tokens, in bands" : "token");
    for (size_t t = 0; t < n; t++) {
        const json_t *ids = json_array_get(tokens, t);
        for (size_t k = 0; k < json_array_size(ids); k++) {
            const json_t *id = json_array_get(ids, k);
            const json_int_t e = json_is_integer(id) ? json_integer_value(id) : experts;
            if (e < -1 || e >= experts)
                return report_error("%s: token %zu, slot %zu of \"topk_ids\" is no expert from -1 "
                                    "to %" JSON_INTEGER_FORMAT,
                                    path, t, k, experts - 1);
            if (e >= 0)
                l->routes[t * (size_t)l->rows / n * (size_t)l->experts + (size_t)e]++;
        }
    }
    return EXIT_DONE;
}

static void write_bars(const load *l, FILE *script) {
    double sum = 0;
    fprintf(script, "$bars << END\n");
    for (int e = 0; e < l->experts; e++) {
        fprintf(script, "%d %.9g\n", e, l->routes[e]);
        sum += l->routes[e];
    }
    fprintf(script,
            "END\nset xrange [-1:%d]\nset yrange [0:*]\nset xlabel 'expert'\n"
            "set ylabel 'routes'\nset key top right\nset grid noxtics\nset boxwidth 0.8\n"
            "plot $bars using 1:2 with boxes fs solid 0.55 border lt -1 lc rgb '%s' notitle, "
            "%.9g with lines lw 2 dt (8,4) lc rgb '#222222' title 'even share'\n",
            l->experts, plot_colour(0), sum / l->experts);
}

static void write_map(const load *l, FILE *script) {
    fprintf(script, "$map << END\n");
    for (int r = 0; r < l->rows; r++)
        for (int e = 0; e < l->experts; e++)
            fprintf(script, "%.9g%c", l->routes[r * l->experts + e],
                    e + 1 < l->experts ? ' ' : '\n');
    /* Brightness alone tells: white is nothing, the darkest is the most. */
    fprintf(script,
            "END\nset palette defined (0 '#ffffff', 0.5 '#6f9fc8', 1 '#0a2540')\n"
            "set cbrange [0:*]\nset cblabel 'routes'\nset xrange [-0.5:%d.5]\n"
            "set yrange [%d.5:-0.5]\nset xlabel 'expert'\nset ylabel ",
            l->experts - 1, l->rows - 1);
    plot_quote(script, l->what);
    fprintf(script,
            "\nunset key\nset grid noxtics noytics\nset tics out nomirror\n%s"
            "plot $map matrix using 1:2:3 with image pixels notitle\n",
            l->rows <= 16 ? "set ytics 1\n" : "");
}

int plot_load(const plot_file *file, FILE *script) {
    const json_t *loads = json_object_get(file->json, "loads");
    const char *rows = json_string_value(json_object_get(file->json, "rows"));
    load l = {.rows = 0};
    snprintf(l.what, sizeof l.what, "%s", rows != NULL ? rows : "row");
    const int code = json_is_array(loads) ? read_loads(loads, file->path, &l)
                                          : read_routes(file->json, file->path, &l);
    if (code == EXIT_DONE)
        (l.rows == 1 ? write_bars : write_map)(&l, script);
    free(l.routes);
    return code;
}
