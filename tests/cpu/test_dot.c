/* SPDX-License-Identifier: Apache-2.0 */
/* The dot kernels of every tier that runs here, to the bit against a loop over single weights. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/kernels.h"
#include "t.h"
#include "tiles.h"

enum { MAX_TILES = 8, GUARD = 64 };
#define GUARD_VALUE 12345.0f

static const char *const format_names[MM_TILE_FORMATS] = {"mxfp4", "nvfp4", "e4m3"};

static uint16_t bf16_of_exact(double value) {
    const float f = (float)value;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (uint16_t)(bits >> 16);
}

static float f32_of_bf16(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &wide, 4);
    return f;
}

/* Any finite E4M3 value times 2^exponent. */
static uint16_t random_x(t_random *r, int exponent) {
    const unsigned code = t_below(r, 127);
    const double magnitude =
        code >> 3 ? ldexp(8 + (code & 7), (int)(code >> 3) - 10) : ldexp(code & 7, -9);
    return bf16_of_exact(ldexp(t_below(r, 2) ? -magnitude : magnitude, exponent));
}

struct problem {
    mm_tile_format format;
    int32_t k, chunks;
    bool promote;
    uint8_t *weights;   /* [MAX_TILES] */
    uint16_t *x;        /* [MM_PANEL_TOKENS][k] */
    float *chunk_scale; /* [MM_PANEL_TOKENS][chunks] */
    float *expected;    /* [MM_PANEL_TOKENS][MAX_TILES * 32] */
    float *w;           /* [k]: scratch */
};

static void expect(struct problem *p) {
    for (int32_t row = 0; row < MAX_TILES * 32; row++) {
        const uint8_t *tile = p->weights + (size_t)(row / 32) * tile_bytes_of(p->format, p->k);
        for (int32_t k = 0; k < p->k; k++)
            p->w[k] = weight_at(p->format, tile, row % 32, k);
        for (int32_t token = 0; token < MM_PANEL_TOKENS; token++) {
            const uint16_t *x = p->x + (size_t)token * (size_t)p->k;
            float sum = 0, partial = 0;
            for (int32_t k = 0; k < p->k; k += 2) {
                partial = fmaf(f32_of_bf16(x[k + 1]), p->w[k + 1], partial);
                partial = fmaf(f32_of_bf16(x[k]), p->w[k], partial);
                if (p->promote && (k % 128 == 126 || k + 2 == p->k)) {
                    sum = fmaf(partial, p->chunk_scale[token * p->chunks + k / 128], sum);
                    partial = 0;
                }
            }
            p->expected[token * MAX_TILES * 32 + row] = p->promote ? sum : partial;
        }
    }
}

static struct problem make_problem(t_random *r, mm_tile_format format, int32_t k, bool promote,
                                   enum spread spread) {
    struct problem p = {.format = format, .k = k, .chunks = (k + 127) / 128, .promote = promote};
    const size_t tile_bytes = tile_bytes_of(format, k);
    p.weights = need(MAX_TILES * tile_bytes);
    p.x = need(MM_PANEL_TOKENS * (size_t)k * sizeof *p.x);
    memset(p.x, 0, MM_PANEL_TOKENS * (size_t)k * sizeof *p.x);
    p.chunk_scale = need(MM_PANEL_TOKENS * (size_t)p.chunks * sizeof *p.chunk_scale);
    p.expected = need(MM_PANEL_TOKENS * MAX_TILES * 32 * sizeof *p.expected);
    p.w = need((size_t)k * sizeof *p.w);
    for (int32_t tile = 0; tile < MAX_TILES; tile++)
        fill_weights(r, format, k, spread, p.weights + (size_t)tile * tile_bytes);
    for (int32_t token = 0; token < MM_PANEL_TOKENS; token++) {
        const bool wide = spread != USUAL && t_below(r, 2);
        for (int32_t chunk = 0; chunk < p.chunks; chunk++) {
            const int exponent = wide ? (int)t_below(r, 96) - 48 : (int)t_below(r, 6) - 3;
            p.chunk_scale[token * p.chunks + chunk] = ldexpf(1, exponent);
            /* Groups that meet only zeros leave a sum as it is, whatever their scales. */
            const uint32_t zero_groups = wide ? t_below(r, 16) : 0;
            for (int32_t i = chunk * 128; i < chunk * 128 + 128 && i < k; i++)
                if (!(zero_groups >> i % 128 / 32 & 1))
                    p.x[token * k + i] = random_x(r, promote ? 0 : exponent);
        }
        /* Some tokens hold one NaN, which a weight of zero does not cancel. */
        if (spread == NANS && token % 3 == 1)
            p.x[token * k + (int32_t)t_below(r, (uint32_t)k)] = 0x7FC0;
    }
    expect(&p);
    return p;
}

static void free_problem(struct problem *p) {
    free(p->weights);
    free(p->x);
    free(p->chunk_scale);
    free(p->expected);
    free(p->w);
}

/* `tokens` of the problem's tokens, from one that moves with their number, and `tiles` of its
 * tiles, from `first_tile` on. */
static bool matches(const struct problem *p, mm_tier tier, int32_t tokens, int32_t first_tile,
                    int32_t tiles) {
    const size_t tile_bytes = tile_bytes_of(p->format, p->k);
    const size_t out_floats = (size_t)tiles * (size_t)tokens * 32;
    uint32_t *x = need((size_t)p->k / 2 * (size_t)tokens * sizeof *x);
    float *chunk_scale = need((size_t)p->chunks * (size_t)tokens * sizeof *chunk_scale);
    float *out = need((out_floats + 2 * GUARD) * sizeof *out);
    int32_t from[MM_PANEL_TOKENS];
    for (int32_t t = 0; t < tokens; t++) {
        from[t] = (t * 5 + tokens) % MM_PANEL_TOKENS;
        const uint16_t *row = p->x + (size_t)from[t] * (size_t)p->k;
        for (int32_t pair = 0; pair < p->k / 2; pair++)
            x[pair * tokens + t] = row[2 * pair] | (uint32_t)row[2 * pair + 1] << 16;
        for (int32_t chunk = 0; chunk < p->chunks; chunk++)
            chunk_scale[chunk * tokens + t] = p->chunk_scale[from[t] * p->chunks + chunk];
    }
    for (size_t i = 0; i < out_floats + 2 * GUARD; i++)
        out[i] = GUARD_VALUE;
    const mm_dot dot = {
        .weights = p->weights + (size_t)first_tile * tile_bytes,
        .tile_bytes = tile_bytes,
        .tiles = tiles,
        .k = p->k,
        .tokens = tokens,
        .x = x,
        .chunk_scale = p->promote ? chunk_scale : NULL,
        .out = out + GUARD,
    };
    const mm_kernels *kernels = mm_kernels_of(tier);
    void (*const kernel[MM_TILE_FORMATS])(const mm_dot *) = {kernels->dot_mxfp4, kernels->dot_nvfp4,
                                                             kernels->dot_e4m3};
    kernel[p->format](&dot);

    bool ok = true;
    for (int32_t i = 0; i < GUARD && ok; i++)
        ok =
            T_CHECK_MSG(out[i] == GUARD_VALUE && out[GUARD + out_floats + (size_t)i] == GUARD_VALUE,
                        "%s wrote outside its output", kernels->tier);
    for (int32_t tile = 0; tile < tiles && ok; tile++)
        for (int32_t t = 0; t < tokens && ok; t++)
            for (int32_t row = 0; row < 32 && ok; row++) {
                const float got = dot.out[(tile * tokens + t) * 32 + row];
                const float want =
                    p->expected[from[t] * MAX_TILES * 32 + (first_tile + tile) * 32 + row];
                ok = T_CHECK_MSG(
                    same_float(got, want),
                    "%s %s k %d promote %d tokens %d tiles %d: tile %d token %d row %d: "
                    "%a, expected %a",
                    kernels->tier, format_names[p->format], p->k, p->promote, tokens, tiles, tile,
                    t, row, (double)got, (double)want);
            }
    free(x);
    free(chunk_scale);
    free(out);
    return ok;
}

static void check_all(mm_tile_format format, bool promote, enum spread spread) {
    static const int32_t ks[] = {32, 64, 96, 128, 160, 224, 256, 352, 768, 2880};
    static const int32_t tile_counts[] = {1, 2, 3, 5, 8};
    t_random r = t_random_start((uint64_t)((int)format * SPREADS + (int)spread) * 2 + promote);
    for (size_t i = 0; i < sizeof ks / sizeof *ks; i++) {
        struct problem p = make_problem(&r, format, ks[i], promote, spread);
        bool ok = true;
        for (mm_tier tier = MM_TIER_SCALAR; tier < MM_TIERS; tier++)
            for (int32_t tokens = 1; tokens <= MM_PANEL_TOKENS; tokens++)
                for (size_t n = 0; n < sizeof tile_counts / sizeof *tile_counts; n++) {
                    const int32_t tiles = tile_counts[n];
                    const int32_t first = (int32_t)t_below(&r, (uint32_t)(MAX_TILES - tiles + 1));
                    /* More tiles of the longest would tell little for their time. */
                    if (!mm_tier_runs(tier) || (p.k > 1000 && tiles != 3))
                        continue;
                    ok = ok && matches(&p, tier, tokens, first, tiles);
                }
        free_problem(&p);
        if (!ok)
            return;
    }
}

#define DOT_CASES(name, format)                                                                    \
    T_CASE(name##_usual) {                                                                         \
        check_all(format, false, USUAL);                                                           \
    }                                                                                              \
    T_CASE(name##_usual_promote) {                                                                 \
        check_all(format, true, USUAL);                                                            \
    }                                                                                              \
    T_CASE(name##_wide) {                                                                          \
        check_all(format, false, WIDE);                                                            \
    }                                                                                              \
    T_CASE(name##_wide_promote) {                                                                  \
        check_all(format, true, WIDE);                                                             \
    }                                                                                              \
    T_CASE(name##_nan) {                                                                           \
        check_all(format, false, NANS);                                                            \
    }                                                                                              \
    T_CASE(name##_nan_promote) {                                                                   \
        check_all(format, true, NANS);                                                             \
    }

DOT_CASES(mxfp4, MM_TILE_MXFP4)
DOT_CASES(nvfp4, MM_TILE_NVFP4)
DOT_CASES(e4m3, MM_TILE_E4M3)
