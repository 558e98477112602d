/* SPDX-License-Identifier: Apache-2.0 */
#include "router/scores.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "num/exp.h"

float mm_softplus(float x) {
    const double t = (double)mm_expf(x > 0.0f ? -x : x);
    /* log(1 + t) = 2 atanh(s), an odd series in s <= 1/3: ten terms leave less than 2^-34. */
    const double s = t / (2.0 + t);
    const double square = s * s;
    double series = 1.0 / 19.0;
    for (int odd = 17; odd > 0; odd -= 2)
        series = series * square + 1.0 / odd;
    const double log1p = 2.0 * s * series;
    return (float)((x > 0.0f ? (double)x : 0.0) + log1p);
}

static void softmax(float *values, int32_t n) {
    float largest = values[0];
    for (int32_t i = 1; i < n; i++)
        largest = values[i] > largest ? values[i] : largest;
    float sum = 0.0f;
    for (int32_t i = 0; i < n; i++) {
        values[i] = mm_expf(values[i] - largest);
        sum += values[i];
    }
    for (int32_t i = 0; i < n; i++)
        values[i] /= sum;
}

static void score(megamoe_router_rule rule, float *logits, int32_t experts) {
    switch (rule) {
    case MEGAMOE_ROUTER_SOFTMAX:
        softmax(logits, experts);
        return;
    case MEGAMOE_ROUTER_SIGMOID:
        for (int32_t e = 0; e < experts; e++)
            logits[e] = 1.0f / (1.0f + mm_expf(-logits[e]));
        return;
    case MEGAMOE_ROUTER_SQRT_SOFTPLUS:
        for (int32_t e = 0; e < experts; e++)
            logits[e] = sqrtf(mm_softplus(logits[e]));
        return;
    case MEGAMOE_ROUTER_SOFTMAX_SELECTED:
        return;
    }
}

/* Index of the largest value, the lowest of equals; NaN values do not take part. */
static int32_t largest_of(const float *values, int32_t n) {
    int32_t largest = -1;
    for (int32_t i = 0; i < n; i++)
        if (!isnan(values[i]) && (largest < 0 || values[i] > values[largest]))
            largest = i;
    return largest;
}

/* Sum of the two largest, the largest first; of a group of one, its value. */
static float group_score(const float *values, int32_t n) {
    float first = values[0];
    float second = -INFINITY;
    for (int32_t i = 1; i < n; i++) {
        if (values[i] > first) {
            second = first;
            first = values[i];
        } else if (values[i] > second) {
            second = values[i];
        }
    }
    return n == 1 ? first : first + second;
}

/* Takes the experts of all but the best groups out of the selection. */
static void keep_groups(const megamoe_router_desc *desc, float *selection) {
    const int32_t size = desc->experts / desc->groups;
    for (int32_t dropped = desc->groups - desc->groups_kept; dropped > 0; dropped--) {
        int32_t worst = -1;
        float worst_score = 0.0f;
        for (int32_t g = 0; g < desc->groups; g++) {
            if (isnan(selection[g * size]))
                continue;
            const float this_score = group_score(selection + g * size, size);
            /* Of equal groups the lowest is the best, so the highest goes first. */
            if (worst < 0 || this_score <= worst_score) {
                worst = g;
                worst_score = this_score;
            }
        }
        for (int32_t i = 0; i < size; i++)
            selection[worst * size + i] = NAN;
    }
}

/* False where a score or selection score is NaN. */
static bool prepare_selection(const megamoe_router *router, const float *scores, float *selection) {
    bool ordered = true;
    for (int32_t e = 0; e < router->desc.experts; e++) {
        selection[e] = scores[e] + (router->selection_bias ? router->selection_bias[e] : 0.0f);
        ordered = ordered && !isnan(selection[e]);
    }
    return ordered;
}

void mm_router_choose(const megamoe_router *router, float *logits, float *selection,
                      int64_t input_id, int32_t *ids, float *weights) {
    const megamoe_router_desc *desc = &router->desc;
    const int32_t topk = desc->topk;
    for (int32_t e = 0; e < desc->experts; e++) {
        logits[e] /= desc->gate_temperature;
        if (router->linear_bias)
            logits[e] += router->linear_bias[e];
    }
    score(desc->rule, logits, desc->experts);
    const bool ordered = prepare_selection(router, logits, selection);
    if (router->hash_table)
        memcpy(ids, router->hash_table + input_id * topk, (size_t)topk * sizeof *ids);
    else if (!ordered)
        for (int32_t slot = 0; slot < topk; slot++)
            ids[slot] = slot;
    else {
        keep_groups(desc, selection);
        for (int32_t slot = 0; slot < topk; slot++) {
            ids[slot] = largest_of(selection, desc->experts);
            selection[ids[slot]] = NAN; /* taken */
        }
    }
    for (int32_t slot = 0; slot < topk; slot++)
        weights[slot] = ordered ? logits[ids[slot]] : NAN;
    if (!ordered)
        return;
    if (desc->rule == MEGAMOE_ROUTER_SOFTMAX_SELECTED)
        softmax(weights, topk);
    if (desc->normalize) {
        float sum = 0.0f;
        for (int32_t slot = 0; slot < topk; slot++)
            sum += weights[slot];
        sum += desc->normalize_epsilon;
        for (int32_t slot = 0; slot < topk; slot++)
            weights[slot] /= sum;
    }
    for (int32_t slot = 0; slot < topk; slot++)
        weights[slot] *= desc->scaling;
}
