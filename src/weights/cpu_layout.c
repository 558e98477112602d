/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/cpu_layout.h"

#include <string.h>

#include "base/memory.h"
#include "weights/tile.h"

size_t mm_tile_bytes(mm_tile_format format, int32_t k) {
    if (format == MM_TILE_E4M3)
        return (size_t)k * MM_TILE_ROWS;
    return (size_t)mm_ceil_div(k, MM_CHUNK_K) * mm_chunk_scale_bytes(format) +
           (size_t)(k / MM_SLICE_K) * MM_SLICE_BYTES;
}

static mm_tile_format tile_format_of(megamoe_format format, megamoe_nvfp4_mode mode) {
    if (format == MEGAMOE_FORMAT_MXFP4)
        return MM_TILE_MXFP4;
    return mode == MEGAMOE_NVFP4_FOLDED ? MM_TILE_E4M3 : MM_TILE_NVFP4;
}

/* Appends a part of `bytes` to the blob and returns where it begins. */
static size_t append(size_t *end, size_t bytes) {
    const size_t offset = mm_round_up(*end, MM_CACHE_LINE);
    *end = offset + bytes;
    return offset;
}

mm_cpu_layout mm_cpu_layout_of(const megamoe_layer_desc *desc, megamoe_nvfp4_mode mode) {
    mm_cpu_layout layout = {
        .format = tile_format_of(desc->format, mode),
        .hidden_k = (int32_t)mm_round_up((size_t)desc->hidden, MM_K_MULTIPLE),
        .intermediate_k = (int32_t)mm_round_up((size_t)desc->intermediate, MM_K_MULTIPLE),
        .fc1_tiles = (int32_t)mm_ceil_div(desc->intermediate, MM_TILE_HALF),
        .fc2_tiles = (int32_t)mm_ceil_div(desc->hidden, MM_TILE_ROWS),
    };
    layout.fc1_tile_bytes = mm_tile_bytes(layout.format, layout.hidden_k);
    layout.fc2_tile_bytes = mm_tile_bytes(layout.format, layout.intermediate_k);
    const size_t fc1_tiles = (size_t)layout.fc1_tiles;
    const size_t fc2_tiles = (size_t)layout.fc2_tiles;
    size_t end = 0;
    layout.fc1_offset = append(&end, fc1_tiles * layout.fc1_tile_bytes);
    layout.fc2_offset = append(&end, fc2_tiles * layout.fc2_tile_bytes);
    layout.fc1_exponents_offset = append(&end, fc1_tiles * MM_TILE_ROWS);
    layout.fc2_exponents_offset = append(&end, fc2_tiles * MM_TILE_ROWS);
    if (desc->has_bias) {
        layout.fc1_bias_offset = append(&end, fc1_tiles * MM_TILE_ROWS * sizeof(float));
        layout.fc2_bias_offset = append(&end, fc2_tiles * MM_TILE_ROWS * sizeof(float));
    }
    layout.globals_offset = append(&end, 4 * sizeof(float));
    layout.blob_bytes = mm_round_up(end, MM_PAGE);
    return layout;
}

mm_cpu_expert mm_cpu_expert_of(const mm_cpu_layout *layout, const uint8_t *blob) {
    mm_cpu_expert expert = {
        .fc1 = blob + layout->fc1_offset,
        .fc2 = blob + layout->fc2_offset,
        .fc1_exponents = (const int8_t *)(blob + layout->fc1_exponents_offset),
        .fc2_exponents = (const int8_t *)(blob + layout->fc2_exponents_offset),
    };
    if (layout->fc1_bias_offset) {
        expert.fc1_bias = (const float *)(const void *)(blob + layout->fc1_bias_offset);
        expert.fc2_bias = (const float *)(const void *)(blob + layout->fc2_bias_offset);
    }
    memcpy(expert.global, blob + layout->globals_offset, sizeof expert.global);
    return expert;
}
