/* SPDX-License-Identifier: Apache-2.0 */
#include "router/router.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/view.h"

const char *megamoe_router_rule_name(megamoe_router_rule rule) {
    switch (rule) {
    case MEGAMOE_ROUTER_SOFTMAX:
        return "softmax";
    case MEGAMOE_ROUTER_SIGMOID:
        return "sigmoid";
    case MEGAMOE_ROUTER_SQRT_SOFTPLUS:
        return "sqrt-softplus";
    case MEGAMOE_ROUTER_SOFTMAX_SELECTED:
        return "softmax-selected";
    }
    return "unknown";
}

megamoe_status mm_router_check_desc(megamoe_router_desc *desc, const char *what,
                                    megamoe_status status) {
    desc->groups = desc->groups ? desc->groups : 1;
    desc->groups_kept = desc->groups == 1 ? 1 : desc->groups_kept;
    desc->scaling = desc->scaling != 0.0f ? desc->scaling : 1.0f;
    desc->gate_temperature = desc->gate_temperature != 0.0f ? desc->gate_temperature : 1.0f;

    if (desc->rule < MEGAMOE_ROUTER_SOFTMAX || desc->rule > MEGAMOE_ROUTER_SOFTMAX_SELECTED)
        return mm_fail(status, "%s: rule %d is none of 1..4", what, (int)desc->rule);
    if (desc->hidden < 1 || desc->experts < 1)
        return mm_fail(status, "%s: hidden %" PRId32 ", experts %" PRId32 ": expected 1 or more",
                       what, desc->hidden, desc->experts);
    if (desc->topk < 1 || desc->topk > desc->experts)
        return mm_fail(status, "%s: top-k is %" PRId32 ", expected 1..%" PRId32, what, desc->topk,
                       desc->experts);
    if (desc->groups < 1 || desc->experts % desc->groups)
        return mm_fail(status, "%s: %" PRId32 " groups do not divide %" PRId32 " experts", what,
                       desc->groups, desc->experts);
    if (desc->groups_kept < 1 || desc->groups_kept > desc->groups)
        return mm_fail(status, "%s: %" PRId32 " groups kept, expected 1..%" PRId32, what,
                       desc->groups_kept, desc->groups);
    if (desc->topk > desc->experts / desc->groups * desc->groups_kept)
        return mm_fail(status,
                       "%s: top-k is %" PRId32 ", but %" PRId32 " groups of %" PRId32 " are kept",
                       what, desc->topk, desc->groups_kept, desc->experts / desc->groups);
    if (!isfinite(desc->scaling))
        return mm_fail(status, "%s: scaling is not finite", what);
    if (!(desc->normalize_epsilon >= 0.0f) || isinf(desc->normalize_epsilon))
        return mm_fail(status, "%s: normalize epsilon is %g, expected 0 or a small number", what,
                       (double)desc->normalize_epsilon);
    if (!(desc->gate_temperature > 0.0f) || isinf(desc->gate_temperature))
        return mm_fail(status, "%s: gate temperature is %g, expected a positive number", what,
                       (double)desc->gate_temperature);
    if (desc->hash_vocab < 0 || desc->hash_vocab > MM_ROUTER_VOCAB_MAX)
        return mm_fail(status, "%s: a hash table of %" PRId64 " rows; at most %d", what,
                       desc->hash_vocab, MM_ROUTER_VOCAB_MAX);
    return MEGAMOE_OK;
}

static megamoe_status copy_weight(megamoe_router *router, const megamoe_view *weight,
                                  const char *what) {
    const int32_t hidden = router->desc.hidden;
    const size_t lanes = (size_t)mm_router_blocks(&router->desc) * MM_ROUTER_LANES;
    size_t bytes;
    if (!mm_mul_size(lanes * sizeof(float), (size_t)hidden, &bytes) ||
        !(router->weight = mm_alloc(bytes)))
        return mm_fail(MEGAMOE_ENOMEM, "%s: weight [%" PRId32 ", %" PRId32 "]: out of memory", what,
                       router->desc.experts, hidden);
    router->weight_dtype = weight->dtype;
    for (int32_t e = 0; e < router->desc.experts; e++) {
        float *to = mm_router_weight_row(router, e);
        for (int32_t k = 0; k < hidden; k++, to += MM_ROUTER_LANES)
            *to = mm_view_float(weight, e, k, hidden);
    }
    return MEGAMOE_OK;
}

static megamoe_status copy_bias(const megamoe_router *router, const megamoe_view *from,
                                const char *what, float **bias) {
    if (!from->data)
        return MEGAMOE_OK;
    const int32_t experts = router->desc.experts;
    *bias = mm_alloc((size_t)experts * sizeof **bias);
    if (!*bias)
        return mm_fail(MEGAMOE_ENOMEM, "%s: bias: out of memory", what);
    for (int32_t e = 0; e < experts; e++)
        (*bias)[e] = mm_view_float(from, 0, e, experts);
    return MEGAMOE_OK;
}

static megamoe_status copy_hash_table(megamoe_router *router, const megamoe_view *from,
                                      const char *what) {
    const int64_t vocab = router->desc.hash_vocab;
    const int32_t topk = router->desc.topk;
    if (vocab == 0)
        return MEGAMOE_OK;
    size_t entries;
    size_t bytes;
    if (!mm_mul_size((size_t)vocab, (size_t)topk, &entries) ||
        !mm_mul_size(entries, sizeof *router->hash_table, &bytes) ||
        !(router->hash_table = mm_alloc(bytes)))
        return mm_fail(MEGAMOE_ENOMEM, "%s: hash table [%" PRId64 ", %" PRId32 "]: out of memory",
                       what, vocab, topk);
    int32_t *to = router->hash_table;
    for (int64_t token = 0; token < vocab; token++)
        for (int32_t slot = 0; slot < topk; slot++) {
            const int64_t expert = mm_view_integer(from, token, slot, topk);
            if (expert < 0 || expert >= router->desc.experts)
                return mm_fail(MEGAMOE_EFORMAT,
                               "%s: hash table: token id %" PRId64 ", slot %" PRId32
                               ": expert %" PRId64 " is outside 0..%" PRId32,
                               what, token, slot, expert, router->desc.experts - 1);
            *to++ = (int32_t)expert;
        }
    return MEGAMOE_OK;
}

megamoe_status mm_router_build(const megamoe_router_desc *desc, const mm_router_parts *parts,
                               const char *what, megamoe_router **router) {
    *router = NULL;
    megamoe_router *r = mm_alloc(sizeof *r);
    if (!r)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", what);
    r->desc = *desc;
    megamoe_status status;
    MM_TRY_GOTO(copy_weight(r, &parts->weight, what), fail);
    MM_TRY_GOTO(copy_bias(r, &parts->selection_bias, what, &r->selection_bias), fail);
    MM_TRY_GOTO(copy_bias(r, &parts->linear_bias, what, &r->linear_bias), fail);
    MM_TRY_GOTO(copy_hash_table(r, &parts->hash_table, what), fail);
    *router = r;
    return MEGAMOE_OK;
fail:
    megamoe_router_close(r);
    return status;
}

/* A part has exactly the rows that the desc says; `part` stays empty where `view` is NULL. */
static megamoe_status take_part(const megamoe_view *view, const char *what, megamoe_dtype dtype,
                                megamoe_dtype other, int64_t rows, int64_t columns,
                                megamoe_view *part) {
    if (!view)
        return MEGAMOE_OK;
    MM_TRY(mm_view_check(view, what, dtype, other, rows, columns));
    if (view->rows != rows)
        return mm_fail(MEGAMOE_EINVAL, "%s: %" PRId64 " rows; expected %" PRId64, what, view->rows,
                       rows);
    *part = *view;
    return MEGAMOE_OK;
}

megamoe_status megamoe_router_create(const megamoe_router_desc *desc, const megamoe_view *weight,
                                     const megamoe_view *selection_bias,
                                     const megamoe_view *linear_bias,
                                     const megamoe_view *hash_table, megamoe_router **router) {
    if (!router)
        return mm_fail(MEGAMOE_EINVAL, "router: NULL result");
    *router = NULL;
    megamoe_router_desc d;
    MM_TRY(mm_take_struct(&d, sizeof d, desc, "megamoe_router_desc"));
    MM_TRY(mm_router_check_desc(&d, "router", MEGAMOE_EINVAL));
    if (!weight)
        return mm_fail(MEGAMOE_EINVAL, "router: no weight");
    if (!hash_table != (d.hash_vocab == 0))
        return mm_fail(MEGAMOE_EINVAL, "router: hash_vocab is %" PRId64 " %s a hash table",
                       d.hash_vocab, hash_table ? "with" : "without");
    mm_router_parts parts = {0};
    MM_TRY(take_part(weight, "router: weight", MEGAMOE_DTYPE_BF16, MEGAMOE_DTYPE_F32, d.experts,
                     d.hidden, &parts.weight));
    MM_TRY(take_part(selection_bias, "router: selection bias", MEGAMOE_DTYPE_BF16,
                     MEGAMOE_DTYPE_F32, 1, d.experts, &parts.selection_bias));
    MM_TRY(take_part(linear_bias, "router: linear bias", MEGAMOE_DTYPE_BF16, MEGAMOE_DTYPE_F32, 1,
                     d.experts, &parts.linear_bias));
    MM_TRY(take_part(hash_table, "router: hash table", MEGAMOE_DTYPE_I32, MEGAMOE_DTYPE_I64,
                     d.hash_vocab, d.topk, &parts.hash_table));
    return mm_router_build(&d, &parts, "router", router);
}

void megamoe_router_close(megamoe_router *router) {
    if (!router)
        return;
    free(router->weight);
    free(router->selection_bias);
    free(router->linear_bias);
    free(router->hash_table);
    free(router);
}

megamoe_status megamoe_router_describe(const megamoe_router *router, megamoe_router_desc *desc) {
    if (!router || !desc)
        return mm_fail(MEGAMOE_EINVAL, "router: NULL argument");
    return mm_give_struct(desc, &router->desc, sizeof router->desc, "megamoe_router_desc");
}
