/* SPDX-License-Identifier: Apache-2.0 */
/* Processes of one host that have a bootstrap get a Unix socket between each two. */
#ifndef MM_COMM_CONNECT_H
#define MM_COMM_CONNECT_H

#include "comm/bootstrap.h"
#include "comm/outcome.h"

typedef struct mm_connection {
    int socket;  /* SOCK_SEQPACKET; -1 for the rank itself */
    int process; /* pidfd, or -1 where there is none */
} mm_connection;

/*
 * Collective: fills connections [size] by rank. `outcome` may bring an earlier failure of this rank
 * and takes one of connecting, which only the ranks that are concerned know: the caller shares it
 * and closes what is open. Nothing of it has a name in the file system.
 * Returns, on all ranks alike: a failure of the bootstrap or of an outcome that was brought,
 * MEGAMOE_EINVAL (versions differ, the bootstrap mixes ranks up), MEGAMOE_EUNSUPPORTED (several
 * hosts).
 */
MEGAMOE_CHECKED megamoe_status mm_connect(const mm_bootstrap *bootstrap, mm_outcome *outcome,
                                          int64_t deadline, mm_connection *connections);

/* Collective: mm_outcome_of_all of what each rank brings. */
MEGAMOE_CHECKED megamoe_status mm_outcome_share(const mm_bootstrap *bootstrap,
                                                const mm_outcome *outcome, int64_t deadline);

#endif
