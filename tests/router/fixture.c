/* SPDX-License-Identifier: Apache-2.0 */
#include "fixture.h"

#include <math.h>
#include <stdlib.h>

#include "base/device.h"
#include "num/bf16.h"

static float *random_bias(int32_t n, t_random *random) {
    float *bias = calloc((size_t)n, sizeof *bias);
    for (int32_t i = 0; i < n; i++)
        bias[i] = (float)(int)(t_below(random, 65) - 32) / 64.0f;
    return bias;
}

fixture fixture_open(megamoe_router_desc desc, int biases, t_random *random) {
    fixture f = {.desc = desc};
    f.desc.struct_size = sizeof f.desc;
    const size_t elements = (size_t)desc.experts * (size_t)desc.hidden;
    f.weight = calloc(elements, sizeof *f.weight);
    for (size_t i = 0; i < elements; i++)
        f.weight[i] = mm_bf16_from_f32((float)((int)t_below(random, 33) - 16) / 64.0f);
    if (biases & WITH_SELECTION_BIAS)
        f.selection_bias = random_bias(desc.experts, random);
    if (biases & WITH_LINEAR_BIAS)
        f.linear_bias = random_bias(desc.experts, random);
    if (desc.hash_vocab) {
        const size_t entries = (size_t)desc.hash_vocab * (size_t)desc.topk;
        f.hash_table = calloc(entries, sizeof *f.hash_table);
        for (size_t i = 0; i < entries; i++)
            f.hash_table[i] = t_below(random, (uint32_t)desc.experts);
    }
    const megamoe_view weight = {f.weight, MEGAMOE_DTYPE_BF16, desc.experts, 0};
    const megamoe_view selection_bias = {f.selection_bias, MEGAMOE_DTYPE_F32, 1, 0};
    const megamoe_view linear_bias = {f.linear_bias, MEGAMOE_DTYPE_F32, 1, 0};
    const megamoe_view hash_table = {f.hash_table, MEGAMOE_DTYPE_I64, desc.hash_vocab, 0};
    T_OK(megamoe_router_create(&f.desc, &weight, f.selection_bias ? &selection_bias : NULL,
                               f.linear_bias ? &linear_bias : NULL,
                               f.hash_table ? &hash_table : NULL, &f.router));
    return f;
}

void fixture_close(fixture *f) {
    megamoe_router_close(f->router);
    free(f->weight);
    free(f->selection_bias);
    free(f->linear_bias);
    free(f->hash_table);
}

uint16_t *fixture_tokens(const fixture *f, int64_t n, t_random *random) {
    const size_t elements = (size_t)n * (size_t)f->desc.hidden;
    uint16_t *x = calloc(elements + 1, sizeof *x);
    for (size_t i = 0; i < elements; i++)
        x[i] = mm_bf16_from_f32((float)((int)t_below(random, 17) - 8) / 8.0f);
    return x;
}

void fixture_route(const fixture *f, int32_t threads, const uint16_t *x, const int64_t *input_ids,
                   int64_t n, int32_t *ids, float *weights) {
    megamoe_device device = {0};
    if (threads)
        T_OK(mm_pool_open(threads, 0, false, &device.pool));
    const megamoe_view x_view = {(void *)(uintptr_t)x, MEGAMOE_DTYPE_BF16, n, 0};
    const megamoe_view input_view = {(void *)(uintptr_t)input_ids, MEGAMOE_DTYPE_I64, 1, 0};
    const megamoe_view ids_view = {ids, MEGAMOE_DTYPE_I32, n, 0};
    const megamoe_view weights_view = {weights, MEGAMOE_DTYPE_F32, n, 0};
    const megamoe_status status =
        megamoe_router_route(f->router, threads ? &device : NULL, &x_view,
                             input_ids ? &input_view : NULL, n, &ids_view, &weights_view);
    mm_pool_close(device.pool);
    T_OK(status);
}

typedef struct candidate {
    double value;
    int32_t index;
} candidate;

static int by_value_then_index(const void *left, const void *right) {
    const candidate *a = left;
    const candidate *b = right;
    if (a->value != b->value)
        return a->value > b->value ? -1 : 1;
    return a->index - b->index;
}

static candidate *sorted(const double *values, int32_t n) {
    candidate *list = calloc((size_t)n, sizeof *list);
    for (int32_t i = 0; i < n; i++)
        list[i] = (candidate){values[i], i};
    qsort(list, (size_t)n, sizeof *list, by_value_then_index);
    return list;
}

/* Scores of dropped groups become -infinity; false where the choice of groups is within rounding.
 */
static bool drop_groups(const megamoe_router_desc *desc, double *selection) {
    const int32_t groups = desc->groups ? desc->groups : 1;
    const int32_t size = desc->experts / groups;
    if (groups == 1)
        return true;
    double *sums = calloc((size_t)groups, sizeof *sums);
    for (int32_t g = 0; g < groups; g++) {
        candidate *members = sorted(selection + g * size, size);
        sums[g] = members[0].value + (size > 1 ? members[1].value : 0);
        free(members);
    }
    candidate *order = sorted(sums, groups);
    bool clear = true;
    if (desc->groups_kept < groups) {
        const double gap = order[desc->groups_kept - 1].value - order[desc->groups_kept].value;
        clear = gap == 0 || gap > 1e-5;
    }
    for (int32_t rank = desc->groups_kept; rank < groups; rank++)
        for (int32_t i = 0; i < size; i++)
            selection[order[rank].index * size + i] = -INFINITY;
    free(order);
    free(sums);
    return clear;
}

static double score_of(megamoe_router_rule rule, double logit) {
    switch (rule) {
    case MEGAMOE_ROUTER_SIGMOID:
        return 1 / (1 + exp(-logit));
    case MEGAMOE_ROUTER_SQRT_SOFTPLUS:
        return sqrt(log(1 + exp(logit)));
    default:
        return logit;
    }
}

void fixture_check(const fixture *f, const uint16_t *x, int64_t input_id, const int32_t *ids,
                   const float *weights) {
    const megamoe_router_desc *desc = &f->desc;
    const size_t experts = (size_t)desc->experts;
    double *scores = calloc(experts, sizeof *scores);
    double *selection = calloc(experts, sizeof *selection);
    double sum = 0;
    for (size_t e = 0; e < experts; e++) {
        double logit = 0;
        for (int32_t k = 0; k < desc->hidden; k++)
            logit += (double)mm_bf16_to_f32(x[k]) *
                     (double)mm_bf16_to_f32(f->weight[e * (size_t)desc->hidden + (size_t)k]);
        if (desc->gate_temperature != 0)
            logit /= (double)desc->gate_temperature;
        logit += f->linear_bias ? (double)f->linear_bias[e] : 0;
        scores[e] = score_of(desc->rule, logit);
        sum += exp(logit);
    }
    for (size_t e = 0; e < experts; e++) {
        if (desc->rule == MEGAMOE_ROUTER_SOFTMAX)
            scores[e] = exp(scores[e]) / sum;
        selection[e] = scores[e] + (f->selection_bias ? (double)f->selection_bias[e] : 0);
    }
    const bool clear = drop_groups(desc, selection);
    candidate *order = sorted(selection, desc->experts);
    double chosen = 0;
    for (int32_t slot = 0; slot < desc->topk; slot++) {
        const int32_t id = ids[slot];
        T_CHECK_MSG(id >= 0 && id < desc->experts, "slot %d: id %d", slot, id);
        const int32_t expected = f->hash_table
                                     ? (int32_t)f->hash_table[input_id * desc->topk + slot]
                                     : order[slot].index;
        const bool equal =
            id == expected || (!f->hash_table && selection[id] != selection[expected] &&
                               fabs(selection[id] - selection[expected]) < 1e-6);
        if (clear)
            T_CHECK_MSG(equal, "slot %d: id %d, expected %d", slot, id, expected);
        const bool softens = desc->rule == MEGAMOE_ROUTER_SOFTMAX_SELECTED;
        chosen += softens ? exp(scores[id]) : scores[id];
    }
    for (int32_t slot = 0; slot < desc->topk; slot++) {
        double weight = scores[ids[slot]];
        if (desc->rule == MEGAMOE_ROUTER_SOFTMAX_SELECTED)
            weight = exp(weight) / chosen;
        else if (desc->normalize)
            weight /= chosen + (double)desc->normalize_epsilon;
        weight *= desc->scaling != 0 ? (double)desc->scaling : 1;
        T_NEAR((double)weights[slot], weight, 2e-6 * fabs(weight));
    }
    free(order);
    free(selection);
    free(scores);
}
