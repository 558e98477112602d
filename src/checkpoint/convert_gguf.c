/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layers of GGUF files in the terms of the families that are written: names of tensors, and a
 * config.json that says what the metadata say.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "checkpoint/convert.h"
#include "checkpoint/gguf_model.h"

static bool is_gpt_oss(const mm_gguf_architecture *architecture) {
    return strcmp(architecture->model_type, "gpt_oss") == 0;
}

static bool is_deepseek_v4(const mm_gguf_architecture *architecture) {
    return strcmp(architecture->model_type, "deepseek_v4") == 0;
}

/* ---- Names ---- */

/* A tensor of a router, and what it is called beside other experts; NULL: it has no place there. */
static const struct {
    const char *part, *gpt_oss, *deepseek_v4, *others;
} router_parts[MM_GGUF_ROUTER_PARTS] = {
    {"ffn_gate_inp.weight", "router.weight", "gate.weight", "gate.weight"},
    {"ffn_gate_inp.bias", "router.bias", NULL, NULL},
    {"exp_probs_b.bias", NULL, "gate.bias", "gate.e_score_correction_bias"},
    {"ffn_gate_tid2eid.weight", NULL, "gate.tid2eid", NULL},
};

static megamoe_status take_router(mm_conversion *c, const mm_gguf_architecture *architecture) {
    for (size_t i = 0; i < MM_GGUF_ROUTER_PARTS; i++) {
        char name[MM_NAME_TEXT];
        snprintf(name, sizeof name, "blk.%" PRId32 ".%s", c->layer->index, router_parts[i].part);
        const mm_tensor *from = mm_checkpoint_find(c->checkpoint, name);
        const char *part = is_gpt_oss(architecture)       ? router_parts[i].gpt_oss
                           : is_deepseek_v4(architecture) ? router_parts[i].deepseek_v4
                                                          : router_parts[i].others;
        if (from && !part)
            return mm_fail(MEGAMOE_EUNSUPPORTED,
                           "%s: %s: in the families that are written no router of %s has a tensor "
                           "like this",
                           from->file->path, from->name, architecture->model_type);
        if (from)
            c->router[c->n_router++] = (mm_router_copy){from, part};
    }
    /* Under the names of DeepSeek-V4 one without both is damaged. */
    if (is_deepseek_v4(architecture) && c->n_router == 1)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: %s: stands alone; in the families that are written a router of "
                       "deepseek_v4 has a selection bias or a hash table",
                       c->router[0].from->file->path, c->router[0].from->name);
    return MEGAMOE_OK;
}

static megamoe_status check_biases(const mm_conversion *c,
                                   const mm_gguf_architecture *architecture) {
    const bool has_bias = c->source.desc.has_bias;
    if (has_bias == is_gpt_oss(architecture))
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_EUNSUPPORTED,
                   "%s: %s: the experts of layer %" PRId32
                   " have %s and the architecture is \"%s\"; in the families that are written "
                   "those of gpt-oss have biases and no others",
                   c->layer->first->file->path, c->layer->first->name, c->layer->index,
                   has_bias ? "biases" : "no biases", architecture->name);
}

megamoe_status mm_gguf_conversion(mm_conversion *c) {
    const mm_gguf_architecture *architecture;
    MM_TRY(mm_gguf_architecture_of(c->checkpoint, &architecture));
    MM_TRY(check_biases(c, architecture));
    const bool v4 = is_deepseek_v4(architecture);
    snprintf(c->block, sizeof c->block, "%slayers.%" PRId32 ".%s.", v4 ? "" : "model.",
             c->layer->index, v4 ? "ffn" : "mlp");
    c->like = (mm_expert_name){.layer = c->layer->index, .numbered = v4};
    return take_router(c, architecture);
}

/* ---- config.json ---- */

typedef struct model {
    const megamoe_checkpoint *checkpoint;
    const mm_gguf_architecture *architecture;
} model;

static megamoe_status set(const model *m, json_t *config, const char *key, json_t *value) {
    if (json_object_set_new(config, key, value) == 0)
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", m->checkpoint->path);
}

/* Numbers of the whole model, which have to fit the layers that are written. */
static megamoe_status set_model(const model *m, json_t *config) {
    const megamoe_checkpoint *checkpoint = m->checkpoint;
    const mm_gguf_key blocks_key = mm_gguf_key_of(m->architecture, "block_count", 0);
    const mm_gguf_key drafts_key = mm_gguf_key_of(m->architecture, "nextn_predict_layers", 0);
    const mm_gguf_key hash_key = mm_gguf_key_of(m->architecture, "hash_layer_count", 0);
    int32_t blocks = 0, drafts = 0, hash_layers = -1;
    MM_TRY(mm_gguf_int(checkpoint, &blocks_key, &blocks));
    MM_TRY(mm_gguf_int(checkpoint, &drafts_key, &drafts));
    MM_TRY(mm_gguf_int(checkpoint, &hash_key, &hash_layers));
    MM_TRY(set(m, config, "model_type", json_string(m->architecture->model_type)));
    MM_TRY(set(m, config, "hidden_act", json_string("silu")));
    /* Draft blocks are counted among the blocks here, and not among the layers there. */
    if (blocks - drafts > checkpoint->layers[checkpoint->n_layers - 1].index)
        MM_TRY(set(m, config, "num_hidden_layers", json_integer(blocks - drafts)));
    if (hash_layers >= 0)
        MM_TRY(set(m, config, "num_hash_layers", json_integer(hash_layers)));
    return MEGAMOE_OK;
}

static megamoe_status set_experts(const model *m, const megamoe_stored_layer *stored,
                                  json_t *config) {
    const char *intermediate =
        is_gpt_oss(m->architecture) ? "intermediate_size" : "moe_intermediate_size";
    MM_TRY(set(m, config, "hidden_size", json_integer(stored->hidden)));
    MM_TRY(set(m, config, intermediate, json_integer(stored->intermediate)));
    MM_TRY(set(m, config, m->architecture->experts_key, json_integer(stored->experts)));
    if (stored->topk > 0)
        MM_TRY(set(m, config, "num_experts_per_tok", json_integer(stored->topk)));
    /* Where a family has a limit of its own, the key says that it is another one, or none. */
    if (stored->activation.limit != 0.0f || m->architecture->limits)
        MM_TRY(set(m, config, "swiglu_limit", json_real((double)stored->activation.limit)));
    return MEGAMOE_OK;
}

/* gpt-oss's names stand for its rule, and no others do. */
static megamoe_status set_router(const model *m, int32_t layer, const megamoe_router_desc *desc,
                                 json_t *config) {
    static const char *const functions[] = {[MEGAMOE_ROUTER_SOFTMAX] = "softmax",
                                            [MEGAMOE_ROUTER_SIGMOID] = "sigmoid",
                                            [MEGAMOE_ROUTER_SQRT_SOFTPLUS] = "sqrtsoftplus"};
    const bool selected = desc->rule == MEGAMOE_ROUTER_SOFTMAX_SELECTED;
    if (selected != is_gpt_oss(m->architecture))
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: the router of layer %" PRId32 " has the rule %s; in the families that "
                       "are written those of gpt_oss have softmax-selected and no others, and "
                       "model_type is %s",
                       m->checkpoint->path, layer, megamoe_router_rule_name(desc->rule),
                       m->architecture->model_type);
    if (selected)
        return MEGAMOE_OK;
    MM_TRY(set(m, config, "scoring_func", json_string(functions[desc->rule])));
    MM_TRY(set(m, config, "norm_topk_prob", json_boolean(desc->normalize)));
    MM_TRY(set(m, config, "routed_scaling_factor", json_real((double)desc->scaling)));
    if (desc->groups > 1) {
        MM_TRY(set(m, config, "n_group", json_integer(desc->groups)));
        MM_TRY(set(m, config, "topk_group", json_integer(desc->groups_kept)));
    }
    return MEGAMOE_OK;
}

static megamoe_status set_layer(const model *m, int32_t layer, json_t *config) {
    megamoe_stored_layer stored = MEGAMOE_INIT(megamoe_stored_layer);
    MM_TRY(megamoe_checkpoint_stored(m->checkpoint, layer, &stored));
    MM_TRY(set_experts(m, &stored, config));
    megamoe_router *router = NULL;
    MM_TRY(mm_router_if_any(m->checkpoint, layer, &router));
    if (!router)
        return MEGAMOE_OK;
    megamoe_router_desc desc = MEGAMOE_INIT(megamoe_router_desc);
    megamoe_status status = megamoe_router_describe(router, &desc);
    megamoe_router_close(router);
    if (status == MEGAMOE_OK)
        status = set_router(m, layer, &desc, config);
    return status;
}

/* Metadata may have a number for each layer; a config has one for all. */
static megamoe_status merge(const model *m, int32_t layer, json_t *of_layer, json_t *config) {
    const char *key;
    json_t *value;
    json_object_foreach(of_layer, key, value) {
        const json_t *before = json_object_get(config, key);
        if (before && !json_equal(before, value))
            return mm_fail(MEGAMOE_EUNSUPPORTED,
                           "%s: layer %" PRId32 " has another %s than the layers before it; the "
                           "config.json of the families that are written has one for all layers",
                           m->checkpoint->path, layer, key);
    }
    if (json_object_update(config, of_layer) != 0)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", m->checkpoint->path);
    return MEGAMOE_OK;
}

megamoe_status mm_gguf_config(const megamoe_checkpoint *checkpoint, json_t *config) {
    model m = {.checkpoint = checkpoint};
    MM_TRY(mm_gguf_architecture_of(checkpoint, &m.architecture));
    MM_TRY(set_model(&m, config));
    for (int32_t i = 0; i < checkpoint->n_layers; i++) {
        const int32_t layer = checkpoint->layers[i].index;
        json_t *of_layer = json_object();
        megamoe_status status = set_layer(&m, layer, of_layer);
        if (status == MEGAMOE_OK)
            status = merge(&m, layer, of_layer, config);
        json_decref(of_layer);
        MM_TRY(status);
    }
    return MEGAMOE_OK;
}
