/* SPDX-License-Identifier: Apache-2.0 */
/* The scalar reference against double arithmetic, stage by stage and end to end. */
#include "cpu/reference.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../layer/model.h"
#include "num/e4m3.h"
#include "num/gated.h"
#include "weights/weights.h"

/* What is tested: an arithmetic and its gates (docs/numerics.md). */
typedef struct arithmetic {
    megamoe_format format;
    megamoe_nvfp4_mode nvfp4;
    megamoe_sum sum;
    megamoe_accumulate accumulate;
} arithmetic;

static const arithmetic all[] = {
    {MEGAMOE_FORMAT_MXFP4, MEGAMOE_NVFP4_EXACT, MEGAMOE_SUM_FP32, MEGAMOE_ACCUMULATE_MMA},
    {MEGAMOE_FORMAT_MXFP4, MEGAMOE_NVFP4_EXACT, MEGAMOE_SUM_FP32, MEGAMOE_ACCUMULATE_PROMOTE},
    {MEGAMOE_FORMAT_MXFP4, MEGAMOE_NVFP4_EXACT, MEGAMOE_SUM_WGMMA, MEGAMOE_ACCUMULATE_MMA},
    {MEGAMOE_FORMAT_MXFP4, MEGAMOE_NVFP4_EXACT, MEGAMOE_SUM_WGMMA, MEGAMOE_ACCUMULATE_PROMOTE},
    {MEGAMOE_FORMAT_NVFP4, MEGAMOE_NVFP4_EXACT, MEGAMOE_SUM_FP32, MEGAMOE_ACCUMULATE_MMA},
    {MEGAMOE_FORMAT_NVFP4, MEGAMOE_NVFP4_EXACT, MEGAMOE_SUM_FP32, MEGAMOE_ACCUMULATE_PROMOTE},
    {MEGAMOE_FORMAT_NVFP4, MEGAMOE_NVFP4_EXACT, MEGAMOE_SUM_WGMMA, MEGAMOE_ACCUMULATE_MMA},
    {MEGAMOE_FORMAT_NVFP4, MEGAMOE_NVFP4_EXACT, MEGAMOE_SUM_WGMMA, MEGAMOE_ACCUMULATE_PROMOTE},
    {MEGAMOE_FORMAT_NVFP4, MEGAMOE_NVFP4_FOLDED, MEGAMOE_SUM_FP32, MEGAMOE_ACCUMULATE_MMA},
    {MEGAMOE_FORMAT_NVFP4, MEGAMOE_NVFP4_FOLDED, MEGAMOE_SUM_FP32, MEGAMOE_ACCUMULATE_PROMOTE},
    {MEGAMOE_FORMAT_NVFP4, MEGAMOE_NVFP4_FOLDED, MEGAMOE_SUM_WGMMA, MEGAMOE_ACCUMULATE_MMA},
    {MEGAMOE_FORMAT_NVFP4, MEGAMOE_NVFP4_FOLDED, MEGAMOE_SUM_WGMMA, MEGAMOE_ACCUMULATE_PROMOTE},
};
enum { ARITHMETICS = sizeof all / sizeof *all };

static void describe(const arithmetic *a, char *text, size_t bytes) {
    snprintf(text, bytes, "%s%s, sum %s, %s", megamoe_format_name(a->format),
             a->nvfp4 == MEGAMOE_NVFP4_FOLDED ? " folded" : "",
             a->sum == MEGAMOE_SUM_WGMMA ? "wgmma" : "fp32",
             a->accumulate == MEGAMOE_ACCUMULATE_PROMOTE ? "promote" : "mma");
}

/* The sum that truncates everywhere has gates of its own. */
static double gate_of(const arithmetic *a, double truncating, double others) {
    const bool truncates = a->sum == MEGAMOE_SUM_WGMMA && a->accumulate == MEGAMOE_ACCUMULATE_MMA;
    return truncates ? truncating : others;
}

static void *need(size_t bytes) {
    void *memory = calloc(bytes ? bytes : 1, 1);
    T_REQUIRE(memory);
    return memory;
}

static const megamoe_activation plain = {0}, deepseek = {0, 0, 10}, gpt_oss = {1.702f, 1, 7};

static model open_for(const arithmetic *a, int32_t hidden, int32_t intermediate, int32_t experts,
                      megamoe_dtype bias, megamoe_activation activation, t_random *random) {
    const model_recipe recipe = {a->format, hidden, intermediate, experts, bias, activation};
    model m = model_open(&recipe, random);
    if (a->nvfp4 == MEGAMOE_NVFP4_FOLDED)
        model_fold(&m);
    return m;
}

static double *const *values_of(const model *m, const arithmetic *a) {
    return a->nvfp4 == MEGAMOE_NVFP4_FOLDED ? m->folded : m->values;
}

/* ---- stage by stage ---- */

/* One row times one token through the reference's pieces, with its scales and without bias. */
static float row_times(const model *m, const arithmetic *a, int32_t expert,
                       megamoe_projection projection, int32_t row,
                       const mm_reference_input *input) {
    enum { MAX_COLUMNS = 1024 };
    static float high[MAX_COLUMNS], low[MAX_COLUMNS];
    static uint8_t high_codes[MAX_COLUMNS], low_codes[MAX_COLUMNS];
    const int32_t n = layer_columns(&m->layer, projection);
    int exponent;
    mm_weights_row(m->weights, a->nvfp4, expert, projection, row, high, low, &exponent);
    for (int32_t k = 0; k < n; k++) {
        high_codes[k] = mm_e4m3_from_f32(high[k]);
        low_codes[k] = mm_e4m3_from_f32(low[k]);
    }
    const bool two_terms = a->format == MEGAMOE_FORMAT_NVFP4 && a->nvfp4 == MEGAMOE_NVFP4_EXACT;
    const mm_reference_row operands = {high, low, high_codes, two_terms ? low_codes : NULL, n};
    const float sum = mm_reference_dot(&operands, input, a->sum, a->accumulate);
    return sum * input->scale * input->factor * mm_weights_global(m->weights, expert, projection) *
           ldexpf(1.0f, exponent);
}

/* What a quantized token holds, in double. */
static void values_of_input(const mm_reference_input *input, int32_t n, double *values) {
    for (int32_t i = 0; i < n; i++)
        values[i] = ldexp(decode_e4m3(input->codes[i]), input->blocks[i / 128] - 127) *
                    (double)input->scale * (double)input->factor;
}

static double dot(const double *a, const double *b, int32_t n) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

typedef struct stages {
    const model *m;
    const arithmetic *a;
    int32_t tokens;
    mm_reference_input hidden[32];
    uint8_t *codes, *blocks;
} stages;

/* FC1 of expert 0 for all tokens, from the codes that quantization gave; leaves FC2's input. */
static double run_fc1(stages *s, const batch *b, megamoe_input_scale mode) {
    const int32_t hidden = s->m->layer.desc.hidden, n = s->m->layer.desc.intermediate;
    const megamoe_activation *act = &s->m->layer.desc.activation;
    const size_t sums = (size_t)s->tokens * 2 * (size_t)n;
    double *got = need(sums * sizeof *got), *want = need(sums * sizeof *want);
    double *x = need((size_t)hidden * sizeof *x);
    uint8_t *codes = need((size_t)hidden), *blocks = need((size_t)hidden);
    float *h = need((size_t)n * sizeof *h);
    for (int32_t t = 0; t < s->tokens; t++) {
        mm_reference_input input = {.codes = codes, .blocks = blocks};
        mm_reference_quantize(b->x + (int64_t)t * hidden, hidden, mode, &input);
        values_of_input(&input, hidden, x);
        for (int32_t row = 0; row < n; row++) {
            float side[2];
            for (int p = 0; p < 2; p++) {
                const megamoe_projection projection = (megamoe_projection)p;
                const size_t at = ((size_t)t * 2 + (size_t)p) * (size_t)n + (size_t)row;
                side[p] = row_times(s->m, s->a, 0, projection, row, &input);
                got[at] = (double)side[p];
                want[at] = dot(values_of(s->m, s->a)[p] + (size_t)row * (size_t)hidden, x, hidden);
            }
            h[row] = mm_gated(side[0], side[1], act->alpha != 0 ? act->alpha : 1, act->offset,
                              act->limit != 0 ? act->limit : INFINITY);
        }
        s->hidden[t] = (mm_reference_input){.codes = s->codes + (size_t)t * (size_t)n,
                                            .blocks = s->blocks + (size_t)t * (size_t)n};
        mm_reference_quantize_hidden(h, n, &s->hidden[t]);
    }
    const double error = distance(got, want, (int64_t)sums);
    free(got);
    free(want);
    free(x);
    free(codes);
    free(blocks);
    free(h);
    return error;
}

/* FC2 of expert 0 from the codes that FC1 wrote: the largest error of a route's row. */
static double run_fc2(const stages *s) {
    const int32_t hidden = s->m->layer.desc.hidden, n = s->m->layer.desc.intermediate;
    double *got = need((size_t)hidden * sizeof *got), *want = need((size_t)hidden * sizeof *want);
    double *h = need((size_t)n * sizeof *h);
    double worst = 0;
    for (int32_t t = 0; t < s->tokens; t++) {
        values_of_input(&s->hidden[t], n, h);
        for (int32_t row = 0; row < hidden; row++) {
            got[row] = from_bf16(
                to_bf16((double)row_times(s->m, s->a, 0, MEGAMOE_DOWN, row, &s->hidden[t])));
            want[row] = dot(values_of(s->m, s->a)[MEGAMOE_DOWN] + (size_t)row * (size_t)n, h, n);
        }
        worst = fmax(worst, distance(got, want, hidden));
    }
    free(got);
    free(want);
    free(h);
    return worst;
}

static void check_stages(megamoe_input_scale mode) {
    for (int i = 0; i < ARITHMETICS; i++) {
        const arithmetic *a = &all[i];
        t_random r = t_random_start(100 + (uint64_t)i);
        model m = open_for(a, 512, 384, 1, MEGAMOE_DTYPE_NONE, plain, &r);
        batch b = batch_random(&m, 4, 1, ROUTING_RANDOM, &r);
        stages s = {.m = &m, .a = a, .tokens = 4};
        s.codes = need(4 * 384);
        s.blocks = need(4 * 384);
        const double fc1 = run_fc1(&s, &b, mode), fc2 = run_fc2(&s);
        char text[64];
        describe(a, text, sizeof text);
        printf("  %-32s FC1 %.2e, route rows %.2e\n", text, fc1, fc2);
        T_CHECK_MSG(fc1 <= gate_of(a, 2e-3, 2e-4), "%s: FC1 %g", text, fc1);
        T_CHECK_MSG(fc2 <= 2.5e-3, "%s: route rows %g", text, fc2);
        free(s.codes);
        free(s.blocks);
        batch_free(&b);
        model_close(&m);
    }
}

T_CASE(stages_token_scale) {
    check_stages(MEGAMOE_SCALE_TOKEN);
}

T_CASE(stages_block_scale) {
    check_stages(MEGAMOE_SCALE_BLOCK);
}

/* ---- end to end ---- */

enum { END_TO_END_TOKENS = 40 };

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_distance(const double *y, const double *want, const batch *b) {
    double distances[END_TO_END_TOKENS];
    for (int64_t t = 0; t < b->tokens; t++)
        distances[t] = distance(y + t * b->hidden, want + t * b->hidden, b->hidden);
    qsort(distances, (size_t)b->tokens, sizeof *distances, compare_doubles);
    return distances[b->tokens / 2];
}

/* Returns the distance to the operation on unquantized activations. */
static double check_end_to_end(const arithmetic *a, const model *m, const batch *b,
                               const megamoe_reference_options *options, uint64_t number) {
    const int64_t n = b->tokens * b->hidden;
    uint16_t *rows = need((size_t)n * sizeof *rows);
    double *y = need((size_t)n * sizeof *y), *want = need((size_t)n * sizeof *want);
    double *x = need((size_t)n * sizeof *x);
    const megamoe_view vx = view_x(b), ids = view_ids(b), weights = view_weights(b);
    const megamoe_view vy = view_y(rows, b);
    T_OK(megamoe_reference_forward(m->weights, options, b->topk, &vx, &ids, &weights, b->tokens,
                                   &vy));
    for (int64_t i = 0; i < n; i++)
        y[i] = from_bf16(rows[i]);

    const bool int8 = options->activations == MEGAMOE_ACTIVATIONS_INT8;
    for (int64_t t = 0; t < b->tokens; t++)
        if (int8)
            quantized_token_int8(b->x + t * b->hidden, b->hidden, x + t * b->hidden);
        else
            quantized_token(b->x + t * b->hidden, b->hidden, options->input_scale,
                            x + t * b->hidden);
    exactness how = {.values = values_of(m, a),
                     .weight_after_fc2 = options->weight_after_fc2,
                     .quantize_hidden = true,
                     .activations = options->activations};
    model_forward(m, &how, b, x, want);
    const double modelled = distance(y, want, n), median = median_distance(y, want, b);

    for (int64_t i = 0; i < n; i++)
        x[i] = from_bf16(b->x[i]);
    how = (exactness){.values = m->values, .weight_after_fc2 = options->weight_after_fc2};
    model_forward(m, &how, b, x, want);
    const double total = distance(y, want, n);

    char text[64];
    describe(a, text, sizeof text);
    printf("  %2" PRIu64 " %-32s%s modelled %.2e (median %.2e), unquantized %.2e\n", number, text,
           int8 ? " int8" : "", modelled, median, total);
    /*
     * Where a sum truncates, one code of h that flips in a channel that stands out moves a token by
     * some percent; this small, the batch as a whole feels it, the median token does not.
     */
    T_CHECK_MSG(modelled <= (a->sum == MEGAMOE_SUM_WGMMA ? 2e-2 : 5e-3), "%s: modelled %g", text,
                modelled);
    T_CHECK_MSG(median <= gate_of(a, 2e-2, 5e-3), "%s: median %g", text, median);
    T_CHECK_MSG(total <= (a->nvfp4 == MEGAMOE_NVFP4_FOLDED ? 8e-2 : 6e-2), "%s: unquantized %g",
                text, total);
    free(rows);
    free(y);
    free(want);
    free(x);
    return total;
}

T_CASE(end_to_end) {
    for (int i = 0; i < ARITHMETICS; i++) {
        const arithmetic *a = &all[i];
        for (int variant = 0; variant < 2; variant++) {
            const uint64_t number = (uint64_t)(2 * i + variant);
            t_random r = t_random_start(200 + number);
            model m = open_for(a, 128, 192, 3, variant ? MEGAMOE_DTYPE_BF16 : MEGAMOE_DTYPE_NONE,
                               variant ? gpt_oss : deepseek, &r);
            batch b = batch_random(&m, END_TO_END_TOKENS, 2, ROUTING_RANDOM, &r);
            megamoe_reference_options options = MEGAMOE_INIT(megamoe_reference_options);
            options.sum = a->sum;
            options.accumulate = a->accumulate;
            options.nvfp4 = a->nvfp4;
            options.weight_after_fc2 = (i + variant) % 2;
            options.input_scale = i % 3 == 1 ? MEGAMOE_SCALE_BLOCK : MEGAMOE_SCALE_TOKEN;
            options.threads = 1 + i % 2;
            check_end_to_end(a, &m, &b, &options, number);
            batch_free(&b);
            model_close(&m);
        }
    }
}

/* Input whose channels have scales of their own, some far above the others. */
static void put_outliers(batch *b, t_random *r) {
    for (int32_t k = 0; k < b->hidden; k++) {
        const double scale = exp(0.5 * t_normal(r)) * (t_below(r, 64) ? 1 : 12);
        for (int64_t t = 0; t < b->tokens; t++)
            b->x[t * b->hidden + k] = to_bf16(from_bf16(b->x[t * b->hidden + k]) * scale);
    }
}

/* With int8 activations a layer is nearer to the operation on unquantized ones than with E4M3. */
T_CASE(int8_end_to_end) {
    const megamoe_activation activations[] = {plain, deepseek, gpt_oss};
    for (int i = 0; i < 12; i++) {
        const bool nvfp4 = i & 1, outliers = i & 2;
        const arithmetic *a = &all[nvfp4 ? 4 : 0];
        t_random r = t_random_start(250 + (uint64_t)i);
        const bool full_size = i / 4 == 1; /* of Qwen3-30B-A3B */
        model m = open_for(a, full_size ? 2048 : 512, full_size ? 768 : 384, 3,
                           i % 3 ? MEGAMOE_DTYPE_BF16 : MEGAMOE_DTYPE_NONE, activations[i / 4], &r);
        batch b = batch_random(&m, full_size ? 6 : END_TO_END_TOKENS, 2, ROUTING_RANDOM, &r);
        if (outliers)
            put_outliers(&b, &r);
        megamoe_reference_options options = MEGAMOE_INIT(megamoe_reference_options);
        options.weight_after_fc2 = i & 4;
        options.threads = 1 + i % 2;
        double total[2];
        for (int type = 0; type < 2; type++) {
            options.activations = (megamoe_activation_type)type;
            total[type] = check_end_to_end(a, &m, &b, &options, 100 + (uint64_t)i);
        }
        T_CHECK_MSG(total[1] <= (outliers ? 5e-2 : 2.5e-2) && total[1] < total[0],
                    "int8 %g, E4M3 %g", total[1], total[0]);
        batch_free(&b);
        model_close(&m);
    }
}

/* ---- grid inputs: both sums are exact, so they are the same bits ---- */

/* Codes and scales of a small set, so that partial sums stay below 2^14 units. */
static void put_on_grid(model *m, t_random *r) {
    const bool nvfp4 = m->layer.desc.format == MEGAMOE_FORMAT_NVFP4;
    for (int32_t i = 0; i < 3 * m->layer.desc.experts; i++) {
        const int32_t expert = i / 3;
        const megamoe_projection projection = (megamoe_projection)(i % 3);
        layer_matrix(&m->layer, expert, projection)->global_scale = 1.0f;
        for (int32_t row = 0; row < layer_rows(&m->layer, projection); row++) {
            uint8_t *codes = layer_codes(&m->layer, expert, projection, row);
            uint8_t *scales = layer_scales(&m->layer, expert, projection, row);
            for (int32_t k = 0; k < layer_columns(&m->layer, projection); k++) {
                if (k % 2 == 0)
                    codes[k / 2] = (uint8_t)t_u64(r);
                if (k % 16 == 0) /* 2 or 4 */
                    scales[k / (nvfp4 ? 16 : 32)] =
                        (uint8_t)(nvfp4 ? 0x40 + 8 * t_below(r, 2) : 128 + t_below(r, 2));
            }
        }
    }
    model_reload(m);
}

/* Largest partial sum in units of the smallest product, over all orders that keep blocks whole. */
static double largest_partial(const model *m, int32_t expert, megamoe_projection projection,
                              const double *x, double unit) {
    const int32_t rows = layer_rows(&m->layer, projection);
    const int32_t columns = layer_columns(&m->layer, projection);
    const double *w = m->values[projection] + (int64_t)expert * rows * columns;
    double largest = 0;
    for (int32_t row = 0; row < rows; row++, w += columns) {
        double positive = 0, negative = 0, sum = 0;
        for (int32_t k = 0; k < columns; k++) {
            if (k % 128 == 0)
                positive = negative = sum;
            sum += w[k] * x[k];
            *(w[k] * x[k] > 0 ? &positive : &negative) += w[k] * x[k];
            largest = fmax(largest, fmax(positive, -negative));
        }
    }
    return largest / unit;
}

/*
 * x in +-{0, 112, 224, 448}: codes under scale one. The smallest product is 112, so a gate is 0 or
 * at least 112 from it; with a limit of 128, h is 0 or +-2^14.
 */
T_CASE(both_sums_agree_on_grid_inputs) {
    static const double steps[] = {0, 0, 112, -112, 224, -224, 448, -448};
    for (int i = 0; i < 24; i++) {
        const bool block = i & 1, promote = i & 2;
        const arithmetic *a = &all[(int[]){0, 4, 8}[i / 8]];
        t_random r = t_random_start(300 + (uint64_t)i);
        model m = open_for(a, 256, 192, 3, i & 4 ? MEGAMOE_DTYPE_BF16 : MEGAMOE_DTYPE_NONE,
                           (megamoe_activation){.limit = 128}, &r);
        put_on_grid(&m, &r);
        if (i & 4) /* biases that leave gates and ups where they are */
            for (int32_t j = 0; j < 9; j++)
                if (j % 3 != MEGAMOE_DOWN)
                    memset((void *)(uintptr_t)m.layer.matrices[j].bias, 0, 192 * 4);
        batch b = batch_random(&m, 8, 2, ROUTING_RANDOM, &r);
        for (int64_t t = 0; t < b.tokens; t++) {
            for (int32_t k = 0; k < 256; k++)
                b.x[t * 256 + k] = to_bf16(steps[t_below(&r, 8)]);
            b.x[t * 256 + 7] = b.x[t * 256 + 135] = to_bf16(448);
            b.weights[2 * t] = 0.5f;
            b.weights[2 * t + 1] = 1.0f;
            double x[256];
            for (int32_t k = 0; k < 256; k++)
                x[k] = from_bf16(b.x[t * 256 + k]);
            for (int32_t slot = 0; slot < 2; slot++)
                for (int p = 0; p < 2; p++)
                    T_REQUIRE(largest_partial(&m, b.ids[2 * t + slot], (megamoe_projection)p, x,
                                              112) < 0x1p14);
        }
        megamoe_reference_options options = MEGAMOE_INIT(megamoe_reference_options);
        options.nvfp4 = a->nvfp4;
        options.accumulate = promote ? MEGAMOE_ACCUMULATE_PROMOTE : MEGAMOE_ACCUMULATE_MMA;
        options.input_scale = block ? MEGAMOE_SCALE_BLOCK : MEGAMOE_SCALE_TOKEN;
        options.threads = 1;
        uint16_t y[2][8 * 256];
        const megamoe_view x = view_x(&b), ids = view_ids(&b), weights = view_weights(&b);
        for (int sum = 0; sum < 2; sum++) {
            const megamoe_view vy = view_y(y[sum], &b);
            options.sum = (megamoe_sum)sum;
            T_OK(megamoe_reference_forward(m.weights, &options, 2, &x, &ids, &weights, 8, &vy));
        }
        T_EQ_MEM(y[0], y[1], sizeof y[0]);
        int nonzero = 0;
        for (int j = 0; j < 8 * 256; j++)
            nonzero += (y[0][j] & 0x7FFF) != 0;
        T_CHECK_MSG(nonzero > 1000, "only %d values are not zero", nonzero);
        batch_free(&b);
        model_close(&m);
    }
}

/* ---- the order of FP32 sums ---- */

/* Operands of so many magnitudes that every addition rounds: any other order has other bits. */
T_CASE(fp32_sum_follows_its_order) {
    enum { MAX_N = 352 };
    t_random r = t_random_start(350);
    for (int round = 0; round < 2000; round++) {
        const int32_t n = 16 * (1 + (int32_t)t_below(&r, MAX_N / 16));
        const bool promote = round & 1;
        float high[MAX_N] = {0}, low[MAX_N] = {0};
        uint8_t codes[MAX_N] = {0}, blocks[3];
        for (int i = 0; i < 3; i++)
            blocks[i] = (uint8_t)(round & 2 ? 79 + t_below(&r, 96) : 127);
        for (int32_t k = 0; k < n; k++) {
            codes[k] = (uint8_t)(t_u64(&r) & 0xFE); /* no NaN */
            high[k] = ldexpf((float)t_below(&r, 16) - 7.5f, (int)t_below(&r, 12) - 9);
            low[k] = round & 4 ? high[k] / 2 : 0;
        }
        float sum = 0, partial = 0;
        for (int32_t k = 0; k < n; k += 2) {
            const float scale = promote ? 1 : ldexpf(1, blocks[k / 128] - 127);
            const float x[2] = {(float)decode_e4m3(codes[k]) * scale,
                                (float)decode_e4m3(codes[k + 1]) * scale};
            partial = fmaf(x[1], high[k + 1] + low[k + 1], partial);
            partial = fmaf(x[0], high[k] + low[k], partial);
            if (promote && (k % 128 == 126 || k + 2 == n)) {
                sum = fmaf(partial, ldexpf(1, blocks[k / 128] - 127), sum);
                partial = 0;
            }
        }
        const mm_reference_input input = {
            .codes = codes, .blocks = blocks, .scale = 1, .factor = 1};
        const mm_reference_row row = {high, low, NULL, NULL, n};
        if (!T_EQ_F64((double)mm_reference_dot(&row, &input, MEGAMOE_SUM_FP32,
                                               promote ? MEGAMOE_ACCUMULATE_PROMOTE
                                                       : MEGAMOE_ACCUMULATE_MMA),
                      (double)(promote ? sum : partial)))
            return;
    }
}

/* ---- single definitions ---- */

/* Vector D: gate 12, up -12. */
T_CASE(activation_vector) {
    T_NEAR((double)mm_gated(12, -12, 1, 0, 10), -99.9955, 5e-5);
    T_NEAR((double)mm_gated(12, -12, 1.702f, 1, 7), -41.9997, 5e-5);
    T_NEAR((double)mm_gated(12, -12, 1, 0, INFINITY), -143.9991, 5e-5);
}

T_CASE(activation_against_double) {
    t_random r = t_random_start(400);
    const megamoe_activation kinds[] = {plain, deepseek, gpt_oss};
    for (int i = 0; i < 30000; i++) {
        const megamoe_activation *a = &kinds[i % 3];
        const float g = (float)(t_normal(&r) * 20), u = (float)(t_normal(&r) * 5);
        const double want = gated(a, (double)g, (double)u);
        const float got = mm_gated(g, u, a->alpha != 0 ? a->alpha : 1, a->offset,
                                   a->limit != 0 ? a->limit : INFINITY);
        /* alpha * g is rounded before exp, which magnifies that by alpha * g. */
        const double ulps = 4 + fabs((double)g);
        if (!T_NEAR((double)got, want, fabs(want) * ulps * 0x1p-23 + 0x1p-110))
            return;
    }
    T_CHECK(isnan(mm_gated(NAN, 1, 1, 0, 10)));
    T_CHECK(isnan(mm_gated(1, NAN, 1, 0, 10)));
}

/* The codes and scale of a token, by the text of item 1. */
T_CASE(quantization_by_definition) {
    t_random r = t_random_start(500);
    enum { N = 300 };
    uint16_t x[N];
    uint8_t codes[N], blocks[3];
    double want[N], got[N];
    for (int round = 0; round < 60; round++) {
        const int exponent = (int)t_below(&r, 150) - 75;
        for (int i = 0; i < N; i++)
            x[i] = to_bf16(ldexp(t_normal(&r), exponent + (i < 128 ? 9 : 0)));
        for (int mode = 0; mode < 2; mode++) {
            mm_reference_input input = {.codes = codes, .blocks = blocks};
            mm_reference_quantize(x, N, (megamoe_input_scale)mode, &input);
            quantized_token(x, N, (megamoe_input_scale)mode, want);
            values_of_input(&input, N, got);
            T_EQ_MEM(got, want, sizeof got);
        }
    }
}

/* Below 2^-100 the token is lifted by 2^64 first; the product of the scales stays the same. */
T_CASE(tiny_tokens_keep_their_precision) {
    t_random r = t_random_start(501);
    enum { N = 64 };
    uint16_t x[N], lifted[N];
    uint8_t codes[2][N], blocks[2];
    for (int exponent = -126; exponent < -103; exponent++) {
        for (int i = 0; i < N; i++) {
            const double value = t_uniform(&r) - 0.5;
            lifted[i] = to_bf16(ldexp(value, exponent + 64));
            x[i] = to_bf16(ldexp(from_bf16(lifted[i]), -64));
            lifted[i] = to_bf16(ldexp(from_bf16(x[i]), 64));
        }
        mm_reference_input tiny = {.codes = codes[0], .blocks = &blocks[0]};
        mm_reference_input normal = {.codes = codes[1], .blocks = &blocks[1]};
        mm_reference_quantize(x, N, MEGAMOE_SCALE_TOKEN, &tiny);
        mm_reference_quantize(lifted, N, MEGAMOE_SCALE_TOKEN, &normal);
        T_EQ_MEM(codes[0], codes[1], N);
        T_EQ_F64((double)tiny.scale, (double)normal.scale);
        T_EQ_F64((double)tiny.factor, 0x1p-64);
        T_EQ_F64((double)normal.factor, 1);
    }
}

/* ---- refusals ---- */

T_CASE(refuses_what_the_tensor_core_cannot_hold) {
    t_random r = t_random_start(600);
    model m = open_for(&all[0], 64, 32, 2, MEGAMOE_DTYPE_NONE, plain, &r);
    /* A group 40 binades below its row. */
    memset(layer_codes(&m.layer, 1, MEGAMOE_UP, 5), 0x77, 32);
    layer_scales(&m.layer, 1, MEGAMOE_UP, 5)[0] = 100;
    layer_scales(&m.layer, 1, MEGAMOE_UP, 5)[1] = 140;
    batch b = batch_random(&m, 3, 2, ROUTING_RANDOM, &r);
    uint16_t y[3 * 64];
    const megamoe_view x = view_x(&b), ids = view_ids(&b), weights = view_weights(&b);
    const megamoe_view vy = view_y(y, &b);
    megamoe_reference_options options = MEGAMOE_INIT(megamoe_reference_options);
    options.sum = MEGAMOE_SUM_WGMMA;
    T_STATUS(megamoe_reference_forward(m.weights, &options, 2, &x, &ids, &weights, 3, &vy),
             MEGAMOE_EINEXACT);
    T_CONTAINS(megamoe_last_error(), "expert 1");
    T_CONTAINS(megamoe_last_error(), "row 5");
    options.sum = MEGAMOE_SUM_FP32;
    T_OK(megamoe_reference_forward(m.weights, &options, 2, &x, &ids, &weights, 3, &vy));
    batch_free(&b);
    model_close(&m);
}

T_CASE(refuses_bad_arguments) {
    t_random r = t_random_start(601);
    model m = open_for(&all[0], 64, 32, 2, MEGAMOE_DTYPE_NONE, plain, &r);
    batch b = batch_random(&m, 3, 2, ROUTING_RANDOM, &r);
    uint16_t y[3 * 64], poison[3 * 64];
    memset(y, 0x5A, sizeof y);
    memset(poison, 0x5A, sizeof poison);
    const megamoe_view x = view_x(&b), ids = view_ids(&b), weights = view_weights(&b);
    const megamoe_view vy = view_y(y, &b);
    b.ids[3] = 2;
    T_STATUS(megamoe_reference_forward(m.weights, NULL, 2, &x, &ids, &weights, 3, &vy),
             MEGAMOE_EID);
    T_CONTAINS(megamoe_last_error(), "token 1, slot 1");
    b.ids[3] = -2;
    T_STATUS(megamoe_reference_forward(m.weights, NULL, 2, &x, &ids, &weights, 3, &vy),
             MEGAMOE_EID);
    b.ids[3] = -1;
    megamoe_reference_options options = MEGAMOE_INIT(megamoe_reference_options);
    options.input_scale = MEGAMOE_SCALE_BLOCK_F32;
    T_STATUS(megamoe_reference_forward(m.weights, &options, 2, &x, &ids, &weights, 3, &vy),
             MEGAMOE_EINVAL);
    options.input_scale = MEGAMOE_SCALE_BLOCK;
    options.activations = MEGAMOE_ACTIVATIONS_INT8;
    T_STATUS(megamoe_reference_forward(m.weights, &options, 2, &x, &ids, &weights, 3, &vy),
             MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "input_scale is 1");
    options.input_scale = MEGAMOE_SCALE_TOKEN;
    options.sum = MEGAMOE_SUM_WGMMA;
    T_STATUS(megamoe_reference_forward(m.weights, &options, 2, &x, &ids, &weights, 3, &vy),
             MEGAMOE_EUNSUPPORTED);
    options.activations = (megamoe_activation_type)2;
    T_STATUS(megamoe_reference_forward(m.weights, &options, 2, &x, &ids, &weights, 3, &vy),
             MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "activations is 2");
    T_STATUS(megamoe_reference_forward(NULL, NULL, 2, &x, &ids, &weights, 3, &vy), MEGAMOE_EINVAL);
    T_STATUS(megamoe_reference_forward(m.weights, NULL, 0, &x, &ids, &weights, 3, &vy),
             MEGAMOE_EINVAL);
    T_STATUS(megamoe_reference_forward(m.weights, NULL, 2, NULL, &ids, &weights, 3, &vy),
             MEGAMOE_EINVAL);
    T_STATUS(megamoe_reference_forward(m.weights, NULL, 2, &ids, &ids, &weights, 3, &vy),
             MEGAMOE_EINVAL);
    T_STATUS(megamoe_reference_forward(m.weights, NULL, 2, &x, &ids, &weights, 4, &vy),
             MEGAMOE_EINVAL);
    T_EQ_MEM(y, poison, sizeof y);
    T_OK(megamoe_reference_forward(m.weights, NULL, 2, NULL, NULL, NULL, 0, NULL));
    batch_free(&b);
    model_close(&m);
}
