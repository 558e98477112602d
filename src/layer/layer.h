/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MM_LAYER_LAYER_H
#define MM_LAYER_LAYER_H

#include "comm/comm.h"
#include "cpu/operation.h"
#include "megamoe/layer.h"

struct megamoe_layer {
    mm_cpu_layer cpu;
    megamoe_weights *weights; /* keeps mapped blobs alive; NULL where `blobs` has them */
    uint8_t *blobs;           /* this rank's experts, packed or copied */
};

struct megamoe_workspace {
    megamoe_comm *comm;
    megamoe_device *device;
    megamoe_shape shape;
    megamoe_capacity capacity;
    mm_cpu_workspace *cpu;
    mm_meeting *meeting; /* of folded ranks, which may meet later; else NULL */
    bool met;            /* peers are known and agree */
    bool staged;
    bool dead; /* after a deadline or an abort */
    megamoe_workspace_detail pending;
};

/* Fills the peers once all ranks have created theirs and compares shapes and capacities. */
MEGAMOE_CHECKED megamoe_status mm_workspace_meet(megamoe_workspace *workspace);

/* The pending error, once: MEGAMOE_OK if there is none. A dead workspace stays dead. */
MEGAMOE_CHECKED megamoe_status mm_workspace_take_pending(megamoe_workspace *workspace);

#endif
