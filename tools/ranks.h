/* SPDX-License-Identifier: Apache-2.0 */
/* One forward over several ranks, each a thread of this process with cores of its own. */
#ifndef RANKS_H
#define RANKS_H

#include "inputs.h"

typedef struct ranks_options {
    int32_t ranks;
    int32_t threads; /* of all ranks together; each has at least one */
    megamoe_nvfp4_mode nvfp4;
} ranks_options;

typedef struct ranks_report {
    megamoe_device_info device;            /* of one rank */
    double create_ms;                      /* the slowest rank's: packing or mapping its experts */
    double forward_ms;                     /* the slowest rank's: stage and forward */
    int64_t routes_min, routes_max;        /* received by one rank */
    int64_t expert_min, expert_max;        /* received by one expert */
    uint64_t layer_bytes, workspace_bytes; /* of all ranks */
} ranks_report;

/*
 * y: BF16 [tokens, hidden]. Prints its error and returns an exit code.
 * Rank r takes the r-th contiguous part of the tokens, the first (tokens mod ranks) parts being one
 * longer.
 */
int ranks_forward(const source *s, const inputs *in, const ranks_options *options, void *y,
                  ranks_report *report);

#endif
