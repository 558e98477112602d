/* SPDX-License-Identifier: Apache-2.0 */
/* The bytes of a packed expert, read front to back as cpu_layout.h describes them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "layer.h"
#include "weights/cpu_layout.h"

struct case_ {
    layer_shape shape;
    megamoe_nvfp4_mode mode;
};

static const struct case_ cases[] = {
    {{MEGAMOE_FORMAT_MXFP4, 128, 256, 2, MEGAMOE_DTYPE_NONE, 110, 135}, 0},
    {{MEGAMOE_FORMAT_MXFP4, 160, 96, 1, MEGAMOE_DTYPE_BF16, 110, 135}, 0},
    {{MEGAMOE_FORMAT_MXFP4, 224, 320, 1, MEGAMOE_DTYPE_F32, 110, 135}, 0},
    {{MEGAMOE_FORMAT_NVFP4, 48, 80, 2, MEGAMOE_DTYPE_NONE, 1, 126}, MEGAMOE_NVFP4_EXACT},
    {{MEGAMOE_FORMAT_NVFP4, 304, 144, 1, MEGAMOE_DTYPE_F32, 1, 126}, MEGAMOE_NVFP4_EXACT},
    {{MEGAMOE_FORMAT_NVFP4, 48, 80, 1, MEGAMOE_DTYPE_BF16, 1, 126}, MEGAMOE_NVFP4_FOLDED},
    {{MEGAMOE_FORMAT_NVFP4, 272, 112, 1, MEGAMOE_DTYPE_F32, 1, 126}, MEGAMOE_NVFP4_FOLDED},
    {{MEGAMOE_FORMAT_MXFP4, 2880, 32, 1, MEGAMOE_DTYPE_BF16, 100, 140}, 0},
    {{MEGAMOE_FORMAT_NVFP4, 16, 2880, 1, MEGAMOE_DTYPE_NONE, 1, 126}, MEGAMOE_NVFP4_EXACT},
};

/* The operand in a tile: code * scale after the row exponent. */
typedef struct operand {
    unsigned code;
    double value;
} operand;

static unsigned code_of_word(const uint8_t word[4], int k) {
    const uint32_t bits = (uint32_t)word[0] | (uint32_t)word[1] << 8 | (uint32_t)word[2] << 16 |
                          (uint32_t)word[3] << 24;
    return bits >> (k % 2 ? 16 + 4 * (k / 2) : 4 * (k / 2)) & 15u;
}

static double operand_scale(mm_tile_format format, uint8_t s) {
    if (format == MM_TILE_MXFP4)
        return ldexp(1.0, 125 - s - 48);
    return ldexp(1.0 + (s & 7) / 8.0, 9 - (s >> 3));
}

/* Reads one tile of k columns into out[32][k]; returns the byte after it. */
static const uint8_t *read_tile(mm_tile_format format, int32_t k, const uint8_t *at, operand *out) {
    if (format == MM_TILE_E4M3) {
        for (int32_t pair = 0; pair < k / 2; pair++)
            for (int32_t row = 0; row < 32; row++)
                for (int32_t i = 0; i < 2; i++) {
                    const uint8_t byte = *at++;
                    out[row * k + 2 * pair + i] = (operand){byte & 0x7F, decode_e4m3(byte)};
                }
        return at;
    }
    const int32_t group = format == MM_TILE_MXFP4 ? 32 : 16;
    for (int32_t first = 0; first < k; first += 128) {
        const uint8_t *scales = at;
        at += 32 * 128 / group;
        for (int32_t slice = first; slice < first + 128 && slice < k; slice += 8)
            for (int32_t row = 0; row < 32; row++, at += 4)
                for (int32_t i = 0; i < 8; i++) {
                    const int32_t half = row / 16;
                    const int32_t place = (half * (128 / group) + (slice - first + i) / group) * 16;
                    const unsigned code = code_of_word(at, i);
                    out[row * k + slice + i] = (operand){
                        code, decode_e2m1(code) * operand_scale(format, scales[place + row % 16])};
                }
    }
    return at;
}

static void check_operands(const struct case_ *c, const test_layer *layer, int32_t expert, bool fc2,
                           const mm_cpu_layout *layout, const mm_cpu_expert *e) {
    const int32_t k_padded = fc2 ? layout->intermediate_k : layout->hidden_k;
    const int32_t tiles = fc2 ? layout->fc2_tiles : layout->fc1_tiles;
    const size_t tile_bytes = fc2 ? layout->fc2_tile_bytes : layout->fc1_tile_bytes;
    const int8_t *exponents = fc2 ? e->fc2_exponents : e->fc1_exponents;
    const float *bias = fc2 ? e->fc2_bias : e->fc1_bias;
    const uint8_t *at = fc2 ? e->fc2 : e->fc1;
    operand *operands = calloc((size_t)k_padded * 32, sizeof *operands);
    T_REQUIRE(operands);
    T_EQ_INT((int64_t)mm_tile_bytes(layout->format, k_padded), (int64_t)tile_bytes);
    T_EQ_INT(k_padded % 32, 0);
    for (int32_t t = 0; t < tiles; t++) {
        const uint8_t *end = read_tile(layout->format, k_padded, at, operands);
        T_EQ_INT(end - at, (int64_t)tile_bytes);
        at = end;
        for (int32_t r = 0; r < 32; r++) {
            const megamoe_projection projection = fc2      ? MEGAMOE_DOWN
                                                  : r < 16 ? MEGAMOE_GATE
                                                           : MEGAMOE_UP;
            const int32_t row = fc2 ? 32 * t + r : 16 * t + r % 16;
            const bool exists = row < layer_rows(layer, projection);
            const int exponent = exponents[32 * t + r];
            T_EQ_INT(exponent,
                     exists ? brute_row_exponent(layer, c->mode, expert, projection, row) : 0);
            if (bias)
                T_EQ_F64(bias[32 * t + r],
                         exists ? layer_bias(layer, expert, projection, row) : 0.0);
            for (int32_t k = 0; k < k_padded; k++) {
                const operand o = operands[r * k_padded + k];
                if (!exists || k >= layer_columns(layer, projection)) {
                    T_EQ_INT(o.code, 0);
                    continue;
                }
                const double wanted = c->mode == MEGAMOE_NVFP4_FOLDED
                                          ? folded_value(layer, expert, projection, row, k)
                                          : layer_value(layer, expert, projection, row, k);
                T_EQ_F64(ldexp(o.value, exponent) * e->global[projection], wanted);
            }
        }
    }
    free(operands);
}

T_CASE(packed_bytes) {
    t_random random = t_random_start(20);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct case_ *c = &cases[i];
        test_layer layer = layer_random(&c->shape, &random);
        megamoe_weights *weights;
        T_OK(megamoe_weights_from_tensors(&layer.desc, layer.matrices, &weights));
        const mm_cpu_layout layout = mm_cpu_layout_of(&layer.desc, c->mode);
        T_EQ_INT((int64_t)(layout.blob_bytes % 4096), 0);
        for (int32_t expert = 0; expert < c->shape.experts; expert++) {
            uint8_t *blob = aligned_alloc(4096, layout.blob_bytes);
            T_REQUIRE(blob);
            memset(blob, 0, layout.blob_bytes);
            T_OK(mm_cpu_pack_expert(weights, &layout, expert, blob));
            const mm_cpu_expert e = mm_cpu_expert_of(&layout, blob);
            T_CHECK((e.fc1_bias != NULL) == (c->shape.bias_dtype != MEGAMOE_DTYPE_NONE));
            check_operands(c, &layer, expert, false, &layout, &e);
            check_operands(c, &layer, expert, true, &layout, &e);
            free(blob);
        }
        megamoe_weights_close(weights);
        layer_free(&layer);
    }
}

/* Parts follow each other without overlap, aligned to 64 bytes, inside the blob. */
T_CASE(parts_of_a_blob) {
    static const int32_t sizes[][2] = {
        {32, 32}, {2880, 2880}, {65536, 65536}, {4096, 48}, {48, 80}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int kind = 0; kind < 6; kind++) {
            const megamoe_layer_desc desc = {.hidden = sizes[i][0],
                                             .intermediate = sizes[i][1],
                                             .experts = 1,
                                             .format = kind / 2 ? MEGAMOE_FORMAT_NVFP4
                                                                : MEGAMOE_FORMAT_MXFP4,
                                             .has_bias = kind % 2};
            const mm_cpu_layout l =
                mm_cpu_layout_of(&desc, kind / 2 == 2 ? MEGAMOE_NVFP4_FOLDED : MEGAMOE_NVFP4_EXACT);
            T_EQ_INT(l.format, kind / 2);
            const size_t rows1 = 32 * (size_t)l.fc1_tiles;
            const size_t rows2 = 32 * (size_t)l.fc2_tiles;
            const size_t offsets[] = {l.fc1_offset,           l.fc2_offset,
                                      l.fc1_exponents_offset, l.fc2_exponents_offset,
                                      l.fc1_bias_offset,      l.fc2_bias_offset,
                                      l.globals_offset};
            const size_t bytes[] = {l.fc1_tiles * l.fc1_tile_bytes,
                                    l.fc2_tiles * l.fc2_tile_bytes,
                                    rows1,
                                    rows2,
                                    rows1 * 4,
                                    rows2 * 4,
                                    16};
            size_t end = 0;
            for (int part = 0; part < 7; part++) {
                if (!desc.has_bias && (part == 4 || part == 5)) {
                    T_EQ_INT((int64_t)offsets[part], 0);
                    continue;
                }
                T_CHECK(offsets[part] % 64 == 0 && offsets[part] >= end);
                end = offsets[part] + bytes[part];
            }
            T_CHECK(end <= l.blob_bytes && l.blob_bytes - end < 4096 && l.blob_bytes % 4096 == 0);
            T_CHECK(16 * l.fc1_tiles >= desc.intermediate && 32 * l.fc2_tiles >= desc.hidden);
        }
}
