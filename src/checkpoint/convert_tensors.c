/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of a converted layer: their names, shapes and bytes. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "checkpoint/convert.h"
#include "num/bf16.h"
#include "num/e4m3.h"
#include "num/e8m0.h"
#include "weights/hold.h"
#include "weights/rows.h"
#include "weights/weights.h"

static const char linear_bias_part[] = "bias";

/* ---- Names and shapes ---- */

static mm_converted *add(mm_converted_file *file, const char *dtype, int32_t rank,
                         const int64_t *shape) {
    mm_converted *tensor = &file->tensors[file->n];
    megamoe_tensor_spec *spec = &file->specs[file->n++];
    *spec = (megamoe_tensor_spec){.name = tensor->name, .dtype = dtype, .rank = rank};
    if (rank > 0)
        memcpy(spec->shape, shape, (size_t)rank * sizeof *shape);
    uint64_t bytes = 0;
    if (mm_safetensors_bytes(mm_safetensors_dtype_find(dtype), spec->shape, rank, &bytes))
        file->bytes += bytes;
    return tensor;
}

static void add_matrix(mm_converted_file *file, int32_t expert, megamoe_projection projection) {
    const mm_conversion *c = file->conversion;
    const mm_target *target = c->target;
    const megamoe_layer_desc *desc = &c->source.desc;
    const int64_t rows = mm_rows(desc, projection), columns = mm_columns(desc, projection);
    const megamoe_dtype bias = c->source.matrices[(size_t)expert * 3 + projection].bias_dtype;
    const struct {
        int what;
        const char *part, *dtype;
        int32_t rank;
        int64_t shape[2];
    } parts[] = {
        {MM_CODES, target->codes, target->codes_dtype, 2, {rows, columns / 2}},
        {MM_SCALES,
         target->scales,
         target->scales_dtype,
         2,
         {rows, columns / mm_group_size(target->format)}},
        {MM_GLOBAL, target->global, "F32", target->reciprocal ? 1 : 0, {1}},
        {MM_BIAS, desc->has_bias ? linear_bias_part : NULL, megamoe_dtype_name(bias), 1, {rows}}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (!parts[i].part)
            continue;
        mm_converted *tensor = add(file, parts[i].dtype, parts[i].rank, parts[i].shape);
        tensor->what = parts[i].what;
        tensor->expert = expert;
        tensor->projection = projection;
        mm_expert_name_form(c->block, &c->like, expert, projection, parts[i].part, tensor->name);
    }
}

/* Of gate and up, or of down. */
static void add_fused(mm_converted_file *file, megamoe_projection projection) {
    const mm_conversion *c = file->conversion;
    const mm_target *target = c->target;
    const megamoe_layer_desc *desc = &c->source.desc;
    const bool down = projection == MEGAMOE_DOWN;
    const int64_t rows = (int64_t)mm_rows(desc, projection) * (down ? 1 : 2);
    const int64_t group = mm_group_size(target->format);
    const int64_t shape[] = {desc->experts, rows, mm_columns(desc, projection) / group, group / 2};
    const struct {
        int what;
        const char *part, *dtype;
        int32_t rank;
    } parts[] = {{MM_CODES, target->codes, target->codes_dtype, 4},
                 {MM_SCALES, target->scales, target->scales_dtype, 3},
                 {MM_BIAS, "_bias", "BF16", 2}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        mm_converted *tensor = add(file, parts[i].dtype, parts[i].rank, shape);
        tensor->what = parts[i].what;
        tensor->projection = projection;
        snprintf(tensor->name, sizeof tensor->name, "%sexperts.%s%s", c->block,
                 down ? "down_proj" : "gate_up_proj", parts[i].part);
    }
}

/* What the readers of routers look for, and an image bias that belongs with it. */
static bool is_router_part(const char *part) {
    static const char *const parts[] = {"gate.weight",
                                        "gate.bias",
                                        "gate.bias_vl",
                                        "gate.tid2eid",
                                        "gate.e_score_correction_bias",
                                        "e_score_correction_bias",
                                        "router.weight",
                                        "router.bias"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strcmp(part, parts[i]) == 0)
            return true;
    return false;
}

/* Where the layer's tensors begin in the source, and how many characters of a name that is. */
static size_t source_block(const mm_conversion *c, size_t *first, size_t *block_bytes) {
    const char *name = c->layer->first->name;
    mm_expert_name like;
    char block[MM_BLOCK_TEXT];
    if (mm_expert_name_parse(name, &like))
        snprintf(block, sizeof block, "%.*s", (int)like.block_bytes, name);
    else
        snprintf(block, sizeof block, "block.%" PRId32 ".mlp.", c->layer->index);
    *block_bytes = strlen(block);
    return mm_checkpoint_find_prefix(c->checkpoint, block, first);
}

/* `part` is behind the block. */
static void add_copy(mm_converted_file *file, const mm_tensor *from, const char *part) {
    mm_converted *tensor = add(file, from->dtype->name, from->rank, from->shape);
    tensor->what = MM_COPY;
    tensor->copied = from;
    snprintf(tensor->name, sizeof tensor->name, "%s%.40s", file->conversion->block, part);
}

static void add_router(mm_converted_file *file) {
    const mm_conversion *c = file->conversion;
    for (size_t i = 0; i < c->n_router; i++)
        add_copy(file, c->router[i].from, c->router[i].part);
    if (c->layer->family == &mm_gguf)
        return;
    size_t first, block_bytes;
    const size_t n = source_block(c, &first, &block_bytes);
    for (size_t i = first; i < first + n; i++) {
        const mm_tensor *from = c->checkpoint->tensors[i];
        const char *part = from->name + block_bytes;
        if (!is_router_part(part))
            continue;
        /* gpt-oss's first name for it. */
        char renamed[40];
        const bool gate = c->source.desc.has_bias && strncmp(part, "gate.", 5) == 0;
        snprintf(renamed, sizeof renamed, "%s%.32s", gate ? "router." : "", gate ? part + 5 : part);
        add_copy(file, from, renamed);
    }
}

megamoe_status mm_converted_file_open(const mm_conversion *conversion, int32_t first, int32_t end,
                                      mm_converted_file *file) {
    *file = (mm_converted_file){.conversion = conversion, .held = -1};
    size_t unused, block_bytes;
    const size_t most = (size_t)(end - first) * 3 * 4 +
                        source_block(conversion, &unused, &block_bytes) + conversion->n_router + 6;
    file->tensors = calloc(most, sizeof *file->tensors);
    file->specs = calloc(most, sizeof *file->specs);
    if (!file->tensors || !file->specs)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory for the names of %zu tensors",
                       conversion->checkpoint->path, most);
    if (first == 0)
        add_router(file);
    if (conversion->target->fused) {
        add_fused(file, MEGAMOE_GATE);
        add_fused(file, MEGAMOE_DOWN);
        return MEGAMOE_OK;
    }
    for (int32_t expert = first; expert < end; expert++)
        for (megamoe_projection p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++)
            add_matrix(file, expert, p);
    return MEGAMOE_OK;
}

static void drop_held(mm_converted_file *file) {
    if (file->held >= 0)
        mm_weights_drop(file->conversion->weights, file->held);
    file->held = -1;
}

void mm_converted_file_close(mm_converted_file *file) {
    drop_held(file);
    free(file->tensors);
    free(file->specs);
    *file = (mm_converted_file){0};
}

/* ---- Bytes ---- */

static megamoe_status hold(mm_converted_file *file, int32_t expert) {
    if (file->held == expert)
        return MEGAMOE_OK;
    drop_held(file);
    MM_TRY(mm_weights_hold(file->conversion->weights, expert));
    file->held = expert;
    return MEGAMOE_OK;
}

static const megamoe_matrix *matrix_of(const mm_conversion *c, int32_t index) {
    return mm_held_matrix(c->weights, index / 3, (megamoe_projection)(index % 3));
}

/* The scales of a row: as they are, or each E8M0 scale as two of E4M3. */
static void write_scales(const mm_conversion *c, int32_t index, int32_t row, uint8_t *to) {
    const megamoe_matrix *matrix = matrix_of(c, index);
    const megamoe_layer_desc *desc = &c->source.desc;
    const int32_t columns = mm_columns(desc, (megamoe_projection)(index % 3));
    const int32_t groups = columns / mm_group_size(desc->format);
    const uint8_t *from = (const uint8_t *)matrix->scales + (size_t)row * matrix->scales_stride;
    if (desc->format == c->target->format) {
        memcpy(to, from, (size_t)groups);
        return;
    }
    for (int32_t g = 0; g < groups; g++) {
        /* Only groups of zeros lie outside. */
        const int exponent = from[g] - MM_E8M0_BIAS - c->global_exponents[index];
        to[2 * g] = to[2 * g + 1] =
            mm_e4m3_from_f32(ldexpf(1.0f, (int)mm_max(mm_min(exponent, 8), -9)));
    }
}

/* As it is; gpt-oss gets BF16, which is exact: mm_conversion_open has looked. */
static void write_bias(const mm_conversion *c, const megamoe_matrix *matrix, int32_t row,
                       uint8_t *to) {
    const uint8_t *from = (const uint8_t *)matrix->bias + (size_t)row * matrix->bias_stride;
    const bool f32 = matrix->bias_dtype == MEGAMOE_DTYPE_F32;
    if (f32 && c->target->fused) {
        float value;
        memcpy(&value, from, sizeof value);
        const uint16_t half = mm_bf16_from_f32(value);
        memcpy(to, &half, sizeof half);
        return;
    }
    memcpy(to, from, f32 ? sizeof(float) : sizeof(uint16_t));
}

static void write_row(const mm_conversion *c, int what, int32_t index, int32_t row, uint8_t *to) {
    const megamoe_matrix *matrix = matrix_of(c, index);
    const size_t columns = (size_t)mm_columns(&c->source.desc, (megamoe_projection)(index % 3));
    if (what == MM_CODES)
        memcpy(to, (const uint8_t *)matrix->codes + (size_t)row * matrix->codes_stride,
               columns / 2);
    else if (what == MM_SCALES)
        write_scales(c, index, row, to);
    else
        write_bias(c, matrix, row, to);
}

/* The rows of a matrix, each row_bytes, `turns` rows apart. */
static void write_rows(const mm_conversion *c, int what, int32_t index, size_t row_bytes,
                       size_t turns, uint8_t *to) {
    const megamoe_projection projection = (megamoe_projection)(index % 3);
    for (int32_t row = 0; row < mm_rows(&c->source.desc, projection); row++)
        write_row(c, what, index, row, to + (size_t)row * turns * row_bytes);
}

static void write_global(const mm_conversion *c, int32_t index, void *data) {
    float global = c->source.matrices[index].global_scale;
    if (c->global_exponents)
        global = ldexpf(1.0f, c->global_exponents[index]);
    if (c->target->reciprocal)
        mm_reciprocal_of(global, &global);
    memcpy(data, &global, sizeof global);
}

/* Every expert's matrices, in turn, of a tensor that holds them all. */
static megamoe_status write_fused(mm_converted_file *file, const mm_converted *tensor,
                                  uint8_t *data, uint64_t bytes) {
    const mm_conversion *c = file->conversion;
    const size_t experts = (size_t)c->source.desc.experts;
    const size_t rows = (size_t)mm_rows(&c->source.desc, tensor->projection);
    const size_t turns = tensor->projection == MEGAMOE_DOWN ? 1 : 2;
    const size_t row_bytes = bytes / (experts * rows * turns);
    for (int32_t expert = 0; expert < c->source.desc.experts; expert++) {
        MM_TRY(hold(file, expert));
        for (size_t turn = 0; turn < turns; turn++)
            write_rows(c, tensor->what, expert * 3 + (int32_t)tensor->projection + (int32_t)turn,
                       row_bytes, turns, data + ((size_t)expert * rows * turns + turn) * row_bytes);
    }
    return MEGAMOE_OK;
}

megamoe_status mm_converted_fill(void *user, size_t index, void *data, uint64_t bytes) {
    mm_converted_file *file = user;
    const mm_conversion *c = file->conversion;
    const mm_converted *tensor = &file->tensors[index];
    const int32_t matrix = tensor->expert * 3 + (int32_t)tensor->projection;
    if (tensor->what == MM_COPY)
        return mm_tensor_read(tensor->copied, 0, data, bytes);
    if (tensor->what != MM_GLOBAL && c->target->fused)
        return write_fused(file, tensor, data, bytes);
    if (tensor->what == MM_GLOBAL) {
        write_global(c, matrix, data);
        return MEGAMOE_OK;
    }
    MM_TRY(hold(file, tensor->expert));
    write_rows(c, tensor->what, matrix,
               bytes / (uint64_t)mm_rows(&c->source.desc, tensor->projection), 1, data);
    return MEGAMOE_OK;
}
