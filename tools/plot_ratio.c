/* SPDX-License-Identifier: Apache-2.0 */
/* Bars: how many times faster than public kernels, than another arm, or than the first file. */
#include <math.h>

#include "plot.h"
#include "report.h"

enum { SIZES_MAX = 64, LABELLED_BARS = 48 };

/* What bars are ratios to. */
typedef enum basis { OF_PUBLIC, OF_PAIRS, OF_FIRST } basis;

static bool has(const plot_runs *runs, bool by(const plot_point *)) {
    for (int i = 0; i < runs->n; i++)
        for (int k = 0; k < runs->series[i].n; k++)
            if (by(&runs->series[i].points[k]))
                return true;
    return false;
}

static bool has_public(const plot_point *p) {
    return p->public_us > 0;
}

static bool has_gain(const plot_point *p) {
    return p->gain > 0;
}

static const plot_point *at(const plot_series *s, double tokens) {
    for (int k = 0; k < s->n; k++)
        if (s->points[k].tokens == tokens)
            return &s->points[k];
    return NULL;
}

static double ratio(const plot_runs *runs, basis of, int i, double tokens) {
    const plot_point *p = at(&runs->series[i], tokens), *first = at(&runs->series[0], tokens);
    if (p == NULL)
        return NAN;
    switch (of) {
    case OF_PUBLIC:
        return p->public_us / p->us;
    case OF_PAIRS:
        return p->gain;
    default:
        return first != NULL ? first->us / p->us : NAN;
    }
}

/* The batch sizes for which there is a bar, in order. */
static int sizes_of(const plot_runs *runs, basis of, double *sizes) {
    int n = 0;
    double last = 0;
    for (;;) {
        double next = INFINITY;
        for (int i = 0; i < runs->n; i++)
            for (int k = 0; k < runs->series[i].n; k++) {
                const double tokens = runs->series[i].points[k].tokens;
                if (tokens > last && tokens < next && ratio(runs, of, i, tokens) > 0)
                    next = tokens;
            }
        if (isinf(next) || n == SIZES_MAX)
            return n;
        sizes[n++] = last = next;
    }
}

/* The runs that have bars. */
typedef struct bar_set {
    int of[PLOT_SERIES_MAX];
    int n;
    double highest;
} bar_set;

static bar_set bars_of(const plot_runs *runs, basis of, const double *sizes, int n) {
    bar_set found = {.highest = 1};
    for (int i = of == OF_FIRST; i < runs->n; i++) {
        bool any = false;
        for (int k = 0; k < n && !any; k++)
            any = ratio(runs, of, i, sizes[k]) > 0;
        if (any)
            found.of[found.n++] = i;
    }
    return found;
}

static void write_bars(const plot_runs *runs, basis of, const double *sizes, int n, int place,
                       bar_set *bars, FILE *script) {
    const double width = 0.8 / bars->n;
    fprintf(script, "$bars%d << END\n", place);
    for (int k = 0; k < n; k++) {
        const double value = ratio(runs, of, bars->of[place], sizes[k]);
        if (!(value > 0))
            continue;
        const plot_point *p = at(&runs->series[bars->of[place]], sizes[k]);
        const double low = of == OF_PAIRS ? p->gain_low : value;
        const double high = of == OF_PAIRS ? p->gain_high : value;
        /* Outliers of a few pairs do not make the bars small. */
        bars->highest = fmax(bars->highest, fmax(value, fmin(high, 1.6 * value)));
        fprintf(script, "%.9g %.9g %.9g %.9g %.9g\n", k + (place - (bars->n - 1) / 2.0) * width,
                value, width * 0.92, low > 0 ? low : value, high > 0 ? high : value);
    }
    fprintf(script, "END\n");
}

static void write_axes(const plot_runs *runs, basis of, const double *sizes, int n, double highest,
                       FILE *script) {
    fprintf(script, "set xrange [-0.6:%.9g]\nset yrange [0:%.9g]\nset xtics (", n - 0.4,
            highest * 1.25);
    for (int k = 0; k < n; k++)
        fprintf(script, "%s'%.9g' %d", k > 0 ? ", " : "", sizes[k], k);
    fprintf(
        script,
        ")\nset xlabel 'tokens'\nset key outside top center horizontal reverse Left\nset grid noxtics\n"
        "set style fill pattern 1 border lt -1\nset ylabel ");
    char of_first[PLOT_LABEL_BYTES + 32];
    snprintf(of_first, sizeof of_first, "time of %s / time", runs->series[0].label);
    plot_quote(script, of == OF_PUBLIC  ? "published time / time"
                       : of == OF_PAIRS ? runs->gains
                                        : of_first);
    fprintf(script, "\n");
}

int plot_ratio(const plot_runs *runs, FILE *script) {
    const basis of = has(runs, has_gain) ? OF_PAIRS : has(runs, has_public) ? OF_PUBLIC : OF_FIRST;
    if (of == OF_FIRST && runs->n < 2)
        return report_error("plot: one run without published numbers or pairs has no ratios; "
                            "expected a second file");
    double sizes[SIZES_MAX];
    const int n = sizes_of(runs, of, sizes);
    bar_set bars = bars_of(runs, of, sizes, n);
    if (bars.n == 0)
        return report_error("plot: the runs have no batch size in common");
    for (int i = 0; i < bars.n; i++)
        write_bars(runs, of, sizes, n, i, &bars, script);
    write_axes(runs, of, sizes, n, bars.highest, script);
    fprintf(script, "plot 1 with lines lw 1.5 dt (4,4) lc rgb '#222222' notitle");
    for (int i = 0; i < bars.n; i++) {
        fprintf(script, ", $bars%d using 1:2:3 with boxes fs pattern %d lc rgb '%s' title ", i,
                plot_pattern(i), plot_colour(i));
        plot_quote(script, runs->series[bars.of[i]].label);
        if (of == OF_PAIRS)
            fprintf(script,
                    ", $bars%d using 1:4:(0):($5-$4) with vectors heads size 0.04,90 lw 1.5 "
                    "lc rgb '#222222' notitle",
                    i);
        else if (n * bars.n <= LABELLED_BARS)
            fprintf(script,
                    ", $bars%d using 1:2:(sprintf('%%.2f', $2)) with labels rotate by 90 left "
                    "offset 0,0.4 font ',9' notitle",
                    i);
    }
    fprintf(script, "\n");
    return EXIT_DONE;
}
