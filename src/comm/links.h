/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connections between ranks that are processes of one host: a Unix socket between each two. They
 * carry the collectives and file descriptors, and their end is how the death of a rank is noticed.
 *
 * A thread reads all sockets, so that a death or an abort is known at once, whatever the ranks are
 * doing. A rank that closes its links says so first; a connection that ends without is a death.
 * Where the system has pidfds these tell of a death too, even if a child of the dead process holds
 * its sockets open.
 */
#ifndef MM_COMM_LINKS_H
#define MM_COMM_LINKS_H

#include <stdbool.h>

#include "comm/alarm.h"
#include "comm/bootstrap.h"

typedef struct mm_links mm_links;

/*
 * Collective over `bootstrap`, which it does not close. Either all ranks are connected or all fail
 * with one message. Afterwards a death or an abort of any rank raises the alarm.
 * Owns: the caller closes *links; `alarm` must outlive them.
 * Returns: MEGAMOE_EINVAL (ranks of different versions of the library, or a bootstrap that mixes
 * ranks up), MEGAMOE_EUNSUPPORTED (ranks on several hosts), MEGAMOE_EPEER, MEGAMOE_ETIMEDOUT,
 * MEGAMOE_EIO, MEGAMOE_ENOMEM.
 */
MEGAMOE_CHECKED megamoe_status mm_links_open(const mm_bootstrap *bootstrap, mm_alarm *alarm,
                                             int32_t timeout_ms, mm_links **links);

/* Accepts NULL and half-opened links. */
void mm_links_close(mm_links *links);

/*
 * mm_bootstrap's allgather. fd: -1, or a descriptor of which every rank gets a duplicate: fds[r] is
 * that of rank r, or -1; the caller closes them. fds may be NULL where no rank brings one.
 */
MEGAMOE_CHECKED megamoe_status mm_links_allgather(mm_links *links, const void *mine, void *all,
                                                  size_t bytes, int fd, int *fds,
                                                  int32_t timeout_ms);

/* Raises the alarm here and on all other ranks. Thread: any. */
void mm_links_abort(mm_links *links);

/* Rank r has closed its links in good order: it will not take part in anything any more. */
bool mm_links_closed(const mm_links *links, int32_t rank);

#endif
