/* SPDX-License-Identifier: Apache-2.0 */
/* The activation of a model's experts: by its type and by the keys of its config. */
#include <string.h>

#include "base/error.h"
#include "checkpoint/experts.h"

megamoe_status mm_is_gpt_oss(const megamoe_checkpoint *checkpoint, bool *is) {
    const char *model_type = "";
    MM_TRY(mm_config_string(&checkpoint->config, "model_type", &model_type));
    *is = strcmp(model_type, "gpt_oss") == 0;
    return MEGAMOE_OK;
}

/* g * sigmoid(alpha * g) * (u + beta), the function that gpt-oss brought and MiniMax-M3 took. */
static megamoe_status read_oai(const mm_config *config, megamoe_activation *activation) {
    *activation = (megamoe_activation){.alpha = 1.702f, .offset = 1.0f, .limit = 7.0f};
    MM_TRY(mm_config_float(config, "swiglu_alpha", &activation->alpha));
    MM_TRY(mm_config_float(config, "swiglu_beta", &activation->offset));
    return mm_config_float(config, "swiglu_limit", &activation->limit);
}

megamoe_status mm_activation_read(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                                  megamoe_activation *activation) {
    const mm_config *config = &checkpoint->config;
    const char *function = "silu", *model_type = "";
    MM_TRY(mm_config_string(config, "hidden_act", &function));
    MM_TRY(mm_config_string(config, "model_type", &model_type));
    if (strcmp(function, "situ") == 0)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: hidden_act \"situ\" bends gate and up with tanh, which is not run; "
                       "silu and swigluoai are",
                       config->path);
    const bool oai = strcmp(function, "swigluoai") == 0;
    if (!oai && strcmp(function, "silu") != 0 && strcmp(function, "swish") != 0)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: hidden_act \"%s\"; silu and swigluoai are supported", config->path,
                       function);
    /* Configs of these two call it silu all the same. */
    if (oai || layer->family == &mm_gpt_oss || strcmp(model_type, "gpt_oss") == 0 ||
        strncmp(model_type, "minimax_m3", 10) == 0)
        return read_oai(config, activation);

    float alpha = 1.0f;
    MM_TRY(mm_config_float(config, "swiglu_alpha", &alpha));
    if (alpha != 1.0f)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: hidden_act \"%s\" with swiglu_alpha %g; silu with 1 is supported",
                       config->path, function, (double)alpha);
    bool v4;
    MM_TRY(mm_is_deepseek_v4(checkpoint, layer, &v4));
    float limit = v4 ? 10.0f : 0.0f;
    MM_TRY(mm_config_float(config, "swiglu_limit", &limit));
    *activation = (megamoe_activation){.limit = limit};
    return MEGAMOE_OK;
}
