/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MM_WEIGHTS_CPU_PACK_H
#define MM_WEIGHTS_CPU_PACK_H

#include "weights/cpu_layout.h"

/* The groups that a layout cannot hold, and the first of them. */
typedef struct mm_inexact {
    uint64_t groups;
    int32_t expert;
    megamoe_projection projection;
    int32_t row;
    int32_t block;
    int binades; /* of its scale above the row's base, 2^row_exponent */
} mm_inexact;

/* mm_cpu_pack_expert that counts instead of failing: adds to *inexact. Thread: any. */
void mm_cpu_pack(const megamoe_weights *weights, const mm_cpu_layout *layout, int32_t expert,
                 uint8_t *blob, mm_inexact *inexact);

/* Adds what was found elsewhere; the first that is added stays the one that is named. */
void mm_inexact_add(mm_inexact *total, const mm_inexact *found);

/* MEGAMOE_OK if no group is counted, else the failure that says which. */
MEGAMOE_CHECKED megamoe_status mm_inexact_status(const megamoe_weights *weights,
                                                 const mm_inexact *inexact);

#endif
