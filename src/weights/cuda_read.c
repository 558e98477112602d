/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/cuda_read.h"

#include <string.h>

#include "num/e4m3.h"
#include "weights/cuda_tile.h"

static float signed_value(uint8_t magnitude, bool negative) {
    const float value = mm_e4m3_to_f32(magnitude);
    return negative ? -value : value;
}

void mm_cuda_read_chunk(const mm_cuda_layout *layout,
                        const uint8_t table[MM_CUDA_DECODE_TABLE_BYTES], const uint8_t *blob,
                        megamoe_projection projection, int32_t row, int32_t chunk,
                        float high[MM_CUDA_CHUNK_K], float low[MM_CUDA_CHUNK_K]) {
    const mm_cuda_row place = mm_cuda_row_of(projection, row);
    const mm_cuda_row_offsets offsets = mm_cuda_row_offsets_of(layout->format, place);
    const bool fc2 = projection == MEGAMOE_DOWN;
    const bool mxfp4 = layout->format == MM_CUDA_MXFP4;
    const size_t chunks = (size_t)(fc2 ? layout->intermediate_chunks : layout->hidden_chunks);
    const uint8_t *stage = blob + (fc2 ? layout->fc2_offset : layout->fc1_offset) +
                           ((size_t)place.tile * chunks + (size_t)chunk) * layout->stage_bytes;
    const uint8_t rows = mxfp4 ? 16 : 128;
    for (int32_t word = 0; word < MM_CUDA_CHUNK_K / 8; word++) {
        const uint8_t *bytes = stage + offsets.codes + 4 * word;
        const uint32_t bits = (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 |
                              (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
        const uint8_t scale = stage[offsets.scales + 2 * (size_t)(word / (mxfp4 ? 4 : 2))];
        const uint8_t *decoded = table + 8 * (scale % rows);
        for (int32_t i = 0; i < 8; i++) {
            const uint32_t magnitude = bits >> 4 * i & 7;
            const bool negative = bits >> (i < 4 ? 8 * i + 7 : 8 * (i - 4) + 3) & 1;
            high[8 * word + i] = signed_value(decoded[magnitude], negative);
            low[8 * word + i] = layout->format == MM_CUDA_NVFP4_EXACT
                                    ? signed_value(decoded[8 * 128 + magnitude], negative)
                                    : 0.0f;
        }
    }
}

int mm_cuda_read_exponent(const mm_cuda_layout *layout, const uint8_t *blob,
                          megamoe_projection projection, int32_t row) {
    const size_t offset =
        projection == MEGAMOE_DOWN ? layout->fc2_exponents_offset : layout->fc1_exponents_offset;
    int8_t exponent;
    memcpy(&exponent, blob + offset + mm_cuda_row_index(mm_cuda_row_of(projection, row)),
           sizeof exponent);
    return exponent;
}

float mm_cuda_read_bias(const mm_cuda_layout *layout, const uint8_t *blob,
                        megamoe_projection projection, int32_t row) {
    const size_t offset =
        projection == MEGAMOE_DOWN ? layout->fc2_bias_offset : layout->fc1_bias_offset;
    float bias;
    memcpy(&bias, blob + offset + mm_cuda_row_index(mm_cuda_row_of(projection, row)) * sizeof bias,
           sizeof bias);
    return bias;
}
