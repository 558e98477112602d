/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gates of docs/numerics.md against float64: what FC1 wrote, the row of each route from the
 * codes that FC1 wrote, and end to end. FC1's sums themselves are not in memory; that they are the
 * reference's to the bit is gpu_forward.c's subject, and the reference is held to its gate by
 * tests/cpu. Here h is seen through its E4M3 codes, whose rounding alone is 2.6e-2.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/workspace.h"
#include "gpu.h"
#include "layer/layer.h"

enum { HIDDEN = 1024, INTERMEDIATE = 512, EXPERTS = 4, TOKENS = 128, TOPK = 2 };

static const double hidden_gate = 3e-2, route_gate = 2.5e-3;

typedef struct subject {
    model m;
    batch b;
    setup s;
    bool folded, promote;
    double *const *values;       /* what the multiplier computes with */
    double *x;                   /* [tokens][hidden] as FC1 reads it */
    double *exact;               /* the same without quantization */
    uint16_t *y;                 /* the GPU's result */
    double *got, *want;          /* [tokens][hidden] */
    double h_difference, h_norm; /* squares, over all routes */
    double route_error;          /* the largest */
} subject;

static double *doubles(int64_t n) {
    double *memory = calloc((size_t)n, sizeof *memory);
    T_REQUIRE(memory);
    return memory;
}

static subject open_subject(int i) {
    static const megamoe_format formats[] = {MEGAMOE_FORMAT_MXFP4, MEGAMOE_FORMAT_NVFP4,
                                             MEGAMOE_FORMAT_NVFP4};
    t_random r = t_random_start(10 + (uint64_t)i);
    const int arithmetic = i / 4;
    const model_recipe recipe = {formats[arithmetic], HIDDEN,    INTERMEDIATE, EXPERTS,
                                 MEGAMOE_DTYPE_NONE,  {0, 0, 10}};
    subject s = {.m = model_open(&recipe, &r), .folded = arithmetic == 2, .promote = i & 1};
    if (s.folded)
        model_fold(&s.m);
    s.values = s.folded ? s.m.folded : s.m.values;
    s.b = batch_random(&s.m, TOKENS, TOPK, ROUTING_RANDOM, &r);
    s.s = (setup){.weights = s.m.weights,
                  .device = "cuda:0",
                  .deadline_ms = GPU_DEADLINE_MS,
                  .topk = TOPK,
                  .tokens = TOKENS,
                  .input_scale = i & 2 ? MEGAMOE_SCALE_BLOCK : MEGAMOE_SCALE_TOKEN,
                  .options = {.accumulate = (megamoe_accumulate)s.promote,
                              .nvfp4 = (megamoe_nvfp4_mode)s.folded}};
    s.x = doubles(TOKENS * HIDDEN);
    s.exact = doubles(TOKENS * HIDDEN);
    s.got = doubles(TOKENS * HIDDEN);
    s.want = doubles(TOKENS * HIDDEN);
    s.y = gpu_rows(&s.b);
    for (int64_t t = 0; t < TOKENS; t++)
        quantized_token(s.b.x + t * HIDDEN, HIDDEN, s.s.input_scale, s.x + t * HIDDEN);
    for (int64_t k = 0; k < TOKENS * HIDDEN; k++)
        s.exact[k] = from_bf16(s.b.x[k]);
    return s;
}

static void close_subject(subject *s) {
    free(s->x);
    free(s->exact);
    free(s->got);
    free(s->want);
    free(s->y);
    batch_free(&s->b);
    model_close(&s->m);
}

/* ---- what lies in the pools ---- */

typedef struct pools {
    mm_cuda_record *records;
    uint8_t *codes, *scales; /* of FC2's input */
    uint16_t *results;
    int64_t rows, results_stride;
} pools;

static void *read_memory(CUdeviceptr from, int64_t bytes) {
    void *memory = malloc((size_t)bytes);
    T_REQUIRE(memory);
    gpu_read(memory, (const void *)(uintptr_t)from, (size_t)bytes);
    return memory;
}

static pools read_pools(const mm_cuda_workspace *ws) {
    const mm_cuda_buffers *b = &ws->buffers;
    pools p = {.rows = b->rows, .results_stride = b->results_stride};
    gpu_wait();
    p.records = read_memory(ws->window + b->window.records, p.rows * (int64_t)sizeof *p.records);
    p.codes = read_memory(ws->local + b->local.hidden_codes, p.rows * b->intermediate_chunks * 128);
    p.scales = read_memory(ws->local + b->local.hidden_scales, p.rows * b->intermediate_chunks);
    p.results = read_memory(ws->window + b->window.results,
                            TOKENS * TOPK * p.results_stride * (int64_t)sizeof *p.results);
    return p;
}

static void free_pools(pools *p) {
    free(p->records);
    free(p->codes);
    free(p->scales);
    free(p->results);
}

/* A row of FC2's input. */
static void read_hidden(const pools *p, int64_t row, double *h) {
    const int64_t in = row % 16, scale_row = row - in + 4 * (in / 2 % 4) + 2 * (in / 8) + in % 2;
    for (int32_t c = 0; c < INTERMEDIATE / 128; c++) {
        const uint8_t *codes = p->codes + (c * p->rows + row) * 128;
        const int exponent = p->scales[c * p->rows + scale_row] - MM_CUDA_EXPONENT_BIAS;
        for (int32_t place = 0; place < 128; place++) {
            const int64_t piece = place / 16 ^ row % 8;
            h[128 * c + mm_cuda_place_k(place)] =
                ldexp(decode_e4m3(codes[piece * 16 + place % 16]), exponent);
        }
    }
}

static double dot(const double *a, const double *b, int32_t n) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

/* FC1, the activation and the weight of a route. */
static void hidden_of(const subject *s, int32_t expert, double weight, const double *x, double *h) {
    const int64_t matrix = (int64_t)expert * INTERMEDIATE * HIDDEN;
    for (int32_t i = 0; i < INTERMEDIATE; i++) {
        const int64_t row = matrix + (int64_t)i * HIDDEN;
        h[i] = weight * gated(&s->m.layer.desc.activation,
                              dot(s->values[MEGAMOE_GATE] + row, x, HIDDEN),
                              dot(s->values[MEGAMOE_UP] + row, x, HIDDEN));
    }
}

static void check_row(subject *s, const pools *p, int32_t expert, int64_t row) {
    const int32_t route = p->records[row].route;
    T_REQUIRE(route >= 0 && route < TOKENS * TOPK && s->b.ids[route] == expert);
    const double weight = (double)s->b.weights[route];
    T_EQ_F64(p->records[row].weight, weight);
    double h[INTERMEDIATE], exact[INTERMEDIATE], got[HIDDEN], want[HIDDEN];
    read_hidden(p, row, h);
    hidden_of(s, expert, weight, s->x + route / TOPK * HIDDEN, exact);
    for (int32_t i = 0; i < INTERMEDIATE; i++) {
        s->h_difference += (h[i] - exact[i]) * (h[i] - exact[i]);
        s->h_norm += exact[i] * exact[i];
    }
    for (int32_t i = 0; i < HIDDEN; i++) {
        const int64_t down = ((int64_t)expert * HIDDEN + i) * INTERMEDIATE;
        want[i] = dot(s->values[MEGAMOE_DOWN] + down, h, INTERMEDIATE);
        got[i] = from_bf16(p->results[route * p->results_stride + i]);
    }
    s->route_error = fmax(s->route_error, distance(got, want, HIDDEN));
}

/* Experts' rows begin at multiples of 16. */
static void check_stages(subject *s, const megamoe_workspace *ws) {
    pools p = read_pools(ws->cuda);
    int64_t row = 0;
    for (int32_t e = 0; e < EXPERTS; e++) {
        int64_t n = 0;
        for (int64_t i = 0; i < TOKENS * TOPK; i++)
            n += s->b.ids[i] == e;
        for (int64_t i = 0; i < n; i++)
            check_row(s, &p, e, row + i);
        row += (n + 15) / 16 * 16;
    }
    free_pools(&p);
}

static double end_to_end(subject *s, bool quantized) {
    const exactness how = {.values = quantized ? s->values : s->m.values,
                           .quantize_hidden = quantized};
    model_forward(&s->m, &how, &s->b, quantized ? s->x : s->exact, s->want);
    for (int64_t i = 0; i < TOKENS * HIDDEN; i++)
        s->got[i] = from_bf16(s->y[i]);
    return distance(s->got, s->want, TOKENS * HIDDEN);
}

static void check_gates(const gpu *g, int i) {
    subject s = open_subject(i);
    fleet f = fleet_open(&s.s);
    gpu_batch buffers = gpu_batch_open(TOKENS, HIDDEN, TOPK);
    gpu_forward(&f, &buffers, &s.b, s.y, g->stream);
    check_stages(&s, f.rank[0].workspace);
    const double hidden = sqrt(s.h_difference / s.h_norm);
    const double modelled = end_to_end(&s, true), plain = end_to_end(&s, false);
    const double modelled_gate = s.promote ? 5e-3 : 2e-2, plain_gate = s.folded ? 8e-2 : 6e-2;
    printf("  %s%s, %s, scale per %s: h %.2e, routes %.2e, end to end %.2e, unquantized %.2e\n",
           megamoe_format_name(s.m.layer.desc.format), s.folded ? " folded" : "",
           s.promote ? "promote" : "mma", i & 2 ? "block" : "token", hidden, s.route_error,
           modelled, plain);
    T_CHECK_MSG(hidden < hidden_gate, "h: %g", hidden);
    T_CHECK_MSG(s.route_error < route_gate, "routes: %g", s.route_error);
    T_CHECK_MSG(modelled < modelled_gate, "end to end: %g", modelled);
    T_CHECK_MSG(plain < plain_gate, "unquantized: %g", plain);
    gpu_batch_close(&buffers);
    fleet_close(&f);
    close_subject(&s);
}

T_CASE(accuracy_gates_against_float64) {
    gpu g = gpu_start();
    for (int i = 0; i < 12; i++)
        check_gates(&g, i);
    gpu_end(&g);
}
