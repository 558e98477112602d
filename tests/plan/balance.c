/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/balance.h"

#include "plan/placement.h"
#include "t.h"

/* By hand: expert 2 has half of all work. */
T_CASE(the_rule_by_hand) {
    static const int64_t loads[] = {10, 20, 80, 20, 30, 0};
    static const int32_t two_ranks[] = {0, 2, 5, /**/ 1, 3, 4};
    /* Three replicas of expert 2, after 4, which carries the most for one. */
    static const int32_t four_ranks[] = {4, 5, /**/ 1, 2, /**/ 2, 3, /**/ 0, 2};
    int32_t map[8];
    T_OK(mm_balance(loads, 6, 2, 6, map));
    T_EQ_MEM(map, two_ranks, sizeof two_ranks);
    T_OK(mm_balance(loads, 6, 4, 8, map));
    T_EQ_MEM(map, four_ranks, sizeof four_ranks);
}

T_CASE(without_loads_nothing_moves) {
    static const int64_t none[7] = {0};
    int32_t map[7];
    T_OK(mm_balance(none, 7, 3, 7, map));
    for (int32_t p = 0; p < 7; p++)
        T_EQ_INT(map[p], p);
}

static double heaviest(const int64_t *loads, int32_t experts, int32_t ranks, int32_t physical,
                       const int32_t *map) {
    mm_placement p;
    T_OK(mm_placement_open(experts, physical, map, 0, ranks, &p));
    double most = 0;
    for (int32_t r = 0; r < ranks; r++) {
        double carried = 0;
        const int32_t first = mm_share_start(physical, r, ranks);
        for (int32_t i = first; i < first + mm_share_count(physical, r, ranks); i++) {
            const int32_t e = map[i];
            carried += (double)loads[e] / (p.starts[e + 1] - p.starts[e]);
            T_CHECK(i == first || map[i - 1] <= e);
        }
        most = carried > most ? carried : most;
    }
    mm_placement_close(&p);
    return most;
}

/* Legal, in order, and the same again. */
T_CASE(random_loads) {
    t_random random = t_random_start(1);
    for (int round = 0; round < 300; round++) {
        const int32_t experts = 1 + (int32_t)t_below(&random, 64);
        const int32_t ranks = 1 + (int32_t)t_below(&random, 9);
        const int32_t physical = experts + (int32_t)t_below(&random, 20);
        int64_t loads[64], total = 0;
        int32_t map[84], again[84];
        for (int32_t e = 0; e < experts; e++)
            total += loads[e] = t_below(&random, 4) ? (int64_t)t_below(&random, 1000) : 0;
        T_OK(mm_balance(loads, experts, ranks, physical, map));
        T_OK(mm_balance(loads, experts, ranks, physical, again));
        T_EQ_MEM(map, again, (size_t)physical * sizeof *map);
        const double most = heaviest(loads, experts, ranks, physical, map);
        T_CHECK(most * ranks >= (double)total * 0.999999);
    }
}

T_CASE(replicas_of_one_expert_are_on_different_ranks) {
    static const int64_t loads[] = {1000, 1, 1, 1, 1};
    int32_t map[8];
    T_OK(mm_balance(loads, 5, 4, 8, map));
    for (int32_t r = 0; r < 4; r++)
        T_CHECK(map[2 * r] == 0 || map[2 * r + 1] == 0);
}
