/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The routers of DeepSeek-V3 and V4, Kimi, GLM, MiniMax and Qwen3: tensors beside the experts and
 * keys of the config. Without a config there is no router: how many experts a token gets and how
 * their weights are scaled cannot be seen in the tensors.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/view.h"
#include "checkpoint/experts.h"
#include "router/router.h"

typedef struct source {
    const megamoe_checkpoint *checkpoint;
    const mm_layer *layer;
    mm_expert_name like;
} source;

static const mm_tensor *find(const source *from, const char *part) {
    char name[MM_NAME_TEXT];
    mm_block_name_form(from->layer->first->name, &from->like, part, name);
    return mm_checkpoint_find(from->checkpoint, name);
}

static megamoe_status required(const source *from, const char *key, bool there) {
    if (there)
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_ENOTFOUND, "%s: %s is missing; the router of layer %" PRId32 " needs it",
                   from->checkpoint->config.path, key, from->layer->index);
}

/* DeepSeek calls the rule by name; of other models the names of type or tensors tell it. */
static megamoe_status read_rule(const source *from, bool v4, const mm_tensor *bias,
                                megamoe_router_rule *rule) {
    const mm_config *config = &from->checkpoint->config;
    const char *function = NULL, *model_type = "";
    MM_TRY(mm_config_string(config, "scoring_func", &function));
    MM_TRY(mm_config_string(config, "model_type", &model_type));
    if (!function) {
        *rule = v4     ? MEGAMOE_ROUTER_SQRT_SOFTPLUS
                : bias ? MEGAMOE_ROUTER_SIGMOID
                       : MEGAMOE_ROUTER_SOFTMAX;
        return required(from, "scoring_func", v4 || bias || strncmp(model_type, "qwen", 4) == 0);
    }
    static const struct {
        const char *name;
        megamoe_router_rule rule;
    } functions[] = {{"softmax", MEGAMOE_ROUTER_SOFTMAX},
                     {"sigmoid", MEGAMOE_ROUTER_SIGMOID},
                     {"sqrtsoftplus", MEGAMOE_ROUTER_SQRT_SOFTPLUS}};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (strcmp(function, functions[i].name) == 0) {
            *rule = functions[i].rule;
            return MEGAMOE_OK;
        }
    return mm_fail(MEGAMOE_EUNSUPPORTED,
                   "%s: scoring_func \"%s\" is none of softmax, sigmoid, sqrtsoftplus",
                   config->path, function);
}

/* Groups belong to the sigmoid rule; DeepSeek-V4 and softmax models have none. */
static megamoe_status read_groups(const source *from, const char *method,
                                  megamoe_router_desc *desc) {
    const mm_config *config = &from->checkpoint->config;
    if (desc->rule != MEGAMOE_ROUTER_SIGMOID)
        return MEGAMOE_OK;
    MM_TRY(mm_config_int(config, "n_group", &desc->groups));
    MM_TRY(mm_config_int(config, "topk_group", &desc->groups_kept));
    if (strcmp(method, "greedy") == 0)
        desc->groups = 0;
    if (desc->groups <= 1)
        desc->groups_kept = desc->groups;
    return required(from, "topk_group", desc->groups <= 1 || desc->groups_kept > 0);
}

static megamoe_status read_desc(const source *from, bool v4, const mm_tensor *bias,
                                const char *method, megamoe_router_desc *desc) {
    const mm_config *config = &from->checkpoint->config;
    if (strcmp(method, "noaux_tc") != 0 && strcmp(method, "greedy") != 0)
        return mm_fail(MEGAMOE_EUNSUPPORTED, "%s: topk_method \"%s\" is none of noaux_tc, greedy",
                       config->path, method);
    MM_TRY(read_rule(from, v4, bias, &desc->rule));
    MM_TRY(read_groups(from, method, desc));
    MM_TRY(mm_config_int(config, "num_experts_per_tok", &desc->topk));
    MM_TRY(required(from, "num_experts_per_tok", desc->topk > 0));

    /* Softmax models say whether they normalize; the others do unless they say they don't. */
    const bool softmax = desc->rule == MEGAMOE_ROUTER_SOFTMAX;
    desc->normalize = true;
    MM_TRY(mm_config_bool(config, "norm_topk_prob", &desc->normalize));
    MM_TRY(required(from, "norm_topk_prob", !softmax || mm_config_has(config, "norm_topk_prob")));
    desc->normalize_epsilon = desc->normalize && !softmax ? 1e-20f : 0.0f;

    /* Only models that scale have the key, except DeepSeek's, where it would be missed. */
    const bool unscaled = softmax || strstr(from->layer->first->name, ".block_sparse_moe.");
    desc->scaling = unscaled ? 1.0f : 0.0f;
    MM_TRY(mm_config_float(config, "routed_scaling_factor", &desc->scaling));
    MM_TRY(required(from, "routed_scaling_factor", desc->scaling != 0.0f));
    if (v4)
        MM_TRY(mm_config_float(config, "gate_temp", &desc->gate_temperature));
    return MEGAMOE_OK;
}

/* A hash layer is one by its table and by the config, or by neither. */
static megamoe_status check_hash(const source *from, bool v4, const mm_tensor *table) {
    int32_t hash_layers = -1;
    MM_TRY(mm_config_int(&from->checkpoint->config, "num_hash_layers", &hash_layers));
    if (!v4 || hash_layers < 0)
        return MEGAMOE_OK;
    if (!table && from->layer->index < hash_layers)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: num_hash_layers is %" PRId32 ", but layer %" PRId32
                       " has no gate.tid2eid",
                       from->checkpoint->config.path, hash_layers, from->layer->index);
    if (table && from->layer->index >= hash_layers)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s: layer %" PRId32
                       " has a hash table, but num_hash_layers of %s is %" PRId32,
                       table->file->path, table->name, from->layer->index,
                       from->checkpoint->config.path, hash_layers);
    return MEGAMOE_OK;
}

/* A view of a tensor of one of two dtypes. *copy holds its bytes; the caller frees it. */
static megamoe_status view_of(const mm_tensor *tensor, megamoe_dtype dtype, megamoe_dtype other,
                              int32_t rank, const int64_t *shape, megamoe_view *view, void **copy) {
    const bool is_other = strcmp(tensor->dtype->name, megamoe_dtype_name(other)) == 0;
    const megamoe_dtype found = is_other ? other : dtype;
    MM_TRY(mm_tensor_expect(tensor, megamoe_dtype_name(found), rank, shape));
    *copy = malloc(tensor->bytes ? tensor->bytes : 1);
    if (!*copy)
        return mm_fail(MEGAMOE_ENOMEM, "%s: %s: out of memory", tensor->file->path, tensor->name);
    *view = (megamoe_view){.data = *copy, .dtype = found, .rows = rank == 2 ? shape[0] : 1};
    return mm_tensor_read(tensor, 0, *copy, tensor->bytes);
}

megamoe_status mm_router_from_tensors(const mm_router_tensors *tensors, megamoe_router_desc *desc,
                                      megamoe_router **router) {
    const mm_tensor *gate = tensors->weight, *table = tensors->hash_table;
    char where[1024];
    snprintf(where, sizeof where, "%s: %s", gate->file->path, gate->name);
    desc->hash_vocab = table && table->rank == 2 ? table->shape[0] : 0;
    MM_TRY(mm_router_check_desc(desc, where, MEGAMOE_EFORMAT));
    const int64_t gate_shape[] = {desc->experts, desc->hidden};
    const int64_t table_shape[] = {desc->hash_vocab, desc->topk};
    mm_router_parts parts = {0};
    void *copies[4] = {0};
    megamoe_status status = MEGAMOE_OK;
    MM_TRY_GOTO(view_of(gate, MEGAMOE_DTYPE_BF16, MEGAMOE_DTYPE_F32, 2, gate_shape, &parts.weight,
                        &copies[0]),
                end);
    if (tensors->selection_bias)
        MM_TRY_GOTO(view_of(tensors->selection_bias, MEGAMOE_DTYPE_F32, MEGAMOE_DTYPE_BF16, 1,
                            gate_shape, &parts.selection_bias, &copies[1]),
                    end);
    if (tensors->linear_bias)
        MM_TRY_GOTO(view_of(tensors->linear_bias, MEGAMOE_DTYPE_F32, MEGAMOE_DTYPE_BF16, 1,
                            gate_shape, &parts.linear_bias, &copies[2]),
                    end);
    if (table) {
        MM_TRY_GOTO(view_of(table, MEGAMOE_DTYPE_I64, MEGAMOE_DTYPE_I32, 2, table_shape,
                            &parts.hash_table, &copies[3]),
                    end);
        snprintf(where, sizeof where, "%s: %s", table->file->path, table->name);
    }
    status = mm_router_build(desc, &parts, where, router);
end:
    for (size_t i = 0; i < sizeof copies / sizeof *copies; i++)
        free(copies[i]);
    return status;
}

/* Hidden size and experts by the config, else by the shape of the weight. */
static megamoe_status read_sizes(const mm_config *config, const mm_tensor *gate,
                                 megamoe_router_desc *desc) {
    const char *key;
    MM_TRY(mm_config_int(config, "hidden_size", &desc->hidden));
    MM_TRY(mm_config_experts(config, &desc->experts, &key));
    if (gate->rank != 2 || gate->shape[0] > INT32_MAX || gate->shape[1] > INT32_MAX)
        return MEGAMOE_OK;
    if (desc->hidden == 0)
        desc->hidden = (int32_t)gate->shape[1];
    if (desc->experts == 0)
        desc->experts = (int32_t)gate->shape[0];
    return MEGAMOE_OK;
}

/* The router of gpt-oss beside experts that have tensors of their own. */
static megamoe_status read_gpt_oss(const source *from, megamoe_router **router) {
    char weight_name[MM_NAME_TEXT], bias_name[MM_NAME_TEXT];
    mm_block_name_form(from->layer->first->name, &from->like, "router.weight", weight_name);
    mm_block_name_form(from->layer->first->name, &from->like, "router.bias", bias_name);
    megamoe_router_desc desc = MEGAMOE_INIT(megamoe_router_desc);
    const mm_tensor *weight = mm_checkpoint_find(from->checkpoint, weight_name);
    if (weight)
        MM_TRY(read_sizes(&from->checkpoint->config, weight, &desc));
    return mm_gpt_oss_router(from->checkpoint, from->layer, weight_name, bias_name, &desc, router);
}

megamoe_status mm_router_read(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                              megamoe_router **router) {
    const mm_config *config = &checkpoint->config;
    source from = {.checkpoint = checkpoint, .layer = layer};
    if (!mm_expert_name_parse(layer->first->name, &from.like))
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: %s: the router beside it has no name that is known",
                       layer->first->file->path, layer->first->name);
    bool gpt_oss;
    MM_TRY(mm_is_gpt_oss(checkpoint, &gpt_oss));
    if (gpt_oss)
        return read_gpt_oss(&from, router);
    const mm_tensor *gate = find(&from, "gate.weight");
    if (!gate)
        return mm_fail(
            MEGAMOE_ENOTFOUND, "%s: %.*sgate.weight: layer %" PRId32 " has no router here",
            checkpoint->path, (int)from.like.block_bytes, layer->first->name, layer->index);
    if (!config->root)
        return mm_fail(MEGAMOE_ENOTFOUND,
                       "%s: there is no config.json beside it; the router of layer %" PRId32
                       " needs its num_experts_per_tok, scoring_func and routed_scaling_factor",
                       checkpoint->path, layer->index);
    bool v4;
    MM_TRY(mm_is_deepseek_v4(checkpoint, layer, &v4));
    const mm_tensor *table = v4 ? find(&from, "gate.tid2eid") : NULL;
    MM_TRY(check_hash(&from, v4, table));
    const mm_tensor *bias = find(&from, "gate.e_score_correction_bias");
    if (!bias)
        bias = find(&from, "e_score_correction_bias");
    if (!bias && v4)
        bias = find(&from, "gate.bias");
    if (table)
        bias = NULL; /* it selects, and here the table does */

    megamoe_router_desc desc = MEGAMOE_INIT(megamoe_router_desc);
    const char *method = bias ? "noaux_tc" : "greedy";
    MM_TRY(mm_config_string(config, "topk_method", &method));
    MM_TRY(read_desc(&from, v4, bias, method, &desc));
    if (!bias && !table && (v4 || strcmp(method, "noaux_tc") == 0))
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %.*s: layer %" PRId32 " has neither a selection bias (gate.bias, "
                       "gate.e_score_correction_bias) nor a hash table",
                       checkpoint->path, (int)from.like.block_bytes, layer->first->name,
                       layer->index);
    MM_TRY(read_sizes(config, gate, &desc));
    const mm_router_tensors tensors = {.weight = gate, .selection_bias = bias, .hash_table = table};
    return mm_router_from_tensors(&tensors, &desc, router);
}
