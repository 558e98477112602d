/* SPDX-License-Identifier: Apache-2.0 */
/* What the tool says of times, against samples whose answers are known. */
#include "statistics.h"

#include "random.h"
#include "t.h"

enum { MANY = 200 };

T_CASE(medians) {
    double one[] = {3}, two[] = {4, 1}, odd[] = {5, 1, 9}, even[] = {8, 2, 6, 4};
    T_EQ_F64(statistics_median(one, 1), 3);
    T_EQ_F64(statistics_median(two, 2), 2.5);
    T_EQ_F64(statistics_median(odd, 3), 5);
    T_EQ_F64(statistics_median(even, 4), 5);
}

T_CASE(quantiles) {
    double values[] = {5, 4, 3, 2, 1, 0, 6, 7, 8, 9, 10};
    T_EQ_F64(statistics_quantile(values, 11, 0), 0);
    T_EQ_F64(statistics_quantile(values, 11, 0.5), 5);
    T_EQ_F64(statistics_quantile(values, 11, 0.9), 9);
    T_EQ_F64(statistics_quantile(values, 11, 1), 10);
}

/* 1..n in a disorder. */
static void fill(double *values, size_t n) {
    for (size_t i = 0; i < n; i++)
        values[i * 7 % n] = (double)i + 1;
}

/* The order statistics of the sign test, as tables of the binomial distribution have them. */
T_CASE(pairs) {
    static const struct {
        size_t n;
        double low, high, confidence;
    } known[] = {
        {1, 1, 1, 0},
        {2, 1, 2, 0.5},
        {5, 1, 5, 0.9375},
        {6, 1, 6, 0.96875},
        {8, 1, 8, 0.9921875},
        {9, 2, 8, 0.9609375},
        {10, 2, 9, 0.978515625},
        {20, 6, 15, 0.958610535},
        {100, 40, 61, 0.964799800},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        double values[100];
        fill(values, known[i].n);
        const statistics_interval found = statistics_of_pairs(values, known[i].n, 0.95);
        T_EQ_F64(found.median, ((double)known[i].n + 1) / 2);
        T_CHECK_MSG(found.low == known[i].low && found.high == known[i].high,
                    "n %zu: from %g to %g", known[i].n, found.low, found.high);
        T_NEAR(found.confidence, known[i].confidence, 1e-8);
    }
}

T_CASE(pairs_of_equal_values) {
    double values[] = {2, 2, 2, 2, 2, 2, 2};
    const statistics_interval found = statistics_of_pairs(values, 7, 0.95);
    T_EQ_F64(found.low, 2);
    T_EQ_F64(found.high, 2);
}

/* The interval holds the true median as often as it says. */
T_CASE(pairs_cover) {
    int covered = 0;
    enum { TRIALS = 2000, N = 15 };
    for (uint64_t trial = 0; trial < TRIALS; trial++) {
        float drawn[N];
        double values[N];
        random_normals(random_key(11, trial), N, drawn);
        for (int i = 0; i < N; i++)
            values[i] = (double)drawn[i];
        const statistics_interval found = statistics_of_pairs(values, N, 0.95);
        covered += found.low <= 0 && found.high >= 0;
    }
    T_NEAR((double)covered / TRIALS, 0.9648, 0.015);
}

static void draw(uint64_t key, double middle, double *values) {
    float drawn[MANY];
    random_normals(key, MANY, drawn);
    for (int i = 0; i < MANY; i++)
        values[i] = middle + (double)drawn[i];
}

T_CASE(independent_medians) {
    double a[MANY], b[MANY];
    draw(1, 100, a);
    draw(2, 110, b);
    statistics_interval first, again;
    T_REQUIRE(statistics_of_medians(a, MANY, b, MANY, 0.95, 1000, 5, &first));
    T_EQ_F64(first.median, statistics_median(b, MANY) / statistics_median(a, MANY));
    T_CHECK(first.low <= first.median && first.median <= first.high);
    T_NEAR(first.median, 1.1, 0.005);
    /* The deviation of a median is 1.25 of that of the values, by the root of their number. */
    T_NEAR(first.high - first.low, 2 * 1.96 * 1.25 * 1.41 * 1.1 / 14.1 / 105, 0.002);
    T_REQUIRE(statistics_of_medians(a, MANY, b, MANY, 0.95, 1000, 5, &again));
    T_EQ_MEM(&first, &again, sizeof first);
}

T_CASE(independent_medians_of_one_value) {
    double a[] = {4}, b[] = {6};
    statistics_interval found;
    T_REQUIRE(statistics_of_medians(a, 1, b, 1, 0.95, 100, 1, &found));
    T_EQ_F64(found.low, 1.5);
    T_EQ_F64(found.high, 1.5);
}
