/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks of one communicator, each with a device, a layer and a workspace. */
#ifndef TESTS_LAYER_FLEET_H
#define TESTS_LAYER_FLEET_H

#include "megamoe/megamoe.h"
#include "model.h"

enum { MAX_RANKS = 8 };

/* Zero is the default of everything but the weights. */
typedef struct setup {
    const megamoe_weights *weights;
    int32_t ranks;      /* 0: a communicator of one's own */
    bool folded;        /* one thread drives all ranks */
    const char *device; /* NULL: "cpu" */
    int32_t threads;    /* of each rank's device; 0: 1 */
    const char *tier;   /* as MEGAMOE_CPU; NULL: the best */
    int32_t topk;       /* 0: 2 */
    megamoe_input_scale input_scale;
    megamoe_activation_type activations;
    int64_t tokens; /* capacity of a rank; 0: 64 */
    int64_t pool_rows;
    int32_t deadline_ms;
    int64_t trace;
    megamoe_layer_options options; /* struct_size may be 0 */
} setup;

typedef struct rank {
    int32_t rank, ranks;
    megamoe_comm *comm;
    megamoe_device *device;
    megamoe_layer *layer;
    megamoe_workspace *workspace;
    megamoe_shape shape;
    megamoe_capacity capacity;
} rank;

typedef struct fleet {
    int32_t ranks;
    bool folded;
    rank rank[MAX_RANKS];
} fleet;

/* A failure ends the case. */
fleet fleet_open(const setup *s);
/* The same without layers and workspaces; shape and capacity are filled in. */
fleet fleet_open_comms(const setup *s);
void fleet_close(fleet *f);

/* Runs fn for every rank: each in a thread of its own, or one after the other where folded. */
void fleet_each(fleet *f, void (*fn)(rank *r, void *argument), void *argument);

/* This rank's share of a batch: contiguous, the first (tokens mod ranks) one longer. */
batch share_of(const batch *b, int32_t rank_index, int32_t ranks, int64_t *first);

/* Stages a batch over all ranks and computes y [tokens][hidden]; all calls must succeed. */
void fleet_forward(fleet *f, const batch *b, uint16_t *y);
void fleet_stage(fleet *f, const batch *b);
/* Computes what is staged: statuses by rank. */
void fleet_compute(fleet *f, const batch *b, uint16_t *y, megamoe_status status[MAX_RANKS]);

/* Opens a fleet for one batch of any size, computes it, closes. */
void run_once(const setup *s, const batch *b, uint16_t *y);

/* The best instruction sets of this machine, NULL at the end. */
extern const char *const tiers[];

#endif
