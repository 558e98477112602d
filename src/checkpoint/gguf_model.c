/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/gguf_model.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"

static const char routed[] = "n_routed_experts", local[] = "num_local_experts";
static const char plain[] = "num_experts";

static const mm_gguf_architecture architectures[] = {
    {"gpt-oss", "gpt_oss", .experts_key = local, .rule = MEGAMOE_ROUTER_SOFTMAX_SELECTED,
     .activation = {1.702f, 1.0f, 7.0f}},
    {"deepseek4", "deepseek_v4", .experts_key = routed, .rule = MEGAMOE_ROUTER_SQRT_SOFTPLUS,
     .normalizes = true, .limits = true},
    {"deepseek2", "deepseek_v3", .experts_key = routed}, /* V2, V3, R1; Kimi-K2 */
    {"deepseek32", "deepseek_v32", .experts_key = routed, .rule = MEGAMOE_ROUTER_SIGMOID},
    {"glm4moe", "glm4_moe", .experts_key = routed, .rule = MEGAMOE_ROUTER_SIGMOID},
    {"glm-dsa", "glm_moe_dsa", .experts_key = routed, .rule = MEGAMOE_ROUTER_SIGMOID},
    {"mimo2", "mimo_v2", .experts_key = routed, .rule = MEGAMOE_ROUTER_SIGMOID, .normalizes = true},
    {"minimax-m2", "minimax_m2", .experts_key = local, .rule = MEGAMOE_ROUTER_SIGMOID,
     .normalizes = true},
    {"qwen3moe", "qwen3_moe", .experts_key = plain, .rule = MEGAMOE_ROUTER_SOFTMAX,
     .normalizes = true},
    {"qwen3vlmoe", "qwen3_vl_moe", .experts_key = plain, .rule = MEGAMOE_ROUTER_SOFTMAX,
     .normalizes = true},
    {"qwen3next", "qwen3_next", .experts_key = plain, .rule = MEGAMOE_ROUTER_SOFTMAX,
     .normalizes = true},
    {"qwen35moe", "qwen3_5_moe", .experts_key = plain, .rule = MEGAMOE_ROUTER_SOFTMAX,
     .normalizes = true},
};

megamoe_status mm_gguf_architecture_of(const megamoe_checkpoint *checkpoint,
                                       const mm_gguf_architecture **architecture) {
    static const char key[] = "general.architecture";
    const char *name = NULL;
    MM_TRY(mm_config_string(&checkpoint->config, key, &name));
    if (!name)
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s is missing", checkpoint->config.path, key);
    char known[256] = "";
    for (size_t i = 0, n = 0; i < sizeof architectures / sizeof *architectures; i++) {
        *architecture = &architectures[i];
        if (strcmp(name, architectures[i].name) == 0)
            return MEGAMOE_OK;
        n += (size_t)snprintf(known + n, sizeof known - n, "%s%s", n ? ", " : "",
                              architectures[i].name);
    }
    return mm_fail(MEGAMOE_EUNSUPPORTED,
                   "%s: %s is \"%s\", whose activation and router are not known; known are %s",
                   checkpoint->config.path, key, name, known);
}

mm_gguf_key mm_gguf_key_of(const mm_gguf_architecture *architecture, const char *name,
                           int32_t layer) {
    mm_gguf_key key = {.layer = layer};
    snprintf(key.text, sizeof key.text, "%s.%s", architecture->name, name);
    return key;
}

/*
 * The value of a key as a config of its own, so that lists are read with the checks of single
 * values. Borrows from the checkpoint; *object needs json_decref.
 */
static megamoe_status single(const megamoe_checkpoint *checkpoint, const mm_gguf_key *key,
                             mm_config *config, json_t **object) {
    json_t *value = json_object_get(checkpoint->config.root, key->text);
    if (json_is_array(value))
        value = json_array_get(value, (size_t)key->layer);
    *object = json_object();
    *config = (mm_config){.path = checkpoint->config.path, .root = *object, .text = *object};
    if (*object && (!value || json_object_set(*object, key->text, value) == 0))
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", checkpoint->path);
}

megamoe_status mm_gguf_int(const megamoe_checkpoint *checkpoint, const mm_gguf_key *key,
                           int32_t *value) {
    mm_config config;
    json_t *object;
    megamoe_status status = single(checkpoint, key, &config, &object);
    if (status == MEGAMOE_OK)
        status = mm_config_int(&config, key->text, value);
    json_decref(object);
    return status;
}

megamoe_status mm_gguf_float(const megamoe_checkpoint *checkpoint, const mm_gguf_key *key,
                             float *value) {
    mm_config config;
    json_t *object;
    megamoe_status status = single(checkpoint, key, &config, &object);
    if (status == MEGAMOE_OK)
        status = mm_config_float(&config, key->text, value);
    json_decref(object);
    return status;
}

bool mm_gguf_is_draft(const megamoe_checkpoint *checkpoint, const mm_layer *layer) {
    char prefix[32];
    size_t first;
    snprintf(prefix, sizeof prefix, "blk.%" PRId32 ".nextn.", layer->index);
    return mm_checkpoint_find_prefix(checkpoint, prefix, &first) > 0;
}
