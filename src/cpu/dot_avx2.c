/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dot kernels for AVX2, FMA and F16C: 8 rows a register, two fma for a pair of k, the odd one
 * first.
 */
#include <immintrin.h>
#include <string.h>

#include "cpu/dot.h"
#include "cpu/kernels.h"

enum { LANES = 8, MAX_BLOCKS = MM_TILE_ROWS / LANES };

/* A chunk of the panel in FP32: [pair][token]. */
struct chunk_x {
    uint32_t even[MM_CHUNK_K / 2 * MM_PANEL_TOKENS];
    uint32_t odd[MM_CHUNK_K / 2 * MM_PANEL_TOKENS];
};

INLINE __m256i load(const void *p) {
    return _mm256_loadu_si256((const __m256i *)p);
}

/* The scales of 8 rows. Bytes beyond the exponent's range, of groups of zeros, give zero. */
INLINE __m256 load_scale(mm_tile_format format, const uint8_t *bytes) {
    const __m256i s = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
    if (format == MM_TILE_MXFP4) {
        const __m256i field = _mm256_sub_epi32(_mm256_set1_epi32(127 + MM_MXFP4_SCALE_ZERO), s);
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_max_epi32(field, _mm256_setzero_si256()), 23));
    }
    /* s << 20 holds s >> 3 at the exponent's place and the mantissa, which has to be added. */
    const __m256i mantissa = _mm256_and_si256(s, _mm256_set1_epi32(7));
    const __m256i one = _mm256_set1_epi32((127 + MM_NVFP4_SCALE_ZERO) << 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_sub_epi32(one, _mm256_slli_epi32(s, 20)),
                                                _mm256_slli_epi32(mantissa, 21)));
}

/* A pair of BF16 in each lane, times scale. */
INLINE void scale_pair(__m256i pair, __m256 scale, __m256 w[2]) {
    const __m256i even = _mm256_slli_epi32(pair, 16);
    const __m256i odd = _mm256_and_si256(pair, _mm256_set1_epi32((int)0xFFFF0000u));
    w[0] = _mm256_mul_ps(_mm256_castsi256_ps(even), scale);
    w[1] = _mm256_mul_ps(_mm256_castsi256_ps(odd), scale);
}

/*
 * 8 k of 8 rows. The low nibbles of a row's four bytes are k = 0, 4, 1, 5, the high ones
 * k = 2, 6, 3, 7. Two shuffles look up the upper and the lower bytes of their BF16.
 */
INLINE void decode_codes(const uint8_t *codes, __m256 scale, __m256 w[MM_SLICE_K]) {
    const __m256i upper_bytes = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0x00, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, (char)0x80, (char)0xBF,
                      (char)0xBF, (char)0xBF, (char)0xC0, (char)0xC0, (char)0xC0, (char)0xC0));
    const __m256i lower_bytes = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0x00, 0x00, (char)0x80, (char)0xC0, 0x00, 0x40, (char)0x80, (char)0xC0, 0x00,
                      0x00, (char)0x80, (char)0xC0, 0x00, 0x40, (char)0x80, (char)0xC0));
    const __m256i nibble = _mm256_set1_epi8(0x0F);
    const __m256i low_byte = _mm256_set1_epi16(0x00FF);
    const __m256i both = load(codes);
    FOR_UNROLLED (high, 2) {
        const __m256i code = _mm256_and_si256(high ? _mm256_srli_epi16(both, 4) : both, nibble);
        const __m256i upper = _mm256_shuffle_epi8(upper_bytes, code);
        const __m256i lower = _mm256_shuffle_epi8(lower_bytes, code);
        scale_pair(_mm256_or_si256(_mm256_slli_epi16(upper, 8), _mm256_and_si256(lower, low_byte)),
                   scale, w + 2 * high);
        scale_pair(
            _mm256_or_si256(_mm256_andnot_si256(low_byte, upper), _mm256_srli_epi16(lower, 8)),
            scale, w + 2 * high + 4);
    }
}

/* 8 words that hold an E4M3 code in their upper byte. As FP16 its fields mean 2^-8 of its value. */
INLINE __m256 e4m3_to_f32(__m128i words) {
    const __m128i half = _mm_and_si128(_mm_srai_epi16(words, 1), _mm_set1_epi16((short)0xBF80));
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(0x1p8f));
}

/* 8 k of 8 rows of a tile of E4M3 codes: 16 bytes for each pair of k. */
INLINE void decode_e4m3(const uint8_t *codes, __m256 w[MM_SLICE_K]) {
    FOR_UNROLLED (pair, MM_SLICE_K / 2) {
        const __m128i both = _mm_loadu_si128((const __m128i *)(codes + pair * 2 * MM_TILE_ROWS));
        w[2 * pair] = e4m3_to_f32(_mm_slli_epi16(both, 8));
        w[2 * pair + 1] = e4m3_to_f32(both);
    }
}

INLINE void decode_slice(mm_tile_format format, const uint8_t *codes, __m256 scale,
                         __m256 w[MM_SLICE_K]) {
    if (format == MM_TILE_E4M3)
        decode_e4m3(codes, w);
    else
        decode_codes(codes, scale, w);
}

INLINE __m256 splat(uint32_t bits) {
    return _mm256_castsi256_ps(_mm256_set1_epi32((int)bits));
}

/* The scales, in one group, of the 8 rows from `row` on. */
INLINE __m256 group_scale(mm_tile_format format, const uint8_t *scales, int32_t row) {
    const int32_t half = row / MM_TILE_HALF;
    return load_scale(format, scales + half * scale_bytes(format) / 2 + row % MM_TILE_HALF);
}

/* Adds the products of column k of w with the FP32 at x, one for each token. */
INLINE void add_products(const int blocks, const int tokens, const int k,
                         __m256 w[MAX_BLOCKS][MM_SLICE_K], const uint32_t *x,
                         __m256 sum[MM_PANEL_TOKENS][MAX_BLOCKS]) {
    __m256 column[MAX_BLOCKS];
    FOR_UNROLLED (b, blocks) {
        column[b] = w[b][k];
        /* In a register: from the stack it would cost a load for every token. */
        if (tokens > 1)
            __asm__("" : "+x"(column[b]));
    }
    FOR_UNROLLED (t, tokens) {
        const __m256 xt = splat(x[t]);
        FOR_UNROLLED (b, blocks)
            sum[t][b] = _mm256_fmadd_ps(xt, column[b], sum[t][b]);
    }
}

/* Adds the products of one chunk to the sums of the 8 * blocks rows from `row` on. */
INLINE void add_chunk(const mm_tile_format format, const int blocks, const int tokens,
                      const uint8_t *chunk, int32_t chunk_k, int32_t row, const struct chunk_x *x,
                      __m256 sum[MM_PANEL_TOKENS][MAX_BLOCKS]) {
    const int32_t code_bytes = format == MM_TILE_E4M3 ? 2 : 4; /* of a row in a slice or pair */
    const uint8_t *scales = chunk;
    const uint8_t *codes = chunk + scale_bytes(format) + row * code_bytes;
    const uint32_t *even = x->even, *odd = x->odd;
    for (int32_t group = 0; group < chunk_k; group += group_k(format)) {
        __m256 scale[MAX_BLOCKS] = {0};
        if (format != MM_TILE_E4M3)
            FOR_UNROLLED (b, blocks)
                scale[b] = group_scale(format, scales, row + b * LANES);
        scales += MM_TILE_HALF;
        for (int32_t slice = 0; slice < group_k(format); slice += MM_SLICE_K) {
            __m256 w[MAX_BLOCKS][MM_SLICE_K];
            FOR_UNROLLED (b, blocks)
                decode_slice(format, codes + b * LANES * code_bytes, scale[b], w[b]);
            FOR_UNROLLED (pair, MM_SLICE_K / 2) {
                add_products(blocks, tokens, 2 * pair + 1, w, odd + pair * tokens, sum);
                add_products(blocks, tokens, 2 * pair, w, even + pair * tokens, sum);
            }
            even += MM_SLICE_K / 2 * tokens;
            odd += MM_SLICE_K / 2 * tokens;
            codes += slice_bytes(format);
        }
    }
}

/* One chunk for all rows of a tile. Fewer tokens take more rows at once, so that there are
 * sums enough to keep the processor busy and few enough for its registers. */
INLINE void dot_chunk(const mm_tile_format format, const int blocks, const int tokens,
                      const uint8_t *chunk, int32_t chunk_k, const struct chunk_x *x,
                      const float *chunk_scale, float *out) {
    for (int32_t row = 0; row < MM_TILE_ROWS; row += blocks * LANES) {
        __m256 sum[MM_PANEL_TOKENS][MAX_BLOCKS];
        FOR_UNROLLED (t, tokens)
            FOR_UNROLLED (b, blocks)
                sum[t][b] = chunk_scale ? _mm256_setzero_ps()
                                        : _mm256_loadu_ps(out + t * MM_TILE_ROWS + row + b * LANES);
        add_chunk(format, blocks, tokens, chunk, chunk_k, row, x, sum);
        FOR_UNROLLED (t, tokens)
            FOR_UNROLLED (b, blocks) {
                float *to = out + t * MM_TILE_ROWS + row + b * LANES;
                const __m256 total =
                    chunk_scale ? _mm256_fmadd_ps(sum[t][b], _mm256_set1_ps(chunk_scale[t]),
                                                  _mm256_loadu_ps(to))
                                : sum[t][b];
                _mm256_storeu_ps(to, total);
            }
    }
}

static void expand_x(const uint32_t *x, int32_t n, struct chunk_x *to) {
    for (int32_t i = 0; i < n; i++) {
        to->even[i] = x[i] << 16;
        to->odd[i] = x[i] & 0xFFFF0000u;
    }
}

INLINE void dot_tiles(const mm_dot *d, const mm_tile_format format, const int blocks,
                      const int tokens) {
    for (int32_t tile = 0; tile < d->tiles; tile++) {
        const uint8_t *chunk = d->weights + (size_t)tile * d->tile_bytes;
        float *out = d->out + tile * tokens * MM_TILE_ROWS;
        memset(out, 0, (size_t)tokens * MM_TILE_ROWS * sizeof *out);
        for (int32_t k = 0; k < d->k; k += MM_CHUNK_K) {
            const int32_t chunk_k = d->k - k < MM_CHUNK_K ? d->k - k : MM_CHUNK_K;
            const float *chunk_scale =
                d->chunk_scale ? d->chunk_scale + k / MM_CHUNK_K * tokens : NULL;
            struct chunk_x x;
            expand_x(d->x + k / 2 * tokens, chunk_k / 2 * tokens, &x);
            dot_chunk(format, blocks, tokens, chunk, chunk_k, &x, chunk_scale, out);
            chunk += scale_bytes(format) + chunk_k / MM_SLICE_K * slice_bytes(format);
        }
    }
}

INLINE void dot(const mm_dot *d, const mm_tile_format format) {
    switch (d->tokens) {
    case 1:
        dot_tiles(d, format, 4, 1);
        break;
    case 2:
        dot_tiles(d, format, 2, 2);
        break;
    case 3:
        dot_tiles(d, format, 2, 3);
        break;
    case 4:
        dot_tiles(d, format, 2, 4);
        break;
    case 5:
        dot_tiles(d, format, 2, 5);
        break;
    case 6:
        dot_tiles(d, format, 2, 6);
        break;
    case 7:
        dot_tiles(d, format, 1, 7);
        break;
    case 8:
        dot_tiles(d, format, 1, 8);
        break;
    case 9:
        dot_tiles(d, format, 1, 9);
        break;
    case 10:
        dot_tiles(d, format, 1, 10);
        break;
    case 11:
        dot_tiles(d, format, 1, 11);
        break;
    case 12:
        dot_tiles(d, format, 1, 12);
        break;
    }
}

void mm_dot_mxfp4_avx2(const mm_dot *d) {
    dot(d, MM_TILE_MXFP4);
}

void mm_dot_nvfp4_avx2(const mm_dot *d) {
    dot(d, MM_TILE_NVFP4);
}

void mm_dot_e4m3_avx2(const mm_dot *d) {
    dot(d, MM_TILE_E4M3);
}

void mm_dot_peak_avx2(int64_t rounds, double *flops) {
    enum { CHAINS = 12, FLOPS = 2 * LANES };
    __m256 sum[CHAINS];
    FOR_UNROLLED (i, CHAINS)
        sum[i] = _mm256_set1_ps((float)i); /* equal chains would be merged */
    const __m256 factor = _mm256_set1_ps(1.0f / (float)rounds);
    for (int64_t round = 0; round < rounds; round++)
        FOR_UNROLLED (i, CHAINS)
            sum[i] = _mm256_fmadd_ps(factor, factor, sum[i]);
    __m256 total = _mm256_setzero_ps();
    FOR_UNROLLED (i, CHAINS)
        total = _mm256_add_ps(total, sum[i]);
    volatile float keep = _mm256_cvtss_f32(total);
    (void)keep;
    *flops = (double)rounds * CHAINS * FLOPS;
}
