/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MM_COMM_COMM_H
#define MM_COMM_COMM_H

#include <stdbool.h>

#include "megamoe/comm.h"

/*
 * A meeting is one collective creation: every rank brings one pointer and gets those of all. The
 * n-th meeting of a rank is the n-th of every other.
 */
typedef struct mm_meeting mm_meeting;

/*
 * Joins with `part` and, unless the communicator is folded, waits for all ranks.
 * Returns MEGAMOE_EPEER after an abort, MEGAMOE_ETIMEDOUT after ten minutes, MEGAMOE_ENOMEM; then
 * there is nothing to leave. Either all ranks get the parts or none.
 */
MEGAMOE_CHECKED megamoe_status mm_meeting_join(megamoe_comm *comm, void *part,
                                               mm_meeting **meeting);

/* The parts by rank once all have joined, else NULL. */
void *const *mm_meeting_parts(const megamoe_comm *comm, const mm_meeting *meeting);

/*
 * Not for folded communicators. Waits until all ranks that got the parts have come here, whatever
 * else happens, then ends this rank's use: what the parts point to may go.
 */
void mm_meeting_end(megamoe_comm *comm, mm_meeting *meeting);

/* Ends this rank's use at once; the last one frees the meeting. Accepts NULL. */
void mm_meeting_leave(megamoe_comm *comm, mm_meeting *meeting);

bool mm_comm_folded(const megamoe_comm *comm);

/* Some rank has aborted. Cheap enough for a spin loop. */
bool mm_comm_aborted(const megamoe_comm *comm);

/* For waits that cannot look at mm_comm_aborted: `fn` passes an abort on to them. */
typedef struct mm_abort_watch {
    /* Called once, under the communicator's lock, by whichever thread aborts; must not wait. */
    void (*fn)(void *user);
    void *user;
    struct mm_abort_watch *next;
} mm_abort_watch;

/* `watch` stays in place until mm_comm_unwatch. After an abort fn is called now. */
void mm_comm_watch(megamoe_comm *comm, mm_abort_watch *watch);

/* Once it has returned, fn is not running and will not be called. A watch not set is ignored. */
void mm_comm_unwatch(megamoe_comm *comm, mm_abort_watch *watch);

#endif
