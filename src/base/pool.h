/* SPDX-License-Identifier: Apache-2.0 */
/* A pool of threads that runs one function on all of them. */
#ifndef MM_BASE_POOL_H
#define MM_BASE_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "megamoe/status.h"

typedef struct mm_pool mm_pool;

/*
 * threads counts the caller of mm_pool_run; 0 means one per core available to the process.
 * With `pin`, thread i > 0 is bound to core first_core + i of those available, if there are as
 * many. A caller of mm_pool_run that finds itself on a worker's core moves to core first_core; its
 * own set of allowed cores stays as it is.
 */
MEGAMOE_CHECKED megamoe_status mm_pool_open(int32_t threads, int32_t first_core, bool pin,
                                            mm_pool **pool);
void mm_pool_close(mm_pool *pool);

int32_t mm_pool_threads(const mm_pool *pool);

/* Cores that this process may use: one processing unit for each, in the machine's order. */
int32_t mm_pool_cores(void);

typedef void (*mm_pool_fn)(void *argument, int32_t thread, int32_t threads);

/*
 * Runs fn(argument, i, threads) for every i on its own thread and returns when all are done. The
 * caller is thread 0. Allocates nothing. Not reentrant. `pool` NULL: fn(argument, 0, 1).
 */
void mm_pool_run(mm_pool *pool, mm_pool_fn fn, void *argument);

/* Hint inside a spin loop: `spins` counts its rounds; past a short while it yields the core. */
void mm_relax(uint32_t spins);

#endif
