/* SPDX-License-Identifier: Apache-2.0 */
/* The DeepSeek-V4 family: experts, names, config. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fixture.h"

static const sizes odd = {.hidden = 96, .intermediate = 160, .experts = 3};

static built v4(int32_t layer) {
    built model = built_start();
    add_mxfp4(&model, "layers.%d.ffn.", layer, numbered, "scale", odd);
    return model;
}

static void check_values(const built *model, const char *block, const char *const *projections,
                         const char *scale, const megamoe_weights *weights) {
    double *values = malloc(sizeof *values * (size_t)odd.hidden * (size_t)odd.intermediate);
    for (int32_t e = 0; e < odd.experts; e++)
        for (int p = 0; p < 3; p++) {
            char name[160];
            snprintf(name, sizeof name, "%sexperts.%d.%s.weight", block, e, projections[p]);
            const built_tensor *codes = built_find(model, name);
            snprintf(name, sizeof name, "%sexperts.%d.%s.%s", block, e, projections[p], scale);
            const built_tensor *scales = built_find(model, name);
            T_OK(megamoe_weights_unpack(weights, e, (megamoe_projection)p, values));
            const int64_t columns = p == 2 ? odd.intermediate : odd.hidden;
            for (int64_t row = 0; row < codes->shape[0]; row++)
                for (int64_t k = 0; k < columns; k++)
                    if (!T_EQ_F64(values[row * columns + k], element(codes, scales, 1, row, k)))
                        goto end;
        }
end:
    free(values);
}

T_CASE(values_and_geometry_come_from_the_tensors_alone) {
    built model = v4(7);
    megamoe_checkpoint *checkpoint = opened(save_model(&model, NULL));
    megamoe_weights *weights = NULL;
    T_EQ_INT(megamoe_checkpoint_layer(checkpoint, 0), 7);
    T_OK(megamoe_checkpoint_weights(checkpoint, 7, &weights));
    /* The weights keep the file open by themselves. */
    megamoe_checkpoint_close(checkpoint);
    unlink(t_path("model/model.safetensors"));
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    T_OK(megamoe_weights_describe(weights, &desc));
    T_EQ_INT(desc.layer, 7);
    T_EQ_INT(desc.hidden, odd.hidden);
    T_EQ_INT(desc.intermediate, odd.intermediate);
    T_EQ_INT(desc.experts, odd.experts);
    T_EQ_INT(desc.topk, 0);
    T_EQ_INT(desc.format, MEGAMOE_FORMAT_MXFP4);
    T_EQ_F64(desc.activation.limit, 10);
    T_EQ_F64(desc.activation.offset, 0);
    T_CHECK(!desc.has_bias);
    check_values(&model, "layers.7.ffn.", numbered, "scale", weights);
    megamoe_weights_close(weights);
    built_free(&model);
}

static void *take_and_close(void *argument) {
    const megamoe_checkpoint *checkpoint = argument;
    for (int i = 0; i < 20; i++) {
        megamoe_weights *weights = NULL;
        if (!T_STATUS(megamoe_checkpoint_weights(checkpoint, 0, &weights), MEGAMOE_OK))
            break;
        megamoe_weights_close(weights);
    }
    return NULL;
}

T_CASE(threads_share_a_checkpoint) {
    built model = v4(0);
    megamoe_checkpoint *checkpoint = opened(save_model(&model, NULL));
    built_free(&model);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        T_REQUIRE(pthread_create(&threads[i], NULL, take_and_close, checkpoint) == 0);
    for (int i = 0; i < 4; i++)
        T_REQUIRE(pthread_join(threads[i], NULL) == 0);
    megamoe_checkpoint_close(checkpoint);
}

T_CASE(real_bytes_decode_to_the_published_values) {
    built model = built_start();
    add_mxfp4(&model, "layers.%d.ffn.", 0, numbered, "scale",
              (sizes){.hidden = 32, .intermediate = 32, .experts = 1});
    static const uint8_t row[8] = {0xa0, 0xa8, 0xec, 0x4a, 0xad, 0xaf, 0x42, 0xaa};
    static const double expected[16] = {
        0,         -.0078125, 0,        -.0078125, -.015625, -.03125, -.0078125, .015625,
        -.0234375, -.0078125, -.046875, -.0078125, .0078125, .015625, -.0078125, -.0078125};
    memcpy(built_find(&model, "layers.0.ffn.experts.0.w1.weight")->data, row, sizeof row);
    built_find(&model, "layers.0.ffn.experts.0.w1.scale")->data[0] = 0x78;
    megamoe_checkpoint *checkpoint = opened(save_model(&model, NULL));
    megamoe_weights *weights;
    T_OK(megamoe_checkpoint_weights(checkpoint, 0, &weights));
    double values[32 * 32];
    T_OK(megamoe_weights_unpack(weights, 0, MEGAMOE_GATE, values));
    for (int k = 0; k < 16; k++)
        T_EQ_F64(values[k], expected[k]);
    megamoe_weights_close(weights);
    megamoe_checkpoint_close(checkpoint);
    built_free(&model);
}

T_CASE(every_scale_byte_is_a_power_of_two) {
    built model = built_start();
    add_mxfp4(&model, "layers.%d.ffn.", 0, numbered, "scale",
              (sizes){.hidden = 32, .intermediate = 256, .experts = 1});
    built_tensor *codes = built_find(&model, "layers.0.ffn.experts.0.w1.weight");
    built_tensor *scales = built_find(&model, "layers.0.ffn.experts.0.w1.scale");
    memset(codes->data, 0x22, codes->bytes); /* 1, 1 */
    for (int row = 0; row < 256; row++)
        scales->data[row] = (uint8_t)(row % 255);
    megamoe_checkpoint *checkpoint = opened(save_model(&model, NULL));
    megamoe_weights *weights;
    T_OK(megamoe_checkpoint_weights(checkpoint, 0, &weights));
    static double values[256 * 32];
    T_OK(megamoe_weights_unpack(weights, 0, MEGAMOE_GATE, values));
    for (size_t row = 0; row < 256; row++)
        T_EQ_F64(values[row * 32 + 31], ldexp(1, (int)(row % 255) - 127));
    megamoe_weights_close(weights);
    megamoe_checkpoint_close(checkpoint);
    built_free(&model);
}

T_CASE(repacks_with_other_names_are_read) {
    static const char *const formats[] = {"model.layers.%d.mlp.", "layers.%d.mlp.",
                                          "model.layers.%d.ffn.",
                                          "model.language_model.layers.%d.mlp."};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        const char *const *projections = i % 2 ? named : numbered;
        built model = built_start();
        add_mxfp4(&model, formats[i], 1, projections, "weight_scale_inv", odd);
        megamoe_checkpoint *checkpoint =
            opened(save_model(&model, "{\"model_type\":\"deepseek_v4\",\"expert_dtype\":\"fp4\"}"));
        megamoe_weights *weights = NULL;
        if (T_STATUS(megamoe_checkpoint_weights(checkpoint, 1, &weights), MEGAMOE_OK)) {
            char block[64];
            snprintf(block, sizeof block, formats[i], 1);
            check_values(&model, block, projections, "weight_scale_inv", weights);
        }
        megamoe_weights_close(weights);
        megamoe_checkpoint_close(checkpoint);
        built_free(&model);
    }
}

T_CASE(configs_of_all_releases_are_taken) {
    static const char *const configs[] = {
        /* the first release says nothing of expert_dtype */
        "{\"model_type\":\"deepseek_v4\",\"hidden_size\":96,\"moe_intermediate_size\":160,"
        "\"n_routed_experts\":3,\"num_experts_per_tok\":2,\"swiglu_limit\":10.0,"
        "\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]}}",
        "{\"model_type\":\"deepseek_v4\",\"expert_dtype\":\"fp4\",\"hidden_size\":96,"
        "\"moe_intermediate_size\":160,\"n_routed_experts\":3,\"num_experts_per_tok\":2,"
        "\"swiglu_limit\":10}",
        /* V4.1: geometry in text_config, expert_dtype in quantization_config */
        "{\"model_type\":\"deepseek_v41\",\"hidden_size\":1,\"text_config\":{"
        "\"model_type\":\"deepseek_v41_text\",\"hidden_size\":96,\"moe_intermediate_size\":160,"
        "\"n_routed_experts\":3,\"num_experts_per_tok\":2,\"swiglu_limit\":null},"
        "\"quantization_config\":{\"quant_method\":\"fp8\",\"expert_dtype\":\"fp4\"}}",
        "{\"model_type\":\"deepseek_v41\",\"text_config\":{\"hidden_size\":96,"
        "\"num_experts_per_tok\":2,\"quantization_config\":{\"expert_dtype\":\"fp4\"}}}"};
    built model = v4(0);
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        megamoe_checkpoint *checkpoint = opened(save_model(&model, configs[i]));
        megamoe_weights *weights;
        T_OK(megamoe_checkpoint_weights(checkpoint, 0, &weights));
        megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
        T_OK(megamoe_weights_describe(weights, &desc));
        T_EQ_INT(desc.topk, 2);
        T_EQ_F64(desc.activation.limit, 10);
        megamoe_checkpoint_info info = MEGAMOE_INIT(megamoe_checkpoint_info);
        T_OK(megamoe_checkpoint_describe(checkpoint, &info));
        T_EQ_STR(info.model_type, i < 2 ? "deepseek_v4" : "deepseek_v41");
        megamoe_weights_close(weights);
        megamoe_checkpoint_close(checkpoint);
    }
    built_free(&model);
}

T_CASE(a_config_that_contradicts_the_tensors_is_refused) {
    static const struct {
        const char *config;
        const char *parts[3];
    } contradictions[] = {
        {"{\"hidden_size\":128}", {"w1.weight", "hidden_size 96", "128"}},
        {"{\"moe_intermediate_size\":96}", {"w1.weight", "moe_intermediate_size 160", "96"}},
        {"{\"n_routed_experts\":2}", {"experts up to 2", "n_routed_experts", "2"}},
        {"{\"num_experts\":2}", {"experts up to 2", "num_experts", "2"}},
        {"{\"num_local_experts\":4}", {"experts.3.w1.weight", "missing"}},
        {"{\"num_experts_per_tok\":4}", {"top-k 4", "3 experts"}},
        {"{\"hidden_size\":\"96\"}", {"config.json", "hidden_size", "integer"}},
        {"{\"hidden_size\":-96}", {"config.json", "hidden_size", "-96"}},
        {"{\"hidden_size\":96.0}", {"config.json", "hidden_size", "integer"}},
        {"{\"swiglu_limit\":-1}", {"limit -1"}},
        {"{\"swiglu_limit\":1e39}", {"config.json", "swiglu_limit"}},
        {"{\"swiglu_limit\":true}", {"config.json", "swiglu_limit", "number"}},
    };
    built model = v4(0);
    for (size_t i = 0; i < sizeof contradictions / sizeof *contradictions; i++) {
        const char *path = save_model(&model, contradictions[i].config);
        T_STATUS(try_weights(path, 0), MEGAMOE_EFORMAT);
        for (int p = 0; p < 3 && contradictions[i].parts[p]; p++)
            T_CONTAINS(megamoe_last_error(), contradictions[i].parts[p]);
    }
    FAILS(try_weights(save_model(&model, "{\"hidden_act\":\"gelu\"}"), 0), MEGAMOE_EUNSUPPORTED,
          "gelu");
    FAILS(try_weights(save_model(&model, "{\"swiglu_alpha\":1.702}"), 0), MEGAMOE_EUNSUPPORTED,
          "1.702");

    FAILS(try_open(save_model(&model, "{\"expert_dtype\":\"fp8\"}")), MEGAMOE_EFORMAT, "MXFP4",
          "expert_dtype", "\"fp8\"");
    FAILS(try_open(save_model(&model, "{\"quantization_config\":{\"expert_dtype\":\"fp8\"}}")),
          MEGAMOE_EFORMAT, "MXFP4", "\"fp8\"");
    FAILS(try_open(save_model(&model, "{\"quantization_config\":{\"moe_quant_algo\":\"NVFP4\"}}")),
          MEGAMOE_EFORMAT, "MXFP4", "\"NVFP4\"");
    FAILS(try_open(save_model(&model, "{")), MEGAMOE_EFORMAT, "config.json", "line 1");
    FAILS(try_open(save_model(&model, "[1]")), MEGAMOE_EFORMAT, "config.json", "object");
    FAILS(try_open(save_model(&model, "{\"a\":1,\"a\":1}")), MEGAMOE_EFORMAT, "config.json",
          "duplicate");
    built_free(&model);
}

T_CASE(the_router_counts_experts_where_no_config_does) {
    built model = v4(0);
    built_add(&model, "BF16", SHAPE(4, odd.hidden), "layers.0.ffn.gate.weight");
    FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, "experts.3.w1.weight",
          "missing");
    built_find(&model, "layers.0.ffn.gate.weight")->shape[0] = 2;
    built_find(&model, "layers.0.ffn.gate.weight")->bytes /= 2;
    FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, "3 experts", "gate.weight",
          "2 rows");
    built_free(&model);
}

T_CASE(every_missing_tensor_is_named) {
    for (int32_t expert = 0; expert < odd.experts; expert++)
        for (int p = 0; p < 3; p++)
            for (int part = 0; part < 2; part++) {
                built model = v4(0);
                char name[96];
                snprintf(name, sizeof name, "layers.0.ffn.experts.%d.%s.%s", expert, numbered[p],
                         part ? "scale" : "weight");
                built_remove(&model, name);
                FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, name, "missing");
                built_free(&model);
            }
}

T_CASE(a_wild_expert_number_allocates_nothing) {
    built model = v4(0);
    FAILS(try_weights(save_model(&model, "{\"n_routed_experts\":4096}"), 0), MEGAMOE_EFORMAT,
          "experts.3.w1.weight", "missing");
    built_rename(&model, "layers.0.ffn.experts.2.w1.weight",
                 "layers.0.ffn.experts.2147483646.w1.weight");
    FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, "2147483647 experts");
    built_rename(&model, "layers.0.ffn.experts.2147483646.w1.weight",
                 "layers.0.ffn.experts.2147483647.w1.weight");
    T_STATUS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT);
    built_rename(&model, "layers.0.ffn.experts.2147483647.w1.weight",
                 "layers.0.ffn.experts.2147483648.w1.weight");
    FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EUNSUPPORTED, "unknown tensor",
          "2147483648");
    built_rename(&model, "layers.0.ffn.experts.2147483648.w1.weight",
                 "layers.0.ffn.experts.02.w1.weight");
    FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EUNSUPPORTED, "unknown tensor", ".02.");
    built_free(&model);
}

T_CASE(wrong_types_and_shapes_are_named) {
    static const struct {
        const char *name, *dtype;
    } types[] = {{"layers.0.ffn.experts.1.w3.weight", "F8_E4M3"},
                 {"layers.0.ffn.experts.1.w3.weight", "U8"},
                 {"layers.0.ffn.experts.0.w1.weight", "U8"},
                 {"layers.0.ffn.experts.0.w1.scale", "U8"},
                 {"layers.0.ffn.experts.2.w2.scale", "F8_E4M3"}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        built model = v4(0);
        strcpy(built_find(&model, types[i].name)->dtype, types[i].dtype);
        FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, types[i].name,
              types[i].dtype, "must be");
        built_free(&model);
    }
    static const struct {
        const char *name;
        int64_t rows, columns;
        const char *must;
    } shapes[] = {{"layers.0.ffn.experts.1.w1.weight", 48, 160, "[160, 48]"},
                  {"layers.0.ffn.experts.1.w2.weight", 160, 48, "[96, 80]"},
                  {"layers.0.ffn.experts.1.w2.scale", 96, 10, "[96, 5]"},
                  {"layers.0.ffn.experts.0.w1.scale", 80, 3, "[160, 3]"}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        built model = v4(0);
        char dtype[16];
        strcpy(dtype, built_find(&model, shapes[i].name)->dtype);
        built_remove(&model, shapes[i].name);
        built_add(&model, dtype, SHAPE(shapes[i].rows, shapes[i].columns), "%s", shapes[i].name);
        FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, shapes[i].name,
              "its shape is", shapes[i].must);
        built_free(&model);
    }
}

T_CASE(sizes_without_bytes_do_not_wrap) {
    built model = v4(0);
    const char *name = "layers.0.ffn.experts.0.w1.weight";
    built_remove(&model, name);
    built_add(&model, "I8", SHAPE(0, 1LL << 59), "%s", name);
    FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, name, "larger than any");
    built_remove(&model, name);
    built_add(&model, "I8", SHAPE(0, 48), "%s", name);
    FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, name, "intermediate 0");
    built_remove(&model, name);
    built_add(&model, "I8", SHAPE(160, 40), "%s", name);
    FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, name, "hidden 80", "32");
    built_free(&model);
}

T_CASE(a_nan_scale_is_named) {
    built model = v4(0);
    const char *name = "layers.0.ffn.experts.2.w3.scale";
    built_find(&model, name)->data[17] = 255;
    FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, "model.safetensors", name,
          "NaN");
    built_find(&model, name)->data[17] = 254;
    built_find(&model, name)->data[18] = 0;
    T_OK(try_weights(save_model(&model, NULL), 0));
    built_free(&model);
}

T_CASE(unknown_tensors_beside_an_expert_are_refused) {
    static const char *const strangers[] = {
        "layers.0.ffn.experts.1.w1.bias", "layers.0.ffn.experts.1.w1.weight_scale_2",
        "layers.0.ffn.experts.1.w4.weight", "layers.0.ffn.experts.1.weight",
        "layers.0.ffn.experts.gate_up_proj_bias"};
    for (size_t i = 0; i < sizeof strangers / sizeof *strangers; i++) {
        built model = v4(0);
        built_add(&model, "F32", SHAPE(1), "%s", strangers[i]);
        FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EUNSUPPORTED, strangers[i],
              "unknown tensor");
        built_free(&model);
    }
    built model = v4(0);
    built_add(&model, "I8", SHAPE(1), "layers.0.ffn.experts.1.gate_proj.weight");
    FAILS(try_weights(save_model(&model, NULL), 0), MEGAMOE_EFORMAT, "experts.1.gate_proj.weight",
          "another way");
    built_free(&model);
}

T_CASE(draft_blocks_and_dense_parts_are_no_layers) {
    built model = v4(1);
    add_mxfp4(&model, "mtp.%d.ffn.", 0, numbered, "scale", odd);
    add_mxfp4(&model, "model.mtp.layers.%d.mlp.", 0, numbered, "scale", odd);
    built_add(&model, "F8_E4M3", SHAPE(128, 128), "layers.1.ffn.shared_experts.w1.weight");
    built_add(&model, "F8_E8M0", SHAPE(1, 1), "layers.1.ffn.shared_experts.w1.scale");
    built_add(&model, "F8_E4M3", SHAPE(128, 128), "layers.0.ffn.w1.weight");
    megamoe_checkpoint *checkpoint = opened(save_model(&model, NULL));
    T_EQ_INT(megamoe_checkpoint_layer(checkpoint, 0), 1);
    T_EQ_INT(megamoe_checkpoint_layer(checkpoint, 1), -1);
    megamoe_checkpoint_close(checkpoint);
    T_OK(try_weights(t_path("model"), 1));
    built_free(&model);
}

T_CASE(layers_behind_the_last_are_drafts) {
    built model = v4(2);
    add_mxfp4(&model, "layers.%d.ffn.", 10, numbered, "scale", odd);
    add_mxfp4(&model, "layers.%d.ffn.", 9, numbered, "scale", odd);
    megamoe_checkpoint *checkpoint =
        opened(save_model(&model, "{\"num_hidden_layers\":10,\"num_nextn_predict_layers\":1}"));
    T_EQ_INT(megamoe_checkpoint_layer(checkpoint, 0), 2);
    T_EQ_INT(megamoe_checkpoint_layer(checkpoint, 1), 9);
    T_EQ_INT(megamoe_checkpoint_layer(checkpoint, 2), -1);
    megamoe_weights *weights;
    FAILS(megamoe_checkpoint_weights(checkpoint, 10, &weights), MEGAMOE_ENOTFOUND, "layer 10",
          "2..9");
    megamoe_checkpoint_close(checkpoint);
    FAILS(try_open(save_model(&model, "{\"num_hidden_layers\":9,\"num_nextn_predict_layers\":1}")),
          MEGAMOE_EFORMAT, "layer 10", "num_hidden_layers 9");
    FAILS(try_open(save_model(&model, "{\"num_hidden_layers\":1}")), MEGAMOE_EUNSUPPORTED,
          "no expert tensors");
    built_free(&model);
}

T_CASE(a_layer_under_two_names_is_refused) {
    built model = v4(2);
    add_mxfp4(&model, "model.layers.%d.mlp.", 2, numbered, "scale", odd);
    FAILS(try_open(save_model(&model, NULL)), MEGAMOE_EFORMAT, "layers.2.ffn",
          "model.layers.2.mlp");
    built_free(&model);
}

T_CASE(formats_that_are_not_run_are_named) {
    static const struct {
        const char *part, *dtype, *other_part, *other_dtype, *config, *says;
    } formats[] = {{"gate_proj.weight", "F16", "up_proj.weight", "F16", NULL, "FP16"},
                   {"gate_proj.weight_packed", "I32", "gate_proj.weight_scale", "BF16", NULL,
                    "compressed-tensors with integer codes"},
                   {"gate_proj.weight", "U8", "gate_proj.weight_scale", "U8", NULL, "U8 scales"}};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        built model = built_start();
        built_add(&model, formats[i].dtype, SHAPE(4, 4), "layers.3.mlp.experts.0.%s",
                  formats[i].part);
        built_add(&model, formats[i].other_dtype, SHAPE(4, 4), "layers.3.mlp.experts.0.%s",
                  formats[i].other_part);
        FAILS(try_open(save_model(&model, formats[i].config)), MEGAMOE_EUNSUPPORTED, "layer 3",
              formats[i].says);
        built_free(&model);
    }
    built model = built_start();
    built_add(&model, "BF16", SHAPE(2), "model.norm.weight");
    FAILS(try_open(save_model(&model, NULL)), MEGAMOE_EUNSUPPORTED, "no expert tensors");
    built_add(&model, "F8_E4M3", SHAPE(4, 4), "layers.3.ffn.experts.0.w1.weight");
    FAILS(try_open(save_model(&model, "{\"expert_dtype\":\"fp4\"}")), MEGAMOE_EFORMAT, "not FP4",
          "\"fp4\"");
    built_free(&model);
}
