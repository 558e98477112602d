/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MM_COMM_COMM_H
#define MM_COMM_COMM_H

#include <stdbool.h>
#include <stddef.h>

#include "comm/alarm.h"
#include "comm/messages.h"
#include "megamoe/comm.h"

/*
 * A meeting is one collective creation: every rank brings some bytes and gets those of all. The
 * n-th collective call of a rank is the n-th of every other.
 */
typedef struct mm_meeting mm_meeting;

/*
 * Joins with a copy of `part`, as many bytes as every other rank, and waits for all ranks, unless
 * the communicator is folded.
 * Owns: mm_meeting_leave frees. After a failure there is nothing to leave, and the communicator is
 * aborted. Returns MEGAMOE_EPEER after an abort or a death, MEGAMOE_ETIMEDOUT after the
 * communicator's creation deadline, MEGAMOE_EINVAL (ranks are in different calls), MEGAMOE_ENOMEM.
 */
MEGAMOE_CHECKED megamoe_status mm_meeting_join(megamoe_comm *comm, const void *part, size_t bytes,
                                               mm_meeting **meeting);

/* The parts by rank, `bytes` apart, once all have joined, else NULL. */
const void *mm_meeting_parts(const megamoe_comm *comm, const mm_meeting *meeting);

/* Ends this rank's use, and that of the parts. Accepts NULL. */
void mm_meeting_leave(megamoe_comm *comm, mm_meeting *meeting);

/*
 * Collective: ends a step that may have failed on some rank with `status`. Returns the same verdict
 * on all, as mm_outcome_of_all, or what ended the meeting.
 */
MEGAMOE_CHECKED megamoe_status mm_meeting_outcome(megamoe_comm *comm, const char *what,
                                                  megamoe_status status);

/*
 * Collective, for ranks that are processes: fds[r] becomes a duplicate of the descriptor that rank
 * r brings, -1 where it brings -1. Owns: the caller closes them and keeps its own. Errors as
 * mm_meeting_join.
 */
MEGAMOE_CHECKED megamoe_status mm_comm_share_fds(megamoe_comm *comm, int fd, int *fds);

bool mm_comm_folded(const megamoe_comm *comm);

/* Ranks are processes: they have no memory in common but what descriptors are shared for. */
bool mm_comm_in_processes(const megamoe_comm *comm);

/* Ranks have no memory in common at all: the caller carries what they tell each other. */
bool mm_comm_by_messages(const megamoe_comm *comm);

/* How long a step of a collective creation may take. */
int32_t mm_comm_creation_deadline(const megamoe_comm *comm);

/*
 * Collective, for such ranks: mm_messages_exchange, and an allgather with a time of its own. After
 * a failure the communicator is aborted.
 */
MEGAMOE_CHECKED megamoe_status mm_comm_exchange(megamoe_comm *comm, const mm_parts *sent,
                                                const mm_parts *received, int32_t timeout_ms);
MEGAMOE_CHECKED megamoe_status mm_comm_tell(megamoe_comm *comm, const void *mine, void *all,
                                            size_t bytes, int32_t timeout_ms);

/* Some rank has aborted or its process has ended. Cheap enough for a spin loop. */
bool mm_comm_aborted(const megamoe_comm *comm);

/*
 * A rank has closed its communicator in good order, so that only what it has stored before will
 * ever be seen of it. Known of ranks that are processes.
 */
bool mm_comm_closed(const megamoe_comm *comm, int32_t rank);

enum { MM_COMM_CAUSE_BYTES = 64 };

/*
 * Why the ranks gave up, in words: "rank 2 has aborted", "the process of rank 2 has ended". Returns
 * that rank, or -1 and "" if they did not.
 */
int32_t mm_comm_cause(const megamoe_comm *comm, char text[MM_COMM_CAUSE_BYTES]);

/* For waits that cannot look at mm_comm_aborted: passes an abort or a death on to them. */
void mm_comm_watch(megamoe_comm *comm, mm_abort_watch *watch);
void mm_comm_unwatch(megamoe_comm *comm, mm_abort_watch *watch);

#endif
