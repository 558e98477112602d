/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Collective work that can fail on one rank: each tries its part, then all exchange how that went,
 * so that they fail together and with one message.
 */
#ifndef MM_COMM_OUTCOME_H
#define MM_COMM_OUTCOME_H

#include <stddef.h>
#include <stdint.h>

#include "megamoe/status.h"

typedef struct mm_outcome {
    int32_t status;
    char message[316];
} mm_outcome;

/* Takes a failure and this thread's last message, unless one came before. */
void mm_outcome_set(mm_outcome *outcome, megamoe_status status);

/*
 * What the outcomes of all ranks, `stride` bytes apart from `first` on, come to: MEGAMOE_OK, or the
 * message of the first rank that failed, with this rank's own status if that failed too, else
 * MEGAMOE_EPEER. `what` was done.
 */
MEGAMOE_CHECKED megamoe_status mm_outcome_of_all(const char *what, const mm_outcome *first,
                                                 size_t stride, int32_t rank, int32_t size);

#endif
