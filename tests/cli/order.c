/* SPDX-License-Identifier: Apache-2.0 */
#include "order.h"

#include "t.h"

T_CASE(each_arm_once_in_a_round) {
    for (int n = 1; n <= 17; n++)
        for (int64_t round = 0; round < 40; round++) {
            unsigned seen = 0;
            for (int i = 0; i < n; i++)
                seen |= 1U << order_of_round(5, round, n, i);
            T_EQ_INT(seen, (1U << n) - 1);
        }
}

T_CASE(each_arm_once_at_each_place) {
    for (int n = 1; n <= 17; n++)
        for (int i = 0; i < n; i++) {
            unsigned seen = 0;
            for (int64_t round = 2 * n; round < 3 * n; round++)
                seen |= 1U << order_of_round(6, round, n, i);
            T_EQ_INT(seen, (1U << n) - 1);
        }
}

/* Of 3 arms each of the 6 orders begins about a sixth of the groups of rounds. */
T_CASE(all_orders_occur) {
    enum { GROUPS = 600 };
    int times[9] = {0};
    for (int64_t group = 0; group < GROUPS; group++)
        times[3 * order_of_round(7, 3 * group, 3, 0) + order_of_round(7, 3 * group, 3, 1)]++;
    for (int i = 0; i < 9; i++)
        if (i % 4 == 0)
            T_EQ_INT(times[i], 0);
        else
            T_NEAR(times[i], 100, 45);
}

T_CASE(seeds_have_orders_of_their_own) {
    int same = 0;
    for (int64_t round = 0; round < 100; round++)
        same += order_of_round(1, round, 5, 0) == order_of_round(2, round, 5, 0);
    T_CHECK(same < 50);
}
