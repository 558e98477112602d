/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "comm/messages.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "comm/deadline.h"
#include "megamoe/version.h"

struct card {
    char version[16];
    int32_t rank, size;
};

/* What the caller's functions return says whether, and the clock says why. */
static megamoe_status judge(const megamoe_transport *t, const char *what, int error,
                            int64_t deadline) {
    if (error == 0)
        return MEGAMOE_OK;
    if (mm_left_ms(deadline) == 0)
        return mm_fail(MEGAMOE_ETIMEDOUT,
                       "rank %d: the deadline has passed (the transport's %s "
                       "returned %d)",
                       t->rank, what, error);
    return mm_fail(MEGAMOE_EPEER, "rank %d: the transport's %s returned %d", t->rank, what, error);
}

megamoe_status mm_messages_allgather(const megamoe_transport *transport, const void *mine,
                                     void *all, size_t bytes, int32_t timeout_ms) {
    const int64_t deadline = mm_now_ms() + timeout_ms;
    const int error = transport->allgather(transport->user, mine, all, bytes, timeout_ms);
    return judge(transport, "allgather", error, deadline);
}

megamoe_status mm_messages_exchange(const megamoe_transport *transport, const mm_parts *sent,
                                    const mm_parts *received, int32_t timeout_ms) {
    const int64_t deadline = mm_now_ms() + timeout_ms;
    const int error =
        transport->alltoallv(transport->user, sent->data, sent->bytes, sent->offsets,
                             received->data, received->bytes, received->offsets, timeout_ms);
    return judge(transport, "alltoallv", error, deadline);
}

static megamoe_status compare(const struct card *cards, int32_t size) {
    for (int32_t r = 0; r < size; r++) {
        if (cards[r].rank != r || cards[r].size != size)
            return mm_fail(MEGAMOE_EINVAL,
                           "the transport gave what rank %d of %d brought as that of rank %d of %d",
                           cards[r].rank, cards[r].size, r, size);
        if (strncmp(cards[r].version, cards[0].version, sizeof cards[r].version) != 0)
            return mm_fail(MEGAMOE_EINVAL,
                           "the library's version is %.15s on rank 0 and %.15s on rank %d; all "
                           "ranks need the same",
                           cards[0].version, cards[r].version, r);
    }
    return MEGAMOE_OK;
}

megamoe_status mm_messages_meet(const megamoe_transport *transport) {
    struct card mine = {.rank = transport->rank, .size = transport->size};
    snprintf(mine.version, sizeof mine.version, "%s", megamoe_version());
    struct card *cards = mm_alloc((size_t)transport->size * sizeof *cards);
    if (!cards)
        return mm_fail(MEGAMOE_ENOMEM, "communicator: out of memory");
    megamoe_status status = mm_messages_allgather(transport, &mine, cards, sizeof mine,
                                                  transport->creation_deadline_ms);
    if (status == MEGAMOE_OK)
        status = compare(cards, transport->size);
    free(cards);
    return status;
}
