/* SPDX-License-Identifier: Apache-2.0 */
/* The row-wise kernels of every tier that runs here, to the bit against the scalar reference. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/kernels.h"
#include "cpu/reference.h"
#include "num/bf16.h"
#include "num/e4m3.h"
#include "num/gated.h"
#include "t.h"

enum { MAX_N = 300, MAX_BLOCKS = (MAX_N + MM_BLOCK - 1) / MM_BLOCK, GUARD = 64, GUARD_BYTE = 0xA5 };

/* A body for every tier that runs here. */
#define FOR_TIERS(kernels)                                                                         \
    for (int tier = 0; tier < MM_TIERS && mm_tier_runs((mm_tier)tier); tier++)                     \
        for (const mm_kernels *kernels = mm_kernels_of((mm_tier)tier); kernels; kernels = NULL)

typedef enum kind {
    NORMAL,
    WIDE, /* all exponents */
    ZERO, /* of both signs */
    TINY, /* below 2^-100 */
    SUBNORMAL,
    EDGE,     /* around 2^-100 and around 1.75 * 2^e, where the block exponent changes */
    HUGE_ROW, /* beyond 448 * 2^47, where power-of-two scales saturate */
    WITH_NAN,
    WITH_INFINITY,
    KINDS
} kind;

static float random_value(t_random *r, kind k) {
    const float sign = t_below(r, 2) ? -1.0f : 1.0f;
    switch (k) {
    case NORMAL:
    case WITH_NAN:
    case WITH_INFINITY:
        return (float)t_normal(r);
    case WIDE:
        return ldexpf(sign * (float)(1 + t_uniform(r)), (int)t_below(r, 120) - 60);
    case ZERO:
        return sign * 0.0f;
    case TINY:
        return ldexpf(sign * (float)(1 + t_uniform(r)), -101 - (int)t_below(r, 20));
    case SUBNORMAL:
        return ldexpf(sign, -127 - (int)t_below(r, 7));
    case EDGE:
        return ldexpf(sign * (1.0f + (float)(92 + t_below(r, 9)) / 128.0f),
                      t_below(r, 4) ? -101 : -100);
    case HUGE_ROW:
        return ldexpf(sign * (float)(1 + t_uniform(r)), 90 + (int)t_below(r, 38));
    case KINDS:
        break;
    }
    return 0;
}

/* n floats; NaN and infinity stand at one place. */
static void fill(t_random *r, kind k, int32_t n, float *values) {
    for (int32_t i = 0; i < n; i++)
        values[i] = random_value(r, k);
    const int32_t place = (int32_t)t_below(r, (uint32_t)n);
    if (k == WITH_NAN)
        values[place] = t_below(r, 2) ? NAN : -NAN;
    if (k == WITH_INFINITY)
        values[place] = t_below(r, 2) ? INFINITY : -INFINITY;
}

/* BF16, with NaN beyond n that a kernel must not see. */
static void fill_bf16(t_random *r, kind k, int32_t n, uint16_t *x) {
    float values[MAX_N];
    fill(r, k, n, values);
    for (int32_t i = 0; i < n; i++) {
        x[i] = mm_bf16_from_f32(values[i]);
        /* Rounding up may give infinity. */
        if (k == HUGE_ROW && (x[i] & 0x7FFF) == 0x7F80)
            x[i]--;
    }
    for (int32_t i = n; i < (n + 7) / 8 * 8; i++)
        x[i] = 0x7FC0;
}

static bool guarded(const uint8_t *bytes, size_t used) {
    for (int i = 0; i < GUARD; i++)
        if (bytes[used + (size_t)i] != GUARD_BYTE)
            return false;
    return true;
}

struct expected {
    uint8_t codes[MAX_N], blocks[MAX_BLOCKS];
    float block_scales[MAX_BLOCKS];
    mm_reference_input input;
};

static void expect(struct expected *e) {
    e->input = (mm_reference_input){
        .codes = e->codes, .blocks = e->blocks, .block_scales = e->block_scales};
}

T_CASE(quantize_token_follows_the_reference) {
    t_random r = t_random_start(1);
    uint16_t x[MAX_N + 8];
    struct expected e;
    expect(&e);
    for (int32_t n = 1; n <= MAX_N; n++)
        for (int k = 0; k < KINDS; k++) {
            fill_bf16(&r, (kind)k, n, x);
            mm_reference_quantize(x, n, MEGAMOE_SCALE_TOKEN, &e.input);
            FOR_TIERS(kernels) {
                uint8_t codes[MAX_N + GUARD];
                float scale, factor;
                memset(codes, GUARD_BYTE, sizeof codes);
                kernels->quantize_token(x, n, codes, &scale, &factor);
                const bool same = memcmp(codes, e.codes, (size_t)n) == 0 &&
                                  scale == e.input.scale && factor == e.input.factor;
                if (!T_CHECK_MSG(same, "%s, n %d, kind %d", kernels->tier, n, k) ||
                    !T_CHECK_MSG(guarded(codes, (size_t)n), "%s, n %d: guard", kernels->tier, n))
                    return;
            }
        }
}

T_CASE(quantize_blocks_follows_the_reference) {
    t_random r = t_random_start(2);
    uint16_t x[MAX_N + 8];
    struct expected e;
    expect(&e);
    for (int32_t n = 1; n <= MAX_N; n++)
        for (int k = 0; k < KINDS; k++) {
            fill_bf16(&r, (kind)k, n, x);
            mm_reference_quantize(x, n, MEGAMOE_SCALE_BLOCK, &e.input);
            const size_t blocks = (size_t)(n + MM_BLOCK - 1) / MM_BLOCK;
            FOR_TIERS(kernels) {
                uint8_t codes[MAX_N + GUARD], scales[MAX_BLOCKS + GUARD];
                memset(codes, GUARD_BYTE, sizeof codes);
                memset(scales, GUARD_BYTE, sizeof scales);
                kernels->quantize_blocks(x, n, codes, scales);
                const bool same =
                    memcmp(codes, e.codes, (size_t)n) == 0 && memcmp(scales, e.blocks, blocks) == 0;
                if (!T_CHECK_MSG(same, "%s, n %d, kind %d", kernels->tier, n, k) ||
                    !T_CHECK_MSG(guarded(codes, (size_t)n) && guarded(scales, blocks),
                                 "%s, n %d: guard", kernels->tier, n))
                    return;
            }
        }
}

T_CASE(quantize_hidden_follows_the_reference) {
    t_random r = t_random_start(3);
    float h[MAX_N];
    struct expected e;
    expect(&e);
    for (int32_t n = 1; n <= MM_BLOCK; n++)
        for (int k = 0; k < KINDS; k++)
            for (int round = 0; round < 4; round++) {
                fill(&r, (kind)k, n, h);
                mm_reference_quantize_hidden(h, n, &e.input);
                FOR_TIERS(kernels) {
                    uint8_t codes[MM_BLOCK + GUARD], scale;
                    memset(codes, GUARD_BYTE, sizeof codes);
                    kernels->quantize_hidden(h, n, codes, &scale);
                    const bool same =
                        memcmp(codes, e.codes, (size_t)n) == 0 && scale == e.blocks[0];
                    if (!T_CHECK_MSG(same, "%s, n %d, kind %d", kernels->tier, n, k) ||
                        !T_CHECK_MSG(guarded(codes, (size_t)n), "%s, n %d: guard", kernels->tier,
                                     n))
                        return;
                }
            }
}

static bool same_float(float a, float b) {
    return (isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof a) == 0;
}

static bool same_floats(const float *a, const float *b, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!same_float(a[i], b[i]))
            return false;
    return true;
}

T_CASE(quantize_int8_follows_the_reference) {
    t_random r = t_random_start(10);
    uint16_t x[MAX_N + 8];
    struct expected e;
    expect(&e);
    for (int32_t n = 1; n <= MAX_N; n++)
        for (int k = 0; k < KINDS; k++) {
            fill_bf16(&r, (kind)k, n, x);
            mm_reference_quantize_int8(x, n, &e.input);
            const size_t blocks = (size_t)(n + MM_BLOCK - 1) / MM_BLOCK;
            FOR_TIERS(kernels) {
                uint8_t codes[MAX_N + GUARD];
                float scales[MAX_BLOCKS + 1];
                memset(codes, GUARD_BYTE, sizeof codes);
                memset(scales, GUARD_BYTE, sizeof scales);
                kernels->quantize_int8(x, n, codes, scales);
                const bool same = memcmp(codes, e.codes, (size_t)n) == 0 &&
                                  same_floats(scales, e.block_scales, blocks);
                const uint8_t *end = (const uint8_t *)(scales + blocks);
                if (!T_CHECK_MSG(same, "%s, n %d, kind %d", kernels->tier, n, k) ||
                    !T_CHECK_MSG(guarded(codes, (size_t)n) && *end == GUARD_BYTE, "%s, n %d: guard",
                                 kernels->tier, n))
                    return;
            }
        }
}

T_CASE(quantize_hidden_int8_follows_the_reference) {
    t_random r = t_random_start(11);
    float h[MAX_N];
    struct expected e;
    expect(&e);
    for (int32_t n = 1; n <= MM_BLOCK; n++)
        for (int k = 0; k < KINDS; k++)
            for (int round = 0; round < 4; round++) {
                fill(&r, (kind)k, n, h);
                mm_reference_quantize_hidden_int8(h, n, &e.input);
                FOR_TIERS(kernels) {
                    uint8_t codes[MM_BLOCK + GUARD];
                    float scale;
                    memset(codes, GUARD_BYTE, sizeof codes);
                    kernels->quantize_hidden_int8(h, n, codes, &scale);
                    const bool same = memcmp(codes, e.codes, (size_t)n) == 0 &&
                                      same_float(scale, e.block_scales[0]);
                    if (!T_CHECK_MSG(same, "%s, n %d, kind %d", kernels->tier, n, k) ||
                        !T_CHECK_MSG(guarded(codes, (size_t)n), "%s, n %d: guard", kernels->tier,
                                     n))
                        return;
                }
            }
}

/* The order of kernels.h, zeros up to k, others untouched. */
T_CASE(expand_int8_puts_a_column) {
    static const int32_t places[2][4] = {{0, 4, 1, 5}, {2, 6, 3, 7}};
    t_random r = t_random_start(12);
    enum { MAX_K = 320, MARK = 0x12345678 };
    uint32_t panel[MAX_K / 2 * MM_PANEL_TOKENS];
    uint8_t codes[MAX_K];
    FOR_TIERS(kernels)
    for (int32_t n = 1; n <= MAX_N; n++) {
        const int32_t group = n % 2 ? 16 : 32, k = (n + 31) / 32 * 32;
        const int32_t tokens = 1 + (int32_t)t_below(&r, MM_PANEL_TOKENS);
        const int32_t column = (int32_t)t_below(&r, (uint32_t)tokens);
        const int32_t words = mm_int8_panel_words(k, group);
        for (int32_t i = 0; i < MAX_K; i++)
            codes[i] = (uint8_t)t_u64(&r); /* beyond n too */
        for (size_t i = 0; i < sizeof panel / sizeof *panel; i++)
            panel[i] = MARK;
        kernels->expand_int8(codes, n, k, group, panel, tokens, column);
        for (int32_t i = n; i < MAX_K; i++)
            codes[i] = 0;
        for (int32_t i = 0; i < MAX_K / 2 * MM_PANEL_TOKENS; i++) {
            uint32_t want = MARK;
            const int32_t word = i / tokens, in_group = word % (1 + group / 4);
            const int32_t first = word / (1 + group / 4) * group;
            if (i % tokens == column && word < words && in_group == 0) {
                int32_t sum = 0;
                for (int32_t j = first; j < first + group; j++)
                    sum += (int8_t)codes[j];
                want = (uint32_t)(-12 * sum);
            } else if (i % tokens == column && word < words) {
                const uint8_t *slice = codes + first + (in_group - 1) / 2 * 8;
                want = 0;
                for (int byte = 0; byte < 4; byte++)
                    want |= (uint32_t)slice[places[(in_group - 1) % 2][byte]] << 8 * byte;
            }
            T_REQUIRE(panel[i] == want);
        }
    }
}

/* NaN and infinity anywhere make a whole block 0x7F with scale one, and leave the others alone. */
T_CASE(non_finite_blocks) {
    t_random r = t_random_start(4);
    uint16_t x[MAX_N + 8];
    uint8_t codes[MAX_N], scales[MAX_BLOCKS];
    float scale, factor;
    FOR_TIERS(kernels)
    for (int32_t place = 0; place < MAX_N; place++) {
        fill_bf16(&r, NORMAL, MAX_N, x);
        x[place] = (uint16_t)(place % 2 ? 0xFF80 : 0x7FC1);
        kernels->quantize_blocks(x, MAX_N, codes, scales);
        for (int32_t i = 0; i < MAX_N; i++)
            if (!T_EQ_INT((codes[i] == 0x7F), (i / MM_BLOCK == place / MM_BLOCK)))
                return;
        T_EQ_INT(scales[place / MM_BLOCK], 123); /* of exponent -4 */
        kernels->quantize_token(x, MAX_N, codes, &scale, &factor);
        for (int32_t i = 0; i < MAX_N; i++)
            if (!T_EQ_INT(codes[i], 0x7F))
                return;
    }
}

/* A panel column: BF16 of the code times its block's scale, zeros up to k, others untouched. */
T_CASE(expand_puts_a_column) {
    t_random r = t_random_start(5);
    enum { MAX_K = 320, MARK = 0x12345678 };
    uint32_t panel[MAX_K / 2 * MM_PANEL_TOKENS];
    uint8_t codes[MAX_N], scales[MAX_BLOCKS];
    FOR_TIERS(kernels)
    for (int32_t n = 1; n <= MAX_N; n++) {
        const int32_t k = (n + 31) / 32 * 32;
        const int32_t tokens = 1 + (int32_t)t_below(&r, MM_PANEL_TOKENS);
        const int32_t column = (int32_t)t_below(&r, (uint32_t)tokens);
        const bool scaled = n % 3 != 0;
        for (int32_t i = 0; i < n; i++)
            codes[i] = (uint8_t)t_u64(&r); /* NaN codes too */
        for (int b = 0; b < MAX_BLOCKS; b++)
            scales[b] = (uint8_t)(79 + t_below(&r, 96));
        for (size_t i = 0; i < sizeof panel / sizeof *panel; i++)
            panel[i] = MARK;
        kernels->expand(codes, scaled ? scales : NULL, n, k, panel, tokens, column);
        for (int32_t i = 0; i < MAX_K / 2 * MM_PANEL_TOKENS; i++) {
            const bool mine = i % tokens == column && i / tokens < k / 2;
            if (!mine) {
                T_REQUIRE(panel[i] == MARK);
                continue;
            }
            for (int odd = 0; odd < 2; odd++) {
                const int32_t at = i / tokens * 2 + odd;
                const uint16_t bits = (uint16_t)(panel[i] >> 16 * odd);
                const int exponent = scaled ? scales[at / MM_BLOCK] - 127 : 0;
                const double want =
                    at < n ? ldexp((double)mm_e4m3_to_f32(codes[at]), exponent) : 0.0;
                if (!T_EQ_F64((double)mm_bf16_to_f32(bits), want))
                    return;
            }
        }
    }
}

static float random_sum(t_random *r) {
    if (t_below(r, 40) == 0)
        return t_below(r, 3) ? (t_below(r, 2) ? INFINITY : -INFINITY) : NAN;
    return ldexpf((float)t_normal(r), (int)t_below(r, 16) - 4);
}

/* What activation and finishing read: sums, row exponents and biases. */
struct epilogue {
    float sums[MM_PANEL_TOKENS * MM_TILE_ROWS];
    int8_t exponents[MM_TILE_ROWS];
    float bias[MM_TILE_ROWS];
    float scale[MM_PANEL_TOKENS], factor[MM_PANEL_TOKENS], weight[MM_PANEL_TOKENS];
};

static struct epilogue random_epilogue(t_random *r) {
    struct epilogue e;
    for (int i = 0; i < MM_PANEL_TOKENS * MM_TILE_ROWS; i++)
        e.sums[i] = random_sum(r);
    for (int i = 0; i < MM_TILE_ROWS; i++) {
        e.exponents[i] =
            (int8_t)(t_below(r, 8) ? (int)t_below(r, 12) - 6 : (int)t_below(r, 193) - 96);
        e.bias[i] = (float)t_normal(r);
    }
    for (int i = 0; i < MM_PANEL_TOKENS; i++) {
        e.scale[i] = (float)t_uniform(r);
        e.factor[i] = t_below(r, 4) ? 1.0f : 0x1p-64f;
        e.weight[i] = (float)t_uniform(r);
    }
    return e;
}

T_CASE(activate_follows_the_formula) {
    t_random r = t_random_start(6);
    static const float limits[] = {INFINITY, 10.0f, 7.0f};
    static const float alphas[] = {1.0f, 1.0f, 1.702f};
    static const float offsets[] = {0.0f, 0.0f, 1.0f};
    for (int round = 0; round < 600; round++) {
        const struct epilogue e = random_epilogue(&r);
        const int kind_of = round % 3, tokens = 1 + round % MM_PANEL_TOKENS;
        mm_activate a = {
            .sums = e.sums,
            .tiles = 1,
            .tokens = tokens,
            .sum_scale = round % 2 ? 0x1p-48f : 1.0f,
            .token_scale = e.scale,
            .token_factor = e.factor,
            .gate_global = 1.25f,
            .up_global = 0.3f,
            .exponents = e.exponents,
            .bias = round % 5 ? e.bias : NULL,
            .alpha = alphas[kind_of],
            .offset = offsets[kind_of],
            .limit = limits[kind_of],
            .route_weight = round % 7 ? e.weight : NULL,
        };
        FOR_TIERS(kernels) {
            float h[MM_PANEL_TOKENS * MM_BLOCK];
            memset(h, GUARD_BYTE, sizeof h);
            a.h = h;
            kernels->activate(&a);
            for (int i = 0; i < MM_PANEL_TOKENS * MM_BLOCK; i++) {
                const int token = i / MM_BLOCK, row = i % MM_BLOCK;
                if (token >= tokens || row >= MM_TILE_HALF) {
                    static const uint8_t untouched[4] = {GUARD_BYTE, GUARD_BYTE, GUARD_BYTE,
                                                         GUARD_BYTE};
                    T_REQUIRE(memcmp(&h[i], untouched, sizeof h[i]) == 0);
                    continue;
                }
                float side[2];
                for (int half = 0; half < 2; half++) {
                    const int j = half * MM_TILE_HALF + row;
                    float value = e.sums[token * MM_TILE_ROWS + j] * a.sum_scale;
                    value = value * e.scale[token];
                    value = value * e.factor[token];
                    value = value * (half ? a.up_global : a.gate_global);
                    side[half] =
                        fmaf(value, ldexpf(1.0f, e.exponents[j]), a.bias ? a.bias[j] : 0.0f);
                }
                float want = mm_gated(side[0], side[1], a.alpha, a.offset, a.limit);
                want = a.route_weight ? want * e.weight[token] : want;
                if (!T_CHECK_MSG(same_float(h[i], want), "%s: h[%d] %a, expected %a", kernels->tier,
                                 i, (double)h[i], (double)want))
                    return;
            }
        }
    }
}

T_CASE(finish_rounds_route_rows) {
    t_random r = t_random_start(7);
    for (int round = 0; round < 600; round++) {
        const struct epilogue e = random_epilogue(&r);
        const int tokens = 1 + round % MM_PANEL_TOKENS;
        const int rows = round % 4 ? MM_TILE_ROWS : 1 + (int)t_below(&r, MM_TILE_ROWS);
        FOR_TIERS(kernels) {
            uint16_t memory[MM_PANEL_TOKENS][MM_TILE_ROWS + 1];
            uint16_t *out[MM_PANEL_TOKENS];
            memset(memory, GUARD_BYTE, sizeof memory);
            for (int i = 0; i < MM_PANEL_TOKENS; i++)
                out[i] = memory[i];
            const mm_finish f = {
                .sums = e.sums,
                .tokens = tokens,
                .rows = rows,
                .sum_scale = round % 2 ? 0x1p-48f : 1.0f,
                .global = 0.7f,
                .exponents = e.exponents,
                .bias = round % 5 ? e.bias : NULL,
                .route_weight = e.weight,
                .weight_after = round % 3 == 0,
                .out = out,
            };
            kernels->finish(&f);
            for (int token = 0; token < MM_PANEL_TOKENS; token++)
                for (int row = 0; row <= MM_TILE_ROWS; row++) {
                    const uint16_t got = memory[token][row];
                    if (token >= tokens || row >= rows) {
                        T_REQUIRE(got == (GUARD_BYTE << 8 | GUARD_BYTE));
                        continue;
                    }
                    float value = e.sums[token * MM_TILE_ROWS + row] * f.sum_scale;
                    value = value * f.global;
                    const float factor = ldexpf(1.0f, e.exponents[row]);
                    const float bias = f.bias ? f.bias[row] : 0.0f, weight = e.weight[token];
                    value = f.weight_after ? weight * fmaf(value, factor, bias)
                                           : fmaf(value, factor, weight * bias);
                    const uint16_t want = mm_bf16_from_f32(value);
                    const bool both_nan = (got & 0x7FFF) > 0x7F80 && (want & 0x7FFF) > 0x7F80;
                    if (!T_CHECK_MSG(both_nan || got == want,
                                     "%s: row %d of token %d: %04x, "
                                     "expected %04x",
                                     kernels->tier, row, token, got, want))
                        return;
                }
        }
    }
}

/* Slot order, from +0. */
T_CASE(combine_sums_in_order) {
    t_random r = t_random_start(8);
    enum { MAX_ROUTES = 9 };
    uint16_t rows[MAX_ROUTES][MAX_N];
    const uint16_t *routes[MAX_ROUTES];
    for (int32_t n = 1; n <= MAX_N; n++) {
        const int32_t n_routes = (int32_t)t_below(&r, MAX_ROUTES + 1);
        for (int i = 0; i < MAX_ROUTES; i++) {
            const kind k = (kind)t_below(&r, KINDS);
            float values[MAX_N];
            fill(&r, n % 2 ? WIDE : k, n, values);
            for (int32_t c = 0; c < n; c++)
                rows[i][c] = mm_bf16_from_f32(values[c]);
            routes[i] = rows[i];
        }
        FOR_TIERS(kernels) {
            uint16_t y[MAX_N + GUARD];
            memset(y, GUARD_BYTE, sizeof y);
            kernels->combine(routes, n_routes, n, y);
            T_REQUIRE(guarded((uint8_t *)y, 2 * (size_t)n));
            for (int32_t c = 0; c < n; c++) {
                float sum = 0.0f;
                for (int32_t i = 0; i < n_routes; i++)
                    sum = sum + mm_bf16_to_f32(rows[i][c]);
                const uint16_t want = mm_bf16_from_f32(sum);
                const bool both_nan = (y[c] & 0x7FFF) > 0x7F80 && isnan(sum);
                if (!T_CHECK_MSG(both_nan || y[c] == want,
                                 "%s, n %d, %d routes: %04x, expected "
                                 "%04x",
                                 kernels->tier, n, n_routes, y[c], want))
                    return;
            }
        }
    }
}
