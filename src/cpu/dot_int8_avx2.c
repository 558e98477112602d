/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dot kernels of int8 activations for AVX2: 8 rows a register. vpmaddubsw adds two products of a
 * weight plus MM_INT8_OFFSET, at most 24, and an activation; four such sums fit a 16-bit word.
 */
#include <immintrin.h>
#include <string.h>

#include "cpu/dot.h"
#include "cpu/kernels.h"

enum { LANES = 8, MAX_SLICES = MM_K_MULTIPLE / MM_SLICE_K };
_Static_assert(4 * 2 * 2 * MM_INT8_OFFSET * 128 <= INT16_MAX, "sums of four fit a word");

/* As in dot_int8_avx512.c. */
INLINE __m256 load_scales(mm_tile_format format, const uint8_t *bytes) {
    const __m128i s = _mm_loadl_epi64((const __m128i *)bytes);
    if (format == MM_TILE_MXFP4) {
        const __m128i field = _mm_set1_epi8((char)MM_INT8_MXFP4_FIELD);
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_subs_epu8(field, s)), 23));
    }
    const __m256i wide = _mm256_cvtepu8_epi32(s);
    const __m256i mantissa = _mm256_and_si256(wide, _mm256_set1_epi32(7));
    const __m256i one = _mm256_set1_epi32(MM_INT8_NVFP4_FIELD << 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_sub_epi32(one, _mm256_slli_epi32(wide, 20)),
                                                _mm256_slli_epi32(mantissa, 21)));
}

/* The weights of 8 rows in one slice: those of its low and of its high nibbles. */
INLINE void decode_slice(const uint8_t *codes, __m256i w[2]) {
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m256i nibble = _mm256_set1_epi8(0x0F);
    const __m256i both = _mm256_loadu_si256((const __m256i *)codes);
    w[0] = _mm256_shuffle_epi8(table, _mm256_and_si256(both, nibble));
    w[1] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble));
}

/* Two slices, whose sums of products fit words, times the codes of one token. */
INLINE __m256i multiply_slices(__m256i w[2][2], const uint32_t *x, int32_t tokens) {
    __m256i words = _mm256_setzero_si256();
    FOR_UNROLLED (i, 4) {
        const __m256i codes = _mm256_set1_epi32((int)x[i * tokens]);
        const __m256i products = _mm256_maddubs_epi16(w[i / 2][i % 2], codes);
        words = i ? _mm256_add_epi16(words, products) : products;
    }
    return _mm256_madd_epi16(words, _mm256_set1_epi16(1));
}

/* One chunk for the 8 rows from `row` on. */
INLINE void dot_chunk(const mm_tile_format format, const mm_dot *d, const uint8_t *chunk,
                      int32_t chunk_k, const uint32_t *x, const float *chunk_scale, int32_t row,
                      float *out) {
    enum { PAIR = 2 };
    const int slices = group_k(format) / MM_SLICE_K;
    const int32_t tokens = d->tokens, half = row / MM_TILE_HALF;
    const uint8_t *scales = chunk + half * scale_bytes(format) / 2 + row % MM_TILE_HALF;
    const uint8_t *codes = chunk + scale_bytes(format) + row * 4;
    __m256 partial[MM_PANEL_TOKENS];
    for (int32_t t = 0; t < tokens; t++)
        partial[t] = _mm256_setzero_ps();
    for (int32_t group = 0; group < chunk_k; group += group_k(format)) {
        __m256i w[MAX_SLICES][2];
        FOR_UNROLLED (slice, slices)
            decode_slice(codes + slice * MM_SLICE_BYTES, w[slice]);
        const __m256 scale = load_scales(format, scales);
        const uint32_t *first = x + tokens;
        for (int32_t t = 0; t < tokens; t++) {
            __m256i sum = _mm256_set1_epi32((int)x[t]);
            FOR_UNROLLED (pair, slices / PAIR)
                sum = _mm256_add_epi32(
                    sum,
                    multiply_slices(w + PAIR * pair, first + 2 * PAIR * pair * tokens + t, tokens));
            partial[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, partial[t]);
        }
        x += (1 + 2 * slices) * tokens;
        codes += slices * MM_SLICE_BYTES;
        scales += MM_TILE_HALF;
    }
    for (int32_t t = 0; t < tokens; t++) {
        float *to = out + t * MM_TILE_ROWS + row;
        _mm256_storeu_ps(
            to, _mm256_fmadd_ps(partial[t], _mm256_set1_ps(chunk_scale[t]), _mm256_loadu_ps(to)));
    }
}

INLINE void dot(const mm_dot *d, const mm_tile_format format) {
    for (int32_t tile = 0; tile < d->tiles; tile++) {
        const uint8_t *chunk = d->weights + (size_t)tile * d->tile_bytes;
        const uint32_t *x = d->x;
        const float *chunk_scale = d->chunk_scale;
        float *out = d->out + (size_t)tile * (size_t)d->tokens * MM_TILE_ROWS;
        memset(out, 0, (size_t)d->tokens * MM_TILE_ROWS * sizeof *out);
        for (int32_t k = 0; k < d->k; k += MM_CHUNK_K) {
            const int32_t chunk_k = d->k - k < MM_CHUNK_K ? d->k - k : MM_CHUNK_K;
            for (int32_t row = 0; row < MM_TILE_ROWS; row += LANES)
                dot_chunk(format, d, chunk, chunk_k, x, chunk_scale, row, out);
            chunk += scale_bytes(format) + chunk_k / MM_SLICE_K * MM_SLICE_BYTES;
            x += mm_int8_panel_words(chunk_k, group_k(format)) * d->tokens;
            chunk_scale += d->tokens;
        }
    }
}

void mm_dot_mxfp4_int8_avx2(const mm_dot *d) {
    dot(d, MM_TILE_MXFP4);
}

void mm_dot_nvfp4_int8_avx2(const mm_dot *d) {
    dot(d, MM_TILE_NVFP4);
}

void mm_dot_peak_int8_avx2(int64_t rounds, double *flops) {
    enum { CHAINS = 12, FLOPS = 64 };
    __m256i sum[CHAINS];
    FOR_UNROLLED (i, CHAINS)
        sum[i] = _mm256_set1_epi16((short)i); /* equal chains would be merged */
    const __m256i factor = _mm256_set1_epi32((int)rounds);
    for (int64_t round = 0; round < rounds; round++)
        FOR_UNROLLED (i, CHAINS)
            sum[i] = _mm256_add_epi16(sum[i], _mm256_maddubs_epi16(factor, sum[i]));
    __m256i total = _mm256_setzero_si256();
    FOR_UNROLLED (i, CHAINS)
        total = _mm256_add_epi16(total, sum[i]);
    volatile int keep = _mm256_extract_epi32(total, 0);
    (void)keep;
    *flops = (double)rounds * CHAINS * FLOPS;
}
