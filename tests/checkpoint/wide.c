/* SPDX-License-Identifier: Apache-2.0 */
/* FP8 and BF16 experts: recognised, refused, and rounded to 4 bits when asked by name. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "fixture.h"

/* No multiple of 128: the last blocks are cropped. */
static const sizes odd = {.hidden = 288, .intermediate = 160, .experts = 2};
static const char block[] = "model.layers.3.mlp.";

enum { WEIGHTS = 288 * 160 };

#define CONFIG(size) "{\"quantization_config\":{\"quant_method\":\"fp8\"," size "}}"
#define BLOCK_128 CONFIG("\"weight_block_size\":[128,128]")

static int64_t rows_of(int projection) {
    return projection == MEGAMOE_DOWN ? odd.hidden : odd.intermediate;
}

static int64_t columns_of(int projection) {
    return projection == MEGAMOE_DOWN ? odd.intermediate : odd.hidden;
}

static built_tensor *part_of(const built *model, int32_t expert, int projection, const char *part) {
    char name[160];
    snprintf(name, sizeof name, "%sexperts.%d.%s.%s", block, expert, named[projection], part);
    return built_find(model, name);
}

/* A scale is F32 with all its bits, or E8M0. */
static built fp8(int64_t block_rows, int64_t block_columns, const char *scale, bool e8m0) {
    built model = built_start();
    for (int32_t e = 0; e < odd.experts; e++)
        for (int p = 0; p < 3; p++) {
            built_tensor *codes = built_add(&model, "F8_E4M3", SHAPE(rows_of(p), columns_of(p)),
                                            "%sexperts.%d.%s.weight", block, e, named[p]);
            randomize(&model, codes, 0, 255);
            for (uint64_t i = 0; i < codes->bytes; i++)
                codes->data[i] &= (codes->data[i] & 0x7F) == 0x7F ? 0x80 : 0xFF; /* no NaN */
            built_tensor *scales =
                built_add(&model, e8m0 ? "F8_E8M0" : "F32",
                          SHAPE((rows_of(p) + block_rows - 1) / block_rows,
                                (columns_of(p) + block_columns - 1) / block_columns),
                          "%sexperts.%d.%s.%s", block, e, named[p], scale);
            if (e8m0)
                randomize(&model, scales, 100, 130);
            for (uint64_t i = 0; !e8m0 && i < scales->bytes; i += 4) {
                const float value = (float)(1e-4 * exp(t_normal(&model.random)));
                memcpy(scales->data + i, &value, sizeof value);
            }
        }
    return model;
}

static void put_bf16(built_tensor *tensor, int64_t index, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    tensor->data[2 * index] = (uint8_t)(bits >> 16);
    tensor->data[2 * index + 1] = (uint8_t)(bits >> 24);
}

static built bf16(void) {
    built model = built_start();
    for (int32_t e = 0; e < odd.experts; e++)
        for (int p = 0; p < 3; p++) {
            built_tensor *values = built_add(&model, "BF16", SHAPE(rows_of(p), columns_of(p)),
                                             "%sexperts.%d.%s.weight", block, e, named[p]);
            for (int64_t i = 0; i < rows_of(p) * columns_of(p); i++)
                put_bf16(values, i, (float)(0.02 * t_normal(&model.random)));
        }
    return model;
}

/* ---- The definitions, by search and in plain arithmetic ---- */

static double e4m3(unsigned code) {
    const double mantissa = code & 7u;
    const int exponent = (int)(code >> 3 & 15u);
    const double magnitude = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return code & 0x80u ? -magnitude : magnitude;
}

static double stored_value(const built *model, int32_t expert, int projection, const char *scale,
                           int64_t block_rows, int64_t block_columns, int64_t row, int64_t k) {
    const built_tensor *weight = part_of(model, expert, projection, "weight");
    const int64_t at = row * columns_of(projection) + k;
    if (!scale) {
        const uint32_t bits =
            (uint32_t)weight->data[2 * at] << 16 | (uint32_t)weight->data[2 * at + 1] << 24;
        float value;
        memcpy(&value, &bits, sizeof value);
        return (double)value;
    }
    const built_tensor *scales = part_of(model, expert, projection, scale);
    const int64_t s = row / block_rows * scales->shape[1] + k / block_columns;
    if (strcmp(scales->dtype, "F8_E8M0") == 0)
        return e4m3(weight->data[at]) * ldexp(1, scales->data[s] - 127);
    float value;
    memcpy(&value, scales->data + 4 * s, sizeof value);
    return e4m3(weight->data[at]) * (double)value;
}

static unsigned nearest_e2m1(double weight, double unit) {
    static const double magnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    unsigned best = 0;
    for (unsigned code = 1; code < 8; code++) {
        const long double here = fabsl(fabsl((long double)weight) - magnitudes[code] * unit);
        const long double there = fabsl(fabsl((long double)weight) - magnitudes[best] * unit);
        if (here < there || (here == there && code % 2 == 0))
            best = code;
    }
    return best | (signbit(weight) ? 8u : 0u);
}

static unsigned nearest_e4m3(double x) {
    unsigned best = 0;
    for (unsigned code = 1; code < 0x7F; code++) {
        const double here = fabs(x - e4m3(code)), there = fabs(x - e4m3(best));
        if (here < there || (here == there && code % 2 == 0))
            best = code;
    }
    return best;
}

static unsigned mxfp4_scale(double largest) {
    int exponent = -127;
    while (largest > ldexp(6, exponent))
        exponent++;
    return largest == 0 ? 127 : (unsigned)(exponent + 127);
}

static unsigned nvfp4_scale(double largest, float global) {
    if (largest == 0)
        return 0x38; /* 1 */
    const double scale = (double)(float)(largest / (6 * (double)global));
    return nearest_e4m3(scale < 0x1p-9 ? 0x1p-9 : scale);
}

static double largest_of(const double *values, int64_t n) {
    double largest = 0;
    for (int64_t i = 0; i < n; i++)
        largest = fmax(largest, fabs(values[i]));
    return largest;
}

/* A matrix of quantized weights against what is stored; scale NULL: BF16. */
static void check_matrix(const built *model, const megamoe_weights *weights, megamoe_format format,
                         int32_t expert, int projection, const char *scale, int64_t block_rows,
                         int64_t block_columns) {
    static double values[WEIGHTS];
    const int64_t rows = rows_of(projection), columns = columns_of(projection);
    const int64_t group = format == MEGAMOE_FORMAT_MXFP4 ? 32 : 16;
    for (int64_t i = 0; i < rows * columns; i++)
        values[i] = stored_value(model, expert, projection, scale, block_rows, block_columns,
                                 i / columns, i % columns);
    megamoe_matrix matrix;
    T_OK(megamoe_weights_matrix(weights, expert, (megamoe_projection)projection, &matrix));
    const double largest = largest_of(values, rows * columns);
    const float global =
        format == MEGAMOE_FORMAT_MXFP4 || largest == 0 ? 1.0f : (float)(largest / 2688);
    T_EQ_F64((double)matrix.global_scale, (double)global);
    for (int64_t row = 0; row < rows; row++) {
        const uint8_t *codes = (const uint8_t *)matrix.codes + (size_t)row * matrix.codes_stride;
        const uint8_t *scales = (const uint8_t *)matrix.scales + (size_t)row * matrix.scales_stride;
        for (int64_t g = 0; g < columns / group; g++) {
            const double *of = values + row * columns + g * group;
            const double most = largest_of(of, group);
            const unsigned byte =
                format == MEGAMOE_FORMAT_MXFP4 ? mxfp4_scale(most) : nvfp4_scale(most, global);
            T_REQUIRE(T_EQ_HEX(scales[g], byte));
            const double unit = format == MEGAMOE_FORMAT_MXFP4 ? ldexp(1, (int)byte - 127)
                                                               : e4m3(byte) * (double)global;
            for (int64_t i = 0; i < group; i++) {
                const int64_t k = g * group + i;
                T_REQUIRE(T_EQ_HEX(codes[k / 2] >> 4 * (k % 2) & 15u, nearest_e2m1(of[i], unit)));
            }
        }
    }
}

static megamoe_weights *quantized(const char *path, megamoe_format format, int32_t threads) {
    megamoe_checkpoint *checkpoint = opened(path);
    megamoe_quantize_options options = MEGAMOE_INIT(megamoe_quantize_options);
    options.format = format;
    options.threads = threads;
    megamoe_weights *weights = NULL;
    T_OK(megamoe_checkpoint_quantize(checkpoint, 3, &options, &weights));
    megamoe_checkpoint_close(checkpoint);
    return weights;
}

static megamoe_status try_quantize(const char *path, megamoe_format format) {
    megamoe_checkpoint *checkpoint = opened(path);
    megamoe_quantize_options options = MEGAMOE_INIT(megamoe_quantize_options);
    options.format = format;
    megamoe_weights *weights = NULL;
    const megamoe_status status = megamoe_checkpoint_quantize(checkpoint, 3, &options, &weights);
    T_CHECK((weights != NULL) == (status == MEGAMOE_OK));
    megamoe_weights_close(weights);
    megamoe_checkpoint_close(checkpoint);
    return status;
}

static void check_layer(const built *model, const char *config, const char *scale,
                        int64_t block_rows, int64_t block_columns) {
    for (int f = 0; f < 2; f++) {
        const megamoe_format format = f ? MEGAMOE_FORMAT_NVFP4 : MEGAMOE_FORMAT_MXFP4;
        megamoe_weights *weights = quantized(save_model(model, config), format, 1 + f);
        megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
        T_OK(megamoe_weights_describe(weights, &desc));
        T_EQ_INT(desc.format, format);
        T_EQ_INT(desc.hidden, odd.hidden);
        T_EQ_INT(desc.intermediate, odd.intermediate);
        T_EQ_INT(desc.experts, odd.experts);
        for (int32_t e = 0; e < odd.experts; e++)
            for (int p = 0; p < 3; p++)
                check_matrix(model, weights, format, e, p, scale, block_rows, block_columns);
        megamoe_weights_close(weights);
    }
}

T_CASE(fp8_blocks_are_taken_exactly_and_rounded_once) {
    built model = fp8(128, 128, "weight_scale_inv", false);
    check_layer(&model, BLOCK_128, "weight_scale_inv", 128, 128);
    built_free(&model);
    model = fp8(32, 32, "scale", true);
    check_layer(&model, CONFIG("\"weight_block_size\":[32,32]"), "scale", 32, 32);
    built_free(&model);
    model = fp8(100, 7, "scale", false);
    check_layer(&model, CONFIG("\"weight_block_size\":[100,7]"), "scale", 100, 7);
    built_free(&model);
}

T_CASE(bf16_is_rounded) {
    built model = bf16();
    check_layer(&model, NULL, NULL, 1, 1);
    built_free(&model);
}

/* Ties, signed zeros, zero groups, a zero matrix, and the ends of both scales. */
T_CASE(rounding_at_its_edges) {
    built model = bf16();
    built_tensor *gate = part_of(&model, 0, MEGAMOE_GATE, "weight");
    static const float values[32] = {6,  0.25f,  0.75f,  1.25f,  1.75f,  2.5f,  3.5f,
                                     5,  -0.25f, -0.75f, -1.25f, -1.75f, -2.5f, -3.5f,
                                     -5, 0,      -0.0f,  -6,     0.5f,   1,     1.5f};
    for (int row = 0; row < 8; row++)
        for (int k = 0; k < odd.hidden; k++)
            put_bf16(gate, row * odd.hidden + k, 0);
    for (int k = 0; k < 32; k++) {
        put_bf16(gate, k, values[k]);
        put_bf16(gate, odd.hidden + k, ldexpf(values[k], -126)); /* subnormal BF16 */
        put_bf16(gate, 2 * odd.hidden + k, ldexpf(values[k], 40));
    }
    put_bf16(gate, 3 * odd.hidden, 0x1p-133f); /* the smallest */
    put_bf16(gate, 4 * odd.hidden, 6.03125f);  /* the next above 6 */
    put_bf16(gate, 5 * odd.hidden, -3.0f);
    built_tensor *down = part_of(&model, 1, MEGAMOE_DOWN, "weight");
    memset(down->data, 0, down->bytes);
    built_tensor *up = part_of(&model, 1, MEGAMOE_UP, "weight");
    memset(up->data, 0, up->bytes);
    put_bf16(up, 77, 0x1p-133f);
    put_bf16(up, 78, -0x1p-133f);
    built_tensor *huge = part_of(&model, 1, MEGAMOE_GATE, "weight");
    put_bf16(huge, 5, 0x1.FEp127f);

    megamoe_weights *weights = quantized(save_model(&model, NULL), MEGAMOE_FORMAT_MXFP4, 2);
    megamoe_matrix matrix;
    T_OK(megamoe_weights_matrix(weights, 0, MEGAMOE_GATE, &matrix));
    static const uint8_t codes[16] = {0x07, 0x22, 0x44, 0x66, 0xA8, 0xCA, 0xEC, 0x0E,
                                      0xF8, 0x21, 0x03, 0,    0,    0,    0,    0};
    const uint8_t *scales = matrix.scales;
    T_EQ_MEM(matrix.codes, codes, sizeof codes);
    T_EQ_HEX(scales[0], 127);
    T_EQ_HEX(scales[matrix.scales_stride], 1);
    T_EQ_HEX(scales[2 * matrix.scales_stride], 167);
    T_EQ_HEX(scales[3 * matrix.scales_stride], 0); /* 2^-127, of which 2^-133 is 0 */
    T_EQ_HEX(scales[4 * matrix.scales_stride], 128);
    T_EQ_HEX(scales[5 * matrix.scales_stride], 126); /* -6 * 0.5 */
    T_EQ_HEX(scales[6 * matrix.scales_stride], 127);
    for (int32_t e = 0; e < odd.experts; e++)
        for (int p = 0; p < 3; p++)
            check_matrix(&model, weights, MEGAMOE_FORMAT_MXFP4, e, p, NULL, 1, 1);
    megamoe_weights_close(weights);

    weights = quantized(save_model(&model, NULL), MEGAMOE_FORMAT_NVFP4, 2);
    check_matrix(&model, weights, MEGAMOE_FORMAT_NVFP4, 0, MEGAMOE_GATE, NULL, 1, 1);
    check_matrix(&model, weights, MEGAMOE_FORMAT_NVFP4, 1, MEGAMOE_DOWN, NULL, 1, 1);
    check_matrix(&model, weights, MEGAMOE_FORMAT_NVFP4, 1, MEGAMOE_GATE, NULL, 1, 1);
    /* A global scale below FP32's normal numbers is raised to the smallest of them. */
    T_OK(megamoe_weights_matrix(weights, 1, MEGAMOE_UP, &matrix));
    T_EQ_F64((double)matrix.global_scale, 0x1p-126);
    megamoe_weights_close(weights);
    built_free(&model);
}

/* FP32(largest / 2688) may lie below the quotient, and the largest group's scale then above 448. */
T_CASE(the_largest_scale_is_448_and_never_nan) {
    built model = bf16();
    for (int i = 0; i < 32; i++) {
        built_tensor *gate = part_of(&model, 0, MEGAMOE_GATE, "weight");
        const float largest = ldexpf(1.0f + (float)i / 32, i % 5);
        put_bf16(gate, 40, largest);
        put_bf16(gate, 41, -largest);
        megamoe_weights *weights = quantized(save_model(&model, NULL), MEGAMOE_FORMAT_NVFP4, 2);
        megamoe_matrix matrix;
        T_OK(megamoe_weights_matrix(weights, 0, MEGAMOE_GATE, &matrix));
        T_EQ_HEX(((const uint8_t *)matrix.scales)[2], 0x7E);
        T_EQ_HEX(((const uint8_t *)matrix.codes)[20], 0xF7);
        megamoe_weights_close(weights);
    }
    built_free(&model);
}

typedef struct seen {
    uint64_t done, total;
    bool ordered;
} seen;

static void see(void *user, uint64_t done, uint64_t total) {
    seen *s = user;
    s->ordered = s->ordered && done >= s->done && done <= total;
    s->done = done;
    s->total = total;
}

T_CASE(the_result_does_not_depend_on_threads) {
    built model = fp8(128, 128, "weight_scale_inv", false);
    megamoe_checkpoint *checkpoint = opened(save_model(&model, BLOCK_128));
    megamoe_weights *weights[2];
    for (int i = 0; i < 2; i++) {
        seen s = {.ordered = true};
        megamoe_quantize_options options = MEGAMOE_INIT(megamoe_quantize_options);
        options.format = MEGAMOE_FORMAT_NVFP4;
        options.threads = 1 + 4 * i;
        options.progress = (megamoe_progress){see, &s};
        T_OK(megamoe_checkpoint_quantize(checkpoint, 3, &options, &weights[i]));
        T_CHECK(s.ordered);
        T_EQ_INT((int64_t)s.done, 2 * 3 * WEIGHTS / 16 * 9);
        T_EQ_INT((int64_t)s.total, (int64_t)s.done);
    }
    megamoe_checkpoint_close(checkpoint); /* the weights stay */
    for (int32_t e = 0; e < odd.experts; e++)
        for (int p = 0; p < 3; p++) {
            megamoe_matrix a, b;
            T_OK(megamoe_weights_matrix(weights[0], e, (megamoe_projection)p, &a));
            T_OK(megamoe_weights_matrix(weights[1], e, (megamoe_projection)p, &b));
            T_EQ_F64((double)a.global_scale, (double)b.global_scale);
            T_EQ_MEM(a.codes, b.codes, WEIGHTS / 2);
            T_EQ_MEM(a.scales, b.scales, WEIGHTS / 16);
        }
    megamoe_weights_close(weights[0]);
    megamoe_weights_close(weights[1]);
    built_free(&model);
}

T_CASE(they_are_described_and_refused_by_default) {
    built models[] = {fp8(128, 128, "weight_scale_inv", false), bf16()};
    static const char *const formats[] = {"fp8", "bf16"};
    for (int i = 0; i < 2; i++) {
        const char *path = save_model(&models[i], i == 0 ? BLOCK_128 : NULL);
        megamoe_checkpoint *checkpoint = opened(path);
        megamoe_checkpoint_info info = MEGAMOE_INIT(megamoe_checkpoint_info);
        T_OK(megamoe_checkpoint_describe(checkpoint, &info));
        T_EQ_STR(info.family, formats[i]);
        T_EQ_INT(info.layers, 1);
        megamoe_stored_layer stored = MEGAMOE_INIT(megamoe_stored_layer);
        T_OK(megamoe_checkpoint_stored(checkpoint, 3, &stored));
        T_EQ_STR(stored.format, formats[i]);
        T_CHECK(stored.wide);
        T_EQ_INT(stored.hidden, odd.hidden);
        T_EQ_INT(stored.intermediate, odd.intermediate);
        T_EQ_INT(stored.experts, odd.experts);
        T_EQ_INT(stored.block_rows, i == 0 ? 128 : 0);
        T_EQ_INT(stored.block_columns, i == 0 ? 128 : 0);
        megamoe_checkpoint_close(checkpoint);
        FAILS(try_weights(path, 3), MEGAMOE_EUNSUPPORTED, block, "layer 3",
              "megamoe prepare --quantize mxfp4 or nvfp4", "megamoe_checkpoint_quantize");
        built_free(&models[i]);
    }
}

T_CASE(what_cannot_be_rounded_is_named) {
    char name[160];
    built model = fp8(128, 128, "weight_scale_inv", false);
    built_tensor *up = part_of(&model, 1, MEGAMOE_UP, "weight");
    snprintf(name, sizeof name, "%s", up->name);
    up->data[7 * odd.hidden + 9] = 0xFF;
    FAILS(try_quantize(save_model(&model, BLOCK_128), MEGAMOE_FORMAT_MXFP4), MEGAMOE_EFORMAT, name,
          "row 7, column 9", "nan", "finite");
    part_of(&model, 1, MEGAMOE_UP, "weight")->data[7 * odd.hidden + 9] = 0;
    static const float scales[] = {-1.0f, INFINITY, NAN};
    for (int i = 0; i < 3; i++) {
        memcpy(part_of(&model, 0, MEGAMOE_DOWN, "weight_scale_inv")->data + 4, &scales[i], 4);
        FAILS(try_quantize(save_model(&model, BLOCK_128), MEGAMOE_FORMAT_NVFP4), MEGAMOE_EFORMAT,
              "experts.0.down_proj.weight_scale_inv", "scale [0, 1]", "finite");
    }
    built_free(&model);

    model = fp8(32, 32, "scale", true);
    part_of(&model, 0, MEGAMOE_DOWN, "scale")->data[6] = 255;
    FAILS(try_quantize(save_model(&model, CONFIG("\"weight_block_size\":[32,32]")),
                       MEGAMOE_FORMAT_NVFP4),
          MEGAMOE_EFORMAT, "experts.0.down_proj.scale", "scale [1, 1]");
    built_free(&model);

    model = bf16();
    put_bf16(part_of(&model, 0, MEGAMOE_GATE, "weight"), odd.hidden + 2, -INFINITY);
    FAILS(try_quantize(save_model(&model, NULL), MEGAMOE_FORMAT_NVFP4), MEGAMOE_EFORMAT,
          "experts.0.gate_proj.weight", "row 1, column 2", "-inf");
    built_free(&model);
}

T_CASE(what_is_missing_or_does_not_fit_is_named) {
    static const struct {
        const char *config;
        megamoe_status status;
        const char *says;
    } configs[] = {
        {NULL, MEGAMOE_ENOTFOUND, "weight_block_size"},
        {CONFIG("\"fmt\":\"e4m3\""), MEGAMOE_ENOTFOUND, "weight_block_size"},
        {CONFIG("\"weight_block_size\":128"), MEGAMOE_EFORMAT, "two positive integers"},
        {CONFIG("\"weight_block_size\":[128,0]"), MEGAMOE_EFORMAT, "two positive integers"},
        {CONFIG("\"weight_block_size\":[128,128,1]"), MEGAMOE_EFORMAT, "two positive integers"},
        {CONFIG("\"weight_block_size\":[64,128]"), MEGAMOE_EFORMAT, "[3, 3]"}};
    built model = fp8(128, 128, "weight_scale_inv", false);
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++)
        FAILS(try_quantize(save_model(&model, configs[i].config), MEGAMOE_FORMAT_MXFP4),
              configs[i].status, configs[i].says);
    FAILS(try_quantize(save_model(&model, BLOCK_128), (megamoe_format)3), MEGAMOE_EINVAL,
          "format 3");
    char name[160];
    snprintf(name, sizeof name, "%sexperts.1.up_proj.weight_scale_inv", block);
    built_remove(&model, name);
    FAILS(try_quantize(save_model(&model, BLOCK_128), MEGAMOE_FORMAT_MXFP4), MEGAMOE_EFORMAT, name,
          "missing");
    built_add(&model, "BF16", SHAPE(2, 3), "%s", name);
    FAILS(try_quantize(save_model(&model, BLOCK_128), MEGAMOE_FORMAT_MXFP4), MEGAMOE_EFORMAT, name,
          "BF16", "F8_E8M0");
    built_add(&model, "BF16", SHAPE(160), "%sexperts.1.up_proj.bias", block);
    FAILS(try_quantize(save_model(&model, BLOCK_128), MEGAMOE_FORMAT_MXFP4), MEGAMOE_EUNSUPPORTED,
          "experts.1.up_proj.bias", "unknown");
    built_free(&model);

    /* 4 bits already. */
    model = built_start();
    add_mxfp4(&model, "layers.%d.ffn.", 3, numbered, "scale", odd);
    FAILS(try_quantize(save_model(&model, NULL), MEGAMOE_FORMAT_MXFP4), MEGAMOE_EUNSUPPORTED,
          "4 bits already", "deepseek-v4");
    built_free(&model);
}

/* Scales for a tensor, a row, or in U8 are known, but not read. */
T_CASE(other_fp8_is_refused_with_the_reason) {
    static const struct {
        const char *part, *dtype, *says;
    } others[] = {{"weight_scale", "F32", "one for a tensor or a row"},
                  {"weight_scale_inv", "U8", "MXFP8"}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        built model = built_start();
        for (int p = 0; p < 3; p++) {
            built_add(&model, "F8_E4M3", SHAPE(rows_of(p), columns_of(p)), "%sexperts.0.%s.weight",
                      block, named[p]);
            built_add(&model, others[i].dtype, SHAPE(rows_of(p), columns_of(p) / 32),
                      "%sexperts.0.%s.%s", block, named[p], others[i].part);
        }
        const char *path = save_model(&model, BLOCK_128);
        FAILS(try_weights(path, 3), MEGAMOE_EUNSUPPORTED, "FP8");
        FAILS(try_quantize(path, MEGAMOE_FORMAT_MXFP4), MEGAMOE_EUNSUPPORTED, others[i].says);
        built_free(&model);
    }
}

/* gpt-oss before it was quantized, with experts of their own: biases go along as they are. */
T_CASE(biases_of_gpt_oss_are_kept) {
    built model = bf16();
    for (int32_t e = 0; e < odd.experts; e++)
        for (int p = 0; p < 3; p++)
            randomize(&model,
                      built_add(&model, "BF16", SHAPE(rows_of(p)), "%sexperts.%d.%s.bias", block, e,
                                named[p]),
                      0, 63);
    megamoe_weights *weights =
        quantized(save_model(&model, "{\"model_type\":\"gpt_oss\"}"), MEGAMOE_FORMAT_MXFP4, 0);
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    T_OK(megamoe_weights_describe(weights, &desc));
    T_CHECK(desc.has_bias);
    T_EQ_F64((double)desc.activation.offset, 1);
    for (int p = 0; p < 3; p++) {
        megamoe_matrix matrix;
        T_OK(megamoe_weights_matrix(weights, 1, (megamoe_projection)p, &matrix));
        T_EQ_INT((int64_t)matrix.bias_stride, 2);
        T_EQ_MEM(matrix.bias, part_of(&model, 1, p, "bias")->data, (size_t)rows_of(p) * 2);
    }
    megamoe_weights_close(weights);
    built_free(&model);
}
