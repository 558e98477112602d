/* SPDX-License-Identifier: Apache-2.0 */
/* Counting the scale groups that a layout cannot hold. */
#ifndef MM_WEIGHTS_INEXACT_H
#define MM_WEIGHTS_INEXACT_H

#include "megamoe/weights.h"

/* The groups that do not fit, and the first of them. */
typedef struct mm_inexact {
    uint64_t groups;
    int32_t expert;
    megamoe_projection projection;
    int32_t row;
    int32_t block;
    int binades;      /* of its scale above the row's base, 2^row_exponent */
    const char *held; /* what would have fit, as words for a message; a literal */
} mm_inexact;

/* Counts one group more; the first that is counted stays the one that is named. */
void mm_inexact_count(mm_inexact *total, mm_inexact group);

/* Adds what was found elsewhere, likewise. */
void mm_inexact_add(mm_inexact *total, const mm_inexact *found);

/* MEGAMOE_OK if no group is counted, else the failure that says which. */
MEGAMOE_CHECKED megamoe_status mm_inexact_status(const megamoe_weights *weights,
                                                 const mm_inexact *inexact);

#endif
