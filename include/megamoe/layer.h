/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The operation: dispatch, FC1, gated activation, FC2 and the weighted top-k sum.
 *
 *   layer      owns the packed weights of this rank's experts and nothing else
 *   workspace  owns the buffers of one (communicator, device, shape, capacity); one serves every
 *              layer of that shape
 *
 *   megamoe_stage(ws, ...)            quantizes the inputs into the workspace
 *   megamoe_forward(layer, ws, y, s)  computes and writes y
 *
 * Calls on one workspace are ordered. All ranks of a communicator make the same forwards in the
 * same order, ranks without tokens too. For given weights and options a token's output does not
 * depend on the other tokens, on ranks, threads, instruction set or placement, to the bit.
 * What is wrong on the host is returned at once; what is found while computing (an id or scale out
 * of range, an overflowing pool, layers that differ between ranks, a deadline, a lost peer) is
 * agreed between the ranks, leaves y unwritten, and is read by megamoe_workspace_status or
 * returned, once, by the next call on that workspace.
 *
 * On a CUDA device
 *   - x, ids, weights, y and the workspace's views are memory of that device. Rows that begin at
 *     multiples of 16 bytes are the fastest.
 *   - `stream` is a CUstream (or cudaStream_t) of the device's primary context; NULL is its default
 *     stream. stage, commit_staged and forward enqueue their work there and return without waiting
 *     for it. What they read and write is theirs until the stream has passed them. Calls on one
 *     workspace are ordered by the caller: by one stream, or by events between streams.
 *   - What the device finds is seen once it has got there: synchronize the stream, then ask
 *     megamoe_workspace_status, which does not wait.
 *   - After megamoe_prewarm stage, commit_staged and forward allocate and load nothing and may be
 *     captured in a graph; without it they may not. A capture fixes n_tokens, the pointers, the
 *     workspace and the layer, which stay open until the last replay; the buffers' contents are
 *     those of each replay. A forward captured without its stage computes what was staged last,
 *     which must have the same n_tokens. Experts may change places between replays (placement.h).
 *   - Ranks are on one GPU or on several that have peer access to each other, as over NVLink.
 *     Folded ranks on one GPU run in one launch. Others launch on streams of their own, which do
 *     not wait for the default stream, and wait for each other inside: where ranks that are threads
 *     share a GPU, max_ctas of megamoe_device_options makes room for all of them. Processes that
 *     share a GPU without the Multi-Process Service take turns on it, some milliseconds each: that
 *     computes the same and is slow.
 *   - While a forward waits for other ranks the driver may let calls wait that allocate or free
 *     device memory, load kernels or synchronize the device, so let all ranks enqueue theirs first.
 */
#ifndef MEGAMOE_LAYER_H
#define MEGAMOE_LAYER_H

#include "comm.h"
#include "device.h"
#include "types.h"
#include "weights.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Layer ---- */

typedef struct megamoe_layer megamoe_layer;

/* How partial sums over K are kept (docs/numerics.md, item 3). */
typedef enum megamoe_accumulate {
    MEGAMOE_ACCUMULATE_MMA = 0,    /* one accumulator over all of K */
    MEGAMOE_ACCUMULATE_PROMOTE = 1 /* each 128 of K from zero, then one FP32 fma */
} megamoe_accumulate;

typedef struct megamoe_layer_options {
    size_t struct_size;
    megamoe_accumulate accumulate;
    bool weight_after_fc2;    /* multiply the routing weight in after FC2 instead of before */
    megamoe_nvfp4_mode nvfp4; /* for weights in checkpoint form; prepared ones have it fixed */
    /*
     * CPU: use the file of prepared weights in place, mapped, instead of reading this rank's
     * experts into memory of the layer's own. That costs nothing to open and is shared between
     * processes, but forwards are slower where the system maps files in small pages, and see what
     * another program writes into the file. One that cuts it ends the process with SIGBUS; where
     * the file is read, a cut is MEGAMOE_EIO, and after creation without effect.
     */
    bool map_prepared;
    /*
     * Placement: physical expert p holds the logical expert physical_to_logical[p]; every logical
     * expert has at least one physical. Rank r owns the r-th contiguous part of the physical
     * experts, the first (physical_experts mod ranks) parts one longer. A token uses replica
     * (rank + token) mod count. NULL: physical = logical. CUDA: at most 1024 physical.
     */
    const int32_t *physical_to_logical;
    int32_t physical_experts;
    /*
     * CUDA, weights in checkpoint form (prepared ones have it decided): as round_outside_window of
     * megamoe_prepare_options, instead of failing.
     */
    bool round_outside_window;
    megamoe_progress progress; /* of packing, reading or uploading, in bytes of packed weights */
} megamoe_layer_options;

/*
 * Packs, reads or uploads this rank's experts, and blocks until that is done. The threads of the
 * device pack weights in checkpoint form and, on the CPU, read prepared ones. The layer has a copy
 * of its own, but where it is to map the file. `options` may be NULL.
 * Owns: the caller closes *layer before `device`; `weights` may be closed at once.
 * Returns: MEGAMOE_EINVAL, MEGAMOE_EINEXACT (groups that the device cannot hold exactly),
 * MEGAMOE_EUNSUPPORTED (weights prepared for another kind of device), MEGAMOE_EIO, MEGAMOE_ENOMEM,
 * MEGAMOE_EDEVICE.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status
megamoe_layer_create(megamoe_comm *comm, megamoe_device *device, const megamoe_weights *weights,
                     const megamoe_layer_options *options, megamoe_layer **layer);

/* Accepts NULL. On a CUDA device it waits for the forwards that use it. */
MEGAMOE_API void megamoe_layer_close(megamoe_layer *layer);

/* Bytes of packed weights that this rank holds. */
MEGAMOE_API uint64_t megamoe_layer_bytes(const megamoe_layer *layer);

/* ---- Workspace ---- */

typedef struct megamoe_workspace megamoe_workspace;

/* What FC1 and FC2 read (docs/numerics.md, items 1 and 5). */
typedef enum megamoe_activation_type {
    MEGAMOE_ACTIVATIONS_E4M3 = 0,
    /*
     * CPU only, with 4-bit weights (not folded NVFP4): int8 with one F32 per token and 128
     * channels. Faster than E4M3, with sums of their own, for which the layer's `accumulate` plays
     * no part.
     */
    MEGAMOE_ACTIVATIONS_INT8 = 1
} megamoe_activation_type;

/* How FC1's E4M3 input is scaled (docs/numerics.md, items 1 and 3). */
typedef enum megamoe_input_scale {
    MEGAMOE_SCALE_TOKEN = 0,    /* one F32 per token */
    MEGAMOE_SCALE_BLOCK = 1,    /* one power of two (E8M0) per token and 128 channels */
    MEGAMOE_SCALE_BLOCK_F32 = 2 /* one F32 per token and 128 channels: the caller's codes only,
                                   with MEGAMOE_ACCUMULATE_PROMOTE only */
} megamoe_input_scale;

typedef struct megamoe_shape {
    size_t struct_size;
    int32_t hidden;
    int32_t intermediate;
    int32_t experts;                 /* logical */
    int32_t topk;                    /* slots per token, 1..64; CUDA: 1..16 */
    megamoe_input_scale input_scale; /* of E4M3; with INT8 it stays 0 */
    int32_t physical_experts;        /* 0: equal to experts; CUDA: at most 1024 */
    megamoe_activation_type activations;
} megamoe_shape;

typedef struct megamoe_capacity {
    size_t struct_size;
    int64_t tokens; /* per rank; at least 1 */
    /*
     * Routes that one rank can receive; more in one forward are an agreed MEGAMOE_ECAPACITY.
     * 0: the bound, ranks * tokens * topk; on CUDA at most 2 * tokens * topk of it, twice an even
     * share. On the CPU rows take memory only once they are used, on CUDA from the beginning.
     */
    int64_t pool_rows;
    int32_t deadline_ms; /* of waits between ranks inside a forward; 0: 30000 */
    /*
     * For trace.h, at most 65536: spans kept of each thread of a CPU, tiles kept of each team of a
     * CUDA thread block, of which there are at most two. 0: no trace is kept.
     */
    int64_t trace;
} megamoe_capacity;

/*
 * Collective. All ranks are on the CPU, or all on CUDA devices (at most 64, folded 8).
 * Owns: the caller closes *workspace before `comm` and `device`.
 * Returns: MEGAMOE_EINVAL (also where ranks disagree about device, shape or capacity, naming the
 * field), MEGAMOE_EUNSUPPORTED (GPUs that cannot write into each other's memory; int8 activations
 * on a CUDA device), MEGAMOE_ENOMEM, MEGAMOE_EPEER, MEGAMOE_EDEVICE.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status
megamoe_workspace_create(megamoe_comm *comm, megamoe_device *device, const megamoe_shape *shape,
                         const megamoe_capacity *capacity, megamoe_workspace **workspace);

/*
 * Accepts NULL. Not collective, but no rank may be inside a forward of it. On a CUDA device it
 * waits for this rank's work. Where ranks are processes, a later forward of another rank ends at
 * once with MEGAMOE_EPEER and names this one.
 */
MEGAMOE_API void megamoe_workspace_close(megamoe_workspace *workspace);

/* Bytes reserved by this rank's workspace, in the memory of its device. */
MEGAMOE_API uint64_t megamoe_workspace_bytes(const megamoe_workspace *workspace);

/*
 * What these bytes are for: *what gets a few words, which are never freed, *bytes the size of part
 * `index`, from 0. The parts differ between devices and add up to megamoe_workspace_bytes.
 * Returns: whether there is a part of that index.
 */
MEGAMOE_API bool megamoe_workspace_part(const megamoe_workspace *workspace, int32_t index,
                                        const char **what, uint64_t *bytes);

/*
 * Checks that layer and workspace fit (MEGAMOE_EUNSUPPORTED for int8 activations with folded NVFP4)
 * and makes the first forward cost what later ones do. On the CPU it backs their pages with memory;
 * forwards allocate nothing, with or without it. On a CUDA device it loads the kernels for any
 * number of tokens; there all ranks of a folded communicator have created their workspaces before
 * (else MEGAMOE_ESTATE).
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_prewarm(megamoe_layer *layer,
                                                           megamoe_workspace *workspace);

/*
 * Takes a batch: x BF16 [n, hidden] (row stride a multiple of 8 elements), topk_ids I32 or I64
 * [n, topk] (-1 masks a slot), topk_weights F32 or BF16 [n, topk]. The views may be NULL when
 * n_tokens is 0. `stream`: NULL on the CPU.
 * Returns: MEGAMOE_ECAPACITY (n_tokens beyond the capacity; nothing is staged), MEGAMOE_EINVAL,
 * MEGAMOE_EDEVICE, or the pending error of an earlier forward.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_stage(megamoe_workspace *workspace,
                                                         const megamoe_view *x,
                                                         const megamoe_view *topk_ids,
                                                         const megamoe_view *topk_weights,
                                                         int64_t n_tokens, void *stream);

/*
 * Where a caller writes a batch by itself: codes, scales, ids and weights of `tokens` rows, in the
 * memory of the device. Strides differ between devices.
 */
typedef struct megamoe_workspace_views {
    size_t struct_size;
    megamoe_view codes;        /* E4M3 or I8 [tokens, hidden], natural order */
    megamoe_view scales;       /* F32 [tokens, 1]; E8M0 [tokens, ceil(hidden / 128)], bytes 79..174;
                                  F32 [tokens, ceil(hidden / 128)], also of I8 codes */
    megamoe_view topk_ids;     /* I32 [tokens, topk] */
    megamoe_view topk_weights; /* F32 [tokens, topk] */
} megamoe_workspace_views;

MEGAMOE_API MEGAMOE_CHECKED megamoe_status
megamoe_workspace_get_views(megamoe_workspace *workspace, megamoe_workspace_views *views);

/* Declares the first n_tokens rows of the views to be the batch. Errors as megamoe_stage. */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_commit_staged(megamoe_workspace *workspace,
                                                                 int64_t n_tokens, void *stream);

/*
 * Computes the staged batch; collective. y: BF16 [n, hidden] with n at least the staged tokens, or
 * NULL when there are none. A batch stays staged and may be computed again, by another layer too.
 * Blocks on the CPU until y is written; on a CUDA device it enqueues one launch.
 * Returns: MEGAMOE_EINVAL, MEGAMOE_ESTATE (nothing staged; the workspace is dead after a deadline
 * or abort), MEGAMOE_ETIMEDOUT or MEGAMOE_EPEER (waiting for the other ranks ended so just now; a
 * CUDA device leaves them pending), MEGAMOE_EUNSUPPORTED (a CUDA device without room for the
 * launch; int8 activations with folded NVFP4), MEGAMOE_EDEVICE, or the pending error of an earlier
 * forward. Allocates nothing.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_forward(megamoe_layer *layer,
                                                           megamoe_workspace *workspace,
                                                           const megamoe_view *y, void *stream);

/*
 * How a CUDA device cuts up a forward. None of it shows in a result, only in time; tune.h has plans
 * that were measured.
 */
typedef struct megamoe_plan {
    size_t struct_size;
    int32_t token_tile; /* tokens of a tile, one of the widths compiled; 0: chosen for each batch */
    int32_t lag;        /* token tiles by which FC2 follows FC1; 0: chosen for each batch */
} megamoe_plan;

/*
 * The plan of this workspace's later forwards; of folded ranks that of rank 0 counts. A width that
 * the layer's format does not have is a MEGAMOE_EINVAL of the forward, which names those it has.
 * Returns: MEGAMOE_EINVAL, MEGAMOE_EUNSUPPORTED (on the CPU).
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_workspace_set_plan(megamoe_workspace *workspace,
                                                                      const megamoe_plan *plan);

typedef struct megamoe_forward_call {
    megamoe_layer *layer;
    megamoe_workspace *workspace;
    const megamoe_view *y;
    void *stream;
} megamoe_forward_call;

/*
 * The forwards of all ranks of a folded communicator, called by one thread: calls[r] is rank r's.
 * Ranks on one GPU are one launch, on the stream that their calls name.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_forward_group(const megamoe_forward_call *calls,
                                                                 int32_t n);

/* Where a forward stopped. */
typedef enum megamoe_phase {
    MEGAMOE_PHASE_NONE = 0,
    MEGAMOE_PHASE_COUNT = 1,
    MEGAMOE_PHASE_DISPATCH = 2,
    MEGAMOE_PHASE_EXPERTS = 3,
    MEGAMOE_PHASE_COMBINE = 4
} megamoe_phase;

typedef struct megamoe_workspace_detail {
    size_t struct_size;
    megamoe_status status;
    megamoe_phase phase;
    int32_t rank;   /* the rank that found the error, or that was waited for; -1 if none */
    uint64_t epoch; /* number of the forward on this workspace, from 1 */
    int64_t token;  /* MEGAMOE_EID: the token, else -1 */
    int32_t slot;   /* MEGAMOE_EID: the slot, or -1 for an input scale */
    int64_t value;  /* MEGAMOE_EID: what was found; MEGAMOE_ECAPACITY: pool rows needed */
    char message[256];
} megamoe_workspace_detail;

/*
 * The pending error of this workspace, which this call clears (a dead workspace stays dead). It
 * does not wait: a CUDA device may find more later. Without an error detail->epoch is that of the
 * last forward that was begun; replays of a graph are not counted there.
 * Returns the status that *detail holds. `detail` may be NULL.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status
megamoe_workspace_status(megamoe_workspace *workspace, megamoe_workspace_detail *detail);

/*
 * Routes that the physical experts of this rank received in the last forward, in their order.
 * counts holds n entries in host memory; n must be the number of physical experts of this rank.
 * Waits for a CUDA device to finish.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status
megamoe_workspace_receive_counts(const megamoe_workspace *workspace, int64_t *counts, int32_t n);

/*
 * Where the time of this rank's last forward went: means over its thread blocks, which together
 * make up total_us.
 */
typedef struct megamoe_workspace_times {
    size_t struct_size;
    double begin_us;    /* counting, agreeing with the other ranks */
    double dispatch_us; /* until the tokens of a block's first tile were there */
    double fc1_us;      /* its FC1 tiles, waiting for their tokens included */
    double fc2_us;      /* its FC2 tiles, waiting for FC1 included */
    double combine_us;  /* from its last tile to its last summed token */
    double idle_us;     /* before it began and after it ended, while others worked */
    double total_us;    /* from the first block's beginning to the last one's end */
} megamoe_workspace_times;

/* CUDA devices only, else MEGAMOE_EUNSUPPORTED. Waits for the device. */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status
megamoe_workspace_get_times(const megamoe_workspace *workspace, megamoe_workspace_times *times);

#ifdef __cplusplus
}
#endif
#endif
