/* SPDX-License-Identifier: Apache-2.0 */
/* The decode tables, and the bytes of a packed expert read lane by lane as cuda_layout.h says. */
#include "weights/cuda_layout.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "layer.h"
#include "num/e2m1.h"
#include "num/e4m3.h"
#include "num/wgmma.h"
#include "weights/cuda_pack.h"
#include "weights/rows.h"

T_CASE(decode_tables) {
    for (int f = 0; f < MM_CUDA_FORMATS; f++) {
        const mm_cuda_format format = (mm_cuda_format)f;
        uint8_t table[MM_CUDA_DECODE_TABLE_BYTES];
        memset(table, 0xEE, sizeof table);
        const size_t bytes = mm_cuda_decode_table(format, table);
        const bool exact = format == MM_CUDA_NVFP4_EXACT;
        const int rows = format == MM_CUDA_MXFP4 ? 16 : 128;
        T_EQ_INT((int64_t)bytes, rows * 8 * (exact ? 2 : 1));
        for (int byte = 0; byte < rows; byte++)
            for (unsigned code = 0; code < 8; code++) {
                const uint8_t high = table[byte * 8 + (int)code];
                const uint8_t low = exact ? table[128 * 8 + byte * 8 + (int)code] : 0;
                if (format != MM_CUDA_MXFP4 && byte == 127) { /* no scale, but read all the same */
                    T_EQ_HEX(high, 0x7F);
                    continue;
                }
                T_CHECK(high < 0x7F && low < 0x7F);
                if (format == MM_CUDA_MXFP4) {
                    const double value = byte == 15 ? 0 : ldexp(decode_e2m1(code), byte - 8);
                    T_EQ_F64(decode_e4m3(high), value);
                    T_EQ_F64(mm_e4m3_to_f32(high), value);
                    continue;
                }
                const double scale = decode_e4m3((uint8_t)byte);
                const double first = exact ? decode_high(code) : decode_e2m1(code);
                T_EQ_F64(decode_e4m3(high), round_to_e4m3(first * scale));
                T_EQ_F64(decode_e4m3(low), exact ? round_to_e4m3(decode_low(code) * scale) : 0);
                mm_scale split;
                if (!mm_scale_split(MEGAMOE_FORMAT_NVFP4, (uint8_t)byte, &split)) {
                    T_EQ_INT(high | low, 0);
                } else if (!exact) {
                    uint8_t folded[16];
                    mm_fold_codes(split, folded);
                    T_EQ_HEX(high, folded[code]);
                } else if (mm_exact_magnitudes(MEGAMOE_FORMAT_NVFP4, split) >> code & 1) {
                    T_EQ_F64(mm_e4m3_to_f32(high) + mm_e4m3_to_f32(low),
                             mm_e2m1_to_f32(code) * scale);
                }
            }
    }
}

T_CASE(places_are_a_permutation_by_steps) {
    bool seen[128] = {false};
    for (int32_t place = 0; place < 128; place++) {
        const int32_t k = mm_cuda_place_k(place);
        T_REQUIRE(k >= 0 && k < 128 && !seen[k]);
        seen[k] = true;
        bool in_step = false;
        for (int32_t i = 0; i < 32; i++)
            in_step = in_step || mm_wgmma_k(place / 32, i) == k;
        T_CHECK_MSG(in_step, "place %d, k %d", place, k);
    }
}

struct case_ {
    layer_shape shape;
    megamoe_nvfp4_mode mode;
};

static const struct case_ cases[] = {
    {{MEGAMOE_FORMAT_MXFP4, 128, 256, 2, MEGAMOE_DTYPE_NONE, 118, 132}, 0},
    {{MEGAMOE_FORMAT_MXFP4, 352, 96, 1, MEGAMOE_DTYPE_BF16, 118, 132}, 0},
    {{MEGAMOE_FORMAT_MXFP4, 544, 288, 1, MEGAMOE_DTYPE_F32, 118, 132}, 0},
    {{MEGAMOE_FORMAT_NVFP4, 48, 80, 2, MEGAMOE_DTYPE_NONE, 40, 126}, MEGAMOE_NVFP4_EXACT},
    {{MEGAMOE_FORMAT_NVFP4, 304, 144, 1, MEGAMOE_DTYPE_F32, 40, 126}, MEGAMOE_NVFP4_EXACT},
    {{MEGAMOE_FORMAT_NVFP4, 48, 80, 1, MEGAMOE_DTYPE_BF16, 1, 126}, MEGAMOE_NVFP4_FOLDED},
    {{MEGAMOE_FORMAT_NVFP4, 272, 400, 1, MEGAMOE_DTYPE_F32, 1, 126}, MEGAMOE_NVFP4_FOLDED},
    {{MEGAMOE_FORMAT_MXFP4, 32, 2880, 1, MEGAMOE_DTYPE_BF16, 118, 132}, 0},
};

/* One multiplier operand, or two terms of it. */
typedef struct operand {
    unsigned code;
    unsigned scale;
    double high, low;
} operand;

static double term(uint8_t magnitude, uint32_t sign) {
    return sign ? -decode_e4m3(magnitude) : decode_e4m3(magnitude);
}

/* The place in `out` [256][k] of what a lane holds in one word. */
static void read_word(mm_cuda_format format, const uint8_t *table, uint32_t word, unsigned scale,
                      operand *out) {
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 4; i++) {
            const unsigned magnitude = word >> (16 * h + 4 * i) & 7;
            const unsigned sign = word >> (h ? 8 * i + 3 : 8 * i + 7) & 1;
            const uint8_t *decoded = table + scale * 8 + magnitude;
            out[4 * h + i] =
                (operand){magnitude | sign << 3, scale, term(decoded[0], sign),
                          format == MM_CUDA_NVFP4_EXACT ? term(decoded[1024], sign) : 0.0};
        }
}

/* Reads the tile [chunks][4] at `at`; returns the byte after it. */
static const uint8_t *read_tile(mm_cuda_format format, int32_t chunks, const uint8_t *at,
                                operand *out) {
    uint8_t table[MM_CUDA_DECODE_TABLE_BYTES];
    (void)mm_cuda_decode_table(format, table);
    const int32_t columns = 128 * chunks;
    for (int32_t chunk = 0; chunk < chunks; chunk++)
        for (int32_t b = 0; b < 4; b++) {
            const uint8_t *scales = at + 4096;
            for (int32_t plane = 0; plane < 2; plane++)
                for (int32_t t = 0; t < 128; t++)
                    for (int32_t j = 0; j < 4; j++) {
                        const int32_t w = t / 32, g = t % 32 / 4, c = t % 4;
                        const int32_t packed = 64 * b + 16 * w + 8 * plane + g;
                        const unsigned scale = format == MM_CUDA_MXFP4
                                                   ? scales[2 * t + plane]
                                                   : scales[4 * t + 2 * (j / 2) + plane];
                        const uint8_t *bytes = at + 2048 * plane + 16 * t + 4 * j;
                        const uint32_t word = (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 |
                                              (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
                        read_word(format, table, word, scale,
                                  out + packed * columns + 128 * chunk + 32 * c + 8 * j);
                    }
            at += 4096 + (format == MM_CUDA_MXFP4 ? 256 : 512);
        }
    return at;
}

/* Which row of the layer stands in packed row R of a tile. */
static int32_t row_of(bool fc2, int32_t tile, int32_t packed, megamoe_projection *projection) {
    const int32_t b = packed / 64, w = packed / 16 % 4, half = packed / 8 % 2, g = packed % 8;
    *projection = fc2 ? MEGAMOE_DOWN : half ? MEGAMOE_UP : MEGAMOE_GATE;
    if (fc2)
        return 256 * tile + 128 * (b / 2) + 32 * w + 8 * (g / 2) + 4 * (b % 2) + 2 * half + g % 2;
    return 128 * tile + mm_cuda_place_k(32 * b + 8 * w + g);
}

static void check_row(const struct case_ *c, const test_layer *layer, int32_t expert,
                      megamoe_projection projection, int32_t row, int32_t columns, int exponent,
                      double global, const operand *operands) {
    const bool exists = row < layer_rows(layer, projection);
    const unsigned blank = layer->desc.format == MEGAMOE_FORMAT_MXFP4 ? 15 : 0;
    T_EQ_INT(exponent, exists ? brute_row_exponent(layer, c->mode, expert, projection, row) : 0);
    for (int32_t k = 0; k < columns; k++) {
        const operand o = operands[k];
        if (!exists || k >= layer_columns(layer, projection)) {
            T_EQ_INT(o.code, 0);
            T_EQ_INT(o.scale, blank);
            continue;
        }
        const unsigned code = layer_code(layer, expert, projection, row, k);
        const double scale = layer_block_scale(layer, expert, projection, row, k);
        if (c->mode == MEGAMOE_NVFP4_FOLDED) {
            T_EQ_F64(ldexp(o.high, exponent) * global,
                     folded_value(layer, expert, projection, row, k));
        } else if (layer->desc.format == MEGAMOE_FORMAT_NVFP4) {
            T_EQ_F64(ldexp(o.high, exponent), decode_high(code) * scale);
            T_EQ_F64(ldexp(o.low, exponent), decode_low(code) * scale);
        } else {
            T_EQ_F64(ldexp(o.high, exponent), decode_e2m1(code) * scale);
        }
    }
}

static void check_tiles(const struct case_ *c, const test_layer *layer, int32_t expert, bool fc2,
                        const mm_cuda_layout *l, const uint8_t *blob) {
    const int32_t tiles = fc2 ? l->fc2_tiles : l->fc1_tiles;
    const int32_t chunks = fc2 ? l->intermediate_chunks : l->hidden_chunks;
    const int8_t *exponents =
        (const int8_t *)(blob + (fc2 ? l->fc2_exponents_offset : l->fc1_exponents_offset));
    const float *biases =
        (const float *)(const void *)(blob + (fc2 ? l->fc2_bias_offset : l->fc1_bias_offset));
    const float *global = (const float *)(const void *)(blob + l->globals_offset);
    const uint8_t *at = blob + (fc2 ? l->fc2_offset : l->fc1_offset);
    operand *operands = calloc((size_t)chunks * 128 * 256, sizeof *operands);
    T_REQUIRE(operands);
    for (int32_t t = 0; t < tiles; t++) {
        const uint8_t *end = read_tile(l->format, chunks, at, operands);
        T_EQ_INT(end - at, (int64_t)l->stage_bytes * chunks);
        at = end;
        for (int32_t packed = 0; packed < 256; packed++) {
            megamoe_projection projection;
            const int32_t row = row_of(fc2, t, packed, &projection);
            check_row(c, layer, expert, projection, row, 128 * chunks, exponents[256 * t + packed],
                      global[projection], operands + packed * 128 * chunks);
            if (layer->desc.has_bias)
                T_EQ_F64(biases[256 * t + packed], row < layer_rows(layer, projection)
                                                       ? layer_bias(layer, expert, projection, row)
                                                       : 0.0);
        }
    }
    free(operands);
}

T_CASE(packed_bytes) {
    t_random random = t_random_start(50);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct case_ *c = &cases[i];
        test_layer layer = layer_random(&c->shape, &random);
        megamoe_weights *weights;
        T_OK(megamoe_weights_from_tensors(&layer.desc, layer.matrices, &weights));
        const mm_cuda_layout layout = mm_cuda_layout_of(&layer.desc, c->mode);
        for (int32_t expert = 0; expert < c->shape.experts; expert++) {
            uint8_t *blob = aligned_alloc(4096, layout.blob_bytes);
            T_REQUIRE(blob);
            memset(blob, 0, layout.blob_bytes);
            mm_inexact inexact = {0};
            T_OK(mm_cuda_pack(weights, &layout, expert, blob, false, &inexact));
            T_EQ_INT((int64_t)inexact.groups, 0);
            for (int p = 0; p < 3; p++) {
                float global;
                memcpy(&global, blob + layout.globals_offset + 4 * (size_t)p, sizeof global);
                T_EQ_F64(global,
                         c->shape.format == MEGAMOE_FORMAT_MXFP4
                             ? 1.0f
                             : layer_matrix(&layer, expert, (megamoe_projection)p)->global_scale);
            }
            check_tiles(c, &layer, expert, false, &layout, blob);
            check_tiles(c, &layer, expert, true, &layout, blob);
            free(blob);
        }
        megamoe_weights_close(weights);
        layer_free(&layer);
    }
}

/* Parts follow each other without overlap, aligned to 1024 bytes, inside the blob. */
T_CASE(parts_of_a_blob) {
    static const int32_t sizes[][2] = {{32, 32},     {2880, 2880}, {65536, 65536},
                                       {4096, 2048}, {48, 80},     {7168, 3072}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int kind = 0; kind < 6; kind++) {
            const megamoe_layer_desc desc = {.hidden = sizes[i][0],
                                             .intermediate = sizes[i][1],
                                             .experts = 1,
                                             .format = kind / 2 ? MEGAMOE_FORMAT_NVFP4
                                                                : MEGAMOE_FORMAT_MXFP4,
                                             .has_bias = kind % 2};
            const mm_cuda_layout l = mm_cuda_layout_of(&desc, kind / 2 == 2 ? MEGAMOE_NVFP4_FOLDED
                                                                            : MEGAMOE_NVFP4_EXACT);
            T_EQ_INT(l.format, kind / 2);
            T_EQ_INT((int64_t)l.stage_bytes, kind / 2 ? 4 * (4096 + 512) : 4 * (4096 + 256));
            T_EQ_INT(l.hidden_chunks, (desc.hidden + 127) / 128);
            T_EQ_INT(l.intermediate_chunks, (desc.intermediate + 127) / 128);
            T_EQ_INT(l.fc1_tiles, (desc.intermediate + 127) / 128);
            T_EQ_INT(l.fc2_tiles, (desc.hidden + 255) / 256);
            const size_t rows1 = 256 * (size_t)l.fc1_tiles;
            const size_t rows2 = 256 * (size_t)l.fc2_tiles;
            const size_t offsets[] = {l.fc1_offset,           l.fc2_offset,
                                      l.fc1_exponents_offset, l.fc2_exponents_offset,
                                      l.fc1_bias_offset,      l.fc2_bias_offset,
                                      l.globals_offset};
            const size_t bytes[] = {(size_t)l.fc1_tiles * (size_t)l.hidden_chunks * l.stage_bytes,
                                    (size_t)l.fc2_tiles * (size_t)l.intermediate_chunks *
                                        l.stage_bytes,
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
                T_CHECK(offsets[part] % 1024 == 0 && offsets[part] >= end &&
                        offsets[part] - end < 1024);
                end = offsets[part] + bytes[part];
            }
            T_CHECK(end <= l.blob_bytes && l.blob_bytes - end < 4096 && l.blob_bytes % 4096 == 0);
        }
}
