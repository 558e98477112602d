/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random numbers by position: a value depends on its key and index alone, so that data are the same
 * whatever order or thread makes them.
 */
#ifndef RANDOM_H
#define RANDOM_H

#include <stddef.h>
#include <stdint.h>

/* What a seed's keys stand for; part of every key, so that no two kinds of data correlate. */
enum {
    KEY_WEIGHTS,
    KEY_ROWS,
    KEY_CHANNELS,
    KEY_ROUTER,
    KEY_BIAS,
    KEY_TABLE,
    KEY_INPUT,
    KEY_INPUT_CHANNELS,
    KEY_TOKEN_IDS,
    KEY_ROUTES,
    KEY_MATRIX_BIAS,
    KEY_POPULARITY,
    KEY_ARRIVALS
};

/* The key of a part, such as a row, of what `key` stands for. A seed is a key. */
uint64_t random_key(uint64_t key, uint64_t part);

/* The bits at an index. */
uint64_t random_bits(uint64_t key, uint64_t index);

/* An integer below n, n >= 1. */
uint64_t random_below(uint64_t key, uint64_t index, uint64_t n);

/* A number in (0, 1). */
double random_uniform(uint64_t key, uint64_t index);

/* k different numbers below n, 0 <= k <= n, every set equally likely. */
void random_choose(uint64_t key, int32_t n, int32_t k, int32_t *chosen);

/* The numbers below n in an order of which all are equally likely. */
void random_shuffle(uint64_t key, int32_t n, int32_t *order);

/*
 * n values of a normal distribution of deviation 1, of which one in a thousand comes from one of
 * deviation 6, as trained weights have outliers.
 */
void random_normals(uint64_t key, size_t n, float *values);

/* One value of it. */
float random_normal(uint64_t key);

#endif
