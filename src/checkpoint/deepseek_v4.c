/* SPDX-License-Identifier: Apache-2.0 */
/*
 * DeepSeek-V4 and V4.1 as published: MXFP4 experts, one tensor for each projection.
 *
 *   {block}experts.{E}.w1.weight  I8 [I, H/2]: two codes a byte     w3: up, w2: down [H, I/2]
 *   {block}experts.{E}.w1.scale   F8_E8M0 [I, H/32], a multiplier; also named weight_scale_inv
 */
#include <string.h>

#include "base/error.h"
#include "checkpoint/declared.h"
#include "checkpoint/experts.h"
#include "weights/weights.h"

enum { BLOCK = 32 };

static const char codes_part[] = "weight";
static const char *const scales_parts[] = {"scale", "weight_scale_inv"};

static bool is_scales(const char *part) {
    return strcmp(part, scales_parts[0]) == 0 || strcmp(part, scales_parts[1]) == 0;
}

static bool claims(const mm_tensor *tensor, mm_claim *claim) {
    mm_expert_name name;
    if (!mm_expert_name_parse(tensor->name, &name) || name.expert == MM_EXPERTS_FUSED)
        return false;
    *claim = mm_claim_of(&name);
    return strcmp(tensor->dtype->name, "I8") == 0        ? strcmp(name.part, codes_part) == 0
           : strcmp(tensor->dtype->name, "F8_E8M0") == 0 ? is_scales(name.part)
                                                         : false;
}

static megamoe_status check(const megamoe_checkpoint *checkpoint, const mm_layer *layer) {
    static const char format[] = "MXFP4";
    mm_declared declared;
    MM_TRY(mm_declared_read(checkpoint, layer, &declared));
    if (declared.expert_dtype && strcmp(declared.expert_dtype, "fp4") != 0)
        return mm_declared_fail(layer, checkpoint->config.path, "expert_dtype",
                                declared.expert_dtype, format);
    if (declared.algorithm && strstr(declared.algorithm, "NVFP4"))
        return mm_declared_fail(layer, declared.path, "the ModelOpt algorithm", declared.algorithm,
                                format);
    return MEGAMOE_OK;
}

static megamoe_status fill(const mm_experts *experts, const char *scales_part, int32_t expert,
                           megamoe_projection projection, mm_layer_tensors *tensors) {
    const int64_t rows = mm_rows(&tensors->desc, projection);
    const int64_t columns = mm_columns(&tensors->desc, projection);
    const size_t at = (size_t)expert * 3 + (size_t)projection;
    mm_matrix_source *source = &tensors->sources[at];
    MM_TRY(mm_experts_find(experts, expert, projection, codes_part, &source->codes));
    MM_TRY(mm_experts_find(experts, expert, projection, scales_part, &source->scales));
    MM_TRY(mm_tensor_expect(source->codes, "I8", 2, (int64_t[]){rows, columns / 2}));
    MM_TRY(mm_tensor_expect(source->scales, "F8_E8M0", 2, (int64_t[]){rows, columns / BLOCK}));
    tensors->matrices[at] = (megamoe_matrix){.codes_stride = (size_t)columns / 2,
                                             .scales_stride = (size_t)columns / BLOCK};
    return mm_experts_bias(experts, expert, projection, tensors);
}

static megamoe_status weights(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                              mm_layer_tensors *tensors) {
    static const char *const parts[] = {"weight", "scale", "weight_scale_inv", NULL};
    mm_experts experts;
    MM_TRY(mm_experts_scan(checkpoint, layer, parts, &experts));
    const mm_tensor *gate;
    MM_TRY(mm_experts_find(&experts, 0, MEGAMOE_GATE, codes_part, &gate));
    MM_TRY(mm_tensor_expect_rank(gate, "I8", 2));
    const mm_gate_shape shape = {.rows = gate->shape[0], .row_bytes = gate->shape[1]};
    MM_TRY(mm_experts_describe(&experts, gate, shape, MEGAMOE_FORMAT_MXFP4, &tensors->desc));
    MM_TRY(mm_layer_tensors_reserve(&experts, tensors));
    /* Both names of the scales occur in public repositories, one of them in each. */
    char name[MM_NAME_TEXT];
    mm_expert_name_form(layer->first->name, &experts.like, 0, MEGAMOE_GATE, scales_parts[1], name);
    const char *scales_part = scales_parts[mm_checkpoint_find(checkpoint, name) != NULL];
    for (int32_t expert = 0; expert < tensors->desc.experts; expert++)
        for (megamoe_projection p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++)
            MM_TRY(fill(&experts, scales_part, expert, p, tensors));
    return MEGAMOE_OK;
}

const mm_family mm_deepseek_v4 = {.name = "deepseek-v4",
                                  .claims = claims,
                                  .check = check,
                                  .weights = weights,
                                  .router = mm_router_read};
