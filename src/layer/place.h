/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Placing a layer's experts anew, as its parts share it:
 *
 *   place.c          what ranks tell each other, who publishes which experts, beginning and end
 *   place_pass.c     experts on their way, through memory in common or by messages
 *   place_experts.c  those of this rank, as its device has them
 */
#ifndef MM_LAYER_PLACE_H
#define MM_LAYER_PLACE_H

#include "comm/messages.h"
#include "comm/outcome.h"
#include "comm/symmetric.h"
#include "layer/layer.h"
#include "weights/prepared.h"
#include "weights/rows.h"

#define MM_PLACING "placing experts"

/* What a rank tells all others at the beginning. */
typedef struct mm_place_card {
    mm_outcome outcome;
    uint64_t key; /* of the layer as it is to be: equal on all ranks */
    uint64_t blob_bytes;
    uint8_t has[MM_MAX_EXPERTS / 8]; /* by logical expert */
} mm_place_card;

/* An expert on its way. */
typedef struct mm_place_slot {
    _Alignas(MM_CACHE_LINE) mm_hash hash;
    int32_t expert;
    _Alignas(MM_CACHE_LINE) uint8_t blob[];
} mm_place_slot;

typedef struct mm_move {
    megamoe_comm *comm;
    megamoe_layer *layer;
    const megamoe_weights *weights; /* borrowed; NULL: none */
    int32_t rank, ranks;
    mm_placement placement; /* to be */
    mm_meeting *meeting;    /* holds the cards */
    const mm_place_card *cards;
    int32_t *publisher; /* [logical]: the rank that publishes it, or -1 */

    /* place_pass.c. A rank has `slots` experts on their way at a time: for all that take them, or
     * for each rank where they go by messages. They have their turn one after the other. */
    int32_t most;  /* that have their turn at one rank, or between two */
    int32_t slots; /* 0 where none is on its way */
    size_t slot_bytes;
    mm_symmetric window;
    bool shared;          /* others have it */
    uint8_t **windows;    /* [ranks] */
    int32_t *turn;        /* [logical]: how many that rank publishes before */
    mm_parts sent, taken; /* by messages: [ranks][slots] */
    size_t parts_bytes;   /* of the data of each */
    int32_t *passing;     /* [slots]: scratch */

    /* place_experts.c */
    mm_cuda_successor successor; /* CUDA */
    uint8_t *packed;             /* CUDA: one expert, scratch */
    uint8_t *blobs;              /* CPU: [placement.local], to be; NULL where a file is mapped */
    mm_cpu_expert *experts;      /* CPU: [placement.local], to be */
    _Atomic int64_t *received;   /* CPU: [placement.local], to be */
} mm_move;

static inline bool mm_place_has(const mm_place_card *card, int32_t expert) {
    return card->has[expert / 8] >> expert % 8 & 1;
}

/* The logical expert that is to be this rank's local one. */
static inline int32_t mm_place_logical(const mm_move *m, int32_t local) {
    return m->placement.logical_of[m->placement.first + local];
}

/* Whether a rank is to get an expert that it has not. */
bool mm_place_takes(const mm_move *m, int32_t rank, int32_t expert);

/* ---- place_pass.c ---- */

/* Once the publishers are known: how many pass at a time. Alike on all ranks. */
MEGAMOE_CHECKED megamoe_status mm_place_plan_passing(mm_move *m);

/* Memory for experts on their way; local. Owns: mm_place_close_passing. */
MEGAMOE_CHECKED megamoe_status mm_place_open_passing(mm_move *m);
void mm_place_close_passing(mm_move *m);

/* Collective: publishes and takes until every rank has what it is to have. */
MEGAMOE_CHECKED megamoe_status mm_place_pass(mm_move *m);

/* ---- place_experts.c ---- */

/* The weights that this rank brings are those of the layer. */
MEGAMOE_CHECKED megamoe_status mm_place_check_weights(const megamoe_layer *layer,
                                                      const megamoe_weights *weights);

/*
 * Local: memory for the experts to be, and those in it that this rank has already. Owns:
 * mm_place_close_experts.
 */
MEGAMOE_CHECKED megamoe_status mm_place_open_experts(mm_move *m);
void mm_place_close_experts(mm_move *m);

/* An expert that this rank has, packed, to host memory. */
MEGAMOE_CHECKED megamoe_status mm_place_read(const mm_move *m, int32_t expert, uint8_t *to);

/* One that has arrived becomes the local one. MEGAMOE_ECHECK if it is not as it was sent. */
MEGAMOE_CHECKED megamoe_status mm_place_take(const mm_move *m, int32_t local,
                                             const mm_place_slot *slot);

/*
 * The layer is the new one from here on. Fails only with a GPU, as mm_cuda_successor_install says.
 */
MEGAMOE_CHECKED megamoe_status mm_place_commit(mm_move *m);

#endif
