/* SPDX-License-Identifier: Apache-2.0 */
/* The ModelOpt NVFP4 family: per-expert and fused names, global scales, mixed repositories. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

static const sizes odd = {.hidden = 80, .intermediate = 48, .experts = 3};
static const char v3_block[] = "model.layers.%d.mlp.";

static built v3(int32_t layer) {
    built model = built_start();
    add_nvfp4(&model, v3_block, layer, named, odd);
    return model;
}

static float float_of(const built_tensor *tensor, size_t index) {
    float value;
    memcpy(&value, tensor->data + index * sizeof value, sizeof value);
    return value;
}

static void set_float(built_tensor *tensor, size_t index, float value) {
    memcpy(tensor->data + index * sizeof value, &value, sizeof value);
}

/* Compares one matrix with rows first.. of its tensors. */
static bool same_values(const megamoe_weights *weights, int32_t expert, int projection,
                        const built_tensor *codes, const built_tensor *scales, int64_t first,
                        float global) {
    static double values[80 * 48];
    const int64_t rows = projection == 2 ? odd.hidden : odd.intermediate;
    const int64_t columns = projection == 2 ? odd.intermediate : odd.hidden;
    if (!T_STATUS(megamoe_weights_unpack(weights, expert, (megamoe_projection)projection, values),
                  MEGAMOE_OK))
        return false;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = 0; k < columns; k++)
            if (!T_EQ_F64(values[row * columns + k],
                          element(codes, scales, global, first + row, k)))
                return false;
    return true;
}

T_CASE(per_expert_names_of_all_models_are_read) {
    static const struct {
        const char *block;
        const char *const *projections;
        const char *model_type;
        double limit;
    } models[] = {{"model.layers.%d.mlp.", named, "deepseek_v3", 0},
                  {"model.layers.%d.mlp.", named, "qwen3_moe", 0},
                  {"language_model.model.layers.%d.mlp.", named, "kimi_k25", 0},
                  {"model.language_model.layers.%d.mlp.", named, "glm4v_moe", 0},
                  {"language_model.layers.%d.mlp.", named, "kimi_k25", 0},
                  {"model.layers.%d.block_sparse_moe.", numbered, "minimax_m2", 0},
                  {"layers.%d.ffn.", numbered, "deepseek_v4", 10}};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        built model = built_start();
        add_nvfp4(&model, models[i].block, 4, models[i].projections, odd);
        char config[256];
        snprintf(config, sizeof config,
                 "{\"model_type\":\"%s\",\"hidden_size\":80,\"quantization_config\":"
                 "{\"quant_method\":\"modelopt\",\"quant_algo\":\"NVFP4\",\"group_size\":16}}",
                 models[i].model_type);
        megamoe_checkpoint *checkpoint = opened(save_model(&model, config));
        megamoe_checkpoint_info info = MEGAMOE_INIT(megamoe_checkpoint_info);
        T_OK(megamoe_checkpoint_describe(checkpoint, &info));
        T_EQ_STR(info.family, "modelopt-nvfp4");
        megamoe_weights *weights;
        T_OK(megamoe_checkpoint_weights(checkpoint, 4, &weights));
        megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
        T_OK(megamoe_weights_describe(weights, &desc));
        T_EQ_INT(desc.format, MEGAMOE_FORMAT_NVFP4);
        T_EQ_INT(desc.hidden, odd.hidden);
        T_EQ_INT(desc.intermediate, odd.intermediate);
        T_EQ_INT(desc.experts, odd.experts);
        T_EQ_F64(desc.activation.limit, models[i].limit);
        for (int32_t e = 0; e < odd.experts; e++)
            for (int p = 0; p < 3; p++) {
                char name[160], block[96];
                snprintf(block, sizeof block, models[i].block, 4);
                const int n = snprintf(name, sizeof name, "%sexperts.%d.%s.weight", block, e,
                                       models[i].projections[p]);
                const built_tensor *codes = built_find(&model, name);
                snprintf(name + n, sizeof name - (size_t)n, "_scale");
                const built_tensor *scales = built_find(&model, name);
                snprintf(name + n, sizeof name - (size_t)n, "_scale_2");
                T_REQUIRE(same_values(weights, e, p, codes, scales, 0,
                                      float_of(built_find(&model, name), 0)));
            }
        megamoe_weights_close(weights);
        megamoe_checkpoint_close(checkpoint);
        built_free(&model);
    }
}

/* Fused tensors; `globals` is the shape of the gate and up globals, `down` that of the down ones.
 */
static built fused(const int64_t *globals, const int64_t *down) {
    built model = built_start();
    static const char block[] = "model.layers.2.mlp.experts.";
    const int64_t e = odd.experts, h = odd.hidden, i = odd.intermediate;
    randomize(&model, built_add(&model, "U8", SHAPE(e, 2 * i, h / 2), "%sgate_up_proj", block), 0,
              255);
    randomize(
        &model,
        built_add(&model, "F8_E4M3", SHAPE(e, 2 * i, h / 16), "%sgate_up_proj_weight_scale", block),
        0, 0x7E);
    randomize(&model, built_add(&model, "U8", SHAPE(e, h, i / 2), "%sdown_proj", block), 0, 255);
    randomize(&model,
              built_add(&model, "F8_E4M3", SHAPE(e, h, i / 16), "%sdown_proj_weight_scale", block),
              0, 0x7E);
    const struct {
        const char *name;
        const int64_t *shape;
    } scales[] = {{"gate_up_proj", globals}, {"down_proj", down}};
    for (int s = 0; s < 2; s++) {
        built_tensor *tensor =
            built_add(&model, "F32", scales[s].shape, "%s%s_weight_scale_2", block, scales[s].name);
        for (size_t n = 0; n < tensor->bytes / 4; n++)
            set_float(tensor, n, (float)(1e-5 * (1 + t_uniform(&model.random))));
        built_add(&model, "F32", scales[s].shape, "%s%s_input_scale", block, scales[s].name);
    }
    return model;
}

T_CASE(fused_experts_and_all_shapes_of_their_globals) {
    const int64_t e = odd.experts;
    const struct {
        const int64_t *gate_up, *down;
        size_t by_expert, by_half, down_by_expert;
    } shapes[] = {{SCALAR, SCALAR, 0, 0, 0},        {SHAPE(1), SHAPE(1), 0, 0, 0},
                  {SHAPE(e), SHAPE(e), 1, 0, 1},    {SHAPE(e, 1), SHAPE(e, 1), 1, 0, 1},
                  {SHAPE(e, 2), SHAPE(e), 2, 1, 1}, {SHAPE(e, 2, 1), SCALAR, 2, 1, 0}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        built model = fused(shapes[s].gate_up, shapes[s].down);
        megamoe_checkpoint *checkpoint = opened(save_model(&model, NULL));
        megamoe_weights *weights;
        T_OK(megamoe_checkpoint_weights(checkpoint, 2, &weights));
        const char *const block = "model.layers.2.mlp.experts.";
        char name[160];
        const built_tensor *tensors[6];
        static const char *const parts[6] = {
            "gate_up_proj", "gate_up_proj_weight_scale", "gate_up_proj_weight_scale_2",
            "down_proj",    "down_proj_weight_scale",    "down_proj_weight_scale_2"};
        for (int i = 0; i < 6; i++) {
            snprintf(name, sizeof name, "%s%s", block, parts[i]);
            tensors[i] = built_find(&model, name);
        }
        for (int32_t x = 0; x < odd.experts; x++) {
            for (int half = 0; half < 2; half++)
                T_REQUIRE(same_values(weights, x, half, tensors[0], tensors[1],
                                      (2 * x + half) * odd.intermediate,
                                      float_of(tensors[2], (size_t)x * shapes[s].by_expert +
                                                               (size_t)half * shapes[s].by_half)));
            T_REQUIRE(same_values(weights, x, 2, tensors[3], tensors[4], x * odd.hidden,
                                  float_of(tensors[5], (size_t)x * shapes[s].down_by_expert)));
        }
        megamoe_weights_close(weights);
        megamoe_checkpoint_close(checkpoint);
        built_free(&model);
    }
}

T_CASE(fused_experts_that_do_not_fit_are_refused) {
    const int64_t e = odd.experts;
    const int64_t *const shapes[] = {SHAPE(2), SHAPE(2, e), SHAPE(e, 3), SHAPE(2 * e), SHAPE(0)};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        built model = fused(shapes[s], SCALAR);
        FAILS(try_weights(save_model(&model, NULL), 2), MEGAMOE_EFORMAT,
              "gate_up_proj_weight_scale_2", "must be F32");
        built_free(&model);
    }
    built model = fused(SCALAR, SHAPE(e, 2));
    FAILS(try_weights(save_model(&model, NULL), 2), MEGAMOE_EFORMAT, "down_proj_weight_scale_2",
          "must be F32");
    built_free(&model);

    static const char *const missing[] = {
        "gate_up_proj", "gate_up_proj_weight_scale", "gate_up_proj_weight_scale_2",
        "down_proj",    "down_proj_weight_scale",    "down_proj_weight_scale_2"};
    for (size_t i = 0; i < sizeof missing / sizeof *missing; i++) {
        char name[96];
        snprintf(name, sizeof name, "model.layers.2.mlp.experts.%s", missing[i]);
        model = fused(SCALAR, SCALAR);
        built_remove(&model, name);
        FAILS(try_weights(save_model(&model, NULL), 2), MEGAMOE_EFORMAT, name, "missing");
        built_free(&model);
    }
    model = fused(SCALAR, SCALAR);
    FAILS(try_weights(save_model(&model, "{\"num_experts\":4}"), 2), MEGAMOE_EFORMAT, "num_experts",
          "4");
    FAILS(try_weights(save_model(&model, "{\"moe_intermediate_size\":96}"), 2), MEGAMOE_EFORMAT,
          "gate_up_proj", "moe_intermediate_size 48", "96");
    built_find(&model, "model.layers.2.mlp.experts.gate_up_proj_weight_scale")->data[500] = 0x7F;
    FAILS(try_weights(save_model(&model, NULL), 2), MEGAMOE_EFORMAT, "gate_up_proj_weight_scale",
          "expert 1");
    built_free(&model);
}

T_CASE(gate_and_up_have_their_own_globals) {
    built model = v3(0);
    set_float(built_find(&model, "model.layers.0.mlp.experts.1.gate_proj.weight_scale_2"), 0,
              3.85e-5f);
    set_float(built_find(&model, "model.layers.0.mlp.experts.1.up_proj.weight_scale_2"), 0,
              4.83e-5f);
    megamoe_checkpoint *checkpoint = opened(save_model(&model, NULL));
    megamoe_weights *weights;
    T_OK(megamoe_checkpoint_weights(checkpoint, 0, &weights));
    megamoe_matrix matrix;
    T_OK(megamoe_weights_matrix(weights, 1, MEGAMOE_GATE, &matrix));
    T_EQ_F64((double)matrix.global_scale, (double)3.85e-5f);
    T_OK(megamoe_weights_matrix(weights, 1, MEGAMOE_UP, &matrix));
    T_EQ_F64((double)matrix.global_scale, (double)4.83e-5f);
    megamoe_weights_close(weights);
    megamoe_checkpoint_close(checkpoint);
    built_free(&model);
}

T_CASE(globals_that_are_no_scale_are_refused) {
    static const float globals[] = {0.0f, -0.0f, -1.0f, INFINITY, -INFINITY, NAN};
    const char *name = "model.layers.0.mlp.experts.2.down_proj.weight_scale_2";
    for (size_t i = 0; i < sizeof globals / sizeof *globals; i++) {
        built model = v3(0);
        set_float(built_find(&model, name), 0, globals[i]);
        FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, name,
              "positive and finite");
        built_free(&model);
    }
    built model = v3(0);
    strcpy(built_find(&model, name)->dtype, "I32");
    FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, name, "I32", "F32");
    built_remove(&model, name);
    built_add(&model, "F32", SHAPE(2), "%s", name);
    FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, name, "[2]", "one value");
    built_remove(&model, name);
    built_add(&model, "BF16", SHAPE(2), "%s", name);
    FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, name, "BF16", "F32");
    built_remove(&model, name);
    set_float(built_add(&model, "F32", SHAPE(1, 1), "%s", name), 0, 1e-30f);
    T_OK(try_weights(save_model(&model, NULL), 0));
    built_free(&model);
}

T_CASE(block_scales_that_are_no_scale_are_refused) {
    static const uint8_t bytes[] = {0x7F, 0xFF, 0x80, 0x81, 0xFE};
    const char *name = "model.layers.0.mlp.experts.1.up_proj.weight_scale";
    built model = v3(0);
    for (size_t i = 0; i < sizeof bytes; i++) {
        built_find(&model, name)->data[201] = bytes[i];
        FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, "model.safetensors", name);
    }
    built_find(&model, name)->data[201] = 0;
    T_OK(try_weights(save_model(&model, NULL), 0));
    built_free(&model);
}

T_CASE(every_missing_tensor_is_named) {
    static const char *const parts[] = {"weight", "weight_scale", "weight_scale_2"};
    for (int32_t expert = 0; expert < odd.experts; expert++)
        for (int p = 0; p < 3; p++)
            for (int part = 0; part < 3; part++) {
                built model = v3(0);
                char name[96];
                snprintf(name, sizeof name, "model.layers.0.mlp.experts.%d.%s.%s", expert, named[p],
                         parts[part]);
                built_remove(&model, name);
                FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, name, "missing");
                built_free(&model);
            }
}

T_CASE(input_scales_play_no_part) {
    built model = v3(0);
    for (int32_t e = 0; e < odd.experts; e++)
        for (int p = 0; p < 3; p++) {
            char name[96];
            snprintf(name, sizeof name, "model.layers.0.mlp.experts.%d.%s.input_scale", e,
                     named[p]);
            if (e == 0)
                built_remove(&model, name);
            else
                set_float(built_find(&model, name), 0, e == 1 ? NAN : -1.0f);
        }
    T_OK(try_weights(save_model(&model, NULL), 0));
    built_free(&model);
}

T_CASE(suffixes_that_are_not_known_are_refused) {
    static const char *const parts[] = {"weight_scale.nvfp4_csf_fixed",
                                        "weight_scale_exceptions",
                                        "weight_scale_3",
                                        "bias",
                                        "weight_packed",
                                        "pre_quant_scale"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        built model = v3(0);
        built_add(&model, "U8", SHAPE(3), "model.layers.0.mlp.experts.2.up_proj.%s", parts[i]);
        FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EUNSUPPORTED, parts[i], "unknown");
        built_free(&model);
    }
    built model = fused(SCALAR, SCALAR);
    built_add(&model, "F32", SHAPE(3), "model.layers.2.mlp.experts.gate_up_proj_bias");
    FAILS(try_weights(save_model(&model, NULL), 2), MEGAMOE_EUNSUPPORTED, "gate_up_proj_bias");
    built_free(&model);
}

T_CASE(wrong_types_and_shapes_are_named) {
    static const struct {
        const char *name, *dtype;
    } types[] = {{"model.layers.0.mlp.experts.0.gate_proj.weight", "I8"},
                 {"model.layers.0.mlp.experts.1.down_proj.weight", "F8_E4M3"},
                 {"model.layers.0.mlp.experts.1.down_proj.weight_scale", "F8_E8M0"},
                 {"model.layers.0.mlp.experts.1.up_proj.weight_scale", "U8"}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        built model = v3(0);
        strcpy(built_find(&model, types[i].name)->dtype, types[i].dtype);
        FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, types[i].name,
              types[i].dtype, "must be");
        built_free(&model);
    }
    built model = v3(0);
    const char *name = "model.layers.0.mlp.experts.2.gate_proj.weight_scale";
    built_remove(&model, name);
    built_add(&model, "F8_E4M3", SHAPE(80, 3), "%s", name);
    FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, name, "[80, 3]", "[48, 5]");
    built_free(&model);
}

T_CASE(minimax_names_its_expert_size_plainly) {
    built model = built_start();
    add_nvfp4(&model, "model.layers.%d.block_sparse_moe.", 0, numbered, odd);
    T_OK(try_weights(save_model(&model, "{\"intermediate_size\":48}"), 0));
    FAILS(try_weights(save_model(&model, "{\"intermediate_size\":64}"), 0), MEGAMOE_EFORMAT,
          "intermediate_size 48", "64");
    built_free(&model);
    model = v3(0); /* elsewhere that is the size of dense layers */
    T_OK(try_weights(save_model(&model, "{\"intermediate_size\":64}"), 0));
    built_free(&model);
}

/* Layer 0 NVFP4, layer 1 MXFP4, layer 2 FP8, and drafts in MXFP4. */
static built mixed(void) {
    built model = built_start();
    add_nvfp4(&model, "layers.%d.ffn.", 0, numbered, odd);
    add_mxfp4(&model, "layers.%d.ffn.", 1, numbered, "scale",
              (sizes){.hidden = 64, .intermediate = 32, .experts = 2});
    add_mxfp4(&model, "mtp.%d.ffn.", 0, numbered, "scale",
              (sizes){.hidden = 64, .intermediate = 32, .experts = 2});
    built_add(&model, "F8_E4M3", SHAPE(32, 64), "layers.2.ffn.experts.0.w1.weight");
    built_add(&model, "F32", SHAPE(1, 1), "layers.2.ffn.experts.0.w1.scale");
    return model;
}

T_CASE(mixed_repositories_are_decided_layer_by_layer) {
    built model = mixed();
    static const char *const configs[] = {
        NULL,
        "{\"model_type\":\"deepseek_v4\",\"quantization_config\":{\"quant_method\":\"fp8\","
        "\"quant_algo\":\"MIXED_PRECISION\",\"moe_quant_algo\":\"NVFP4\",\"group_size\":16,"
        "\"ignore\":[\"mtp.*\"],\"quantized_layers\":{\"layers.0.ffn.experts\":"
        "{\"quant_algo\":\"NVFP4\",\"group_size\":16}}}}",
        /* the same under another prefix, module by module */
        "{\"quantization_config\":{\"quant_method\":\"modelopt\",\"quantized_layers\":{"
        "\"model.layers.0.ffn.experts.0.w1\":{\"quant_algo\":\"W4A16_NVFP4\"}}}}"};
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        megamoe_checkpoint *checkpoint = opened(save_model(&model, configs[i]));
        megamoe_checkpoint_info info = MEGAMOE_INIT(megamoe_checkpoint_info);
        T_OK(megamoe_checkpoint_describe(checkpoint, &info));
        T_EQ_STR(info.family, "modelopt-nvfp4");
        T_EQ_INT(info.layers, 3);
        static const megamoe_format formats[2] = {MEGAMOE_FORMAT_NVFP4, MEGAMOE_FORMAT_MXFP4};
        for (int32_t layer = 0; layer < 2; layer++) {
            megamoe_weights *weights;
            megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
            T_OK(megamoe_checkpoint_weights(checkpoint, layer, &weights));
            T_OK(megamoe_weights_describe(weights, &desc));
            T_EQ_INT(desc.format, formats[layer]);
            T_EQ_F64(desc.activation.limit, 10);
            megamoe_weights_close(weights);
        }
        megamoe_weights *weights;
        FAILS(megamoe_checkpoint_weights(checkpoint, 2, &weights), MEGAMOE_EUNSUPPORTED, "layer 2",
              "FP8");
        megamoe_checkpoint_close(checkpoint);
    }
    built_free(&model);
}

T_CASE(a_config_that_contradicts_a_layer_is_refused) {
    static const struct {
        const char *config, *quant;
        const char *parts[3];
    } contradictions[] = {
        {NULL,
         "{\"quantization\":{\"quant_algo\":\"FP8\"}}",
         {"NVFP4", "hf_quant_config.json", "\"FP8\""}},
        {"{\"quantization_config\":{\"quant_algo\":\"MXFP4\"}}",
         NULL,
         {"NVFP4", "config.json", "\"MXFP4\""}},
        {"{\"quantization_config\":{\"quant_method\":\"compressed-tensors\"}}",
         NULL,
         {"NVFP4", "quant_method", "compressed-tensors"}},
        {"{\"expert_dtype\":\"fp8\"}", NULL, {"NVFP4", "expert_dtype", "fp8"}},
        {NULL,
         "{\"quantization\":{\"quant_algo\":\"NVFP4\",\"group_size\":32}}",
         {"group_size", "32", "16"}},
        {NULL,
         "{\"quantization\":{\"quant_algo\":\"MIXED_PRECISION\",\"quantized_layers\":{"
         "\"model.layers.0.mlp.experts.0.gate_proj\":{\"quant_algo\":\"FP8\"}}}}",
         {"layer 0", "hf_quant_config.json", "\"FP8\""}},
        {NULL, "{\"quantization\":", {"hf_quant_config.json", "line 1"}},
    };
    built model = v3(0);
    for (size_t i = 0; i < sizeof contradictions / sizeof *contradictions; i++) {
        const char *path = save_model(&model, contradictions[i].config);
        if (contradictions[i].quant)
            write_text(t_path("model/hf_quant_config.json"), contradictions[i].quant);
        T_STATUS(try_open(path), MEGAMOE_EFORMAT);
        for (int p = 0; p < 3 && contradictions[i].parts[p]; p++)
            T_CONTAINS(megamoe_last_error(), contradictions[i].parts[p]);
    }
    static const char *const agreeing[] = {
        "{\"quantization\":{\"quant_algo\":\"NVFP4\",\"group_size\":16,"
        "\"exclude_modules\":[\"lm_head\"]}}",
        "{\"quantization\":{\"quant_algo\":\"W4A16_NVFP4\"}}",
        "{\"quantization\":{\"quant_algo\":\"MIXED_PRECISION\"}}", "{}"};
    for (size_t i = 0; i < sizeof agreeing / sizeof *agreeing; i++) {
        const char *path = save_model(&model, NULL);
        write_text(t_path("model/hf_quant_config.json"), agreeing[i]);
        T_OK(try_open(path));
    }
    built_free(&model);
}

T_CASE(weights_outlive_the_checkpoint_and_can_be_shared) {
    built model = v3(0);
    megamoe_checkpoint *checkpoint = opened(save_model(&model, NULL));
    megamoe_weights *weights[2];
    T_OK(megamoe_checkpoint_weights(checkpoint, 0, &weights[0]));
    T_OK(megamoe_checkpoint_weights(checkpoint, 0, &weights[1]));
    megamoe_weights_close(weights[0]);
    megamoe_checkpoint_close(checkpoint);
    T_CHECK(same_values(
        weights[1], 0, 0, built_find(&model, "model.layers.0.mlp.experts.0.gate_proj.weight"),
        built_find(&model, "model.layers.0.mlp.experts.0.gate_proj.weight_scale"), 0,
        float_of(built_find(&model, "model.layers.0.mlp.experts.0.gate_proj.weight_scale_2"), 0)));
    megamoe_weights_close(weights[1]);
    built_free(&model);
}
