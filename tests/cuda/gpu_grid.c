/* SPDX-License-Identifier: Apache-2.0 */
/*
 * On inputs for which no sum is rounded the CPU and the GPU give the same bits: partial sums below
 * 2^14 of their smallest product, gates at 0 or so far from it that the activation is a step.
 */
#include <math.h>
#include <stdlib.h>

#include "gpu.h"

enum { HIDDEN = 256, INTERMEDIATE = 192, EXPERTS = 3, TOKENS = 40, TOPK = 2 };

/* Any codes, scales 2 and 4, so weights are multiples of 1. */
static void put_on_grid(model *m, t_random *r) {
    const bool nvfp4 = m->layer.desc.format == MEGAMOE_FORMAT_NVFP4;
    for (int32_t i = 0; i < 3 * EXPERTS; i++) {
        const megamoe_projection projection = (megamoe_projection)(i % 3);
        layer_matrix(&m->layer, i / 3, projection)->global_scale = 1.0f;
        for (int32_t row = 0; row < layer_rows(&m->layer, projection); row++) {
            uint8_t *codes = layer_codes(&m->layer, i / 3, projection, row);
            uint8_t *scales = layer_scales(&m->layer, i / 3, projection, row);
            const int32_t columns = layer_columns(&m->layer, projection);
            for (int32_t k = 0; k < columns / 2; k++)
                codes[k] = (uint8_t)t_u64(r);
            for (int32_t k = 0; k < columns / (nvfp4 ? 16 : 32); k++)
                scales[k] = (uint8_t)(nvfp4 ? 0x40 + 8 * t_below(r, 2) : 128 + t_below(r, 2));
        }
    }
    model_reload(m);
}

/* The largest sum of a part of a row's products in units of `unit`. */
static double largest_partial(const double *w, const double *x, int32_t n, double unit) {
    double positive = 0, negative = 0, sum = 0, largest = 0;
    for (int32_t k = 0; k < n; k++) {
        if (k % 128 == 0)
            positive = negative = sum;
        sum += w[k] * x[k];
        *(w[k] * x[k] > 0 ? &positive : &negative) += w[k] * x[k];
        largest = fmax(largest, fmax(positive, -negative));
    }
    return largest / unit;
}

static void check_bounds(const model *m, const batch *b, double unit) {
    double x[HIDDEN];
    for (int64_t i = 0; i < b->tokens * TOPK; i++) {
        for (int32_t k = 0; k < HIDDEN; k++)
            x[k] = from_bf16(b->x[i / TOPK * HIDDEN + k]);
        for (int p = 0; p < 2; p++)
            for (int32_t row = 0; row < INTERMEDIATE; row++)
                T_REQUIRE(largest_partial(m->values[p] +
                                              (b->ids[i] * INTERMEDIATE + row) * (int64_t)HIDDEN,
                                          x, HIDDEN, unit) < 0x1p14);
    }
}

/*
 * x in +-{0, 112, 224, 448}: codes under scale one. The smallest product is 112, so a gate is 0 or
 * at least 112 from it; with a limit of 128, h is 0 or +-2^14 times the routing weight.
 */
static batch grid_batch(const model *m, t_random *r) {
    static const double steps[] = {0, 0, 112, -112, 224, -224, 448, -448};
    batch b = batch_random(m, TOKENS, TOPK, ROUTING_RANDOM, r);
    for (int64_t t = 0; t < TOKENS; t++) {
        for (int32_t k = 0; k < HIDDEN; k++)
            b.x[t * HIDDEN + k] = to_bf16(steps[t_below(r, 8)]);
        b.x[t * HIDDEN + 7] = b.x[t * HIDDEN + 135] = to_bf16(448);
        b.weights[TOPK * t] = 0.5f;
        b.weights[TOPK * t + 1] = 1.0f;
    }
    return b;
}

static void check_grid(const gpu *g, int i) {
    t_random r = t_random_start(10 + (uint64_t)i);
    const int format = i / 8;
    const model_recipe recipe = {format ? MEGAMOE_FORMAT_NVFP4 : MEGAMOE_FORMAT_MXFP4,
                                 HIDDEN,
                                 INTERMEDIATE,
                                 EXPERTS,
                                 MEGAMOE_DTYPE_NONE,
                                 {.limit = 128}};
    model m = model_open(&recipe, &r);
    put_on_grid(&m, &r);
    batch b = grid_batch(&m, &r);
    check_bounds(&m, &b, 112);
    setup s = {.weights = m.weights,
               .topk = TOPK,
               .input_scale = (megamoe_input_scale)(i & 1),
               .options = {.accumulate = (megamoe_accumulate)(i / 2 & 1),
                           .weight_after_fc2 = i & 4,
                           .nvfp4 = format == 2 ? MEGAMOE_NVFP4_FOLDED : MEGAMOE_NVFP4_EXACT}};
    uint16_t *want = gpu_rows(&b), *y = gpu_rows(&b);
    run_once(&s, &b, want);
    s.device = "cuda:0";
    s.deadline_ms = GPU_DEADLINE_MS;
    fleet f = fleet_open(&s);
    gpu_batch buffers = gpu_batch_open(TOKENS, HIDDEN, TOPK);
    gpu_forward(&f, &buffers, &b, y, g->stream);
    gpu_same(y, want, &b, "format %d, options %d", format, i % 8);
    int nonzero = 0;
    for (int64_t j = 0; j < TOKENS * HIDDEN; j++)
        nonzero += (want[j] & 0x7FFF) != 0;
    T_CHECK_MSG(nonzero > TOKENS * HIDDEN / 2, "only %d values are not zero", nonzero);
    gpu_batch_close(&buffers);
    fleet_close(&f);
    free(want);
    free(y);
    batch_free(&b);
    model_close(&m);
}

T_CASE(grid_inputs_give_the_same_on_cpu_and_gpu) {
    gpu g = gpu_start();
    for (int i = 0; i < 24; i++)
        check_grid(&g, i);
    gpu_end(&g);
}
