/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/weights.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "num/bf16.h"
#include "weights/cuda_read.h"
#include "weights/hold.h"
#include "weights/object.h"
#include "weights/prepared.h"
#include "weights/tile.h"

const char *megamoe_format_name(megamoe_format format) {
    switch (format) {
    case MEGAMOE_FORMAT_MXFP4:
        return "mxfp4";
    case MEGAMOE_FORMAT_NVFP4:
        return "nvfp4";
    }
    return "unknown";
}

megamoe_weights *mm_weights_new(void) {
    return mm_alloc(sizeof(megamoe_weights));
}

void megamoe_weights_close(megamoe_weights *weights) {
    if (!weights)
        return;
    if (weights->owner.release)
        weights->owner.release(weights->owner.owner);
    megamoe_router_close(weights->router);
    mm_holds_close(weights);
    free(weights->hashes);
    mm_file_close(&weights->file);
    free(weights->path);
    free(weights->matrices);
    free(weights);
}

megamoe_status mm_matrix_fail(const megamoe_weights *weights, megamoe_status status, int32_t expert,
                              megamoe_projection projection, bool scales, const char *format, ...) {
    static const char *const projections[MM_PROJECTIONS] = {"gate", "up", "down"};
    char name[512];
    char text[512];
    if (weights->owner.name)
        weights->owner.name(weights->owner.owner, expert, projection, scales, name, sizeof name);
    else
        snprintf(name, sizeof name, "expert %d %s%s", expert, projections[projection],
                 scales ? " scales" : "");
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return mm_fail(status, "%s: %s", name, text);
}

megamoe_status mm_desc_check(const megamoe_layer_desc *desc, megamoe_status status,
                             const char *where) {
    if (desc->format != MEGAMOE_FORMAT_MXFP4 && desc->format != MEGAMOE_FORMAT_NVFP4)
        return mm_fail(status, "%s: format %d; expected %d (MXFP4) or %d (NVFP4)", where,
                       (int)desc->format, MEGAMOE_FORMAT_MXFP4, MEGAMOE_FORMAT_NVFP4);
    const int32_t group = mm_group_size(desc->format);
    const struct {
        const char *name;
        int32_t value;
    } dimensions[] = {{"hidden", desc->hidden}, {"intermediate", desc->intermediate}};
    for (size_t i = 0; i < sizeof dimensions / sizeof *dimensions; i++) {
        const int32_t value = dimensions[i].value;
        if (value < group || value > MM_MAX_DIMENSION || value % group)
            return mm_fail(status, "%s: %s %d; %s needs a multiple of %d, at most %d", where,
                           dimensions[i].name, value, megamoe_format_name(desc->format), group,
                           MM_MAX_DIMENSION);
    }
    if (desc->experts < 1 || desc->experts > MM_MAX_EXPERTS)
        return mm_fail(status, "%s: %d experts; expected 1..%d", where, desc->experts,
                       MM_MAX_EXPERTS);
    if (desc->topk < 0 || desc->topk > desc->experts)
        return mm_fail(status, "%s: top-k %d of %d experts", where, desc->topk, desc->experts);
    const megamoe_activation *activation = &desc->activation;
    if (!isfinite(activation->alpha) || !isfinite(activation->offset) || !(activation->limit >= 0))
        return mm_fail(status,
                       "%s: activation alpha %g, offset %g, limit %g; expected finite numbers and "
                       "a limit of 0 or more",
                       where, (double)activation->alpha, (double)activation->offset,
                       (double)activation->limit);
    return MEGAMOE_OK;
}

/* `rows` rows of `bytes`, `stride` apart, can be addressed. */
static bool strided_rows_fit(size_t rows, size_t bytes, size_t stride) {
    size_t last;
    return stride >= bytes && mm_mul_size(rows, stride, &last) && last <= PTRDIFF_MAX;
}

static megamoe_status check_matrix(const megamoe_weights *weights, int32_t expert,
                                   megamoe_projection projection) {
    const megamoe_layer_desc *desc = &weights->desc;
    const megamoe_matrix *matrix = mm_matrix_of(weights, expert, projection);
    const size_t rows = (size_t)mm_rows(desc, projection);
    const size_t codes = (size_t)mm_columns(desc, projection) / 2;
    const size_t scales = 2 * codes / (size_t)mm_group_size(desc->format);
    const bool held = weights->owner.read != NULL; /* while it is, there are pointers */
    if (!held && (!matrix->codes || !matrix->scales))
        return mm_matrix_fail(weights, MEGAMOE_EINVAL, expert, projection, !matrix->scales,
                              "the pointer is NULL");
    if (!strided_rows_fit(rows, codes, matrix->codes_stride))
        return mm_matrix_fail(weights, MEGAMOE_EINVAL, expert, projection, false,
                              "codes_stride %zu; a row has %zu bytes", matrix->codes_stride, codes);
    if (!strided_rows_fit(rows, scales, matrix->scales_stride))
        return mm_matrix_fail(weights, MEGAMOE_EINVAL, expert, projection, true,
                              "scales_stride %zu; a row has %zu bytes", matrix->scales_stride,
                              scales);
    if (!held && desc->has_bias != (matrix->bias != NULL))
        return mm_matrix_fail(weights, MEGAMOE_EINVAL, expert, projection, false,
                              desc->has_bias ? "no bias, but the layer has biases"
                                             : "a bias, but has_bias is false");
    if (!desc->has_bias)
        return MEGAMOE_OK;
    if (matrix->bias_dtype != MEGAMOE_DTYPE_BF16 && matrix->bias_dtype != MEGAMOE_DTYPE_F32)
        return mm_matrix_fail(weights, MEGAMOE_EINVAL, expert, projection, false,
                              "bias is %s; expected BF16 or F32",
                              megamoe_dtype_name(matrix->bias_dtype));
    const size_t element = matrix->bias_dtype == MEGAMOE_DTYPE_BF16 ? 2 : 4;
    if (!strided_rows_fit(rows, element, matrix->bias_stride))
        return mm_matrix_fail(weights, MEGAMOE_EINVAL, expert, projection, false,
                              "bias_stride %zu; an element has %zu bytes", matrix->bias_stride,
                              element);
    return MEGAMOE_OK;
}

/* Takes the matrices; `weights` has its owner already. */
static megamoe_status fill(megamoe_weights *weights, const megamoe_layer_desc *desc,
                           const megamoe_matrix *matrices) {
    if (!desc || !matrices)
        return mm_fail(MEGAMOE_EINVAL, "weights: desc or matrices is NULL");
    MM_TRY(mm_take_struct(&weights->desc, sizeof weights->desc, desc, "megamoe_layer_desc"));
    desc = &weights->desc;
    MM_TRY(mm_desc_check(desc, MEGAMOE_EINVAL, "megamoe_layer_desc"));
    const size_t n = (size_t)desc->experts * MM_PROJECTIONS;
    weights->matrices = mm_alloc(n * sizeof *matrices);
    if (!weights->matrices)
        return mm_fail(MEGAMOE_ENOMEM, "weights of %d experts: out of memory", desc->experts);
    memcpy(weights->matrices, matrices, n * sizeof *matrices);
    for (size_t i = 0; i < n; i++) {
        if (desc->format == MEGAMOE_FORMAT_MXFP4)
            weights->matrices[i].global_scale = 1.0f;
        MM_TRY(check_matrix(weights, (int32_t)(i / MM_PROJECTIONS),
                            (megamoe_projection)(i % MM_PROJECTIONS)));
    }
    if (weights->owner.read)
        MM_TRY(mm_holds_open(weights));
    return mm_scales_check(weights);
}

megamoe_status mm_weights_create(const megamoe_layer_desc *desc, const megamoe_matrix *matrices,
                                 mm_matrix_owner owner, megamoe_weights **weights) {
    *weights = NULL;
    megamoe_weights *w = mm_weights_new();
    if (!w) {
        if (owner.release)
            owner.release(owner.owner);
        return mm_fail(MEGAMOE_ENOMEM, "weights: out of memory");
    }
    w->owner = owner;
    const megamoe_status status = fill(w, desc, matrices);
    if (status == MEGAMOE_OK)
        *weights = w;
    else
        megamoe_weights_close(w);
    return status;
}

megamoe_status megamoe_weights_from_tensors(const megamoe_layer_desc *desc,
                                            const megamoe_matrix *matrices,
                                            megamoe_weights **weights) {
    if (!weights)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_weights_from_tensors: weights is NULL");
    return mm_weights_create(desc, matrices, (mm_matrix_owner){0}, weights);
}

megamoe_status megamoe_weights_describe(const megamoe_weights *weights, megamoe_layer_desc *desc) {
    if (!weights || !desc)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_weights_describe: an argument is NULL");
    return mm_give_struct(desc, &weights->desc, sizeof weights->desc, "megamoe_layer_desc");
}

bool megamoe_weights_prepared(const megamoe_weights *weights) {
    return weights && !weights->matrices;
}

const char *megamoe_weights_device(const megamoe_weights *weights) {
    return megamoe_weights_prepared(weights) ? weights->kind->device : NULL;
}

const megamoe_router *megamoe_weights_router(const megamoe_weights *weights) {
    return weights ? weights->router : NULL;
}

megamoe_status megamoe_weights_matrix(const megamoe_weights *weights, int32_t expert,
                                      megamoe_projection projection, megamoe_matrix *matrix) {
    if (!weights || !matrix)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_weights_matrix: an argument is NULL");
    MM_TRY(mm_matrix_check_index(weights, expert, projection));
    if (!weights->matrices)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: prepared weights have no matrices in checkpoint form", weights->path);
    MM_TRY(mm_weights_keep(weights, expert));
    *matrix = *mm_matrix_of(weights, expert, projection);
    return MEGAMOE_OK;
}

megamoe_status mm_matrix_check_index(const megamoe_weights *weights, int32_t expert,
                                     megamoe_projection projection) {
    if (expert < 0 || expert >= weights->desc.experts || (int)projection < MEGAMOE_GATE ||
        projection > MEGAMOE_DOWN)
        return mm_fail(MEGAMOE_EINVAL, "expert %d, projection %d; expected 0..%d and 0..2", expert,
                       (int)projection, weights->desc.experts - 1);
    return MEGAMOE_OK;
}

megamoe_nvfp4_mode mm_weights_nvfp4_mode(const megamoe_weights *weights,
                                         megamoe_nvfp4_mode wanted) {
    return weights->matrices ? wanted : weights->nvfp4;
}

megamoe_nvfp4_mode megamoe_weights_nvfp4(const megamoe_weights *weights) {
    return mm_weights_nvfp4_mode(weights, MEGAMOE_NVFP4_EXACT);
}

const uint8_t *mm_weights_blob(const megamoe_weights *weights, int32_t expert) {
    return weights->matrices ? NULL : mm_held_bytes(weights, expert);
}

const mm_cuda_layout *mm_weights_cuda_layout(const megamoe_weights *weights) {
    return !weights->matrices && weights->kind->cuda ? &weights->cuda_layout : NULL;
}

float mm_weights_global(const megamoe_weights *weights, int32_t expert,
                        megamoe_projection projection) {
    if (weights->matrices)
        return mm_matrix_of(weights, expert, projection)->global_scale;
    const size_t globals =
        weights->kind->cuda ? weights->cuda_layout.globals_offset : weights->layout.globals_offset;
    float global[MM_PROJECTIONS];
    memcpy(global, mm_weights_blob(weights, expert) + globals, sizeof global);
    return global[projection];
}

/* With biases, of prepared weights. */
static float prepared_bias(const megamoe_weights *weights, int32_t expert,
                           megamoe_projection projection, int32_t row) {
    const uint8_t *blob = mm_weights_blob(weights, expert);
    if (weights->kind->cuda)
        return mm_cuda_read_bias(&weights->cuda_layout, blob, projection, row);
    const mm_cpu_expert e = mm_cpu_expert_of(&weights->layout, blob);
    const float *bias = projection == MEGAMOE_DOWN ? e.fc2_bias : e.fc1_bias;
    return bias[mm_tile_row_index(mm_tile_row_of(projection, row))];
}

float mm_weights_bias(const megamoe_weights *weights, int32_t expert, megamoe_projection projection,
                      int32_t row) {
    if (!weights->desc.has_bias)
        return 0.0f;
    if (!weights->matrices)
        return prepared_bias(weights, expert, projection, row);
    const megamoe_matrix *matrix = mm_matrix_of(weights, expert, projection);
    const uint8_t *element = (const uint8_t *)matrix->bias + (size_t)row * matrix->bias_stride;
    if (matrix->bias_dtype == MEGAMOE_DTYPE_BF16) {
        uint16_t bits;
        memcpy(&bits, element, sizeof bits);
        return mm_bf16_to_f32(bits);
    }
    float value;
    memcpy(&value, element, sizeof value);
    return value;
}
