/* SPDX-License-Identifier: Apache-2.0 */
/* Staging on a GPU against the scalar reference: codes, scales, ids and weights as they lie there.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/reference.h"
#include "cuda/workspace.h"
#include "gpu.h"
#include "layer/layer.h"
#include "num/bf16.h"
#include "num/input.h"

enum { CAPACITY = 40, EXPERTS = 9, TOPK = 3 };

/* A workspace alone: staging needs no layer. */
typedef struct stager {
    gpu g;
    megamoe_comm *comm;
    megamoe_workspace *ws;
    int32_t hidden, chunks, topk;
    megamoe_input_scale mode;
} stager;

static stager open_stager(const gpu *g, int32_t hidden, int32_t topk, megamoe_input_scale mode) {
    stager s = {.g = *g, .hidden = hidden, .topk = topk, .mode = mode};
    s.chunks = (hidden + 127) / 128;
    megamoe_shape shape = MEGAMOE_INIT(megamoe_shape);
    shape.hidden = hidden;
    shape.intermediate = 64;
    shape.experts = EXPERTS;
    shape.topk = topk;
    shape.input_scale = mode;
    megamoe_capacity capacity = MEGAMOE_INIT(megamoe_capacity);
    capacity.tokens = CAPACITY;
    T_OK(megamoe_comm_self(&s.comm));
    T_OK(megamoe_workspace_create(s.comm, g->device, &shape, &capacity, &s.ws));
    return s;
}

static void close_stager(stager *s) {
    megamoe_workspace_close(s->ws);
    megamoe_comm_close(s->comm);
}

/* ---- what lies in the workspace ---- */

static void *read_local(const stager *s, uint64_t offset, size_t bytes) {
    void *memory = malloc(bytes);
    T_REQUIRE(memory);
    gpu_wait();
    gpu_read(memory, (const void *)(uintptr_t)(s->ws->cuda->local + offset), bytes);
    return memory;
}

static const mm_cuda_local *offsets(const stager *s) {
    return &s->ws->cuda->buffers.local;
}

static mm_cuda_state read_state(const stager *s) {
    mm_cuda_state *read = read_local(s, offsets(s)->state, sizeof *read);
    const mm_cuda_state state = *read;
    free(read);
    return state;
}

/* The bytes of a token in the order in which the multiplication reads them. */
static void in_order(const uint8_t *codes, int32_t hidden, int32_t chunks, uint8_t *placed) {
    for (int32_t i = 0; i < 128 * chunks; i++) {
        const int32_t k = i / 128 * 128 + mm_cuda_place_k(i % 128);
        placed[i] = k < hidden ? codes[k] : 0;
    }
}

static void check_codes(const stager *s, const uint8_t *const *codes, int32_t tokens) {
    const int32_t width = 128 * s->chunks;
    uint8_t *staged = read_local(s, offsets(s)->staged_codes, (size_t)tokens * (size_t)width);
    uint8_t *placed = calloc((size_t)width, 1);
    T_REQUIRE(placed);
    for (int32_t t = 0; t < tokens; t++) {
        in_order(codes[t], s->hidden, s->chunks, placed);
        int32_t wrong = 0, first = -1;
        for (int32_t i = width - 1; i >= 0; i--) {
            const uint8_t code = staged[t * width + i];
            /* The sign of a zero is lost in any sum. */
            if (code == placed[i] || ((code | placed[i]) & 0x7F) == 0)
                continue;
            wrong++;
            first = i;
        }
        T_CHECK_MSG(!wrong,
                    "hidden %d, token %d: %d codes differ; place %d has 0x%02X, expected 0x%02X",
                    s->hidden, t, wrong, first, staged[t * width + (first < 0 ? 0 : first)],
                    placed[first < 0 ? 0 : first]);
    }
    free(placed);
    free(staged);
}

/* ---- rows of all kinds ---- */

enum row_kind {
    ROW_NORMAL,
    ROW_ZERO,
    ROW_NEGATIVE_ZERO,
    ROW_NAN,
    ROW_INFINITE,
    ROW_TINY,       /* below 2^-100 */
    ROW_SUBNORMAL,  /* one BF16 subnormal, else zeros */
    ROW_HUGE,       /* the largest BF16 */
    ROW_MIXED,      /* blocks of very different size, some zero */
    ROW_LAST,       /* only the last channel */
    ROW_BEYOND_448, /* saturates in its block's clamped exponent */
    ROW_KINDS
};

static void fill_row(enum row_kind kind, uint16_t *x, int32_t n, t_random *r) {
    for (int32_t i = 0; i < n; i++)
        x[i] = to_bf16(t_normal(r));
    const int32_t at = (int32_t)t_below(r, (uint32_t)n);
    switch (kind) {
    case ROW_ZERO:
    case ROW_NEGATIVE_ZERO:
        for (int32_t i = 0; i < n; i++)
            x[i] = kind == ROW_ZERO ? 0 : 0x8000;
        break;
    case ROW_NAN:
        x[at] = 0xFFC1;
        break;
    case ROW_INFINITE:
        x[at] = 0xFF80;
        break;
    case ROW_TINY:
        for (int32_t i = 0; i < n; i++)
            x[i] = to_bf16(ldexp(t_normal(r), -112));
        break;
    case ROW_SUBNORMAL:
        memset(x, 0, (size_t)n * sizeof *x);
        x[at] = 0x8001;
        break;
    case ROW_HUGE:
        x[at] = 0x7F7F;
        break;
    case ROW_MIXED:
        for (int32_t i = 0; i < n; i++)
            x[i] = i / 128 % 3 == 1 ? 0 : to_bf16(ldexp(t_normal(r), i / 128 % 7 * 12 - 40));
        break;
    case ROW_LAST:
        memset(x, 0, (size_t)n * sizeof *x);
        x[n - 1] = to_bf16(1.75);
        break;
    case ROW_BEYOND_448:
        for (int32_t i = 0; i < n; i++)
            x[i] = to_bf16(ldexp(t_normal(r), 70));
        break;
    default:
        break;
    }
}

/* Rows of x and what the reference makes of them. */
typedef struct rows {
    int32_t n;
    uint16_t *x; /* [n][hidden] */
    uint8_t *codes, *blocks;
    mm_reference_input input[CAPACITY];
    const uint8_t *code_rows[CAPACITY];
} rows;

static rows open_rows(int32_t n, int32_t hidden, megamoe_input_scale mode, t_random *r) {
    const int32_t chunks = (hidden + 127) / 128;
    rows made = {.n = n,
                 .x = calloc((size_t)n * (size_t)hidden, sizeof(uint16_t)),
                 .codes = calloc((size_t)n, (size_t)hidden),
                 .blocks = calloc((size_t)n, (size_t)chunks)};
    T_REQUIRE(made.x && made.codes && made.blocks);
    for (int32_t t = 0; t < n; t++) {
        uint16_t *x = made.x + (size_t)t * (size_t)hidden;
        fill_row((enum row_kind)(t % ROW_KINDS), x, hidden, r);
        made.input[t].codes = made.codes + (size_t)t * (size_t)hidden;
        made.input[t].blocks = made.blocks + (size_t)t * (size_t)chunks;
        made.code_rows[t] = made.input[t].codes;
        mm_reference_quantize(x, hidden, mode, &made.input[t]);
    }
    return made;
}

static void close_rows(rows *r) {
    free(r->x);
    free(r->codes);
    free(r->blocks);
}

static void check_token_scales(const stager *s, const rows *w) {
    const size_t n = (size_t)w->n;
    float *scales = read_local(s, offsets(s)->staged_scales, n * sizeof *scales);
    uint8_t *tiny = read_local(s, offsets(s)->staged_tiny, n);
    for (int32_t t = 0; t < w->n; t++) {
        T_EQ_HEX(mm_f32_bits(scales[t]), mm_f32_bits(w->input[t].scale));
        T_EQ_INT(tiny[t], w->input[t].factor != 1.0f);
    }
    free(scales);
    free(tiny);
}

static void check_block_scales(const stager *s, const rows *w) {
    const size_t n = (size_t)w->n, chunks = (size_t)s->chunks;
    uint8_t *blocks = read_local(s, offsets(s)->staged_blocks, n * chunks);
    T_EQ_MEM(blocks, w->blocks, n * chunks);
    free(blocks);
}

/*
 * Staged from memory of any alignment and stride. Ids and weights are plain here; the next case is
 * about them.
 */
static void check_staging(const gpu *g, int32_t hidden, megamoe_input_scale mode, int32_t shift,
                          uint64_t seed) {
    t_random r = t_random_start(seed);
    stager s = open_stager(g, hidden, TOPK, mode);
    rows w = open_rows(CAPACITY - 1, hidden, mode, &r);
    const int64_t stride = (hidden + 7) / 8 * 8 + 8 * shift;
    const size_t elements = (size_t)(stride * w.n + shift);
    uint16_t *x = malloc(elements * sizeof *x);
    int32_t ids[CAPACITY * TOPK] = {0};
    float weights[CAPACITY * TOPK] = {0};
    T_REQUIRE(x);
    memset(x, 0xFF, elements * sizeof *x);
    for (int32_t t = 0; t < w.n; t++)
        memcpy(x + shift + t * stride, w.x + t * hidden, (size_t)hidden * sizeof *x);
    uint16_t *dx = gpu_copy(x, elements * sizeof *x);
    void *di = gpu_copy(ids, sizeof ids), *dw = gpu_copy(weights, sizeof weights);
    const megamoe_view vx = {dx + shift, MEGAMOE_DTYPE_BF16, w.n, stride};
    const megamoe_view vi = {di, MEGAMOE_DTYPE_I32, w.n, 0};
    const megamoe_view vw = {dw, MEGAMOE_DTYPE_F32, w.n, 0};
    T_OK(megamoe_stage(s.ws, &vx, &vi, &vw, w.n, g->stream));
    check_codes(&s, w.code_rows, w.n);
    if (mode == MEGAMOE_SCALE_TOKEN)
        check_token_scales(&s, &w);
    else
        check_block_scales(&s, &w);
    T_EQ_INT(read_state(&s).tokens, w.n);
    T_EQ_HEX(read_state(&s).order, UINT64_MAX);
    gpu_free(dx);
    gpu_free(di);
    gpu_free(dw);
    free(x);
    close_rows(&w);
    close_stager(&s);
}

T_CASE(stage_quantizes_rows) {
    static const int32_t widths[] = {1, 7, 16, 96, 127, 128, 129, 160, 320, 2040, 2880, 7168};
    gpu g = gpu_start();
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        for (int mode = 0; mode < 2; mode++)
            for (int32_t shift = 0; shift < 3; shift++)
                check_staging(&g, widths[i], (megamoe_input_scale)mode, shift, 10 * i + 1);
    gpu_end(&g);
}

/* ---- ids and weights ---- */

static void check_routes(const gpu *g, bool wide_ids, bool narrow_weights, int32_t topk) {
    t_random r = t_random_start(100 + (uint64_t)topk);
    stager s = open_stager(g, 64, topk, MEGAMOE_SCALE_TOKEN);
    const int32_t n = CAPACITY, stride = topk + 3, routes = n * topk;
    int64_t ids64[CAPACITY * 20];
    int32_t ids32[CAPACITY * 20], want_ids[CAPACITY * 16];
    uint16_t weights16[CAPACITY * 20];
    float weights32[CAPACITY * 20], want_weights[CAPACITY * 16];
    memset(ids64, 0x7E, sizeof ids64);
    memset(ids32, 0x7E, sizeof ids32);
    for (int32_t i = 0; i < routes; i++) {
        const int32_t at = i / topk * stride + i % topk;
        want_ids[i] = (int32_t)t_below(&r, EXPERTS + 1) - 1;
        ids64[at] = ids32[at] = want_ids[i];
        weights32[at] = (float)t_normal(&r);
        weights16[at] = to_bf16((double)weights32[at]);
        want_weights[i] = narrow_weights ? mm_bf16_to_f32(weights16[at]) : weights32[at];
    }
    uint16_t x[CAPACITY * 64] = {0};
    void *dx = gpu_copy(x, sizeof x);
    void *di = wide_ids ? gpu_copy(ids64, sizeof ids64) : gpu_copy(ids32, sizeof ids32);
    void *dw = narrow_weights ? gpu_copy(weights16, sizeof weights16)
                              : gpu_copy(weights32, sizeof weights32);
    const megamoe_view vx = {dx, MEGAMOE_DTYPE_BF16, n, 0};
    const megamoe_view vi = {di, wide_ids ? MEGAMOE_DTYPE_I64 : MEGAMOE_DTYPE_I32, n, stride};
    const megamoe_view vw = {dw, narrow_weights ? MEGAMOE_DTYPE_BF16 : MEGAMOE_DTYPE_F32, n,
                             stride};
    T_OK(megamoe_stage(s.ws, &vx, &vi, &vw, n, g->stream));
    int32_t *ids = read_local(&s, offsets(&s)->staged_ids, (size_t)routes * sizeof *ids);
    float *weights = read_local(&s, offsets(&s)->staged_weights, (size_t)routes * sizeof *weights);
    T_EQ_MEM(ids, want_ids, (size_t)routes * sizeof *ids);
    T_EQ_MEM(weights, want_weights, (size_t)routes * sizeof *weights);
    T_EQ_HEX(read_state(&s).order, UINT64_MAX);
    free(ids);
    free(weights);
    gpu_free(dx);
    gpu_free(di);
    gpu_free(dw);
    close_stager(&s);
}

T_CASE(stage_ids_and_weights_of_both_types) {
    gpu g = gpu_start();
    for (int i = 0; i < 4; i++)
        for (int32_t topk = 1; topk <= 16; topk += 5)
            check_routes(&g, i & 1, i & 2, topk);
    gpu_end(&g);
}

/* The error of the lowest token and slot is kept; good batches forget it. */
T_CASE(stage_ids_out_of_range) {
    static const int64_t bad[] = {-2, EXPERTS, INT32_MAX, INT64_MIN, (int64_t)1 << 32};
    gpu g = gpu_start();
    stager s = open_stager(&g, 64, TOPK, MEGAMOE_SCALE_TOKEN);
    uint16_t x[CAPACITY * 64] = {0};
    float weights[CAPACITY * TOPK] = {0};
    void *dx = gpu_copy(x, sizeof x), *dw = gpu_copy(weights, sizeof weights);
    int64_t ids[CAPACITY * TOPK];
    void *di = gpu_memory(sizeof ids);
    const megamoe_view vx = {dx, MEGAMOE_DTYPE_BF16, CAPACITY, 0};
    const megamoe_view vi = {di, MEGAMOE_DTYPE_I64, CAPACITY, 0};
    const megamoe_view vw = {dw, MEGAMOE_DTYPE_F32, CAPACITY, 0};
    t_random r = t_random_start(200);
    for (int round = 0; round < 40; round++) {
        int32_t lowest = CAPACITY * TOPK;
        for (int32_t i = 0; i < CAPACITY * TOPK; i++)
            ids[i] = (int64_t)t_below(&r, EXPERTS + 1) - 1;
        for (int n = 0; n < round % 8; n++) {
            const int32_t at = (int32_t)t_below(&r, CAPACITY * TOPK);
            ids[at] = bad[t_below(&r, sizeof bad / sizeof *bad)];
            lowest = at < lowest ? at : lowest;
        }
        gpu_write(di, ids, sizeof ids);
        T_OK(megamoe_stage(s.ws, &vx, &vi, &vw, CAPACITY, g.stream));
        gpu_wait();
        const mm_cuda_state state = read_state(&s);
        if (lowest == CAPACITY * TOPK) {
            T_EQ_HEX(state.order, UINT64_MAX);
        } else {
            T_EQ_HEX(state.order, (uint64_t)(lowest / TOPK * (TOPK + 1) + lowest % TOPK));
            T_EQ_INT(state.value, ids[lowest]);
        }
    }
    gpu_free(dx);
    gpu_free(di);
    gpu_free(dw);
    close_stager(&s);
    gpu_end(&g);
}

T_CASE(stage_no_tokens) {
    gpu g = gpu_start();
    stager s = open_stager(&g, 64, TOPK, MEGAMOE_SCALE_BLOCK);
    T_OK(megamoe_stage(s.ws, NULL, NULL, NULL, 0, g.stream));
    gpu_wait();
    T_EQ_INT(read_state(&s).tokens, 0);
    T_EQ_HEX(read_state(&s).order, UINT64_MAX);
    close_stager(&s);
    gpu_end(&g);
}

/* ---- a caller's own codes ---- */

/* What lies behind a row's codes is not looked at. */
static void check_views(const gpu *g, int32_t hidden, megamoe_input_scale mode) {
    t_random r = t_random_start(300 + (uint64_t)hidden);
    stager s = open_stager(g, hidden, TOPK, mode);
    megamoe_workspace_views views = MEGAMOE_INIT(megamoe_workspace_views);
    T_OK(megamoe_workspace_get_views(s.ws, &views));
    T_EQ_INT(views.codes.rows, CAPACITY);
    T_EQ_INT(views.topk_ids.rows, CAPACITY);
    T_CHECK(views.codes.stride >= hidden);
    const int64_t stride = views.codes.stride;
    const size_t bytes = (size_t)(CAPACITY * stride);
    uint8_t *codes = malloc(bytes);
    const uint8_t *code_rows[CAPACITY];
    int32_t ids[CAPACITY * TOPK];
    T_REQUIRE(codes);
    for (size_t i = 0; i < bytes; i++)
        codes[i] = (uint8_t)t_u64(&r);
    for (int32_t t = 0; t < CAPACITY; t++)
        code_rows[t] = codes + t * stride;
    for (int32_t i = 0; i < CAPACITY * TOPK; i++)
        ids[i] = (int32_t)t_below(&r, EXPERTS);
    gpu_write(views.codes.data, codes, bytes);
    for (int32_t t = 0; t < CAPACITY; t++)
        gpu_write((int32_t *)views.topk_ids.data + t * views.topk_ids.stride, ids + t * TOPK,
                  TOPK * sizeof *ids);
    /* All bytes from 79 to 174, and in the second round 78 and 175 in the middle. */
    const int32_t chunks = s.chunks;
    uint8_t *blocks = malloc((size_t)(CAPACITY * chunks));
    T_REQUIRE(blocks);
    for (int round = 0; round < (mode == MEGAMOE_SCALE_BLOCK ? 2 : 1); round++) {
        for (int32_t i = 0; i < CAPACITY * chunks; i++)
            blocks[i] = (uint8_t)(79 + i % 96);
        if (round) {
            blocks[7 * chunks + chunks / 2] = 78;
            blocks[9 * chunks] = 175;
        }
        if (mode == MEGAMOE_SCALE_BLOCK)
            for (int32_t t = 0; t < CAPACITY; t++)
                gpu_write((uint8_t *)views.scales.data + t * views.scales.stride,
                          blocks + t * chunks, (size_t)chunks);
        T_OK(megamoe_commit_staged(s.ws, CAPACITY, g->stream));
        check_codes(&s, code_rows, CAPACITY);
        const mm_cuda_state state = read_state(&s);
        T_EQ_INT(state.tokens, CAPACITY);
        T_EQ_HEX(state.order, round ? (uint64_t)(7 * (TOPK + 1) + TOPK) : UINT64_MAX);
        if (round)
            T_EQ_INT(state.value, 78);
        int32_t *staged = read_local(&s, offsets(&s)->staged_ids, sizeof ids);
        T_EQ_MEM(staged, ids, sizeof ids);
        free(staged);
    }
    free(blocks);
    free(codes);
    close_stager(&s);
}

T_CASE(stage_takes_the_callers_codes) {
    static const int32_t widths[] = {1, 30, 96, 128, 131, 320, 2880};
    gpu g = gpu_start();
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        for (int mode = 0; mode < 3; mode++)
            check_views(&g, widths[i], (megamoe_input_scale)mode);
    gpu_end(&g);
}
