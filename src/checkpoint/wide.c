/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Experts that are wider than 4 bits, one tensor for each projection:
 *
 *   FP8   {block}experts.{E}.gate_proj.weight            F8_E4M3 [I, H]
 *         {block}experts.{E}.gate_proj.weight_scale_inv  F32 or F8_E8M0 [I / rows, H / columns],
 *                                                        rounded up: a multiplier for each block of
 *                                                        weight_block_size; also named scale
 *   BF16  {block}experts.{E}.gate_proj.weight            BF16 [I, H]
 *
 * The message that refuses them names the option that quantizes them.
 */
#include "checkpoint/wide.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "checkpoint/declared.h"
#include "checkpoint/experts.h"
#include "num/e4m3.h"
#include "num/e8m0.h"
#include "weights/weights.h"

static const char values_part[] = "weight";
static const char *const scales_parts[] = {"weight_scale_inv", "scale"};
enum { SCALES_PARTS = sizeof scales_parts / sizeof *scales_parts };

static bool is_block_scale(const char *part) {
    return strcmp(part, scales_parts[0]) == 0 || strcmp(part, scales_parts[1]) == 0;
}

/* Also scales that are not read, so that the layer is refused as what it is. */
static bool claims_fp8(const mm_tensor *tensor, mm_claim *claim) {
    mm_expert_name name;
    if (!mm_expert_name_parse(tensor->name, &name) || name.expert == MM_EXPERTS_FUSED)
        return false;
    *claim = mm_claim_of(&name);
    const char *dtype = tensor->dtype->name;
    if (strcmp(dtype, "F8_E4M3") == 0)
        return strcmp(name.part, values_part) == 0;
    if (strcmp(dtype, "U8") == 0 || strcmp(dtype, "F8_E8M0") == 0)
        return is_block_scale(name.part);
    return strcmp(dtype, "F32") == 0 &&
           (is_block_scale(name.part) || strcmp(name.part, "weight_scale") == 0);
}

static bool claims_bf16(const mm_tensor *tensor, mm_claim *claim) {
    mm_expert_name name;
    if (!mm_expert_name_parse(tensor->name, &name) || name.expert == MM_EXPERTS_FUSED)
        return false;
    *claim = mm_claim_of(&name);
    return strcmp(tensor->dtype->name, "BF16") == 0 && strcmp(name.part, values_part) == 0;
}

static megamoe_status weights(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                              mm_layer_tensors *tensors) {
    (void)checkpoint;
    (void)tensors;
    return mm_fail(MEGAMOE_EUNSUPPORTED,
                   "%s: %s: the experts of layer %" PRId32
                   " are %s, which is not run; they have to be rounded to 4 bits by name: megamoe "
                   "prepare --quantize mxfp4 or nvfp4 (megamoe_checkpoint_quantize)",
                   layer->first->file->path, layer->first->name, layer->index,
                   layer->family == &mm_fp8 ? "FP8" : "BF16");
}

/* The geometry, and room for all matrices. */
static megamoe_status describe(const mm_experts *experts, const char *dtype, megamoe_format format,
                               mm_wide_layer *wide) {
    mm_layer_tensors *tensors = &wide->tensors;
    const mm_tensor *gate;
    MM_TRY(mm_experts_find(experts, 0, MEGAMOE_GATE, values_part, &gate));
    MM_TRY(mm_tensor_expect_rank(gate, dtype, 2));
    if (gate->shape[1] % 2 != 0) {
        char text[MM_SHAPE_TEXT];
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s: its shape is %s; columns must be even",
                       gate->file->path, gate->name, mm_shape_text(gate->shape, gate->rank, text));
    }
    const mm_gate_shape shape = {.rows = gate->shape[0], .row_bytes = gate->shape[1] / 2};
    MM_TRY(mm_experts_describe(experts, gate, shape, format, &tensors->desc));
    return mm_layer_tensors_reserve(experts, tensors);
}

/* Values and bias of a matrix. */
static megamoe_status fill(const mm_experts *experts, const char *dtype, int32_t expert,
                           megamoe_projection projection, mm_layer_tensors *tensors) {
    const int64_t rows = mm_rows(&tensors->desc, projection);
    const int64_t columns = mm_columns(&tensors->desc, projection);
    const size_t at = (size_t)expert * 3 + (size_t)projection;
    mm_matrix_source *source = &tensors->sources[at];
    MM_TRY(mm_experts_find(experts, expert, projection, values_part, &source->codes));
    MM_TRY(mm_tensor_expect(source->codes, dtype, 2, (int64_t[]){rows, columns}));
    return mm_experts_bias(experts, expert, projection, tensors);
}

static megamoe_status wide_bf16(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                                megamoe_format format, mm_wide_layer *wide) {
    static const char *const parts[] = {values_part, NULL};
    static const char dtype[] = "BF16";
    mm_experts experts;
    MM_TRY(mm_experts_scan(checkpoint, layer, parts, &experts));
    MM_TRY(describe(&experts, dtype, format, wide));
    wide->format = "bf16";
    for (int32_t expert = 0; expert < wide->tensors.desc.experts; expert++)
        for (megamoe_projection p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++)
            MM_TRY(fill(&experts, dtype, expert, p, &wide->tensors));
    return MEGAMOE_OK;
}

static megamoe_status read_block_size(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                                      mm_wide_layer *wide) {
    const json_t *size = mm_config_quantization(&checkpoint->config, "weight_block_size");
    if (!size)
        return mm_fail(MEGAMOE_ENOTFOUND,
                       "%s: %s: FP8 experts; how many of them share a scale must be said by "
                       "weight_block_size in quantization_config of %s",
                       layer->first->file->path, layer->first->name,
                       checkpoint->config.path ? checkpoint->config.path
                                               : "a config.json, which is not there");
    const json_int_t rows = json_integer_value(json_array_get(size, 0));
    const json_int_t columns = json_integer_value(json_array_get(size, 1));
    if (json_array_size(size) != 2 || rows < 1 || columns < 1 || rows > INT32_MAX ||
        columns > INT32_MAX)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: weight_block_size must be two positive integers, such as [128, 128]",
                       checkpoint->config.path);
    wide->block_rows = (int32_t)rows;
    wide->block_columns = (int32_t)columns;
    return MEGAMOE_OK;
}

/* Which of the two names the scales have here; a layer has one of them. */
static megamoe_status find_scales_part(const mm_experts *experts, const char **part) {
    const mm_layer *layer = experts->layer;
    for (int i = 0; i < SCALES_PARTS; i++) {
        char name[MM_NAME_TEXT];
        mm_expert_name_form(layer->first->name, &experts->like, 0, MEGAMOE_GATE, scales_parts[i],
                            name);
        *part = scales_parts[i];
        const mm_tensor *scales = mm_checkpoint_find(experts->checkpoint, name);
        if (scales && strcmp(scales->dtype->name, "U8") == 0)
            return mm_fail(MEGAMOE_EUNSUPPORTED,
                           "%s: %s: FP8 with U8 scales (MXFP8) is not read; F32 and F8_E8M0 are",
                           scales->file->path, name);
        if (scales)
            return MEGAMOE_OK;
    }
    return mm_fail(
        MEGAMOE_EUNSUPPORTED,
        "%s: %s: FP8 experts without a scale for each block (weight_scale_inv or scale); "
        "those with one for a tensor or a row are not read",
        layer->first->file->path, layer->first->name);
}

/* Bytes of a scale: F32, or else F8_E8M0. */
static size_t scale_bytes(const mm_tensor *scales) {
    return scales->dtype->bits / 8;
}

/* The at'th scale of these bytes, exact. */
static double scale_at(const mm_tensor *scales, const uint8_t *bytes, int64_t at) {
    if (scale_bytes(scales) == 1)
        return (double)mm_e8m0_to_f32(bytes[at]);
    float scale;
    memcpy(&scale, bytes + (size_t)at * sizeof scale, sizeof scale);
    return (double)scale;
}

static megamoe_status check_scales(const mm_tensor *scales) {
    uint8_t bytes[4096];
    const int64_t n = scales->shape[0] * scales->shape[1];
    const int64_t most = (int64_t)(sizeof bytes / scale_bytes(scales));
    for (int64_t first = 0; first < n; first += most) {
        const int64_t read = mm_min(n - first, most);
        MM_TRY(mm_tensor_read(scales, (uint64_t)first * scale_bytes(scales), bytes,
                              (size_t)read * scale_bytes(scales)));
        for (int64_t i = 0; i < read; i++) {
            const double scale = scale_at(scales, bytes, i);
            if (!(scale >= 0.0) || isinf(scale))
                return mm_fail(MEGAMOE_EFORMAT,
                               "%s: %s: scale [%" PRId64 ", %" PRId64
                               "] is %g; it must be finite and not negative",
                               scales->file->path, scales->name, (first + i) / scales->shape[1],
                               (first + i) % scales->shape[1], scale);
        }
    }
    return MEGAMOE_OK;
}

static megamoe_status wide_fp8(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                               megamoe_format format, mm_wide_layer *wide) {
    static const char *const parts[] = {values_part, "weight_scale_inv", "scale", NULL};
    static const char dtype[] = "F8_E4M3";
    mm_experts experts = {.checkpoint = checkpoint, .layer = layer};
    const char *scales_part;
    mm_expert_name_parse(layer->first->name, &experts.like);
    MM_TRY(find_scales_part(&experts, &scales_part));
    MM_TRY(mm_experts_scan(checkpoint, layer, parts, &experts));
    MM_TRY(read_block_size(checkpoint, layer, wide));
    MM_TRY(describe(&experts, dtype, format, wide));
    wide->format = "fp8";
    mm_layer_tensors *tensors = &wide->tensors;
    for (int32_t expert = 0; expert < tensors->desc.experts; expert++)
        for (megamoe_projection p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++) {
            MM_TRY(fill(&experts, dtype, expert, p, tensors));
            const mm_tensor **scales = &tensors->sources[(size_t)expert * 3 + (size_t)p].scales;
            MM_TRY(mm_experts_find(&experts, expert, p, scales_part, scales));
            const bool f32 = strcmp((*scales)->dtype->name, "F32") == 0;
            const int64_t shape[] = {
                mm_ceil_div(mm_rows(&tensors->desc, p), wide->block_rows),
                mm_ceil_div(mm_columns(&tensors->desc, p), wide->block_columns)};
            MM_TRY(mm_tensor_expect(*scales, f32 ? "F32" : "F8_E8M0", 2, shape));
            MM_TRY(check_scales(*scales));
        }
    return MEGAMOE_OK;
}

megamoe_status mm_wide_row(const mm_wide_layer *wide, const mm_matrix_source *matrix, int64_t row,
                           double *values) {
    const mm_tensor *tensor = matrix->codes, *scales = matrix->scales;
    const int64_t columns = tensor->shape[1];
    uint8_t *bytes = (uint8_t *)(values + columns); /* as they are stored, behind the values */
    const size_t row_bytes = (size_t)columns * (scales ? 1 : 2);
    MM_TRY(mm_tensor_read(tensor, (uint64_t)row * row_bytes, bytes, row_bytes));
    if (!scales) {
        for (int64_t k = 0; k < columns; k++)
            values[k] = (double)mm_bf16_to_f32((uint16_t)(bytes[2 * k] | bytes[2 * k + 1] << 8));
        return MEGAMOE_OK;
    }
    uint8_t *of_blocks = bytes + row_bytes;
    const size_t blocks_bytes = (size_t)scales->shape[1] * scale_bytes(scales);
    MM_TRY(mm_tensor_read(scales, (uint64_t)(row / wide->block_rows) * blocks_bytes, of_blocks,
                          blocks_bytes));
    for (int64_t first = 0; first < columns; first += wide->block_columns) {
        const int64_t end = mm_min(first + wide->block_columns, columns);
        const double scale = scale_at(scales, of_blocks, first / wide->block_columns);
        for (int64_t k = first; k < end; k++)
            values[k] = (double)mm_e4m3_to_f32(bytes[k]) * scale;
    }
    return MEGAMOE_OK;
}

const mm_family mm_fp8 = {.name = "fp8",
                          .claims = claims_fp8,
                          .check = mm_declared_not_fp4,
                          .weights = weights,
                          .wide = wide_fp8,
                          .router = mm_router_read};
const mm_family mm_bf16 = {.name = "bf16",
                           .claims = claims_bf16,
                           .check = mm_declared_not_fp4,
                           .weights = weights,
                           .wide = wide_bf16,
                           .router = mm_router_read};
