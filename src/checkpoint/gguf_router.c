/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routers of GGUF files.
 *
 *   blk.{L}.ffn_gate_inp.weight       F32 or BF16 [E, H]
 *   blk.{L}.ffn_gate_inp.bias         F32 [E], added to the logits
 *   blk.{L}.exp_probs_b.bias          F32 [E], biases the selection
 *   blk.{L}.ffn_gate_tid2eid.weight   I32 [vocabulary, top-k], selects instead
 */
#include <inttypes.h>
#include <stdio.h>

#include "base/error.h"
#include "checkpoint/experts.h"
#include "checkpoint/gguf_model.h"

typedef struct source {
    const megamoe_checkpoint *checkpoint;
    const mm_layer *layer;
    const mm_gguf_architecture *architecture;
} source;

static const mm_tensor *find(const source *from, const char *part) {
    char name[MM_NAME_TEXT];
    snprintf(name, sizeof name, "blk.%" PRId32 ".%s", from->layer->index, part);
    return mm_checkpoint_find(from->checkpoint, name);
}

static megamoe_status read_int(const source *from, const char *name, int32_t *value) {
    const mm_gguf_key key = mm_gguf_key_of(from->architecture, name, from->layer->index);
    return mm_gguf_int(from->checkpoint, &key, value);
}

/* By its key, else by the architecture. */
static megamoe_status read_rule(const source *from, bool has_bias, megamoe_router_rule *rule) {
    static const megamoe_router_rule rules[] = {0, MEGAMOE_ROUTER_SOFTMAX, MEGAMOE_ROUTER_SIGMOID,
                                                MEGAMOE_ROUTER_SOFTMAX_SELECTED,
                                                MEGAMOE_ROUTER_SQRT_SOFTPLUS};
    const mm_gguf_key key =
        mm_gguf_key_of(from->architecture, "expert_gating_func", from->layer->index);
    int32_t function = 0;
    MM_TRY(mm_gguf_int(from->checkpoint, &key, &function));
    if (function < 0 || (size_t)function >= sizeof rules / sizeof *rules)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: %s is %" PRId32
                       "; known are 1 (softmax), 2 (sigmoid), 3 (softmax over the chosen), 4 "
                       "(sqrt-softplus)",
                       from->checkpoint->config.path, key.text, function);
    *rule = function                   ? rules[function]
            : from->architecture->rule ? from->architecture->rule
            : has_bias                 ? MEGAMOE_ROUTER_SIGMOID
                                       : MEGAMOE_ROUTER_SOFTMAX;
    return MEGAMOE_OK;
}

static megamoe_status read_desc(const source *from, const mm_router_tensors *tensors,
                                megamoe_router_desc *desc) {
    const mm_config *config = &from->checkpoint->config;
    MM_TRY(read_rule(from, tensors->selection_bias, &desc->rule));
    MM_TRY(read_int(from, "expert_used_count", &desc->topk));
    if (desc->topk == 0)
        return mm_fail(MEGAMOE_ENOTFOUND,
                       "%s: %s.expert_used_count is missing; the router of layer %" PRId32
                       " needs it",
                       config->path, from->architecture->name, from->layer->index);
    MM_TRY(read_int(from, "expert_group_count", &desc->groups));
    MM_TRY(read_int(from, "expert_group_used_count", &desc->groups_kept));

    const mm_gguf_key norm = mm_gguf_key_of(from->architecture, "expert_weights_norm", 0);
    desc->normalize = from->architecture->normalizes;
    MM_TRY(mm_config_bool(config, norm.text, &desc->normalize));
    /* As in the same models under other names. */
    desc->normalize_epsilon = desc->normalize && (desc->rule == MEGAMOE_ROUTER_SIGMOID ||
                                                  desc->rule == MEGAMOE_ROUTER_SQRT_SOFTPLUS)
                                  ? 1e-20f
                                  : 0.0f;
    const mm_gguf_key scale =
        mm_gguf_key_of(from->architecture, "expert_weights_scale", from->layer->index);
    return mm_gguf_float(from->checkpoint, &scale, &desc->scaling);
}

/* A hash layer is one by its table and by hash_layer_count, or by neither. */
static megamoe_status check_hash(const source *from, const mm_tensor *table) {
    int32_t layers = -1;
    MM_TRY(read_int(from, "hash_layer_count", &layers));
    if (layers < 0 || (table != NULL) == (from->layer->index < layers))
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_EFORMAT,
                   "%s: %s.hash_layer_count is %" PRId32 ", but layer %" PRId32
                   " has %s ffn_gate_tid2eid.weight",
                   from->checkpoint->config.path, from->architecture->name, layers,
                   from->layer->index, table ? "a" : "no");
}

megamoe_status mm_gguf_router(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                              megamoe_router **router) {
    source from = {.checkpoint = checkpoint, .layer = layer};
    MM_TRY(mm_gguf_architecture_of(checkpoint, &from.architecture));
    mm_router_tensors tensors = {.weight = find(&from, "ffn_gate_inp.weight"),
                                 .linear_bias = find(&from, "ffn_gate_inp.bias"),
                                 .selection_bias = find(&from, "exp_probs_b.bias"),
                                 .hash_table = find(&from, "ffn_gate_tid2eid.weight")};
    if (!tensors.weight)
        return mm_fail(MEGAMOE_ENOTFOUND,
                       "%s: blk.%" PRId32 ".ffn_gate_inp.weight: layer %" PRId32
                       " has no router here",
                       checkpoint->path, layer->index, layer->index);
    const mm_tensor *weight = tensors.weight;
    if (weight->rank != 2 || weight->shape[0] > INT32_MAX || weight->shape[1] > INT32_MAX) {
        char shape[MM_SHAPE_TEXT];
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s: its shape is %s; it must be [experts, hidden]",
                       weight->file->path, weight->name,
                       mm_shape_text(weight->shape, weight->rank, shape));
    }
    MM_TRY(check_hash(&from, tensors.hash_table));
    if (tensors.hash_table)
        tensors.selection_bias = NULL; /* it selects, and here the table does */
    megamoe_router_desc desc = MEGAMOE_INIT(megamoe_router_desc);
    MM_TRY(read_desc(&from, &tensors, &desc));
    desc.experts = (int32_t)weight->shape[0];
    desc.hidden = (int32_t)weight->shape[1];
    const struct {
        const char *name;
        int32_t seen;
    } sizes[] = {{"expert_count", desc.experts}, {"embedding_length", desc.hidden}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const mm_gguf_key key = mm_gguf_key_of(from.architecture, sizes[i].name, layer->index);
        int32_t stated = 0;
        MM_TRY(mm_gguf_int(checkpoint, &key, &stated));
        MM_TRY(mm_config_agree(checkpoint, key.text, stated, weight, sizes[i].seen));
    }
    return mm_router_from_tensors(&tensors, &desc, router);
}
