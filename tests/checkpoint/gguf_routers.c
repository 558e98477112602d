/* SPDX-License-Identifier: Apache-2.0 */
/* Routers of GGUF files: the rule by key or by architecture, biases, groups, hash layers. */
#include <stdio.h>
#include <string.h>

#include "gguf_fixture.h"

enum { HIDDEN = 64, EXPERTS = 8, VOCABULARY = 5 };

static gguf model_of(const char *architecture) {
    const gguf_layer layer = {.layer = 1,
                              .type = GGUF_MXFP4,
                              .s = {.hidden = HIDDEN, .intermediate = 32, .experts = EXPERTS}};
    gguf file = gguf_start();
    gguf_text(&file, "general.architecture", architecture);
    gguf_add_experts(&file, &layer);
    gguf_randomize(&file,
                   gguf_add(&file, GGUF_F32, SHAPE(EXPERTS, HIDDEN), "blk.1.ffn_gate_inp.weight"));
    return file;
}

static void key_u32(gguf *file, const char *architecture, const char *name, uint32_t value) {
    char key[64];
    snprintf(key, sizeof key, "%s.%s", architecture, name);
    gguf_u32(file, key, value);
}

static const char *save(const gguf *file) {
    return gguf_save(file, "model.gguf");
}

static megamoe_router *router_of(gguf *file, megamoe_router_desc *desc) {
    megamoe_checkpoint *checkpoint = opened(save(file));
    megamoe_router *router = NULL;
    T_OK(megamoe_checkpoint_router(checkpoint, 1, &router));
    megamoe_checkpoint_close(checkpoint);
    *desc = (megamoe_router_desc)MEGAMOE_INIT(megamoe_router_desc);
    T_OK(megamoe_router_describe(router, desc));
    return router;
}

static megamoe_router_desc described(gguf *file) {
    megamoe_router_desc desc;
    megamoe_router_close(router_of(file, &desc));
    return desc;
}

T_CASE(an_architecture_has_a_rule) {
    static const struct {
        const char *architecture;
        megamoe_router_rule rule;
        bool normalize;
    } facts[] = {{"gpt-oss", MEGAMOE_ROUTER_SOFTMAX_SELECTED, false},
                 {"deepseek4", MEGAMOE_ROUTER_SQRT_SOFTPLUS, true},
                 {"deepseek2", MEGAMOE_ROUTER_SOFTMAX, false},
                 {"deepseek32", MEGAMOE_ROUTER_SIGMOID, false},
                 {"glm4moe", MEGAMOE_ROUTER_SIGMOID, false},
                 {"glm-dsa", MEGAMOE_ROUTER_SIGMOID, false},
                 {"mimo2", MEGAMOE_ROUTER_SIGMOID, true},
                 {"minimax-m2", MEGAMOE_ROUTER_SIGMOID, true},
                 {"qwen3moe", MEGAMOE_ROUTER_SOFTMAX, true},
                 {"qwen3vlmoe", MEGAMOE_ROUTER_SOFTMAX, true},
                 {"qwen3next", MEGAMOE_ROUTER_SOFTMAX, true},
                 {"qwen35moe", MEGAMOE_ROUTER_SOFTMAX, true}};
    for (size_t i = 0; i < sizeof facts / sizeof *facts; i++) {
        const char *architecture = facts[i].architecture;
        gguf file = model_of(architecture);
        key_u32(&file, architecture, "expert_used_count", 2);
        const megamoe_router_desc desc = described(&file);
        T_EQ_INT(desc.rule, facts[i].rule);
        T_EQ_INT(desc.normalize, facts[i].normalize);
        T_EQ_INT(desc.hidden, HIDDEN);
        T_EQ_INT(desc.experts, EXPERTS);
        T_EQ_INT(desc.topk, 2);
        T_EQ_F64((double)desc.scaling, 1);
        gguf_free(&file);

        /* Keys come first. */
        static const megamoe_router_rule rules[] = {MEGAMOE_ROUTER_SOFTMAX, MEGAMOE_ROUTER_SIGMOID,
                                                    MEGAMOE_ROUTER_SOFTMAX_SELECTED,
                                                    MEGAMOE_ROUTER_SQRT_SOFTPLUS};
        for (uint32_t function = 1; function <= 4; function++) {
            file = model_of(architecture);
            key_u32(&file, architecture, "expert_used_count", 2);
            key_u32(&file, architecture, "expert_gating_func", function);
            char key[64];
            snprintf(key, sizeof key, "%s.expert_weights_norm", architecture);
            gguf_bool(&file, key, !facts[i].normalize);
            snprintf(key, sizeof key, "%s.expert_weights_scale", architecture);
            gguf_f32(&file, key, 2.5f);
            const megamoe_router_desc stated = described(&file);
            T_EQ_INT(stated.rule, rules[function - 1]);
            T_EQ_INT(stated.normalize, !facts[i].normalize);
            T_EQ_F64((double)stated.scaling, 2.5);
            gguf_free(&file);
        }
    }
}

T_CASE(a_selection_bias_stands_for_sigmoid_in_deepseek2) {
    gguf file = model_of("deepseek2");
    gguf_u32(&file, "deepseek2.expert_used_count", 2);
    gguf_u32(&file, "deepseek2.expert_group_count", 4);
    gguf_u32(&file, "deepseek2.expert_group_used_count", 2);
    gguf_bool(&file, "deepseek2.expert_weights_norm", true);
    gguf_f32(&file, "deepseek2.expert_weights_scale", 2.5f);
    gguf_randomize(&file, gguf_add(&file, GGUF_F32, SHAPE(EXPERTS), "blk.1.exp_probs_b.bias"));
    const megamoe_router_desc desc = described(&file);
    T_EQ_INT(desc.rule, MEGAMOE_ROUTER_SIGMOID);
    T_EQ_INT(desc.groups, 4);
    T_EQ_INT(desc.groups_kept, 2);
    T_CHECK(desc.normalize);
    T_EQ_F64((double)desc.normalize_epsilon, (double)1e-20f);
    T_EQ_F64((double)desc.scaling, 2.5);
    gguf_free(&file);
}

/* Routes one token, all of whose channels are 1. */
static void route(const megamoe_router *router, int64_t token, int32_t *ids, float *weights) {
    uint16_t x[HIDDEN];
    for (int i = 0; i < HIDDEN; i++)
        x[i] = 0x3F80;
    const megamoe_view x_view = {.data = x, .dtype = MEGAMOE_DTYPE_BF16, .rows = 1};
    const megamoe_view token_view = {.data = &token, .dtype = MEGAMOE_DTYPE_I64, .rows = 1};
    const megamoe_view ids_view = {.data = ids, .dtype = MEGAMOE_DTYPE_I32, .rows = 1};
    const megamoe_view weights_view = {.data = weights, .dtype = MEGAMOE_DTYPE_F32, .rows = 1};
    T_OK(megamoe_router_route(router, NULL, &x_view, &token_view, 1, &ids_view, &weights_view));
}

T_CASE(both_biases_take_part) {
    gguf file = model_of("gpt-oss");
    gguf_u32(&file, "gpt-oss.expert_used_count", 2);
    memset(gguf_find(&file, "blk.1.ffn_gate_inp.weight")->data, 0, 4 * EXPERTS * HIDDEN);
    gguf_tensor *bias = gguf_add(&file, GGUF_F32, SHAPE(EXPERTS), "blk.1.ffn_gate_inp.bias");
    static const float logits[EXPERTS] = {0, 0, 3, 0, 0, 3, 0, 0};
    memcpy(bias->data, logits, sizeof logits);
    megamoe_router_desc desc;
    megamoe_router *router = router_of(&file, &desc);
    int32_t ids[2];
    float weights[2];
    route(router, 0, ids, weights);
    T_EQ_INT(ids[0], 2);
    T_EQ_INT(ids[1], 5);
    T_EQ_F64((double)weights[0], 0.5);
    megamoe_router_close(router);
    gguf_free(&file);

    file = model_of("glm4moe");
    gguf_u32(&file, "glm4moe.expert_used_count", 1);
    memset(gguf_find(&file, "blk.1.ffn_gate_inp.weight")->data, 0, 4 * EXPERTS * HIDDEN);
    bias = gguf_add(&file, GGUF_F32, SHAPE(EXPERTS), "blk.1.exp_probs_b.bias");
    memcpy(bias->data + 4 * 6, &(float){1}, sizeof(float));
    router = router_of(&file, &desc);
    route(router, 0, ids, weights);
    T_EQ_INT(ids[0], 6);
    T_EQ_F64((double)weights[0], 0.5); /* the bias selects only */
    megamoe_router_close(router);
    gguf_free(&file);
}

static gguf hash_model(void) {
    gguf file = model_of("deepseek4");
    gguf_u32(&file, "deepseek4.expert_used_count", 2);
    gguf_u32(&file, "deepseek4.expert_gating_func", 4);
    gguf_u32(&file, "deepseek4.hash_layer_count", 2);
    gguf_tensor *table =
        gguf_add(&file, GGUF_I32, SHAPE(VOCABULARY, 2), "blk.1.ffn_gate_tid2eid.weight");
    for (int32_t i = 0; i < 2 * VOCABULARY; i++)
        memcpy(table->data + 4 * i, &(int32_t){i * 3 % EXPERTS}, 4);
    return file;
}

T_CASE(hash_layers_look_experts_up) {
    gguf file = hash_model();
    megamoe_router_desc desc;
    megamoe_router *router = router_of(&file, &desc);
    T_EQ_INT(desc.rule, MEGAMOE_ROUTER_SQRT_SOFTPLUS);
    T_EQ_INT(desc.hash_vocab, VOCABULARY);
    int32_t ids[2];
    float weights[2];
    route(router, 3, ids, weights);
    T_EQ_INT(ids[0], 6 * 3 % EXPERTS);
    T_EQ_INT(ids[1], 7 * 3 % EXPERTS);
    megamoe_router_close(router);
    memcpy(gguf_find(&file, "blk.1.ffn_gate_tid2eid.weight")->data, &(int32_t){EXPERTS}, 4);
    FAILS(try_router(save(&file), 1), MEGAMOE_EFORMAT, "blk.1.ffn_gate_tid2eid.weight",
          "outside 0..7");
    gguf_remove(&file, "blk.1.ffn_gate_tid2eid.weight");
    FAILS(try_router(save(&file), 1), MEGAMOE_EFORMAT, "hash_layer_count is 2",
          "no ffn_gate_tid2eid");
    gguf_free(&file);
    file = model_of("deepseek4");
    gguf_u32(&file, "deepseek4.expert_used_count", 2);
    gguf_u32(&file, "deepseek4.hash_layer_count", 1);
    T_OK(try_router(save(&file), 1));
    gguf_add(&file, GGUF_I32, SHAPE(VOCABULARY, 2), "blk.1.ffn_gate_tid2eid.weight");
    FAILS(try_router(save(&file), 1), MEGAMOE_EFORMAT, "hash_layer_count is 1",
          "a ffn_gate_tid2eid");
    gguf_free(&file);
}

T_CASE(what_a_router_lacks_is_named) {
    gguf file = model_of("qwen3moe");
    FAILS(try_router(save(&file), 1), MEGAMOE_ENOTFOUND, "qwen3moe.expert_used_count");
    gguf_u32(&file, "qwen3moe.expert_used_count", 2);
    T_OK(try_router(save(&file), 1));
    gguf_u32(&file, "qwen3moe.expert_gating_func", 5);
    FAILS(try_router(save(&file), 1), MEGAMOE_EUNSUPPORTED, "qwen3moe.expert_gating_func is 5");
    gguf_free(&file);

    file = model_of("qwen3moe");
    gguf_u32(&file, "qwen3moe.expert_used_count", 9);
    FAILS(try_router(save(&file), 1), MEGAMOE_EFORMAT, "blk.1.ffn_gate_inp.weight", "top-k is 9");
    gguf_free(&file);

    file = model_of("qwen3moe");
    gguf_u32(&file, "qwen3moe.expert_used_count", 2);
    gguf_u32(&file, "qwen3moe.expert_count", 9);
    FAILS(try_router(save(&file), 1), MEGAMOE_EFORMAT, "blk.1.ffn_gate_inp.weight",
          "qwen3moe.expert_count 8", "says 9");
    gguf_free(&file);

    file = model_of("qwen3moe");
    gguf_u32(&file, "qwen3moe.expert_used_count", 2);
    gguf_add(&file, GGUF_F32, SHAPE(EXPERTS - 1), "blk.1.exp_probs_b.bias");
    FAILS(try_router(save(&file), 1), MEGAMOE_EFORMAT, "blk.1.exp_probs_b.bias", "must be [8]");
    gguf_remove(&file, "blk.1.ffn_gate_inp.weight");
    FAILS(try_router(save(&file), 1), MEGAMOE_ENOTFOUND, "blk.1.ffn_gate_inp.weight");
    gguf_add(&file, GGUF_F32, SHAPE(EXPERTS), "blk.1.ffn_gate_inp.weight");
    FAILS(try_router(save(&file), 1), MEGAMOE_EFORMAT, "must be [experts, hidden]");
    gguf_free(&file);
}
