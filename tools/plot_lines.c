/* SPDX-License-Identifier: Apache-2.0 */
/* Pictures of batch sizes: time and its floor, and the roofline. */
#include <math.h>

#include "plot.h"
#include "report.h"

enum { KEY_INSIDE = 4 }; /* runs: the key of more would hide lines */

/* The range of what a picture shows. */
typedef struct range {
    double low, high;
} range;

static void include(range *r, double value) {
    if (!(value > 0))
        return;
    r->low = r->low > 0 && r->low < value ? r->low : value;
    r->high = value > r->high ? value : r->high;
}

static void log_axis(FILE *script, char axis, range r, double margin) {
    fprintf(script, "set logscale %c\nset %crange [%.9g:%.9g]\n", axis, axis, r.low / margin,
            r.high * margin);
}

/* 1, 2 and 5 times powers of ten, or powers of two. */
static void log_tics(FILE *script, char axis, range r, bool binary) {
    fprintf(script, "set %ctics (", axis);
    const char *comma = "";
    for (int i = binary ? 0 : (int)floor(log10(r.low)); i < 40; i++) {
        static const int steps[] = {1, 2, 5};
        for (int k = 0; k < (binary ? 1 : 3); k++) {
            const double at = binary ? exp2(i) : steps[k] * pow(10, i);
            if (at < r.low / 1.3 || at > r.high * 1.3)
                continue;
            fprintf(script, "%s'%.9g' %.9g", comma, at, at);
            comma = ", ";
        }
    }
    fprintf(script, ")\n");
}

/* Numbers of each point that `columns` picks, as the data block NAME. */
static void block(FILE *script, const char *name, int i, const plot_series *s,
                  double x(const plot_point *), double y(const plot_point *)) {
    fprintf(script, "$%s%d << END\n", name, i);
    for (int k = 0; k < s->n; k++) {
        const double at = x(&s->points[k]), value = y(&s->points[k]);
        if (at > 0 && value > 0)
            fprintf(script, "%.9g %.9g %.9g\n", at, value, s->points[k].tokens);
    }
    fprintf(script, "END\n");
}

static double tokens_of(const plot_point *p) {
    return p->tokens;
}

static double us_of(const plot_point *p) {
    return p->us;
}

static double floor_of(const plot_point *p) {
    return p->floor_us;
}

static double public_of(const plot_point *p) {
    return p->public_us;
}

static double target_of(const plot_point *p) {
    return p->target_us;
}

static bool any(const plot_series *s, double y(const plot_point *)) {
    for (int k = 0; k < s->n; k++)
        if (y(&s->points[k]) > 0)
            return true;
    return false;
}

/* ---- latency ---- */

/* Whether two runs have the same floor, but for what ceilings vary between them. */
static bool same_floor(const plot_series *a, const plot_series *b) {
    if (a->n != b->n)
        return false;
    for (int k = 0; k < a->n; k++)
        if (a->points[k].tokens != b->points[k].tokens ||
            !(fabs(a->points[k].floor_us / b->points[k].floor_us - 1) < 0.03))
            return false;
    return true;
}

static bool is_new_floor(const plot_runs *runs, int i) {
    for (int k = 0; k < i; k++)
        if (same_floor(&runs->series[k], &runs->series[i]))
            return false;
    return any(&runs->series[i], floor_of);
}

/* The first run that has public numbers, or -1: those of all runs of a shape are the same. */
static int first_with(const plot_runs *runs, double y(const plot_point *)) {
    for (int i = 0; i < runs->n; i++)
        if (any(&runs->series[i], y))
            return i;
    return -1;
}

int plot_latency(const plot_runs *runs, FILE *script) {
    range x = {0}, y = {0};
    for (int i = 0; i < runs->n; i++) {
        const plot_series *s = &runs->series[i];
        for (int k = 0; k < s->n; k++) {
            include(&x, s->points[k].tokens);
            include(&y, s->points[k].us);
            include(&y, s->points[k].floor_us);
            include(&y, s->points[k].public_us);
            include(&y, s->points[k].target_us);
        }
        block(script, "time", i, s, tokens_of, us_of);
        block(script, "floor", i, s, tokens_of, floor_of);
        block(script, "public", i, s, tokens_of, public_of);
        block(script, "target", i, s, tokens_of, target_of);
    }
    log_axis(script, 'x', x, 1.15);
    log_axis(script, 'y', y, 1.3);
    log_tics(script, 'x', x, true);
    log_tics(script, 'y', y, false);
    fprintf(
        script, "set key %s reverse Left\nset xlabel 'tokens'\nset ylabel 'microseconds'\nplot ",
        runs->n <= KEY_INSIDE ? "top left" : "outside top center horizontal maxcols 2 samplen 2");
    for (int i = 0; i < runs->n; i++) {
        const plot_series *s = &runs->series[i];
        fprintf(script, "%s$time%d using 1:2 with linespoints lw 2 lc rgb '%s' pt %d ps 0.8 title ",
                i > 0 ? ", " : "", i, plot_colour(i), plot_point_type(i));
        plot_quote(script, s->label);
        if (!is_new_floor(runs, i))
            continue;
        fprintf(script, ", $floor%d using 1:2 with lines lw 1.5 dt %s lc rgb '%s' title ", i,
                plot_dashes(i), plot_colour(i));
        char label[PLOT_LABEL_BYTES + 16];
        snprintf(label, sizeof label, "floor of %s", s->label);
        plot_quote(script, label);
    }
    const int known = first_with(runs, public_of), aimed = first_with(runs, target_of);
    if (known >= 0)
        fprintf(script,
                ", $public%d using 1:2 with points pt 2 ps 1.2 lw 2 lc rgb '#222222' "
                "title 'published'",
                known);
    if (aimed >= 0)
        fprintf(script,
                ", $target%d using 1:2 with points pt 6 ps 1.2 lc rgb '#222222' title 'target'",
                aimed);
    fprintf(script, "\n");
    return EXIT_DONE;
}

/* ---- roofline ---- */

/* Operations for each byte of weights read. */
static double intensity_of(const plot_point *p) {
    return 1e3 * p->tflops / p->weight_gbs;
}

static double tflops_of(const plot_point *p) {
    return p->tflops;
}

static double gflops_of(const plot_point *p) {
    return 1e3 * p->tflops;
}

static bool is_new_roof(const plot_runs *runs, int i) {
    const plot_series *s = &runs->series[i];
    for (int k = 0; k < i; k++)
        if (fabs(runs->series[k].read_gbs / s->read_gbs - 1) < 0.03 &&
            fabs(runs->series[k].tflops / s->tflops - 1) < 0.03)
            return false;
    return true;
}

int plot_roofline(const plot_runs *runs, FILE *script) {
    range x = {0}, y = {0};
    double fastest = 0;
    for (int i = 0; i < runs->n; i++) {
        const plot_series *s = &runs->series[i];
        if (!(s->read_gbs > 0) || !(s->tflops > 0))
            return report_error("plot: the run \"%s\" does not tell the ceilings of its device",
                                s->label);
        fastest = s->tflops > fastest ? s->tflops : fastest;
    }
    const bool small = fastest < 10;
    const double unit = small ? 1e3 : 1;
    for (int i = 0; i < runs->n; i++) {
        const plot_series *s = &runs->series[i];
        for (int k = 0; k < s->n; k++) {
            include(&x, intensity_of(&s->points[k]));
            include(&y, unit * s->points[k].tflops);
        }
        include(&x, 1e3 * s->tflops / s->read_gbs);
        include(&y, unit * s->tflops);
        block(script, "run", i, s, intensity_of, small ? gflops_of : tflops_of);
    }
    log_axis(script, 'x', x, 1.6);
    log_axis(script, 'y', y, 1.5);
    log_tics(script, 'x', x, false);
    log_tics(script, 'y', y, false);
    fprintf(script,
            "set samples 400\nset key bottom right\nset xlabel 'operations per byte of weights'\n"
            "set ylabel '%sFLOP/s'\nsmaller(a, b) = a < b ? a : b\nplot ",
            small ? "G" : "T");
    for (int i = 0; i < runs->n; i++) {
        const plot_series *s = &runs->series[i];
        if (is_new_roof(runs, i))
            fprintf(script,
                    "smaller(%.9g * x, %.9g) with lines lw 1.5 dt %s lc rgb '%s' title "
                    "'roof: %.0f GB/s, %.0f %sFLOP/s', ",
                    unit * s->read_gbs / 1e3, unit * s->tflops, plot_dashes(i), plot_colour(i),
                    s->read_gbs, unit * s->tflops, small ? "G" : "T");
        fprintf(script, "$run%d using 1:2 with linespoints lw 2 lc rgb '%s' pt %d ps 0.8 title ", i,
                plot_colour(i), plot_point_type(i));
        plot_quote(script, s->label);
        fprintf(script, ", ");
    }
    fprintf(script, "$run0 using 1:2:3 with labels offset -0.5,0.7 right font ',9' "
                    "title 'numbers: tokens'");
    fprintf(script, "\n");
    return EXIT_DONE;
}
