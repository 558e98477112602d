/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Communicators: the ranks over which the experts of a layer are spread.
 */
#ifndef MEGAMOE_COMM_H
#define MEGAMOE_COMM_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct megamoe_comm megamoe_comm;

/* One rank. Owns: the caller closes *comm. */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_comm_self(megamoe_comm **comm);

/*
 * `size` ranks in this process, each driven by a thread of its own: comms[r] belongs to the thread
 * of rank r. Collective calls block until every rank has made them.
 * Owns: the caller closes each; the shared part goes with the last.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_comm_threads(int32_t size, megamoe_comm **comms);

/*
 * `size` ranks in this process, all driven by one thread through megamoe_forward_group.
 * Collective calls do not block; what they would have compared is compared by the first group call.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_comm_folded(int32_t size, megamoe_comm **comms);

/* Accepts NULL. Close the workspaces of a communicator first. */
MEGAMOE_API void megamoe_comm_close(megamoe_comm *comm);

MEGAMOE_API int32_t megamoe_comm_rank(const megamoe_comm *comm);
MEGAMOE_API int32_t megamoe_comm_size(const megamoe_comm *comm);

/*
 * Tells all ranks to give up: their waits, present and future, return MEGAMOE_EPEER.
 * Thread: any.
 */
MEGAMOE_API void megamoe_comm_abort(megamoe_comm *comm);

#ifdef __cplusplus
}
#endif
#endif
