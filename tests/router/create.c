/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "num/bf16.h"
#include "router/router.h"

enum { HIDDEN = 10, EXPERTS = 12, TOPK = 3 };

static megamoe_router_desc good_desc(void) {
    return (megamoe_router_desc){.struct_size = sizeof(megamoe_router_desc),
                                 .rule = MEGAMOE_ROUTER_SIGMOID,
                                 .hidden = HIDDEN,
                                 .experts = EXPERTS,
                                 .topk = TOPK,
                                 .groups = 4,
                                 .groups_kept = 2};
}

static float weight_data[EXPERTS][HIDDEN];
static const megamoe_view good_weight = {weight_data, MEGAMOE_DTYPE_F32, EXPERTS, 0};

static void check_refused(const megamoe_router_desc *desc, const char *part) {
    megamoe_router *router = (megamoe_router *)1;
    T_STATUS(megamoe_router_create(desc, &good_weight, NULL, NULL, NULL, &router), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), part);
    T_CHECK(router == NULL);
}

T_CASE(impossible_descs_are_refused) {
    const struct {
        size_t offset;
        int32_t value;
        const char *part;
    } integers[] = {
        {offsetof(megamoe_router_desc, rule), 0, "rule"},
        {offsetof(megamoe_router_desc, rule), 5, "rule"},
        {offsetof(megamoe_router_desc, rule), -1, "rule"},
        {offsetof(megamoe_router_desc, hidden), 0, "hidden"},
        {offsetof(megamoe_router_desc, hidden), INT32_MIN, "hidden"},
        {offsetof(megamoe_router_desc, experts), 0, "experts"},
        {offsetof(megamoe_router_desc, experts), -12, "experts"},
        {offsetof(megamoe_router_desc, topk), 0, "top-k"},
        {offsetof(megamoe_router_desc, topk), EXPERTS + 1, "top-k"},
        {offsetof(megamoe_router_desc, topk), 7, "top-k is 7, but 2 groups of 3"},
        {offsetof(megamoe_router_desc, groups), 5, "groups"},
        {offsetof(megamoe_router_desc, groups), -4, "groups"},
        {offsetof(megamoe_router_desc, groups_kept), 0, "groups kept"},
        {offsetof(megamoe_router_desc, groups_kept), 5, "groups kept"},
    };
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++) {
        megamoe_router_desc desc = good_desc();
        memcpy((char *)&desc + integers[i].offset, &integers[i].value, sizeof integers[i].value);
        check_refused(&desc, integers[i].part);
    }
    const struct {
        size_t offset;
        float value;
        const char *part;
    } floats[] = {
        {offsetof(megamoe_router_desc, scaling), NAN, "scaling"},
        {offsetof(megamoe_router_desc, scaling), INFINITY, "scaling"},
        {offsetof(megamoe_router_desc, normalize_epsilon), -1e-20f, "epsilon"},
        {offsetof(megamoe_router_desc, normalize_epsilon), NAN, "epsilon"},
        {offsetof(megamoe_router_desc, normalize_epsilon), INFINITY, "epsilon"},
        {offsetof(megamoe_router_desc, gate_temperature), -1, "temperature"},
        {offsetof(megamoe_router_desc, gate_temperature), NAN, "temperature"},
        {offsetof(megamoe_router_desc, gate_temperature), INFINITY, "temperature"},
    };
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) {
        megamoe_router_desc desc = good_desc();
        memcpy((char *)&desc + floats[i].offset, &floats[i].value, sizeof floats[i].value);
        check_refused(&desc, floats[i].part);
    }
    megamoe_router_desc desc = good_desc();
    desc.hash_vocab = -1;
    check_refused(&desc, "hash");
    desc = good_desc();
    desc.hash_vocab = 4;
    check_refused(&desc, "without a hash table");
    desc = good_desc();
    desc.struct_size = 0;
    check_refused(&desc, "MEGAMOE_INIT");
}

T_CASE(wrong_parts_are_named) {
    const megamoe_router_desc desc = good_desc();
    megamoe_router_desc hash_desc = desc;
    hash_desc.hash_vocab = 2;
    float bias[EXPERTS] = {0};
    int32_t table[2][TOPK] = {{0}};
    const megamoe_view wrong[] = {
        {NULL, MEGAMOE_DTYPE_F32, 1, 0},         {weight_data, MEGAMOE_DTYPE_I64, 1, 0},
        {weight_data, MEGAMOE_DTYPE_E4M3, 1, 0}, {weight_data, MEGAMOE_DTYPE_F32, 0, 0},
        {weight_data, MEGAMOE_DTYPE_F32, 13, 0}, {weight_data, MEGAMOE_DTYPE_F32, 1, -1},
        {weight_data, MEGAMOE_DTYPE_F32, 1, 2}};
    const megamoe_view good_table = {table, MEGAMOE_DTYPE_I32, 2, 0};
    const megamoe_view good_bias = {bias, MEGAMOE_DTYPE_F32, 1, 0};
    megamoe_router *router;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        T_STATUS(megamoe_router_create(&desc, &wrong[i], NULL, NULL, NULL, &router),
                 MEGAMOE_EINVAL);
        T_CONTAINS(megamoe_last_error(), "weight");
        T_STATUS(megamoe_router_create(&desc, &good_weight, &wrong[i], NULL, NULL, &router),
                 MEGAMOE_EINVAL);
        T_CONTAINS(megamoe_last_error(), "selection bias");
        T_STATUS(megamoe_router_create(&desc, &good_weight, NULL, &wrong[i], NULL, &router),
                 MEGAMOE_EINVAL);
        T_CONTAINS(megamoe_last_error(), "linear bias");
        megamoe_view wrong_table = wrong[i];
        if (wrong_table.dtype == MEGAMOE_DTYPE_I64)
            wrong_table.dtype = MEGAMOE_DTYPE_F32;
        T_STATUS(megamoe_router_create(&hash_desc, &good_weight, NULL, NULL, &wrong_table, &router),
                 MEGAMOE_EINVAL);
        T_CONTAINS(megamoe_last_error(), "hash table");
    }
    T_STATUS(megamoe_router_create(&desc, NULL, NULL, NULL, NULL, &router), MEGAMOE_EINVAL);
    T_STATUS(megamoe_router_create(&desc, &good_weight, NULL, NULL, &good_table, &router),
             MEGAMOE_EINVAL);
    T_STATUS(megamoe_router_create(&desc, &good_weight, &good_bias, &good_bias, NULL, NULL),
             MEGAMOE_EINVAL);
}

T_CASE(bad_hash_entries_are_named) {
    megamoe_router_desc desc = good_desc();
    desc.hash_vocab = 5;
    const int64_t bad[4] = {-1, EXPERTS, (int64_t)1 << 32, INT64_MIN};
    for (int i = 0; i < 4; i++) {
        int64_t table[5][TOPK] = {{0}};
        table[3][1] = bad[i];
        const megamoe_view view = {table, MEGAMOE_DTYPE_I64, 5, 0};
        megamoe_router *router;
        T_STATUS(megamoe_router_create(&desc, &good_weight, NULL, NULL, &view, &router),
                 MEGAMOE_EFORMAT);
        T_CONTAINS(megamoe_last_error(), "token id 3, slot 1");
        char text[32];
        snprintf(text, sizeof text, "expert %" PRId64, bad[i]);
        T_CONTAINS(megamoe_last_error(), text);
    }
}

T_CASE(describe_fills_in_defaults) {
    megamoe_router_desc desc = good_desc();
    desc.groups = 0;
    desc.groups_kept = 7;
    megamoe_router *router;
    T_OK(megamoe_router_create(&desc, &good_weight, NULL, NULL, NULL, &router));
    megamoe_router_desc described = MEGAMOE_INIT(megamoe_router_desc);
    T_OK(megamoe_router_describe(router, &described));
    T_EQ_INT(described.hidden, HIDDEN);
    T_EQ_INT(described.experts, EXPERTS);
    T_EQ_INT(described.topk, TOPK);
    T_EQ_INT(described.rule, MEGAMOE_ROUTER_SIGMOID);
    T_EQ_INT(described.groups, 1);
    T_EQ_INT(described.groups_kept, 1);
    T_EQ_F64((double)described.scaling, 1.0);
    T_EQ_F64((double)described.gate_temperature, 1.0);
    T_STATUS(megamoe_router_describe(NULL, &described), MEGAMOE_EINVAL);
    T_STATUS(megamoe_router_describe(router, NULL), MEGAMOE_EINVAL);
    megamoe_router_close(router);
    megamoe_router_close(NULL);
}

T_CASE(f32_and_bf16_parts_agree) {
    t_random random = t_random_start(11);
    megamoe_router_desc desc = good_desc();
    desc.groups = 0;
    fixture f = fixture_open(desc, 0, &random);
    float wide[EXPERTS][HIDDEN + 3];
    uint16_t narrow_bias[EXPERTS];
    float wide_bias[EXPERTS];
    for (int e = 0; e < EXPERTS; e++) {
        narrow_bias[e] = mm_bf16_from_f32((float)t_normal(&random));
        wide_bias[e] = mm_bf16_to_f32(narrow_bias[e]);
        for (int k = 0; k < HIDDEN; k++)
            wide[e][k] = mm_bf16_to_f32(f.weight[e * HIDDEN + k]);
    }
    const megamoe_view narrow_weight = {f.weight, MEGAMOE_DTYPE_BF16, EXPERTS, 0};
    const megamoe_view wide_weight = {wide, MEGAMOE_DTYPE_F32, EXPERTS, HIDDEN + 3};
    const megamoe_view narrow_view = {narrow_bias, MEGAMOE_DTYPE_BF16, 1, 0};
    const megamoe_view wide_view = {wide_bias, MEGAMOE_DTYPE_F32, 1, 0};
    megamoe_router *narrow;
    megamoe_router *widened;
    T_OK(megamoe_router_create(&desc, &narrow_weight, &narrow_view, &narrow_view, NULL, &narrow));
    T_OK(megamoe_router_create(&desc, &wide_weight, &wide_view, &wide_view, NULL, &widened));
    enum { N = 20 };
    uint16_t *x = fixture_tokens(&f, N, &random);
    int32_t ids[2][N][TOPK];
    float weights[2][N][TOPK];
    for (int i = 0; i < 2; i++) {
        const megamoe_view x_view = {x, MEGAMOE_DTYPE_BF16, N, 0};
        const megamoe_view ids_view = {ids[i], MEGAMOE_DTYPE_I32, N, 0};
        const megamoe_view weights_view = {weights[i], MEGAMOE_DTYPE_F32, N, 0};
        T_OK(megamoe_router_route(i ? widened : narrow, NULL, &x_view, NULL, N, &ids_view,
                                  &weights_view));
    }
    T_EQ_MEM(ids[0], ids[1], sizeof ids[0]);
    T_EQ_MEM(weights[0], weights[1], sizeof weights[0]);
    free(x);
    megamoe_router_close(narrow);
    megamoe_router_close(widened);
    fixture_close(&f);
}
