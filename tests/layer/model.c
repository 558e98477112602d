/* SPDX-License-Identifier: Apache-2.0 */
#include "model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void *need(size_t n, size_t size) {
    void *memory = calloc(n ? n : 1, size);
    T_REQUIRE(memory);
    return memory;
}

static size_t matrix_elements(const model *m) {
    return (size_t)m->layer.desc.hidden * (size_t)m->layer.desc.intermediate;
}

/* To nearest, ties to even, saturating at 448. */
static double to_e4m3(double value) {
    if (value == 0)
        return value;
    const int exponent = ilogb(value) < -6 ? -6 : ilogb(value);
    const double unit = ldexp(1, exponent - 3);
    return fmax(-448, fmin(448, nearbyint(value / unit) * unit));
}

/* One row of a matrix in double. */
typedef void (*row_fn)(const model *m, int32_t expert, megamoe_projection projection, int32_t row,
                       double *to);

/* Values of a row whose groups have these magnitudes for their codes. */
static void put_group(const model *m, int32_t expert, megamoe_projection projection, int32_t row,
                      int32_t k, int32_t size, const double magnitudes[8], double *to) {
    for (int32_t i = k; i < k + size; i++) {
        const unsigned code = layer_code(&m->layer, expert, projection, row, i);
        to[i] = code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
    }
}

static void exact_row(const model *m, int32_t expert, megamoe_projection projection, int32_t row,
                      double *to) {
    const bool nvfp4 = m->layer.desc.format == MEGAMOE_FORMAT_NVFP4;
    const int32_t size = nvfp4 ? 16 : 32;
    const float global = layer_matrix(&m->layer, expert, projection)->global_scale;
    for (int32_t k = 0; k < layer_columns(&m->layer, projection); k += size) {
        const double scale = layer_block_scale(&m->layer, expert, projection, row, k);
        double magnitudes[8];
        for (unsigned code = 0; code < 8; code++)
            magnitudes[code] = decode_e2m1(code) * scale * (nvfp4 ? (double)global : 1);
        put_group(m, expert, projection, row, k, size, magnitudes, to);
    }
}

static void folded_row(const model *m, int32_t expert, megamoe_projection projection, int32_t row,
                       double *to) {
    const int exponent =
        brute_row_exponent(&m->layer, MEGAMOE_NVFP4_FOLDED, expert, projection, row);
    const float global = layer_matrix(&m->layer, expert, projection)->global_scale;
    for (int32_t k = 0; k < layer_columns(&m->layer, projection); k += 16) {
        const double scale = layer_block_scale(&m->layer, expert, projection, row, k);
        const double rounded = to_e4m3(ldexp(scale, -exponent));
        double magnitudes[8];
        for (unsigned code = 0; code < 8; code++)
            magnitudes[code] =
                ldexp(to_e4m3(decode_e2m1(code) * rounded), exponent) * (double)global;
        put_group(m, expert, projection, row, k, 16, magnitudes, to);
    }
}

static void fill_values(const model *m, double *values[3], row_fn fill) {
    for (int p = 0; p < 3; p++) {
        const megamoe_projection projection = (megamoe_projection)p;
        const int32_t columns = layer_columns(&m->layer, projection);
        free(values[p]);
        double *to = values[p] =
            need(matrix_elements(m) * (size_t)m->layer.desc.experts, sizeof *to);
        for (int32_t e = 0; e < m->layer.desc.experts; e++)
            for (int32_t row = 0; row < layer_rows(&m->layer, projection); row++, to += columns)
                fill(m, e, projection, row, to);
    }
}

model model_open(const model_recipe *recipe, t_random *random) {
    const bool nvfp4 = recipe->format == MEGAMOE_FORMAT_NVFP4;
    const layer_shape shape = {
        .format = recipe->format,
        .hidden = recipe->hidden,
        .intermediate = recipe->intermediate,
        .experts = recipe->experts,
        .bias_dtype = recipe->bias_dtype,
        .scale_min = nvfp4 ? 0x30 : 120, /* 0.5 */
        .scale_max = nvfp4 ? 0x48 : 122, /* 4 */
    };
    model m = {.layer = layer_random(&shape, random)};
    m.layer.desc.activation = recipe->activation;
    for (int32_t i = 0; i < 3 * recipe->experts; i++)
        m.layer.matrices[i].global_scale = (float)(0.01 * exp(0.2 * t_normal(random)));
    model_reload(&m);
    return m;
}

void model_reload(model *m) {
    megamoe_weights_close(m->weights);
    m->weights = NULL;
    T_OK(megamoe_weights_from_tensors(&m->layer.desc, m->layer.matrices, &m->weights));
    fill_values(m, m->values, exact_row);
}

void model_close(model *m) {
    for (int p = 0; p < 3; p++) {
        free(m->values[p]);
        free(m->folded[p]);
    }
    megamoe_weights_close(m->weights);
    layer_free(&m->layer);
}

void model_fold(model *m) {
    fill_values(m, m->folded, folded_row);
}

/* ---- batches ---- */

uint16_t to_bf16(double value) {
    const float narrow = (float)value;
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof bits);
    if (isnan(value))
        return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

double from_bf16(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return (double)value;
}

static int32_t other_expert(const int32_t *ids, int32_t used, int32_t experts, t_random *random) {
    for (;;) {
        const int32_t id = (int32_t)t_below(random, (uint32_t)experts);
        int32_t i = 0;
        while (i < used && ids[i] != id)
            i++;
        if (i == used)
            return id;
    }
}

static void route_token(const model *m, int64_t token, int32_t topk, routing kind, int32_t *ids,
                        t_random *random) {
    const int32_t experts = m->layer.desc.experts, hot = experts / 2;
    for (int32_t slot = 0; slot < topk; slot++)
        if (kind == ROUTING_REPEATED)
            ids[slot] = slot ? ids[t_below(random, (uint32_t)slot)]
                             : (int32_t)t_below(random, (uint32_t)experts);
        else if (kind == ROUTING_HOT && slot == 0)
            ids[slot] = hot;
        else if (kind == ROUTING_HOT && token % 2)
            ids[slot] = -1;
        else
            ids[slot] = other_expert(ids, slot, experts, random);
}

batch batch_random(const model *m, int64_t tokens, int32_t topk, routing kind, t_random *random) {
    batch b = {.tokens = tokens, .hidden = m->layer.desc.hidden, .topk = topk};
    T_REQUIRE(kind == ROUTING_REPEATED || topk <= m->layer.desc.experts);
    b.x = need((size_t)tokens * (size_t)b.hidden, sizeof *b.x);
    b.ids = need((size_t)tokens * (size_t)topk, sizeof *b.ids);
    b.weights = need((size_t)tokens * (size_t)topk, sizeof *b.weights);
    for (int64_t i = 0; i < tokens * b.hidden; i++)
        b.x[i] = to_bf16(t_normal(random));
    for (int64_t t = 0; t < tokens; t++) {
        double sum = 0;
        route_token(m, t, topk, kind, b.ids + t * topk, random);
        for (int32_t slot = 0; slot < topk; slot++)
            sum += b.weights[t * topk + slot] = (float)(0.1 + t_uniform(random));
        for (int32_t slot = 0; slot < topk; slot++)
            b.weights[t * topk + slot] = (float)((double)b.weights[t * topk + slot] / sum);
    }
    return b;
}

void batch_free(batch *b) {
    free(b->x);
    free(b->ids);
    free(b->weights);
}

void batch_mask(batch *b, uint32_t one_in, t_random *random) {
    for (int64_t i = 0; i < b->tokens * b->topk; i++)
        if (t_below(random, one_in) == 0)
            b->ids[i] = -1;
}

void batch_repeat(batch *b, int64_t distinct) {
    for (int64_t t = distinct; t < b->tokens; t++) {
        const batch from = batch_part(b, t - distinct, 1), to = batch_part(b, t, 1);
        memcpy(to.x, from.x, (size_t)b->hidden * sizeof *b->x);
        memcpy(to.ids, from.ids, (size_t)b->topk * sizeof *b->ids);
        memcpy(to.weights, from.weights, (size_t)b->topk * sizeof *b->weights);
    }
}

batch batch_part(const batch *b, int64_t first, int64_t n) {
    batch part = *b;
    part.tokens = n;
    part.x += first * b->hidden;
    part.ids += first * b->topk;
    part.weights += first * b->topk;
    return part;
}

megamoe_view view_x(const batch *b) {
    return (megamoe_view){b->x, MEGAMOE_DTYPE_BF16, b->tokens, 0};
}

megamoe_view view_ids(const batch *b) {
    return (megamoe_view){b->ids, MEGAMOE_DTYPE_I32, b->tokens, 0};
}

megamoe_view view_weights(const batch *b) {
    return (megamoe_view){b->weights, MEGAMOE_DTYPE_F32, b->tokens, 0};
}

megamoe_view view_y(uint16_t *y, const batch *b) {
    return (megamoe_view){y, MEGAMOE_DTYPE_BF16, b->tokens, 0};
}

bool same_rows(const uint16_t *a, const uint16_t *b, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (a[i] != b[i] && !((a[i] & 0x7FFF) > 0x7F80 && (b[i] & 0x7FFF) > 0x7F80))
            return false;
    return true;
}

/* ---- in double ---- */

void quantized_hidden(double *h, int32_t n) {
    for (int32_t start = 0; start < n; start += 128) {
        const int32_t end = n - start < 128 ? n : start + 128;
        double amax = 0;
        for (int32_t i = start; i < end; i++)
            amax = fmax(amax, fabs(h[i]));
        int exponent = -44;
        while (exponent < 44 && ldexp(amax, -exponent) > 448)
            exponent += 8;
        for (int32_t i = start; i < end; i++)
            h[i] = ldexp(to_e4m3(ldexp(h[i], -exponent)), exponent);
    }
}

void quantized_token(const uint16_t *x, int32_t n, megamoe_input_scale mode, double *values) {
    double amax = 0;
    for (int32_t i = 0; i < n; i++) {
        values[i] = from_bf16(x[i]);
        amax = fmax(amax, fabs(values[i]));
    }
    if (mode == MEGAMOE_SCALE_BLOCK) {
        quantized_hidden(values, n);
    } else if (amax > 0) {
        const float inverse = 448.0f / (float)amax, scale = (float)amax / 448.0f;
        for (int32_t i = 0; i < n; i++) {
            const float scaled = (float)values[i] * inverse;
            values[i] = to_e4m3((double)scaled) * (double)scale;
        }
    }
}

/* To int8 with one F32 for 128 channels, in place. */
static void quantize_int8(double *values, int32_t n) {
    for (int32_t start = 0; start < n; start += 128) {
        const int32_t end = n - start < 128 ? n : start + 128;
        float amax = 0;
        for (int32_t i = start; i < end; i++)
            amax = fmaxf(amax, fabsf((float)values[i]));
        const float inverse = 127.0f / amax, scale = amax / 127.0f;
        for (int32_t i = start; i < end && amax > 0; i++) {
            const float scaled = (float)values[i] * inverse;
            values[i] = nearbyint((double)scaled) * (double)scale;
        }
    }
}

void quantized_token_int8(const uint16_t *x, int32_t n, double *values) {
    for (int32_t i = 0; i < n; i++)
        values[i] = from_bf16(x[i]);
    quantize_int8(values, n);
}

double gated(const megamoe_activation *activation, double gate, double up) {
    const double alpha = activation->alpha != 0 ? (double)activation->alpha : 1;
    const double limit = activation->limit != 0 ? (double)activation->limit : INFINITY;
    const double g = fmin(gate, limit), u = fmax(-limit, fmin(up, limit));
    return g / (1 + exp(-alpha * g)) * (u + (double)activation->offset);
}

static double dot(const double *a, const double *b, int32_t n) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

void model_route(const model *m, const exactness *how, int32_t expert, double weight,
                 const double *x, double *out) {
    const megamoe_layer_desc *desc = &m->layer.desc;
    const int32_t hidden = desc->hidden, intermediate = desc->intermediate;
    const size_t matrix = matrix_elements(m) * (size_t)expert;
    double *h = need((size_t)intermediate, sizeof *h);
    for (int32_t i = 0; i < intermediate; i++) {
        const size_t row = matrix + (size_t)i * (size_t)hidden;
        const double gate = dot(how->values[MEGAMOE_GATE] + row, x, hidden) +
                            layer_bias(&m->layer, expert, MEGAMOE_GATE, i);
        const double up = dot(how->values[MEGAMOE_UP] + row, x, hidden) +
                          layer_bias(&m->layer, expert, MEGAMOE_UP, i);
        h[i] = gated(&desc->activation, gate, up) * (how->weight_after_fc2 ? 1 : weight);
    }
    if (how->quantize_hidden && how->activations == MEGAMOE_ACTIVATIONS_INT8)
        quantize_int8(h, intermediate);
    else if (how->quantize_hidden)
        quantized_hidden(h, intermediate);
    for (int32_t i = 0; i < hidden; i++) {
        const size_t row = matrix + (size_t)i * (size_t)intermediate;
        const double sum = dot(how->values[MEGAMOE_DOWN] + row, h, intermediate);
        const double bias = layer_bias(&m->layer, expert, MEGAMOE_DOWN, i);
        out[i] = how->weight_after_fc2 ? weight * (sum + bias) : sum + weight * bias;
    }
    free(h);
}

void model_forward(const model *m, const exactness *how, const batch *b, const double *x,
                   double *y) {
    double *row = need((size_t)b->hidden, sizeof *row);
    memset(y, 0, (size_t)(b->tokens * b->hidden) * sizeof *y);
    for (int64_t t = 0; t < b->tokens; t++)
        for (int32_t slot = 0; slot < b->topk; slot++) {
            const int32_t expert = b->ids[t * b->topk + slot];
            if (expert < 0)
                continue;
            model_route(m, how, expert, (double)b->weights[t * b->topk + slot], x + t * b->hidden,
                        row);
            for (int32_t i = 0; i < b->hidden; i++)
                y[t * b->hidden + i] += how->quantize_hidden ? from_bf16(to_bf16(row[i])) : row[i];
        }
    free(row);
}

void random_map(t_random *random, int32_t *map, int32_t physical, int32_t experts) {
    for (int32_t p = 0; p < physical; p++)
        map[p] = p < experts ? p : (int32_t)t_below(random, (uint32_t)experts);
    for (int32_t p = physical - 1; p > 0; p--) {
        const int32_t other = (int32_t)t_below(random, (uint32_t)p + 1), held = map[p];
        map[p] = map[other];
        map[other] = held;
    }
}

double distance(const double *a, const double *b, int64_t n) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += (a[i] - b[i]) * (a[i] - b[i]);
        norm += b[i] * b[i];
    }
    return norm > 0 ? sqrt(difference / norm) : (difference > 0 ? INFINITY : 0);
}
