/* SPDX-License-Identifier: Apache-2.0 */
/* The configs of a converted checkpoint: the model's own keys, and what the target's family says.
 */
#include <string.h>

#include "base/error.h"
#include "checkpoint/convert.h"
#include "megamoe/version.h"
#include "weights/rows.h"

/* What is said of formats in the source holds no longer. */
static void forget_formats(json_t *object) {
    static const char *const keys[] = {"quantization_config", "compression_config", "expert_dtype"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        json_object_del(object, keys[i]);
}

static json_t *compressed_tensors(const mm_target *target) {
    const bool mxfp4 = target->format == MEGAMOE_FORMAT_MXFP4;
    const char *format = mxfp4 ? "mxfp4-pack-quantized" : "nvfp4-pack-quantized";
    return json_pack("{s:s, s:s, s:s, s:[], s:{s:{s:[s], s:s, s:{s:i, s:s, s:s, s:i, s:b, s:b}}}}",
                     "quant_method", "compressed-tensors", "quantization_status", "compressed",
                     "format", format, "ignore", "config_groups", "group_0", "targets",
                     "re:.*\\.experts\\..*", "format", format, "weights", "num_bits", 4, "type",
                     "float", "strategy", mxfp4 ? "group" : "tensor_group", "group_size",
                     (int)mm_group_size(target->format), "symmetric", 1, "dynamic", 0);
}

static json_t *quantization_of(const mm_target *target) {
    if (target->family == &mm_compressed_tensors)
        return compressed_tensors(target);
    if (target->family == &mm_modelopt)
        return json_pack("{s:s, s:s, s:i, s:[]}", "quant_method", "modelopt", "quant_algo", "NVFP4",
                         "group_size", (int)mm_group_size(target->format), "ignore");
    return json_pack("{s:s}", "quant_method", "mxfp4");
}

/* The type that the names of the source stood for, where its config gives none. */
static megamoe_status name_model(const megamoe_checkpoint *checkpoint, json_t *config) {
    const mm_layer *layer = &checkpoint->layers[0];
    if (mm_config_has(&checkpoint->config, "model_type"))
        return MEGAMOE_OK;
    bool v4;
    MM_TRY(mm_is_deepseek_v4(checkpoint, layer, &v4));
    const char *type = layer->family == &mm_gpt_oss ? "gpt_oss" : v4 ? "deepseek_v4" : NULL;
    if (type && json_object_set_new(config, "model_type", json_string(type)) != 0)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", checkpoint->path);
    return MEGAMOE_OK;
}

megamoe_status mm_converted_config(const megamoe_checkpoint *checkpoint, const mm_target *target,
                                   json_t **config, json_t **quant) {
    const json_t *root = checkpoint->config.root;
    const bool gguf = checkpoint->layers[0].family == &mm_gguf;
    *quant = NULL;
    *config = root && !gguf ? json_deep_copy(root) : json_object();
    if (!*config)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", checkpoint->path);
    if (gguf)
        MM_TRY(mm_gguf_config(checkpoint, *config));
    forget_formats(*config);
    forget_formats(json_object_get(*config, "text_config"));
    MM_TRY(name_model(checkpoint, *config));
    /* DeepSeek's own word for it; its quantization_config is of dense weights, which are not here.
     */
    const bool v4 = target->family == &mm_deepseek_v4;
    int failed = v4 ? json_object_set_new(*config, "expert_dtype", json_string("fp4"))
                    : json_object_set_new(*config, "quantization_config", quantization_of(target));
    if (target->family == &mm_modelopt) {
        *quant = json_pack("{s:{s:s, s:s}, s:{s:s, s:n, s:i, s:[]}}", "producer", "name", "megamoe",
                           "version", megamoe_version(), "quantization", "quant_algo", "NVFP4",
                           "kv_cache_quant_algo", "group_size", (int)mm_group_size(target->format),
                           "exclude_modules");
        failed |= !*quant;
    }
    return failed ? mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", checkpoint->path) : MEGAMOE_OK;
}
