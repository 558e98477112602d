/* SPDX-License-Identifier: Apache-2.0 */
#include "statistics.h"

#include <math.h>
#include <stdlib.h>

#include "random.h"

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double middle_of(const double *sorted, size_t n) {
    return n % 2 != 0 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

double statistics_median(double *values, size_t n) {
    qsort(values, n, sizeof *values, compare);
    return middle_of(values, n);
}

static double quantile_of(const double *sorted, size_t n, double q) {
    return sorted[(size_t)(q * (double)(n - 1) + 0.5)];
}

double statistics_quantile(double *values, size_t n, double q) {
    qsort(values, n, sizeof *values, compare);
    return quantile_of(values, n, q);
}

/* The chance of exactly k heads in n throws. */
static double binomial(size_t n, size_t k) {
    return exp(lgamma((double)n + 1) - lgamma((double)k + 1) - lgamma((double)(n - k) + 1) -
               (double)n * log(2));
}

statistics_interval statistics_of_pairs(double *values, size_t n, double wanted) {
    qsort(values, n, sizeof *values, compare);
    /*
     * The median lies outside of [values[k], values[n - 1 - k]] where at most k of the values are
     * below it, or at most k above.
     */
    size_t k = 0;
    double below = binomial(n, 0), confidence = 1 - 2 * below;
    while (k + 1 < n - 1 - k) {
        below += binomial(n, k + 1);
        if (1 - 2 * below < wanted)
            break;
        confidence = 1 - 2 * below;
        k++;
    }
    return (statistics_interval){.median = middle_of(values, n),
                                 .low = values[k],
                                 .high = values[n - 1 - k],
                                 .confidence = confidence > 0 ? confidence : 0};
}

/* The median of n values drawn from as many sorted ones, with replacement. */
static double draw_median(const double *from, size_t n, uint64_t key, double *scratch) {
    for (size_t i = 0; i < n; i++)
        scratch[i] = from[random_below(key, i, n)];
    return statistics_median(scratch, n);
}

bool statistics_of_medians(double *a, size_t n, double *b, size_t m, double wanted, size_t draws,
                           uint64_t seed, statistics_interval *interval) {
    const size_t most = n > m ? n : m;
    double *scratch = malloc((most + draws) * sizeof *scratch);
    if (scratch == NULL)
        return false;
    double *ratios = scratch + most;
    const double median = statistics_median(b, m) / statistics_median(a, n);
    for (size_t i = 0; i < draws; i++) {
        const uint64_t key = random_key(seed, i);
        ratios[i] = draw_median(b, m, random_key(key, 1), scratch);
        ratios[i] /= draw_median(a, n, random_key(key, 0), scratch);
    }
    qsort(ratios, draws, sizeof *ratios, compare);
    *interval = (statistics_interval){.median = median,
                                      .low = quantile_of(ratios, draws, (1 - wanted) / 2),
                                      .high = quantile_of(ratios, draws, (1 + wanted) / 2),
                                      .confidence = wanted};
    free(scratch);
    return true;
}
