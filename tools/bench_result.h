/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the JSON object of a benchmark. What is missing or of another type is 0, "" or NULL. */
#ifndef BENCH_RESULT_H
#define BENCH_RESULT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

/* Of the intervals of ratios, where there are enough times for it. */
static const double RESULT_CONFIDENCE = 0.95;

double result_number(const json_t *object, const char *name);
const char *result_text(const json_t *object, const char *name);
bool result_has(const json_t *object, const char *name);

/* A member of an object in the object. */
double result_number_in(const json_t *object, const char *inner, const char *name);

/* An array of numbers, which the caller frees; NULL: there is none, or no memory. */
double *result_numbers(const json_t *object, const char *name, size_t *n);

/* Arms, at least 1. */
size_t result_arms(const json_t *result);

/* The i-th with all of its fields, those that it shares with others too: a new reference. */
json_t *result_arm(const json_t *result, size_t i);

/* Of a GPU's point or a CPU's, microseconds: the median over rounds, their 90th percentile. */
double result_median_us(const json_t *point);
double result_p90_us(const json_t *point);
double result_min_us(const json_t *point);

#endif
