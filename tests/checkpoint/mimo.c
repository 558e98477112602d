/* SPDX-License-Identifier: Apache-2.0 */
/* MXFP4 in U8 tensors, as MiMo-V2.5-Pro-FP4 stores it. */
#include <stdio.h>
#include <string.h>

#include "fixture.h"

static const sizes odd = {.hidden = 160, .intermediate = 96, .experts = 3};
#define CONFIG(rest)                                                                               \
    "{\"model_type\":\"mimo_v2\",\"hidden_size\":160,\"moe_intermediate_size\":96,"                \
    "\"quantization_config\":{" rest "}}"
#define STORED CONFIG("\"quant_method\":\"fp8\",\"store_dtype\":\"mxfp4\"")

static built layer_of_mimo(void) {
    built model = built_start();
    add_mxfp4(&model, "model.layers.%d.mlp.", 1, named, "weight_scale", odd);
    for (size_t i = 0; i < model.n; i++)
        strcpy(model.tensors[i].dtype, "U8");
    return model;
}

T_CASE(both_words_of_the_config_make_it_mxfp4) {
    static double values[160 * 96];
    static const char *const configs[] = {STORED, CONFIG("\"quant_method\":\"mxfp4\"")};
    built model = layer_of_mimo();
    for (int c = 0; c < 2; c++) {
        megamoe_checkpoint *checkpoint = opened(save_model(&model, configs[c]));
        megamoe_checkpoint_info info = MEGAMOE_INIT(megamoe_checkpoint_info);
        T_OK(megamoe_checkpoint_describe(checkpoint, &info));
        T_EQ_STR(info.family, "mimo-mxfp4");
        megamoe_weights *weights;
        T_OK(megamoe_checkpoint_weights(checkpoint, 1, &weights));
        megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
        T_OK(megamoe_weights_describe(weights, &desc));
        T_EQ_INT(desc.format, MEGAMOE_FORMAT_MXFP4);
        T_EQ_INT(desc.experts, odd.experts);
        T_EQ_F64((double)desc.activation.limit, 0);
        for (int32_t e = 0; e < odd.experts; e++)
            for (int p = 0; p < 3; p++) {
                char name[96];
                snprintf(name, sizeof name, "model.layers.1.mlp.experts.%d.%s.weight", e, named[p]);
                const built_tensor *codes = built_find(&model, name);
                strcat(name, "_scale");
                built_tensor scales = *built_find(&model, name);
                strcpy(scales.dtype, "F8_E8M0");
                T_OK(megamoe_weights_unpack(weights, e, (megamoe_projection)p, values));
                const int64_t columns = 2 * codes->shape[1];
                for (int64_t i = 0; i < codes->shape[0] * columns; i++)
                    T_REQUIRE(
                        T_EQ_F64(values[i], element(codes, &scales, 1, i / columns, i % columns)));
            }
        megamoe_weights_close(weights);
        megamoe_checkpoint_close(checkpoint);
    }
    built_free(&model);
}

/* A reader that took E8M0 for linear would be off by 127 here, one that took U8 for 8 bits by 2. */
T_CASE(u8_alone_is_refused) {
    static const char *const silent[] = {NULL, CONFIG("\"quant_method\":\"fp8\""),
                                         CONFIG("\"quant_method\":\"mxfp8\"")};
    built model = layer_of_mimo();
    for (size_t i = 0; i < sizeof silent / sizeof *silent; i++)
        FAILS(try_open(save_model(&model, silent[i])), MEGAMOE_EUNSUPPORTED, "U8 scales",
              "MXFP4 or MXFP8", "store_dtype");
    FAILS(try_open(save_model(&model, CONFIG("\"store_dtype\":\"mxfp8\""))), MEGAMOE_EFORMAT,
          "store_dtype", "\"mxfp8\"");
    FAILS(try_open(save_model(&model, CONFIG("\"store_dtype\":\"mxfp4\",\"quant_algo\":\"FP8\""))),
          MEGAMOE_EFORMAT, "ModelOpt", "FP8");
    built_free(&model);
}

T_CASE(mistakes_are_named) {
    char name[] = "model.layers.1.mlp.experts.2.up_proj.weight_scale";
    built model = layer_of_mimo();
    built_find(&model, name)->data[11] = 255;
    FAILS(try_weights(save_model(&model, STORED), 1), MEGAMOE_EFORMAT, name, "0xff");
    built_remove(&model, name);
    FAILS(try_weights(save_model(&model, STORED), 1), MEGAMOE_EFORMAT, name, "missing");
    built_add(&model, "U8", SHAPE(96, 10), "%s", name); /* a scale for 16, as NVFP4 has */
    FAILS(try_weights(save_model(&model, STORED), 1), MEGAMOE_EFORMAT, name, "[96, 10]", "[96, 5]");
    built_free(&model);
    model = layer_of_mimo();
    built_add(&model, "F32", SCALAR, "model.layers.1.mlp.experts.2.up_proj.input_scale");
    FAILS(try_weights(save_model(&model, STORED), 1), MEGAMOE_EUNSUPPORTED, "input_scale",
          "unknown");
    built_free(&model);
}
