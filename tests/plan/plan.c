/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/plan.h"

#include "t.h"

static const int32_t tiles[] = {8, 16, 32, 48, 64, 80, 96, 112};
enum { TILES = sizeof tiles / sizeof *tiles };

static int32_t tile(double routes) {
    return mm_plan_token_tile(tiles, TILES, routes);
}

T_CASE(routes_are_spread_over_all_experts) {
    T_EQ_F64(mm_plan_routes(0, 6, 256), 0);
    T_EQ_F64(mm_plan_routes(512, 6, 384), 8);
    T_EQ_F64(mm_plan_routes(1, 8, 256), 0.03125);
    T_EQ_F64(mm_plan_routes(INT64_C(64) << 24, 16, 1), 17179869184.0);
}

T_CASE(tiles_hold_the_mean_and_two_deviations) {
    T_EQ_INT(tile(0), 8);
    T_EQ_INT(tile(4), 8); /* 4 + 2 * 2 */
    T_EQ_INT(tile(4.01), 16);
    T_EQ_INT(tile(9), 16);   /* 15 */
    T_EQ_INT(tile(16), 32);  /* 24 */
    T_EQ_INT(tile(25), 48);  /* 35 */
    T_EQ_INT(tile(49), 64);  /* 63 */
    T_EQ_INT(tile(64), 80);  /* 80 */
    T_EQ_INT(tile(80), 112); /* 97.9 */
    T_EQ_INT(tile(110), 112);
    T_EQ_INT(tile(1e9), 112);
}

T_CASE(tiles_grow_with_the_batch) {
    int32_t before = 0;
    for (int32_t i = 0; i < 2000; i++) {
        const int32_t now = tile(i / 10.0);
        T_CHECK(now >= before);
        before = now;
    }
}

T_CASE(one_width_serves_all) {
    const int32_t one = 16;
    T_EQ_INT(mm_plan_token_tile(&one, 1, 0), 16);
    T_EQ_INT(mm_plan_token_tile(&one, 1, 500), 16);
}

T_CASE(stages_fill_shared_memory) {
    T_EQ_INT(mm_plan_stages(232448, 32448, 20000), 10);
    T_EQ_INT(mm_plan_stages(232448, 32449, 20000), 9);
    T_EQ_INT(mm_plan_stages(232448, 10000, 10000), MM_PLAN_STAGES_MAX);
    T_EQ_INT(mm_plan_stages(40000, 0, 20000), 2);
    T_EQ_INT(mm_plan_stages(39999, 0, 20000), 0);
    T_EQ_INT(mm_plan_stages(1000, 5000, 100), 0);
}

T_CASE(ranks_share_thread_blocks) {
    T_EQ_INT(mm_plan_blocks(132, 1), 132);
    T_EQ_INT(mm_plan_blocks(132, 8), 16);
    T_EQ_INT(mm_plan_blocks(7, 8), 0);
}

T_CASE(fc2_follows_one_and_a_half_waves_behind) {
    T_EQ_INT(mm_plan_lag(132, 16), 13); /* 198 / 16 = 12.4 */
    T_EQ_INT(mm_plan_lag(132, 1), 198);
    T_EQ_INT(mm_plan_lag(128, 12), 16);
    T_EQ_INT(mm_plan_lag(16, 24), 1);
    T_EQ_INT(mm_plan_lag(1, 8192), 1);
}
