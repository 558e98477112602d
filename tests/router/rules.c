/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>

#include "fixture.h"
#include "num/bf16.h"
#include "router/scores.h"

static void check_rule(megamoe_router_desc desc, int biases, int64_t n) {
    t_random random = t_random_start(2);
    fixture f = fixture_open(desc, biases, &random);
    uint16_t *x = fixture_tokens(&f, n, &random);
    int32_t *ids = calloc((size_t)(n * desc.topk), sizeof *ids);
    float *weights = calloc((size_t)(n * desc.topk), sizeof *weights);
    int64_t *input_ids = calloc((size_t)n, sizeof *input_ids);
    for (int64_t t = 0; t < n && desc.hash_vocab; t++)
        input_ids[t] = t_below(&random, (uint32_t)desc.hash_vocab);
    fixture_route(&f, 0, x, desc.hash_vocab ? input_ids : NULL, n, ids, weights);
    for (int64_t t = 0; t < n; t++)
        fixture_check(&f, x + t * desc.hidden, input_ids[t], ids + t * desc.topk,
                      weights + t * desc.topk);
    free(input_ids);
    free(weights);
    free(ids);
    free(x);
    fixture_close(&f);
}

T_CASE(deepseek_v4) {
    check_rule((megamoe_router_desc){.rule = MEGAMOE_ROUTER_SQRT_SOFTPLUS,
                                     .hidden = 96,
                                     .experts = 64,
                                     .topk = 6,
                                     .normalize = true,
                                     .scaling = 1.5f},
               WITH_SELECTION_BIAS, 200);
}

T_CASE(deepseek_v41_temperature_and_epsilon) {
    check_rule((megamoe_router_desc){.rule = MEGAMOE_ROUTER_SQRT_SOFTPLUS,
                                     .hidden = 97,
                                     .experts = 37,
                                     .topk = 5,
                                     .normalize = true,
                                     .normalize_epsilon = 0.25f,
                                     .gate_temperature = 0.5f,
                                     .scaling = 2.5f},
               WITH_SELECTION_BIAS, 100);
}

T_CASE(deepseek_v4_hash_layer) {
    check_rule((megamoe_router_desc){.rule = MEGAMOE_ROUTER_SQRT_SOFTPLUS,
                                     .hidden = 33,
                                     .experts = 24,
                                     .topk = 6,
                                     .normalize = true,
                                     .scaling = 1.5f,
                                     .hash_vocab = 301},
               0, 300);
}

T_CASE(deepseek_v3_groups) {
    check_rule((megamoe_router_desc){.rule = MEGAMOE_ROUTER_SIGMOID,
                                     .hidden = 64,
                                     .experts = 128,
                                     .topk = 8,
                                     .groups = 8,
                                     .groups_kept = 4,
                                     .normalize = true,
                                     .normalize_epsilon = 1e-20f,
                                     .scaling = 2.5f},
               WITH_SELECTION_BIAS, 200);
}

T_CASE(groups_of_one_and_of_an_odd_size) {
    check_rule((megamoe_router_desc){.rule = MEGAMOE_ROUTER_SIGMOID,
                                     .hidden = 16,
                                     .experts = 9,
                                     .topk = 3,
                                     .groups = 9,
                                     .groups_kept = 3},
               WITH_SELECTION_BIAS, 50);
    check_rule((megamoe_router_desc){.rule = MEGAMOE_ROUTER_SIGMOID,
                                     .hidden = 16,
                                     .experts = 35,
                                     .topk = 7,
                                     .groups = 5,
                                     .groups_kept = 1},
               0, 50);
}

T_CASE(kimi_sigmoid_without_groups) {
    check_rule((megamoe_router_desc){.rule = MEGAMOE_ROUTER_SIGMOID,
                                     .hidden = 40,
                                     .experts = 48,
                                     .topk = 8,
                                     .normalize = true,
                                     .scaling = 2.827f},
               WITH_SELECTION_BIAS, 100);
}

T_CASE(qwen3_softmax) {
    for (int normalize = 0; normalize < 2; normalize++)
        check_rule((megamoe_router_desc){.rule = MEGAMOE_ROUTER_SOFTMAX,
                                         .hidden = 65,
                                         .experts = 128,
                                         .topk = 8,
                                         .normalize = normalize != 0},
                   0, 100);
}

T_CASE(gpt_oss_softmax_of_the_chosen) {
    for (int normalize = 0; normalize < 2; normalize++)
        check_rule((megamoe_router_desc){.rule = MEGAMOE_ROUTER_SOFTMAX_SELECTED,
                                         .hidden = 90,
                                         .experts = 32,
                                         .topk = 4,
                                         .normalize = normalize != 0},
                   WITH_LINEAR_BIAS, 100);
}

T_CASE(all_experts_chosen) {
    check_rule(
        (megamoe_router_desc){
            .rule = MEGAMOE_ROUTER_SOFTMAX, .hidden = 7, .experts = 17, .topk = 17},
        WITH_LINEAR_BIAS | WITH_SELECTION_BIAS, 20);
    check_rule(
        (megamoe_router_desc){.rule = MEGAMOE_ROUTER_SIGMOID, .hidden = 1, .experts = 1, .topk = 1},
        0, 20);
}

/* Experts whose logits are those given, at x = 1. */
static megamoe_router *router_of_logits(megamoe_router_desc desc, const float *logits) {
    desc.struct_size = sizeof desc;
    desc.hidden = 1;
    const megamoe_view weight = {(void *)(uintptr_t)logits, MEGAMOE_DTYPE_F32, desc.experts, 0};
    megamoe_router *router;
    T_OK(megamoe_router_create(&desc, &weight, NULL, NULL, NULL, &router));
    return router;
}

static void route_one(const megamoe_router *router, int32_t *ids, float *weights) {
    uint16_t one = mm_bf16_from_f32(1);
    const megamoe_view x = {&one, MEGAMOE_DTYPE_BF16, 1, 0};
    const megamoe_view ids_view = {ids, MEGAMOE_DTYPE_I32, 1, 0};
    const megamoe_view weights_view = {weights, MEGAMOE_DTYPE_F32, 1, 0};
    T_OK(megamoe_router_route(router, NULL, &x, NULL, 1, &ids_view, &weights_view));
}

T_CASE(published_values_of_sqrt_softplus) {
    const float logits[3] = {0, 1, -1};
    const double expected[3] = {1.14598, 0.83255, 0.55970};
    megamoe_router *router = router_of_logits(
        (megamoe_router_desc){.rule = MEGAMOE_ROUTER_SQRT_SOFTPLUS, .experts = 3, .topk = 3},
        logits);
    int32_t ids[3];
    float weights[3];
    route_one(router, ids, weights);
    const int32_t order[3] = {1, 0, 2};
    for (int i = 0; i < 3; i++) {
        T_EQ_INT(ids[i], order[i]);
        T_NEAR((double)weights[i], expected[i], 6e-6);
    }
    megamoe_router_close(router);
}

static double ulp(double value) {
    const float magnitude = fmaxf(fabsf((float)value), 0x1p-126f);
    return (double)(nextafterf(magnitude, INFINITY) - magnitude);
}

T_CASE(softplus_within_two_ulp) {
    for (int i = -13000; i <= 13000; i++) {
        const float x = (float)i / 128.0f;
        const double expected = (x > 0 ? (double)x : 0) + log1p(exp(-fabs((double)x)));
        T_NEAR((double)mm_softplus(x), expected, 2 * ulp(expected));
    }
    T_EQ_F64((double)mm_softplus(-INFINITY), 0.0);
    T_EQ_F64((double)mm_softplus(INFINITY), (double)INFINITY);
    T_CHECK(isnan(mm_softplus(NAN)));
    T_EQ_F64((double)mm_softplus(-0.0f), (double)(float)log(2));
}

T_CASE(softplus_never_decreases) {
    float last = mm_softplus(-110.0f);
    for (int i = -1100000; i <= 300000; i++) {
        const float now = mm_softplus((float)i / 10000.0f);
        if (!T_CHECK_MSG(now >= last, "at %g", (double)i / 10000))
            break;
        last = now;
    }
}

T_CASE(ties_go_to_the_lowest_id) {
    float logits[40];
    for (int e = 0; e < 40; e++)
        logits[e] = e % 10 == 3 ? 2.0f : 1.0f;
    const int32_t expected[7] = {3, 13, 23, 33, 0, 1, 2};
    for (int rule = MEGAMOE_ROUTER_SOFTMAX; rule <= MEGAMOE_ROUTER_SOFTMAX_SELECTED; rule++) {
        megamoe_router *router = router_of_logits(
            (megamoe_router_desc){.rule = (megamoe_router_rule)rule, .experts = 40, .topk = 7},
            logits);
        int32_t ids[7];
        float weights[7];
        route_one(router, ids, weights);
        for (int i = 0; i < 7; i++)
            T_EQ_INT(ids[i], expected[i]);
        megamoe_router_close(router);
    }
}

T_CASE(equal_groups_go_to_the_lowest) {
    const float logits[16] = {0};
    megamoe_router *router = router_of_logits((megamoe_router_desc){.rule = MEGAMOE_ROUTER_SIGMOID,
                                                                    .experts = 16,
                                                                    .topk = 6,
                                                                    .groups = 4,
                                                                    .groups_kept = 2},
                                              logits);
    int32_t ids[6];
    float weights[6];
    route_one(router, ids, weights);
    for (int i = 0; i < 6; i++) {
        T_EQ_INT(ids[i], i);
        T_EQ_F64((double)weights[i], 0.5);
    }
    megamoe_router_close(router);
}

T_CASE(a_group_counts_by_its_two_largest) {
    /* Group 1 has the largest expert, group 0 the largest pair, group 2 the largest sum of all. */
    const float logits[12] = {2, 2, -9, -9, 3, -9, -9, -9, 1, 1, 1, 1};
    megamoe_router *router = router_of_logits((megamoe_router_desc){.rule = MEGAMOE_ROUTER_SIGMOID,
                                                                    .experts = 12,
                                                                    .topk = 2,
                                                                    .groups = 3,
                                                                    .groups_kept = 1},
                                              logits);
    int32_t ids[2];
    float weights[2];
    route_one(router, ids, weights);
    T_EQ_INT(ids[0], 0);
    T_EQ_INT(ids[1], 1);
    megamoe_router_close(router);
}

T_CASE(large_logits_do_not_overflow) {
    const float logits[4] = {3e38f, -3e38f, 2.9e38f, 0};
    for (int rule = MEGAMOE_ROUTER_SOFTMAX; rule <= MEGAMOE_ROUTER_SOFTMAX_SELECTED; rule++) {
        megamoe_router *router = router_of_logits(
            (megamoe_router_desc){
                .rule = (megamoe_router_rule)rule, .experts = 4, .topk = 4, .normalize = true},
            logits);
        int32_t ids[4];
        float weights[4];
        route_one(router, ids, weights);
        T_EQ_INT(ids[0], 0);
        double sum = 0;
        for (int i = 0; i < 4; i++)
            sum += (double)weights[i];
        T_NEAR(sum, 1.0, 1e-6);
        megamoe_router_close(router);
    }
}

T_CASE(infinite_bias_excludes_an_expert) {
    const float logits[4] = {4, 3, 2, 1};
    float bias[4] = {-INFINITY, 0, 0, 0};
    megamoe_router_desc desc = {.struct_size = sizeof desc,
                                .rule = MEGAMOE_ROUTER_SIGMOID,
                                .hidden = 1,
                                .experts = 4,
                                .topk = 2};
    const megamoe_view weight = {(void *)(uintptr_t)logits, MEGAMOE_DTYPE_F32, 4, 0};
    const megamoe_view bias_view = {bias, MEGAMOE_DTYPE_F32, 1, 0};
    megamoe_router *router;
    T_OK(megamoe_router_create(&desc, &weight, &bias_view, NULL, NULL, &router));
    int32_t ids[2];
    float weights[2];
    route_one(router, ids, weights);
    T_EQ_INT(ids[0], 1);
    T_EQ_INT(ids[1], 2);
    megamoe_router_close(router);
}

T_CASE(names_of_rules) {
    T_EQ_STR(megamoe_router_rule_name(MEGAMOE_ROUTER_SOFTMAX), "softmax");
    T_EQ_STR(megamoe_router_rule_name(MEGAMOE_ROUTER_SIGMOID), "sigmoid");
    T_EQ_STR(megamoe_router_rule_name(MEGAMOE_ROUTER_SQRT_SOFTPLUS), "sqrt-softplus");
    T_EQ_STR(megamoe_router_rule_name(MEGAMOE_ROUTER_SOFTMAX_SELECTED), "softmax-selected");
    T_EQ_STR(megamoe_router_rule_name((megamoe_router_rule)9), "unknown");
}
