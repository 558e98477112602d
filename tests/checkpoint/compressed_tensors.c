/* SPDX-License-Identifier: Apache-2.0 */
/* The compressed-tensors family: NVFP4 with reciprocal globals, MXFP4 with U8 scales, its config.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "fixture.h"

static const sizes odd = {.hidden = 160, .intermediate = 96, .experts = 2};
static const char qwen3_block[] = "model.layers.%d.mlp.";

#define CONFIG(rest) "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\"," rest "}}"
#define GROUP(name, target, format, group_size)                                                    \
    "\"" name "\":{\"targets\":[\"" target "\"],\"format\":" format                                \
    ",\"weights\":{\"num_bits\":4,"                                                                \
    "\"type\":\"float\",\"group_size\":" group_size "}}"
#define NVFP4_GROUP(target) GROUP("nvfp4", target, "\"nvfp4-pack-quantized\"", "16")
#define MXFP4_GROUP(target) GROUP("mxfp4", target, "\"mxfp4-pack-quantized\"", "32")
#define FP8_GROUP(target)                                                                          \
    "\"fp8\":{\"targets\":[\"" target "\"],\"format\":\"float-quantized\",\"weights\":"            \
    "{\"num_bits\":8,\"type\":\"float\",\"strategy\":\"channel\"}}"
#define MXFP4_CONFIG CONFIG("\"format\":\"mxfp4-pack-quantized\"")

static float float_of(const built_tensor *tensor) {
    float value;
    memcpy(&value, tensor->data, sizeof value);
    return value;
}

static void set_float(built_tensor *tensor, float value) {
    memcpy(tensor->data, &value, sizeof value);
}

/* Gives the tensors of fixture.h's layers the names, types and reciprocals of this family. */
static void convert(built *model) {
    static const char *const parts[][2] = {{".weight", ".weight_packed"},
                                           {".scale", ".weight_scale"},
                                           {".weight_scale_2", ".weight_global_scale"},
                                           {".input_scale", ".input_global_scale"}};
    for (size_t i = 0; i < model->n; i++) {
        built_tensor *tensor = &model->tensors[i];
        if (strcmp(tensor->dtype, "I8") == 0 || strcmp(tensor->dtype, "F8_E8M0") == 0)
            strcpy(tensor->dtype, "U8");
        if (strcmp(tensor->dtype, "F32") == 0) {
            tensor->rank = 1;
            tensor->shape[0] = 1;
            set_float(tensor, 1.0f / float_of(tensor));
        }
        char *part = strrchr(tensor->name, '.');
        for (size_t p = 0; p < sizeof parts / sizeof *parts; p++)
            if (strcmp(part, parts[p][0]) == 0) {
                strcpy(part, parts[p][1]);
                break;
            }
    }
}

static built nvfp4(void) {
    built model = built_start();
    add_nvfp4(&model, qwen3_block, 0, named, odd);
    convert(&model);
    return model;
}

static built mxfp4(void) {
    built model = built_start();
    add_mxfp4(&model, qwen3_block, 0, named, "scale", odd);
    convert(&model);
    return model;
}

static built_tensor *part_of(const built *model, const char *block, int32_t expert,
                             const char *projection, const char *part) {
    char name[160];
    snprintf(name, sizeof name, "%sexperts.%d.%s.%s", block, expert, projection, part);
    return built_find(model, name);
}

/* Compares all matrices of a layer with its tensors. */
static void same_values(const built *model, const megamoe_weights *weights, const char *block,
                        const char *const *projections, megamoe_format format) {
    static double values[160 * 96];
    for (int32_t e = 0; e < odd.experts; e++)
        for (int p = 0; p < 3; p++) {
            const int64_t rows = p == 2 ? odd.hidden : odd.intermediate;
            const int64_t columns = p == 2 ? odd.intermediate : odd.hidden;
            const built_tensor *codes = part_of(model, block, e, projections[p], "weight_packed");
            built_tensor scales = *part_of(model, block, e, projections[p], "weight_scale");
            float global = 1.0f;
            if (format == MEGAMOE_FORMAT_MXFP4)
                strcpy(scales.dtype, "F8_E8M0");
            else
                global = 1.0f /
                         float_of(part_of(model, block, e, projections[p], "weight_global_scale"));
            T_OK(megamoe_weights_unpack(weights, e, (megamoe_projection)p, values));
            for (int64_t row = 0; row < rows; row++)
                for (int64_t k = 0; k < columns; k++)
                    T_REQUIRE(T_EQ_F64(values[row * columns + k],
                                       element(codes, &scales, global, row, k)));
        }
}

T_CASE(both_formats_are_read_under_the_names_of_all_models) {
    static const struct {
        const char *block;
        const char *const *projections;
        const char *model_type;
    } models[] = {{"model.layers.%d.mlp.", named, "qwen3_moe"},
                  {"model.layers.%d.mlp.", named, "deepseek_v3"},
                  {"language_model.model.layers.%d.mlp.", named, "kimi_k25"},
                  {"model.language_model.layers.%d.mlp.", named, "glm4v_moe"},
                  {"model.layers.%d.block_sparse_moe.", numbered, "minimax_m2"}};
    static const megamoe_format formats[] = {MEGAMOE_FORMAT_NVFP4, MEGAMOE_FORMAT_MXFP4};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        for (int f = 0; f < 2; f++) {
            built model = built_start();
            if (formats[f] == MEGAMOE_FORMAT_NVFP4)
                add_nvfp4(&model, models[i].block, 5, models[i].projections, odd);
            else
                add_mxfp4(&model, models[i].block, 5, models[i].projections, "scale", odd);
            convert(&model);
            char config[512], block[96];
            snprintf(config, sizeof config,
                     "{\"model_type\":\"%s\",\"hidden_size\":160,\"quantization_config\":{"
                     "\"quant_method\":\"compressed-tensors\",\"version\":\"0.14.0\","
                     "\"format\":\"%s\",\"ignore\":[\"lm_head\",\"re:.*mlp.gate$\"],"
                     "\"config_groups\":{\"group_0\":{\"targets\":[\"Linear\"],\"weights\":{"
                     "\"num_bits\":4,\"type\":\"float\",\"group_size\":%d}}}}}",
                     models[i].model_type, f ? "mxfp4-pack-quantized" : "nvfp4-pack-quantized",
                     f ? 32 : 16);
            snprintf(block, sizeof block, models[i].block, 5);
            megamoe_checkpoint *checkpoint = opened(save_model(&model, config));
            megamoe_checkpoint_info info = MEGAMOE_INIT(megamoe_checkpoint_info);
            T_OK(megamoe_checkpoint_describe(checkpoint, &info));
            T_EQ_STR(info.family, "compressed-tensors");
            megamoe_weights *weights;
            T_OK(megamoe_checkpoint_weights(checkpoint, 5, &weights));
            megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
            T_OK(megamoe_weights_describe(weights, &desc));
            T_EQ_INT(desc.format, formats[f]);
            T_EQ_INT(desc.hidden, odd.hidden);
            T_EQ_INT(desc.intermediate, odd.intermediate);
            T_EQ_INT(desc.experts, odd.experts);
            same_values(&model, weights, block, models[i].projections, formats[f]);
            megamoe_weights_close(weights);
            megamoe_checkpoint_close(checkpoint);
            built_free(&model);
        }
}

/* A global of 2 halves; taken as a multiplier it would make weights 4 times too large. */
T_CASE(globals_are_divisors_and_each_matrix_has_its_own) {
    built model = nvfp4();
    static const float divisors[3] = {2.0f, 3584.0f, 448.0f * 6.0f / 0.37f};
    for (int p = 0; p < 3; p++)
        set_float(part_of(&model, "model.layers.0.mlp.", 1, named[p], "weight_global_scale"),
                  divisors[p]);
    megamoe_checkpoint *checkpoint = opened(save_model(&model, NULL));
    megamoe_weights *weights;
    T_OK(megamoe_checkpoint_weights(checkpoint, 0, &weights));
    for (int p = 0; p < 3; p++) {
        megamoe_matrix matrix;
        T_OK(megamoe_weights_matrix(weights, 1, (megamoe_projection)p, &matrix));
        T_EQ_F64((double)matrix.global_scale, (double)(1.0f / divisors[p]));
    }
    megamoe_weights_close(weights);
    megamoe_checkpoint_close(checkpoint);
    built_free(&model);
}

T_CASE(globals_that_are_no_divisor_are_refused) {
    static const float globals[] = {0.0f, -0.0f, -2.0f, INFINITY, -INFINITY, NAN, 1e-39f};
    const char *name = "model.layers.0.mlp.experts.1.up_proj.weight_global_scale";
    built model = nvfp4();
    for (size_t i = 0; i < sizeof globals / sizeof *globals; i++) {
        set_float(built_find(&model, name), globals[i]);
        FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, name, "reciprocal");
    }
    built_remove(&model, name);
    built_add(&model, "F32", SHAPE(2), "%s", name);
    FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, name, "[2]", "one value");
    built_remove(&model, name);
    built_add(&model, "BF16", SHAPE(2), "%s", name);
    FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, name, "BF16", "F32");
    built_free(&model);
}

T_CASE(scales_that_are_no_scale_are_refused) {
    const char *name = "model.layers.0.mlp.experts.1.up_proj.weight_scale";
    static const uint8_t bytes[] = {0x7F, 0xFF, 0x80};
    built model = nvfp4();
    for (size_t i = 0; i < sizeof bytes; i++) {
        built_find(&model, name)->data[77] = bytes[i];
        FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, name);
    }
    built_free(&model);
    model = mxfp4();
    built_find(&model, name)->data[77] = 255;
    FAILS(try_weights(save_model(&model, MXFP4_CONFIG), 0), MEGAMOE_EFORMAT, name);
    built_find(&model, name)->data[77] = 254;
    T_OK(try_weights(save_model(&model, MXFP4_CONFIG), 0));
    built_free(&model);
}

T_CASE(every_missing_tensor_is_named) {
    static const char *const parts[] = {"weight_packed", "weight_scale", "weight_global_scale"};
    for (int f = 0; f < 2; f++)
        for (int32_t expert = 0; expert < odd.experts; expert++)
            for (int p = 0; p < 3; p++)
                for (int part = 0; part < 3 - f; part++) {
                    built model = f ? mxfp4() : nvfp4();
                    char name[96];
                    snprintf(name, sizeof name, "model.layers.0.mlp.experts.%d.%s.%s", expert,
                             named[p], parts[part]);
                    built_remove(&model, name);
                    FAILS(try_weights(save_model(&model, f ? MXFP4_CONFIG : NULL), 0),
                          MEGAMOE_EFORMAT, name, "missing");
                    built_free(&model);
                }
}

T_CASE(input_globals_play_no_part) {
    built model = nvfp4();
    for (int p = 0; p < 3; p++) {
        char name[96];
        snprintf(name, sizeof name, "model.layers.0.mlp.experts.0.%s.input_global_scale", named[p]);
        built_remove(&model, name);
    }
    T_OK(try_weights(save_model(&model, NULL), 0));
    built_free(&model);
}

T_CASE(other_tensors_types_and_shapes_are_refused) {
    static const char *const parts[] = {"bias", "weight_zero_point", "weight_scale_2"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        built model = nvfp4();
        built_add(&model, "F32", SHAPE(1), "model.layers.0.mlp.experts.1.up_proj.%s", parts[i]);
        FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EUNSUPPORTED, parts[i], "unknown");
        built_free(&model);
    }
    built model = mxfp4();
    built_add(&model, "F32", SHAPE(1), "model.layers.0.mlp.experts.1.up_proj.weight_global_scale");
    FAILS(try_weights(save_model(&model, MXFP4_CONFIG), 0), MEGAMOE_EUNSUPPORTED,
          "weight_global_scale", "unknown");
    built_free(&model);

    const char *name = "model.layers.0.mlp.experts.1.down_proj.weight_scale";
    model = nvfp4();
    strcpy(built_find(&model, name)->dtype, "U8");
    FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, name, "U8", "F8_E4M3");
    built_remove(&model, name);
    built_add(&model, "F8_E4M3", SHAPE(160, 3), "%s", name);
    FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, name, "[160, 3]", "[160, 6]");
    built_free(&model);
    model = mxfp4();
    built_remove(&model, name);
    built_add(&model, "U8", SHAPE(160, 6), "%s", name);
    FAILS(try_weights(save_model(&model, MXFP4_CONFIG), 0), MEGAMOE_EFORMAT, name, "[160, 6]",
          "[160, 3]");
    built_free(&model);
}

T_CASE(u8_scales_are_e8m0_only_by_the_config) {
    built model = mxfp4();
    FAILS(try_open(save_model(&model, NULL)), MEGAMOE_ENOTFOUND, "mxfp4-pack-quantized",
          "no config.json");
    FAILS(try_open(save_model(&model, CONFIG("\"ignore\":[]"))), MEGAMOE_ENOTFOUND,
          "mxfp4-pack-quantized", "config.json");
    FAILS(try_open(save_model(
              &model, CONFIG("\"config_groups\":{" GROUP("g", "Linear", "null", "32") "}"))),
          MEGAMOE_EFORMAT, "config_groups.g", "format: none");
    T_OK(try_weights(save_model(&model, MXFP4_CONFIG), 0));
    built_free(&model);
}

/* Their bytes look like any others: the version of the library that wrote them tells. */
T_CASE(scales_with_a_bias_of_125_are_refused) {
    static const struct {
        const char *version;
        bool good;
    } versions[] = {{"0.13.0", false}, {"0.12.2", false}, {"0.13.1.a20251220", false},
                    {"0.9.4", false},  {"0.14.0", true},  {"0.14.0.1", true},
                    {"0.18.0", true},  {"1.0.0", true},   {"unknown", true}};
    built models[] = {mxfp4(), nvfp4()};
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++)
        for (int m = 0; m < 2; m++) {
            char config[256];
            snprintf(config, sizeof config,
                     CONFIG("\"version\":\"%s\",\"format\":\"%s-pack-quantized\""),
                     versions[i].version, m ? "nvfp4" : "mxfp4");
            const char *path = save_model(&models[m], config);
            if (versions[i].good || m == 1)
                T_OK(try_weights(path, 0));
            else
                FAILS(try_open(path), MEGAMOE_EUNSUPPORTED, versions[i].version, "bias of 125",
                      "0.14");
        }
    built_free(&models[0]);
    built_free(&models[1]);
}

#define MIXED(groups) CONFIG("\"format\":\"mixed-precision\",\"config_groups\":{" groups "}")

T_CASE(one_of_the_groups_that_match_must_agree) {
    static const char *const agreeing[] = {
        MIXED(NVFP4_GROUP("Linear")),
        MIXED(FP8_GROUP("Linear") "," NVFP4_GROUP("re:.*mlp\\\\.experts\\\\.\\\\d+.*")),
        MIXED(NVFP4_GROUP("re:.*experts.*") "," FP8_GROUP("re:.*up_proj$")),
        MIXED(NVFP4_GROUP("re:(?:model|x)\\\\.layers\\\\.[0-9]+\\\\.mlp\\\\.\\\\w+") "," FP8_GROUP(
            "Linear")),
        MIXED(NVFP4_GROUP("re:language_model\\\\.layers") "," FP8_GROUP("Linear")),
        MIXED(NVFP4_GROUP("re:[^]b]odel.layers") "," FP8_GROUP("re:(?!x).*")),
        MIXED(NVFP4_GROUP("re:(?!x).*")),
        MIXED(NVFP4_GROUP("re:.{3}")),
        MIXED(NVFP4_GROUP("re:[\\\\w.]*")),
        MIXED(NVFP4_GROUP("re:.*\\\\bmlp")),
        MIXED(GROUP("g", "Linear", "null", "16")),
        CONFIG("\"format\":\"nvfp4-pack-quantized\",\"config_groups\":{" GROUP("g", "Linear",
                                                                               "null", "16") "}"),
        "{\"text_config\":{\"quantization_config\":{\"config_groups\":{" NVFP4_GROUP(
            "Linear") "}}}}",
    };
    static const struct {
        const char *config;
        const char *parts[2];
    } contradictions[] = {
        {MIXED(FP8_GROUP("Linear")), {"config_groups.fp8", "float-quantized"}},
        {MIXED(MXFP4_GROUP("Linear")), {"config_groups.mxfp4", "mxfp4-pack-quantized"}},
        {MIXED(NVFP4_GROUP("re:.*gate_proj$") "," FP8_GROUP("re:.*up_proj")),
         {"config_groups.fp8", "NVFP4"}},
        {MIXED(NVFP4_GROUP("re:experts")), {"no config group", "gate_proj"}},
        {MIXED(NVFP4_GROUP("re:.*self_attn.*")), {"no config group", "gate_proj"}},
        {MIXED(NVFP4_GROUP("lm_head")), {"no config group", "gate_proj"}},
        {MIXED(GROUP("g", "Linear", "\"nvfp4-pack-quantized\"", "32")),
         {"config_groups.g", "group_size 16"}},
        {CONFIG("\"format\":\"mxfp4-pack-quantized\""), {"NVFP4", "mxfp4-pack-quantized"}},
        {CONFIG("\"ignore\":[\"re:.*experts.*\"],\"config_groups\":{" NVFP4_GROUP("Linear") "}"),
         {"ignore", "experts.0.gate_proj"}},
        {"{\"quantization_config\":{\"quant_method\":\"modelopt\"}}", {"quant_method", "modelopt"}},
        {"{\"expert_dtype\":\"fp8\"}", {"expert_dtype", "fp8"}},
    };
    static char too_long[1024];
    snprintf(too_long, sizeof too_long, "%s%0600d%s",
             "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"config_groups\":"
             "{\"g\":{\"targets\":[\"re:",
             0, "\"]}}}}");
    const char *const unread[] = {MIXED(NVFP4_GROUP("re:(model")), too_long,
                                  MIXED(NVFP4_GROUP("re:(?:.+)+[!?]")), /* takes forever */
                                  MIXED(FP8_GROUP("Linear") "," NVFP4_GROUP("re:[a"))};
    built model = nvfp4();
    for (size_t i = 0; i < sizeof agreeing / sizeof *agreeing; i++)
        T_OK(try_weights(save_model(&model, agreeing[i]), 0));
    for (size_t i = 0; i < sizeof contradictions / sizeof *contradictions; i++)
        FAILS(try_open(save_model(&model, contradictions[i].config)), MEGAMOE_EFORMAT, "layer 0",
              contradictions[i].parts[0], contradictions[i].parts[1]);
    for (size_t i = 0; i < sizeof unread / sizeof *unread; i++)
        FAILS(try_open(save_model(&model, unread[i])), MEGAMOE_EUNSUPPORTED, "cannot be tried",
              "\"re:");
    built_free(&model);
}

T_CASE(a_repository_may_mix_formats_layer_by_layer) {
    built model = built_start();
    add_nvfp4(&model, qwen3_block, 0, named, odd);
    add_mxfp4(&model, qwen3_block, 1, named, "scale", odd);
    convert(&model);
    built_add(&model, "F8_E4M3", SHAPE(96, 160), "model.layers.2.mlp.experts.0.up_proj.weight");
    megamoe_checkpoint *checkpoint =
        opened(save_model(&model, MIXED(FP8_GROUP("Linear") "," MXFP4_GROUP(
                                      "re:.*layers.1.mlp.experts") "," NVFP4_GROUP("Linear"))));
    static const megamoe_format formats[2] = {MEGAMOE_FORMAT_NVFP4, MEGAMOE_FORMAT_MXFP4};
    megamoe_weights *weights;
    for (int32_t layer = 0; layer < 2; layer++) {
        megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
        T_OK(megamoe_checkpoint_weights(checkpoint, layer, &weights));
        T_OK(megamoe_weights_describe(weights, &desc));
        T_EQ_INT(desc.format, formats[layer]);
        megamoe_weights_close(weights);
    }
    FAILS(megamoe_checkpoint_weights(checkpoint, 2, &weights), MEGAMOE_EUNSUPPORTED, "layer 2",
          "FP8");
    megamoe_checkpoint_close(checkpoint);
    built_free(&model);
}
