/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NVFP4 experts as NVIDIA ModelOpt exports them.
 *
 *   {block}experts.{E}.gate_proj.weight          U8 [I, H/2]: two codes a byte
 *   {block}experts.{E}.gate_proj.weight_scale    F8_E4M3 [I, H/16]
 *   {block}experts.{E}.gate_proj.weight_scale_2  F32, one value: the global scale, a multiplier
 *
 * or fused over the experts, gate rows before up rows:
 *
 *   {block}experts.gate_up_proj                  U8 [E, 2I, H/2]
 *   {block}experts.gate_up_proj_weight_scale     F8_E4M3 [E, 2I, H/16]
 *   {block}experts.gate_up_proj_weight_scale_2   F32: one value, [E], or [E, 2] for gate and up
 *   {block}experts.down_proj...                  the same with [E, H, I/2]
 *
 * Gate and up may have different global scales. Input scales are read over: activations are scaled
 * as they come.
 */
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "checkpoint/declared.h"
#include "checkpoint/experts.h"
#include "weights/weights.h"

enum { BLOCK = 16 };

/* The names of a matrix's three tensors behind the expert or, fused, behind "experts.". */
typedef struct parts {
    const char *codes;
    const char *scales;
    const char *global;
} parts;

static const parts one_expert = {"weight", "weight_scale", "weight_scale_2"};
static const parts fused_gate_up = {"gate_up_proj", "gate_up_proj_weight_scale",
                                    "gate_up_proj_weight_scale_2"};
static const parts fused_down = {"down_proj", "down_proj_weight_scale", "down_proj_weight_scale_2"};

static const char *const known_parts[] = {"weight",
                                          "weight_scale",
                                          "weight_scale_2",
                                          "input_scale",
                                          "gate_up_proj",
                                          "gate_up_proj_weight_scale",
                                          "gate_up_proj_weight_scale_2",
                                          "gate_up_proj_input_scale",
                                          "down_proj",
                                          "down_proj_weight_scale",
                                          "down_proj_weight_scale_2",
                                          "down_proj_input_scale",
                                          NULL};

static bool is_one_of(const char *part, const char *a, const char *b, const char *c) {
    return strcmp(part, a) == 0 || strcmp(part, b) == 0 || strcmp(part, c) == 0;
}

/* By its scales: U8 codes occur in other formats too. */
static bool claims(const mm_tensor *tensor, mm_claim *claim) {
    mm_expert_name name;
    if (!mm_expert_name_parse(tensor->name, &name))
        return false;
    *claim = mm_claim_of(&name);
    if (strcmp(tensor->dtype->name, "F8_E4M3") == 0)
        return is_one_of(name.part, one_expert.scales, fused_gate_up.scales, fused_down.scales);
    if (strcmp(tensor->dtype->name, "F32") == 0)
        return is_one_of(name.part, one_expert.global, fused_gate_up.global, fused_down.global);
    return false;
}

static megamoe_status check(const megamoe_checkpoint *checkpoint, const mm_layer *layer) {
    static const char format[] = "NVFP4";
    mm_declared declared;
    MM_TRY(mm_declared_read(checkpoint, layer, &declared));
    if (declared.expert_dtype && strcmp(declared.expert_dtype, "fp8") == 0)
        return mm_declared_fail(layer, checkpoint->config.path, "expert_dtype",
                                declared.expert_dtype, format);
    if (declared.algorithm && !strstr(declared.algorithm, "NVFP4"))
        return mm_declared_fail(layer, declared.path, "the ModelOpt algorithm", declared.algorithm,
                                format);
    if (declared.group_size && declared.group_size != BLOCK)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s: group_size of %s is %d, but NVFP4 has one scale for %d values",
                       layer->first->file->path, layer->first->name, declared.path,
                       declared.group_size, BLOCK);
    /* DeepSeek-V4 keeps the fp8 of its dense parts there. */
    if (declared.method && strncmp(declared.method, "modelopt", 8) != 0 &&
        strcmp(declared.method, "fp8") != 0)
        return mm_declared_fail(layer, checkpoint->config.path, "quant_method", declared.method,
                                format);
    return MEGAMOE_OK;
}

static megamoe_status read_global(const mm_tensor *tensor, uint64_t index, float *value) {
    MM_TRY(mm_tensor_read(tensor, index * sizeof *value, value, sizeof *value));
    if (*value > 0.0f && !isinf(*value))
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_EFORMAT,
                   "%s: %s: global scale %llu is %g; it must be positive and finite",
                   tensor->file->path, tensor->name, (unsigned long long)index, (double)*value);
}

static megamoe_status shape_fail(const mm_tensor *tensor, const char *must) {
    char text[MM_SHAPE_TEXT];
    return mm_fail(MEGAMOE_EFORMAT, "%s: %s: its %s shape %s must be F32 %s", tensor->file->path,
                   tensor->name, tensor->dtype->name,
                   mm_shape_text(tensor->shape, tensor->rank, text), must);
}

static megamoe_status fill_one(const mm_experts *experts, int32_t expert,
                               megamoe_projection projection, mm_layer_tensors *tensors) {
    const int64_t rows = mm_rows(&tensors->desc, projection);
    const int64_t columns = mm_columns(&tensors->desc, projection);
    const size_t at = (size_t)expert * 3 + (size_t)projection;
    mm_matrix_source *source = &tensors->sources[at];
    const mm_tensor *global;
    MM_TRY(mm_experts_find(experts, expert, projection, one_expert.codes, &source->codes));
    MM_TRY(mm_experts_find(experts, expert, projection, one_expert.scales, &source->scales));
    MM_TRY(mm_experts_find(experts, expert, projection, one_expert.global, &global));
    MM_TRY(mm_tensor_expect(source->codes, "U8", 2, (int64_t[]){rows, columns / 2}));
    MM_TRY(mm_tensor_expect(source->scales, "F8_E4M3", 2, (int64_t[]){rows, columns / BLOCK}));
    megamoe_matrix *matrix = &tensors->matrices[at];
    if (strcmp(global->dtype->name, "F32") != 0 || global->bytes != sizeof matrix->global_scale)
        return shape_fail(global, "with one value");
    *matrix = (megamoe_matrix){.codes_stride = (size_t)columns / 2,
                               .scales_stride = (size_t)columns / BLOCK};
    MM_TRY(mm_experts_bias(experts, expert, projection, tensors));
    return read_global(global, 0, &matrix->global_scale);
}

/* Where the global scale of an expert's half of a fused tensor stands. */
static megamoe_status global_index(const mm_tensor *global, int32_t experts, int32_t expert,
                                   int32_t halves, int32_t half, uint64_t *index) {
    const uint64_t n = global->bytes / sizeof(float);
    const bool by_expert = global->rank > 0 && global->shape[0] == experts;
    *index = 0;
    if (strcmp(global->dtype->name, "F32") == 0) {
        if (n == 1)
            return MEGAMOE_OK;
        *index = (uint64_t)expert;
        if (by_expert && n == (uint64_t)experts)
            return MEGAMOE_OK;
        *index = (uint64_t)expert * 2 + (uint64_t)half;
        if (by_expert && halves == 2 && n == 2 * (uint64_t)experts)
            return MEGAMOE_OK;
    }
    return shape_fail(global, halves == 2 ? "with one value, one for each expert or two for each"
                                          : "with one value or one for each expert");
}

/* The matrices that lie in one fused tensor: `halves` of them for each expert. */
static megamoe_status fill_fused(const mm_experts *experts, const parts *names,
                                 megamoe_projection projection, int32_t halves,
                                 mm_layer_tensors *tensors) {
    const int64_t rows = mm_rows(&tensors->desc, projection);
    const int64_t columns = mm_columns(&tensors->desc, projection);
    const int64_t count = tensors->desc.experts;
    const mm_tensor *codes, *scales, *global;
    MM_TRY(mm_experts_find(experts, 0, projection, names->codes, &codes));
    MM_TRY(mm_experts_find(experts, 0, projection, names->scales, &scales));
    MM_TRY(mm_experts_find(experts, 0, projection, names->global, &global));
    MM_TRY(mm_tensor_expect(codes, "U8", 3, (int64_t[]){count, halves * rows, columns / 2}));
    MM_TRY(
        mm_tensor_expect(scales, "F8_E4M3", 3, (int64_t[]){count, halves * rows, columns / BLOCK}));
    for (int32_t expert = 0; expert < tensors->desc.experts; expert++)
        for (int32_t half = 0; half < halves; half++) {
            const size_t at = (size_t)expert * 3 + (size_t)projection + (size_t)half;
            const size_t row = ((size_t)expert * (size_t)halves + (size_t)half) * (size_t)rows;
            megamoe_matrix *matrix = &tensors->matrices[at];
            *matrix = (megamoe_matrix){.codes_stride = (size_t)columns / 2,
                                       .scales_stride = (size_t)columns / BLOCK};
            tensors->sources[at] = (mm_matrix_source){.codes = codes,
                                                      .codes_at = row * matrix->codes_stride,
                                                      .scales = scales,
                                                      .scales_at = row * matrix->scales_stride};
            uint64_t index;
            MM_TRY(global_index(global, tensors->desc.experts, expert, halves, half, &index));
            MM_TRY(read_global(global, index, &matrix->global_scale));
        }
    return MEGAMOE_OK;
}

static megamoe_status fused_weights(const mm_experts *experts, mm_layer_tensors *tensors) {
    const mm_tensor *gate_up;
    if (experts->has_bias)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: %s: fused experts of gpt_oss; whether their gate and up rows alternate "
                       "is not known",
                       experts->layer->first->file->path, experts->layer->first->name);
    MM_TRY(mm_experts_find(experts, 0, MEGAMOE_GATE, fused_gate_up.codes, &gate_up));
    MM_TRY(mm_tensor_expect_rank(gate_up, "U8", 3));
    const mm_gate_shape shape = {
        .fused = gate_up->shape[0], .rows = gate_up->shape[1] / 2, .row_bytes = gate_up->shape[2]};
    MM_TRY(mm_experts_describe(experts, gate_up, shape, MEGAMOE_FORMAT_NVFP4, &tensors->desc));
    MM_TRY(mm_layer_tensors_reserve(experts, tensors));
    MM_TRY(fill_fused(experts, &fused_gate_up, MEGAMOE_GATE, 2, tensors));
    return fill_fused(experts, &fused_down, MEGAMOE_DOWN, 1, tensors);
}

static megamoe_status weights(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                              mm_layer_tensors *tensors) {
    mm_experts experts;
    MM_TRY(mm_experts_scan(checkpoint, layer, known_parts, &experts));
    if (experts.like.expert == MM_EXPERTS_FUSED)
        return fused_weights(&experts, tensors);
    const mm_tensor *gate;
    MM_TRY(mm_experts_find(&experts, 0, MEGAMOE_GATE, one_expert.codes, &gate));
    MM_TRY(mm_tensor_expect_rank(gate, "U8", 2));
    const mm_gate_shape shape = {.rows = gate->shape[0], .row_bytes = gate->shape[1]};
    MM_TRY(mm_experts_describe(&experts, gate, shape, MEGAMOE_FORMAT_NVFP4, &tensors->desc));
    MM_TRY(mm_layer_tensors_reserve(&experts, tensors));
    for (int32_t expert = 0; expert < tensors->desc.experts; expert++)
        for (megamoe_projection p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++)
            MM_TRY(fill_one(&experts, expert, p, tensors));
    return MEGAMOE_OK;
}

const mm_family mm_modelopt = {.name = "modelopt-nvfp4",
                               .claims = claims,
                               .check = check,
                               .weights = weights,
                               .router = mm_router_read};
