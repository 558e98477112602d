/* SPDX-License-Identifier: Apache-2.0 */
/* Where the experts lie: shares of ranks, and replicas. */
#ifndef MM_PLAN_PLACEMENT_H
#define MM_PLAN_PLACEMENT_H

#include <stdbool.h>
#include <stdint.h>

#include "megamoe/status.h"

/* First index and count of a rank's share of n things in contiguous parts; the first
 * (n mod ranks) parts are one longer. */
int32_t mm_share_start(int32_t n, int32_t rank, int32_t ranks);
int32_t mm_share_count(int32_t n, int32_t rank, int32_t ranks);

typedef struct mm_placement {
    int32_t logical, physical;
    int32_t rank, ranks;
    int32_t first, local; /* this rank's physical experts */
    bool identity;        /* physical expert p holds logical expert p, and there is no other */
    int32_t *logical_of;  /* [physical] */
    /* The physical experts of logical e: replicas[starts[e]] .. replicas[starts[e + 1] - 1]. */
    int32_t *starts;   /* [logical + 1] */
    int32_t *replicas; /* [physical] */
} mm_placement;

/*
 * Places `physical` experts as `physical_to_logical` says; NULL: physical = logical, equal counts.
 * The map is copied. mm_placement_close frees, also after a failure.
 * Returns: MEGAMOE_EINVAL (an entry out of range, a logical expert that is nowhere),
 * MEGAMOE_ENOMEM.
 */
MEGAMOE_CHECKED megamoe_status mm_placement_open(int32_t logical, int32_t physical,
                                                 const int32_t *physical_to_logical, int32_t rank,
                                                 int32_t ranks, mm_placement *placement);
void mm_placement_close(mm_placement *placement);

/* The physical expert that computes a route; id is in 0..logical-1. */
static inline int32_t mm_placement_of(const mm_placement *placement, int32_t id, int32_t rank,
                                      int64_t token) {
    const int32_t start = placement->starts[id];
    const int32_t count = placement->starts[id + 1] - start;
    return placement->replicas[count == 1 ? start : start + (int32_t)((rank + token) % count)];
}

#endif
