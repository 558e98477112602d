/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What every way of bringing ranks together gives: one collective, from which all others follow.
 *
 *   group.c   ranks of one process: one rank, or threads
 *   tcp.c     processes that know the address of rank 0
 *   custom.c  processes, through the caller's own allgather
 *   links.c   processes of one host, over sockets that one of the last two has helped to connect
 *
 * tcp and custom serve the creation of a communicator only: two calls of at most
 * MM_BOOTSTRAP_BYTES, then they are closed. Afterwards ranks speak over their links.
 */
#ifndef MM_COMM_BOOTSTRAP_H
#define MM_COMM_BOOTSTRAP_H

#include <stddef.h>
#include <stdint.h>

#include "megamoe/comm.h"

enum { MM_BOOTSTRAP_BYTES = 1024 };

typedef struct mm_bootstrap {
    int32_t rank, size;
    void *state;
    /*
     * Blocks until all ranks have made their n-th call, or timeout_ms. mine: `bytes`, the same
     * number on all ranks; all: [size][bytes], in the order of ranks, mine included. Succeeds on
     * all ranks that are alive or ends what they have in common: after a failure no later call
     * succeeds on any rank.
     * Returns: MEGAMOE_EPEER (another rank gave up or is gone), MEGAMOE_ETIMEDOUT, MEGAMOE_EINVAL
     * (ranks are in calls that do not belong together), MEGAMOE_EIO, MEGAMOE_ENOMEM.
     */
    megamoe_status (*allgather)(void *state, const void *mine, void *all, size_t bytes,
                                int32_t timeout_ms);
    /* Ends the other ranks' calls, present and future, with MEGAMOE_EPEER. Thread: any. */
    void (*abort)(void *state);
    /* Frees. Ranks that are still in a call keep what they have got from this one. */
    void (*close)(void *state);
} mm_bootstrap;

#endif
