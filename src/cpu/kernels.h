/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CPU's kernels: one table, filled tier by tier. All tiers give the same bits.
 *
 * The order of a sum (docs/numerics.md, item 10): one FP32 accumulator per (row, token), starting
 * at +0; for each pair of k, ascending, first acc = fma(x[2p+1], w[2p+1], acc), then
 * acc = fma(x[2p], w[2p], acc), rounded to nearest. With chunk scales ("promote") each chunk of
 * 128 k starts at +0 and sum = fma(partial, chunk scale, sum).
 *
 * With int8 activations: the sum over a group of k that share a weight scale is an exact integer;
 * each chunk starts at +0; for each of its groups, ascending, partial = fma(sum of the group,
 * scale, partial); then sum = fma(partial, chunk scale, sum), from +0.
 */
#ifndef MM_CPU_KERNELS_H
#define MM_CPU_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "weights/cpu_layout.h"

enum {
    MM_PANEL_TOKENS = 12, /* tokens that one pass over a tile takes */
    MM_BLOCK = 128        /* channels that share one scale of FC2's input */
};

/*
 * Int8 activations meet weights as integers: twice the E2M1 value, which leaves half of the scale.
 * To weights as unsigned bytes MM_INT8_OFFSET is added, and the sum of a group starts at
 * -MM_INT8_OFFSET times the sum of its activations. A scale's FP32 exponent field is *_FIELD less
 * the tile's byte (NVFP4: less byte >> 3), saturated at 0: that is met by groups of zeros only.
 *
 * A panel of int8 activations has for each group of group_k columns
 *   [tokens]     int32: what the group's sum starts at
 *   [group_k / 8][2][tokens] four codes each: those of k = 0, 4, 1, 5 of a slice of 8 k, from the
 *                lowest byte on, then those of 2, 6, 3, 7: the order of the nibbles in tiles
 */
enum {
    MM_INT8_OFFSET = 12,
    MM_INT8_MXFP4_FIELD = 127 + MM_MXFP4_SCALE_ZERO - MM_MXFP4_BIAS - 1,
    MM_INT8_NVFP4_FIELD = 127 + MM_NVFP4_SCALE_ZERO - 1
};

/* Of one token's k columns; k is a multiple of group_k. */
static inline int32_t mm_int8_panel_words(int32_t k, int32_t group_k) {
    return k / group_k + k / 4;
}

/* Products of `tiles` consecutive tiles with a panel of tokens. */
typedef struct mm_dot {
    const uint8_t *weights; /* 64-byte aligned tiles, tile_bytes apart */
    size_t tile_bytes;
    int32_t tiles;
    int32_t k;      /* multiple of MM_K_MULTIPLE */
    int32_t tokens; /* 1..MM_PANEL_TOKENS */
    /* Panel [k / 2][tokens]: BF16 pairs, the even k in the low half; E4M3 values times
     * 2^-48 .. 2^47, or NaN. A panel of int8 activations is described above. */
    const uint32_t *x;
    /* [ceil(k / 128)][tokens]; or NULL for one accumulator over all K, not for int8. */
    const float *chunk_scale;
    float *out; /* [tiles][tokens][MM_TILE_ROWS] */
} mm_dot;

/* Epilogue of FC1 for up to 8 tiles, a block of 128 channels: `out` of a dot to h. */
typedef struct mm_activate {
    const float *sums; /* [tiles][tokens][32]: 16 gate, 16 up */
    int32_t tiles;
    int32_t tokens;
    float sum_scale;           /* undoes the layout's bias */
    const float *token_scale;  /* [tokens] */
    const float *token_factor; /* [tokens]: 1 or 2^-64 */
    float gate_global, up_global;
    const int8_t *exponents; /* [tiles][32] */
    const float *bias;       /* [tiles][32] or NULL */
    float alpha, offset, limit;
    const float *route_weight; /* [tokens]: multiplied into h; NULL when it enters after FC2 */
    float *h;                  /* [tokens][MM_BLOCK], 16 channels for each tile */
} mm_activate;

/* Epilogue of FC2 for one tile: `out` of a dot to BF16 route rows. */
typedef struct mm_finish {
    const float *sums; /* [tokens][32] */
    int32_t tokens;
    int32_t rows; /* 1..32 that exist */
    float sum_scale;
    float global;
    const int8_t *exponents;   /* [32] */
    const float *bias;         /* [32] or NULL */
    const float *route_weight; /* [tokens] */
    int32_t weight_after;      /* w * (sum + bias), else sum + w * bias */
    uint16_t *const *out;      /* [tokens]: where this tile's rows of each route go */
} mm_finish;

/* X(name, arguments): every member of the table. */
#define MM_KERNEL_LIST(X)                                                                          \
    X(dot_mxfp4, (const mm_dot *dot))                                                              \
    X(dot_nvfp4, (const mm_dot *dot))                                                              \
    X(dot_e4m3, (const mm_dot *dot))                                                               \
    X(dot_mxfp4_int8, (const mm_dot *dot))                                                         \
    X(dot_nvfp4_int8, (const mm_dot *dot))                                                         \
    /* `rounds` rounds of the multiply-add of the dots, in registers alone: how many flops. */     \
    X(dot_peak, (int64_t rounds, double *flops))                                                   \
    X(dot_peak_int8, (int64_t rounds, double *flops))                                              \
    /* One token of n BF16: E4M3 codes, scale and second factor; x has 8-element granularity. */   \
    X(quantize_token, (const uint16_t *x, int32_t n, uint8_t *codes, float *scale, float *factor)) \
    /* Blocks of 128 of one token: E4M3 codes and E8M0 bytes. */                                   \
    X(quantize_blocks, (const uint16_t *x, int32_t n, uint8_t *codes, uint8_t *scales))            \
    /* n E4M3 codes of one token into column `column` of a panel with `tokens` columns, as BF16,   \
       times the E8M0 byte of each 128 where `scales` is not NULL; zero up to k. */                \
    X(expand, (const uint8_t *codes, const uint8_t *scales, int32_t n, int32_t k, uint32_t *panel, \
               int32_t tokens, int32_t column))                                                    \
    /* Blocks of 128 of one token: int8 codes and their scales, NaN for a block that holds one. */ \
    X(quantize_int8, (const uint16_t *x, int32_t n, uint8_t *codes, float *scales))                \
    /* n int8 codes of one token into column `column` of a panel for groups of group_k columns;    \
       zero up to k. */                                                                            \
    X(expand_int8, (const uint8_t *codes, int32_t n, int32_t k, int32_t group_k, uint32_t *panel,  \
                    int32_t tokens, int32_t column))                                               \
    X(activate, (const mm_activate *activate))                                                     \
    /* One token's n <= 128 values of h to E4M3 codes and one E8M0 byte. */                        \
    X(quantize_hidden, (const float *h, int32_t n, uint8_t *codes, uint8_t *scale))                \
    X(quantize_hidden_int8, (const float *h, int32_t n, uint8_t *codes, float *scale))             \
    X(finish, (const mm_finish *finish))                                                           \
    /* y = BF16(sum of n_routes BF16 rows in order, from +0). */                                   \
    X(combine, (const uint16_t *const *routes, int32_t n_routes, int32_t n, uint16_t *y))

typedef struct mm_kernels {
    const char *tier;
#define X(name, arguments) void(*name) arguments;
    MM_KERNEL_LIST(X)
#undef X
} mm_kernels;

/* mm_dot_mxfp4_scalar, mm_dot_mxfp4_avx2, ...: the definitions spell the names in full. */
#define X(name, arguments)                                                                         \
    void mm_##name##_scalar arguments;                                                             \
    void mm_##name##_avx2 arguments;                                                               \
    void mm_##name##_avx512 arguments;
MM_KERNEL_LIST(X)
#undef X

typedef enum mm_tier { MM_TIER_SCALAR, MM_TIER_AVX2, MM_TIER_AVX512, MM_TIERS } mm_tier;

/* The best tier of this machine, capped by MEGAMOE_CPU. MEGAMOE_EINVAL for an unknown word. */
MEGAMOE_CHECKED megamoe_status mm_tier_detect(mm_tier *tier);

/* Whether this machine and its operating system run a tier, whatever MEGAMOE_CPU says. */
int mm_tier_runs(mm_tier tier);

const mm_kernels *mm_kernels_of(mm_tier tier);

#endif
