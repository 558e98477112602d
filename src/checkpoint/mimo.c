/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MXFP4 experts as MiMo-V2.5-Pro-FP4 stores them, one tensor for each projection.
 *
 *   {block}experts.{E}.gate_proj.weight        U8 [I, H/2]: two codes a byte
 *   {block}experts.{E}.gate_proj.weight_scale  U8 [I, H/32], E8M0 bytes
 *
 * MXFP8 and others use U8 too: the config has to say that these are MXFP4.
 */
#include <inttypes.h>
#include <string.h>

#include "base/error.h"
#include "checkpoint/declared.h"
#include "checkpoint/experts.h"
#include "weights/weights.h"

enum { BLOCK = 32 };

static const char codes_part[] = "weight";
static const char scales_part[] = "weight_scale";
static const char u8[] = "U8";

static bool claims(const mm_tensor *tensor, mm_claim *claim) {
    mm_expert_name name;
    if (!mm_expert_name_parse(tensor->name, &name) || name.expert == MM_EXPERTS_FUSED)
        return false;
    *claim = mm_claim_of(&name);
    return strcmp(tensor->dtype->name, u8) == 0 &&
           (strcmp(name.part, codes_part) == 0 || strcmp(name.part, scales_part) == 0);
}

static megamoe_status check(const megamoe_checkpoint *checkpoint, const mm_layer *layer) {
    static const char format[] = "MXFP4";
    const mm_config *config = &checkpoint->config;
    const char *stored = json_string_value(mm_config_quantization(config, "store_dtype"));
    mm_declared declared;
    MM_TRY(mm_declared_read(checkpoint, layer, &declared));
    if (declared.algorithm)
        return mm_declared_fail(layer, declared.path, "the ModelOpt algorithm", declared.algorithm,
                                format);
    if (stored && strcmp(stored, "mxfp4") != 0)
        return mm_declared_fail(layer, config->path, "store_dtype", stored, format);
    if (stored || (declared.method && strcmp(declared.method, "mxfp4") == 0))
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_EUNSUPPORTED,
                   "%s: %s: the experts of layer %" PRId32
                   " have U8 weights with U8 scales, MXFP4 or MXFP8; to be read as MXFP4 they need "
                   "a config whose quantization_config has store_dtype \"mxfp4\" or quant_method "
                   "\"mxfp4\"",
                   layer->first->file->path, layer->first->name, layer->index);
}

static megamoe_status fill(const mm_experts *experts, int32_t expert, megamoe_projection projection,
                           mm_layer_tensors *tensors) {
    const int64_t rows = mm_rows(&tensors->desc, projection);
    const int64_t columns = mm_columns(&tensors->desc, projection);
    const size_t at = (size_t)expert * 3 + (size_t)projection;
    mm_matrix_source *source = &tensors->sources[at];
    MM_TRY(mm_experts_find(experts, expert, projection, codes_part, &source->codes));
    MM_TRY(mm_experts_find(experts, expert, projection, scales_part, &source->scales));
    MM_TRY(mm_tensor_expect(source->codes, u8, 2, (int64_t[]){rows, columns / 2}));
    MM_TRY(mm_tensor_expect(source->scales, u8, 2, (int64_t[]){rows, columns / BLOCK}));
    tensors->matrices[at] = (megamoe_matrix){.codes_stride = (size_t)columns / 2,
                                             .scales_stride = (size_t)columns / BLOCK};
    return mm_experts_bias(experts, expert, projection, tensors);
}

static megamoe_status weights(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                              mm_layer_tensors *tensors) {
    static const char *const parts[] = {codes_part, scales_part, NULL};
    mm_experts experts;
    MM_TRY(mm_experts_scan(checkpoint, layer, parts, &experts));
    const mm_tensor *gate;
    MM_TRY(mm_experts_find(&experts, 0, MEGAMOE_GATE, codes_part, &gate));
    MM_TRY(mm_tensor_expect_rank(gate, u8, 2));
    const mm_gate_shape shape = {.rows = gate->shape[0], .row_bytes = gate->shape[1]};
    MM_TRY(mm_experts_describe(&experts, gate, shape, MEGAMOE_FORMAT_MXFP4, &tensors->desc));
    MM_TRY(mm_layer_tensors_reserve(&experts, tensors));
    for (int32_t expert = 0; expert < tensors->desc.experts; expert++)
        for (megamoe_projection p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++)
            MM_TRY(fill(&experts, expert, p, tensors));
    return MEGAMOE_OK;
}

const mm_family mm_mimo = {.name = "mimo-mxfp4",
                           .claims = claims,
                           .check = check,
                           .weights = weights,
                           .router = mm_router_read};
