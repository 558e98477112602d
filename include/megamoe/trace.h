/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the threads of a forward did when: for finding out where its time went, not for every day.
 * A workspace keeps the spans of its last forward if it was created with capacity.trace; without,
 * forwards take no times. Results do not change.
 */
#ifndef MEGAMOE_TRACE_H
#define MEGAMOE_TRACE_H

#include "layer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a span belongs to. */
typedef enum megamoe_span_phase {
    MEGAMOE_SPAN_COUNT = 0,    /* counting routes, agreeing with the other ranks, sorting */
    MEGAMOE_SPAN_DISPATCH = 1, /* CUDA: sending this rank's rows; CPU: fetching its experts' */
    MEGAMOE_SPAN_FC1 = 2,      /* a tile of rows of an expert's FC1 and its tokens */
    MEGAMOE_SPAN_FC2 = 3,
    MEGAMOE_SPAN_COMBINE = 4 /* waiting for the rows of tokens, summing them */
} megamoe_span_phase;

/* All of it, or what several roles of a CUDA thread block do for a tile. */
typedef enum megamoe_span_part {
    MEGAMOE_PART_WHOLE = 0, /* CUDA: of a tile, from its first operands to its last result */
    MEGAMOE_PART_WAIT = 1,  /* for a tile's tokens, since it was claimed and the last one loaded */
    MEGAMOE_PART_LOAD = 2,  /* asking for its weights and tokens */
    MEGAMOE_PART_MULTIPLY = 3, /* over all of K; inside of WHOLE */
    MEGAMOE_PART_FINISH = 4,   /* scaling, activation, quantizing; inside of WHOLE */
    MEGAMOE_PART_STORE = 5     /* results to where they are needed, and telling so */
} megamoe_span_part;

/* Who did it. Spans of one worker, team and lane are disjoint or nested. */
typedef enum megamoe_span_lane {
    MEGAMOE_LANE_WORKER = 0,   /* count, combine; on the CPU everything */
    MEGAMOE_LANE_DISPATCH = 1, /* dispatch */
    MEGAMOE_LANE_LOAD = 2,     /* of a team: wait, load */
    MEGAMOE_LANE_MULTIPLY = 3, /* of a team: whole, multiply, finish */
    MEGAMOE_LANE_STORE = 4     /* of a team: store */
} megamoe_span_lane;

typedef struct megamoe_span {
    double begin_us, end_us; /* since the forward began on this rank */
    megamoe_span_phase phase;
    megamoe_span_part part;
    megamoe_span_lane lane;
    int32_t worker; /* CPU: the thread; CUDA: the multiprocessor, which has one thread block */
    int32_t team;   /* CUDA: of the thread block, which have a tile each; -1 outside of teams */
    int32_t expert; /* of this rank's physical ones, from 0; -1 outside of tiles, as are */
    int32_t tile;   /* CUDA: of 256 packed rows; CPU: the first of 128 channels or 512 rows */
    int32_t tokens; /* of the tile; CPU: of the expert */
} megamoe_span;

/*
 * The spans of this rank's last forward: *count is their number, of which the first n, but not more
 * than there are, are written to `spans` (NULL with n 0). *dropped is how many spans of a CPU,
 * or tiles of a CUDA device, found no room in the workspace; NULL if that does not matter. Waits
 * for a CUDA device.
 * Returns: MEGAMOE_EINVAL, MEGAMOE_ESTATE (no trace is kept, or there was no forward yet),
 * MEGAMOE_ENOMEM, MEGAMOE_EDEVICE.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status
megamoe_workspace_get_trace(const megamoe_workspace *workspace, megamoe_span *spans, int64_t n,
                            int64_t *count, int64_t *dropped);

#ifdef __cplusplus
}
#endif
#endif
