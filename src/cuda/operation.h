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
#include "megamoe/trace.h"
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
    bool mapped;   /* kernels look the expert map up, also while it says physical = logical */
    uint32_t form; /* as in mm_cuda_layer_words */
    /* Device memory: */
    uint64_t blobs; /* [placement->local][layout.blob_bytes] */
    uint64_t decode_table;
    uint64_t tables;         /* mm_cuda_layer_words, then room for a map; they stay there */
    uint64_t replica_starts; /* [logical + 1]; 0: not mapped */
    uint64_t replicas;       /* [physical] */
} mm_cuda_layer;

/*
 * Allocates device memory for the layer whose desc, layout, placement, key, device are set, and
 * uploads decode table and expert map; `mapped` may ask for one. Blobs are uploaded one by one.
 */
MEGAMOE_CHECKED megamoe_status mm_cuda_layer_open(mm_cuda_layer *layer);
/* Blocks until `blob` may be reused. */
MEGAMOE_CHECKED megamoe_status mm_cuda_layer_upload(mm_cuda_layer *layer, int32_t local,
                                                    const uint8_t *blob);
MEGAMOE_CHECKED megamoe_status mm_cuda_layer_download(const mm_cuda_layer *layer, int32_t local,
                                                      uint8_t *blob);
/* Accepts a half-opened layer. */
void mm_cuda_layer_close(mm_cuda_layer *layer);

/* Routes that each local expert has received in all forwards. Both wait for the device. */
MEGAMOE_CHECKED megamoe_status mm_cuda_layer_received(const mm_cuda_layer *layer, int64_t *counts);
MEGAMOE_CHECKED megamoe_status mm_cuda_layer_clear_received(const mm_cuda_layer *layer);

/* Waits for the device. */
MEGAMOE_CHECKED megamoe_status mm_cuda_layer_settle(const mm_cuda_layer *layer);

/*
 * What a layer is to be once its experts are placed anew. Where it is to have the same physical
 * experts, as many of as many ranks, only those that change places are made, and move into the
 * memory of the layer in the end: graphs with its forwards stay as they are. Else all are made, and
 * their memory becomes that of the layer.
 */
typedef struct mm_cuda_successor {
    const mm_placement *placement; /* borrowed */
    bool in_place;
    int32_t *places; /* [placement->local]: in `blobs`; -1: the local expert stays where it is */
    uint64_t blobs;  /* device memory */
} mm_cuda_successor;

/* Local. Owns: mm_cuda_successor_close, which accepts a half-opened one and one that is zero. */
MEGAMOE_CHECKED megamoe_status mm_cuda_successor_open(const mm_cuda_layer *layer,
                                                      const mm_placement *placement,
                                                      mm_cuda_successor *successor);
void mm_cuda_successor_close(const mm_cuda_layer *layer, mm_cuda_successor *successor);

bool mm_cuda_successor_stays(const mm_cuda_successor *successor, int32_t local);
/* Of those that do not stay: the expert that the layer has as its local one `old`, or a blob. */
MEGAMOE_CHECKED megamoe_status mm_cuda_successor_keep(const mm_cuda_layer *layer,
                                                      const mm_cuda_successor *successor,
                                                      int32_t local, int32_t old);
MEGAMOE_CHECKED megamoe_status mm_cuda_successor_put(const mm_cuda_layer *layer,
                                                     const mm_cuda_successor *successor,
                                                     int32_t local, const uint8_t *blob);

/*
 * Once all are there and no forward is on its way: the layer becomes it, but for its placement,
 * which the caller sets. Fails only with the GPU (MEGAMOE_EDEVICE); then every forward of the layer
 * is refused.
 */
MEGAMOE_CHECKED megamoe_status mm_cuda_successor_install(mm_cuda_layer *layer,
                                                         mm_cuda_successor *successor,
                                                         uint64_t key);

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
 * Plans worth measuring for `tokens` on each rank of a launch of its own: the built-in choice in
 * numbers, then the others. Fills in at most n, returns how many there are.
 */
int32_t mm_cuda_candidates(const mm_cuda_workspace *workspace, const mm_cuda_layer *layer,
                           int64_t tokens, megamoe_plan *plans, int32_t n);

/* Whether there is a kernel for this layer with tiles of that width. */
bool mm_cuda_has_tile(const mm_cuda_layer *layer, int32_t token_tile);

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

/* As megamoe_workspace_get_trace has it, of a workspace that keeps one. Waits for the device. */
MEGAMOE_CHECKED megamoe_status mm_cuda_workspace_trace(const mm_cuda_workspace *workspace,
                                                       megamoe_span *spans, int64_t n,
                                                       int64_t *count, int64_t *dropped);

#endif
