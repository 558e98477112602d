/* SPDX-License-Identifier: Apache-2.0 */
#include "models.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { NVFP4_GROUP = 16, SIZE_MULTIPLE = 64, EXPERTS_MULTIPLE = 8 };

static const model models[] = {
    {.name = "deepseek-v4-flash",
     .architecture = "DeepseekV4ForCausalLM",
     .type = "deepseek_v4",
     .naming = NAMES_DEEPSEEK_V4,
     .published = MEGAMOE_FORMAT_MXFP4,
     .hidden = 4096,
     .intermediate = 2048,
     .experts = 256,
     .topk = 6,
     .layers = 43,
     .hash_layers = 3,
     .vocabulary = 129280,
     .rule = MEGAMOE_ROUTER_SQRT_SOFTPLUS,
     .scaling = 1.5f,
     .limit = 10,
     .quantization_block = 128,
     .names_expert_dtype = true},
    {.name = "deepseek-v4-pro",
     .architecture = "DeepseekV4ForCausalLM",
     .type = "deepseek_v4",
     .naming = NAMES_DEEPSEEK_V4,
     .published = MEGAMOE_FORMAT_MXFP4,
     .hidden = 7168,
     .intermediate = 3072,
     .experts = 384,
     .topk = 6,
     .layers = 61,
     .hash_layers = 3,
     .vocabulary = 129280,
     .rule = MEGAMOE_ROUTER_SQRT_SOFTPLUS,
     .scaling = 2.5f,
     .limit = 10,
     .quantization_block = 128},
    {.name = "deepseek-v4.1-flash",
     .architecture = "DeepseekV41ForCausalLM",
     .type = "deepseek_v41",
     .text_type = "deepseek_v41_text",
     .naming = NAMES_DEEPSEEK_V4,
     .published = MEGAMOE_FORMAT_MXFP4,
     .hidden = 5120,
     .intermediate = 2304,
     .experts = 384,
     .topk = 6,
     .layers = 40,
     .vocabulary = 129280,
     .rule = MEGAMOE_ROUTER_SQRT_SOFTPLUS,
     .scaling = 1.5f,
     .limit = 10,
     .quantization_block = 32,
     .names_expert_dtype = true},
    {.name = "deepseek-v3",
     .architecture = "DeepseekV3ForCausalLM",
     .type = "deepseek_v3",
     .naming = NAMES_DEEPSEEK_V3,
     .published = MEGAMOE_FORMAT_NVFP4,
     .hidden = 7168,
     .intermediate = 2048,
     .experts = 256,
     .topk = 8,
     .layers = 61,
     .dense_layers = 3,
     .dense_intermediate = 18432,
     .vocabulary = 129280,
     .rule = MEGAMOE_ROUTER_SIGMOID,
     .groups = 8,
     .groups_kept = 4,
     .scaling = 2.5f},
    {.name = "qwen3-30b-a3b",
     .architecture = "Qwen3MoeForCausalLM",
     .type = "qwen3_moe",
     .naming = NAMES_QWEN3,
     .published = MEGAMOE_FORMAT_NVFP4,
     .hidden = 2048,
     .intermediate = 768,
     .experts = 128,
     .topk = 8,
     .layers = 48,
     .dense_intermediate = 6144,
     .vocabulary = 151936,
     .rule = MEGAMOE_ROUTER_SOFTMAX,
     .scaling = 1},
    {.name = "qwen3-235b-a22b",
     .architecture = "Qwen3MoeForCausalLM",
     .type = "qwen3_moe",
     .naming = NAMES_QWEN3,
     .published = MEGAMOE_FORMAT_NVFP4,
     .hidden = 4096,
     .intermediate = 1536,
     .experts = 128,
     .topk = 8,
     .layers = 94,
     .dense_intermediate = 12288,
     .vocabulary = 151936,
     .rule = MEGAMOE_ROUTER_SOFTMAX,
     .scaling = 1},
    {.name = "gpt-oss-20b",
     .architecture = "GptOssForCausalLM",
     .type = "gpt_oss",
     .naming = NAMES_GPT_OSS,
     .published = MEGAMOE_FORMAT_MXFP4,
     .hidden = 2880,
     .intermediate = 2880,
     .experts = 32,
     .topk = 4,
     .layers = 24,
     .vocabulary = 201088,
     .rule = MEGAMOE_ROUTER_SOFTMAX_SELECTED,
     .scaling = 1,
     .limit = 7,
     .alpha = 1.702f,
     .offset = 1,
     .has_bias = true},
    {.name = "gpt-oss-120b",
     .architecture = "GptOssForCausalLM",
     .type = "gpt_oss",
     .naming = NAMES_GPT_OSS,
     .published = MEGAMOE_FORMAT_MXFP4,
     .hidden = 2880,
     .intermediate = 2880,
     .experts = 128,
     .topk = 4,
     .layers = 36,
     .vocabulary = 201088,
     .rule = MEGAMOE_ROUTER_SOFTMAX_SELECTED,
     .scaling = 1,
     .limit = 7,
     .alpha = 1.702f,
     .offset = 1,
     .has_bias = true},
};

const model *model_at(size_t i) {
    return i < sizeof models / sizeof *models ? &models[i] : NULL;
}

const model *model_find(const char *name) {
    for (size_t i = 0; model_at(i) != NULL; i++)
        if (strcmp(models[i].name, name) == 0)
            return &models[i];
    return NULL;
}

static int32_t scaled(int32_t value, double scale, int32_t multiple) {
    return (int32_t)ceil(value * scale / multiple) * multiple;
}

model model_scaled(const model *full, double scale) {
    model m = *full;
    m.hidden = scaled(full->hidden, scale, SIZE_MULTIPLE);
    m.intermediate = scaled(full->intermediate, scale, SIZE_MULTIPLE);
    m.experts = scaled(full->experts, scale, EXPERTS_MULTIPLE);
    if (m.experts < 2 * m.topk)
        m.experts = scaled(2 * m.topk, 1, EXPERTS_MULTIPLE);
    return m;
}

bool model_has_format(const model *m, megamoe_format format) {
    return format == m->published ||
           (format == MEGAMOE_FORMAT_NVFP4 && m->naming == NAMES_DEEPSEEK_V4);
}

megamoe_layer_desc model_layer(const model *m, int32_t layer, megamoe_format format) {
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    desc.layer = layer;
    desc.hidden = m->hidden;
    desc.intermediate = m->intermediate;
    desc.experts = m->experts;
    desc.topk = m->topk;
    desc.format = format;
    desc.activation = (megamoe_activation){m->alpha, m->offset, m->limit};
    desc.has_bias = m->has_bias;
    return desc;
}

void model_matrix_name(const model *m, int32_t layer, int32_t expert, megamoe_projection projection,
                       char name[MODEL_NAME_BYTES]) {
    static const char *const deepseek_v4[] = {"w1", "w3", "w2"};
    static const char *const others[] = {"gate_proj", "up_proj", "down_proj"};
    if (m->naming == NAMES_DEEPSEEK_V4)
        snprintf(name, MODEL_NAME_BYTES, "layers.%d.ffn.experts.%d.%s", layer, expert,
                 deepseek_v4[projection]);
    else
        snprintf(name, MODEL_NAME_BYTES, "model.layers.%d.mlp.experts.%d.%s", layer, expert,
                 others[projection]);
}

bool model_is_fused(const model *m) {
    return m->naming == NAMES_GPT_OSS;
}

void model_fused_name(int32_t layer, megamoe_projection projection, char name[MODEL_NAME_BYTES]) {
    snprintf(name, MODEL_NAME_BYTES, "model.layers.%d.mlp.experts.%s", layer,
             projection == MEGAMOE_DOWN ? "down_proj" : "gate_up_proj");
}

void model_router_name(const model *m, int32_t layer, const char *part,
                       char name[MODEL_NAME_BYTES]) {
    const char *format = m->naming == NAMES_DEEPSEEK_V4 ? "layers.%d.ffn.gate.%s"
                         : m->naming == NAMES_GPT_OSS   ? "model.layers.%d.mlp.router.%s"
                                                        : "model.layers.%d.mlp.gate.%s";
    snprintf(name, MODEL_NAME_BYTES, format, layer, part);
}

const char *model_selection_bias(const model *m, int32_t layer) {
    switch (m->naming) {
    case NAMES_DEEPSEEK_V4:
        return layer < m->hash_layers ? NULL : "bias";
    case NAMES_DEEPSEEK_V3:
        return "e_score_correction_bias";
    case NAMES_QWEN3:
    case NAMES_GPT_OSS:
        break;
    }
    return NULL;
}

const char *model_gguf_architecture(const model *m) {
    switch (m->naming) {
    case NAMES_DEEPSEEK_V4:
        return "deepseek4";
    case NAMES_QWEN3:
        return "qwen3moe";
    case NAMES_GPT_OSS:
        return "gpt-oss";
    case NAMES_DEEPSEEK_V3:
        break;
    }
    return "deepseek2";
}

static json_t *deepseek_geometry(const model *m) {
    json_t *config = json_pack(
        "{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:s, s:s, s:b, s:f}", "model_type",
        m->text_type ? m->text_type : m->type, "hidden_size", m->hidden, "moe_intermediate_size",
        m->intermediate, "n_routed_experts", m->experts, "n_shared_experts", 1,
        "num_experts_per_tok", m->topk, "num_hidden_layers", m->layers, "vocab_size", m->vocabulary,
        "num_nextn_predict_layers", 1, "scoring_func",
        m->rule == MEGAMOE_ROUTER_SIGMOID ? "sigmoid" : "sqrtsoftplus", "topk_method", "noaux_tc",
        "norm_topk_prob", 1, "routed_scaling_factor", (double)m->scaling);
    if (m->hash_layers > 0)
        json_object_set_new(config, "num_hash_layers", json_integer(m->hash_layers));
    if (m->limit > 0)
        json_object_set_new(config, "swiglu_limit", json_real(m->limit));
    if (m->groups > 0) {
        json_object_set_new(config, "n_group", json_integer(m->groups));
        json_object_set_new(config, "topk_group", json_integer(m->groups_kept));
    }
    if (m->dense_layers > 0) {
        json_object_set_new(config, "first_k_dense_replace", json_integer(m->dense_layers));
        json_object_set_new(config, "moe_layer_freq", json_integer(1));
        json_object_set_new(config, "intermediate_size", json_integer(m->dense_intermediate));
    }
    return config;
}

static json_t *qwen3_geometry(const model *m) {
    return json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:[], s:b, s:s}", "model_type",
                     m->type, "hidden_size", m->hidden, "intermediate_size", m->dense_intermediate,
                     "moe_intermediate_size", m->intermediate, "num_experts", m->experts,
                     "num_experts_per_tok", m->topk, "num_hidden_layers", m->layers, "vocab_size",
                     m->vocabulary, "decoder_sparse_step", 1, "mlp_only_layers", "norm_topk_prob",
                     1, "hidden_act", "silu");
}

static json_t *gpt_oss_geometry(const model *m) {
    return json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:s, s:f}", "model_type", m->type,
                     "hidden_size", m->hidden, "intermediate_size", m->intermediate,
                     "num_local_experts", m->experts, "num_experts_per_tok", m->topk,
                     "experts_per_token", m->topk, "num_hidden_layers", m->layers, "vocab_size",
                     m->vocabulary, "hidden_act", "silu", "swiglu_limit", (double)m->limit);
}

/* Names of what stays unquantized, as ModelOpt writes them. */
static json_t *unquantized(const model *m, int32_t first_layer, int32_t n) {
    json_t *names = json_pack("[s]", "lm_head");
    for (int32_t layer = first_layer; layer < first_layer + n; layer++) {
        char name[MODEL_NAME_BYTES];
        model_router_name(m, layer, "weight", name);
        *strrchr(name, '.') = '\0';
        json_array_append_new(names, json_string(name));
    }
    return names;
}

/* DeepSeek-V4's: FP8 for dense weights, with the experts' own format beside it. */
static json_t *deepseek_v4_quantization(const model *m, megamoe_format format, int32_t first_layer,
                                        int32_t n) {
    json_t *quantization =
        json_pack("{s:s, s:s, s:s, s:s, s:[i, i]}", "quant_method", "fp8", "fmt", "e4m3",
                  "scale_fmt", "ue8m0", "activation_scheme", "dynamic", "weight_block_size",
                  m->quantization_block, m->quantization_block);
    if (m->text_type != NULL)
        json_object_set_new(quantization, "expert_dtype", json_string("fp4"));
    if (format == MEGAMOE_FORMAT_MXFP4)
        return quantization;
    json_t *layers = json_object();
    for (int32_t layer = first_layer; layer < first_layer + n; layer++) {
        char name[MODEL_NAME_BYTES];
        snprintf(name, sizeof name, "layers.%d.ffn.experts", layer);
        json_object_set_new(
            layers, name,
            json_pack("{s:s, s:i}", "quant_algo", "NVFP4", "group_size", NVFP4_GROUP));
    }
    json_object_set_new(quantization, "moe_quant_algo", json_string("NVFP4"));
    json_object_set_new(quantization, "group_size", json_integer(NVFP4_GROUP));
    json_object_set_new(quantization, "quantized_layers", layers);
    json_object_set_new(quantization, "ignore", unquantized(m, first_layer, n));
    return quantization;
}

static json_t *modelopt_quantization(const model *m, int32_t first_layer, int32_t n) {
    return json_pack("{s:s, s:s, s:i, s:{s:s}, s:o}", "quant_method", "modelopt", "quant_algo",
                     "NVFP4", "group_size", NVFP4_GROUP, "producer", "name", "modelopt", "ignore",
                     unquantized(m, first_layer, n));
}

static json_t *gpt_oss_quantization(void) {
    return json_pack("{s:s, s:[s, s, s, s]}", "quant_method", "mxfp4", "modules_to_not_convert",
                     "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                     "lm_head");
}

static json_t *geometry_of(const model *m) {
    switch (m->naming) {
    case NAMES_QWEN3:
        return qwen3_geometry(m);
    case NAMES_GPT_OSS:
        return gpt_oss_geometry(m);
    case NAMES_DEEPSEEK_V4:
    case NAMES_DEEPSEEK_V3:
        break;
    }
    return deepseek_geometry(m);
}

static json_t *quantization_of(const model *m, megamoe_format format, int32_t first_layer,
                               int32_t n) {
    switch (m->naming) {
    case NAMES_DEEPSEEK_V4:
        return deepseek_v4_quantization(m, format, first_layer, n);
    case NAMES_GPT_OSS:
        return gpt_oss_quantization();
    case NAMES_DEEPSEEK_V3:
    case NAMES_QWEN3:
        break;
    }
    return modelopt_quantization(m, first_layer, n);
}

json_t *model_config(const model *m, megamoe_format format, int32_t first_layer, int32_t n) {
    json_t *geometry = geometry_of(m);
    if (m->names_expert_dtype && m->text_type == NULL)
        json_object_set_new(geometry, "expert_dtype", json_string("fp4"));
    json_t *config = geometry;
    if (m->text_type != NULL)
        config = json_pack("{s:s, s:o}", "model_type", m->type, "text_config", geometry);
    json_object_set_new(config, "architectures", json_pack("[s]", m->architecture));
    json_object_set_new(config, "torch_dtype", json_string("bfloat16"));
    json_object_set_new(config, "quantization_config", quantization_of(m, format, first_layer, n));
    return config;
}

json_t *model_quant_config(const model *m, int32_t first_layer, int32_t n) {
    return json_pack("{s:{s:s}, s:{s:s, s:n, s:i, s:o}}", "producer", "name", "modelopt",
                     "quantization", "quant_algo",
                     m->naming == NAMES_DEEPSEEK_V4 ? "MIXED_PRECISION" : "NVFP4",
                     "kv_cache_quant_algo", "group_size", NVFP4_GROUP, "exclude_modules",
                     unquantized(m, first_layer, n));
}
