/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One forward on the CPU, in phases that never wait, so that one thread can drive all ranks of a
 * folded communicator; megamoe_forward waits between them.
 *
 *   - publish counts this rank's routes and makes its batch visible. All ranks have done so before
 *   - agree looks at every rank's publication: an error of one is the error of all;
 *   - compute pulls the tokens of this rank's experts from the other ranks' batches, runs FC1 and
 *     FC2, and stores every route's row at its token's own rank. All ranks have done so before
 *   - combine sums each token's rows in slot order.
 *
 * Ordering between ranks: a rank's words `published` and `finished` hold the number (epoch) of the
 * last forward for which that is true. They are stored with release and awaited with acquire. A
 * batch is read by others only between its rank's `published` and everybody's `finished`; results
 * are written by others in the same interval. Publications exist twice, by parity of the epoch: a
 * rank can be one forward ahead of a reader, never two.
 */
#ifndef MM_CPU_OPERATION_H
#define MM_CPU_OPERATION_H

#include <stdatomic.h>

#include "base/device.h"
#include "base/memory.h"
#include "comm/symmetric.h"
#include "cpu/kernels.h"
#include "megamoe/layer.h"
#include "plan/placement.h"

enum { MM_MAX_TOPK = 64 };

typedef struct mm_cpu_layer {
    megamoe_layer_desc desc;
    megamoe_accumulate accumulate;
    bool weight_after_fc2;
    mm_cpu_layout layout;
    const mm_placement *placement; /* borrowed from the layer */
    mm_cpu_expert *experts;        /* [placement->local] */
    uint64_t key;                  /* equal on ranks whose options and expert maps are equal */
} mm_cpu_layer;

/* A route as its expert's rank sees it. */
typedef struct mm_route {
    int64_t token;
    int32_t rank; /* of the token */
    int32_t slot;
    float weight;
} mm_route;

/* Up to MM_PANEL_TOKENS routes of one expert that pass through the kernels together. */
typedef struct mm_panel {
    int32_t expert; /* local */
    int32_t tokens;
    int64_t start; /* first route in the pool */
} mm_panel;

/* Consecutive units of one expert's FC1 or FC2 (src/cpu/scratch.h), for all its panels. */
typedef struct mm_task {
    int32_t expert; /* local */
    int32_t first, count;
} mm_task;

typedef struct mm_publication {
    megamoe_workspace_detail error; /* status MEGAMOE_OK if the batch is good */
    uint64_t layer;                 /* mm_cpu_layer.key */
    int64_t tokens;
} mm_publication;

/* What orders the ranks; at the beginning of a window. */
typedef struct mm_cpu_words {
    _Alignas(MM_CACHE_LINE) _Atomic uint64_t published;
    _Alignas(MM_CACHE_LINE) _Atomic uint64_t finished;
    _Alignas(MM_CACHE_LINE) mm_publication publications[2];
} mm_cpu_words;

/* Words of one process are read by others. */
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "64-bit atomics need no lock");

/*
 * What ranks read and write of each other lies in one range of memory for each rank, at the same
 * offsets in all: its window. X(name, type, part, rows, columns); a batch has capacity.tokens rows.
 */
#define MM_CPU_WINDOW(X)                                                                           \
    X(words, mm_cpu_words, WORK, 1, 1)                                                             \
    X(counts, int32_t, WORK, 2, physical) /* by publication: routes to each physical expert */     \
    X(codes, uint8_t, BATCH, tokens, codes_stride)                                                 \
    X(token_scale, float, BATCH, tokens, 1)                                                        \
    X(token_factor, float, BATCH, tokens, 1)                                                       \
    X(blocks, uint8_t, BATCH, tokens, blocks_stride)    /* MEGAMOE_SCALE_BLOCK */                  \
    X(block_scale, float, BATCH, tokens, blocks_stride) /* MEGAMOE_SCALE_BLOCK_F32, int8 */        \
    X(ids, int32_t, BATCH, tokens, topk)                                                           \
    X(weights, float, BATCH, tokens, topk)                                                         \
    X(results, uint16_t, RESULTS, tokens *topk, results_stride) /* rows that experts return */

/* Where a rank's window is in this process. */
typedef struct mm_cpu_window {
#define X(name, type, part, rows, columns) type *name;
    MM_CPU_WINDOW(X)
#undef X
} mm_cpu_window;

typedef struct mm_cpu_workspace {
    megamoe_shape shape;
    megamoe_capacity capacity;
    int32_t rank, ranks;
    megamoe_device *device;
    mm_symmetric memory;    /* of the windows */
    mm_cpu_window *windows; /* [ranks]; those of others are set once all have met */
    mm_cpu_window *own;

    /* The staged batch is in the own window. */
    int64_t tokens;
    int64_t codes_stride, results_stride;
    int32_t blocks_stride;                 /* ceil(hidden / 128) */
    megamoe_workspace_detail staged_error; /* an id or scale out of range in the batch */

    uint64_t epoch; /* of the last forward that was begun */

    /* Routes received: sorted by expert, then rank, token and slot. */
    int64_t received;
    int64_t *segments; /* [physical + 1]: first route of each local expert */
    int64_t *next;     /* [physical] */
    mm_route *pool;    /* [capacity.pool_rows] */
    float *route_scale, *route_factor, *route_weight; /* [capacity.pool_rows] */
    int32_t n_panels;
    mm_panel *panels;      /* [capacity.pool_rows] */
    int32_t *panel_starts; /* [physical + 1]: first panel of each local expert */
    int32_t *active;       /* [physical]: local experts that received something */
    int32_t n_active;
    mm_task *tasks;             /* of one sweep */
    uint32_t *fc1_panels;       /* [pool_rows][hidden_k / 2], for int8 less */
    uint32_t *fc2_panels;       /* [pool_rows][intermediate_k / 2], for int8 less */
    float *fc1_chunk_scale;     /* [pool_rows][chunks of hidden_k]: promote, int8 */
    float *fc2_chunk_scale;     /* [pool_rows][chunks of intermediate_k]: promote, int8 */
    struct mm_scratch *scratch; /* [threads] */
    struct mm_range *ranges;    /* [threads] */

    struct mm_cpu_trace *trace;   /* NULL: none is kept */
    struct mm_cpu_mirror *mirror; /* of ranks without memory in common; else NULL */
    size_t reserved_bytes;        /* the window included */
    struct mm_reservation *reservations;
} mm_cpu_workspace;

/* shape and capacity are checked and have their defaults filled in. */
MEGAMOE_CHECKED megamoe_status mm_cpu_workspace_open(const megamoe_shape *shape,
                                                     const megamoe_capacity *capacity,
                                                     const megamoe_comm *comm,
                                                     megamoe_device *device,
                                                     mm_cpu_workspace **workspace);
void mm_cpu_workspace_close(mm_cpu_workspace *workspace);

/* What all other ranks need to know of a workspace. */
typedef struct mm_cpu_card {
    uint64_t window; /* its address in the process of the rank */
    uint64_t bytes;
} mm_cpu_card;

mm_cpu_card mm_cpu_workspace_card(const mm_cpu_workspace *workspace);

/*
 * Once all ranks have opened theirs, alike; collective where they are processes. cards[r] is rank
 * r's. Errors as mm_symmetric_meet.
 */
MEGAMOE_CHECKED megamoe_status mm_cpu_workspace_meet(mm_cpu_workspace *workspace,
                                                     megamoe_comm *comm, const mm_cpu_card *cards);

/* What the reserved bytes are for: false where there is no part of that index. */
bool mm_cpu_workspace_part(const mm_cpu_workspace *workspace, int32_t index, const char **what,
                           uint64_t *bytes);

/* Backs what a forward of balanced routing touches with memory. */
void mm_cpu_prewarm(const mm_cpu_workspace *workspace, const mm_cpu_layer *layer);

/* Takes a batch whose arguments are checked, quantizing it. */
void mm_cpu_stage(mm_cpu_workspace *workspace, const megamoe_view *x, const megamoe_view *topk_ids,
                  const megamoe_view *topk_weights, int64_t n_tokens);
/* Or the caller's own codes, written through the views. */
void mm_cpu_workspace_views(const mm_cpu_workspace *workspace, megamoe_workspace_views *views);
void mm_cpu_commit_staged(mm_cpu_workspace *workspace, int64_t n_tokens);

/* Routes that each local expert received in the last forward. */
void mm_cpu_receive_counts(const mm_cpu_workspace *workspace, int64_t *counts, int32_t local);

/* The phases, in order. */
void mm_cpu_publish(mm_cpu_workspace *workspace, const mm_cpu_layer *layer);
/* Fills *detail, status MEGAMOE_OK if all is well. */
void mm_cpu_agree(mm_cpu_workspace *workspace, const mm_cpu_layer *layer,
                  megamoe_workspace_detail *detail);
void mm_cpu_compute(mm_cpu_workspace *workspace, const mm_cpu_layer *layer);
void mm_cpu_combine(mm_cpu_workspace *workspace, const megamoe_view *y);

#endif
