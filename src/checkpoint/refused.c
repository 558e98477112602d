/* SPDX-License-Identifier: Apache-2.0 */
/* Experts in formats that are known but not run: the message says which. */
#include <inttypes.h>
#include <string.h>

#include "base/error.h"
#include "checkpoint/declared.h"
#include "checkpoint/experts.h"

static const struct format {
    const char *part;
    const char *dtype; /* NULL: any */
    const char *name;
} formats[] = {
    {"weight", "F16", "FP16, not quantized"},
    {"weight", "F32", "FP32, not quantized"},
    {"gate_up_proj", "BF16", "BF16, not quantized, fused in an order that no name tells"},
    {"down_proj", "BF16", "BF16, not quantized, fused in an order that no name tells"},
    {"gate_up_proj", "F8_E4M3", "FP8, fused in an order that no name tells"},
    {"down_proj", "F8_E4M3", "FP8, fused in an order that no name tells"},
    {"weight_packed", "I32", "compressed-tensors with integer codes"},
};

static const struct format *format_of(const char *part, const char *dtype) {
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (strcmp(part, formats[i].part) == 0 &&
            (!formats[i].dtype || strcmp(dtype, formats[i].dtype) == 0))
            return &formats[i];
    return NULL;
}

static bool claims(const mm_tensor *tensor, mm_claim *claim) {
    mm_expert_name name;
    if (!mm_expert_name_parse(tensor->name, &name))
        return false;
    *claim = mm_claim_of(&name);
    return format_of(name.part, tensor->dtype->name) != NULL;
}

static megamoe_status weights(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                              mm_layer_tensors *tensors) {
    (void)checkpoint;
    (void)tensors;
    const mm_tensor *first = layer->first;
    mm_expert_name name;
    const struct format *format = NULL;
    if (mm_expert_name_parse(first->name, &name))
        format = format_of(name.part, first->dtype->name);
    return mm_fail(MEGAMOE_EUNSUPPORTED,
                   "%s: %s: the experts of layer %" PRId32 " are in a format that is not run: %s; "
                   "deepseek-v4, gpt-oss and mimo-mxfp4 (MXFP4), modelopt-nvfp4 and "
                   "compressed-tensors (NVFP4, MXFP4) are",
                   first->file->path, first->name, layer->index,
                   format ? format->name : first->dtype->name);
}

const mm_family mm_refused = {
    .claims = claims, .check = mm_declared_not_fp4, .weights = weights, .router = mm_router_read};
