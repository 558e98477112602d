/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/cpu_pack.h"

#include <assert.h>
#include <string.h>

#include "base/error.h"
#include "weights/hold.h"
#include "weights/object.h"
#include "weights/tile.h"

enum {
    /* Scales after the row exponent that MXFP4 tiles hold. */
    MXFP4_BINADES_MIN = -(MM_MXFP4_BIAS + 68),
    MXFP4_BINADES_MAX = 9,
    NVFP4_BINADES_MIN = -12,
    NVFP4_BINADES_MAX = MM_NVFP4_SCALE_ZERO
};

static const char held[] = "the CPU holds 116 below to 9 above";
_Static_assert(MXFP4_BINADES_MIN == -116 && MXFP4_BINADES_MAX == 9, "the message says so");

/* One row on its way into a tile. */
struct row {
    const uint8_t *codes;
    const uint8_t *scales;
    int32_t groups;
    int exponent;
    mm_tile_row place;
    uint8_t present[MM_MAX_GROUPS];
};

/* Nibbles 0, 2, 4, 6 of a word, side by side. */
static uint32_t even_nibbles(uint32_t word) {
    word &= 0x0F0F0F0Fu;
    word = (word | word >> 4) & 0x00FF00FFu;
    return (word | word >> 8) & 0xFFFFu;
}

/* 8 codes in checkpoint order to the tile's order. */
static void pack_word(const uint8_t *from, uint8_t *to) {
    const uint32_t word = (uint32_t)from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 |
                          (uint32_t)from[3] << 24;
    const uint32_t packed = even_nibbles(word) | even_nibbles(word >> 4) << 16;
    for (int i = 0; i < 4; i++)
        to[i] = (uint8_t)(packed >> 8 * i);
}

static void pack_codes(const struct row *row, mm_tile_format format, int32_t group, int32_t size,
                       uint8_t *tile) {
    const int32_t slices = size / MM_SLICE_K;
    for (int32_t i = 0; i < slices; i++)
        pack_word(row->codes + (group * slices + i) * 4,
                  tile + mm_tile_word_offset(format, row->place, group * slices + i));
}

static bool mxfp4_scale(int binades, uint8_t *byte) {
    if (binades < MXFP4_BINADES_MIN || binades > MXFP4_BINADES_MAX)
        return false;
    *byte = (uint8_t)(MM_MXFP4_SCALE_ZERO - MM_MXFP4_BIAS - binades);
    return true;
}

static uint8_t nvfp4_scale(mm_scale scale) {
    /* The row exponent lies at most 12 above and 9 below the exponent of any E4M3 scale. */
    assert(scale.exponent >= NVFP4_BINADES_MIN && scale.exponent <= NVFP4_BINADES_MAX);
    return (uint8_t)((MM_NVFP4_SCALE_ZERO - scale.exponent) << 3 | scale.eighths);
}

static void pack_folded(const struct row *row, mm_scale scale, int32_t group, int32_t size,
                        uint8_t *tile) {
    uint8_t folded[16];
    mm_fold_codes(scale, folded);
    for (int32_t k = group * size; k < (group + 1) * size; k += 2) {
        const uint8_t codes = row->codes[k / 2];
        uint8_t *pair = tile + mm_tile_e4m3_offset(row->place, k);
        pair[0] = folded[codes & 15];
        pair[1] = folded[codes >> 4];
    }
}

/* Returns false if the group's scale does not fit the tile. Groups of zeros stay zero bytes. */
static bool pack_group(const struct row *row, megamoe_format format, mm_tile_format tile_format,
                       int32_t group, uint8_t *tile, int *binades) {
    mm_scale scale;
    if (row->present[group] <= MM_ONLY_ZEROS || !mm_scale_split(format, row->scales[group], &scale))
        return true;
    const int32_t size = mm_group_size(format);
    scale.exponent -= row->exponent;
    *binades = scale.exponent;
    if (tile_format == MM_TILE_E4M3) {
        pack_folded(row, scale, group, size, tile);
        return true;
    }
    uint8_t *byte = tile + mm_tile_scale_offset(tile_format, row->place, group, size);
    if (tile_format == MM_TILE_NVFP4)
        *byte = nvfp4_scale(scale);
    else if (!mxfp4_scale(scale.exponent, byte))
        return false;
    pack_codes(row, tile_format, group, size, tile);
    return true;
}

/* Where the rows of one projection go. */
struct part {
    uint8_t *tiles;
    size_t tile_bytes;
    uint8_t *exponents;
    uint8_t *biases; /* NULL without biases */
};

static struct part part_of(const mm_cpu_layout *layout, megamoe_projection projection,
                           bool has_bias, uint8_t *blob) {
    if (projection == MEGAMOE_DOWN)
        return (struct part){blob + layout->fc2_offset, layout->fc2_tile_bytes,
                             blob + layout->fc2_exponents_offset,
                             has_bias ? blob + layout->fc2_bias_offset : NULL};
    return (struct part){blob + layout->fc1_offset, layout->fc1_tile_bytes,
                         blob + layout->fc1_exponents_offset,
                         has_bias ? blob + layout->fc1_bias_offset : NULL};
}

/* Gives every group the scale of zeros, which those that hold codes overwrite. */
static void blank_scales(const mm_cpu_layout *layout, const struct part *part, int32_t tiles,
                         int32_t k) {
    const size_t chunk = mm_chunk_bytes(layout->format);
    for (int32_t tile = 0; tile < tiles; tile++)
        for (int32_t c = 0; c * MM_CHUNK_K < k; c++)
            memset(part->tiles + (size_t)tile * part->tile_bytes + (size_t)c * chunk,
                   MM_MXFP4_SCALE_OF_ZEROS, MM_MXFP4_SCALE_BYTES);
}

megamoe_status mm_cpu_pack(const megamoe_weights *weights, const mm_cpu_layout *layout,
                           int32_t expert, uint8_t *blob, mm_inexact *inexact) {
    const megamoe_layer_desc *desc = &weights->desc;
    const megamoe_nvfp4_mode mode =
        layout->format == MM_TILE_E4M3 ? MEGAMOE_NVFP4_FOLDED : MEGAMOE_NVFP4_EXACT;
    MM_TRY(mm_weights_hold(weights, expert));
    for (int p = 0; p < MM_PROJECTIONS; p++) {
        const megamoe_projection projection = (megamoe_projection)p;
        const megamoe_matrix *matrix = mm_matrix_of(weights, expert, projection);
        const struct part part = part_of(layout, projection, desc->has_bias, blob);
        const int32_t columns = mm_columns(desc, projection);
        if (layout->format == MM_TILE_MXFP4 && projection != MEGAMOE_UP) /* gate's tiles are up's */
            blank_scales(layout, &part,
                         projection == MEGAMOE_DOWN ? layout->fc2_tiles : layout->fc1_tiles,
                         columns);
        struct row row = {.groups = columns / mm_group_size(desc->format)};
        for (int32_t index = 0; index < mm_rows(desc, projection); index++) {
            row.codes = mm_matrix_codes(matrix, index);
            row.scales = mm_matrix_scales(matrix, index);
            row.place = mm_tile_row_of(projection, index);
            mm_row_present(desc->format, row.codes, columns, row.present);
            row.exponent = mm_row_exponent(desc->format, mode, row.scales, row.present, row.groups);
            uint8_t *tile = part.tiles + (size_t)row.place.tile * part.tile_bytes;
            for (int32_t group = 0; group < row.groups; group++) {
                int binades;
                if (pack_group(&row, desc->format, layout->format, group, tile, &binades))
                    continue;
                mm_inexact_count(inexact, (mm_inexact){.expert = expert,
                                                       .projection = projection,
                                                       .row = index,
                                                       .block = group,
                                                       .binades = binades,
                                                       .held = held});
            }
            const size_t place = mm_tile_row_index(row.place);
            const int8_t exponent = (int8_t)row.exponent;
            const float bias = mm_weights_bias(weights, expert, projection, index);
            memcpy(part.exponents + place, &exponent, sizeof exponent);
            if (part.biases)
                memcpy(part.biases + place * sizeof bias, &bias, sizeof bias);
        }
        const float global = mm_weights_global(weights, expert, projection);
        memcpy(blob + layout->globals_offset + (size_t)p * sizeof global, &global, sizeof global);
    }
    mm_weights_drop(weights, expert);
    return MEGAMOE_OK;
}

megamoe_status mm_cpu_pack_expert(const megamoe_weights *weights, const mm_cpu_layout *layout,
                                  int32_t expert, uint8_t *blob) {
    mm_inexact inexact = {0};
    MM_TRY(mm_cpu_pack(weights, layout, expert, blob, &inexact));
    return mm_inexact_status(weights, &inexact);
}
