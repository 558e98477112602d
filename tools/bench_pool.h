/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes one result of those of several processes. What a median, a least time or a rate is made of
 * is pooled; the rest is that of the first process. Functions print their error and return an exit
 * code.
 */
#ifndef BENCH_POOL_H
#define BENCH_POOL_H

#include <jansson.h>

/* *pooled: NULL at first. Both must have the same geometry, arms and batch sizes. */
int bench_pool_add(json_t **pooled, json_t *result);

/* After the last one was added. */
int bench_pool_finish(json_t *pooled);

/* The arms of one result: those of n results with one arm each. */
int bench_pool_join(json_t *const *arms, int n, json_t **result);

#endif
