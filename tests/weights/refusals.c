/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe_weights_from_tensors: what it refuses, and who owns what. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "layer.h"
#include "weights/weights.h"

static const layer_shape mxfp4_shape = {MEGAMOE_FORMAT_MXFP4, 64,  32, 4,
                                        MEGAMOE_DTYPE_BF16,   110, 135};
static const layer_shape nvfp4_shape = {MEGAMOE_FORMAT_NVFP4, 48, 32, 4,
                                        MEGAMOE_DTYPE_NONE,   1,  126};

struct owner {
    int released;
};

static void release(void *user) {
    struct owner *owner = user;
    owner->released++;
}

static void name(const void *owner, int32_t expert, megamoe_projection projection, bool scales,
                 char *text, size_t bytes) {
    (void)owner;
    static const char *const names[3] = {"w1", "w3", "w2"};
    snprintf(text, bytes, "shard-2.safetensors: layers.5.ffn.experts.%d.%s.%s", expert,
             names[projection], scales ? "scale" : "weight");
}

/* Both ways of creating refuse; the messages contain the names and `part`. */
static void check_refused(const test_layer *layer, megamoe_status status, const char *plain,
                          const char *named, const char *part) {
    megamoe_weights *weights;
    T_STATUS(megamoe_weights_from_tensors(&layer->desc, layer->matrices, &weights), status);
    T_CHECK(weights == NULL);
    T_CONTAINS(megamoe_last_error(), plain);
    T_CONTAINS(megamoe_last_error(), part);
    struct owner owner = {0};
    T_STATUS(mm_weights_create(&layer->desc, layer->matrices,
                               (mm_matrix_owner){.owner = &owner, .release = release, .name = name},
                               &weights),
             status);
    T_CHECK(weights == NULL);
    T_EQ_INT(owner.released, 1);
    T_CONTAINS(megamoe_last_error(), named);
    T_CONTAINS(megamoe_last_error(), part);
}

static void check_scale(test_layer *layer, uint8_t byte, const char *what) {
    uint8_t *scale = layer_scales(layer, 3, MEGAMOE_DOWN, 17) + 1;
    const uint8_t kept = *scale;
    *scale = byte;
    char text[64];
    snprintf(text, sizeof text, "row 17, block 1: scale byte 0x%02x is %s", byte, what);
    check_refused(layer, MEGAMOE_EFORMAT, "expert 3 down scales: ",
                  "shard-2.safetensors: layers.5.ffn.experts.3.w2.scale: ", text);
    *scale = kept;
}

T_CASE(mxfp4_scales) {
    t_random random = t_random_start(50);
    layer_shape shape = mxfp4_shape;
    shape.intermediate = 64;
    test_layer layer = layer_random(&shape, &random);
    check_scale(&layer, 255, "NaN; expected 0x00..0xfe");
    for (int byte = 0; byte < 255; byte++) {
        layer_scales(&layer, 3, MEGAMOE_DOWN, 17)[1] = (uint8_t)byte;
        megamoe_weights *weights;
        T_OK(megamoe_weights_from_tensors(&layer.desc, layer.matrices, &weights));
        megamoe_weights_close(weights);
    }
    layer_free(&layer);
}

T_CASE(nvfp4_scales) {
    t_random random = t_random_start(51);
    test_layer layer = layer_random(&nvfp4_shape, &random);
    check_scale(&layer, 0x7F, "NaN; expected 0x00..0x7e");
    check_scale(&layer, 0xFF, "NaN");
    check_scale(&layer, 0x80, "-0");
    for (int byte = 0x81; byte < 0xFF; byte++)
        check_scale(&layer, (uint8_t)byte, "negative");
    for (int byte = 0; byte < 0x7F; byte++) {
        layer_scales(&layer, 3, MEGAMOE_DOWN, 17)[1] = (uint8_t)byte;
        megamoe_weights *weights;
        T_OK(megamoe_weights_from_tensors(&layer.desc, layer.matrices, &weights));
        megamoe_weights_close(weights);
    }
    layer_free(&layer);
}

T_CASE(globals) {
    static const float bad[] = {0.0f, -0.0f, -1.0f, INFINITY, -INFINITY, NAN};
    t_random random = t_random_start(52);
    test_layer nvfp4 = layer_random(&nvfp4_shape, &random);
    test_layer mxfp4 = layer_random(&mxfp4_shape, &random);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        layer_matrix(&nvfp4, 2, MEGAMOE_UP)->global_scale = bad[i];
        check_refused(&nvfp4, MEGAMOE_EFORMAT,
                      "expert 2 up scales: ", "experts.2.w3.scale: ", "global scale");
        layer_matrix(&mxfp4, 2, MEGAMOE_UP)->global_scale = bad[i]; /* ignored */
        megamoe_weights *weights;
        T_OK(megamoe_weights_from_tensors(&mxfp4.desc, mxfp4.matrices, &weights));
        T_EQ_F64(mm_weights_global(weights, 2, MEGAMOE_UP), 1.0);
        megamoe_weights_close(weights);
    }
    layer_matrix(&nvfp4, 2, MEGAMOE_UP)->global_scale = 0x1p-149f;
    megamoe_weights *weights;
    T_OK(megamoe_weights_from_tensors(&nvfp4.desc, nvfp4.matrices, &weights));
    check_unpacked(weights, &nvfp4, layer_value);
    megamoe_weights_close(weights);
    layer_free(&nvfp4);
    layer_free(&mxfp4);
}

static void check_desc(const test_layer *layer, megamoe_layer_desc desc, const char *part) {
    megamoe_weights *weights;
    T_STATUS(megamoe_weights_from_tensors(&desc, layer->matrices, &weights), MEGAMOE_EINVAL);
    T_CHECK(weights == NULL);
    T_CONTAINS(megamoe_last_error(), part);
}

T_CASE(geometry) {
    t_random random = t_random_start(53);
    test_layer layer = layer_random(&mxfp4_shape, &random);
    const megamoe_layer_desc good = layer.desc;
#define WITH(member, value, part)                                                                  \
    do {                                                                                           \
        megamoe_layer_desc desc = good;                                                            \
        desc.member = (value);                                                                     \
        check_desc(&layer, desc, part);                                                            \
    } while (0)
    WITH(struct_size, 0, "struct_size");
    WITH(format, (megamoe_format)0, "format 0");
    WITH(format, (megamoe_format)3, "format 3");
    WITH(hidden, 0, "hidden 0");
    WITH(hidden, -32, "hidden -32");
    WITH(hidden, 48, "hidden 48; mxfp4 needs a multiple of 32");
    WITH(hidden, 65568, "hidden 65568");
    WITH(intermediate, 16, "intermediate 16");
    WITH(intermediate, INT32_MIN, "intermediate");
    WITH(experts, 0, "0 experts");
    WITH(experts, 4097, "4097 experts");
    WITH(topk, -1, "top-k -1");
    WITH(topk, 5, "top-k 5");
    WITH(activation.alpha, NAN, "alpha");
    WITH(activation.offset, INFINITY, "offset");
    WITH(activation.limit, -1.0f, "limit");
    WITH(activation.limit, NAN, "limit");
    WITH(has_bias, false, "expert 0 gate: a bias, but has_bias is false");
#undef WITH
    megamoe_weights *weights;
    T_STATUS(megamoe_weights_from_tensors(NULL, layer.matrices, &weights), MEGAMOE_EINVAL);
    T_STATUS(megamoe_weights_from_tensors(&layer.desc, NULL, &weights), MEGAMOE_EINVAL);
    layer_free(&layer);
}

T_CASE(matrices) {
    t_random random = t_random_start(54);
    test_layer layer = layer_random(&mxfp4_shape, &random);
    megamoe_matrix *up = layer_matrix(&layer, 1, MEGAMOE_UP);
    const megamoe_matrix good = *up;
#define WITH(member, value, part)                                                                  \
    do {                                                                                           \
        *up = good;                                                                                \
        up->member = (value);                                                                      \
        check_refused(&layer, MEGAMOE_EINVAL, "expert 1 up", "layers.5.ffn.experts.1.w3.", part);  \
    } while (0)
    WITH(codes, NULL, "NULL");
    WITH(scales, NULL, "NULL");
    WITH(codes_stride, 31, "codes_stride 31; a row has 32 bytes");
    WITH(codes_stride, SIZE_MAX, "codes_stride");
    WITH(codes_stride, SIZE_MAX / 32, "codes_stride");
    WITH(scales_stride, 1, "scales_stride 1; a row has 2 bytes");
    WITH(scales_stride, SIZE_MAX / 2, "scales_stride");
    WITH(bias, NULL, "no bias");
    WITH(bias_dtype, MEGAMOE_DTYPE_NONE, "bias is none");
    WITH(bias_dtype, MEGAMOE_DTYPE_E4M3, "bias is F8_E4M3");
    WITH(bias_stride, 1, "bias_stride 1; an element has 2 bytes");
    WITH(bias_stride, SIZE_MAX, "bias_stride");
#undef WITH
    layer_free(&layer);
}

T_CASE(ownership) {
    t_random random = t_random_start(55);
    test_layer layer = layer_random(&mxfp4_shape, &random);
    struct owner owner = {0};
    megamoe_weights *weights;
    T_OK(mm_weights_create(&layer.desc, layer.matrices,
                           (mm_matrix_owner){.owner = &owner, .release = release, .name = name},
                           &weights));
    megamoe_matrix matrix;
    T_OK(megamoe_weights_matrix(weights, 3, MEGAMOE_DOWN, &matrix));
    T_CHECK(matrix.codes == layer_matrix(&layer, 3, MEGAMOE_DOWN)->codes);
    T_STATUS(megamoe_weights_matrix(weights, 4, MEGAMOE_DOWN, &matrix), MEGAMOE_EINVAL);
    T_STATUS(megamoe_weights_matrix(weights, -1, MEGAMOE_DOWN, &matrix), MEGAMOE_EINVAL);
    T_STATUS(megamoe_weights_matrix(weights, 0, (megamoe_projection)3, &matrix), MEGAMOE_EINVAL);
    T_CHECK(!megamoe_weights_prepared(weights));
    T_CHECK(megamoe_weights_router(weights) == NULL);
    T_EQ_INT(owner.released, 0);
    megamoe_weights_close(weights);
    T_EQ_INT(owner.released, 1);
    megamoe_weights_close(NULL);
    layer_free(&layer);
}

T_CASE(format_names) {
    T_EQ_STR(megamoe_format_name(MEGAMOE_FORMAT_MXFP4), "mxfp4");
    T_EQ_STR(megamoe_format_name(MEGAMOE_FORMAT_NVFP4), "nvfp4");
    T_EQ_STR(megamoe_format_name((megamoe_format)0), "unknown");
}
