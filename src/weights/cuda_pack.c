/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/cuda_pack.h"

#include <math.h>
#include <string.h>

#include "base/error.h"
#include "num/e2m1.h"
#include "num/e4m3.h"
#include "weights/cuda_tile.h"
#include "weights/hold.h"
#include "weights/object.h"

enum {
    /* Scale exponents, after the row exponent, outside of which nothing is exact in E4M3. */
    EXPONENT_MIN = -12,
    EXPONENT_MAX = 10,
    EXPONENTS = EXPONENT_MAX - EXPONENT_MIN + 1,
    SHIFTS = 7,
    CODES = 8, /* magnitudes */
    NO_CODE = 0xFF
};

/* Codes are stored times 2^shift under a scale times 2^-shift; unshifted where that is exact. */
static const int shifts[SHIFTS] = {0, 1, -1, 2, -2, 3, -3};

/* What a scale becomes under one shift. */
struct form {
    uint8_t byte;
    uint8_t holds; /* the set of code magnitudes whose terms it gives exactly */
};

/* Tables by format, made once for each expert. */
struct packer {
    const mm_cuda_layout *layout;
    megamoe_format format;
    bool round_outside;
    int bytes; /* scale bytes that the decode table has rows for, but not NaN's */
    uint8_t shifted[SHIFTS][CODES];
    struct form forms[EXPONENTS][8][SHIFTS]; /* by the scale after the row exponent */
    float values[128][CODES];                /* by scale byte and code, as they are decoded */
};

/* One row on its way into a tile. */
struct row {
    const uint8_t *codes;
    const uint8_t *scales;
    int32_t groups;
    int exponent;
    uint8_t present[MM_MAX_GROUPS];
};

static void fill_shifted(uint8_t shifted[SHIFTS][CODES]) {
    for (int s = 0; s < SHIFTS; s++)
        for (unsigned code = 0; code < CODES; code++) {
            const float value = ldexpf(mm_e2m1_to_f32(code), shifts[s]);
            const uint8_t nearest = mm_e2m1_from_f32(value);
            shifted[s][code] = mm_e2m1_to_f32(nearest) == value ? nearest : NO_CODE;
        }
}

/* The byte that stands for a scale; false if none does. */
static bool scale_byte(megamoe_format format, mm_scale scale, uint8_t *byte) {
    if (format == MEGAMOE_FORMAT_MXFP4) {
        *byte = (uint8_t)(scale.exponent + MM_CUDA_MXFP4_SCALE_ZERO);
        return scale.exponent >= -MM_CUDA_MXFP4_SCALE_ZERO &&
               scale.exponent <= MM_CUDA_MXFP4_SCALE_MAX - MM_CUDA_MXFP4_SCALE_ZERO;
    }
    const float value = ldexpf(1.0f + (float)scale.eighths / 8.0f, scale.exponent);
    *byte = mm_e4m3_from_f32(value);
    return mm_e4m3_to_f32(*byte) == value;
}

static struct form form_of(const struct packer *p, mm_scale scale, int s) {
    struct form form = {.holds = MM_ONLY_ZEROS};
    scale.exponent -= shifts[s];
    if (!scale_byte(p->format, scale, &form.byte))
        return form;
    const uint8_t exact = mm_exact_magnitudes(p->format, scale);
    for (unsigned code = 1; code < CODES; code++)
        if (p->shifted[s][code] != NO_CODE && exact >> p->shifted[s][code] & 1)
            form.holds |= (uint8_t)(1u << code);
    return form;
}

/* Folding rounds what it has to, so it takes groups as they are; mm_fold_codes says where not. */
static struct form folded_form(mm_scale scale, int s) {
    scale.exponent -= shifts[s];
    const float value = ldexpf(1.0f + (float)scale.eighths / 8.0f, scale.exponent);
    struct form form = {mm_e4m3_from_f32(value), MM_ONLY_ZEROS};
    if (shifts[s] == 0 && value <= MM_E4M3_MAX)
        form.holds = 0xFF;
    if (shifts[s] == 1 && value > MM_E4M3_MAX / 2)
        form.holds = 1 << 1 | MM_ONLY_ZEROS;
    return form;
}

static void fill_values(const struct packer *p, float values[128][CODES]) {
    uint8_t table[MM_CUDA_DECODE_TABLE_BYTES];
    const size_t bytes = mm_cuda_decode_table(p->layout->format, table);
    const bool split = p->layout->format == MM_CUDA_NVFP4_EXACT;
    for (int byte = 0; byte < p->bytes; byte++)
        for (int code = 0; code < CODES; code++) {
            const size_t at = (size_t)(byte * CODES + code);
            values[byte][code] = mm_e4m3_to_f32(table[at]);
            if (split)
                values[byte][code] += mm_e4m3_to_f32(table[bytes / 2 + at]);
        }
}

static void fill_packer(struct packer *p) {
    const bool folded = p->layout->format == MM_CUDA_NVFP4_FOLDED;
    p->bytes = p->format == MEGAMOE_FORMAT_MXFP4 ? MM_CUDA_MXFP4_SCALE_MAX + 1 : MM_E4M3_NAN;
    fill_shifted(p->shifted);
    for (int e = 0; e < EXPONENTS; e++)
        for (int eighths = 0; eighths < 8; eighths++)
            for (int s = 0; s < SHIFTS; s++) {
                const mm_scale scale = {e + EXPONENT_MIN, eighths};
                p->forms[e][eighths][s] = folded ? folded_form(scale, s) : form_of(p, scale, s);
            }
    if (p->round_outside)
        fill_values(p, p->values);
}

/* Spreads 4 nibbles to the even nibbles of a word. */
static uint32_t spread_nibbles(uint32_t nibbles) {
    nibbles = (nibbles | nibbles << 8) & 0x00FF00FFu;
    return (nibbles | nibbles << 4) & 0x0F0F0F0Fu;
}

/* 8 codes in checkpoint order: the magnitudes are in place already, the signs are not. */
static uint32_t word_of(const uint8_t from[4]) {
    const uint32_t word = (uint32_t)from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 |
                          (uint32_t)from[3] << 24;
    const uint32_t signs = word & 0x88888888u;
    return (word & 0x77777777u) | spread_nibbles(signs & 0xFFFFu) << 4 |
           spread_nibbles(signs >> 16);
}

static void pack_codes(const uint8_t *from, int32_t bytes, uint8_t *to) {
    for (int32_t at = 0; at < bytes; at += 4) {
        const uint32_t word = word_of(from + at);
        for (int i = 0; i < 4; i++)
            to[at + i] = (uint8_t)(word >> 8 * i);
    }
}

/* The same with other magnitudes in their place. */
static void pack_mapped(const uint8_t *from, int32_t bytes, const uint8_t map[CODES], uint8_t *to) {
    uint8_t mapped[MM_MAX_GROUP / 2];
    for (int32_t i = 0; i < bytes; i++)
        mapped[i] = (uint8_t)((from[i] & 0x88) | map[from[i] & 7] | map[from[i] >> 4 & 7] << 4);
    pack_codes(mapped, bytes, to);
}

/* The codes that come nearest under a scale byte; returns the largest error of a code. */
static double nearest_codes(const float values[CODES], double scale, uint8_t present,
                            uint8_t codes[CODES]) {
    double largest = 0.0;
    for (unsigned code = 0; code < CODES; code++) {
        double least = INFINITY;
        codes[code] = 0;
        for (unsigned other = 0; (present >> code & 1) && other < CODES; other++) {
            const double error = fabs(values[other] - mm_e2m1_to_f32(code) * scale);
            if (error > least || (error == least && other % 2))
                continue;
            least = error;
            codes[code] = (uint8_t)other;
        }
        if (present >> code & 1)
            largest = fmax(largest, least);
    }
    return largest;
}

/* The scale byte, and the codes under it, whose largest error is the least. */
static uint8_t nearest_form(const struct packer *p, mm_scale scale, uint8_t present,
                            uint8_t codes[CODES]) {
    const double value = ldexp(1.0 + scale.eighths / 8.0, scale.exponent);
    double least = INFINITY;
    uint8_t byte = 0;
    for (int b = 0; b < p->bytes; b++) {
        uint8_t found[CODES];
        const double error = nearest_codes(p->values[b], value, present, found);
        if (error >= least)
            continue;
        least = error;
        byte = (uint8_t)b;
        memcpy(codes, found, CODES);
    }
    return byte;
}

/*
 * Writes a group's scale byte and codes; false if it is outside the window, with its distance.
 * Groups of zeros are blank already.
 */
static bool pack_group(const struct packer *p, const struct row *row, int32_t group, uint8_t *byte,
                       uint8_t *codes, int *binades) {
    const uint8_t present = row->present[group];
    mm_scale scale;
    if (present <= MM_ONLY_ZEROS || !mm_scale_split(p->format, row->scales[group], &scale))
        return true;
    scale.exponent -= row->exponent;
    *binades = scale.exponent;
    const int32_t bytes = mm_group_size(p->format) / 2;
    const uint8_t *from = row->codes + group * bytes;
    if (scale.exponent >= EXPONENT_MIN && scale.exponent <= EXPONENT_MAX) {
        const struct form *forms = p->forms[scale.exponent - EXPONENT_MIN][scale.eighths];
        for (int s = 0; s < SHIFTS; s++) {
            if (present & ~forms[s].holds & ~MM_ONLY_ZEROS)
                continue;
            *byte = forms[s].byte;
            if (s == 0)
                pack_codes(from, bytes, codes);
            else
                pack_mapped(from, bytes, p->shifted[s], codes);
            return true;
        }
    }
    /* Below the window of a row that reaches its top the error is bounded. */
    if (!p->round_outside || scale.exponent >= 0 || row->exponent == -MM_ROW_EXPONENT_MAX)
        return false;
    uint8_t nearest[CODES];
    *byte = nearest_form(p, scale, present, nearest);
    pack_mapped(from, bytes, nearest, codes);
    return true;
}

/* Where the rows of one projection go. */
struct part {
    uint8_t *tiles;
    int32_t n_tiles;
    int32_t chunks; /* of 128 k */
    uint8_t *exponents;
    uint8_t *biases; /* NULL without biases */
};

static struct part part_of(const mm_cuda_layout *l, megamoe_projection projection, uint8_t *blob) {
    if (projection == MEGAMOE_DOWN)
        return (struct part){blob + l->fc2_offset, l->fc2_tiles, l->intermediate_chunks,
                             blob + l->fc2_exponents_offset,
                             l->fc2_bias_offset ? blob + l->fc2_bias_offset : NULL};
    return (struct part){blob + l->fc1_offset, l->fc1_tiles, l->hidden_chunks,
                         blob + l->fc1_exponents_offset,
                         l->fc1_bias_offset ? blob + l->fc1_bias_offset : NULL};
}

/* Gives every group the scale of zeros, which those that hold codes overwrite. */
static void blank_scales(const struct part *part) {
    const size_t chunk_bytes = mm_cuda_chunk_bytes(MM_CUDA_MXFP4);
    const size_t chunks =
        (size_t)part->n_tiles * (size_t)part->chunks * (MM_CUDA_TILE_ROWS / MM_CUDA_CHUNK_ROWS);
    for (size_t c = 0; c < chunks; c++)
        memset(part->tiles + c * chunk_bytes + 2 * (size_t)MM_CUDA_PLANE_BYTES,
               MM_CUDA_MXFP4_SCALE_OF_ZEROS, MM_CUDA_MXFP4_SCALE_BYTES);
}

/* By NVFP4, and by whether rounding has been tried already. */
#define MXFP4_HELD "GPU operands hold 8 below to 6 above, and 3 more where the codes allow it"
#define NVFP4_HELD "GPU operands hold 5 below to 6 above, and more where the codes allow it"
#define ROUNDED "; round_outside_window rounds what is below"
static const char *const held[2][2] = {{MXFP4_HELD ROUNDED, MXFP4_HELD},
                                       {NVFP4_HELD ROUNDED, NVFP4_HELD}};

static void pack_matrix(const struct packer *p, const megamoe_weights *weights, int32_t expert,
                        megamoe_projection projection, const struct part *part,
                        mm_inexact *inexact) {
    const megamoe_matrix *matrix = mm_matrix_of(weights, expert, projection);
    const megamoe_nvfp4_mode mode =
        p->layout->format == MM_CUDA_NVFP4_FOLDED ? MEGAMOE_NVFP4_FOLDED : MEGAMOE_NVFP4_EXACT;
    const int32_t columns = mm_columns(&weights->desc, projection);
    const int32_t group_bytes = mm_group_size(p->format) / 2;
    const int32_t chunk_groups = MM_CUDA_CHUNK_K / mm_group_size(p->format);
    struct row row = {.groups = columns / mm_group_size(p->format)};
    for (int32_t index = 0; index < mm_rows(&weights->desc, projection); index++) {
        row.codes = mm_matrix_codes(matrix, index);
        row.scales = mm_matrix_scales(matrix, index);
        mm_row_present(p->format, row.codes, columns, row.present);
        row.exponent = mm_row_exponent(p->format, mode, row.scales, row.present, row.groups);
        const mm_cuda_row place = mm_cuda_row_of(projection, index);
        const mm_cuda_row_offsets offsets = mm_cuda_row_offsets_of(p->layout->format, place);
        uint8_t *tile =
            part->tiles + (size_t)place.tile * (size_t)part->chunks * p->layout->stage_bytes;
        for (int32_t group = 0; group < row.groups; group++) {
            uint8_t *stage = tile + (size_t)(group / chunk_groups) * p->layout->stage_bytes;
            const int32_t in_chunk = group % chunk_groups;
            int binades;
            if (!pack_group(p, &row, group, stage + offsets.scales + 2 * in_chunk,
                            stage + offsets.codes + in_chunk * group_bytes, &binades))
                mm_inexact_count(
                    inexact,
                    (mm_inexact){.expert = expert,
                                 .projection = projection,
                                 .row = index,
                                 .block = group,
                                 .binades = binades,
                                 .held =
                                     held[p->format == MEGAMOE_FORMAT_NVFP4][p->round_outside]});
        }
        const size_t at = mm_cuda_row_index(place);
        const int8_t exponent = (int8_t)row.exponent;
        memcpy(part->exponents + at, &exponent, sizeof exponent);
        if (part->biases) {
            const float bias = mm_weights_bias(weights, expert, projection, index);
            memcpy(part->biases + at * sizeof bias, &bias, sizeof bias);
        }
    }
}

megamoe_status mm_cuda_pack(const megamoe_weights *weights, const mm_cuda_layout *layout,
                            int32_t expert, uint8_t *blob, bool round_outside,
                            mm_inexact *inexact) {
    MM_TRY(mm_weights_hold(weights, expert));
    struct packer packer = {
        .layout = layout, .format = weights->desc.format, .round_outside = round_outside};
    fill_packer(&packer);
    for (int i = 0; i < MM_PROJECTIONS; i++) {
        const megamoe_projection projection = (megamoe_projection)i;
        const struct part part = part_of(layout, projection, blob);
        if (layout->format == MM_CUDA_MXFP4 && projection != MEGAMOE_UP) /* gate's tiles are up's */
            blank_scales(&part);
        pack_matrix(&packer, weights, expert, projection, &part, inexact);
        const float global = mm_weights_global(weights, expert, projection);
        memcpy(blob + layout->globals_offset + (size_t)i * sizeof global, &global, sizeof global);
    }
    mm_weights_drop(weights, expert);
    return MEGAMOE_OK;
}
