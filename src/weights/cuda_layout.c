/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/cuda_layout.h"

#include <math.h>

#include "base/memory.h"
#include "num/e2m1.h"
#include "num/e4m3.h"
#include "weights/cuda_tile.h"
#include "weights/rows.h"

enum { PART_ALIGNMENT = 1024 };

mm_cuda_format mm_cuda_format_of(megamoe_format format, megamoe_nvfp4_mode mode) {
    if (format == MEGAMOE_FORMAT_MXFP4)
        return MM_CUDA_MXFP4;
    return mode == MEGAMOE_NVFP4_FOLDED ? MM_CUDA_NVFP4_FOLDED : MM_CUDA_NVFP4_EXACT;
}

/* Appends a part of `bytes` to the blob and returns where it begins. */
static size_t append(size_t *end, size_t bytes) {
    const size_t offset = mm_round_up(*end, PART_ALIGNMENT);
    *end = offset + bytes;
    return offset;
}

mm_cuda_layout mm_cuda_layout_of(const megamoe_layer_desc *desc, megamoe_nvfp4_mode mode) {
    mm_cuda_layout layout = {
        .format = mm_cuda_format_of(desc->format, mode),
        .hidden_chunks = (int32_t)mm_ceil_div(desc->hidden, MM_CUDA_CHUNK_K),
        .intermediate_chunks = (int32_t)mm_ceil_div(desc->intermediate, MM_CUDA_CHUNK_K),
        .fc1_tiles = (int32_t)mm_ceil_div(desc->intermediate, MM_CUDA_TILE_CHANNELS),
        .fc2_tiles = (int32_t)mm_ceil_div(desc->hidden, MM_CUDA_TILE_ROWS),
    };
    layout.stage_bytes =
        MM_CUDA_TILE_ROWS / MM_CUDA_CHUNK_ROWS * mm_cuda_chunk_bytes(layout.format);
    const size_t fc1_tiles = (size_t)layout.fc1_tiles;
    const size_t fc2_tiles = (size_t)layout.fc2_tiles;
    const size_t fc1_rows = fc1_tiles * MM_CUDA_TILE_ROWS;
    const size_t fc2_rows = fc2_tiles * MM_CUDA_TILE_ROWS;
    size_t end = 0;
    layout.fc1_offset = append(&end, fc1_tiles * (size_t)layout.hidden_chunks * layout.stage_bytes);
    layout.fc2_offset =
        append(&end, fc2_tiles * (size_t)layout.intermediate_chunks * layout.stage_bytes);
    layout.fc1_exponents_offset = append(&end, fc1_rows);
    layout.fc2_exponents_offset = append(&end, fc2_rows);
    if (desc->has_bias) {
        layout.fc1_bias_offset = append(&end, fc1_rows * sizeof(float));
        layout.fc2_bias_offset = append(&end, fc2_rows * sizeof(float));
    }
    layout.globals_offset = append(&end, 4 * sizeof(float));
    layout.blob_bytes = mm_round_up(end, MM_PAGE);
    return layout;
}

size_t mm_cuda_decode_table(mm_cuda_format format, uint8_t table[MM_CUDA_DECODE_TABLE_BYTES]) {
    const bool mxfp4 = format == MM_CUDA_MXFP4;
    const size_t rows = mxfp4 ? MM_CUDA_MXFP4_SCALE_OF_ZEROS + 1 : 128;
    for (size_t row = 0; row < rows; row++) {
        float scale = mm_e4m3_to_f32((uint8_t)row);
        if (mxfp4)
            scale = row == MM_CUDA_MXFP4_SCALE_OF_ZEROS
                        ? 0.0f
                        : ldexpf(1.0f, (int)row - MM_CUDA_MXFP4_SCALE_ZERO);
        for (unsigned code = 0; code < 8; code++) {
            const bool split = format == MM_CUDA_NVFP4_EXACT;
            const float high = split ? mm_e2m1_high(code) : mm_e2m1_to_f32(code);
            table[row * 8 + code] = mm_e4m3_from_f32(high * scale);
            if (split)
                table[(rows + row) * 8 + code] = mm_e4m3_from_f32(mm_e2m1_low(code) * scale);
        }
    }
    return rows * 8 * (format == MM_CUDA_NVFP4_EXACT ? 2 : 1);
}
