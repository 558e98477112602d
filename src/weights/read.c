/* SPDX-License-Identifier: Apache-2.0 */
/* Rows and matrices as numbers, from either form of weights. */
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "num/e2m1.h"
#include "num/e4m3.h"
#include "weights/cuda_read.h"
#include "weights/hold.h"
#include "weights/object.h"
#include "weights/tile.h"

/* One row in either form. */
struct row {
    megamoe_format format;
    int32_t columns;
    int exponent;
    /* checkpoint form */
    const uint8_t *codes;
    const uint8_t *scales;
    /* prepared; every byte of a tile has a meaning, so any content can be read */
    const uint8_t *tile; /* NULL in checkpoint form */
    mm_tile_format tile_format;
    mm_tile_row place;
};

static struct row row_of(const megamoe_weights *weights, megamoe_nvfp4_mode mode, int32_t expert,
                         megamoe_projection projection, int32_t index) {
    const megamoe_layer_desc *desc = &weights->desc;
    struct row row = {.format = desc->format, .columns = mm_columns(desc, projection)};
    if (weights->matrices) {
        const megamoe_matrix *matrix = mm_matrix_of(weights, expert, projection);
        uint8_t present[MM_MAX_GROUPS];
        row.codes = mm_matrix_codes(matrix, index);
        row.scales = mm_matrix_scales(matrix, index);
        mm_row_present(row.format, row.codes, row.columns, present);
        row.exponent = mm_row_exponent(row.format, mode, row.scales, present,
                                       row.columns / mm_group_size(row.format));
        return row;
    }
    const mm_cpu_layout *layout = &weights->layout;
    const mm_cpu_expert e = mm_cpu_expert_of(layout, mm_weights_blob(weights, expert));
    const bool fc2 = projection == MEGAMOE_DOWN;
    row.place = mm_tile_row_of(projection, index);
    row.tile_format = layout->format;
    row.tile = (fc2 ? e.fc2 : e.fc1) +
               (size_t)row.place.tile * (fc2 ? layout->fc2_tile_bytes : layout->fc1_tile_bytes);
    row.exponent = (fc2 ? e.fc2_exponents : e.fc1_exponents)[mm_tile_row_index(row.place)];
    return row;
}

/* 8 codes of a tile, in ascending k. */
static void unpack_word(const uint8_t *word, uint8_t *codes) {
    for (int i = 0; i < MM_SLICE_K / 2; i++) {
        codes[2 * i] = (uint8_t)(word[i / 2] >> 4 * (i % 2) & 15);
        codes[2 * i + 1] = (uint8_t)(word[2 + i / 2] >> 4 * (i % 2) & 15);
    }
}

static mm_scale tile_scale(mm_tile_format format, uint8_t byte) {
    if (format == MM_TILE_MXFP4)
        return (mm_scale){MM_MXFP4_SCALE_ZERO - MM_MXFP4_BIAS - byte, 0};
    return (mm_scale){MM_NVFP4_SCALE_ZERO - (byte >> 3), byte & 7};
}

/* The codes of a group, one a byte, and its scale after the row exponent. */
static mm_scale read_group(const struct row *row, int32_t group, uint8_t codes[MM_MAX_GROUP]) {
    const int32_t size = mm_group_size(row->format);
    if (row->tile) {
        const int32_t slices = size / MM_SLICE_K;
        for (int32_t i = 0; i < slices; i++)
            unpack_word(row->tile +
                            mm_tile_word_offset(row->tile_format, row->place, group * slices + i),
                        codes + i * MM_SLICE_K);
        return tile_scale(
            row->tile_format,
            row->tile[mm_tile_scale_offset(row->tile_format, row->place, group, size)]);
    }
    const uint8_t *bytes = row->codes + group * (size / 2);
    for (int32_t i = 0; i < size / 2; i++) {
        /* A row has a tile or codes. NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
        codes[2 * i] = bytes[i] & 15;
        codes[2 * i + 1] = bytes[i] >> 4;
    }
    mm_scale scale;
    if (!mm_scale_split(row->format, row->scales[group], &scale))
        memset(codes, 0, (size_t)size);
    scale.exponent -= row->exponent;
    return scale;
}

static void read_folded(const struct row *row, float *values) {
    if (row->tile) {
        for (int32_t k = 0; k < row->columns; k++)
            values[k] = mm_e4m3_to_f32(row->tile[mm_tile_e4m3_offset(row->place, k)]);
        return;
    }
    const int32_t size = mm_group_size(row->format);
    uint8_t codes[MM_MAX_GROUP];
    uint8_t folded[16];
    for (int32_t group = 0; group < row->columns / size; group++) {
        mm_fold_codes(read_group(row, group, codes), folded);
        for (int32_t i = 0; i < size; i++)
            values[group * size + i] = mm_e4m3_to_f32(folded[codes[i]]);
    }
}

/* The operands of a row in the layout of cuda_layout.h. */
static void read_cuda(const megamoe_weights *weights, int32_t expert, megamoe_projection projection,
                      int32_t row, float *high, float *low) {
    const uint8_t *blob = mm_weights_blob(weights, expert);
    const int32_t columns = mm_columns(&weights->desc, projection);
    for (int32_t k = 0; k < columns; k += MM_CUDA_CHUNK_K) {
        float a[MM_CUDA_CHUNK_K];
        float b[MM_CUDA_CHUNK_K];
        mm_cuda_read_chunk(&weights->cuda_layout, weights->decode_table, blob, projection, row,
                           k / MM_CUDA_CHUNK_K, a, b);
        const size_t bytes = (size_t)mm_min(columns - k, MM_CUDA_CHUNK_K) * sizeof *a;
        memcpy(high + k, a, bytes);
        memcpy(low + k, b, bytes);
    }
}

/* The values of such a row. */
static void unpack_cuda(const megamoe_weights *weights, int32_t expert,
                        megamoe_projection projection, int32_t row, double global, double *values) {
    const uint8_t *blob = mm_weights_blob(weights, expert);
    const int32_t columns = mm_columns(&weights->desc, projection);
    const double factor =
        ldexp(global, mm_cuda_read_exponent(&weights->cuda_layout, blob, projection, row));
    for (int32_t chunk = 0; chunk * MM_CUDA_CHUNK_K < columns; chunk++) {
        float high[MM_CUDA_CHUNK_K];
        float low[MM_CUDA_CHUNK_K];
        mm_cuda_read_chunk(&weights->cuda_layout, weights->decode_table, blob, projection, row,
                           chunk, high, low);
        double *to = values + (size_t)chunk * MM_CUDA_CHUNK_K;
        for (int32_t i = 0; i < mm_min(columns - chunk * MM_CUDA_CHUNK_K, MM_CUDA_CHUNK_K); i++)
            to[i] = ((double)high[i] + (double)low[i]) * factor;
    }
}

void mm_weights_row(const megamoe_weights *weights, megamoe_nvfp4_mode mode, int32_t expert,
                    megamoe_projection projection, int32_t row, float *high, float *low,
                    int *row_exponent) {
    const mm_cuda_layout *cuda = mm_weights_cuda_layout(weights);
    if (cuda) {
        read_cuda(weights, expert, projection, row, high, low);
        *row_exponent =
            mm_cuda_read_exponent(cuda, mm_weights_blob(weights, expert), projection, row);
        return;
    }
    mode = mm_weights_nvfp4_mode(weights, mode);
    const struct row r = row_of(weights, mode, expert, projection, row);
    *row_exponent = r.exponent;
    const bool nvfp4 = r.format == MEGAMOE_FORMAT_NVFP4;
    memset(low, 0, (size_t)r.columns * sizeof *low);
    if (nvfp4 && mode == MEGAMOE_NVFP4_FOLDED) {
        read_folded(&r, high);
        return;
    }
    const int32_t size = mm_group_size(r.format);
    uint8_t codes[MM_MAX_GROUP];
    for (int32_t group = 0; group < r.columns / size; group++) {
        const mm_scale scale = read_group(&r, group, codes);
        const float factor = ldexpf(1.0f + (float)scale.eighths / 8.0f, scale.exponent);
        for (int32_t i = 0; i < size; i++) {
            const int32_t k = group * size + i;
            high[k] = (nvfp4 ? mm_e2m1_high(codes[i]) : mm_e2m1_to_f32(codes[i])) * factor;
            if (nvfp4)
                low[k] = mm_e2m1_low(codes[i]) * factor;
        }
    }
}

/* FP64 throughout: E8M0 scales and row exponents together leave the range of FP32. */
static void unpack_row(const struct row *row, double global, double *values) {
    if (row->tile && row->tile_format == MM_TILE_E4M3) {
        const double factor = ldexp(global, row->exponent);
        for (int32_t k = 0; k < row->columns; k++)
            values[k] = mm_e4m3_to_f32(row->tile[mm_tile_e4m3_offset(row->place, k)]) * factor;
        return;
    }
    const int32_t size = mm_group_size(row->format);
    uint8_t codes[MM_MAX_GROUP];
    for (int32_t group = 0; group < row->columns / size; group++) {
        const mm_scale scale = read_group(row, group, codes);
        const double factor =
            ldexp(1.0 + scale.eighths / 8.0, scale.exponent + row->exponent) * global;
        for (int32_t i = 0; i < size; i++)
            values[group * size + i] = mm_e2m1_to_f32(codes[i]) * factor;
    }
}

megamoe_status megamoe_weights_unpack(const megamoe_weights *weights, int32_t expert,
                                      megamoe_projection projection, double *values) {
    if (!weights || !values)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_weights_unpack: an argument is NULL");
    MM_TRY(mm_matrix_check_index(weights, expert, projection));
    MM_TRY(mm_weights_hold(weights, expert));
    const double global = mm_weights_global(weights, expert, projection);
    const size_t columns = (size_t)mm_columns(&weights->desc, projection);
    for (int32_t index = 0; index < mm_rows(&weights->desc, projection); index++) {
        double *to = values + (size_t)index * columns;
        if (mm_weights_cuda_layout(weights)) {
            unpack_cuda(weights, expert, projection, index, global, to);
            continue;
        }
        const struct row row = row_of(weights, MEGAMOE_NVFP4_EXACT, expert, projection, index);
        unpack_row(&row, global, to);
    }
    mm_weights_drop(weights, expert);
    return MEGAMOE_OK;
}
