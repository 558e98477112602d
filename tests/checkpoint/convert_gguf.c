/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF files as other families store them, with the config.json that their metadata stand for. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "gguf_fixture.h"
#include "megamoe/router.h"

static const sizes even = {.hidden = 128, .intermediate = 64, .experts = 8};
enum { VOCABULARY = 5, TOPK = 2, WEIGHTS = 128 * 64 };

static const char *out_path(void) {
    static int n;
    char name[32];
    snprintf(name, sizeof name, "converted-%d", n++);
    return t_path(name);
}

static megamoe_status try_convert(const gguf *file, const char *family, const char *out) {
    megamoe_checkpoint *checkpoint = opened(gguf_save(file, "model.gguf"));
    megamoe_convert_options options = MEGAMOE_INIT(megamoe_convert_options);
    options.family = family;
    const megamoe_status status = megamoe_checkpoint_convert(checkpoint, &options, out);
    megamoe_checkpoint_close(checkpoint);
    return status;
}

static const char *key_of(const char *architecture, const char *name) {
    static char key[96];
    snprintf(key, sizeof key, "%s.%s", architecture, name);
    return key;
}

static void add_layer(gguf *file, int32_t index, uint32_t type, bool bias) {
    const gguf_layer layer = {.layer = index,
                              .type = type,
                              .s = even,
                              .bias = bias,
                              .merged = index % 2 != 0,
                              .scale = type == GGUF_NVFP4};
    gguf_add_experts(file, &layer);
    gguf_randomize(file, gguf_add(file, GGUF_F32, SHAPE(even.experts, even.hidden),
                                  "blk.%d.ffn_gate_inp.weight", index));
}

static void add_numbers(gguf *file, int32_t layer, const char *name) {
    gguf_randomize(file, gguf_add(file, GGUF_F32, SHAPE(even.experts), "blk.%d.%s", layer, name));
}

/* Layers 1 and 2 of a model whose keys are few. */
static gguf model_of(const char *architecture, uint32_t type) {
    const bool gpt_oss = strcmp(architecture, "gpt-oss") == 0;
    const bool v4 = strcmp(architecture, "deepseek4") == 0;
    gguf file = gguf_start();
    gguf_text(&file, "general.architecture", architecture);
    gguf_u32(&file, key_of(architecture, "expert_used_count"), TOPK);
    gguf_u32(&file, key_of(architecture, "block_count"), 4);
    for (int32_t layer = 1; layer < 3; layer++) {
        add_layer(&file, layer, type, gpt_oss);
        if (gpt_oss)
            add_numbers(&file, layer, "ffn_gate_inp.bias");
        else if (v4)
            add_numbers(&file, layer, "exp_probs_b.bias");
    }
    /* Scales within the 17 binades that NVFP4 holds, and biases that BF16 holds. */
    for (size_t i = 0; i < file.n; i++)
        for (uint64_t j = 0; file.tensors[i].type == GGUF_MXFP4 && j < file.tensors[i].bytes;
             j += 17)
            if (file.tensors[i].data[j] < 113)
                file.tensors[i].data[j] = 113;
    for (size_t i = 0; i < file.n; i++)
        if (strstr(file.tensors[i].name, "exps.bias"))
            for (uint64_t j = 0; j < file.tensors[i].bytes; j += 4)
                memset(file.tensors[i].data + j, 0, 2);
    return file;
}

static void add_limits(gguf *file, float last) {
    gguf_f32s(file, "deepseek4.swiglu_clamp_exp", (const float[]){0, 7.5f, last}, 3);
}

static megamoe_router_desc router_of(megamoe_checkpoint *checkpoint, int32_t layer) {
    megamoe_router *router = NULL;
    megamoe_router_desc desc = MEGAMOE_INIT(megamoe_router_desc);
    T_OK(megamoe_checkpoint_router(checkpoint, layer, &router));
    T_OK(megamoe_router_describe(router, &desc));
    megamoe_router_close(router);
    return desc;
}

static void same_layer(megamoe_checkpoint *from, megamoe_checkpoint *to, int32_t layer) {
    static double a[WEIGHTS], b[WEIGHTS];
    megamoe_weights *x = NULL, *y = NULL;
    T_OK(megamoe_checkpoint_weights(from, layer, &x));
    T_OK(megamoe_checkpoint_weights(to, layer, &y));
    megamoe_layer_desc p = MEGAMOE_INIT(megamoe_layer_desc), q = p;
    T_OK(megamoe_weights_describe(x, &p));
    T_OK(megamoe_weights_describe(y, &q));
    q.format = p.format;
    T_EQ_MEM(&p, &q, sizeof p);
    for (int32_t e = 0; e < even.experts; e++)
        for (megamoe_projection m = MEGAMOE_GATE; m <= MEGAMOE_DOWN; m++) {
            T_OK(megamoe_weights_unpack(x, e, m, a));
            T_OK(megamoe_weights_unpack(y, e, m, b));
            T_EQ_MEM(a, b, sizeof a);
        }
    megamoe_weights_close(x);
    megamoe_weights_close(y);
    const megamoe_router_desc r = router_of(from, layer), s = router_of(to, layer);
    T_EQ_MEM(&r, &s, sizeof r);
}

static void converts(const gguf *file, const char *family, const char *model_type) {
    const char *out = out_path();
    T_OK(try_convert(file, family, out));
    megamoe_checkpoint *from = opened(gguf_save(file, "model.gguf")), *to = opened(out);
    megamoe_checkpoint_info info = MEGAMOE_INIT(megamoe_checkpoint_info);
    T_OK(megamoe_checkpoint_describe(to, &info));
    T_EQ_STR(info.family, family);
    T_EQ_STR(info.model_type, model_type);
    T_EQ_INT(info.layers, 2);
    for (int32_t layer = 1; layer < 3; layer++)
        same_layer(from, to, layer);
    megamoe_checkpoint_close(from);
    megamoe_checkpoint_close(to);
}

static void refuses(const gguf *file, const char *family, megamoe_status status, const char *what,
                    const char *why) {
    const char *out = out_path();
    FAILS(try_convert(file, family, out), status, "model.gguf", what, why);
    T_CHECK(access(out, F_OK) != 0);
}

/* Merged and separate gate and up; rules, scales and norms that only the architecture tells. */
T_CASE(every_architecture_in_every_family) {
    static const char *const models[][2] = {
        {"gpt-oss", "gpt_oss"},         {"deepseek4", "deepseek_v4"}, {"deepseek2", "deepseek_v3"},
        {"deepseek32", "deepseek_v32"}, {"glm4moe", "glm4_moe"},      {"glm-dsa", "glm_moe_dsa"},
        {"mimo2", "mimo_v2"},           {"minimax-m2", "minimax_m2"}, {"qwen3moe", "qwen3_moe"},
        {"qwen3vlmoe", "qwen3_vl_moe"}, {"qwen3next", "qwen3_next"},  {"qwen35moe", "qwen3_5_moe"},
    };
    static const char *const families[] = {"deepseek-v4", "compressed-tensors", "modelopt-nvfp4"};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        for (uint32_t type = GGUF_MXFP4; type <= GGUF_NVFP4; type++) {
            gguf file = model_of(models[i][0], type);
            if (i == 1)
                add_limits(&file, 7.5f);
            for (size_t f = type == GGUF_MXFP4 ? 0 : 2; f < 3; f++)
                converts(&file, families[f], models[i][1]);
            if (i == 0 && type == GGUF_MXFP4)
                converts(&file, "gpt-oss", "gpt_oss");
            gguf_free(&file);
        }
    }
}

T_CASE(keys_of_the_router_go_along) {
    gguf file = model_of("glm4moe", GGUF_MXFP4);
    for (int32_t layer = 1; layer < 3; layer++)
        add_numbers(&file, layer, "exp_probs_b.bias");
    gguf_u32(&file, "glm4moe.expert_group_count", 4);
    gguf_u32(&file, "glm4moe.expert_group_used_count", 2);
    gguf_f32(&file, "glm4moe.expert_weights_scale", 0.1f);
    gguf_bool(&file, "glm4moe.expert_weights_norm", true);
    converts(&file, "compressed-tensors", "glm4_moe");
    gguf_free(&file);
}

/* The first layer chooses by a table, the second by its scores; a third is a draft block. */
T_CASE(hash_layers_and_draft_blocks) {
    gguf file = model_of("deepseek4", GGUF_MXFP4);
    add_limits(&file, 7.5f);
    gguf_remove(&file, "blk.1.exp_probs_b.bias");
    gguf_tensor *table =
        gguf_add(&file, GGUF_I32, SHAPE(VOCABULARY, TOPK), "blk.1.ffn_gate_tid2eid.weight");
    for (int32_t i = 0; i < VOCABULARY * TOPK; i++)
        memcpy(table->data + 4 * i, &(int32_t){i % even.experts}, 4);
    gguf_u32(&file, "deepseek4.hash_layer_count", 2);
    add_layer(&file, 3, GGUF_MXFP4, false);
    gguf_add(&file, GGUF_F32, SHAPE(4), "blk.3.nextn.enorm.weight");
    gguf_u32(&file, "deepseek4.nextn_predict_layers", 1);
    converts(&file, "deepseek-v4", "deepseek_v4");
    gguf_free(&file);
}

T_CASE(what_no_family_holds) {
    gguf file = model_of("qwen3moe", GGUF_MXFP4);
    refuses(&file, "gpt-oss", MEGAMOE_EUNSUPPORTED, "blk.1.ffn_", "no biases");
    add_numbers(&file, 2, "ffn_gate_inp.bias");
    refuses(&file, "deepseek-v4", MEGAMOE_EUNSUPPORTED, "blk.2.ffn_gate_inp.bias", "qwen3_moe");
    gguf_remove(&file, "blk.2.ffn_gate_inp.bias");
    gguf_u32(&file, "qwen3moe.expert_gating_func", 3);
    refuses(&file, "deepseek-v4", MEGAMOE_EUNSUPPORTED, "layer 1", "softmax-selected");
    gguf_free(&file);

    file = model_of("deepseek4", GGUF_MXFP4);
    add_limits(&file, 8);
    refuses(&file, "deepseek-v4", MEGAMOE_EUNSUPPORTED, "layer 2", "swiglu_limit");
    gguf_remove(&file, "blk.1.exp_probs_b.bias");
    refuses(&file, "deepseek-v4", MEGAMOE_EUNSUPPORTED, "blk.1.ffn_gate_inp.weight", "hash table");
    gguf_free(&file);

    file = model_of("gpt-oss", GGUF_MXFP4);
    gguf_find(&file, "blk.2.ffn_down_exps.bias")->data[4 * (3 * 128 + 5)] = 1;
    refuses(&file, "gpt-oss", MEGAMOE_EINEXACT, "blk.2.ffn_down_exps.bias: expert 3, row 5",
            "BF16");
    converts(&file, "compressed-tensors", "gpt_oss");
    gguf_free(&file);

    file = model_of("qwen3moe", GGUF_NVFP4);
    refuses(&file, "deepseek-v4", MEGAMOE_EINEXACT, "blk.1.ffn_", "rounding");
    add_layer(&file, 3, GGUF_Q8_0, false);
    refuses(&file, "modelopt-nvfp4", MEGAMOE_EUNSUPPORTED, "blk.3.ffn_", "Q8_0");
    gguf_free(&file);

    file = model_of("glm4moe", GGUF_MXFP4);
    gguf_remove(&file, "blk.2.ffn_gate_inp.weight");
    for (int stem = 0; stem < 3; stem++) {
        static const char *const stems[] = {"gate", "up", "down"};
        const int64_t rows = stem == 2 ? even.hidden : even.intermediate;
        gguf_add(&file, GGUF_F32, SHAPE(even.experts, rows), "blk.2.ffn_%s_exps.bias", stems[stem]);
    }
    refuses(&file, "compressed-tensors", MEGAMOE_EUNSUPPORTED, "blk.2.ffn_", "glm4moe");
    gguf_free(&file);
}
