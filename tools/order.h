/* SPDX-License-Identifier: Apache-2.0 */
/* The order of arms in rounds. */
#ifndef ORDER_H
#define ORDER_H

#include <stdint.h>

enum { ORDER_MAX = 32 };

/*
 * Which of n arms is the i-th of a round; n at most ORDER_MAX. n rounds, from a multiple of n on,
 * rotate one order, so that each arm is once at each place; the next n rotate another one.
 */
int order_of_round(uint64_t seed, int64_t round, int n, int i);

#endif
