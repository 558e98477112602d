/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/declared.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "checkpoint/names.h"

/* Both configs hold ModelOpt's keys; the one of its own comes first. */
enum { SOURCES = 2 };

typedef const json_t *(*read_key)(const mm_config *config, const char *key);
static const read_key sources[SOURCES] = {mm_config_hf_quantization, mm_config_quantization};

static const char *source_path(const mm_config *config, int source) {
    return source == 0 ? config->quant_path : config->path;
}

/*
 * The entry for the layer's experts, or for one of the first expert's projections, in a
 * quantized_layers. Its keys are names of modules, at times with another prefix than tensors have.
 */
static const json_t *entry_of(const json_t *quantized_layers, const mm_layer *layer) {
    mm_expert_name like;
    if (!quantized_layers || !mm_expert_name_parse(layer->first->name, &like))
        return NULL;
    const char *unprefixed = strstr(layer->first->name, "layers.");
    const int unprefixed_bytes = (int)(layer->first->name + like.block_bytes - unprefixed);
    for (int i = 0; mm_name_prefixes[i]; i++) {
        char block[MM_NAME_TEXT], name[MM_NAME_TEXT];
        like.block_bytes = (size_t)snprintf(block, sizeof block, "%s%.*s", mm_name_prefixes[i],
                                            unprefixed_bytes, unprefixed);
        mm_block_name_form(block, &like, "experts", name);
        const json_t *entry = json_object_get(quantized_layers, name);
        for (megamoe_projection p = MEGAMOE_GATE; !entry && p <= MEGAMOE_DOWN; p++) {
            mm_expert_name_form(block, &like, 0, p, "", name);
            name[strlen(name) - 1] = 0; /* the dot before a part */
            entry = json_object_get(quantized_layers, name);
        }
        if (entry)
            return entry;
    }
    return NULL;
}

static void take(const mm_config *config, int source, const json_t *algorithm,
                 const json_t *group_size, mm_declared *declared) {
    if (declared->algorithm || !json_is_string(algorithm) ||
        strcmp(json_string_value(algorithm), "MIXED_PRECISION") == 0)
        return;
    declared->algorithm = json_string_value(algorithm);
    declared->path = source_path(config, source);
    const json_int_t size = json_integer_value(group_size);
    declared->group_size = size > 0 && size <= INT32_MAX ? (int32_t)size : 0;
}

megamoe_status mm_declared_read(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                                mm_declared *declared) {
    const mm_config *config = &checkpoint->config;
    *declared = (mm_declared){0};
    MM_TRY(mm_config_string(config, "expert_dtype", &declared->expert_dtype));
    const json_t *nested = mm_config_quantization(config, "expert_dtype");
    if (json_is_string(nested))
        declared->expert_dtype = json_string_value(nested);
    declared->method = json_string_value(mm_config_quantization(config, "quant_method"));

    bool by_layer = false;
    for (int i = 0; i < SOURCES; i++) {
        const json_t *quantized_layers = sources[i](config, "quantized_layers");
        const json_t *entry = entry_of(quantized_layers, layer);
        take(config, i, json_object_get(entry, "quant_algo"), json_object_get(entry, "group_size"),
             declared);
        by_layer = by_layer || json_object_size(quantized_layers) > 0;
    }
    if (by_layer)
        return MEGAMOE_OK;
    static const char *const keys[] = {"moe_quant_algo", "quant_algo"};
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
        for (int i = 0; i < SOURCES; i++)
            take(config, i, sources[i](config, keys[k]), sources[i](config, "group_size"),
                 declared);
    return MEGAMOE_OK;
}

megamoe_status mm_declared_fail(const mm_layer *layer, const char *path, const char *key,
                                const char *value, const char *format) {
    return mm_fail(MEGAMOE_EFORMAT,
                   "%s: %s: the tensors of layer %" PRId32 " are %s (this one is %s), but %s of %s "
                   "is \"%s\"",
                   layer->first->file->path, layer->first->name, layer->index, format,
                   layer->first->dtype->name, key, path, value);
}

megamoe_status mm_declared_not_fp4(const megamoe_checkpoint *checkpoint, const mm_layer *layer) {
    mm_declared declared;
    MM_TRY(mm_declared_read(checkpoint, layer, &declared));
    if (declared.expert_dtype && strcmp(declared.expert_dtype, "fp4") == 0)
        return mm_declared_fail(layer, checkpoint->config.path, "expert_dtype",
                                declared.expert_dtype, "not FP4");
    return MEGAMOE_OK;
}
