/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A forward whose ranks have no memory in common. Each keeps a window of its own for every other
 * rank, its mirror, in which the phases find and leave what they would in the window of that rank;
 * between the phases the parts that matter travel.
 *
 *   after publish  publications and counts, to all
 *   after agree    tokens, to the ranks of their experts
 *   after compute  the rows of routes, to the ranks of their tokens
 */
#ifndef MM_CPU_MIRROR_H
#define MM_CPU_MIRROR_H

#include "comm/messages.h"
#include "cpu/operation.h"

typedef struct mm_cpu_mirror {
    uint8_t *windows; /* [ranks], `stride` apart; the own one is not used */
    size_t stride;
    size_t card_bytes;   /* of a rank: publication, tokens to each rank, counts */
    size_t token_bytes;  /* a token with its number */
    size_t result_bytes; /* a route's row with its number */
    uint8_t *cards;      /* [ranks + 1]; the last is this rank's, to be sent */
    mm_parts sent, received;
} mm_cpu_mirror;

/*
 * Each within `timeout_ms`. A failure has aborted the communicator.
 * Returns: MEGAMOE_EPEER, MEGAMOE_ETIMEDOUT.
 */
MEGAMOE_CHECKED megamoe_status mm_cpu_mirror_counts(mm_cpu_workspace *workspace,
                                                    const mm_cpu_layer *layer, megamoe_comm *comm,
                                                    int32_t timeout_ms);
MEGAMOE_CHECKED megamoe_status mm_cpu_mirror_tokens(mm_cpu_workspace *workspace,
                                                    const mm_cpu_layer *layer, megamoe_comm *comm,
                                                    int32_t timeout_ms);
MEGAMOE_CHECKED megamoe_status mm_cpu_mirror_results(mm_cpu_workspace *workspace,
                                                     megamoe_comm *comm, int32_t timeout_ms);

/* Bytes of a token and of a route's row on their way. */
size_t mm_cpu_mirror_token_bytes(const mm_cpu_workspace *workspace);
size_t mm_cpu_mirror_result_bytes(const mm_cpu_workspace *workspace);
size_t mm_cpu_mirror_card_bytes(const mm_cpu_workspace *workspace);

#endif
