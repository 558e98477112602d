/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/balance.h"

#include <stdbool.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"
#include "plan/placement.h"

/* One replica on its way to a rank. */
struct replica {
    int32_t expert;
    double load; /* its share */
};

struct balance {
    const int64_t *loads;
    int32_t experts, ranks, physical;
    int32_t *replicas;     /* [experts]: how many */
    struct replica *order; /* [physical] */
    double *carried;       /* [ranks] */
    int32_t *placed;       /* [ranks]: physical experts so far */
    int32_t *map;          /* [physical] */
};

static double share_of(const struct balance *b, int32_t expert) {
    return (double)b->loads[expert] / b->replicas[expert];
}

/* Whether `a` is to have the next replica rather than `b`, which comes before it. */
static bool needs_more(const struct balance *b, int32_t one, int32_t best) {
    const bool full = b->replicas[one] >= b->ranks, best_full = b->replicas[best] >= b->ranks;
    if (full != best_full)
        return best_full;
    if (share_of(b, one) != share_of(b, best))
        return share_of(b, one) > share_of(b, best);
    return b->replicas[one] < b->replicas[best];
}

static void give_replicas(struct balance *b) {
    for (int32_t e = 0; e < b->experts; e++)
        b->replicas[e] = 1;
    for (int32_t left = b->physical - b->experts; left > 0; left--) {
        int32_t best = 0;
        for (int32_t e = 1; e < b->experts; e++)
            if (needs_more(b, e, best))
                best = e;
        b->replicas[best]++;
    }
}

static int compare_replicas(const void *a, const void *b) {
    const struct replica *one = a, *other = b;
    if (one->load != other->load)
        return one->load > other->load ? -1 : 1;
    return (one->expert > other->expert) - (one->expert < other->expert);
}

static int compare_numbers(const void *a, const void *b) {
    const int32_t one = *(const int32_t *)a, other = *(const int32_t *)b;
    return (one > other) - (one < other);
}

/* This rank's part of the map, as far as it is filled. */
static int32_t *part_of(const struct balance *b, int32_t rank) {
    return b->map + mm_share_start(b->physical, rank, b->ranks);
}

static bool has(const struct balance *b, int32_t rank, int32_t expert) {
    const int32_t *part = part_of(b, rank);
    for (int32_t i = 0; i < b->placed[rank]; i++)
        if (part[i] == expert)
            return true;
    return false;
}

static int32_t rank_for(const struct balance *b, int32_t expert) {
    int32_t best = -1;
    bool best_has = true;
    for (int32_t r = 0; r < b->ranks; r++) {
        if (b->placed[r] == mm_share_count(b->physical, r, b->ranks))
            continue;
        const bool this_has = has(b, r, expert);
        if (best < 0 || (best_has && !this_has) ||
            (best_has == this_has && b->carried[r] < b->carried[best])) {
            best = r;
            best_has = this_has;
        }
    }
    return best;
}

static void spread(struct balance *b) {
    int32_t n = 0;
    for (int32_t e = 0; e < b->experts; e++)
        for (int32_t i = 0; i < b->replicas[e]; i++)
            b->order[n++] = (struct replica){e, share_of(b, e)};
    qsort(b->order, (size_t)n, sizeof *b->order, compare_replicas);
    for (int32_t i = 0; i < n; i++) {
        const int32_t rank = rank_for(b, b->order[i].expert);
        part_of(b, rank)[b->placed[rank]++] = b->order[i].expert;
        b->carried[rank] += b->order[i].load;
    }
    for (int32_t r = 0; r < b->ranks; r++)
        qsort(part_of(b, r), (size_t)b->placed[r], sizeof(int32_t), compare_numbers);
}

megamoe_status mm_balance(const int64_t *loads, int32_t experts, int32_t ranks, int32_t physical,
                          int32_t *physical_to_logical) {
    struct balance b = {.loads = loads,
                        .experts = experts,
                        .ranks = ranks,
                        .physical = physical,
                        .replicas = mm_alloc((size_t)experts * sizeof *b.replicas),
                        .order = mm_alloc((size_t)physical * sizeof *b.order),
                        .carried = mm_alloc((size_t)ranks * sizeof *b.carried),
                        .placed = mm_alloc((size_t)ranks * sizeof *b.placed),
                        .map = physical_to_logical};
    const bool complete = b.replicas && b.order && b.carried && b.placed;
    if (complete) {
        give_replicas(&b);
        spread(&b);
    }
    free(b.replicas);
    free(b.order);
    free(b.carried);
    free(b.placed);
    return complete ? MEGAMOE_OK : mm_fail(MEGAMOE_ENOMEM, "placement: out of memory");
}
