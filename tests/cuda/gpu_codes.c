/* SPDX-License-Identifier: Apache-2.0 */
/* A caller's own codes and scales through a whole forward, each kind of scale. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/reference.h"
#include "gpu.h"
#include "num/bf16.h"
#include "num/gated.h"
#include "num/input.h"
#include "weights/weights.h"

enum { TOKENS = 23, TOPK = 2, HIDDEN = 352, INTERMEDIATE = 160, CHUNKS = 3, EXPERTS = 3 };

/* A batch as a caller would have quantized it; scales of the kind that is tried. */
typedef struct coded {
    batch b;
    uint8_t codes[TOKENS][HIDDEN];
    uint8_t blocks[TOKENS][CHUNKS];
    float token_scales[TOKENS];
    float block_scales[TOKENS][CHUNKS];
} coded;

static void quantize(coded *c, megamoe_input_scale mode) {
    for (int32_t t = 0; t < TOKENS; t++) {
        mm_reference_input input = {.codes = c->codes[t], .blocks = c->blocks[t]};
        mm_reference_quantize(c->b.x + t * HIDDEN, HIDDEN, mode, &input);
        c->token_scales[t] = input.scale;
    }
}

static void put_views(megamoe_workspace *ws, const coded *c) {
    megamoe_workspace_views v = MEGAMOE_INIT(megamoe_workspace_views);
    T_OK(megamoe_workspace_get_views(ws, &v));
    const void *scales[] = {c->token_scales, c->blocks, c->block_scales};
    const size_t widths[] = {sizeof c->token_scales[0], sizeof c->blocks[0],
                             sizeof c->block_scales[0]};
    const size_t element = v.scales.dtype == MEGAMOE_DTYPE_E8M0 ? 1 : sizeof(float);
    const int kind = v.scales.dtype == MEGAMOE_DTYPE_E8M0 ? 1 : v.scales.stride == 1 ? 0 : 2;
    for (int64_t t = 0; t < TOKENS; t++) {
        gpu_write((uint8_t *)v.codes.data + t * v.codes.stride, c->codes[t], HIDDEN);
        gpu_write((uint8_t *)v.scales.data + (size_t)(t * v.scales.stride) * element,
                  (const uint8_t *)scales[kind] + (size_t)t * widths[kind], widths[kind]);
        gpu_write((int32_t *)v.topk_ids.data + t * v.topk_ids.stride, c->b.ids + t * TOPK,
                  TOPK * sizeof *c->b.ids);
        gpu_write((float *)v.topk_weights.data + t * v.topk_weights.stride, c->b.weights + t * TOPK,
                  TOPK * sizeof *c->b.weights);
    }
}

static setup setup_of(const model *m, megamoe_input_scale mode, bool promote) {
    return (setup){.weights = m->weights,
                   .device = "cuda:0",
                   .deadline_ms = GPU_DEADLINE_MS,
                   .topk = TOPK,
                   .input_scale = mode,
                   .options.accumulate =
                       promote ? MEGAMOE_ACCUMULATE_PROMOTE : MEGAMOE_ACCUMULATE_MMA};
}

static void check_codes(const gpu *g, const setup *s, const coded *c, const uint16_t *want,
                        const char *what) {
    fleet f = fleet_open(s);
    gpu_batch buffers = gpu_batch_open(TOKENS, HIDDEN, TOPK);
    uint16_t *y = gpu_rows(&c->b);
    int32_t tiles[GPU_TILES_MAX];
    const int32_t n = gpu_tiles(&f, tiles);
    for (int32_t i = 0; i < n; i++) {
        gpu_force_tile(&f, tiles[i]);
        gpu_batch_put(&buffers, &c->b);
        put_views(f.rank[0].workspace, c);
        T_OK(megamoe_commit_staged(f.rank[0].workspace, TOKENS, g->stream));
        T_OK(gpu_compute(&f, &buffers, g->stream));
        gpu_batch_result(&buffers, y);
        T_OK(megamoe_workspace_status(f.rank[0].workspace, NULL));
        gpu_same(y, want, &c->b, "%s, tile %d", what, tiles[i]);
    }
    free(y);
    gpu_batch_close(&buffers);
    fleet_close(&f);
}

static coded *open_coded(const model *m, t_random *r) {
    coded *c = calloc(1, sizeof *c);
    T_REQUIRE(c);
    c->b = batch_random(m, TOKENS, TOPK, ROUTING_RANDOM, r);
    return c;
}

static void close_coded(coded *c) {
    batch_free(&c->b);
    free(c);
}

static const model_recipe recipe = {MEGAMOE_FORMAT_MXFP4, HIDDEN,        INTERMEDIATE, EXPERTS,
                                    MEGAMOE_DTYPE_BF16,   {1.702f, 1, 7}};

/* The codes and scales that staging would have made give what staging gives. */
T_CASE(codes_scales_per_token_and_per_block) {
    gpu g = gpu_start();
    for (int i = 0; i < 4; i++) {
        t_random r = t_random_start(10 + (uint64_t)i);
        model m = model_open(&recipe, &r);
        coded *c = open_coded(&m, &r);
        const setup s = setup_of(&m, (megamoe_input_scale)(i / 2), i % 2);
        quantize(c, s.input_scale);
        uint16_t *want = gpu_rows(&c->b);
        gpu_reference(&s, &c->b, want);
        check_codes(&g, &s, c, want, i / 2 ? "exponents per block" : "scales per token");
        free(want);
        close_coded(c);
        model_close(&m);
    }
    gpu_end(&g);
}

/* ---- FP32 scales per block: the definition, one route at a time ---- */

static float promoted(const model *m, int32_t expert, megamoe_projection projection, int32_t row,
                      const uint8_t *codes, const float *scales) {
    float high[HIDDEN], low[HIDDEN];
    uint8_t operands[HIDDEN];
    int exponent;
    mm_weights_row(m->weights, MEGAMOE_NVFP4_EXACT, expert, projection, row, high, low, &exponent);
    const int32_t n = layer_columns(&m->layer, projection);
    float sum = 0;
    for (int32_t k = 0; k < n; k++)
        operands[k] = mm_e4m3_from_f32(high[k]);
    for (int32_t k = 0; k < n; k += 128) {
        uint8_t one = MM_BLOCK_BYTE_ZERO;
        mm_reference_input input = {.codes = (uint8_t *)(uintptr_t)(codes + k), .blocks = &one};
        const mm_reference_row block = {.high_codes = operands + k, .n = n - k < 128 ? n - k : 128};
        sum = fmaf(mm_reference_dot(&block, &input, MEGAMOE_SUM_WGMMA, MEGAMOE_ACCUMULATE_MMA),
                   scales[k / 128], sum);
    }
    return sum * mm_exp2i(exponent);
}

static void route_by_definition(const model *m, int32_t expert, float weight, const uint8_t *codes,
                                const float *scales, float *out) {
    const megamoe_activation *a = &m->layer.desc.activation;
    float h[INTERMEDIATE];
    for (int32_t i = 0; i < INTERMEDIATE; i++) {
        const float gate = promoted(m, expert, MEGAMOE_GATE, i, codes, scales) +
                           mm_weights_bias(m->weights, expert, MEGAMOE_GATE, i);
        const float up = promoted(m, expert, MEGAMOE_UP, i, codes, scales) +
                         mm_weights_bias(m->weights, expert, MEGAMOE_UP, i);
        h[i] = mm_gated(gate, up, a->alpha, a->offset, a->limit) * weight;
    }
    uint8_t hidden_codes[INTERMEDIATE], blocks[2];
    mm_reference_input input = {.codes = hidden_codes, .blocks = blocks};
    mm_reference_quantize_hidden(h, INTERMEDIATE, &input);
    const float hidden_scales[] = {mm_exp2i(blocks[0] - MM_BLOCK_BYTE_ZERO),
                                   mm_exp2i(blocks[1] - MM_BLOCK_BYTE_ZERO)};
    for (int32_t row = 0; row < HIDDEN; row++) {
        const float value = promoted(m, expert, MEGAMOE_DOWN, row, hidden_codes, hidden_scales) +
                            weight * mm_weights_bias(m->weights, expert, MEGAMOE_DOWN, row);
        out[row] = mm_bf16_to_f32(mm_bf16_from_f32(value));
    }
}

static void by_definition(const model *m, const coded *c, uint16_t *y) {
    for (int32_t t = 0; t < TOKENS; t++) {
        float sum[HIDDEN] = {0}, row[HIDDEN];
        for (int32_t slot = 0; slot < TOPK; slot++) {
            route_by_definition(m, c->b.ids[t * TOPK + slot], c->b.weights[t * TOPK + slot],
                                c->codes[t], c->block_scales[t], row);
            for (int32_t i = 0; i < HIDDEN; i++)
                sum[i] += row[i];
        }
        for (int32_t i = 0; i < HIDDEN; i++)
            y[t * HIDDEN + i] = mm_bf16_from_f32(sum[i]);
    }
}

/* Powers of two against the reference, which has those alone; any others against the definition. */
T_CASE(codes_fp32_scales_per_block) {
    gpu g = gpu_start();
    for (int any = 0; any < 2; any++) {
        t_random r = t_random_start(20 + (uint64_t)any);
        model m = model_open(&recipe, &r);
        coded *c = open_coded(&m, &r);
        uint16_t *want = gpu_rows(&c->b), *again = gpu_rows(&c->b);
        setup s = setup_of(&m, MEGAMOE_SCALE_BLOCK, true);
        quantize(c, MEGAMOE_SCALE_BLOCK);
        for (int32_t t = 0; t < TOKENS; t++)
            for (int32_t i = 0; i < CHUNKS; i++)
                c->block_scales[t][i] = mm_exp2i(c->blocks[t][i] - MM_BLOCK_BYTE_ZERO);
        by_definition(&m, c, want);
        gpu_reference(&s, &c->b, again);
        gpu_same(want, again, &c->b, "the two references");
        for (int32_t t = 0; any && t < TOKENS; t++)
            for (int32_t i = 0; i < CHUNKS; i++)
                c->block_scales[t][i] *= (float)(0.5 + t_uniform(&r));
        by_definition(&m, c, want);
        s.input_scale = MEGAMOE_SCALE_BLOCK_F32;
        check_codes(&g, &s, c, want, any ? "scales per block" : "powers of two as scales");
        free(want);
        free(again);
        close_coded(c);
        model_close(&m);
    }
    gpu_end(&g);
}
