/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/placement.h"

#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"

int32_t mm_share_start(int32_t n, int32_t rank, int32_t ranks) {
    const int32_t longer = n % ranks;
    return rank * (n / ranks) + (rank < longer ? rank : longer);
}

int32_t mm_share_count(int32_t n, int32_t rank, int32_t ranks) {
    return n / ranks + (rank < n % ranks ? 1 : 0);
}

/* Checks the map and counts the replicas of each logical expert into `counts`. */
static megamoe_status count_replicas(mm_placement *placement, const int32_t *physical_to_logical,
                                     int32_t *counts) {
    for (int32_t p = 0; p < placement->physical; p++) {
        const int32_t e = physical_to_logical ? physical_to_logical[p] : p;
        if (e < 0 || e >= placement->logical)
            return mm_fail(MEGAMOE_EINVAL,
                           "physical_to_logical[%d] is %d; expected a logical expert, 0..%d", p, e,
                           placement->logical - 1);
        placement->logical_of[p] = e;
        placement->identity = placement->identity && e == p;
        counts[e]++;
    }
    for (int32_t e = 0; e < placement->logical; e++)
        if (counts[e] == 0)
            return mm_fail(MEGAMOE_EINVAL,
                           "physical_to_logical: logical expert %d is nowhere; each needs at least "
                           "one physical expert",
                           e);
    return MEGAMOE_OK;
}

megamoe_status mm_placement_open(int32_t logical, int32_t physical,
                                 const int32_t *physical_to_logical, int32_t rank, int32_t ranks,
                                 mm_placement *placement) {
    *placement = (mm_placement){.logical = logical,
                                .physical = physical,
                                .rank = rank,
                                .ranks = ranks,
                                .first = mm_share_start(physical, rank, ranks),
                                .local = mm_share_count(physical, rank, ranks),
                                .identity = logical == physical};
    placement->logical_of = mm_alloc((size_t)physical * sizeof(int32_t));
    placement->starts = mm_alloc(((size_t)logical + 1) * sizeof(int32_t));
    placement->replicas = mm_alloc((size_t)physical * sizeof(int32_t));
    int32_t *next = mm_alloc((size_t)logical * sizeof(int32_t));
    megamoe_status status;
    if (!placement->logical_of || !placement->starts || !placement->replicas || !next) {
        status = mm_fail(MEGAMOE_ENOMEM, "expert map: out of memory");
        goto done;
    }
    int32_t *counts = placement->starts + 1;
    MM_TRY_GOTO(count_replicas(placement, physical_to_logical, counts), done);
    for (int32_t e = 0; e < logical; e++) {
        next[e] = placement->starts[e];
        counts[e] += placement->starts[e];
    }
    for (int32_t p = 0; p < physical; p++)
        placement->replicas[next[placement->logical_of[p]]++] = p;
done:
    free(next);
    return status;
}

void mm_placement_close(mm_placement *placement) {
    free(placement->logical_of);
    free(placement->starts);
    free(placement->replicas);
    *placement = (mm_placement){0};
}
