/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One forward over several ranks: on the CPU each is a thread of this process with cores of its
 * own, or a process that a launcher has started; on a GPU they are folded into one launch.
 */
#ifndef RANKS_H
#define RANKS_H

#include "inputs.h"

typedef struct ranks_options {
    const char *device; /* as megamoe_device_open has it */
    int32_t ranks;
    int32_t threads; /* of all ranks together, each has at least one; of processes 0: one for each
                        core that a rank has */
    megamoe_nvfp4_mode nvfp4;
    megamoe_input_scale input_scale;
    megamoe_accumulate accumulate;
    megamoe_activation_type activations;
} ranks_options;

typedef struct ranks_report {
    megamoe_device_info device;            /* of one rank */
    double create_ms;                      /* packing, mapping or uploading; the slowest rank's */
    double forward_ms;                     /* stage and forward; the slowest rank's */
    int64_t routes_min, routes_max;        /* received by one rank */
    int64_t expert_min, expert_max;        /* received by one expert */
    uint64_t layer_bytes, workspace_bytes; /* of all ranks */
} ranks_report;

/* Whether the name is that of a CUDA device, be it there or not. */
bool ranks_on_gpu(const char *device);

/*
 * y: BF16 [tokens, hidden]. Prints its error and returns an exit code.
 * Rank r takes the r-th contiguous part of the tokens, the first (tokens mod ranks) parts being one
 * longer.
 */
int ranks_forward(const source *s, const inputs *in, const ranks_options *options, void *y,
                  ranks_report *report);

/*
 * The same where this process is one rank of `comm`, whose size is options->ranks, and has the
 * whole input: y and the report become those of all ranks, on each.
 */
int ranks_forward_in_processes(megamoe_comm *comm, const source *s, const inputs *in,
                               const ranks_options *options, void *y, ranks_report *report);

#endif
