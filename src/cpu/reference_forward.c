/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe_reference_forward: one expert after the other, its rows spread over threads. */
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/pool.h"
#include "base/view.h"
#include "cpu/reference.h"
#include "num/bf16.h"
#include "num/e4m3.h"
#include "num/exp.h"
#include "num/gated.h"
#include "num/input.h"
#include "weights/hold.h"
#include "weights/rows.h"
#include "weights/weights.h"

struct route {
    int64_t token;
    int32_t slot;
    float weight;
};

struct reference {
    const megamoe_weights *weights;
    megamoe_layer_desc desc;
    megamoe_reference_options options;
    mm_pool *pool;
    int64_t tokens;
    int32_t topk;
    mm_reference_input *inputs; /* [tokens] */
    uint8_t *input_codes, *input_blocks;
    float *input_block_scales;
    int32_t *ids;         /* [tokens * topk] */
    float *route_weights; /* [tokens * topk] */
    float *route_rows;    /* [tokens * topk][hidden]: BF16 values */
    /* The expert at work. */
    int32_t expert;
    struct route *routes; /* [tokens * topk] */
    int64_t n_routes;
    float *gate, *up;           /* [routes of one expert][intermediate] */
    mm_reference_input *hidden; /* [tokens * topk] */
    uint8_t *hidden_codes, *hidden_blocks;
    float *hidden_block_scales;
    /* By thread. */
    float *row_scratch;     /* [threads][2][longest row] */
    uint8_t *code_scratch;  /* [threads][2][longest row] */
    atomic_int inexact_row; /* a row that has no exact E4M3 operands, or -1 */
    atomic_int inexact_projection;
};

static bool exact_codes(const float *values, int32_t n, uint8_t *codes) {
    for (int32_t i = 0; i < n; i++) {
        codes[i] = mm_e4m3_from_f32(values[i]);
        if (mm_e4m3_to_f32(codes[i]) != values[i])
            return false;
    }
    return true;
}

static bool int8_of(const struct reference *r) {
    return r->options.activations == MEGAMOE_ACTIVATIONS_INT8;
}

/* One row of weights with every route of the expert, scaled, and its bias. */
static void run_row(struct reference *r, int32_t thread, megamoe_projection projection, int32_t row,
                    const mm_reference_input *const *inputs, float *out, int64_t out_stride) {
    const int32_t n = mm_columns(&r->desc, projection);
    const size_t longest = (size_t)mm_max(r->desc.hidden, r->desc.intermediate);
    float *high = r->row_scratch + (size_t)thread * 2 * longest, *low = high + longest;
    uint8_t *high_codes = r->code_scratch + (size_t)thread * 2 * longest;
    uint8_t *low_codes = high_codes + longest;
    const megamoe_nvfp4_mode mode = mm_weights_nvfp4_mode(r->weights, r->options.nvfp4);
    const bool two_terms = r->desc.format == MEGAMOE_FORMAT_NVFP4 && mode == MEGAMOE_NVFP4_EXACT;
    int exponent;
    mm_weights_row(r->weights, mode, r->expert, projection, row, high, low, &exponent);
    mm_reference_row operands = {.high = high, .low = low, .n = n};
    if (r->options.sum == MEGAMOE_SUM_WGMMA) {
        if (!exact_codes(high, n, high_codes) || (two_terms && !exact_codes(low, n, low_codes))) {
            atomic_store(&r->inexact_projection, (int)projection);
            atomic_store(&r->inexact_row, row);
            return;
        }
        operands.high_codes = high_codes;
        operands.low_codes = two_terms ? low_codes : NULL;
    }
    const float global = mm_weights_global(r->weights, r->expert, projection);
    const float bias = mm_weights_bias(r->weights, r->expert, projection, row);
    const bool weighted = projection == MEGAMOE_DOWN && !r->options.weight_after_fc2;
    for (int64_t i = 0; i < r->n_routes; i++) {
        const float sum =
            int8_of(r)
                ? mm_reference_dot_int8(&operands, mm_group_size(r->desc.format), inputs[i])
                : mm_reference_dot(&operands, inputs[i], r->options.sum, r->options.accumulate);
        out[i * out_stride] =
            fmaf(sum * inputs[i]->scale * inputs[i]->factor * global, mm_exp2i(exponent),
                 weighted ? r->routes[i].weight * bias : bias);
    }
}

struct stage {
    struct reference *reference;
    const mm_reference_input **inputs; /* [n_routes] */
};

static void run_fc1_rows(void *argument, int32_t thread, int32_t threads) {
    struct stage *stage = argument;
    struct reference *r = stage->reference;
    const int32_t rows = r->desc.intermediate;
    for (int32_t row = thread; row < rows; row += threads) {
        run_row(r, thread, MEGAMOE_GATE, row, stage->inputs, r->gate + row, rows);
        run_row(r, thread, MEGAMOE_UP, row, stage->inputs, r->up + row, rows);
    }
}

/* The activation of one route, in place of its gates, then FC2's input. */
static void activate_route(struct reference *r, int64_t i) {
    const int32_t n = r->desc.intermediate;
    const megamoe_activation *a = &r->desc.activation;
    const float limit = a->limit == 0.0f ? INFINITY : a->limit;
    float *h = r->gate + i * n;
    for (int32_t c = 0; c < n; c++) {
        const float up = r->up[i * n + c];
        h[c] = mm_gated(h[c], up, a->alpha == 0.0f ? 1.0f : a->alpha, a->offset, limit);
        if (!r->options.weight_after_fc2)
            h[c] *= r->routes[i].weight;
    }
    (int8_of(r) ? mm_reference_quantize_hidden_int8 : mm_reference_quantize_hidden)(h, n,
                                                                                    &r->hidden[i]);
}

static void run_activation(void *argument, int32_t thread, int32_t threads) {
    struct stage *stage = argument;
    for (int64_t i = thread; i < stage->reference->n_routes; i += threads)
        activate_route(stage->reference, i);
}

static void run_fc2_rows(void *argument, int32_t thread, int32_t threads) {
    struct stage *stage = argument;
    struct reference *r = stage->reference;
    const int32_t rows = r->desc.hidden;
    for (int32_t row = thread; row < rows; row += threads) {
        /* Down sums land beside their place: route i's value of this row. */
        float *values = r->up + (int64_t)thread * r->n_routes;
        run_row(r, thread, MEGAMOE_DOWN, row, stage->inputs, values, 1);
        for (int64_t i = 0; i < r->n_routes; i++) {
            const struct route *route = &r->routes[i];
            const float value = values[i] * (r->options.weight_after_fc2 ? route->weight : 1.0f);
            r->route_rows[(route->token * r->topk + route->slot) * rows + row] =
                mm_bf16_to_f32(mm_bf16_from_f32(value));
        }
    }
}

static megamoe_status run_expert(struct reference *r, const mm_reference_input **inputs) {
    r->n_routes = 0;
    for (int64_t i = 0; i < r->tokens * r->topk; i++) {
        if (r->ids[i] != r->expert)
            continue;
        inputs[r->n_routes] = &r->inputs[i / r->topk];
        r->routes[r->n_routes++] =
            (struct route){i / r->topk, (int32_t)(i % r->topk), r->route_weights[i]};
    }
    if (!r->n_routes)
        return MEGAMOE_OK;
    MM_TRY(mm_weights_hold(r->weights, r->expert));
    struct stage stage = {r, inputs};
    mm_pool_run(r->pool, run_fc1_rows, &stage);
    mm_pool_run(r->pool, run_activation, &stage);
    for (int64_t i = 0; i < r->n_routes; i++)
        inputs[i] = &r->hidden[i];
    mm_pool_run(r->pool, run_fc2_rows, &stage);
    mm_weights_drop(r->weights, r->expert);
    const int row = atomic_load(&r->inexact_row);
    if (row >= 0)
        return mm_fail(MEGAMOE_EINEXACT,
                       "expert %d, projection %d, row %d: a weight lies outside the E4M3 window, "
                       "which the tensor core's sum needs",
                       r->expert, atomic_load(&r->inexact_projection), row);
    return MEGAMOE_OK;
}

static void combine(const struct reference *r, const megamoe_view *y) {
    const int32_t hidden = r->desc.hidden;
    for (int64_t t = 0; t < r->tokens; t++) {
        uint16_t *to = mm_view_row(y, t, hidden);
        for (int32_t c = 0; c < hidden; c++) {
            float sum = 0.0f;
            for (int32_t slot = 0; slot < r->topk; slot++)
                if (r->ids[t * r->topk + slot] >= 0)
                    sum += r->route_rows[(t * r->topk + slot) * hidden + c];
            to[c] = mm_bf16_from_f32(sum);
        }
    }
}

static megamoe_status read_batch(struct reference *r, const megamoe_view *x,
                                 const megamoe_view *topk_ids, const megamoe_view *topk_weights) {
    const int32_t hidden = r->desc.hidden;
    const size_t blocks = (size_t)mm_ceil_div(hidden, MM_BLOCK_CHANNELS);
    for (int64_t t = 0; t < r->tokens; t++) {
        r->inputs[t] =
            (mm_reference_input){.codes = r->input_codes + (size_t)t * (size_t)hidden,
                                 .blocks = r->input_blocks + (size_t)t * blocks,
                                 .block_scales = r->input_block_scales + (size_t)t * blocks};
        const uint16_t *row = mm_view_row(x, t, hidden);
        if (int8_of(r))
            mm_reference_quantize_int8(row, hidden, &r->inputs[t]);
        else
            mm_reference_quantize(row, hidden, r->options.input_scale, &r->inputs[t]);
        for (int32_t slot = 0; slot < r->topk; slot++) {
            const int64_t id = mm_view_integer(topk_ids, t, slot, r->topk);
            if (id < -1 || id >= r->desc.experts)
                return mm_fail(MEGAMOE_EID,
                               "token %" PRId64 ", slot %d: expert id %" PRId64 "; expected -1..%d",
                               t, slot, id, r->desc.experts - 1);
            r->ids[t * r->topk + slot] = (int32_t)id;
            r->route_weights[t * r->topk + slot] = mm_view_float(topk_weights, t, slot, r->topk);
        }
    }
    return MEGAMOE_OK;
}

/* Room for the whole batch, and for one expert that gets every route. */
static bool allocate(struct reference *r) {
    const size_t tokens = (size_t)r->tokens, routes = tokens * (size_t)r->topk;
    const size_t hidden = (size_t)r->desc.hidden, intermediate = (size_t)r->desc.intermediate;
    const size_t hidden_blocks = (size_t)mm_ceil_div((int64_t)hidden, MM_BLOCK_CHANNELS);
    const size_t blocks = (size_t)mm_ceil_div((int64_t)intermediate, MM_BLOCK_CHANNELS);
    const size_t threads = (size_t)mm_pool_threads(r->pool);
    const size_t longest = hidden > intermediate ? hidden : intermediate;
    const size_t up = intermediate > threads ? intermediate : threads;
    r->inputs = mm_alloc(tokens * sizeof *r->inputs);
    r->input_codes = mm_alloc(tokens * hidden);
    r->input_blocks = mm_alloc(tokens * hidden_blocks);
    r->input_block_scales = mm_alloc(tokens * hidden_blocks * sizeof *r->input_block_scales);
    r->ids = mm_alloc(routes * sizeof *r->ids);
    r->route_weights = mm_alloc(routes * sizeof *r->route_weights);
    r->route_rows = mm_alloc(routes * hidden * sizeof *r->route_rows);
    r->routes = mm_alloc(routes * sizeof *r->routes);
    r->gate = mm_alloc(routes * intermediate * sizeof *r->gate);
    r->up = mm_alloc(routes * up * sizeof *r->up);
    r->hidden = mm_alloc(routes * sizeof *r->hidden);
    r->hidden_codes = mm_alloc(routes * intermediate);
    r->hidden_blocks = mm_alloc(routes * blocks);
    r->hidden_block_scales = mm_alloc(routes * blocks * sizeof *r->hidden_block_scales);
    r->row_scratch = mm_alloc(threads * 2 * longest * sizeof *r->row_scratch);
    r->code_scratch = mm_alloc(threads * 2 * longest);
    if (!r->inputs || !r->input_codes || !r->input_blocks || !r->input_block_scales || !r->ids ||
        !r->route_weights || !r->route_rows || !r->routes || !r->gate || !r->up || !r->hidden ||
        !r->hidden_codes || !r->hidden_blocks || !r->hidden_block_scales || !r->row_scratch ||
        !r->code_scratch)
        return false;
    for (size_t i = 0; i < routes; i++)
        r->hidden[i] = (mm_reference_input){.codes = r->hidden_codes + i * intermediate,
                                            .blocks = r->hidden_blocks + i * blocks,
                                            .block_scales = r->hidden_block_scales + i * blocks};
    return true;
}

static void release(struct reference *r) {
    free(r->inputs);
    free(r->input_codes);
    free(r->input_blocks);
    free(r->input_block_scales);
    free(r->ids);
    free(r->route_weights);
    free(r->route_rows);
    free(r->routes);
    free(r->gate);
    free(r->up);
    free(r->hidden);
    free(r->hidden_codes);
    free(r->hidden_blocks);
    free(r->hidden_block_scales);
    free(r->row_scratch);
    free(r->code_scratch);
    mm_pool_close(r->pool);
}

static megamoe_status check_batch(const struct reference *r, const megamoe_view *x,
                                  const megamoe_view *topk_ids, const megamoe_view *topk_weights,
                                  const megamoe_view *y) {
    MM_TRY(
        mm_view_check(x, "x", MEGAMOE_DTYPE_BF16, MEGAMOE_DTYPE_NONE, r->tokens, r->desc.hidden));
    MM_TRY(mm_view_check(topk_ids, "topk_ids", MEGAMOE_DTYPE_I32, MEGAMOE_DTYPE_I64, r->tokens,
                         r->topk));
    MM_TRY(mm_view_check(topk_weights, "topk_weights", MEGAMOE_DTYPE_F32, MEGAMOE_DTYPE_BF16,
                         r->tokens, r->topk));
    return mm_view_check(y, "y", MEGAMOE_DTYPE_BF16, MEGAMOE_DTYPE_NONE, r->tokens, r->desc.hidden);
}

static megamoe_status check_choice(const char *name, int value, int last) {
    if (value < 0 || value > last)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_reference_options: %s is %d; expected 0..%d", name,
                       value, last);
    return MEGAMOE_OK;
}

/* What int8 activations go with. */
static megamoe_status check_int8(const struct reference *r) {
    if (!int8_of(r))
        return MEGAMOE_OK;
    if (r->options.input_scale != MEGAMOE_SCALE_TOKEN)
        return mm_fail(MEGAMOE_EINVAL,
                       "megamoe_reference_options: input_scale is %d; with int8 "
                       "activations it stays 0",
                       (int)r->options.input_scale);
    if (r->options.sum != MEGAMOE_SUM_FP32)
        return mm_fail(MEGAMOE_EUNSUPPORTED, "megamoe_reference_options: tensor cores multiply "
                                             "E4M3; int8 activations need the sum fp32");
    if (r->desc.format == MEGAMOE_FORMAT_NVFP4 &&
        mm_weights_nvfp4_mode(r->weights, r->options.nvfp4) == MEGAMOE_NVFP4_FOLDED)
        return mm_fail(MEGAMOE_EUNSUPPORTED, "reference: int8 activations need weights of 4 bits; "
                                             "folded NVFP4 has 8, use the exact form");
    return MEGAMOE_OK;
}

megamoe_status megamoe_reference_forward(const megamoe_weights *weights,
                                         const megamoe_reference_options *options, int32_t topk,
                                         const megamoe_view *x, const megamoe_view *topk_ids,
                                         const megamoe_view *topk_weights, int64_t n_tokens,
                                         const megamoe_view *y) {
    if (!weights || n_tokens < 0 || topk < 1)
        return mm_fail(MEGAMOE_EINVAL, "reference: %s",
                       !weights ? "weights are NULL" : "negative tokens or no top-k slots");
    struct reference r = {.weights = weights, .tokens = n_tokens, .topk = topk};
    atomic_init(&r.inexact_row, -1);
    r.desc.struct_size = sizeof r.desc;
    MM_TRY(megamoe_weights_describe(weights, &r.desc));
    MM_TRY(mm_take_struct(&r.options, sizeof r.options, options, "megamoe_reference_options"));
    MM_TRY(check_choice("sum", (int)r.options.sum, MEGAMOE_SUM_WGMMA));
    MM_TRY(check_choice("accumulate", (int)r.options.accumulate, MEGAMOE_ACCUMULATE_PROMOTE));
    MM_TRY(check_choice("nvfp4", (int)r.options.nvfp4, MEGAMOE_NVFP4_FOLDED));
    MM_TRY(check_choice("input_scale", (int)r.options.input_scale, MEGAMOE_SCALE_BLOCK));
    MM_TRY(check_choice("activations", (int)r.options.activations, MEGAMOE_ACTIVATIONS_INT8));
    MM_TRY(check_int8(&r));
    MM_TRY(check_batch(&r, x, topk_ids, topk_weights, y));
    if (n_tokens == 0)
        return MEGAMOE_OK;
    MM_TRY(mm_pool_open(r.options.threads, 0, false, &r.pool));
    const mm_reference_input **inputs = mm_alloc((size_t)n_tokens * (size_t)topk * sizeof *inputs);
    megamoe_status status = MEGAMOE_OK;
    if (!inputs || !allocate(&r)) {
        status = mm_fail(MEGAMOE_ENOMEM, "reference: %" PRId64 " tokens: out of memory", n_tokens);
        goto done;
    }
    MM_TRY_GOTO(read_batch(&r, x, topk_ids, topk_weights), done);
    uint64_t finished = 0;
    for (r.expert = 0; r.expert < r.desc.experts; r.expert++) {
        MM_TRY_GOTO(run_expert(&r, inputs), done);
        finished += (uint64_t)r.n_routes;
        if (r.options.progress.fn && r.n_routes)
            r.options.progress.fn(r.options.progress.user, finished, (uint64_t)(n_tokens * topk));
    }
    combine(&r, y);
done:
    free(inputs);
    release(&r);
    return status;
}
