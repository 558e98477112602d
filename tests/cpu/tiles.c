/* SPDX-License-Identifier: Apache-2.0 */
#include "tiles.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double e2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

static size_t scale_bytes_of(mm_tile_format format) {
    return format == MM_TILE_MXFP4 ? 128 : format == MM_TILE_NVFP4 ? 256 : 0;
}

static size_t code_bytes_of(mm_tile_format format, int32_t k) {
    return (size_t)k * (format == MM_TILE_E4M3 ? 32 : 16);
}

size_t tile_bytes_of(mm_tile_format format, int32_t k) {
    return (size_t)((k + 127) / 128) * scale_bytes_of(format) + code_bytes_of(format, k);
}

float weight_at(mm_tile_format format, const uint8_t *tile, int32_t row, int32_t k) {
    const int32_t half = row / 16, lane = row % 16;
    const uint8_t *chunk =
        tile + (size_t)(k / 128) * (scale_bytes_of(format) + code_bytes_of(format, 128));
    const int32_t in_chunk = k % 128;
    if (format == MM_TILE_E4M3) {
        const uint8_t code = chunk[in_chunk / 2 * 64 + half * 32 + lane * 2 + k % 2];
        const int exponent = code >> 3 & 15, mantissa = code & 7;
        const double value = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
        return (float)(code & 0x80 ? -value : value);
    }
    uint32_t word;
    memcpy(&word, chunk + scale_bytes_of(format) + in_chunk / 8 * 128 + half * 64 + lane * 4, 4);
    const int32_t in_slice = k % 8;
    const unsigned code = word >> (in_slice % 2 * 16 + in_slice / 2 * 4) & 15;
    const double value = code & 8 ? -e2m1[code & 7] : e2m1[code & 7];
    if (format == MM_TILE_MXFP4) {
        const int s = chunk[half * 64 + in_chunk / 32 * 16 + lane];
        return (float)ldexp(value, 125 - s);
    }
    const int s = chunk[half * 128 + in_chunk / 16 * 16 + lane];
    return (float)ldexp(value * (1 + (s & 7) / 8.0), 9 - (s >> 3));
}

void fill_weights(t_random *r, mm_tile_format format, int32_t k, enum spread spread,
                  uint8_t *tile) {
    const size_t bytes = tile_bytes_of(format, k);
    for (size_t i = 0; i < bytes; i++)
        tile[i] = (uint8_t)t_u64(r);
    if (format == MM_TILE_E4M3) {
        for (size_t i = 0; i < bytes; i++)
            if ((tile[i] & 0x7F) == 0x7F)
                tile[i] &= 0xFE;
        return;
    }
    const bool wide = spread != USUAL && t_below(r, 2), zeros = t_below(r, 2);
    const int32_t group_k = format == MM_TILE_MXFP4 ? 32 : 16, groups = 128 / group_k;
    const size_t chunk_bytes = scale_bytes_of(format) + code_bytes_of(format, 128);
    for (int32_t first = 0; first < k; first += group_k) {
        uint8_t *chunk = tile + (size_t)(first / 128) * chunk_bytes;
        for (int32_t row = 0; row < 32; row++) {
            const int32_t group = first % 128 / group_k;
            uint8_t *scale = chunk + (row / 16 * groups + group) * 16 + row % 16;
            if (zeros && t_below(r, 8) == 0) { /* zeros of either sign */
                if (!wide)
                    *scale = 0;
                for (int32_t slice = 0; slice < group_k / 8; slice++)
                    for (int32_t byte = 0; byte < 4; byte++)
                        chunk[scale_bytes_of(format) + (size_t)(group * group_k / 8 + slice) * 128 +
                              (size_t)(row * 4 + byte)] &= 0x88;
            } else if (format == MM_TILE_MXFP4) {
                *scale = (uint8_t)(71 + t_below(r, wide ? 123 : 48));
            }
        }
    }
}

void *need(size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    T_REQUIRE(memory);
    return memory;
}

bool same_float(float a, float b) {
    return (isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof a) == 0;
}
