/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dot kernels of int8 activations for AVX-512 with VBMI and VNNI. vpdpbusd adds four products of an
 * unsigned and a signed byte to each dword: a row's weights plus MM_INT8_OFFSET, and activations.
 */
#include <immintrin.h>
#include <string.h>

#include "cpu/dot.h"
#include "cpu/kernels.h"

enum {
    PARTS_MAX = 4,  /* halves of tiles side by side */
    PREFETCH = 4096 /* bytes ahead in a single stream; two streams are faster without */
};

/* Twice the value of each code, plus MM_INT8_OFFSET; four times, since vpermb takes six bits. */
#define WEIGHTS 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0
static const _Alignas(64) uint8_t weights_of_codes[64] = {WEIGHTS, WEIGHTS, WEIGHTS, WEIGHTS};

/* 16 scales, halved because weights are doubled. Those of groups of zeros may be anything finite.
 */
INLINE __m512 load_scales(mm_tile_format format, const uint8_t *bytes) {
    const __m128i s = _mm_load_si128((const __m128i *)bytes);
    if (format == MM_TILE_MXFP4) {
        const __m128i field = _mm_set1_epi8((char)MM_INT8_MXFP4_FIELD);
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_subs_epu8(field, s)), 23));
    }
    /* s << 20 holds s >> 3 at the exponent's place and the mantissa, which has to be added. */
    const __m512i wide = _mm512_cvtepu8_epi32(s);
    const __m512i mantissa = _mm512_and_si512(wide, _mm512_set1_epi32(7));
    const __m512i one = _mm512_set1_epi32(MM_INT8_NVFP4_FIELD << 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_sub_epi32(one, _mm512_slli_epi32(wide, 20)),
                                                _mm512_slli_epi32(mantissa, 21)));
}

/* sum += w . x, the four codes at x for all rows. As a broadcast operand they take no register. */
INLINE void add_four(__m512i *sum, __m512i w, const uint32_t *x) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(*sum) : "v"(w), "m"(*x));
}

/* Adds the products of one slice for 16 rows. */
INLINE void add_slice(const int tokens, const uint8_t *line, const uint32_t *x,
                      __m512i sum[MM_PANEL_TOKENS]) {
    const __m512i table = _mm512_load_si512(weights_of_codes);
    const __m512i codes = _mm512_load_si512(line);
    const __m512i low = _mm512_permutexvar_epi8(codes, table);
    const __m512i high = _mm512_permutexvar_epi8(_mm512_srli_epi16(codes, 4), table);
    FOR_UNROLLED (t, tokens)
        add_four(&sum[t], low, x + t);
    FOR_UNROLLED (t, tokens)
        add_four(&sum[t], high, x + tokens + t);
}

/*
 * One chunk. The parts that go side by side are `halves` halves from `half` on, of the tile and
 * then, with two streams, of the tile whose weights and sums lie that far apart.
 */
INLINE void dot_chunk(const mm_tile_format format, const int halves, const int streams,
                      const int tokens, const uint8_t *chunk, size_t weights_apart, int32_t chunk_k,
                      const uint32_t *x, const float *chunk_scale, int half, float *out,
                      size_t sums_apart) {
    __m512 partial[PARTS_MAX][MM_PANEL_TOKENS];
    FOR_UNROLLED (part, halves * streams)
        FOR_UNROLLED (t, tokens)
            partial[part][t] = _mm512_setzero_ps();
    const uint8_t *scales = chunk + half * (scale_bytes(format) / 2);
    const uint8_t *lines = chunk + scale_bytes(format) + half * 64;
    for (int32_t group = 0; group < chunk_k; group += group_k(format)) {
        __m512i sum[PARTS_MAX][MM_PANEL_TOKENS];
        FOR_UNROLLED (part, halves * streams)
            FOR_UNROLLED (t, tokens)
                sum[part][t] = _mm512_set1_epi32((int)x[t]);
        x += tokens;
        for (int32_t k = 0; k < group_k(format); k += MM_SLICE_K) {
            FOR_UNROLLED (part, halves * streams) {
                const uint8_t *line = lines + part / halves * weights_apart + part % halves * 64;
                if (streams == 1)
                    _mm_prefetch((const char *)line + PREFETCH, _MM_HINT_T0);
                add_slice(tokens, line, x, sum[part]);
            }
            x += 2 * tokens;
            lines += MM_SLICE_BYTES;
        }
        FOR_UNROLLED (part, halves * streams) {
            const __m512 scale = load_scales(format, scales + part / halves * weights_apart +
                                                         part % halves * (scale_bytes(format) / 2));
            FOR_UNROLLED (t, tokens)
                partial[part][t] =
                    _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[part][t]), scale, partial[part][t]);
        }
        scales += MM_TILE_HALF;
    }
    FOR_UNROLLED (part, halves * streams) {
        float *to = out + part / halves * sums_apart + (half + part % halves) * MM_TILE_HALF;
        FOR_UNROLLED (t, tokens) {
            const __m512 total = _mm512_loadu_ps(to + t * MM_TILE_ROWS);
            _mm512_storeu_ps(
                to + t * MM_TILE_ROWS,
                _mm512_fmadd_ps(partial[part][t], _mm512_set1_ps(chunk_scale[t]), total));
        }
    }
    /* Sums stay in memory until the next chunk: registers are for what a group needs. */
    __asm__ volatile("" ::: "memory");
}

/* Tile `tile` and, with two streams, the tile `apart` tiles behind it: memory reads faster in two
 * places, and the few sums of few tokens would leave the processor idle. */
INLINE void dot_tiles(const mm_dot *d, const mm_tile_format format, const int halves,
                      const int streams, const int tokens, int32_t tile, int32_t apart) {
    const size_t weights_apart = (size_t)apart * d->tile_bytes;
    const size_t sums_apart = (size_t)apart * (size_t)tokens * MM_TILE_ROWS;
    const size_t sums_bytes = (size_t)tokens * MM_TILE_ROWS * sizeof *d->out;
    const uint8_t *chunk = d->weights + (size_t)tile * d->tile_bytes;
    float *out = d->out + (size_t)tile * (size_t)tokens * MM_TILE_ROWS;
    memset(out, 0, sums_bytes);
    if (streams > 1)
        memset(out + sums_apart, 0, sums_bytes);
    const uint32_t *x = d->x;
    const float *chunk_scale = d->chunk_scale;
    for (int32_t k = 0; k < d->k; k += MM_CHUNK_K) {
        const int32_t chunk_k = d->k - k < MM_CHUNK_K ? d->k - k : MM_CHUNK_K;
        for (int half = 0; half < 2; half += halves)
            dot_chunk(format, halves, streams, tokens, chunk, weights_apart, chunk_k, x,
                      chunk_scale, half, out, sums_apart);
        chunk += scale_bytes(format) + chunk_k / MM_SLICE_K * MM_SLICE_BYTES;
        x += mm_int8_panel_words(chunk_k, group_k(format)) * tokens;
        chunk_scale += tokens;
    }
}

INLINE void dot_streams(const mm_dot *d, const mm_tile_format format, const int halves,
                        const int streams, const int tokens) {
    const int32_t apart = d->tiles / streams;
    for (int32_t tile = 0; tile < apart; tile++)
        dot_tiles(d, format, halves, streams, tokens, tile, apart);
    if (streams > 1 && d->tiles % streams)
        dot_tiles(d, format, halves, 1, tokens, d->tiles - 1, 0);
}

/* As many parts side by side as registers hold sums and partial sums for. */
INLINE void dot(const mm_dot *d, const mm_tile_format format) {
    switch (d->tokens) {
    case 1:
        dot_streams(d, format, 2, 2, 1);
        break;
    case 2:
        dot_streams(d, format, 2, 2, 2);
        break;
    case 3:
        dot_streams(d, format, 2, 2, 3);
        break;
    case 4:
        dot_streams(d, format, 2, 1, 4);
        break;
    case 5:
        dot_streams(d, format, 2, 1, 5);
        break;
    case 6:
        dot_streams(d, format, 2, 1, 6);
        break;
    case 7:
        dot_streams(d, format, 1, 1, 7);
        break;
    case 8:
        dot_streams(d, format, 1, 1, 8);
        break;
    case 9:
        dot_streams(d, format, 1, 1, 9);
        break;
    case 10:
        dot_streams(d, format, 1, 1, 10);
        break;
    case 11:
        dot_streams(d, format, 1, 1, 11);
        break;
    case 12:
        dot_streams(d, format, 1, 1, 12);
        break;
    }
}

void mm_dot_mxfp4_int8_avx512(const mm_dot *d) {
    dot(d, MM_TILE_MXFP4);
}

void mm_dot_nvfp4_int8_avx512(const mm_dot *d) {
    dot(d, MM_TILE_NVFP4);
}

void mm_dot_peak_int8_avx512(int64_t rounds, double *flops) {
    enum { CHAINS = 16, FLOPS = 128 };
    __m512i sum[CHAINS];
    FOR_UNROLLED (i, CHAINS)
        sum[i] = _mm512_set1_epi32(i); /* equal chains would be merged */
    const __m512i factor = _mm512_set1_epi32((int)rounds);
    for (int64_t round = 0; round < rounds; round++)
        FOR_UNROLLED (i, CHAINS)
            sum[i] = _mm512_dpbusd_epi32(sum[i], factor, factor);
    __m512i total = _mm512_setzero_si512();
    FOR_UNROLLED (i, CHAINS)
        total = _mm512_add_epi32(total, sum[i]);
    volatile int keep = _mm512_cvtsi512_si32(total);
    (void)keep;
    *flops = (double)rounds * CHAINS * FLOPS;
}
