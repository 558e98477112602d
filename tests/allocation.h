/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Allocations that fail on demand: allocation.c takes the place of malloc and its kin and of mmap
 * for the whole program, the libraries that it uses included.
 */
#ifndef ALLOCATION_H
#define ALLOCATION_H

#include <stdbool.h>
#include <stdint.h>

/*
 * From now on the k-th allocation of this thread fails (k from 1), or all from that one on. Threads
 * that it starts go unharmed: sanitizers allocate in them and cannot do without.
 */
void allocation_fail(int64_t k, bool all_after);

/* Ends that. Returns whether one has failed. */
bool allocation_failed(void);

/* Blocks and mappings that are in use; they count from the start of the program. */
int64_t allocation_live(void);

#endif
