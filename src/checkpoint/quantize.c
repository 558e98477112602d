/* SPDX-License-Identifier: Apache-2.0 */
/* Wide experts rounded to 4 bits, one matrix for each thread at a time. */
#include "weights/quantize.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/pool.h"
#include "checkpoint/wide.h"
#include "weights/rows.h"
#include "weights/weights.h"

typedef struct quantization {
    mm_wide_layer *wide;
    megamoe_progress progress;
    uint8_t *memory; /* all that the matrices point to */
    size_t memory_bytes;
    double *rows; /* [threads][2][row_length] */
    size_t row_length;
    atomic_int next, done;
    mm_carried failure; /* of a matrix */
} quantization;

static int32_t matrices_of(const quantization *q) {
    return q->wide->tensors.desc.experts * 3;
}

/* Reads a row, and the largest magnitude in it. */
static megamoe_status read_row(const quantization *q, int32_t index, int32_t i, double *row,
                               double *largest) {
    const mm_layer_tensors *tensors = &q->wide->tensors;
    const mm_matrix_source *source = &tensors->sources[index];
    MM_TRY(mm_wide_row(q->wide, source, i, row));
    *largest = mm_largest(row, mm_columns(&tensors->desc, (megamoe_projection)(index % 3)));
    if (isfinite(*largest))
        return MEGAMOE_OK;
    int32_t k = 0;
    while (isfinite(row[k]))
        k++;
    return mm_fail(MEGAMOE_EFORMAT, "%s: %s: row %d, column %d is %g; weights must be finite",
                   source->codes->file->path, source->codes->name, i, k, row[k]);
}

static megamoe_status read_bias(const quantization *q, int32_t index) {
    const mm_layer_tensors *tensors = &q->wide->tensors;
    const mm_matrix_source *source = &tensors->sources[index];
    if (!tensors->desc.has_bias)
        return MEGAMOE_OK;
    /* What the matrices point to is q->memory. */
    return mm_tensor_read(source->bias, source->bias_at, (void *)tensors->matrices[index].bias,
                          source->bias->bytes);
}

static megamoe_status quantize_matrix(const quantization *q, int32_t index, double *row) {
    mm_layer_tensors *tensors = &q->wide->tensors;
    megamoe_matrix *matrix = &tensors->matrices[index];
    const megamoe_format format = tensors->desc.format;
    const megamoe_projection projection = (megamoe_projection)(index % 3);
    const int32_t rows = mm_rows(&tensors->desc, projection);
    double largest = 0.0, of_row;
    for (int32_t i = 0; i < rows && format == MEGAMOE_FORMAT_NVFP4; i++) {
        MM_TRY(read_row(q, index, i, row, &of_row));
        largest = fmax(largest, of_row);
    }
    matrix->global_scale = mm_quantize_global(format, largest);
    for (int32_t i = 0; i < rows; i++) {
        MM_TRY(read_row(q, index, i, row, &of_row));
        mm_quantize_row(format, row, mm_columns(&tensors->desc, projection), matrix->global_scale,
                        (uint8_t *)matrix->codes + (size_t)i * matrix->codes_stride,
                        (uint8_t *)matrix->scales + (size_t)i * matrix->scales_stride);
    }
    return read_bias(q, index);
}

static void quantize_some(void *argument, int32_t thread, int32_t threads) {
    (void)threads;
    quantization *q = argument;
    const int32_t matrices = matrices_of(q);
    for (;;) {
        const int32_t index = atomic_fetch_add_explicit(&q->next, 1, memory_order_relaxed);
        if (index >= matrices)
            return;
        mm_carry(&q->failure,
                 quantize_matrix(q, index, q->rows + (size_t)thread * 2 * q->row_length));
        const int32_t done = atomic_fetch_add_explicit(&q->done, 1, memory_order_relaxed) + 1;
        /* Only the caller's thread reports, so calls are never concurrent. */
        if (thread == 0 && q->progress.fn && done < matrices)
            q->progress.fn(q->progress.user, q->memory_bytes / (size_t)matrices * (size_t)done,
                           q->memory_bytes);
    }
}

/* Gives every matrix its place: codes and scales of all, then the biases. */
static megamoe_status reserve(quantization *q) {
    mm_layer_tensors *tensors = &q->wide->tensors;
    const size_t group = (size_t)mm_group_size(tensors->desc.format);
    const size_t weights = (size_t)tensors->desc.hidden * (size_t)tensors->desc.intermediate;
    const size_t matrix_bytes = weights / 2 + weights / group;
    const size_t biases_at = matrix_bytes * (size_t)matrices_of(q);
    q->memory_bytes = biases_at;
    for (int32_t index = 0; tensors->desc.has_bias && index < matrices_of(q); index++)
        q->memory_bytes += tensors->sources[index].bias->bytes;
    q->memory = mm_reserve(q->memory_bytes);
    if (!q->memory)
        return mm_fail(MEGAMOE_ENOMEM, "%d experts in 4 bits: out of memory for %zu bytes",
                       tensors->desc.experts, q->memory_bytes);
    uint8_t *bias = q->memory + biases_at;
    for (int32_t index = 0; index < matrices_of(q); index++) {
        const size_t columns = (size_t)mm_columns(&tensors->desc, (megamoe_projection)(index % 3));
        megamoe_matrix *matrix = &tensors->matrices[index];
        uint8_t *codes = q->memory + matrix_bytes * (size_t)index;
        matrix->codes = codes;
        matrix->codes_stride = columns / 2;
        matrix->scales = codes + weights / 2;
        matrix->scales_stride = columns / group;
        if (!tensors->desc.has_bias)
            continue;
        matrix->bias = bias;
        bias += tensors->sources[index].bias->bytes;
    }
    return MEGAMOE_OK;
}

/* Fills the matrices of `wide`. The caller releases q->memory, also after a failure. */
static megamoe_status quantize(quantization *q, int32_t threads) {
    const megamoe_layer_desc *desc = &q->wide->tensors.desc;
    mm_pool *pool;
    MM_TRY(mm_pool_open(threads, 0, false, &pool));
    megamoe_status status = MEGAMOE_OK;
    q->row_length = (size_t)mm_max(desc->hidden, desc->intermediate);
    MM_TRY_GOTO(reserve(q), end);
    q->rows = mm_alloc((size_t)mm_pool_threads(pool) * 2 * q->row_length * sizeof *q->rows);
    if (!q->rows) {
        status = mm_fail(MEGAMOE_ENOMEM, "quantizing %d experts: out of memory", desc->experts);
        goto end;
    }
    mm_pool_run(pool, quantize_some, q);
    status = mm_carried_status(&q->failure);
    if (status == MEGAMOE_OK && q->progress.fn)
        q->progress.fn(q->progress.user, q->memory_bytes, q->memory_bytes);
end:
    mm_pool_close(pool);
    free(q->rows);
    return status;
}

megamoe_status megamoe_checkpoint_quantize(const megamoe_checkpoint *checkpoint, int32_t layer,
                                           const megamoe_quantize_options *options,
                                           megamoe_weights **weights) {
    if (!checkpoint || !options || !weights)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_checkpoint_quantize: arguments must not be NULL");
    *weights = NULL;
    megamoe_quantize_options o;
    MM_TRY(mm_take_struct(&o, sizeof o, options, "megamoe_quantize_options"));
    if (o.format != MEGAMOE_FORMAT_MXFP4 && o.format != MEGAMOE_FORMAT_NVFP4)
        return mm_fail(MEGAMOE_EINVAL,
                       "megamoe_quantize_options: format %d; expected %d (MXFP4) or "
                       "%d (NVFP4)",
                       (int)o.format, MEGAMOE_FORMAT_MXFP4, MEGAMOE_FORMAT_NVFP4);
    const mm_layer *found = NULL;
    MM_TRY(mm_checkpoint_find_layer(checkpoint, layer, &found));
    if (!found->family->wide) {
        if (!found->family->name) { /* let it say what it is */
            mm_layer_tensors none = {0};
            return found->family->weights(checkpoint, found, &none);
        }
        return mm_fail(
            MEGAMOE_EUNSUPPORTED,
            "%s: %s: the experts of layer %d have 4 bits already (%s); only FP8 and BF16 "
            "are quantized",
            found->first->file->path, found->first->name, layer, found->family->name);
    }
    mm_wide_layer wide = {0};
    quantization q = {.wide = &wide, .progress = o.progress};
    megamoe_status status = found->family->wide(checkpoint, found, o.format, &wide);
    if (status == MEGAMOE_OK)
        status = quantize(&q, o.threads);
    if (status == MEGAMOE_OK)
        status = mm_checkpoint_own(checkpoint, &wide.tensors, q.memory, q.memory_bytes, weights);
    else if (q.memory)
        mm_unreserve(q.memory, q.memory_bytes);
    free(wide.tensors.matrices);
    free(wide.tensors.sources);
    return status;
}

static megamoe_stored_layer stored_of(const mm_layer *layer, const char *format,
                                      const megamoe_layer_desc *desc) {
    megamoe_stored_layer stored = MEGAMOE_INIT(megamoe_stored_layer);
    snprintf(stored.family, sizeof stored.family, "%s", layer->family->name);
    snprintf(stored.format, sizeof stored.format, "%s", format);
    stored.has_bias = desc->has_bias;
    stored.hidden = desc->hidden;
    stored.intermediate = desc->intermediate;
    stored.experts = desc->experts;
    stored.topk = desc->topk;
    stored.activation = desc->activation;
    return stored;
}

megamoe_status megamoe_checkpoint_stored(const megamoe_checkpoint *checkpoint, int32_t layer,
                                         megamoe_stored_layer *stored) {
    if (!checkpoint || !stored)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_checkpoint_stored: arguments must not be NULL");
    const mm_layer *found = NULL;
    MM_TRY(mm_checkpoint_find_layer(checkpoint, layer, &found));
    mm_wide_layer wide = {0};
    mm_layer_tensors *tensors = &wide.tensors;
    megamoe_stored_layer filled = {0};
    megamoe_status status;
    /* Of the two formats NVFP4 takes more sizes. */
    if (found->family->wide)
        status = found->family->wide(checkpoint, found, MEGAMOE_FORMAT_NVFP4, &wide);
    else
        status = found->family->weights(checkpoint, found, tensors);
    if (status == MEGAMOE_OK) {
        const megamoe_format format = tensors->desc.format;
        filled = stored_of(found, wide.format ? wide.format : megamoe_format_name(format),
                           &tensors->desc);
        filled.wide = wide.format != NULL;
        filled.block_rows = wide.format ? wide.block_rows : 1;
        filled.block_columns = wide.format ? wide.block_columns : mm_group_size(format);
        status = mm_give_struct(stored, &filled, sizeof filled, "megamoe_stored_layer");
    }
    free(tensors->matrices);
    free(tensors->sources);
    return status;
}
