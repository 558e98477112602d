/* SPDX-License-Identifier: Apache-2.0 */
/* Routers of checkpoints: which rule, which keys, which tensors. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

static const sizes small = {.hidden = 32, .intermediate = 32, .experts = 8};
enum { TOPK = 2, VOCAB = 11 };

/* A layer of DeepSeek-V4 with a router: of a hash layer or with a selection bias. */
static built v4(int32_t layer, bool hash) {
    built model = built_start();
    add_mxfp4(&model, "layers.%d.ffn.", layer, numbered, "scale", small);
    built_tensor *gate = built_add(&model, "BF16", SHAPE(small.experts, small.hidden),
                                   "layers.%d.ffn.gate.weight", layer);
    randomize(&model, gate, 0x30, 0x3F);
    if (!hash) {
        built_tensor *bias =
            built_add(&model, "F32", SHAPE(small.experts), "layers.%d.ffn.gate.bias", layer);
        randomize(&model, bias, 0x30, 0x3F);
        return model;
    }
    built_tensor *table =
        built_add(&model, "I64", SHAPE(VOCAB, TOPK), "layers.%d.ffn.gate.tid2eid", layer);
    for (int64_t i = 0; i < VOCAB * TOPK; i++)
        table->data[8 * i] = (uint8_t)((3 * i + 1) % small.experts);
    return model;
}

static const char v4_config[] =
    "{\"model_type\":\"deepseek_v4\",\"num_experts_per_tok\":2,\"n_routed_experts\":8,"
    "\"hidden_size\":32,\"scoring_func\":\"sqrtsoftplus\",\"topk_method\":\"noaux_tc\","
    "\"norm_topk_prob\":true,\"routed_scaling_factor\":1.5,\"num_hash_layers\":3}";

/* Opens, takes the router of a layer and describes it. The caller closes the router. */
static megamoe_router *router_of(const char *path, int32_t layer, megamoe_router_desc *desc) {
    megamoe_checkpoint *checkpoint = opened(path);
    megamoe_router *router = NULL;
    T_OK(megamoe_checkpoint_router(checkpoint, layer, &router));
    *desc = (megamoe_router_desc)MEGAMOE_INIT(megamoe_router_desc);
    T_OK(megamoe_router_describe(router, desc));
    megamoe_checkpoint_close(checkpoint);
    return router;
}

static void route(const megamoe_router *router, const int64_t *token, int32_t *ids,
                  float *weights) {
    uint16_t x[32];
    for (int i = 0; i < 32; i++)
        x[i] = (uint16_t)(0x3F00 + 7 * i); /* BF16 between 0.5 and 2 */
    const megamoe_view input = {x, MEGAMOE_DTYPE_BF16, 1, 0};
    const megamoe_view token_ids = {(void *)token, MEGAMOE_DTYPE_I64, 1, 0};
    const megamoe_view id_view = {ids, MEGAMOE_DTYPE_I32, 1, 0};
    const megamoe_view weight_view = {weights, MEGAMOE_DTYPE_F32, 1, 0};
    T_OK(megamoe_router_route(router, NULL, &input, token ? &token_ids : NULL, 1, &id_view,
                              &weight_view));
}

T_CASE(deepseek_v4_selects_by_biased_sqrt_softplus) {
    built model = v4(3, false);
    /* The bias of image tokens is no part of it. */
    built_add(&model, "F32", SHAPE(3), "layers.3.ffn.gate.bias_vl");
    megamoe_router_desc desc;
    const char *path = save_model(&model, v4_config);
    megamoe_router *router = router_of(path, 3, &desc);
    T_EQ_INT(desc.rule, MEGAMOE_ROUTER_SQRT_SOFTPLUS);
    T_EQ_INT(desc.hidden, small.hidden);
    T_EQ_INT(desc.experts, small.experts);
    T_EQ_INT(desc.topk, TOPK);
    T_CHECK(desc.groups <= 1);
    T_CHECK(desc.normalize);
    T_EQ_F64((double)desc.normalize_epsilon, (double)1e-20f);
    T_EQ_F64((double)desc.scaling, 1.5);
    T_EQ_F64((double)desc.gate_temperature, 1);
    T_EQ_INT(desc.hash_vocab, 0);
    int32_t ids[TOPK];
    float weights[TOPK];
    route(router, NULL, ids, weights);
    T_NEAR((double)(weights[0] + weights[1]), 1.5, 1e-6);
    megamoe_router_close(router);

    /* A huge bias decides, so the checkpoint's was used. */
    built_tensor *bias = built_find(&model, "layers.3.ffn.gate.bias");
    memset(bias->data, 0, bias->bytes);
    const float huge[2] = {200.0f, 100.0f};
    memcpy(bias->data + 5 * sizeof(float), &huge[0], sizeof(float));
    memcpy(bias->data + 1 * sizeof(float), &huge[1], sizeof(float));
    router = router_of(save_model(&model, v4_config), 3, &desc);
    route(router, NULL, ids, weights);
    T_EQ_INT(ids[0], 5);
    T_EQ_INT(ids[1], 1);
    megamoe_router_close(router);
    T_OK(try_weights(path, 3));
    built_free(&model);
}

T_CASE(hash_layers_take_their_experts_from_the_table) {
    built model = v4(2, true);
    megamoe_router_desc desc;
    megamoe_router *router = router_of(save_model(&model, v4_config), 2, &desc);
    T_EQ_INT(desc.hash_vocab, VOCAB);
    T_EQ_INT(desc.rule, MEGAMOE_ROUTER_SQRT_SOFTPLUS);
    for (int64_t token = 0; token < VOCAB; token++) {
        int32_t ids[TOPK];
        float weights[TOPK];
        route(router, &token, ids, weights);
        for (int k = 0; k < TOPK; k++)
            T_EQ_INT(ids[k], (3 * (token * TOPK + k) + 1) % small.experts);
        T_NEAR((double)(weights[0] + weights[1]), 1.5, 1e-6);
    }
    megamoe_router_close(router);

    /* Without a config the table still tells how many experts a token gets, to the weights. */
    megamoe_checkpoint *checkpoint = opened(save_model(&model, NULL));
    megamoe_weights *taken;
    T_OK(megamoe_checkpoint_weights(checkpoint, 2, &taken));
    megamoe_layer_desc layer = MEGAMOE_INIT(megamoe_layer_desc);
    T_OK(megamoe_weights_describe(taken, &layer));
    T_EQ_INT(layer.topk, TOPK);
    megamoe_weights_close(taken);
    megamoe_checkpoint_close(checkpoint);
    built_free(&model);
}

T_CASE(hash_tables_that_do_not_fit_are_refused) {
    const char *name = "layers.2.ffn.gate.tid2eid";
    built model = v4(2, true);
    built_find(&model, name)->data[8 * 5] = 8;
    FAILS(try_router(save_model(&model, v4_config), 2), MEGAMOE_EFORMAT, name, "8");
    built_find(&model, name)->data[8 * 5] = 0xFF;
    memset(built_find(&model, name)->data + 8 * 5, 0xFF, 8);
    FAILS(try_router(save_model(&model, v4_config), 2), MEGAMOE_EFORMAT, name, "-1");
    built_remove(&model, name);
    built_add(&model, "I64", SHAPE(VOCAB, 3), "%s", name);
    FAILS(try_router(save_model(&model, v4_config), 2), MEGAMOE_EFORMAT, name, "[11, 3]",
          "[11, 2]");
    built_remove(&model, name);
    built_add(&model, "F32", SHAPE(VOCAB, 2), "%s", name);
    FAILS(try_router(save_model(&model, v4_config), 2), MEGAMOE_EFORMAT, name, "F32", "I64");
    built_remove(&model, name);
    FAILS(try_router(save_model(&model, v4_config), 2), MEGAMOE_EFORMAT, "num_hash_layers is 3",
          "layer 2", "tid2eid");
    built_free(&model);
    model = v4(3, true);
    FAILS(try_router(save_model(&model, v4_config), 3), MEGAMOE_EFORMAT,
          "layers.3.ffn.gate.tid2eid", "num_hash_layers", "3");
    built_free(&model);
}

T_CASE(a_table_at_an_odd_address_is_read) {
    built model = v4(0, true);
    const char *path = save_model(&model, v4_config);
    const char *file_path = t_path("model/model.safetensors");
    size_t bytes;
    uint8_t *file = t_read_file(file_path, &bytes);
    /* One more space in the header moves all data by a byte. */
    const size_t header = file[0] | (size_t)file[1] << 8;
    uint8_t *moved = malloc(bytes + 1);
    memcpy(moved, file, 8 + header);
    moved[8 + header] = ' ';
    memcpy(moved + 9 + header, file + 8 + header, bytes - 8 - header);
    moved[0] = (uint8_t)(header + 1);
    moved[1] = (uint8_t)((header + 1) >> 8);
    t_write_file(file_path, moved, bytes + 1);
    free(file);
    free(moved);
    megamoe_router_desc desc;
    megamoe_router *router = router_of(path, 0, &desc);
    const int64_t token = 4;
    int32_t ids[TOPK];
    float weights[TOPK];
    route(router, &token, ids, weights);
    T_EQ_INT(ids[0], (3 * 8 + 1) % small.experts);
    megamoe_router_close(router);
    T_OK(try_weights(path, 0));
    built_free(&model);
}

T_CASE(deepseek_v41_divides_logits) {
    built model = v4(0, false);
    megamoe_router_desc desc;
    megamoe_router *router = router_of(
        save_model(&model, "{\"model_type\":\"deepseek_v41\",\"text_config\":{"
                           "\"model_type\":\"deepseek_v41_text\",\"num_experts_per_tok\":2,"
                           "\"scoring_func\":\"sqrtsoftplus\",\"gate_temp\":2.5,"
                           "\"routed_scaling_factor\":1.5}}"),
        0, &desc);
    T_EQ_F64((double)desc.gate_temperature, 2.5);
    T_EQ_INT(desc.experts, small.experts);
    T_CHECK(desc.normalize);
    megamoe_router_close(router);
    built_free(&model);
}

/* A layer under the names of DeepSeek-V3 and its like. */
static built v3(const char *bias, const char *dtype) {
    built model = built_start();
    add_nvfp4(&model, "model.layers.%d.mlp.", 3, named, small);
    built_add(&model, "BF16", SHAPE(small.experts, small.hidden), "model.layers.3.mlp.gate.weight");
    if (bias)
        built_add(&model, dtype, SHAPE(small.experts), "model.layers.3.mlp.%s", bias);
    return model;
}

T_CASE(deepseek_v3_keeps_groups_and_kimi_has_one) {
    built model = v3("gate.e_score_correction_bias", "F32");
    megamoe_router_desc desc;
    megamoe_router *router =
        router_of(save_model(&model, "{\"model_type\":\"deepseek_v3\",\"num_experts_per_tok\":4,"
                                     "\"n_routed_experts\":8,\"n_group\":4,\"topk_group\":2,"
                                     "\"norm_topk_prob\":true,\"routed_scaling_factor\":2.5,"
                                     "\"scoring_func\":\"sigmoid\",\"topk_method\":\"noaux_tc\"}"),
                  3, &desc);
    T_EQ_INT(desc.rule, MEGAMOE_ROUTER_SIGMOID);
    T_EQ_INT(desc.groups, 4);
    T_EQ_INT(desc.groups_kept, 2);
    T_EQ_INT(desc.topk, 4);
    T_CHECK(desc.normalize);
    T_EQ_F64((double)desc.normalize_epsilon, (double)1e-20f);
    T_EQ_F64((double)desc.scaling, 2.5);
    megamoe_router_close(router);
    router =
        router_of(save_model(&model, "{\"model_type\":\"kimi_k2\",\"num_experts_per_tok\":4,"
                                     "\"n_routed_experts\":8,\"n_group\":1,\"topk_group\":1,"
                                     "\"norm_topk_prob\":true,\"routed_scaling_factor\":2.827,"
                                     "\"scoring_func\":\"sigmoid\",\"topk_method\":\"noaux_tc\"}"),
                  3, &desc);
    T_CHECK(desc.groups <= 1);
    T_EQ_F64((double)desc.scaling, (double)2.827f);
    megamoe_router_close(router);
    /* GLM names no scoring_func: its bias tells. */
    router =
        router_of(save_model(&model, "{\"model_type\":\"glm4_moe\",\"num_experts_per_tok\":4,"
                                     "\"norm_topk_prob\":false,\"routed_scaling_factor\":1.0}"),
                  3, &desc);
    T_EQ_INT(desc.rule, MEGAMOE_ROUTER_SIGMOID);
    T_CHECK(!desc.normalize);
    megamoe_router_close(router);
    built_free(&model);
}

T_CASE(minimax_holds_its_bias_beside_the_gate) {
    built model = built_start();
    add_nvfp4(&model, "model.layers.%d.block_sparse_moe.", 0, numbered, small);
    built_add(&model, "F32", SHAPE(small.experts, small.hidden),
              "model.layers.0.block_sparse_moe.gate.weight");
    built_tensor *bias = built_add(&model, "BF16", SHAPE(small.experts),
                                   "model.layers.0.block_sparse_moe.e_score_correction_bias");
    bias->data[2 * 6 + 1] = 0x42; /* expert 6: 32 */
    megamoe_router_desc desc;
    megamoe_router *router =
        router_of(save_model(&model, "{\"model_type\":\"minimax_m2\",\"num_experts_per_tok\":1,"
                                     "\"num_local_experts\":8,\"scoring_func\":\"sigmoid\"}"),
                  0, &desc);
    T_EQ_F64((double)desc.scaling, 1);
    int32_t id;
    float weight;
    route(router, NULL, &id, &weight);
    T_EQ_INT(id, 6);
    megamoe_router_close(router);
    built_free(&model);
}

T_CASE(qwen3_takes_a_softmax_over_all) {
    built model = v3(NULL, NULL);
    megamoe_router_desc desc;
    for (int normalize = 0; normalize < 2; normalize++) {
        char config[256];
        snprintf(config, sizeof config,
                 "{\"model_type\":\"qwen3_moe\",\"num_experts\":8,\"num_experts_per_tok\":3,"
                 "\"norm_topk_prob\":%s}",
                 normalize ? "true" : "false");
        megamoe_router *router = router_of(save_model(&model, config), 3, &desc);
        T_EQ_INT(desc.rule, MEGAMOE_ROUTER_SOFTMAX);
        T_EQ_INT(desc.normalize, normalize);
        T_EQ_F64((double)desc.normalize_epsilon, 0);
        T_EQ_F64((double)desc.scaling, 1);
        T_EQ_INT(desc.topk, 3);
        megamoe_router_close(router);
    }
    built_free(&model);
}

T_CASE(what_a_router_lacks_is_named) {
    built model = v4(0, false);
    FAILS(try_router(save_model(&model, NULL), 0), MEGAMOE_ENOTFOUND, "config.json", "layer 0",
          "num_experts_per_tok");
    static const struct {
        const char *config;
        megamoe_status status;
        const char *parts[2];
    } configs[] = {
        {"{\"routed_scaling_factor\":1.5}",
         MEGAMOE_ENOTFOUND,
         {"num_experts_per_tok is missing", "config.json"}},
        {"{\"num_experts_per_tok\":2}",
         MEGAMOE_ENOTFOUND,
         {"routed_scaling_factor is missing", "layer 0"}},
        {"{\"scoring_func\":\"tanh\"}", MEGAMOE_EUNSUPPORTED, {"scoring_func", "\"tanh\""}},
        {"{\"scoring_func\":1}", MEGAMOE_EFORMAT, {"scoring_func", "string"}},
        {"{\"topk_method\":\"group_limited_greedy\"}",
         MEGAMOE_EUNSUPPORTED,
         {"topk_method", "group_limited_greedy"}},
        {"{\"num_experts_per_tok\":9,\"routed_scaling_factor\":1}",
         MEGAMOE_EFORMAT,
         {"gate.weight", "9"}},
        {"{\"num_experts_per_tok\":2,\"routed_scaling_factor\":1,\"norm_topk_prob\":1}",
         MEGAMOE_EFORMAT,
         {"norm_topk_prob", "true or false"}},
        {"{\"num_experts_per_tok\":2,\"routed_scaling_factor\":1,\"hidden_size\":64}",
         MEGAMOE_EFORMAT,
         {"gate.weight", "[8, 64]"}},
        {"{\"num_experts_per_tok\":2,\"routed_scaling_factor\":1,\"num_experts\":16}",
         MEGAMOE_EFORMAT,
         {"gate.weight", "[16, 32]"}},
        {"{\"num_experts_per_tok\":2,\"routed_scaling_factor\":1,\"gate_temp\":-1}",
         MEGAMOE_EFORMAT,
         {"gate.weight", "-1"}},
    };
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        T_STATUS(try_router(save_model(&model, configs[i].config), 0), configs[i].status);
        for (int p = 0; p < 2; p++)
            T_CONTAINS(megamoe_last_error(), configs[i].parts[p]);
    }
    static const char config[] = "{\"num_experts_per_tok\":2,\"routed_scaling_factor\":1}";
    T_OK(try_router(save_model(&model, config), 0));
    strcpy(built_find(&model, "layers.0.ffn.gate.weight")->dtype, "F16");
    FAILS(try_router(save_model(&model, config), 0), MEGAMOE_EFORMAT, "gate.weight", "F16", "BF16");
    built_remove(&model, "layers.0.ffn.gate.bias");
    FAILS(try_router(save_model(&model, config), 0), MEGAMOE_EFORMAT, "layer 0", "gate.bias");
    built_remove(&model, "layers.0.ffn.gate.weight");
    FAILS(try_router(save_model(&model, config), 0), MEGAMOE_ENOTFOUND, "layers.0.ffn.gate.weight",
          "layer 0");
    FAILS(try_router(save_model(&model, config), 1), MEGAMOE_ENOTFOUND, "layer 1");
    built_free(&model);

    model = v3(NULL, NULL);
    FAILS(try_router(save_model(&model, "{\"model_type\":\"qwen3_moe\",\"num_experts_per_tok\":2}"),
                     3),
          MEGAMOE_ENOTFOUND, "norm_topk_prob is missing");
    FAILS(try_router(save_model(&model, "{\"num_experts_per_tok\":2}"), 3), MEGAMOE_ENOTFOUND,
          "scoring_func is missing");
    FAILS(
        try_router(save_model(&model, "{\"topk_method\":\"noaux_tc\",\"scoring_func\":\"sigmoid\","
                                      "\"num_experts_per_tok\":2,\"routed_scaling_factor\":1}"),
                   3),
        MEGAMOE_EFORMAT, "selection bias");
    built_free(&model);
    model = v3("gate.e_score_correction_bias", "F32");
    FAILS(try_router(save_model(&model, "{\"num_experts_per_tok\":2,\"routed_scaling_factor\":1,"
                                        "\"n_group\":2}"),
                     3),
          MEGAMOE_ENOTFOUND, "topk_group is missing");
    FAILS(try_router(save_model(&model, "{\"num_experts_per_tok\":2,\"routed_scaling_factor\":1,"
                                        "\"n_group\":3,\"topk_group\":1}"),
                     3),
          MEGAMOE_EFORMAT, "gate.weight", "3 groups");
    built_free(&model);
}
