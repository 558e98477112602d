/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks whose messages the caller carries, as long as their communicator lives. */
#ifndef MM_COMM_MESSAGES_H
#define MM_COMM_MESSAGES_H

#include <stddef.h>

#include "megamoe/comm.h"

/*
 * Collective: the transport works and brings the ranks together that it says. `transport` is the
 * caller's, taken by size.
 * Returns: MEGAMOE_EINVAL (other versions of the library, or ranks that are mixed up), or as
 * mm_messages_allgather.
 */
MEGAMOE_CHECKED megamoe_status mm_messages_meet(const megamoe_transport *transport);

/* mm_bootstrap's allgather. Returns: MEGAMOE_EPEER, MEGAMOE_ETIMEDOUT where that much has passed.
 */
MEGAMOE_CHECKED megamoe_status mm_messages_allgather(const megamoe_transport *transport,
                                                     const void *mine, void *all, size_t bytes,
                                                     int32_t timeout_ms);

/* One part of memory for each rank. */
typedef struct mm_parts {
    void *data;
    size_t *bytes, *offsets; /* [size] */
} mm_parts;

/* Collective: part r of `sent` goes to rank r, part r of `received` comes from it. Errors likewise.
 */
MEGAMOE_CHECKED megamoe_status mm_messages_exchange(const megamoe_transport *transport,
                                                    const mm_parts *sent, const mm_parts *received,
                                                    int32_t timeout_ms);

#endif
