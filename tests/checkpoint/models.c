/* SPDX-License-Identifier: Apache-2.0 */
/* What a model's type and config say of its experts, whatever family stores them. */
#include <stdio.h>
#include <string.h>

#include "fixture.h"

static const sizes odd = {.hidden = 96, .intermediate = 64, .experts = 5};

static megamoe_layer_desc described(const built *model, const char *config) {
    megamoe_checkpoint *checkpoint = opened(save_model(model, config));
    megamoe_weights *weights;
    T_OK(megamoe_checkpoint_weights(checkpoint, 3, &weights));
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    T_OK(megamoe_weights_describe(weights, &desc));
    megamoe_weights_close(weights);
    megamoe_checkpoint_close(checkpoint);
    return desc;
}

T_CASE(activations_follow_model_and_config) {
    static const struct {
        const char *config;
        float alpha, offset, limit;
    } models[] = {
        {"{}", 0, 0, 0},
        {"{\"model_type\":\"glm4_moe\",\"hidden_act\":\"silu\",\"swiglu_limit\":10}", 0, 0, 10},
        {"{\"model_type\":\"deepseek_v4\"}", 0, 0, 10},
        {"{\"model_type\":\"deepseek_v3\"}", 0, 0, 0},
        {"{\"model_type\":\"minimax_m2\",\"hidden_act\":\"silu\"}", 0, 0, 0},
        {"{\"model_type\":\"minimax_m3\",\"hidden_act\":\"silu\"}", 1.702f, 1, 7},
        {"{\"model_type\":\"minimax_m3_vl\",\"text_config\":{\"model_type\":\"minimax_m3_text\","
         "\"hidden_act\":\"swigluoai\",\"swiglu_alpha\":1.5,\"swiglu_beta\":0.5,"
         "\"swiglu_limit\":6}}",
         1.5f, 0.5f, 6},
        {"{\"hidden_act\":\"swigluoai\"}", 1.702f, 1, 7}};
    built model = built_start();
    add_nvfp4(&model, "language_model.model.layers.%d.mlp.", 3, named, odd);
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        const megamoe_layer_desc desc = described(&model, models[i].config);
        T_EQ_F64((double)desc.activation.alpha, (double)models[i].alpha);
        T_EQ_F64((double)desc.activation.offset, (double)models[i].offset);
        T_EQ_F64((double)desc.activation.limit, (double)models[i].limit);
        T_CHECK(!desc.has_bias);
    }
    built_free(&model);
}

/* Kimi-K3: another activation, and experts behind a projection to a smaller size. */
T_CASE(what_is_known_but_not_run_is_refused_with_the_reason) {
    static const struct {
        const char *config, *says;
    } models[] = {
        {"{\"model_type\":\"kimi_k3\",\"text_config\":{\"hidden_act\":\"situ\"}}", "tanh"},
        {"{\"model_type\":\"kimi_k3\",\"text_config\":{\"hidden_size\":192,"
         "\"latent_moe_use_norm\":true}}",
         "projections to a smaller size"},
        {"{\"hidden_size\":192,\"moe_latent_size\":96}", "moe_latent_size"},
        {"{\"hidden_act\":\"gelu\"}", "\"gelu\""},
        {"{\"hidden_act\":\"silu\",\"swiglu_alpha\":1.702}", "swiglu_alpha 1.702"}};
    built model = built_start();
    add_mxfp4(&model, "language_model.model.layers.%d.mlp.", 3, named, "scale", odd);
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        FAILS(try_weights(save_model(&model, models[i].config), 3), MEGAMOE_EUNSUPPORTED,
              models[i].says);
    built_free(&model);
}

/* MiMo, GLM and Kimi name their experts and biases alike; MiniMax has names of its own. */
T_CASE(names_of_all_models_are_read_with_their_routers) {
    static const struct {
        const char *block;
        const char *const *projections;
        const char *bias, *config;
        float scaling;
    } models[] = {
        {"language_model.model.layers.%d.mlp.", named, "gate.e_score_correction_bias",
         "{\"model_type\":\"kimi_k25\",\"text_config\":{\"model_type\":\"kimi_k2\","
         "\"num_experts_per_tok\":2,\"n_routed_experts\":5,\"scoring_func\":\"sigmoid\","
         "\"n_group\":1,\"topk_group\":1,\"topk_method\":\"noaux_tc\","
         "\"routed_scaling_factor\":2.827}}",
         2.827f},
        {"model.language_model.layers.%d.mlp.", named, "gate.e_score_correction_bias",
         "{\"model_type\":\"glm4v_moe\",\"text_config\":{\"num_experts_per_tok\":2,"
         "\"routed_scaling_factor\":2.5}}",
         2.5f},
        {"model.layers.%d.mlp.", named, "gate.e_score_correction_bias",
         "{\"model_type\":\"mimo_v2_flash\",\"num_experts_per_tok\":2,\"scoring_func\":\"sigmoid\","
         "\"topk_method\":\"noaux_tc\",\"n_routed_experts\":5,\"routed_scaling_factor\":1.0}",
         1},
        {"model.layers.%d.block_sparse_moe.", numbered, "e_score_correction_bias",
         "{\"model_type\":\"minimax_m2\",\"num_experts_per_tok\":2,\"num_local_experts\":5,"
         "\"scoring_func\":\"sigmoid\"}",
         1},
        {"language_model.model.layers.%d.block_sparse_moe.", numbered, "e_score_correction_bias",
         "{\"model_type\":\"minimax_m3_vl\",\"text_config\":{\"num_experts_per_tok\":2,"
         "\"num_local_experts\":5,\"scoring_func\":\"sigmoid\",\"routed_scaling_factor\":2.0}}",
         2}};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        built model = built_start();
        add_nvfp4(&model, models[i].block, 3, models[i].projections, odd);
        char prefix[96];
        snprintf(prefix, sizeof prefix, models[i].block, 3);
        built_add(&model, "BF16", SHAPE(odd.experts, odd.hidden), "%sgate.weight", prefix);
        built_add(&model, "F32", SHAPE(odd.experts), "%s%s", prefix, models[i].bias);
        T_EQ_INT(described(&model, models[i].config).topk, 2);
        megamoe_checkpoint *checkpoint = opened(save_model(&model, models[i].config));
        megamoe_router *router = NULL;
        T_OK(megamoe_checkpoint_router(checkpoint, 3, &router));
        megamoe_router_desc desc = MEGAMOE_INIT(megamoe_router_desc);
        T_OK(megamoe_router_describe(router, &desc));
        T_EQ_INT(desc.rule, MEGAMOE_ROUTER_SIGMOID);
        T_EQ_INT(desc.topk, 2);
        T_EQ_F64((double)desc.scaling, (double)models[i].scaling);
        T_CHECK(desc.normalize);
        megamoe_router_close(router);
        megamoe_checkpoint_close(checkpoint);
        built_free(&model);
    }
}

#define GPT_OSS                                                                                    \
    "{\"model_type\":\"gpt_oss\",\"hidden_size\":96,\"intermediate_size\":64,"                     \
    "\"num_local_experts\":5,\"experts_per_token\":2}"

/* gpt-oss under the names of other families: biases, its activation and its router stay. */
T_CASE(gpt_oss_keeps_its_meaning_under_other_names) {
    built model = built_start();
    add_nvfp4(&model, "model.layers.%d.mlp.", 3, named, odd);
    for (int32_t e = 0; e < odd.experts; e++)
        for (int p = 0; p < 3; p++)
            built_add(&model, "BF16", SHAPE(p == 2 ? 96 : 64),
                      "model.layers.3.mlp.experts.%d.%s.bias", e, named[p])
                ->data[2 * 33 + 1] = 0x40;
    built_add(&model, "BF16", SHAPE(5, 96), "model.layers.3.mlp.router.weight");
    built_add(&model, "BF16", SHAPE(5), "model.layers.3.mlp.router.bias");
    megamoe_layer_desc desc = described(&model, GPT_OSS);
    T_CHECK(desc.has_bias);
    T_EQ_INT(desc.topk, 2);
    T_EQ_F64((double)desc.activation.alpha, (double)1.702f);
    T_EQ_F64((double)desc.activation.limit, 7);
    megamoe_checkpoint *checkpoint = opened(save_model(&model, GPT_OSS));
    megamoe_router *router = NULL;
    T_OK(megamoe_checkpoint_router(checkpoint, 3, &router));
    megamoe_router_desc rule = MEGAMOE_INIT(megamoe_router_desc);
    T_OK(megamoe_router_describe(router, &rule));
    T_EQ_INT(rule.rule, MEGAMOE_ROUTER_SOFTMAX_SELECTED);
    T_EQ_INT(rule.experts, 5);
    megamoe_router_close(router);
    megamoe_checkpoint_close(checkpoint);

    static const char bias[] = "model.layers.3.mlp.experts.4.down_proj.bias";
    FAILS(try_weights(save_model(&model, "{\"model_type\":\"qwen3_moe\"}"), 3),
          MEGAMOE_EUNSUPPORTED, "bias", "unknown");
    built_remove(&model, bias);
    FAILS(try_weights(save_model(&model, GPT_OSS), 3), MEGAMOE_EFORMAT, bias, "missing");
    built_add(&model, "F16", SHAPE(96), "%s", bias);
    FAILS(try_weights(save_model(&model, GPT_OSS), 3), MEGAMOE_EFORMAT, bias, "F16");
    built_remove(&model, "model.layers.3.mlp.router.bias");
    FAILS(try_router(save_model(&model, GPT_OSS), 3), MEGAMOE_EFORMAT, "router.bias", "missing");
    built_free(&model);
}
