/* SPDX-License-Identifier: Apache-2.0 */
/* Values: every code under every scale, golden vectors, rows as operands. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "layer.h"
#include "num/e4m3.h"
#include "weights/hold.h"
#include "weights/rows.h"
#include "weights/weights.h"

static megamoe_weights *weights_of(const test_layer *layer) {
    megamoe_weights *weights;
    T_OK(megamoe_weights_from_tensors(&layer->desc, layer->matrices, &weights));
    return weights;
}

/* Row r of gate: all 256 bytes of codes under the scale byte first + r. */
static test_layer all_codes_layer(megamoe_format format, int32_t rows, uint8_t first) {
    const layer_shape shape = {.format = format,
                               .hidden = 512,
                               .intermediate = rows,
                               .experts = 1,
                               .scale_min = 100,
                               .scale_max = 100};
    t_random random = t_random_start(1);
    test_layer all = layer_random(&shape, &random);
    const size_t groups = 512 / (format == MEGAMOE_FORMAT_MXFP4 ? 32 : 16);
    const int last = format == MEGAMOE_FORMAT_MXFP4 ? 254 : 126;
    for (int32_t row = 0; row < rows; row++) {
        uint8_t *codes = layer_codes(&all, 0, MEGAMOE_GATE, row);
        for (int byte = 0; byte < 256; byte++)
            codes[byte] = (uint8_t)byte;
        const int scale = first + row < last ? first + row : last;
        memset(layer_scales(&all, 0, MEGAMOE_GATE, row), scale, groups);
    }
    return all;
}

/* prepare, open, compare; true if the layout holds the layer. */
static bool prepares(const megamoe_weights *weights, megamoe_nvfp4_mode mode,
                     const test_layer *layer, expected_fn expected) {
    megamoe_prepare_options options = MEGAMOE_INIT(megamoe_prepare_options);
    options.nvfp4 = mode;
    options.threads = 2;
    const char *path = t_path("prepared");
    const megamoe_status status = megamoe_weights_prepare(weights, NULL, &options, path);
    if (status == MEGAMOE_EINEXACT)
        return false;
    T_OK(status);
    megamoe_weights *prepared;
    T_OK(megamoe_weights_open(path, &prepared));
    check_unpacked(prepared, layer, expected);
    megamoe_weights_close(prepared);
    return true;
}

T_CASE(nvfp4_every_byte_under_every_scale) {
    test_layer all = all_codes_layer(MEGAMOE_FORMAT_NVFP4, 128, 0);
    megamoe_weights *weights = weights_of(&all);
    check_unpacked(weights, &all, layer_value);
    T_CHECK(prepares(weights, MEGAMOE_NVFP4_EXACT, &all, layer_value));
    T_CHECK(prepares(weights, MEGAMOE_NVFP4_FOLDED, &all, folded_value));
    megamoe_weights_close(weights);
    layer_free(&all);
}

T_CASE(mxfp4_every_byte_under_every_scale) {
    test_layer all = all_codes_layer(MEGAMOE_FORMAT_MXFP4, 256, 0);
    megamoe_weights *weights = weights_of(&all);
    check_unpacked(weights, &all, layer_value);
    megamoe_weights_close(weights);
    layer_free(&all);
}

/* Row exponents end at 96: with code 6 the largest scale that they reach is 2^102, byte 229. */
T_CASE(mxfp4_every_byte_under_every_scale_prepared) {
    test_layer all = all_codes_layer(MEGAMOE_FORMAT_MXFP4, 256, 0);
    for (int32_t row = 230; row < 256; row++)
        memset(layer_scales(&all, 0, MEGAMOE_GATE, row), 229, 16);
    megamoe_weights *weights = weights_of(&all);
    T_CHECK(prepares(weights, MEGAMOE_NVFP4_EXACT, &all, layer_value));
    layer_scales(&all, 0, MEGAMOE_GATE, 255)[15] = 233;
    T_CHECK(!prepares(weights, MEGAMOE_NVFP4_EXACT, &all, layer_value));
    T_CONTAINS(megamoe_last_error(), "expert 0 gate scales: row 255, block 15");
    T_CONTAINS(megamoe_last_error(), "10 binades above");
    T_CONTAINS(megamoe_last_error(), "groups outside: 1");
    megamoe_weights_close(weights);
    layer_free(&all);
}

/* Two groups in a row, the second `below` binades under the first. */
T_CASE(mxfp4_distance_that_tiles_hold) {
    const layer_shape shape = {.format = MEGAMOE_FORMAT_MXFP4,
                               .hidden = 64,
                               .intermediate = 32,
                               .experts = 2,
                               .scale_min = 120,
                               .scale_max = 130};
    t_random random = t_random_start(2);
    test_layer two = layer_random(&shape, &random);
    uint8_t *codes = layer_codes(&two, 1, MEGAMOE_UP, 7);
    uint8_t *scales = layer_scales(&two, 1, MEGAMOE_UP, 7);
    memset(codes, 0x76, 32);
    scales[0] = 200;
    megamoe_weights *weights = weights_of(&two);
    scales[1] = 200 - 122; /* code 7 puts the first at 6 binades, the second at -116 */
    T_CHECK(prepares(weights, MEGAMOE_NVFP4_EXACT, &two, layer_value));
    scales[1] = 200 - 123;
    T_CHECK(!prepares(weights, MEGAMOE_NVFP4_EXACT, &two, layer_value));
    T_CONTAINS(megamoe_last_error(), "expert 1 up scales: row 7, block 1");
    T_CONTAINS(megamoe_last_error(), "117 binades below");
    memset(codes + 16, 0x80, 16); /* zeros need no scale */
    T_CHECK(prepares(weights, MEGAMOE_NVFP4_EXACT, &two, layer_value));
    memset(codes, 0x11, 16); /* 0.5 alone: the first group at 9 binades */
    memset(codes + 16, 0x19, 16);
    scales[1] = 200 - 125;
    T_CHECK(prepares(weights, MEGAMOE_NVFP4_EXACT, &two, layer_value));
    megamoe_weights_close(weights);
    layer_free(&two);
}

T_CASE(real_bytes_of_a_public_checkpoint) {
    static const uint8_t bytes[8] = {0xa0, 0xa8, 0xec, 0x4a, 0xad, 0xaf, 0x42, 0xaa};
    static const double wanted[16] = {
        0,          -0.0078125, 0,         -0.0078125, -0.015625, -0.03125, -0.0078125, 0.015625,
        -0.0234375, -0.0078125, -0.046875, -0.0078125, 0.0078125, 0.015625, -0.0078125, -0.0078125};
    const layer_shape shape = {.format = MEGAMOE_FORMAT_MXFP4,
                               .hidden = 32,
                               .intermediate = 32,
                               .experts = 1,
                               .scale_min = 0x78,
                               .scale_max = 0x78};
    t_random random = t_random_start(3);
    test_layer real = layer_random(&shape, &random);
    memcpy(layer_codes(&real, 0, MEGAMOE_GATE, 0), bytes, sizeof bytes);
    megamoe_weights *weights = weights_of(&real);
    const char *path = t_path("real");
    T_OK(megamoe_weights_prepare(weights, NULL, NULL, path));
    megamoe_weights *prepared;
    T_OK(megamoe_weights_open(path, &prepared));
    double values[32 * 32];
    for (int form = 0; form < 2; form++) {
        T_OK(megamoe_weights_unpack(form ? prepared : weights, 0, MEGAMOE_GATE, values));
        for (int k = 0; k < 16; k++)
            T_EQ_F64(values[k], wanted[k]);
    }
    megamoe_weights_close(prepared);
    megamoe_weights_close(weights);
    layer_free(&real);
}

/* The terms of numerics.md: bounded by 448, smallest exponent, sums exact. */
static void check_row(const megamoe_weights *weights, megamoe_nvfp4_mode mode,
                      const test_layer *layer, int32_t expert, megamoe_projection projection,
                      int32_t row, float *high, float *low) {
    const bool nvfp4 = layer->desc.format == MEGAMOE_FORMAT_NVFP4;
    const bool folded = nvfp4 && mode == MEGAMOE_NVFP4_FOLDED;
    T_OK(mm_weights_hold(weights, expert));
    const double global = mm_weights_global(weights, expert, projection);
    T_EQ_F64(global, nvfp4 ? layer_matrix(layer, expert, projection)->global_scale : 1.0);
    T_EQ_F64(mm_weights_bias(weights, expert, projection, row),
             layer_bias(layer, expert, projection, row));
    int exponent;
    mm_weights_row(weights, mode, expert, projection, row, high, low, &exponent);
    mm_weights_drop(weights, expert);
    T_EQ_INT(exponent, brute_row_exponent(layer, mode, expert, projection, row));
    for (int32_t k = 0; k < layer_columns(layer, projection); k++) {
        const unsigned code = layer_code(layer, expert, projection, row, k);
        const double scale = ldexp(layer_block_scale(layer, expert, projection, row, k), -exponent);
        const double value = folded ? folded_value(layer, expert, projection, row, k)
                                    : layer_value(layer, expert, projection, row, k);
        T_EQ_F64(ldexp((double)high[k] + low[k], exponent) * global, value);
        T_EQ_F64(low[k], nvfp4 && !folded ? decode_low(code) * scale : 0.0);
        T_CHECK(fabsf(high[k]) <= 448.0f && fabsf(low[k]) <= 448.0f);
    }
}

static void check_rows(const layer_shape *shape, const char *device, megamoe_nvfp4_mode mode,
                       t_random *random) {
    test_layer random_layer = layer_random(shape, random);
    megamoe_weights *weights = weights_of(&random_layer);
    megamoe_prepare_options options = MEGAMOE_INIT(megamoe_prepare_options);
    options.device = device;
    options.nvfp4 = mode;
    options.threads = 1;
    const char *path = t_path("rows");
    T_OK(megamoe_weights_prepare(weights, NULL, &options, path));
    megamoe_weights *prepared;
    T_OK(megamoe_weights_open(path, &prepared));
    const size_t columns =
        (size_t)(shape->hidden > shape->intermediate ? shape->hidden : shape->intermediate);
    float *high = malloc(columns * sizeof *high);
    float *low = malloc(columns * sizeof *low);
    T_REQUIRE(high && low);
    for (int32_t i = 0; i < 3 * shape->experts; i++)
        for (int32_t row = 0; row < layer_rows(&random_layer, (megamoe_projection)(i % 3)); row++) {
            check_row(weights, mode, &random_layer, i / 3, (megamoe_projection)(i % 3), row, high,
                      low);
            check_row(prepared, mode, &random_layer, i / 3, (megamoe_projection)(i % 3), row, high,
                      low);
        }
    free(high);
    free(low);
    megamoe_weights_close(prepared);
    megamoe_weights_close(weights);
    layer_free(&random_layer);
}

T_CASE(rows_as_operands) {
    static const layer_shape shapes[] = {
        {MEGAMOE_FORMAT_MXFP4, 96, 32, 3, MEGAMOE_DTYPE_BF16, 118, 130},
        {MEGAMOE_FORMAT_MXFP4, 32, 288, 2, MEGAMOE_DTYPE_F32, 110, 140},
        {MEGAMOE_FORMAT_MXFP4, 64, 64, 2, MEGAMOE_DTYPE_NONE, 0, 40},
        {MEGAMOE_FORMAT_NVFP4, 48, 80, 2, MEGAMOE_DTYPE_F32, 1, 126},
        {MEGAMOE_FORMAT_NVFP4, 16, 208, 3, MEGAMOE_DTYPE_NONE, 1, 20},
        {MEGAMOE_FORMAT_NVFP4, 144, 16, 2, MEGAMOE_DTYPE_BF16, 90, 126},
    };
    t_random random = t_random_start(4);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_rows(&shapes[i], "cpu", MEGAMOE_NVFP4_EXACT, &random);
        if (shapes[i].format != MEGAMOE_FORMAT_NVFP4)
            continue;
        check_rows(&shapes[i], "cpu", MEGAMOE_NVFP4_FOLDED, &random);
        check_rows(&shapes[i], "cuda", MEGAMOE_NVFP4_FOLDED, &random);
    }
}

/* The scales of a row lie close enough for the GPU's operands. */
T_CASE(rows_as_operands_of_the_gpu) {
    static const layer_shape shapes[] = {
        {MEGAMOE_FORMAT_MXFP4, 96, 288, 3, MEGAMOE_DTYPE_BF16, 118, 132},
        {MEGAMOE_FORMAT_MXFP4, 416, 64, 2, MEGAMOE_DTYPE_NONE, 200, 214},
        {MEGAMOE_FORMAT_MXFP4, 32, 160, 2, MEGAMOE_DTYPE_F32, 40, 54},
        {MEGAMOE_FORMAT_NVFP4, 48, 80, 2, MEGAMOE_DTYPE_F32, 40, 126},
        {MEGAMOE_FORMAT_NVFP4, 272, 144, 2, MEGAMOE_DTYPE_NONE, 1, 70},
    };
    t_random random = t_random_start(5);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check_rows(&shapes[i], "cuda", MEGAMOE_NVFP4_EXACT, &random);
}

T_CASE(row_exponents_end_at_96) {
    static const uint8_t codes[16] = {0x07};
    uint8_t present[1];
    for (int byte = 0; byte < 255; byte++) {
        const uint8_t scale = (uint8_t)byte;
        mm_row_present(MEGAMOE_FORMAT_MXFP4, codes, 32, present);
        T_EQ_INT(present[0], 1 << 7 | 1);
        const int wanted = byte - 127 - 6;
        T_EQ_INT(mm_row_exponent(MEGAMOE_FORMAT_MXFP4, MEGAMOE_NVFP4_EXACT, &scale, present, 1),
                 wanted < -96  ? -96
                 : wanted > 96 ? 96
                               : wanted);
    }
}

/* The scale bytes of NVFP4 tiles need every difference to lie in -12..9. */
T_CASE(nvfp4_scales_under_any_row_exponent) {
    int least = 0;
    int most = 0;
    for (int row = 1; row < 127; row++)
        for (int code = 1; code < 8; code++)
            for (int mode = 0; mode < 2; mode++) {
                const uint8_t scale_byte = (uint8_t)row;
                const uint8_t present = (uint8_t)(1 << code);
                const int exponent = mm_row_exponent(MEGAMOE_FORMAT_NVFP4, (megamoe_nvfp4_mode)mode,
                                                     &scale_byte, &present, 1);
                /* Another group can have any scale whose own exponent is not larger. */
                for (int other = 1; other < 127; other++) {
                    mm_scale scale;
                    T_CHECK(mm_scale_split(MEGAMOE_FORMAT_NVFP4, (uint8_t)other, &scale));
                    T_EQ_F64(ldexp(1.0 + scale.eighths / 8.0, scale.exponent),
                             decode_e4m3((uint8_t)other));
                    if (decode_e4m3((uint8_t)other) * 0.5 > ldexp(448.0, exponent))
                        continue;
                    least = scale.exponent - exponent < least ? scale.exponent - exponent : least;
                    most = scale.exponent - exponent > most ? scale.exponent - exponent : most;
                }
            }
    T_EQ_INT(least, -12);
    T_EQ_INT(most, 9);
}

T_CASE(terms_of_nvfp4_codes) {
    for (unsigned code = 0; code < 16; code++) {
        T_EQ_F64(mm_e2m1_high(code), decode_high(code));
        T_EQ_F64(mm_e2m1_low(code), decode_low(code));
        T_EQ_F64(mm_e2m1_high(code) + mm_e2m1_low(code), decode_e2m1(code));
    }
}
