/* SPDX-License-Identifier: Apache-2.0 */
/* Which groups the GPU's operands hold: all sets of codes at all distances from the row's base. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "layer.h"
#include "weights/cuda_pack.h"
#include "weights/cuda_read.h"

enum { MAX_COLUMNS = 2048 };

static bool in_e4m3(double value) {
    for (int byte = 0; byte < 0x7F; byte++)
        if (decode_e4m3((uint8_t)byte) == fabs(value))
            return true;
    return false;
}

/* One expert, packed apart from any file. */
typedef struct packed {
    mm_cuda_layout layout;
    uint8_t table[MM_CUDA_DECODE_TABLE_BYTES];
    uint8_t *blob;
    mm_inexact inexact;
} packed;

static packed pack(const test_layer *layer, megamoe_nvfp4_mode mode, bool round_outside) {
    megamoe_weights *weights;
    T_OK(megamoe_weights_from_tensors(&layer->desc, layer->matrices, &weights));
    packed p = {.layout = mm_cuda_layout_of(&layer->desc, mode)};
    (void)mm_cuda_decode_table(p.layout.format, p.table);
    p.blob = calloc(1, p.layout.blob_bytes);
    T_REQUIRE(p.blob);
    T_OK(mm_cuda_pack(weights, &p.layout, 0, p.blob, round_outside, &p.inexact));
    megamoe_weights_close(weights);
    return p;
}

/* One row of gate without the global scale. */
static void read_row(const packed *p, int32_t row, double *values) {
    const int exponent = mm_cuda_read_exponent(&p->layout, p->blob, MEGAMOE_GATE, row);
    for (int32_t chunk = 0; chunk < p->layout.hidden_chunks; chunk++) {
        float high[128], low[128];
        mm_cuda_read_chunk(&p->layout, p->table, p->blob, MEGAMOE_GATE, row, chunk, high, low);
        for (int i = 0; i < 128; i++)
            values[128 * chunk + i] = ldexp((double)high[i] + (double)low[i], exponent);
    }
}

static double plain_value(const test_layer *layer, int32_t row, int32_t k) {
    return decode_e2m1(layer_code(layer, 0, MEGAMOE_GATE, row, k)) *
           layer_block_scale(layer, 0, MEGAMOE_GATE, row, k);
}

/*
 * Gate: row r holds, in each group but the first, the codes of set r (bit i: the magnitude of code
 * i + 1, with both signs), under the scale bytes first, first + 1, ... The first group has the code
 * `anchor` under the scale byte `top`.
 */
static test_layer sets_layer(megamoe_format format, int32_t groups, uint8_t first, uint8_t top,
                             uint8_t anchor) {
    const int32_t size = format == MEGAMOE_FORMAT_MXFP4 ? 32 : 16;
    const layer_shape shape = {.format = format,
                               .hidden = size * groups,
                               .intermediate = 128,
                               .experts = 1,
                               .scale_min = 120,
                               .scale_max = 120};
    t_random random = t_random_start(60);
    test_layer sets = layer_random(&shape, &random);
    for (int32_t row = 0; row < 128; row++) {
        uint8_t *codes = layer_codes(&sets, 0, MEGAMOE_GATE, row);
        uint8_t *scales = layer_scales(&sets, 0, MEGAMOE_GATE, row);
        memset(codes, 0, (size_t)(size / 2));
        codes[0] = anchor;
        scales[0] = top;
        for (int32_t g = 1; g < groups; g++) {
            scales[g] = (uint8_t)(first + g - 1);
            for (int32_t i = 0; i < size / 2; i++) {
                const uint8_t code = (uint8_t)(1 + i % 7);
                codes[g * size / 2 + i] = row >> (i % 7) & 1 ? (uint8_t)(code << 4 | 8 | code) : 0;
            }
        }
    }
    return sets;
}

static bool group_is_inside(const test_layer *layer, int32_t row, int32_t group, int32_t size,
                            int exponent) {
    const bool nvfp4 = layer->desc.format == MEGAMOE_FORMAT_NVFP4;
    const int32_t first = group * size;
    const double scale = ldexp(layer_block_scale(layer, 0, MEGAMOE_GATE, row, first), -exponent);
    bool occurs[16] = {false};
    for (int32_t k = first; k < first + size; k++)
        occurs[layer_code(layer, 0, MEGAMOE_GATE, row, k)] = true;
    for (unsigned code = 0; code < 16; code++)
        if (occurs[code] && !(in_e4m3((nvfp4 ? decode_high(code) : decode_e2m1(code)) * scale) &&
                              in_e4m3((nvfp4 ? decode_low(code) : 0) * scale)))
            return false;
    return true;
}

/* Inside: exact. Outside: counted and blank, or rounded by at most `bound` of the row's largest. */
static void check_sets(const test_layer *sets, double bound) {
    const int32_t size = sets->desc.format == MEGAMOE_FORMAT_MXFP4 ? 32 : 16;
    packed kept = pack(sets, MEGAMOE_NVFP4_EXACT, false);
    packed rounded = pack(sets, MEGAMOE_NVFP4_EXACT, true);
    uint64_t outside = 0;
    double largest_error = 0.0;
    double found[MAX_COLUMNS] = {0}, found_rounded[MAX_COLUMNS] = {0};
    for (int32_t row = 0; row < 128; row++) {
        read_row(&kept, row, found);
        read_row(&rounded, row, found_rounded);
        const int exponent = brute_row_exponent(sets, MEGAMOE_NVFP4_EXACT, 0, MEGAMOE_GATE, row);
        T_EQ_INT(mm_cuda_read_exponent(&kept.layout, kept.blob, MEGAMOE_GATE, row), exponent);
        double largest = 0.0;
        for (int32_t k = 0; k < sets->desc.hidden; k++)
            largest = fmax(largest, fabs(plain_value(sets, row, k)));
        for (int32_t g = 0; g < sets->desc.hidden / size; g++) {
            const bool inside = group_is_inside(sets, row, g, size, exponent);
            outside += !inside;
            for (int32_t k = g * size; k < (g + 1) * size; k++) {
                const double wanted = plain_value(sets, row, k);
                T_EQ_F64(found[k], inside ? wanted : 0.0);
                if (inside)
                    T_EQ_F64(found_rounded[k], wanted);
                largest_error = fmax(largest_error, fabs(found_rounded[k] - wanted) / largest);
            }
        }
    }
    T_EQ_INT((int64_t)kept.inexact.groups, (int64_t)outside);
    T_EQ_INT((int64_t)rounded.inexact.groups, 0);
    T_CHECK(outside > 0);
    T_CHECK_MSG(largest_error > 0 && largest_error <= bound, "%a of the row's largest",
                largest_error);
    free(kept.blob);
    free(rounded.blob);
}

T_CASE(mxfp4_sets_of_codes) {
    for (uint8_t anchor = 1; anchor < 8; anchor++) {
        test_layer sets = sets_layer(MEGAMOE_FORMAT_MXFP4, 32, 100, 121, anchor);
        check_sets(&sets, 0x1p-16);
        layer_free(&sets);
    }
}

T_CASE(nvfp4_sets_of_codes) {
    for (uint8_t anchor = 1; anchor < 8; anchor++) {
        test_layer sets = sets_layer(MEGAMOE_FORMAT_NVFP4, 127, 1, 126, anchor);
        check_sets(&sets, 0x1p-15);
        layer_free(&sets);
    }
}

/* Folding takes every group; of one whose scale exceeds 448 the codes are doubled. */
T_CASE(folded_sets_of_codes) {
    for (uint8_t anchor = 1; anchor < 8; anchor += 3) {
        test_layer sets = sets_layer(MEGAMOE_FORMAT_NVFP4, 127, 1, 126, anchor);
        for (int32_t g = 1; anchor == 1 && g < 127; g++)
            layer_scales(&sets, 0, MEGAMOE_GATE, 1)[g] =
                1; /* below the anchor: it is +-0.5 alone */
        packed p = pack(&sets, MEGAMOE_NVFP4_FOLDED, false);
        T_EQ_INT((int64_t)p.inexact.groups, 0);
        const double global = layer_matrix(&sets, 0, MEGAMOE_GATE)->global_scale;
        double found[MAX_COLUMNS] = {0};
        for (int32_t row = 1; row < 128; row += 63) {
            read_row(&p, row, found);
            for (int32_t k = 0; k < sets.desc.hidden; k++)
                T_EQ_F64(found[k] * global, folded_value(&sets, 0, MEGAMOE_GATE, row, k));
        }
        read_row(&p, 1, found);
        if (anchor == 1)
            T_EQ_F64(found[0], 0.5 * 448);
        free(p.blob);
        layer_free(&sets);
    }
}

/* Rows that no exponent of -96..96 brings into the window cannot be rounded within a bound. */
T_CASE(rows_beyond_the_exponents) {
    for (int low = 0; low < 2; low++) {
        test_layer sets = sets_layer(MEGAMOE_FORMAT_MXFP4, 2, 0, 0, 7);
        for (int32_t row = 0; row < 128; row++) {
            uint8_t *scales = layer_scales(&sets, 0, MEGAMOE_GATE, row);
            scales[0] = low ? 0 : 240; /* 2^-127, 2^113 */
            scales[1] = low ? 3 : 120;
        }
        packed p = pack(&sets, MEGAMOE_NVFP4_EXACT, true);
        /* High: the first groups alone. Low: both, but for the second of the row without codes. */
        T_EQ_INT((int64_t)p.inexact.groups, low ? 255 : 128);
        T_EQ_INT(p.inexact.binades, low ? -127 + 96 : 113 - 96);
        free(p.blob);
        layer_free(&sets);
    }
}
