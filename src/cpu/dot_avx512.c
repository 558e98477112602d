/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dot kernels for AVX-512 with VBMI and BF16. vdpbf16ps adds the product of the odd elements of a
 * pair, then that of the even ones, each as one fma rounded to nearest: the order of kernels.h.
 * A dword lane is a row; its two words are the weights of one pair of k as BF16.
 *
 * Scales are powers of two (NVFP4's has a mantissa besides) and meet the sums in one of two ways:
 * - folded: every weight's exponent is reduced by its group's scale. Always possible.
 * - in units: the codes are multiplied as they are, and a row's sum is kept in units of the scale
 *   of the group at hand; a new group multiplies it by the quotient of the scales. That is exact,
 *   so the same bits, unless something leaves the range of FP32. It takes less work for each weight
 *   and is for few tokens, where memory would wait for it.
 */
#include <immintrin.h>
#include <stdbool.h>

#include "cpu/dot.h"
#include "cpu/kernels.h"

enum {
    STREAMS_MAX = 2,
    FEW_TOKENS = 3, /* tokens that are worth two streams */
    PREFETCH = 4096 /* bytes ahead in a single stream; two streams are faster without */
};

/*
 * Sums in units of scales that are at most UNIT_RANGE binades apart do not leave FP32. Activations
 * are E4M3 times 2^-48 .. 2^47, so a product is a multiple of 2^-58 and in any group's unit one of
 * 2^-112; a sum is below 2^(56 + 3 + 14 + 54). NVFP4's scales always are in the range.
 */
enum {
    UNIT_RANGE = 54,
    UNIT_K_MAX = 1 << 14,
    UNIT_MXFP4_MIN = 64, /* the range starts here; the largest scales are a little above */
    UNIT_MXFP4_START = MM_MXFP4_SCALE_ZERO - MM_MXFP4_BIAS
};

/* E2M1 codes, twice: vpermw takes five bits of which the code is the lower four. Code 8 is +0. */
#define MXFP4_CODES                                                                                \
    0x0000, 0x7D80, 0x7E00, 0x7E40, 0x7E80, 0x7EC0, 0x7F00, 0x7F40,    /* 0 .. 6 */                \
        0x0000, 0xFD80, 0xFE00, 0xFE40, 0xFE80, 0xFEC0, 0xFF00, 0xFF40 /* -0 .. -6 */
#define MXFP4_UNIT_CODES                                                                           \
    0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x0000, 0xBF00, 0xBF80,        \
        0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0
/* Times 2^MM_MXFP4_SCALE_ZERO, and as they are. */
static const _Alignas(64) uint16_t mxfp4_codes[32] = {MXFP4_CODES, MXFP4_CODES};
static const _Alignas(64) uint16_t mxfp4_unit_codes[32] = {MXFP4_UNIT_CODES, MXFP4_UNIT_CODES};

/* [m][magnitude]: BF16(magnitude * (1 + m / 8) * 2^MM_NVFP4_SCALE_ZERO) + (m << 4), so that
 * subtracting a scale byte s << 4 subtracts s >> 3 from the exponent. */
static const _Alignas(64) uint16_t nvfp4_products[8][8] = {
    {0x0000, 0x4380, 0x4400, 0x4440, 0x4480, 0x44C0, 0x4500, 0x4540},
    {0x0000, 0x43A0, 0x4420, 0x4468, 0x44A0, 0x44E8, 0x4520, 0x4568},
    {0x0000, 0x43C0, 0x4440, 0x4490, 0x44C0, 0x4510, 0x4540, 0x4590},
    {0x0000, 0x43E0, 0x4460, 0x44B4, 0x44E0, 0x4534, 0x4560, 0x45B4},
    {0x0000, 0x4400, 0x4480, 0x44D0, 0x4500, 0x4550, 0x4580, 0x45D0},
    {0x0000, 0x4420, 0x44A0, 0x44EC, 0x4520, 0x456C, 0x45A0, 0x45EC},
    {0x0000, 0x4440, 0x44C0, 0x4508, 0x4540, 0x4588, 0x45C0, 0x4608},
    {0x0000, 0x4460, 0x44E0, 0x4524, 0x4560, 0x45A4, 0x45E0, 0x4624},
};
/* [m][magnitude]: BF16(magnitude * (1 + m / 8)). */
static const _Alignas(64) uint16_t nvfp4_unit_products[8][8] = {
    {0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0},
    {0x0000, 0x3F10, 0x3F90, 0x3FD8, 0x4010, 0x4058, 0x4090, 0x40D8},
    {0x0000, 0x3F20, 0x3FA0, 0x3FF0, 0x4020, 0x4070, 0x40A0, 0x40F0},
    {0x0000, 0x3F30, 0x3FB0, 0x4004, 0x4030, 0x4084, 0x40B0, 0x4104},
    {0x0000, 0x3F40, 0x3FC0, 0x4010, 0x4040, 0x4090, 0x40C0, 0x4110},
    {0x0000, 0x3F50, 0x3FD0, 0x401C, 0x4050, 0x409C, 0x40D0, 0x411C},
    {0x0000, 0x3F60, 0x3FE0, 0x4028, 0x4060, 0x40A8, 0x40E0, 0x4128},
    {0x0000, 0x3F70, 0x3FF0, 0x4034, 0x4070, 0x40B4, 0x40F0, 0x4134},
};

/* Subnormal E4M3 codes as BF16; the higher entries are not looked at. */
static const _Alignas(64) uint16_t e4m3_subnormals[32] = {0x0000, 0x3B00, 0x3B80, 0x3BC0,
                                                          0x3C00, 0x3C20, 0x3C40, 0x3C60};

/* The scales of one group for the rows of one half. */
struct scale {
    /* folded: words to subtract from weights; in units: dwords, MXFP4's s or NVFP4's s >> 3 */
    __m512i exponent;
    /* NVFP4: words that hold the mantissa in bits 3..5 */
    __m512i mantissa;
};

INLINE __m512i load(const void *p) {
    return _mm512_load_si512(p);
}

/* 2^exponent in each lane, for -126..127. */
INLINE __m512 power_of_two(__m512i exponent) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_add_epi32(exponent, _mm512_set1_epi32(127)), 23));
}

/* 16 scale bytes, each in the upper byte of both words of its row. */
INLINE __m512i scale_words(const uint8_t *bytes) {
    const __m512i rows =
        _mm512_set_epi32(0x0F0F0F0F, 0x0E0E0E0E, 0x0D0D0D0D, 0x0C0C0C0C, 0x0B0B0B0B, 0x0A0A0A0A,
                         0x09090909, 0x08080808, 0x07070707, 0x06060606, 0x05050505, 0x04040404,
                         0x03030303, 0x02020202, 0x01010101, 0x00000000);
    const __m512i all = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)bytes));
    return _mm512_maskz_permutexvar_epi8(0xAAAAAAAAAAAAAAAAu, rows, all);
}

INLINE void load_scale(mm_tile_format format, const uint8_t *bytes, struct scale *scale) {
    const __m512i words = scale_words(bytes);
    scale->exponent = _mm512_srli_epi16(words, format == MM_TILE_MXFP4 ? 1 : 4);
    scale->mantissa = _mm512_srli_epi16(words, 5);
}

/*
 * Changes the unit to the scales at `bytes` and returns the factor of the sums. *outside is the
 * farthest unit from the start of the range. (Groups of zeros have a scale inside it.)
 */
INLINE __m512 change_unit(mm_tile_format format, const uint8_t *bytes, struct scale *scale,
                          __m512i *outside) {
    const __m512i s = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)bytes));
    const __m512i old = scale->exponent;
    if (format == MM_TILE_MXFP4) {
        const __m512i least = _mm512_set1_epi32(UNIT_MXFP4_MIN);
        scale->exponent = s;
        *outside = _mm512_max_epu32(*outside, _mm512_sub_epi32(scale->exponent, least));
    } else {
        scale->exponent = _mm512_srli_epi32(s, 3);
        scale->mantissa = _mm512_srli_epi16(scale_words(bytes), 5);
    }
    return power_of_two(_mm512_sub_epi32(scale->exponent, old));
}

/* What a sum in units has to be multiplied with in the end. */
INLINE __m512 value_of_unit(mm_tile_format format, const struct scale *scale) {
    const int zero = format == MM_TILE_MXFP4 ? MM_MXFP4_SCALE_ZERO : MM_NVFP4_SCALE_ZERO;
    return power_of_two(_mm512_sub_epi32(_mm512_set1_epi32(zero), scale->exponent));
}

/* a - b, at least 0: zero stays zero. Unlike vpsubusw these take no place of a vdpbf16ps. */
INLINE __m512i subtract(__m512i a, __m512i b) {
    return _mm512_sub_epi16(_mm512_max_epu16(a, b), b);
}

INLINE __m512i mxfp4_pair(__m512i line, int pair, bool units, const struct scale *scale) {
    const __m512i codes = _mm512_srli_epi16(line, (unsigned)(4 * pair));
    if (units)
        return _mm512_permutexvar_epi16(codes, load(mxfp4_unit_codes));
    return subtract(_mm512_permutexvar_epi16(codes, load(mxfp4_codes)), scale->exponent);
}

INLINE __m512i nvfp4_pair(__m512i codes, int pair, bool units, const struct scale *scale) {
    enum { A_AND_B_OR_C = 0xEA, A_OR_B_AND_C = 0xF8 };
    const __m512i index =
        _mm512_ternarylogic_epi32(_mm512_srli_epi16(codes, (unsigned)(4 * pair)),
                                  _mm512_set1_epi16(7), scale->mantissa, A_AND_B_OR_C);
    const uint16_t(*const products)[8] = units ? nvfp4_unit_products : nvfp4_products;
    __m512i magnitude = _mm512_permutex2var_epi16(load(products[0]), index, load(products[4]));
    if (!units)
        magnitude = subtract(magnitude, scale->exponent);
    return _mm512_ternarylogic_epi32(magnitude, _mm512_slli_epi16(codes, (unsigned)(12 - 4 * pair)),
                                     _mm512_set1_epi16((short)0x8000), A_OR_B_AND_C);
}

INLINE __m512i e4m3_pair(const uint8_t *bytes) {
    enum { A_OR_B_AND_C = 0xF8 };
    const __m512i codes = _mm512_cvtepi8_epi16(_mm256_load_si256((const __m256i *)bytes));
    const __m512i fields = _mm512_slli_epi16(codes, 4);
    /* E4M3's bias is 7, BF16's 127. */
    const __m512i normal = _mm512_add_epi16(_mm512_and_si512(fields, _mm512_set1_epi16(0x07F0)),
                                            _mm512_set1_epi16(120 << 7));
    const __mmask32 subnormal = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
    const __m512i magnitude =
        _mm512_mask_permutexvar_epi16(normal, subnormal, codes, load(e4m3_subnormals));
    return _mm512_ternarylogic_epi32(magnitude, fields, _mm512_set1_epi16((short)0x8000),
                                     A_OR_B_AND_C);
}

/*
 * Half `half` of a slice of 8 k, kept in a register. Compilers would fold the load into each shift,
 * and with few tokens loads are what is scarce.
 */
INLINE __m512i load_line(mm_tile_format format, const uint8_t *slice, int half) {
    if (format == MM_TILE_E4M3)
        return _mm512_setzero_si512();
    __m512i line = load(slice + 64 * half);
    __asm__("" : "+v"(line));
    return line;
}

/* The weights of pair `pair` of a slice for the 16 rows of a half; `line` is load_line's. */
INLINE __m512bh weights_of(mm_tile_format format, const uint8_t *slice, __m512i line, int half,
                           int pair, bool units, const struct scale *scale) {
    if (format == MM_TILE_MXFP4)
        return (__m512bh)mxfp4_pair(line, pair, units, scale);
    if (format == MM_TILE_NVFP4)
        return (__m512bh)nvfp4_pair(line, pair, units, scale);
    return (__m512bh)e4m3_pair(slice + 64 * pair + 32 * half);
}

/* sum += w . x, the pair at x for all rows. As a broadcast operand of the instruction it takes no
 * register, which compilers do not find by themselves. */
INLINE void add_pair(__m512 *sum, __m512bh w, const uint32_t *x) {
    __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(*sum) : "v"(w), "m"(*x));
}

INLINE void store_sums(float *out, const __m512 sums[2]) {
    _mm512_storeu_ps(out, sums[0]);
    _mm512_storeu_ps(out + MM_TILE_HALF, sums[1]);
}

/* Ends a chunk: its sums times the chunk's scale into `out`, and zero. */
INLINE void fold_sums(float *out, float scale, __m512 sums[2]) {
    FOR_UNROLLED (half, 2) {
        const __m512 total = _mm512_loadu_ps(out + half * MM_TILE_HALF);
        sums[half] = _mm512_fmadd_ps(sums[half], _mm512_set1_ps(scale), total);
    }
    store_sums(out, sums);
    sums[0] = sums[1] = _mm512_setzero_ps();
}

/*
 * Tile `tile` and, with two streams, the tile `apart` tiles behind it, side by side: the chains of
 * additions of few tokens in one tile leave the processor idle, and memory reads faster in two
 * places. Returns false if the tile's scales do not allow sums in units; `out` is then undefined.
 */
INLINE bool dot_tiles(const mm_dot *d, const mm_tile_format format, const bool units,
                      const int streams, const int tokens, int32_t tile, int32_t apart) {
    const uint8_t *weights = d->weights + (size_t)tile * d->tile_bytes;
    const size_t weights_apart = (size_t)apart * d->tile_bytes;
    const size_t sums_apart = (size_t)apart * (size_t)tokens * MM_TILE_ROWS;
    float *out = d->out + (size_t)tile * (size_t)tokens * MM_TILE_ROWS;
    const uint32_t *x = d->x;
    const float *chunk_scale = d->chunk_scale;

    __m512i outside = _mm512_setzero_si512();
    struct scale scale[STREAMS_MAX][2];
    FOR_UNROLLED (s, streams)
        FOR_UNROLLED (half, 2)
            scale[s][half].exponent = _mm512_set1_epi32(UNIT_MXFP4_START);
    __m512 sum[STREAMS_MAX][MM_PANEL_TOKENS][2];
    FOR_UNROLLED (s, streams)
        FOR_UNROLLED (t, tokens) {
            sum[s][t][0] = sum[s][t][1] = _mm512_setzero_ps();
            if (chunk_scale)
                store_sums(out + s * sums_apart + t * MM_TILE_ROWS, sum[s][t]);
        }
    for (int32_t k = 0; k < d->k; k += MM_CHUNK_K) {
        const int32_t chunk_k = d->k - k < MM_CHUNK_K ? d->k - k : MM_CHUNK_K;
        const uint8_t *scales = weights;
        weights += scale_bytes(format);
        for (int32_t group = 0; group < chunk_k; group += group_k(format)) {
            if (format != MM_TILE_E4M3) {
                FOR_UNROLLED (s, streams)
                    FOR_UNROLLED (half, 2) {
                        const uint8_t *bytes =
                            scales + s * weights_apart + half * scale_bytes(format) / 2;
                        if (!units) {
                            load_scale(format, bytes, &scale[s][half]);
                            continue;
                        }
                        const __m512 factor = change_unit(format, bytes, &scale[s][half], &outside);
                        FOR_UNROLLED (t, tokens)
                            sum[s][t][half] = _mm512_mul_ps(sum[s][t][half], factor);
                    }
                scales += MM_TILE_HALF;
            }
            for (int32_t slice = 0; slice < group_k(format); slice += MM_SLICE_K) {
                if (streams == 1)
                    FOR_UNROLLED (line, slice_bytes(format) / 64)
                        _mm_prefetch((const char *)weights + PREFETCH + 64 * line, _MM_HINT_T0);
                __m512i line[STREAMS_MAX][2];
                FOR_UNROLLED (s, streams)
                    FOR_UNROLLED (half, 2)
                        line[s][half] = load_line(format, weights + s * weights_apart, half);
                FOR_UNROLLED (pair, MM_SLICE_K / 2) {
                    __m512bh shared[FEW_TOKENS]; /* with few tokens x has room in registers too */
                    if (streams > 1)
                        FOR_UNROLLED (t, tokens)
                            shared[t] = (__m512bh)_mm512_set1_epi32((int)x[pair * tokens + t]);
                    FOR_UNROLLED (s, streams)
                        FOR_UNROLLED (half, 2) {
                            const __m512bh w =
                                weights_of(format, weights + s * weights_apart, line[s][half], half,
                                           pair, units, &scale[s][half]);
                            FOR_UNROLLED (t, tokens)
                                if (streams > 1)
                                    sum[s][t][half] =
                                        _mm512_dpbf16_ps(sum[s][t][half], w, shared[t]);
                                else
                                    add_pair(&sum[s][t][half], w, x + pair * tokens + t);
                        }
                }
                x += MM_SLICE_K / 2 * tokens;
                weights += slice_bytes(format);
            }
        }
        const bool last = k + MM_CHUNK_K >= d->k;
        if (units && (chunk_scale || last))
            FOR_UNROLLED (s, streams)
                FOR_UNROLLED (half, 2) {
                    const __m512 value = value_of_unit(format, &scale[s][half]);
                    FOR_UNROLLED (t, tokens)
                        sum[s][t][half] = _mm512_mul_ps(sum[s][t][half], value);
                }
        if (chunk_scale) {
            FOR_UNROLLED (s, streams)
                FOR_UNROLLED (t, tokens)
                    fold_sums(out + s * sums_apart + t * MM_TILE_ROWS, chunk_scale[t], sum[s][t]);
            chunk_scale += tokens;
        }
    }
    if (!chunk_scale)
        FOR_UNROLLED (s, streams)
            FOR_UNROLLED (t, tokens)
                store_sums(out + s * sums_apart + t * MM_TILE_ROWS, sum[s][t]);
    return !units || !_mm512_cmpgt_epu32_mask(outside, _mm512_set1_epi32(UNIT_RANGE));
}

/* With `few` tokens sums are in units where they can be. */
INLINE void dot_streams(const mm_dot *d, const mm_tile_format format, const bool few,
                        const int streams, const int tokens) {
    const bool units = few && format != MM_TILE_E4M3 && d->k <= UNIT_K_MAX;
    const int32_t apart = d->tiles / streams;
    for (int32_t tile = 0; tile < apart; tile++)
        if (!units || !dot_tiles(d, format, true, streams, tokens, tile, apart))
            dot_tiles(d, format, false, streams, tokens, tile, apart);
    if (streams > 1 && d->tiles % streams)
        dot_tiles(d, format, false, 1, tokens, d->tiles - 1, 0);
}

INLINE void dot(const mm_dot *d, const mm_tile_format format) {
    switch (d->tokens) {
    case 1:
        dot_streams(d, format, true, 2, 1);
        break;
    case 2:
        dot_streams(d, format, true, 2, 2);
        break;
    case 3:
        dot_streams(d, format, true, 2, 3);
        break;
    case 4:
        dot_streams(d, format, false, 1, 4);
        break;
    case 5:
        dot_streams(d, format, false, 1, 5);
        break;
    case 6:
        dot_streams(d, format, false, 1, 6);
        break;
    case 7:
        dot_streams(d, format, false, 1, 7);
        break;
    case 8:
        dot_streams(d, format, false, 1, 8);
        break;
    case 9:
        dot_streams(d, format, false, 1, 9);
        break;
    case 10:
        dot_streams(d, format, false, 1, 10);
        break;
    case 11:
        dot_streams(d, format, false, 1, 11);
        break;
    case 12:
        dot_streams(d, format, false, 1, 12);
        break;
    }
}

void mm_dot_mxfp4_avx512(const mm_dot *d) {
    dot(d, MM_TILE_MXFP4);
}

void mm_dot_nvfp4_avx512(const mm_dot *d) {
    dot(d, MM_TILE_NVFP4);
}

void mm_dot_e4m3_avx512(const mm_dot *d) {
    dot(d, MM_TILE_E4M3);
}

void mm_dot_peak_avx512(int64_t rounds, double *flops) {
    enum { CHAINS = 16, FLOPS = 64 };
    __m512 sum[CHAINS];
    FOR_UNROLLED (i, CHAINS)
        sum[i] = _mm512_set1_ps((float)i); /* equal chains would be merged */
    const __m512bh factor = (__m512bh)_mm512_set1_epi32(0x3F003F00);
    for (int64_t round = 0; round < rounds; round++)
        FOR_UNROLLED (i, CHAINS)
            sum[i] = _mm512_dpbf16_ps(sum[i], factor, factor);
    __m512 total = _mm512_setzero_ps();
    FOR_UNROLLED (i, CHAINS)
        total = _mm512_add_ps(total, sum[i]);
    volatile float keep = _mm512_reduce_add_ps(total);
    (void)keep;
    *flops = (double)rounds * CHAINS * FLOPS;
}
