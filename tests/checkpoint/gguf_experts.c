/* SPDX-License-Identifier: Apache-2.0 */
/* Experts of GGUF files: values to the bit, scales, biases, geometry and refusals. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gguf_fixture.h"

static const sizes small = {.hidden = 128, .intermediate = 64, .experts = 3};

static const char *save(const gguf *file) {
    return gguf_save(file, "model.gguf");
}

/* A model with one layer. */
static gguf model_of(const char *architecture, const gguf_layer *layer) {
    gguf file = gguf_start();
    gguf_text(&file, "general.architecture", architecture);
    gguf_add_experts(&file, layer);
    return file;
}

static const gguf_tensor *find(gguf *file, int32_t layer, const char *stem, const char *part) {
    char name[96];
    snprintf(name, sizeof name, "blk.%d.ffn_%s_exps.%s", layer, stem, part);
    return gguf_find(file, name);
}

/* Every matrix of the layer against the file. */
static void check_layer(gguf *file, const gguf_layer *layer) {
    static const char *const stems[] = {"gate", "up", "down"};
    megamoe_checkpoint *checkpoint = opened(save(file));
    megamoe_weights *weights;
    T_OK(megamoe_checkpoint_weights(checkpoint, layer->layer, &weights));
    megamoe_checkpoint_close(checkpoint); /* the weights keep what they need */
    const sizes s = layer->s;
    double *values = malloc((size_t)s.hidden * (size_t)s.intermediate * sizeof *values);
    for (int32_t e = 0; e < s.experts; e++)
        for (int p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++) {
            const bool down = p == MEGAMOE_DOWN;
            const int64_t rows = down ? s.hidden : s.intermediate;
            const int64_t columns = down ? s.intermediate : s.hidden;
            const char *stem = layer->merged && !down ? "gate_up" : stems[p];
            const int64_t turns = layer->merged && !down ? 2 : 1;
            const int64_t first = layer->merged && p == MEGAMOE_UP ? rows : 0;
            const gguf_tensor *weight = find(file, layer->layer, stem, "weight");
            const double scale =
                layer->scale ? (double)gguf_number(find(file, layer->layer, stem, "scale"), e) : 1;
            T_OK(megamoe_weights_unpack(weights, e, (megamoe_projection)p, values));
            megamoe_matrix matrix;
            T_OK(megamoe_weights_matrix(weights, e, (megamoe_projection)p, &matrix));
            T_EQ_F64((double)matrix.global_scale, scale);
            T_CHECK((matrix.bias != NULL) == layer->bias);
            for (int64_t row = 0; row < rows; row++) {
                for (int64_t k = 0; k < columns; k++)
                    T_REQUIRE(T_EQ_F64(values[row * columns + k],
                                       gguf_element(weight, e, first + row, k) * scale));
                if (!layer->bias)
                    continue;
                T_EQ_INT(matrix.bias_dtype, MEGAMOE_DTYPE_F32);
                const gguf_tensor *bias = find(file, layer->layer, stem, "bias");
                T_REQUIRE(T_EQ_MEM((const uint8_t *)matrix.bias + (size_t)row * matrix.bias_stride,
                                   bias->data + 4 * (e * rows * turns + first + row), 4));
            }
        }
    free(values);
    megamoe_weights_close(weights);
}

T_CASE(every_form_of_a_layer_is_read_exactly) {
    for (int form = 0; form < 16; form++) {
        const bool nvfp4 = form & 1;
        const gguf_layer layer = {.layer = 5,
                                  .type = nvfp4 ? GGUF_NVFP4 : GGUF_MXFP4,
                                  .s = small,
                                  .merged = form & 2,
                                  .bias = form & 4,
                                  .scale = form & 8};
        if (layer.scale && !nvfp4)
            continue;
        gguf file = model_of("qwen3moe", &layer);
        check_layer(&file, &layer);
        gguf_free(&file);
    }
}

T_CASE(mxfp4_blocks_hold_their_halves_in_low_and_high_nibbles) {
    static const uint8_t halves[16] = {0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77,
                                       0x88, 0x99, 0xAA, 0xBB, 0xCC, 0xDD, 0xEE, 0xFF};
    static const uint8_t linear[16] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE,
                                       0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE};
    static const double values[16] = {0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6};
    const gguf_layer layer = {.type = GGUF_MXFP4,
                              .s = {.hidden = 32, .intermediate = 32, .experts = 1}};
    gguf file = model_of("qwen3moe", &layer);
    gguf_tensor *gate = gguf_find(&file, "blk.0.ffn_gate_exps.weight");
    gate->data[0] = 127;
    memcpy(gate->data + 1, halves, sizeof halves);
    megamoe_checkpoint *checkpoint = opened(save(&file));
    megamoe_weights *weights;
    T_OK(megamoe_checkpoint_weights(checkpoint, 0, &weights));
    megamoe_matrix matrix;
    T_OK(megamoe_weights_matrix(weights, 0, MEGAMOE_GATE, &matrix));
    T_EQ_MEM(matrix.codes, linear, sizeof linear);
    T_EQ_INT(*(const uint8_t *)matrix.scales, 127);
    double unpacked[32 * 32];
    T_OK(megamoe_weights_unpack(weights, 0, MEGAMOE_GATE, unpacked));
    for (int k = 0; k < 32; k++)
        T_EQ_F64(unpacked[k], values[k % 16]);
    megamoe_weights_close(weights);
    megamoe_checkpoint_close(checkpoint);
    gguf_free(&file);
}

/* 0 and 1 are FP32 subnormals; what ggml halves is not lost in them. */
T_CASE(e8m0_scales_are_exact_at_both_ends) {
    static const int scales[] = {0, 1, 2, 120, 127, 253, 254};
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        const gguf_layer layer = {.type = GGUF_MXFP4,
                                  .s = {.hidden = 32, .intermediate = 32, .experts = 1}};
        gguf file = model_of("qwen3moe", &layer);
        gguf_tensor *gate = gguf_find(&file, "blk.0.ffn_gate_exps.weight");
        gate->data[0] = (uint8_t)scales[i];
        gate->data[1] = 0x91; /* elements 0 and 16 */
        megamoe_checkpoint *checkpoint = opened(save(&file));
        megamoe_weights *weights;
        T_OK(megamoe_checkpoint_weights(checkpoint, 0, &weights));
        double unpacked[32 * 32];
        T_OK(megamoe_weights_unpack(weights, 0, MEGAMOE_GATE, unpacked));
        T_EQ_F64(unpacked[0], ldexp(0.5, scales[i] - 127));
        T_EQ_F64(unpacked[16], -ldexp(0.5, scales[i] - 127));
        megamoe_weights_close(weights);
        megamoe_checkpoint_close(checkpoint);
        gguf_free(&file);
    }
}

T_CASE(nvfp4_blocks_hold_four_scales_and_four_groups) {
    const gguf_layer layer = {.type = GGUF_NVFP4,
                              .s = {.hidden = 64, .intermediate = 64, .experts = 1}};
    gguf file = model_of("qwen3moe", &layer);
    gguf_tensor *gate = gguf_find(&file, "blk.0.ffn_gate_exps.weight");
    /* 1, 2^-9, 448, 0; in group g the low nibbles are g + 1, the high ones g + 9. */
    memcpy(gate->data, "\x38\x01\x7E\x00", 4);
    for (int g = 0; g < 4; g++)
        memset(gate->data + 4 + 8 * g, (g + 9) << 4 | (g + 1), 8);
    megamoe_checkpoint *checkpoint = opened(save(&file));
    megamoe_weights *weights;
    T_OK(megamoe_checkpoint_weights(checkpoint, 0, &weights));
    megamoe_matrix matrix;
    T_OK(megamoe_weights_matrix(weights, 0, MEGAMOE_GATE, &matrix));
    T_EQ_MEM(matrix.scales, "\x38\x01\x7E\x00", 4);
    T_EQ_F64((double)matrix.global_scale, 1);
    double unpacked[64 * 64];
    T_OK(megamoe_weights_unpack(weights, 0, MEGAMOE_GATE, unpacked));
    static const double groups[4] = {.5, 0x1p-9, 1.5 * 448, 0};
    for (int k = 0; k < 64; k++)
        T_EQ_F64(unpacked[k], (k % 16 < 8 ? 1 : -1) * groups[k / 16]);
    megamoe_weights_close(weights);
    megamoe_checkpoint_close(checkpoint);
    gguf_free(&file);
}

/* Of each projection its own, once. */
T_CASE(scales_of_experts_multiply_once) {
    const gguf_layer layer = {.type = GGUF_NVFP4, .s = small, .scale = true};
    gguf file = model_of("qwen3moe", &layer);
    gguf_remove(&file, "blk.0.ffn_up_exps.scale");
    static const float gate[] = {1, 0.5f, 1}, down[] = {1, 0.25f, 1};
    memcpy(gguf_find(&file, "blk.0.ffn_gate_exps.scale")->data, gate, sizeof gate);
    memcpy(gguf_find(&file, "blk.0.ffn_down_exps.scale")->data, down, sizeof down);
    /* What the activations were calibrated to is not used. */
    gguf_add(&file, GGUF_F32, SHAPE(3), "blk.0.ffn_down_exps.input_scale");
    megamoe_checkpoint *checkpoint = opened(save(&file));
    megamoe_weights *weights;
    T_OK(megamoe_checkpoint_weights(checkpoint, 0, &weights));
    static const double must[3] = {0.5, 1, 0.25};
    double values[128 * 64];
    static const char *const names[] = {"blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight",
                                        "blk.0.ffn_down_exps.weight"};
    for (int p = 0; p < 3; p++) {
        megamoe_matrix matrix;
        T_OK(megamoe_weights_matrix(weights, 1, (megamoe_projection)p, &matrix));
        T_EQ_F64((double)matrix.global_scale, must[p]);
        T_OK(megamoe_weights_unpack(weights, 1, (megamoe_projection)p, values));
        T_EQ_F64(values[7], gguf_element(gguf_find(&file, names[p]), 1, 0, 7) * must[p]);
    }
    megamoe_weights_close(weights);
    megamoe_checkpoint_close(checkpoint);

    static const float bad[] = {0, -1, NAN, INFINITY};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        memcpy(gguf_find(&file, "blk.0.ffn_down_exps.scale")->data + 8, &bad[i], sizeof *bad);
        FAILS(try_weights(save(&file), 0), MEGAMOE_EFORMAT, "model.gguf",
              "blk.0.ffn_down_exps.scale", "expert 2", "positive and finite");
    }
    gguf_free(&file);
}

T_CASE(scales_that_are_no_numbers_are_refused) {
    static const struct {
        uint32_t type;
        uint8_t scale;
        const char *part;
    } scales[] = {{GGUF_MXFP4, 255, "0xff is NaN"},
                  {GGUF_NVFP4, 0x7F, "0x7f is NaN"},
                  {GGUF_NVFP4, 0xFF, "0xff is NaN"},
                  {GGUF_NVFP4, 0x80, "0x80 is -0"},
                  {GGUF_NVFP4, 0xB8, "0xb8 is negative"}};
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        const gguf_layer layer = {.type = scales[i].type, .s = small};
        gguf file = model_of("qwen3moe", &layer);
        gguf_tensor *up = gguf_find(&file, "blk.0.ffn_up_exps.weight");
        up->data[2 * up->bytes / 3] = scales[i].scale; /* the first block of expert 2 */
        FAILS(try_weights(save(&file), 0), MEGAMOE_EFORMAT, "model.gguf",
              "blk.0.ffn_up_exps.weight", "expert 2", "row 0, block 0", scales[i].part);
        gguf_free(&file);
    }
}

static megamoe_layer_desc described(gguf *file, int32_t layer) {
    megamoe_checkpoint *checkpoint = opened(save(file));
    megamoe_weights *weights;
    T_OK(megamoe_checkpoint_weights(checkpoint, layer, &weights));
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    T_OK(megamoe_weights_describe(weights, &desc));
    megamoe_weights_close(weights);
    megamoe_checkpoint_close(checkpoint);
    return desc;
}

T_CASE(a_layer_is_described_by_tensors_and_metadata) {
    const gguf_layer layer = {.layer = 2, .type = GGUF_MXFP4, .s = small, .bias = true};
    gguf file = model_of("gpt-oss", &layer);
    gguf_u32(&file, "gpt-oss.block_count", 3);
    gguf_u32(&file, "gpt-oss.embedding_length", 128);
    gguf_u32(&file, "gpt-oss.expert_feed_forward_length", 64);
    gguf_u32(&file, "gpt-oss.expert_count", 3);
    gguf_u32(&file, "gpt-oss.expert_used_count", 2);
    const megamoe_layer_desc desc = described(&file, 2);
    T_EQ_INT(desc.layer, 2);
    T_EQ_INT(desc.hidden, 128);
    T_EQ_INT(desc.intermediate, 64);
    T_EQ_INT(desc.experts, 3);
    T_EQ_INT(desc.topk, 2);
    T_EQ_INT(desc.format, MEGAMOE_FORMAT_MXFP4);
    T_CHECK(desc.has_bias);
    T_EQ_F64((double)desc.activation.alpha, (double)1.702f);
    T_EQ_F64((double)desc.activation.offset, 1);
    T_EQ_F64((double)desc.activation.limit, 7);
    megamoe_checkpoint *checkpoint = opened(save(&file));
    megamoe_checkpoint_info info = MEGAMOE_INIT(megamoe_checkpoint_info);
    T_OK(megamoe_checkpoint_describe(checkpoint, &info));
    T_EQ_STR(info.family, "gguf");
    T_EQ_STR(info.model_type, "gpt-oss");
    T_EQ_INT((int64_t)info.files, 1);
    T_EQ_INT((int64_t)info.tensors, 6);
    T_EQ_INT(info.layers, 1);
    megamoe_checkpoint_close(checkpoint);
    gguf_free(&file);
}

T_CASE(metadata_that_contradict_the_tensors_are_refused) {
    static const char *const keys[] = {"embedding_length", "expert_feed_forward_length",
                                       "expert_count", "block_count"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const gguf_layer layer = {.layer = 7, .type = GGUF_MXFP4, .s = small};
        gguf file = model_of("qwen3moe", &layer);
        char key[64];
        snprintf(key, sizeof key, "qwen3moe.%s", keys[i]);
        gguf_u32(&file, key, 7);
        if (i < 3)
            FAILS(try_weights(save(&file), 7), MEGAMOE_EFORMAT, "model.gguf", key, "7");
        else
            FAILS(try_open(save(&file)), MEGAMOE_EFORMAT, "model.gguf", key, "7");
        gguf_free(&file);
    }
    const gguf_layer layer = {.type = GGUF_MXFP4, .s = small};
    gguf file = model_of("qwen3moe", &layer);
    gguf_text(&file, "qwen3moe.expert_count", "3");
    T_OK(try_weights(save(&file), 0)); /* null, as all texts are */
    gguf_f32(&file, "qwen3moe.expert_used_count", 2);
    FAILS(try_weights(save(&file), 0), MEGAMOE_EFORMAT, "qwen3moe.expert_used_count",
          "must be an integer");
    gguf_free(&file);
}

T_CASE(lists_hold_a_number_for_each_layer) {
    static const float limits[] = {0, 10, 12.5f};
    for (int32_t index = 0; index < 4; index++) {
        const gguf_layer layer = {.layer = index, .type = GGUF_MXFP4, .s = small};
        gguf file = model_of("deepseek4", &layer);
        gguf_f32s(&file, "deepseek4.swiglu_clamp_exp", limits, 3);
        if (index < 3)
            T_EQ_F64((double)described(&file, index).activation.limit, (double)limits[index]);
        else
            FAILS(try_weights(save(&file), index), MEGAMOE_EFORMAT, "deepseek4.swiglu_clamp_exp",
                  "layer 3");
        gguf_free(&file);
    }
    const gguf_layer layer = {.type = GGUF_MXFP4, .s = small};
    gguf file = model_of("deepseek4", &layer);
    FAILS(try_weights(save(&file), 0), MEGAMOE_EFORMAT, "deepseek4.swiglu_clamp_exp");
    gguf_f32(&file, "deepseek4.swiglu_clamp_exp", 10);
    T_EQ_F64((double)described(&file, 0).activation.limit, 10);
    gguf_free(&file);
    /* How others would limit is not known. */
    file = model_of("glm4moe", &layer);
    gguf_f32(&file, "glm4moe.swiglu_clamp_exp", 10);
    FAILS(try_weights(save(&file), 0), MEGAMOE_EUNSUPPORTED, "glm4moe.swiglu_clamp_exp", "glm4moe");
    gguf_free(&file);
}

T_CASE(draft_blocks_are_no_layers) {
    const gguf_layer layer = {.layer = 4, .type = GGUF_MXFP4, .s = small};
    const gguf_layer draft = {.layer = 5, .type = GGUF_MXFP4, .s = small};
    gguf file = model_of("glm4moe", &layer);
    gguf_u32(&file, "glm4moe.block_count", 6);
    gguf_u32(&file, "glm4moe.nextn_predict_layers", 1);
    gguf_add_experts(&file, &draft);
    gguf_add(&file, GGUF_F32, SHAPE(2), "blk.5.nextn.eh_proj.weight");
    megamoe_checkpoint *checkpoint = opened(save(&file));
    T_EQ_INT(megamoe_checkpoint_layer(checkpoint, 0), 4);
    T_EQ_INT(megamoe_checkpoint_layer(checkpoint, 1), -1);
    megamoe_checkpoint_close(checkpoint);
    gguf_free(&file);
}

T_CASE(other_types_are_refused_by_name) {
    const sizes wide = {.hidden = 256, .intermediate = 256, .experts = 2};
    static const struct {
        uint32_t type;
        const char *name;
    } types[] = {{GGUF_Q8_0, "Q8_0"}, {GGUF_Q4_K, "Q4_K"}, {GGUF_BF16, "BF16"}, {GGUF_F32, "F32"}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        const gguf_layer layer = {.layer = 1, .type = types[i].type, .s = wide};
        gguf file = model_of("qwen3moe", &layer);
        FAILS(try_open(save(&file)), MEGAMOE_EUNSUPPORTED, "model.gguf",
              "blk.1.ffn_down_exps.weight", types[i].name, "MXFP4 and NVFP4");
        gguf_free(&file);
    }
    /* One projection of another type. */
    const gguf_layer layer = {.layer = 1, .type = GGUF_MXFP4, .s = wide};
    gguf file = model_of("qwen3moe", &layer);
    gguf_remove(&file, "blk.1.ffn_down_exps.weight");
    gguf_add(&file, GGUF_Q4_K, SHAPE(2, 256, 256), "blk.1.ffn_down_exps.weight");
    FAILS(try_weights(save(&file), 1), MEGAMOE_EUNSUPPORTED, "blk.1.ffn_down_exps.weight", "Q4_K");
    gguf_remove(&file, "blk.1.ffn_down_exps.weight");
    gguf_add(&file, GGUF_NVFP4, SHAPE(2, 256, 256), "blk.1.ffn_down_exps.weight");
    FAILS(try_weights(save(&file), 1), MEGAMOE_EUNSUPPORTED, "blk.1.ffn_down_exps.weight", "NVFP4",
          "MXFP4");
    gguf_free(&file);
}

T_CASE(unknown_architectures_are_refused) {
    const gguf_layer layer = {.type = GGUF_MXFP4, .s = small};
    gguf file = model_of("grok", &layer);
    FAILS(try_open(save(&file)), MEGAMOE_EUNSUPPORTED, "general.architecture is \"grok\"",
          "gpt-oss, deepseek4");
    gguf_free(&file);
    file = gguf_start();
    gguf_add_experts(&file, &layer);
    FAILS(try_open(save(&file)), MEGAMOE_EFORMAT, "general.architecture is missing");
    gguf_free(&file);
}

T_CASE(incomplete_and_ambiguous_layers_are_refused) {
    static const char *const names[] = {"blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight",
                                        "blk.0.ffn_down_exps.weight", "blk.0.ffn_gate_exps.bias",
                                        "blk.0.ffn_up_exps.bias",     "blk.0.ffn_down_exps.bias"};
    const gguf_layer layer = {.type = GGUF_MXFP4, .s = small, .bias = true};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        gguf file = model_of("gpt-oss", &layer);
        gguf_remove(&file, names[i]);
        FAILS(try_weights(save(&file), 0), MEGAMOE_EFORMAT, "model.gguf", names[i], "missing");
        gguf_free(&file);
    }
    static const struct {
        uint32_t type;
        int64_t shape[4];
        const char *name, *part;
        megamoe_status status;
    } extras[] = {
        {GGUF_MXFP4,
         {3, 128, 128, -1},
         "blk.0.ffn_gate_up_exps.weight",
         "in one tensor and in two",
         MEGAMOE_EFORMAT},
        {GGUF_F32, {3, -1}, "blk.0.ffn_up_exps.scale", "there must be none", MEGAMOE_EUNSUPPORTED},
        {GGUF_F32, {3, -1}, "blk.0.ffn_up_exps.zero", "unknown tensor", MEGAMOE_EUNSUPPORTED},
        {GGUF_F32, {3, -1}, "blk.0.ffn_up_exps.weight_2", "unknown tensor", MEGAMOE_EUNSUPPORTED},
    };
    for (size_t i = 0; i < sizeof extras / sizeof *extras; i++) {
        gguf file = model_of("gpt-oss", &layer);
        gguf_add(&file, extras[i].type, extras[i].shape, "%s", extras[i].name);
        FAILS(try_weights(save(&file), 0), extras[i].status, extras[i].part);
        gguf_free(&file);
    }
    /* Beside experts, but none. */
    gguf file = model_of("gpt-oss", &layer);
    gguf_add(&file, GGUF_BF16, SHAPE(64, 128), "blk.0.ffn_gate_shexp.weight");
    gguf_add(&file, GGUF_F32, SHAPE(128), "blk.0.ffn_norm.weight");
    T_OK(try_weights(save(&file), 0));
    gguf_free(&file);
}

T_CASE(shapes_must_fit_each_other) {
    static const struct {
        uint32_t type;
        int64_t shape[5];
        const char *name, *part;
    } shapes[] = {
        {GGUF_NVFP4, {3, 64, 64, -1}, "blk.0.ffn_up_exps.weight", "must be [3, 64, 128]"},
        {GGUF_NVFP4, {2, 64, 128, -1}, "blk.0.ffn_up_exps.weight", "must be [3, 64, 128]"},
        {GGUF_NVFP4, {3, 64, 128, -1}, "blk.0.ffn_down_exps.weight", "must be [3, 128, 64]"},
        {GGUF_NVFP4, {192, 128, -1}, "blk.0.ffn_gate_exps.weight", "must be [experts, rows, in]"},
        {GGUF_NVFP4, {0, 64, 128, -1}, "blk.0.ffn_gate_exps.weight", "0 experts"},
        {GGUF_NVFP4, {3, 0, 128, -1}, "blk.0.ffn_gate_exps.weight", "intermediate 0"},
        {GGUF_F32, {3, 63, -1}, "blk.0.ffn_up_exps.bias", "must be [3, 64]"},
        {GGUF_BF16, {3, 64, -1}, "blk.0.ffn_up_exps.bias", "must be F32"},
        {GGUF_F32, {1, -1}, "blk.0.ffn_up_exps.scale", "must be [3]"},
        {GGUF_BF16, {3, -1}, "blk.0.ffn_up_exps.scale", "must be F32"},
    };
    const gguf_layer layer = {.type = GGUF_NVFP4, .s = small, .bias = true, .scale = true};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        gguf file = model_of("gpt-oss", &layer);
        gguf_remove(&file, shapes[i].name);
        gguf_add(&file, shapes[i].type, shapes[i].shape, "%s", shapes[i].name);
        FAILS(try_weights(save(&file), 0), MEGAMOE_EFORMAT, shapes[i].name, shapes[i].part);
        gguf_free(&file);
    }
    const gguf_layer merged = {.type = GGUF_NVFP4, .s = small, .merged = true};
    gguf file = model_of("gpt-oss", &merged);
    gguf_remove(&file, "blk.0.ffn_gate_up_exps.weight");
    gguf_add(&file, GGUF_NVFP4, SHAPE(3, 127, 128), "blk.0.ffn_gate_up_exps.weight");
    FAILS(try_weights(save(&file), 0), MEGAMOE_EFORMAT, "blk.0.ffn_gate_up_exps.weight",
          "an even number of rows");
    gguf_free(&file);
}
