/* SPDX-License-Identifier: Apache-2.0 */
/* One rank of `megamoe run`, on any device. */
#ifndef RANK_H
#define RANK_H

#include "ranks.h"

enum { RANK_MESSAGE_BYTES = 1024 };

/* The whole batch in the memory of the ranks' device. */
typedef struct rank_memory {
    void *x, *topk_ids, *topk_weights, *y;
} rank_memory;

typedef struct rank {
    const source *source;
    const inputs *inputs;
    const ranks_options *options;
    megamoe_comm *comm;
    /* Closed after all ranks are done: a rank may still read what another has computed. */
    megamoe_device *device;
    megamoe_layer *layer;
    megamoe_workspace *workspace;
    /* Its part of the batch. */
    int64_t tokens;
    megamoe_view x, topk_ids, topk_weights, y;
    /* Results. */
    megamoe_status status;
    char message[RANK_MESSAGE_BYTES]; /* the library's last error belongs to this thread */
    megamoe_device_info device_info;
    double create_ms, forward_ms;
    int64_t routes, expert_min, expert_max;
} rank;

/* Where the r-th of `parts` contiguous parts of n begins; the first n mod parts are one longer. */
int64_t rank_part_begin(int64_t n, int32_t parts, int32_t r);

/* Sets the views to the rank's part of `memory`. `comm` is set. */
void rank_take_part(rank *r, const rank_memory *memory);

/*
 * Creates layer and workspace on the rank's device. pool_rows: routes that it can receive;
 * 0: the library's default.
 */
megamoe_status rank_create(rank *r, int64_t pool_rows);

megamoe_status rank_stage(rank *r, void *stream);

/* Stages and computes on the CPU, timed. */
megamoe_status rank_forward(rank *r);

/*
 * The same on the rank's GPU, whose memory takes the views' content and gives y back. Prints its
 * error and returns an exit code.
 */
int rank_forward_on_gpu(rank *r);

/*
 * Opens the device of a rank that is a process: "cuda" is the GPU whose number is that of the
 * rank on its machine, counted again from 0 where there are more ranks than GPUs. `threads` 0: one
 * for each core that the process may use, or its part of them where other ranks may use the same
 * ones. Prints its error and returns an exit code.
 */
int rank_open_device(const char *name, int32_t threads, megamoe_comm *comm,
                     megamoe_device **device);

/* What its experts received in the last forward. */
megamoe_status rank_count_received(rank *r);

/*
 * The ranks' forward, folded into one launch on a GPU by the calling thread. comms: of a folded
 * communicator. Prints its error and returns an exit code; devices are closed by the caller.
 */
int ranks_run_folded(rank *ranks, void *y);

/* The report of ranks that are done, and two reports as one; the first one's device stays. */
void ranks_summarize(const rank *ranks, int32_t n, ranks_report *report);
void ranks_report_add(ranks_report *report, const ranks_report *other);

#endif
