/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/plan.h"

#include "t.h"

/* Costs in units of reading an expert. */
static const mm_plan_tile tiles[] = {{8, 0.8},  {16, 0.85}, {32, 1},
                                     {48, 1.2}, {64, 1.4},  {128, 2.2}};
enum { TILES = sizeof tiles / sizeof *tiles };

static int32_t tile(double routes) {
    return mm_plan_token_tile(tiles, TILES, 1, routes);
}

T_CASE(routes_are_spread_over_all_experts) {
    T_EQ_F64(mm_plan_routes(0, 6, 256), 0);
    T_EQ_F64(mm_plan_routes(512, 6, 384), 8);
    T_EQ_F64(mm_plan_routes(1, 8, 256), 0.03125);
    T_EQ_F64(mm_plan_routes(INT64_C(64) << 24, 16, 1), 17179869184.0);
}

T_CASE(few_routes_are_held_by_one_tile) {
    T_EQ_INT(tile(0), 8);
    T_EQ_INT(tile(1), 8);
    T_EQ_INT(tile(6), 16);  /* 14 % of the experts have more than 8 */
    T_EQ_INT(tile(16), 32); /* half of them have more than 16 */
    T_EQ_INT(tile(24), 32); /* 4 % have more than 32: cheaper than 48 for all */
    T_EQ_INT(tile(36), 48);
    T_EQ_INT(tile(48), 64);
}

T_CASE(two_tiles_where_one_would_be_mostly_padding) {
    const mm_plan_tile some[] = {{48, 1.2}, {64, 1.4}, {128, 3}};
    T_EQ_INT(mm_plan_token_tile(some, 3, 1, 80), 48);  /* 2 * 1.2 and a third one for few */
    T_EQ_INT(mm_plan_token_tile(some, 3, 1, 100), 64); /* 2 * 1.4; 48 needs three */
}

T_CASE(many_routes_take_the_tile_that_is_cheapest_for_each) {
    T_EQ_INT(tile(3000), 128); /* 2.2 / 128 */
    T_EQ_INT(tile(1e9), 128);
    const mm_plan_tile dear[] = {{16, 1}, {32, 3}};
    T_EQ_INT(mm_plan_token_tile(dear, 2, 1, 1e6), 16);
}

T_CASE(reading_hides_what_multiplying_costs) {
    T_EQ_INT(mm_plan_token_tile(tiles, TILES, 0.1, 1), 8);
    T_EQ_INT(mm_plan_token_tile(tiles, TILES, 1.5, 50), 64); /* 1.4 < 1.5 */
}

T_CASE(one_width_serves_all) {
    const mm_plan_tile one = {16, 1};
    T_EQ_INT(mm_plan_token_tile(&one, 1, 1, 0), 16);
    T_EQ_INT(mm_plan_token_tile(&one, 1, 1, 500), 16);
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

T_CASE(fc2_follows_fc1_where_much_is_returned) {
    T_EQ_INT(mm_plan_lag(132, 16, 0), INT32_MAX);
    T_EQ_INT(mm_plan_lag(132, 16, 1e6), INT32_MAX);
    T_EQ_INT(mm_plan_lag(132, 16, 1e9), 13); /* 198 / 16 = 12.4 */
    T_EQ_INT(mm_plan_lag(132, 1, 1e9), 198);
    T_EQ_INT(mm_plan_lag(16, 24, 1e9), 1);
    T_EQ_INT(mm_plan_lag(1, 8192, 1e9), 1);
}

static void check_lags(int32_t teams, int32_t fc1_tiles, double token_tiles, int32_t n, int32_t a,
                       int32_t b, int32_t c) {
    int32_t lags[MM_PLAN_LAGS_MAX];
    const int32_t expected[] = {a, b, c};
    T_EQ_INT(mm_plan_lags(teams, fc1_tiles, token_tiles, lags), n);
    T_EQ_INT(lags[n - 1], INT32_MAX);
    T_EQ_MEM(lags, expected, (size_t)(n - 1) * sizeof *lags);
}

T_CASE(lags_that_are_worth_measuring) {
    check_lags(132, 16, 1000, 4, 9, 13, 25); /* 8.25, 12.4 and 24.75 */
    check_lags(132, 16, 25, 3, 9, 13, 0);    /* all token tiles: the same as INT32_MAX */
    check_lags(132, 16, 0, 1, 0, 0, 0);
    check_lags(1, 8192, 1000, 2, 1, 0, 0);
}
