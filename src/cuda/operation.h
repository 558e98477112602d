/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One forward on a CUDA device. Everything is enqueued on the caller's stream; nothing here waits
 * for the device except creation, closing and reading back.
 *
 * A launch takes one rank, or the ranks of a folded communicator that are on one device: one grid
 * of ranks * blocks thread blocks. Launches on several devices wait for each other inside.
 */
#ifndef MM_CUDA_OPERATION_H
#define MM_CUDA_OPERATION_H

#include "cuda/device.h"
#include "cuda/kernels/abi.h"
#include "cuda/shared.h"
#include "megamoe/layer.h"
#include "plan/placement.h"
#include "weights/cuda_layout.h"

typedef struct mm_cuda_layer {
    megamoe_layer_desc desc;
    megamoe_accumulate accumulate;
    bool weight_after_fc2;
    mm_cuda_layout layout;
    const mm_placement *placement; /* borrowed from the layer */
    uint64_t key;                  /* equal on ranks whose options and expert maps are equal */
    mm_cuda_device *device;
    uint64_t blobs;          /* device memory [placement->local][layout.blob_bytes] */
    uint64_t decode_table;   /* device memory */
    uint64_t replica_starts; /* device memory [logical + 1]; 0: physical = logical */
    uint64_t replicas;       /* device memory [physical] */
} mm_cuda_layer;

/*
 * Allocates device memory for the layer whose desc, layout, placement, device are set, and uploads
 * decode table and expert map. Blobs are uploaded one by one.
 */
MEGAMOE_CHECKED megamoe_status mm_cuda_layer_open(mm_cuda_layer *layer);
/* Blocks until `blob` may be reused. */
MEGAMOE_CHECKED megamoe_status mm_cuda_layer_upload(mm_cuda_layer *layer, int32_t local,
                                                    const uint8_t *blob);
/* Accepts a half-opened layer. */
void mm_cuda_layer_close(mm_cuda_layer *layer);

typedef struct mm_cuda_workspace mm_cuda_workspace;

/* shape and capacity are checked and have their defaults filled in. */
MEGAMOE_CHECKED megamoe_status mm_cuda_workspace_open(const megamoe_shape *shape,
                                                      const megamoe_capacity *capacity,
                                                      const megamoe_comm *comm,
                                                      mm_cuda_device *device,
                                                      mm_cuda_workspace **workspace);
void mm_cuda_workspace_close(mm_cuda_workspace *workspace);

/* What all other ranks need to know of a workspace: where its window is. */
typedef mm_cuda_shared_card mm_cuda_card;

mm_cuda_card mm_cuda_workspace_card(const mm_cuda_workspace *workspace);

/*
 * Once all ranks have opened theirs, collective where they are processes: cards[r] is rank r's,
 * this one's included. Forwards may begin once all ranks have done it. Returns what
 * mm_cuda_shared_meet returns.
 */
MEGAMOE_CHECKED megamoe_status mm_cuda_workspace_meet(mm_cuda_workspace *workspace,
                                                      megamoe_comm *comm,
                                                      const mm_cuda_card *cards);

uint64_t mm_cuda_workspace_bytes(const mm_cuda_workspace *workspace);
/* What these bytes are for: false where there is no part of that index. */
bool mm_cuda_workspace_part(const mm_cuda_workspace *workspace, int32_t index, const char **what,
                            uint64_t *bytes);
uint64_t mm_cuda_workspace_epoch(const mm_cuda_workspace *workspace); /* forwards enqueued */

/* Loads the kernels that forwards of this layer can need and lets each run its set-up. */
MEGAMOE_CHECKED megamoe_status mm_cuda_prewarm(mm_cuda_workspace *workspace,
                                               const mm_cuda_layer *layer);

/* Arguments are checked; views are device memory. `stream` is a CUstream. */
MEGAMOE_CHECKED megamoe_status mm_cuda_stage(mm_cuda_workspace *workspace, const megamoe_view *x,
                                             const megamoe_view *topk_ids,
                                             const megamoe_view *topk_weights, int64_t n_tokens,
                                             void *stream);
void mm_cuda_workspace_views(const mm_cuda_workspace *workspace, megamoe_workspace_views *views);
MEGAMOE_CHECKED megamoe_status mm_cuda_commit_staged(mm_cuda_workspace *workspace, int64_t n_tokens,
                                                     void *stream);

typedef struct mm_cuda_call {
    const mm_cuda_layer *layer;
    mm_cuda_workspace *workspace;
    const megamoe_view *y; /* NULL for no tokens */
} mm_cuda_call;

/*
 * One launch for n ranks (1, or those of a folded communicator that are on one device, in
 * ascending order).
 */
MEGAMOE_CHECKED megamoe_status mm_cuda_forward(const mm_cuda_call *calls, int32_t n,
                                               const megamoe_plan *plan, void *stream);

/*
 * What the device has reported since the last call, without waiting for it: false if nothing.
 * `detail` gets status, phase, rank, epoch, token, slot, value and message. `cause`: why the ranks
 * gave up, as mm_comm_cause says it, "" if that is not known.
 */
bool mm_cuda_workspace_found(mm_cuda_workspace *workspace, const char *cause,
                             megamoe_workspace_detail *detail);

/* Tells the kernels of this workspace to give up. Thread: any. */
void mm_cuda_workspace_abort(mm_cuda_workspace *workspace);

/* Routes that each local expert received in the last forward. Waits for the device. */
MEGAMOE_CHECKED megamoe_status mm_cuda_workspace_receive_counts(const mm_cuda_workspace *workspace,
                                                                int64_t *counts);

/* Where the time of the last forward went; struct_size is the caller's. Waits for the device. */
MEGAMOE_CHECKED megamoe_status mm_cuda_workspace_times(const mm_cuda_workspace *workspace,
                                                       megamoe_workspace_times *times);

#endif
