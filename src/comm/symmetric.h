/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of each rank that all ranks of a communicator read and write: one flat range for each,
 * equally long and laid out alike. Addresses differ between processes, offsets do not.
 */
#ifndef MM_COMM_SYMMETRIC_H
#define MM_COMM_SYMMETRIC_H

#include "comm/comm.h"

typedef struct mm_symmetric {
    size_t bytes;
    uint8_t *own;     /* this rank's */
    int fd;           /* of ranks that are processes, until they have met; else -1 */
    int32_t ranks;    /* of `mapped` */
    uint8_t **mapped; /* those of other processes; NULL in one process */
} mm_symmetric;

/*
 * Local: reserves this rank's range, zeroed and backed by memory only once touched. It goes with
 * the last process that has it, whatever ends that; it has no name. Returns: MEGAMOE_ENOMEM.
 */
MEGAMOE_CHECKED megamoe_status mm_symmetric_open(const megamoe_comm *comm, size_t bytes,
                                                 mm_symmetric *symmetric);

/*
 * Once all ranks have opened theirs; collective where they are processes. own[r] is the address of
 * rank r's range in the process of that rank, ranges[r] becomes the one that is valid here.
 * Returns: MEGAMOE_ENOMEM, MEGAMOE_EIO, or what mm_comm_share_fds returns.
 */
MEGAMOE_CHECKED megamoe_status mm_symmetric_meet(megamoe_comm *comm, mm_symmetric *symmetric,
                                                 const uint64_t *own, uint8_t **ranges);

/* Accepts one that is zero or half-opened. */
void mm_symmetric_close(mm_symmetric *symmetric);

#endif
