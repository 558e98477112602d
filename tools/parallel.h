/* SPDX-License-Identifier: Apache-2.0 */
/* Splitting a loop over threads. */
#ifndef PARALLEL_H
#define PARALLEL_H

#include <stdint.h>

typedef void (*parallel_fn)(void *user, int64_t begin, int64_t end);

/* Processors that this process may run on. */
int32_t parallel_cores(void);

/* Calls fn on contiguous parts of 0..n-1, on `threads` threads, the caller's included. */
void parallel_for(int32_t threads, int64_t n, parallel_fn fn, void *user);

#endif
