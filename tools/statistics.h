/* SPDX-License-Identifier: Apache-2.0 */
/* Statistics of measured times: medians, and intervals that assume no distribution of them. */
#ifndef STATISTICS_H
#define STATISTICS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A median and where it lies with the given confidence. */
typedef struct statistics_interval {
    double median, low, high;
    double confidence; /* 0..1 */
} statistics_interval;

/* Sorts. The mean of the two in the middle where n is even. n >= 1. */
double statistics_median(double *values, size_t n);

/* Sorts. The value at the rank q (n - 1), rounded; q = 0 is the least. n >= 1. */
double statistics_quantile(double *values, size_t n, double q);

/*
 * Sorts. The interval between two order statistics, the same number of values from either end, that
 * holds the median of whatever the values come from with at least the wanted confidence (by the
 * sign test, so exact for any distribution); from the least to the largest value, with what
 * confidence that has, where n is too small. n >= 1.
 */
statistics_interval statistics_of_pairs(double *values, size_t n, double wanted);

/*
 * The ratio of the median of b to that of a, which are independent, and its interval from the
 * percentiles of `draws` bootstrap samples; the same seed gives the same interval. Sorts a and b.
 * n, m, draws >= 1. False: out of memory.
 */
bool statistics_of_medians(double *a, size_t n, double *b, size_t m, double wanted, size_t draws,
                           uint64_t seed, statistics_interval *interval);

#endif
