/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/placement.h"

#include <string.h>

#include "t.h"

T_CASE(shares_are_contiguous) {
    for (int32_t ranks = 1; ranks <= 9; ranks++)
        for (int32_t n = 0; n <= 40; n++) {
            int32_t next = 0;
            for (int32_t r = 0; r < ranks; r++) {
                T_EQ_INT(mm_share_start(n, r, ranks), next);
                T_EQ_INT(mm_share_count(n, r, ranks), n / ranks + (r < n % ranks));
                next += mm_share_count(n, r, ranks);
            }
            T_EQ_INT(next, n);
        }
}

T_CASE(without_a_map_physical_is_logical) {
    for (int32_t rank = 0; rank < 3; rank++) {
        mm_placement p;
        T_OK(mm_placement_open(7, 7, NULL, rank, 3, &p));
        T_CHECK(p.identity);
        T_EQ_INT(p.logical, 7);
        T_EQ_INT(p.physical, 7);
        T_EQ_INT(p.rank, rank);
        T_EQ_INT(p.ranks, 3);
        T_EQ_INT(p.first, rank == 0 ? 0 : 1 + 2 * rank);
        T_EQ_INT(p.local, rank == 0 ? 3 : 2);
        for (int32_t e = 0; e < 7; e++) {
            T_EQ_INT(p.logical_of[e], e);
            T_EQ_INT(p.starts[e], e);
            T_EQ_INT(p.replicas[e], e);
            T_EQ_INT(mm_placement_of(&p, e, rank, 5), e);
        }
        T_EQ_INT(p.starts[7], 7);
        mm_placement_close(&p);
    }
}

/* Replicas of an expert stand in the order of their physical numbers and are used in turn. */
T_CASE(replicas) {
    static const int32_t map[] = {2, 0, 1, 2, 0, 2};
    static const int32_t starts[] = {0, 2, 3, 6}, replicas[] = {1, 4, 2, 0, 3, 5};
    mm_placement p;
    T_OK(mm_placement_open(3, 6, map, 1, 4, &p));
    T_CHECK(!p.identity);
    T_EQ_INT(p.first, 2);
    T_EQ_INT(p.local, 2);
    T_EQ_MEM(p.logical_of, map, sizeof map);
    T_EQ_MEM(p.starts, starts, sizeof starts);
    T_EQ_MEM(p.replicas, replicas, sizeof replicas);
    for (int32_t rank = 0; rank < 4; rank++)
        for (int64_t token = 0; token < 7; token++) {
            T_EQ_INT(mm_placement_of(&p, 0, rank, token), (rank + token) % 2 ? 4 : 1);
            T_EQ_INT(mm_placement_of(&p, 1, rank, token), 2);
            T_EQ_INT(mm_placement_of(&p, 2, rank, token), replicas[3 + (rank + token) % 3]);
        }
    /* The sum of rank and token may pass 32 bits. */
    T_EQ_INT(mm_placement_of(&p, 2, 1, INT64_C(1) << 32), replicas[3 + 2]);
    mm_placement_close(&p);
}

/* A map of as many physical as logical experts is a permutation. */
T_CASE(permutations) {
    static const int32_t same[] = {0, 1, 2}, turned[] = {1, 2, 0};
    mm_placement p;
    T_OK(mm_placement_open(3, 3, same, 0, 1, &p));
    T_CHECK(p.identity);
    mm_placement_close(&p);
    T_OK(mm_placement_open(3, 3, turned, 0, 1, &p));
    T_CHECK(!p.identity);
    T_EQ_INT(mm_placement_of(&p, 0, 0, 0), 2);
    T_EQ_INT(mm_placement_of(&p, 1, 0, 0), 0);
    mm_placement_close(&p);
}

/* More ranks than experts: some have none. */
T_CASE(ranks_without_experts) {
    mm_placement p;
    T_OK(mm_placement_open(2, 2, NULL, 3, 5, &p));
    T_EQ_INT(p.first, 2);
    T_EQ_INT(p.local, 0);
    mm_placement_close(&p);
}

static void refused(int32_t logical, int32_t physical, const int32_t *map, const char *named) {
    mm_placement p;
    T_STATUS(mm_placement_open(logical, physical, map, 0, 1, &p), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), named);
    mm_placement_close(&p);
}

T_CASE(maps_that_are_refused) {
    static const int32_t beyond[] = {0, 1, 2, 3}, negative[] = {0, -1, 1, 2},
                         lacking[] = {0, 2, 2, 0};
    refused(3, 4, beyond, "physical_to_logical[3] is 3; expected a logical expert, 0..2");
    refused(3, 4, negative, "physical_to_logical[1] is -1");
    refused(3, 4, lacking, "logical expert 1 is nowhere");
}
