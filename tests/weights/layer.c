/* SPDX-License-Identifier: Apache-2.0 */
#include "layer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int32_t layer_rows(const test_layer *layer, megamoe_projection projection) {
    return projection == MEGAMOE_DOWN ? layer->desc.hidden : layer->desc.intermediate;
}

int32_t layer_columns(const test_layer *layer, megamoe_projection projection) {
    return projection == MEGAMOE_DOWN ? layer->desc.intermediate : layer->desc.hidden;
}

static int32_t group_size(const test_layer *layer) {
    return layer->desc.format == MEGAMOE_FORMAT_MXFP4 ? 32 : 16;
}

megamoe_matrix *layer_matrix(const test_layer *layer, int32_t expert,
                             megamoe_projection projection) {
    return &layer->matrices[3 * expert + (int)projection];
}

uint8_t *layer_codes(const test_layer *layer, int32_t expert, megamoe_projection projection,
                     int32_t row) {
    const megamoe_matrix *matrix = layer_matrix(layer, expert, projection);
    return (uint8_t *)(uintptr_t)matrix->codes + (size_t)row * matrix->codes_stride;
}

uint8_t *layer_scales(const test_layer *layer, int32_t expert, megamoe_projection projection,
                      int32_t row) {
    const megamoe_matrix *matrix = layer_matrix(layer, expert, projection);
    return (uint8_t *)(uintptr_t)matrix->scales + (size_t)row * matrix->scales_stride;
}

static void fill_codes(uint8_t *codes, int32_t bytes, t_random *random) {
    const uint32_t kind = t_below(random, 8);
    for (int32_t i = 0; i < bytes; i++)
        switch (kind) {
        case 0: /* zeros of both signs */
            codes[i] = (uint8_t)(t_u64(random) & 0x88);
            break;
        case 1: /* +-0.5 and zero */
            codes[i] = (uint8_t)(t_u64(random) & 0x99);
            break;
        case 2: /* 0, 1, 2, 3: powers of two times 0.5 or 1.5 */
            codes[i] = (uint8_t)(t_u64(random) & 0xBB);
            break;
        case 3: /* 4 and 6 alone */
            codes[i] = (uint8_t)((t_u64(random) & 0x99) | 0x66);
            break;
        default:
            codes[i] = (uint8_t)t_u64(random);
        }
}

static void fill_row(const layer_shape *shape, uint8_t *codes, uint8_t *scales, int32_t columns,
                     t_random *random) {
    const int32_t size = shape->format == MEGAMOE_FORMAT_MXFP4 ? 32 : 16;
    const bool zero_row = t_below(random, 16) == 0;
    for (int32_t g = 0; g < columns / size; g++) {
        fill_codes(codes + g * size / 2, size / 2, random);
        if (zero_row)
            memset(codes + g * size / 2, 0x80, (size_t)size / 2);
        scales[g] =
            (uint8_t)(shape->scale_min + t_below(random, 1u + shape->scale_max - shape->scale_min));
        if (shape->format == MEGAMOE_FORMAT_NVFP4 && t_below(random, 16) == 0)
            scales[g] = 0;
    }
}

static uint8_t *fill_matrix(const layer_shape *shape, int32_t rows, int32_t columns,
                            megamoe_matrix *matrix, t_random *random) {
    const int32_t size = shape->format == MEGAMOE_FORMAT_MXFP4 ? 32 : 16;
    const size_t codes_stride = (size_t)columns / 2 + 3;
    const size_t scales_stride = (size_t)(columns / size) + 1;
    const size_t bias_stride = shape->bias_dtype == MEGAMOE_DTYPE_BF16 ? 4 : 5;
    const size_t n = (size_t)rows;
    uint8_t *memory = malloc(1 + n * (codes_stride + scales_stride + bias_stride));
    T_REQUIRE(memory);
    uint8_t *codes = memory + 1;
    uint8_t *scales = codes + n * codes_stride;
    uint8_t *bias = scales + n * scales_stride;
    memset(memory, 0xFF, 1 + n * (codes_stride + scales_stride + bias_stride));
    for (size_t row = 0; row < n; row++) {
        fill_row(shape, codes + row * codes_stride, scales + row * scales_stride, columns, random);
        const float value = (float)t_normal(random);
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        const uint16_t upper = (uint16_t)(bits >> 16);
        if (shape->bias_dtype == MEGAMOE_DTYPE_BF16)
            memcpy(bias + row * bias_stride, &upper, sizeof upper);
        else
            memcpy(bias + row * bias_stride, &bits, sizeof bits);
    }
    *matrix = (megamoe_matrix){
        .codes = codes,
        .codes_stride = codes_stride,
        .scales = scales,
        .scales_stride = scales_stride,
        .global_scale = shape->format == MEGAMOE_FORMAT_NVFP4 ? (float)exp(t_normal(random)) : 7.0f,
    };
    if (shape->bias_dtype != MEGAMOE_DTYPE_NONE) {
        matrix->bias = bias;
        matrix->bias_dtype = shape->bias_dtype;
        matrix->bias_stride = bias_stride;
    }
    return memory;
}

test_layer layer_random(const layer_shape *shape, t_random *random) {
    test_layer made = {.desc = MEGAMOE_INIT(megamoe_layer_desc)};
    made.desc.layer = 5;
    made.desc.hidden = shape->hidden;
    made.desc.intermediate = shape->intermediate;
    made.desc.experts = shape->experts;
    made.desc.topk = 1;
    made.desc.format = shape->format;
    made.desc.activation = (megamoe_activation){1.702f, 1.0f, 7.0f};
    made.desc.has_bias = shape->bias_dtype != MEGAMOE_DTYPE_NONE;
    const int32_t n = 3 * shape->experts;
    made.matrices = calloc((size_t)n, sizeof *made.matrices);
    made.memory = calloc((size_t)n, sizeof *made.memory);
    T_REQUIRE(made.matrices && made.memory);
    for (int32_t i = 0; i < n; i++) {
        const megamoe_projection projection = (megamoe_projection)(i % 3);
        made.memory[i] = fill_matrix(shape, layer_rows(&made, projection),
                                     layer_columns(&made, projection), &made.matrices[i], random);
    }
    return made;
}

void layer_free(test_layer *layer) {
    for (int32_t i = 0; i < 3 * layer->desc.experts; i++)
        free(layer->memory[i]);
    free(layer->memory);
    free(layer->matrices);
}

double decode_e2m1(unsigned code) {
    const int exponent = (int)(code >> 1 & 3);
    const int mantissa = (int)(code & 1);
    const double magnitude = exponent ? ldexp(1.0 + mantissa / 2.0, exponent - 1) : mantissa / 2.0;
    return code & 8 ? -magnitude : magnitude;
}

double decode_e4m3(uint8_t byte) {
    const int exponent = byte >> 3 & 15;
    const int mantissa = byte & 7;
    const double magnitude = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return byte & 0x80 ? -magnitude : magnitude;
}

double decode_scale(megamoe_format format, uint8_t byte) {
    return format == MEGAMOE_FORMAT_MXFP4 ? ldexp(1.0, byte - 127) : decode_e4m3(byte);
}

double decode_high(unsigned code) {
    static const double terms[8] = {0, .5, 1, 1, 2, 2, 4, 4};
    return code & 8 ? -terms[code & 7] : terms[code & 7];
}

double decode_low(unsigned code) {
    static const double terms[8] = {0, 0, 0, .5, 0, 1, 0, 2};
    return code & 8 ? -terms[code & 7] : terms[code & 7];
}

double round_to_e4m3(double value) {
    int best = 0;
    for (int byte = 1; byte < 0x7F; byte++) {
        const double distance = fabs(fabs(value) - decode_e4m3((uint8_t)byte));
        const double least = fabs(fabs(value) - decode_e4m3((uint8_t)best));
        if (distance < least || (distance == least && byte % 2 == 0))
            best = byte;
    }
    return copysign(decode_e4m3((uint8_t)best), value);
}

unsigned layer_code(const test_layer *layer, int32_t expert, megamoe_projection projection,
                    int32_t row, int32_t k) {
    const uint8_t byte = layer_codes(layer, expert, projection, row)[k / 2];
    return k % 2 ? byte >> 4 : byte & 15u;
}

double layer_block_scale(const test_layer *layer, int32_t expert, megamoe_projection projection,
                         int32_t row, int32_t k) {
    return decode_scale(layer->desc.format,
                        layer_scales(layer, expert, projection, row)[k / group_size(layer)]);
}

static double global_of(const test_layer *layer, int32_t expert, megamoe_projection projection) {
    if (layer->desc.format == MEGAMOE_FORMAT_MXFP4)
        return 1.0;
    return layer_matrix(layer, expert, projection)->global_scale;
}

double layer_value(const test_layer *layer, int32_t expert, megamoe_projection projection,
                   int32_t row, int32_t k) {
    return decode_e2m1(layer_code(layer, expert, projection, row, k)) *
           layer_block_scale(layer, expert, projection, row, k) *
           global_of(layer, expert, projection);
}

double layer_bias(const test_layer *layer, int32_t expert, megamoe_projection projection,
                  int32_t row) {
    const megamoe_matrix *matrix = layer_matrix(layer, expert, projection);
    if (!matrix->bias)
        return 0.0;
    const uint8_t *element = (const uint8_t *)matrix->bias + (size_t)row * matrix->bias_stride;
    uint32_t bits = 0;
    if (matrix->bias_dtype == MEGAMOE_DTYPE_BF16)
        bits = ((uint32_t)element[1] << 8 | element[0]) << 16;
    else
        memcpy(&bits, element, sizeof bits);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

int brute_row_exponent(const test_layer *layer, megamoe_nvfp4_mode mode, int32_t expert,
                       megamoe_projection projection, int32_t row) {
    const bool split = layer->desc.format == MEGAMOE_FORMAT_NVFP4 && mode == MEGAMOE_NVFP4_EXACT;
    double largest = 0.0;
    for (int32_t k = 0; k < layer_columns(layer, projection); k++) {
        const unsigned code = layer_code(layer, expert, projection, row, k);
        const double scale = layer_block_scale(layer, expert, projection, row, k);
        largest = fmax(largest, fabs(split ? decode_high(code) : decode_e2m1(code)) * scale);
        largest = fmax(largest, split ? fabs(decode_low(code)) * scale : 0.0);
    }
    if (largest == 0.0)
        return 0;
    int exponent = -96;
    while (exponent < 96 && ldexp(largest, -exponent) > 448.0)
        exponent++;
    return exponent;
}

double folded_value(const test_layer *layer, int32_t expert, megamoe_projection projection,
                    int32_t row, int32_t k) {
    const int exponent = brute_row_exponent(layer, MEGAMOE_NVFP4_FOLDED, expert, projection, row);
    const double scale = ldexp(layer_block_scale(layer, expert, projection, row, k), -exponent);
    const double code = decode_e2m1(layer_code(layer, expert, projection, row, k));
    const double operand = scale > 448.0 ? round_to_e4m3(2 * code * round_to_e4m3(scale / 2))
                                         : round_to_e4m3(code * round_to_e4m3(scale));
    return ldexp(operand, exponent) * global_of(layer, expert, projection);
}

void check_unpacked(const megamoe_weights *weights, const test_layer *layer, expected_fn expected) {
    const size_t n = (size_t)layer->desc.hidden * (size_t)layer->desc.intermediate;
    double *values = malloc(n * sizeof *values);
    T_REQUIRE(values);
    for (int32_t i = 0; i < 3 * layer->desc.experts; i++) {
        const int32_t expert = i / 3;
        const megamoe_projection projection = (megamoe_projection)(i % 3);
        const int32_t columns = layer_columns(layer, projection);
        for (size_t j = 0; j < n; j++)
            values[j] = NAN;
        T_STATUS(megamoe_weights_unpack(weights, expert, projection, values), MEGAMOE_OK);
        for (int32_t row = 0; row < layer_rows(layer, projection); row++)
            for (int32_t k = 0; k < columns; k++) {
                const double value = values[(size_t)row * (size_t)columns + (size_t)k];
                const double wanted = expected(layer, expert, projection, row, k);
                if (value != wanted)
                    T_CHECK_MSG(false, "expert %d projection %d row %d k %d: %a == %a", expert,
                                (int)projection, row, k, value, wanted);
            }
    }
    free(values);
}
