/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Experts as compressed-tensors (llm-compressor) stores them, one tensor for each projection.
 *
 *   {block}experts.{E}.gate_proj.weight_packed        U8 [I, H/2]: two codes a byte
 *   NVFP4:
 *   {block}experts.{E}.gate_proj.weight_scale         F8_E4M3 [I, H/16]
 *   {block}experts.{E}.gate_proj.weight_global_scale  F32, one value: a divisor
 *   MXFP4:
 *   {block}experts.{E}.gate_proj.weight_scale         U8 [I, H/32], E8M0 bytes
 *
 * Gate and up may have different global scales. Input scales are read over: activations are scaled
 * as they come.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "checkpoint/config_groups.h"
#include "checkpoint/declared.h"
#include "checkpoint/experts.h"
#include "weights/weights.h"

static const char codes_part[] = "weight_packed";
static const char scales_part[] = "weight_scale";
static const char global_part[] = "weight_global_scale";
static const char input_part[] = "input_global_scale";

typedef struct kind {
    mm_packed_format declared;
    megamoe_format format;
    const char *scales_dtype;
    int64_t block; /* values that share a scale */
    const char *parts[5];
} kind;

static const kind nvfp4 = {{"NVFP4", "nvfp4-pack-quantized", 16, false},
                           MEGAMOE_FORMAT_NVFP4,
                           "F8_E4M3",
                           16,
                           {codes_part, scales_part, global_part, input_part, NULL}};
static const kind mxfp4 = {{"MXFP4", "mxfp4-pack-quantized", 32, true},
                           MEGAMOE_FORMAT_MXFP4,
                           "U8",
                           32,
                           {codes_part, scales_part, NULL}};

static bool claims(const mm_tensor *tensor, mm_claim *claim) {
    mm_expert_name name;
    if (!mm_expert_name_parse(tensor->name, &name) || name.expert == MM_EXPERTS_FUSED)
        return false;
    *claim = mm_claim_of(&name);
    if (strcmp(tensor->dtype->name, "U8") == 0)
        return strcmp(name.part, codes_part) == 0 || strcmp(name.part, scales_part) == 0;
    if (strcmp(tensor->dtype->name, "F32") == 0)
        return strcmp(name.part, global_part) == 0 || strcmp(name.part, input_part) == 0;
    return false;
}

/* By the scales of the expert that the layer's first tensor belongs to; NULL if it has none. */
static const kind *kind_of(const megamoe_checkpoint *checkpoint, const mm_layer *layer) {
    mm_expert_name like;
    mm_expert_name_parse(layer->first->name, &like);
    for (megamoe_projection p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++) {
        char name[MM_NAME_TEXT];
        mm_expert_name_form(layer->first->name, &like, like.expert, p, scales_part, name);
        const mm_tensor *scales = mm_checkpoint_find(checkpoint, name);
        if (scales)
            return strcmp(scales->dtype->name, mxfp4.scales_dtype) == 0 ? &mxfp4 : &nvfp4;
    }
    return NULL;
}

/*
 * Before 0.14 the library wrote the bytes of MXFP4 scales with a bias of 125: all weights would
 * come out 4 times too small. The bytes alone do not show it.
 */
static megamoe_status check_bias(const megamoe_checkpoint *checkpoint, const mm_layer *layer) {
    const char *version = json_string_value(mm_config_quantization(&checkpoint->config, "version"));
    char *end;
    if (!version)
        return MEGAMOE_OK;
    const long major = strtol(version, &end, 10);
    if (end == version || *end != '.' || major != 0)
        return MEGAMOE_OK;
    const char *second = end + 1;
    const long minor = strtol(second, &end, 10);
    if (end == second || minor >= 14)
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_EUNSUPPORTED,
                   "%s: %s: its MXFP4 scales were written by compressed-tensors %s (%s), which "
                   "used a bias of 125 where E8M0 has 127, so weights would be 4 times too small; "
                   "quantize the model again with 0.14 or newer",
                   layer->first->file->path, layer->first->name, version, checkpoint->config.path);
}

static megamoe_status check(const megamoe_checkpoint *checkpoint, const mm_layer *layer) {
    const kind *is = kind_of(checkpoint, layer);
    if (!is) /* its weights will name what is missing */
        return MEGAMOE_OK;
    mm_declared declared;
    MM_TRY(mm_declared_read(checkpoint, layer, &declared));
    if (declared.method && strcmp(declared.method, "compressed-tensors") != 0)
        return mm_declared_fail(layer, checkpoint->config.path, "quant_method", declared.method,
                                "compressed-tensors");
    if (declared.expert_dtype && strcmp(declared.expert_dtype, "fp4") != 0)
        return mm_declared_fail(layer, checkpoint->config.path, "expert_dtype",
                                declared.expert_dtype, is->declared.name);
    MM_TRY(mm_config_groups_check(checkpoint, layer, &is->declared));
    return is == &mxfp4 ? check_bias(checkpoint, layer) : MEGAMOE_OK;
}

/* A global scale is stored as what to divide by; everything behind this multiplies. */
static megamoe_status read_global(const mm_tensor *tensor, float *multiplier) {
    float divisor;
    if (strcmp(tensor->dtype->name, "F32") != 0 || tensor->bytes != sizeof divisor) {
        char text[MM_SHAPE_TEXT];
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s: its %s shape %s must be F32 with one value",
                       tensor->file->path, tensor->name, tensor->dtype->name,
                       mm_shape_text(tensor->shape, tensor->rank, text));
    }
    MM_TRY(mm_tensor_read(tensor, 0, &divisor, sizeof divisor));
    *multiplier = 1.0f / divisor;
    if (divisor > 0.0f && isfinite(divisor) && isfinite(*multiplier))
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_EFORMAT,
                   "%s: %s: the global scale is %g; it and its reciprocal must be positive and "
                   "finite",
                   tensor->file->path, tensor->name, (double)divisor);
}

static megamoe_status fill(const mm_experts *experts, const kind *is, int32_t expert,
                           megamoe_projection projection, mm_layer_tensors *tensors) {
    const int64_t rows = mm_rows(&tensors->desc, projection);
    const int64_t columns = mm_columns(&tensors->desc, projection);
    const size_t at = (size_t)expert * 3 + (size_t)projection;
    mm_matrix_source *source = &tensors->sources[at];
    MM_TRY(mm_experts_find(experts, expert, projection, codes_part, &source->codes));
    MM_TRY(mm_experts_find(experts, expert, projection, scales_part, &source->scales));
    MM_TRY(mm_tensor_expect(source->codes, "U8", 2, (int64_t[]){rows, columns / 2}));
    MM_TRY(mm_tensor_expect(source->scales, is->scales_dtype, 2,
                            (int64_t[]){rows, columns / is->block}));
    megamoe_matrix *matrix = &tensors->matrices[at];
    *matrix = (megamoe_matrix){.codes_stride = (size_t)columns / 2,
                               .scales_stride = (size_t)(columns / is->block)};
    MM_TRY(mm_experts_bias(experts, expert, projection, tensors));
    if (is == &mxfp4)
        return MEGAMOE_OK;
    const mm_tensor *global;
    MM_TRY(mm_experts_find(experts, expert, projection, global_part, &global));
    return read_global(global, &matrix->global_scale);
}

static megamoe_status weights(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                              mm_layer_tensors *tensors) {
    const kind *is = kind_of(checkpoint, layer);
    if (!is)
        is = &nvfp4;
    mm_experts experts;
    MM_TRY(mm_experts_scan(checkpoint, layer, is->parts, &experts));
    const mm_tensor *gate;
    MM_TRY(mm_experts_find(&experts, 0, MEGAMOE_GATE, codes_part, &gate));
    MM_TRY(mm_tensor_expect_rank(gate, "U8", 2));
    const mm_gate_shape shape = {.rows = gate->shape[0], .row_bytes = gate->shape[1]};
    MM_TRY(mm_experts_describe(&experts, gate, shape, is->format, &tensors->desc));
    MM_TRY(mm_layer_tensors_reserve(&experts, tensors));
    for (int32_t expert = 0; expert < tensors->desc.experts; expert++)
        for (megamoe_projection p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++)
            MM_TRY(fill(&experts, is, expert, p, tensors));
    return MEGAMOE_OK;
}

const mm_family mm_compressed_tensors = {.name = "compressed-tensors",
                                         .claims = claims,
                                         .check = check,
                                         .weights = weights,
                                         .router = mm_router_read};
