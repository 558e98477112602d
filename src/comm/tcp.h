/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bootstrap of processes that know the address of rank 0, which listens there. Each other rank
 * has one connection to it; rank 0 collects what all bring and hands it out. Who connects without
 * being a rank of this job is turned away. The network is trusted: nothing is encrypted.
 */
#ifndef MM_COMM_TCP_H
#define MM_COMM_TCP_H

#include "comm/bootstrap.h"

/*
 * Blocks until this rank is connected: rank 0 until all others are. `options` are complete.
 * Owns: bootstrap->close frees.
 * Returns: MEGAMOE_EINVAL (an address that does not exist; a number of ranks or a rank that
 * contradicts another process), MEGAMOE_EIO (the port is taken), MEGAMOE_ETIMEDOUT, MEGAMOE_EPEER,
 * MEGAMOE_ENOMEM.
 */
MEGAMOE_CHECKED megamoe_status mm_tcp_open(const megamoe_comm_tcp_options *options,
                                           mm_bootstrap *bootstrap);

#endif
