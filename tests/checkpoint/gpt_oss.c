/* SPDX-License-Identifier: Apache-2.0 */
/* The gpt-oss family: both ways to name it, rows that alternate, biases, router and refusals. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "fixture.h"

static const sizes odd = {.hidden = 96, .intermediate = 64, .experts = 5};
enum { TOPK = 2 };

/* How the two ways name the tensors of layer 3. */
typedef struct names {
    const char *codes[2], *scales[2], *bias[2]; /* of gate and up, of down */
    const char *router_weight, *router_bias;
    const char *config;
} names;

static const names both[] = {
    {{"model.layers.3.mlp.experts.gate_up_proj_blocks",
      "model.layers.3.mlp.experts.down_proj_blocks"},
     {"model.layers.3.mlp.experts.gate_up_proj_scales",
      "model.layers.3.mlp.experts.down_proj_scales"},
     {"model.layers.3.mlp.experts.gate_up_proj_bias", "model.layers.3.mlp.experts.down_proj_bias"},
     "model.layers.3.mlp.router.weight",
     "model.layers.3.mlp.router.bias",
     "{\"model_type\":\"gpt_oss\",\"hidden_size\":96,\"intermediate_size\":64,"
     "\"num_local_experts\":5,\"num_experts_per_tok\":2,\"experts_per_token\":2,"
     "\"hidden_act\":\"silu\",\"swiglu_limit\":7.0,"
     "\"quantization_config\":{\"quant_method\":\"mxfp4\"}}"},
    {{"block.3.mlp.mlp1_weight.blocks", "block.3.mlp.mlp2_weight.blocks"},
     {"block.3.mlp.mlp1_weight.scales", "block.3.mlp.mlp2_weight.scales"},
     {"block.3.mlp.mlp1_bias", "block.3.mlp.mlp2_bias"},
     "block.3.mlp.gate.weight",
     "block.3.mlp.gate.bias",
     "{\"hidden_size\":96,\"intermediate_size\":64,\"num_experts\":5,\"experts_per_token\":2,"
     "\"swiglu_limit\":7.0}"},
};

/* Finite BF16 values of about 1. */
static void randomize_bf16(built *model, built_tensor *tensor) {
    for (uint64_t i = 0; i < tensor->bytes; i += 2) {
        tensor->data[i] = (uint8_t)t_below(&model->random, 256);
        tensor->data[i + 1] = (uint8_t)(0x3F | t_below(&model->random, 2) << 7);
    }
}

static built layer_of(const names *as) {
    built model = built_start();
    const int64_t e = odd.experts;
    for (int down = 0; down < 2; down++) {
        const int64_t rows = down ? odd.hidden : 2 * odd.intermediate;
        const int64_t blocks = (down ? odd.intermediate : odd.hidden) / 32;
        randomize(&model,
                  built_add(&model, "U8", SHAPE(e, rows, blocks, 16), "%s", as->codes[down]), 0,
                  255);
        randomize(&model, built_add(&model, "U8", SHAPE(e, rows, blocks), "%s", as->scales[down]),
                  110, 130);
        randomize_bf16(&model, built_add(&model, "BF16", SHAPE(e, rows), "%s", as->bias[down]));
    }
    randomize_bf16(&model,
                   built_add(&model, "BF16", SHAPE(e, odd.hidden), "%s", as->router_weight));
    randomize_bf16(&model, built_add(&model, "BF16", SHAPE(e), "%s", as->router_bias));
    /* No part of the experts. */
    built_add(&model, "BF16", SHAPE(odd.hidden),
              as == both ? "model.layers.3.input_layernorm.weight" : "block.3.mlp.norm.scale");
    return model;
}

static float bf16_of(const built_tensor *tensor, int64_t index) {
    const uint32_t bits =
        (uint32_t)tensor->data[2 * index] << 16 | (uint32_t)tensor->data[2 * index + 1] << 24;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A matrix against its rows of the tensors, of which gate and up have every second one. */
static void check_matrix(const megamoe_weights *weights, int32_t expert, int projection,
                         const built *model, const names *as) {
    static double values[96 * 64];
    const int down = projection == MEGAMOE_DOWN;
    const int64_t rows = down ? odd.hidden : odd.intermediate;
    const int64_t columns = down ? odd.intermediate : odd.hidden;
    const int64_t step = down ? 1 : 2;
    const int64_t first = expert * rows * step + (projection == MEGAMOE_UP);
    /* As one long matrix of all experts' rows. */
    built_tensor codes = *built_find(model, as->codes[down]);
    codes.rank = 2;
    codes.shape[1] = columns / 2;
    const built_tensor *scales = built_find(model, as->scales[down]);
    built_tensor e8m0 = *scales;
    snprintf(e8m0.dtype, sizeof e8m0.dtype, "F8_E8M0");
    const built_tensor *bias = built_find(model, as->bias[down]);
    T_OK(megamoe_weights_unpack(weights, expert, (megamoe_projection)projection, values));
    megamoe_matrix matrix;
    T_OK(megamoe_weights_matrix(weights, expert, (megamoe_projection)projection, &matrix));
    T_EQ_INT(matrix.bias_dtype, MEGAMOE_DTYPE_BF16);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t at = first + row * step;
        T_REQUIRE(T_EQ_MEM((const uint8_t *)matrix.bias + (size_t)row * matrix.bias_stride,
                           bias->data + 2 * at, 2));
        for (int64_t k = 0; k < columns; k++)
            T_REQUIRE(T_EQ_F64(values[row * columns + k], element(&codes, &e8m0, 1, at, k)));
    }
}

T_CASE(both_ways_to_name_it_are_read) {
    for (size_t i = 0; i < 2; i++)
        for (int with_config = 0; with_config < 2; with_config++) {
            built model = layer_of(&both[i]);
            megamoe_checkpoint *checkpoint =
                opened(save_model(&model, with_config ? both[i].config : NULL));
            megamoe_checkpoint_info info = MEGAMOE_INIT(megamoe_checkpoint_info);
            T_OK(megamoe_checkpoint_describe(checkpoint, &info));
            T_EQ_STR(info.family, "gpt-oss");
            T_EQ_INT(info.layers, 1);
            megamoe_weights *weights;
            T_OK(megamoe_checkpoint_weights(checkpoint, 3, &weights));
            megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
            T_OK(megamoe_weights_describe(weights, &desc));
            T_EQ_INT(desc.layer, 3);
            T_EQ_INT(desc.format, MEGAMOE_FORMAT_MXFP4);
            T_EQ_INT(desc.hidden, odd.hidden);
            T_EQ_INT(desc.intermediate, odd.intermediate);
            T_EQ_INT(desc.experts, odd.experts);
            T_EQ_INT(desc.topk, with_config ? TOPK : 0);
            T_CHECK(desc.has_bias);
            T_EQ_F64((double)desc.activation.alpha, (double)1.702f);
            T_EQ_F64((double)desc.activation.offset, 1);
            T_EQ_F64((double)desc.activation.limit, 7);
            for (int32_t e = 0; e < odd.experts; e++)
                for (int p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++)
                    check_matrix(weights, e, p, &model, &both[i]);
            megamoe_weights_close(weights);
            megamoe_checkpoint_close(checkpoint);
            built_free(&model);
        }
}

/* Half of the first block of a published DeepSeek-V4.1 file: the formats are one. */
T_CASE(a_block_has_the_values_of_the_published_one) {
    static const uint8_t bytes[8] = {0xa0, 0xa8, 0xec, 0x4a, 0xad, 0xaf, 0x42, 0xaa};
    static const double expected[16] = {
        0,         -.0078125, 0,        -.0078125, -.015625, -.03125, -.0078125, .015625,
        -.0234375, -.0078125, -.046875, -.0078125, .0078125, .015625, -.0078125, -.0078125};
    static double values[96 * 64];
    built model = layer_of(&both[0]);
    const size_t up_row = 96 / 2; /* of expert 0: the second row */
    memcpy(built_find(&model, both[0].codes[0])->data + up_row, bytes, sizeof bytes);
    built_find(&model, both[0].scales[0])->data[96 / 32] = 0x78;
    megamoe_checkpoint *checkpoint = opened(save_model(&model, both[0].config));
    megamoe_weights *weights;
    T_OK(megamoe_checkpoint_weights(checkpoint, 3, &weights));
    T_OK(megamoe_weights_unpack(weights, 0, MEGAMOE_UP, values));
    for (int k = 0; k < 16; k++)
        T_EQ_F64(values[k], expected[k]);
    megamoe_weights_close(weights);
    megamoe_checkpoint_close(checkpoint);
    built_free(&model);
}

T_CASE(router_is_softmax_over_the_chosen) {
    for (size_t i = 0; i < 2; i++) {
        built model = layer_of(&both[i]);
        megamoe_checkpoint *checkpoint = opened(save_model(&model, both[i].config));
        megamoe_router *router;
        T_OK(megamoe_checkpoint_router(checkpoint, 3, &router));
        megamoe_router_desc desc = MEGAMOE_INIT(megamoe_router_desc);
        T_OK(megamoe_router_describe(router, &desc));
        T_EQ_INT(desc.rule, MEGAMOE_ROUTER_SOFTMAX_SELECTED);
        T_EQ_INT(desc.hidden, odd.hidden);
        T_EQ_INT(desc.experts, odd.experts);
        T_EQ_INT(desc.topk, TOPK);
        T_CHECK(!desc.normalize);
        T_EQ_F64((double)desc.scaling, 1);

        uint16_t x[96] = {0};
        x[5] = 0x3F80; /* 1: the logits are column 5 and the bias */
        double logits[5];
        int best = 0, second = -1;
        const built_tensor *weight = built_find(&model, both[i].router_weight);
        const built_tensor *bias = built_find(&model, both[i].router_bias);
        for (int e = 0; e < odd.experts; e++)
            logits[e] = (double)bf16_of(weight, e * odd.hidden + 5) + (double)bf16_of(bias, e);
        for (int e = 1; e < odd.experts; e++)
            best = logits[e] > logits[best] ? e : best;
        for (int e = 0; e < odd.experts; e++)
            if (e != best && (second < 0 || logits[e] > logits[second]))
                second = e;
        int32_t ids[TOPK];
        float weights[TOPK];
        const megamoe_view input = {x, MEGAMOE_DTYPE_BF16, 1, 0};
        const megamoe_view id_view = {ids, MEGAMOE_DTYPE_I32, 1, 0};
        const megamoe_view weight_view = {weights, MEGAMOE_DTYPE_F32, 1, 0};
        T_OK(megamoe_router_route(router, NULL, &input, NULL, 1, &id_view, &weight_view));
        T_EQ_INT(ids[0], best);
        T_EQ_INT(ids[1], second);
        const double share = 1 / (1 + exp(logits[second] - logits[best]));
        T_NEAR((double)weights[0], share, 1e-6);
        T_NEAR((double)weights[1], 1 - share, 1e-6);
        megamoe_router_close(router);
        megamoe_checkpoint_close(checkpoint);
        built_free(&model);
    }
}

T_CASE(every_tensor_is_needed) {
    for (size_t i = 0; i < 2; i++)
        for (int t = 0; t < 6; t++) {
            const char *const missing = (t < 2   ? both[i].codes
                                         : t < 4 ? both[i].scales
                                                 : both[i].bias)[t % 2];
            built model = layer_of(&both[i]);
            built_remove(&model, missing);
            FAILS(try_weights(save_model(&model, both[i].config), 3), MEGAMOE_EFORMAT, missing,
                  "missing");
            built_free(&model);
        }
    built model = layer_of(&both[0]);
    built_remove(&model, both[0].router_bias);
    FAILS(try_router(save_model(&model, both[0].config), 3), MEGAMOE_EFORMAT, both[0].router_bias,
          "missing");
    built_remove(&model, both[0].router_weight);
    FAILS(try_router(save_model(&model, both[0].config), 3), MEGAMOE_ENOTFOUND,
          both[0].router_weight);
    built_free(&model);
}

T_CASE(types_and_shapes_are_checked) {
    static const struct {
        int part; /* codes, scales, bias; of down: + 3 */
        const char *dtype;
        int64_t shape[5];
        const char *says;
    } wrong[] = {{0, "I8", {5, 128, 3, 16, -1}, "must be U8"},
                 {0, "U8", {5, 128, 48, -1}, "4 dimensions"},
                 {0, "U8", {5, 127, 3, 16, -1}, "even number of rows"},
                 {0, "U8", {5, 128, 6, 8, -1}, "[5, 128, 6, 8]"},
                 {0, "U8", {4, 128, 3, 16, -1}, "num_local_experts"},
                 {0, "U8", {5, 126, 3, 16, -1}, "intermediate_size"},
                 {0, "U8", {5, 128, 4, 16, -1}, "hidden_size"},
                 {1, "F8_E8M0", {5, 128, 3, -1}, "must be U8"},
                 {1, "U8", {5, 3, 128, -1}, "[5, 128, 3]"},
                 {2, "F32", {5, 128, -1}, "must be BF16"},
                 {2, "BF16", {5, 64, -1}, "[5, 128]"},
                 {3, "U8", {5, 64, 3, 16, -1}, "[5, 96, 2, 16]"},
                 {4, "U8", {5, 96, 4, -1}, "[5, 96, 2]"},
                 {5, "BF16", {480, -1}, "2 dimensions"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const int down = wrong[i].part / 3, kind = wrong[i].part % 3;
        const char *const name = (kind == 0   ? both[0].codes
                                  : kind == 1 ? both[0].scales
                                              : both[0].bias)[down];
        built model = layer_of(&both[0]);
        built_remove(&model, name);
        built_add(&model, wrong[i].dtype, wrong[i].shape, "%s", name);
        FAILS(try_weights(save_model(&model, both[0].config), 3), MEGAMOE_EFORMAT, name,
              wrong[i].says);
        built_free(&model);
    }
}

T_CASE(tensors_without_elements_make_no_room) {
    built model = layer_of(&both[0]);
    built_remove(&model, both[0].codes[0]);
    built_add(&model, "U8", SHAPE(INT32_MAX, 0, 3, 16), "%s", both[0].codes[0]);
    FAILS(try_weights(save_model(&model, NULL), 3), MEGAMOE_EFORMAT, both[0].codes[0]);
    built_remove(&model, both[0].codes[0]);
    built_add(&model, "U8", SHAPE(0, 128, INT64_MAX / 4096, 16), "%s", both[0].codes[0]);
    FAILS(try_weights(save_model(&model, NULL), 3), MEGAMOE_EFORMAT, both[0].codes[0]);
    built_free(&model);
}

T_CASE(a_scale_that_is_no_number_is_named) {
    built model = layer_of(&both[0]);
    /* Row 5 of expert 1: row 2 of its up. */
    built_find(&model, both[0].scales[0])->data[(128 + 5) * 3 + 1] = 255;
    FAILS(try_weights(save_model(&model, NULL), 3), MEGAMOE_EFORMAT, both[0].scales[0], "expert 1",
          "row 2", "0xff");
    built_free(&model);
}

T_CASE(unknown_tensors_beside_the_experts_are_refused) {
    static const char *const unknown[] = {"model.layers.3.mlp.experts.gate_up_proj_blocks_shape",
                                          "block.3.mlp.mlp1_weight.shuffle"};
    for (size_t i = 0; i < 2; i++) {
        built model = layer_of(&both[i]);
        built_add(&model, "BF16", SHAPE(1), "%s", unknown[i]);
        FAILS(try_weights(save_model(&model, NULL), 3), MEGAMOE_EUNSUPPORTED, unknown[i],
              "gpt-oss");
        built_free(&model);
    }
}

T_CASE(a_layer_under_both_names_is_refused) {
    built model = layer_of(&both[0]);
    built_add(&model, "U8", SHAPE(5, 128, 3, 16), "%s", both[1].codes[0]);
    FAILS(try_open(save_model(&model, NULL)), MEGAMOE_EFORMAT, "layer 3", "block.3.mlp",
          "model.layers.3.mlp");
    built_free(&model);
}

T_CASE(configs_of_other_models_are_refused) {
    static const struct {
        const char *config;
        megamoe_status status;
        const char *says;
    } wrong[] = {
        {"{\"model_type\":\"gemma4\",\"quantization_config\":{\"quant_method\":\"mxfp4\"}}",
         MEGAMOE_EUNSUPPORTED, "gemma4"},
        {"{\"quantization_config\":{\"quant_method\":\"fp8\"}}", MEGAMOE_EFORMAT, "\"fp8\""},
        {"{\"quantization_config\":{\"quant_method\":\"modelopt\",\"quant_algo\":\"NVFP4\"}}",
         MEGAMOE_EFORMAT, "\"NVFP4\""}};
    built model = layer_of(&both[0]);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        FAILS(try_open(save_model(&model, wrong[i].config)), wrong[i].status, "layers.3",
              wrong[i].says);
    FAILS(try_weights(save_model(&model, "{\"hidden_act\":\"gelu\"}"), 3), MEGAMOE_EUNSUPPORTED,
          "gelu");
    built_free(&model);
}

T_CASE(activation_follows_the_config) {
    built model = layer_of(&both[0]);
    megamoe_checkpoint *checkpoint =
        opened(save_model(&model, "{\"swiglu_limit\":5.5,\"swiglu_alpha\":1.25}"));
    megamoe_weights *weights;
    T_OK(megamoe_checkpoint_weights(checkpoint, 3, &weights));
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    T_OK(megamoe_weights_describe(weights, &desc));
    T_EQ_F64((double)desc.activation.alpha, 1.25);
    T_EQ_F64((double)desc.activation.limit, 5.5);
    megamoe_weights_close(weights);
    megamoe_checkpoint_close(checkpoint);
    built_free(&model);
}

T_CASE(router_needs_the_config) {
    built model = layer_of(&both[0]);
    FAILS(try_router(save_model(&model, NULL), 3), MEGAMOE_ENOTFOUND, "config.json");
    FAILS(try_router(save_model(&model, "{\"hidden_size\":96}"), 3), MEGAMOE_ENOTFOUND,
          "num_experts_per_tok");
    built_remove(&model, both[0].router_weight);
    built_add(&model, "BF16", SHAPE(4, 96), "%s", both[0].router_weight);
    FAILS(try_router(save_model(&model, both[0].config), 3), MEGAMOE_EFORMAT, both[0].router_weight,
          "[5, 96]");
    built_free(&model);
}

T_CASE(biases_of_an_unquantized_model_make_no_layer) {
    built model = built_start();
    built_add(&model, "BF16", SHAPE(2, 32, 64), "model.layers.0.mlp.experts.gate_up_proj");
    built_add(&model, "BF16", SHAPE(2, 64), "model.layers.0.mlp.experts.gate_up_proj_bias");
    built_add(&model, "BF16", SHAPE(2, 32), "model.layers.0.mlp.experts.down_proj_bias");
    FAILS(try_open(save_model(&model, "{\"model_type\":\"gpt_oss\"}")), MEGAMOE_EUNSUPPORTED,
          "not quantized");
    built_free(&model);
}
