/* SPDX-License-Identifier: Apache-2.0 */
/* The dot kernels of int8 activations of every tier, to the bit against a loop over weights. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/kernels.h"
#include "t.h"
#include "tiles.h"

enum { MAX_TILES = 5, GUARD = 64 };
#define GUARD_VALUE 12345.0f

/* What activations are like. */
enum codes {
    RANDOM,  /* all bytes */
    EXTREME, /* -128 and 127: the largest sums */
    CODES
};

struct problem {
    mm_tile_format format;
    int32_t k, group_k, chunks;
    uint8_t *weights;   /* [MAX_TILES] */
    int8_t *x;          /* [MM_PANEL_TOKENS][k] */
    float *chunk_scale; /* [MM_PANEL_TOKENS][chunks] */
    float *expected;    /* [MM_PANEL_TOKENS][MAX_TILES * 32] */
};

static float expect_row(const struct problem *p, const double *w, int32_t token) {
    const int8_t *x = p->x + (size_t)token * (size_t)p->k;
    float total = 0;
    for (int32_t chunk = 0; chunk < p->chunks; chunk++) {
        float partial = 0;
        for (int32_t first = chunk * 128; first < chunk * 128 + 128 && first < p->k;
             first += p->group_k) {
            double sum = 0; /* exact */
            for (int32_t k = first; k < first + p->group_k; k++)
                sum += x[k] * w[k];
            T_REQUIRE((double)(float)sum == sum);
            partial += (float)sum;
        }
        total = fmaf(partial, p->chunk_scale[token * p->chunks + chunk], total);
    }
    return total;
}

static void expect(struct problem *p) {
    const double bias = p->format == MM_TILE_MXFP4 ? ldexp(1, -MM_MXFP4_BIAS) : 1;
    double *w = need((size_t)p->k * sizeof *w);
    for (int32_t row = 0; row < MAX_TILES * 32; row++) {
        const uint8_t *tile = p->weights + (size_t)(row / 32) * tile_bytes_of(p->format, p->k);
        for (int32_t k = 0; k < p->k; k++)
            w[k] = (double)weight_at(p->format, tile, row % 32, k) * bias;
        for (int32_t token = 0; token < MM_PANEL_TOKENS; token++)
            p->expected[token * MAX_TILES * 32 + row] = expect_row(p, w, token);
    }
    free(w);
}

/* All kinds of positive scales; some NaN where `spread` has them. */
static float random_scale(t_random *r, enum spread spread) {
    const float usual = (float)(0.5 + t_uniform(r));
    if (spread == USUAL)
        return ldexpf(usual, (int)t_below(r, 8) - 12);
    if (spread == NANS && t_below(r, 9) == 0)
        return NAN;
    return t_below(r, 8) ? ldexpf(usual, (int)t_below(r, 200) - 140) : 0.0f;
}

static struct problem make_problem(t_random *r, mm_tile_format format, int32_t k,
                                   enum spread spread, enum codes codes) {
    struct problem p = {.format = format,
                        .k = k,
                        .group_k = format == MM_TILE_MXFP4 ? 32 : 16,
                        .chunks = (k + 127) / 128};
    const size_t tile_bytes = tile_bytes_of(format, k);
    p.weights = need(MAX_TILES * tile_bytes);
    p.x = need(MM_PANEL_TOKENS * (size_t)k);
    p.chunk_scale = need(MM_PANEL_TOKENS * (size_t)p.chunks * sizeof *p.chunk_scale);
    p.expected = need(MM_PANEL_TOKENS * MAX_TILES * 32 * sizeof *p.expected);
    for (int32_t tile = 0; tile < MAX_TILES; tile++)
        fill_weights(r, format, k, spread, p.weights + (size_t)tile * tile_bytes);
    for (int32_t i = 0; i < MM_PANEL_TOKENS * k; i++)
        p.x[i] = (int8_t)(codes == RANDOM ? (int)t_below(r, 256) - 128
                                          : (i / k % 3       ? -128
                                             : t_below(r, 2) ? 127
                                                             : -128));
    for (int32_t i = 0; i < MM_PANEL_TOKENS * p.chunks; i++)
        p.chunk_scale[i] = random_scale(r, spread);
    if (codes == EXTREME) /* rows of sixes of one sign in the first tile */
        for (size_t i = 0; i < tile_bytes; i++) {
            const size_t chunk = 2048 + (format == MM_TILE_MXFP4 ? 128 : 256);
            if (i % chunk >= chunk - 2048)
                p.weights[i] = i / 4 % 2 ? 0x77 : 0xFF;
        }
    expect(&p);
    return p;
}

static void free_problem(struct problem *p) {
    free(p->weights);
    free(p->x);
    free(p->chunk_scale);
    free(p->expected);
}

/* One token's column of a panel, by the text of kernels.h. */
static void put_column(const struct problem *p, const int8_t *x, int32_t tokens, uint32_t *panel) {
    static const int32_t places[2][4] = {{0, 4, 1, 5}, {2, 6, 3, 7}};
    for (int32_t first = 0; first < p->k; first += p->group_k) {
        int32_t sum = 0;
        for (int32_t k = first; k < first + p->group_k; k++)
            sum += x[k];
        *panel = (uint32_t)(-12 * sum);
        panel += tokens;
        for (int32_t slice = first; slice < first + p->group_k; slice += 8)
            for (int word = 0; word < 2; word++, panel += tokens) {
                *panel = 0;
                for (int byte = 0; byte < 4; byte++)
                    *panel |= (uint32_t)(uint8_t)x[slice + places[word][byte]] << 8 * byte;
            }
    }
}

static bool matches(const struct problem *p, mm_tier tier, int32_t tokens, int32_t first_tile,
                    int32_t tiles) {
    const size_t tile_bytes = tile_bytes_of(p->format, p->k);
    const size_t out_floats = (size_t)tiles * (size_t)tokens * 32;
    const int32_t words = mm_int8_panel_words(p->k, p->group_k);
    uint32_t *x = need((size_t)(words * tokens) * sizeof *x);
    float *chunk_scale = need((size_t)p->chunks * (size_t)tokens * sizeof *chunk_scale);
    float *out = need((out_floats + 2 * GUARD) * sizeof *out);
    int32_t from[MM_PANEL_TOKENS];
    for (int32_t t = 0; t < tokens; t++) {
        from[t] = (t * 5 + tokens) % MM_PANEL_TOKENS;
        put_column(p, p->x + (size_t)from[t] * (size_t)p->k, tokens, x + t);
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
        .chunk_scale = chunk_scale,
        .out = out + GUARD,
    };
    const mm_kernels *kernels = mm_kernels_of(tier);
    (p->format == MM_TILE_MXFP4 ? kernels->dot_mxfp4_int8 : kernels->dot_nvfp4_int8)(&dot);

    bool ok = true;
    for (int32_t i = 0; i < GUARD && ok; i++)
        ok =
            T_CHECK_MSG(out[i] == GUARD_VALUE && out[GUARD + out_floats + (size_t)i] == GUARD_VALUE,
                        "%s wrote outside its output", kernels->tier);
    for (int32_t i = 0; i < (int32_t)out_floats && ok; i++) {
        const int32_t tile = i / 32 / tokens, t = i / 32 % tokens, row = i % 32;
        const float want = p->expected[from[t] * MAX_TILES * 32 + (first_tile + tile) * 32 + row];
        ok = T_CHECK_MSG(same_float(dot.out[i], want),
                         "%s k %d tokens %d tiles %d: tile %d token %d row %d: %a, expected %a",
                         kernels->tier, p->k, tokens, tiles, tile, t, row, (double)dot.out[i],
                         (double)want);
    }
    free(x);
    free(chunk_scale);
    free(out);
    return ok;
}

static void check_all(mm_tile_format format, enum spread spread, enum codes codes) {
    static const int32_t ks[] = {32, 64, 96, 128, 160, 224, 256, 352, 768, 2880};
    t_random r = t_random_start((uint64_t)(((int)format * SPREADS + (int)spread) * CODES) + codes);
    for (size_t i = 0; i < sizeof ks / sizeof *ks; i++) {
        struct problem p = make_problem(&r, format, ks[i], spread, codes);
        bool ok = true;
        for (mm_tier tier = MM_TIER_SCALAR; tier < MM_TIERS; tier++)
            for (int32_t tokens = 1; tokens <= MM_PANEL_TOKENS; tokens++)
                for (int32_t tiles = 1; tiles <= MAX_TILES; tiles++) {
                    const int32_t first = (int32_t)t_below(&r, (uint32_t)(MAX_TILES - tiles + 1));
                    /* More tiles of the longest would tell little for their time. */
                    if (!mm_tier_runs(tier) || (p.k > 700 && tiles != 3))
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
        check_all(format, USUAL, RANDOM);                                                          \
    }                                                                                              \
    T_CASE(name##_extreme) {                                                                       \
        check_all(format, USUAL, EXTREME);                                                         \
    }                                                                                              \
    T_CASE(name##_wide) {                                                                          \
        check_all(format, WIDE, RANDOM);                                                           \
    }                                                                                              \
    T_CASE(name##_nan) {                                                                           \
        check_all(format, NANS, RANDOM);                                                           \
    }

DOT_CASES(mxfp4, MM_TILE_MXFP4)
DOT_CASES(nvfp4, MM_TILE_NVFP4)
