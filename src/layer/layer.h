/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The public objects. Each has a part of the backend whose device it is made for; what is common is
 * done here: checking arguments, ranks that meet, errors that wait to be told.
 */
#ifndef MM_LAYER_LAYER_H
#define MM_LAYER_LAYER_H

#include <stdatomic.h>

#include "base/device.h"
#include "base/file.h"
#include "comm/comm.h"
#include "cpu/operation.h"
#include "cuda/operation.h"
#include "megamoe/layer.h"
#include "megamoe/placement.h"
#include "plan/tuned.h"

struct megamoe_layer {
    megamoe_device *device;
    megamoe_layer_desc desc;
    megamoe_accumulate accumulate;
    mm_placement placement;
    bool round_outside_window; /* CUDA */
    size_t blob_bytes;
    union {
        mm_cpu_layer cpu;
        mm_cuda_layer cuda; /* where device->cuda is set */
    };
    uint8_t *blobs;            /* CPU: this rank's experts, packed or read; NULL: all are mapped */
    mm_mapping mapped;         /* CPU: the blobs of all logical experts */
    _Atomic int64_t *received; /* CPU: [placement.local], over all forwards */
};

struct megamoe_workspace {
    megamoe_comm *comm;
    megamoe_device *device;
    megamoe_shape shape;
    megamoe_capacity capacity;
    mm_cpu_workspace *cpu;   /* one of the two */
    mm_cuda_workspace *cuda; /* where device->cuda is set */
    mm_abort_watch watch;    /* CUDA: passes an abort on to the kernels */
    mm_meeting *meeting;     /* of folded ranks, which may meet later; else NULL */
    uint64_t *peers; /* [ranks]: addresses of their workspaces, which tell whether they belong
                        together; set once all have met and agree */
    bool met;
    int64_t tokens; /* of the staged batch; -1: none */
    bool dead;      /* after a deadline or an abort */
    megamoe_workspace_detail pending;
    /* CUDA: how to cut up forwards, */
    megamoe_plan plan;                  /* ... as the caller has said, */
    mm_tuned tuned[MM_CUDA_FORMATS][2]; /* ... as was measured, by format and accumulation */
};

/*
 * This rank's experts onto its device, packed where weights are in checkpoint form. The layer is
 * set but for its backend's memory; megamoe_layer_close frees, also after a failure.
 */
MEGAMOE_CHECKED megamoe_status mm_layer_load_cpu(megamoe_layer *layer,
                                                 const megamoe_weights *weights,
                                                 const megamoe_layer_options *options);
MEGAMOE_CHECKED megamoe_status mm_layer_load_cuda(megamoe_layer *layer,
                                                  const megamoe_weights *weights,
                                                  const megamoe_layer_options *options);

/* What all ranks need to have in common for a forward, with experts placed like this. */
uint64_t mm_layer_key(const megamoe_layer *layer, const mm_placement *placement, int32_t format,
                      bool weight_after_fc2);

/* Takes note of what a forward has brought to this rank's experts. */
void mm_layer_count(megamoe_layer *layer, const mm_cpu_workspace *workspace);

/* Of experts on their way from a rank (place.c), but one at least; tests make it small. */
extern size_t mm_place_window_bytes;

/* Whether layer and workspace belong together. */
MEGAMOE_CHECKED megamoe_status mm_layer_check_fit(const megamoe_layer *layer,
                                                  const megamoe_workspace *workspace);

/* The plan of a forward of the staged batch; zeros are for the backend to choose. */
megamoe_plan mm_workspace_plan(const megamoe_workspace *workspace, const megamoe_layer *layer);
void mm_workspace_forget_tuned(megamoe_workspace *workspace);

/* Number of the last forward that was begun. */
static inline uint64_t mm_workspace_epoch(const megamoe_workspace *workspace) {
    return workspace->cuda ? mm_cuda_workspace_epoch(workspace->cuda) : workspace->cpu->epoch;
}

/* Fills the peers once all ranks have created theirs and compares shapes and capacities. */
MEGAMOE_CHECKED megamoe_status mm_workspace_meet(megamoe_workspace *workspace);

/* The pending error, once: MEGAMOE_OK if there is none. A dead workspace stays dead. */
MEGAMOE_CHECKED megamoe_status mm_workspace_take_pending(megamoe_workspace *workspace);

/*
 * Makes a deadline or an abort pending. The workspace cannot be trusted any more: peers may still
 * be writing into it. Aborts the communicator.
 */
void mm_workspace_die(megamoe_workspace *workspace, const megamoe_workspace_detail *detail);

#endif
