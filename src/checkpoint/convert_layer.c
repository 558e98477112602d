/* SPDX-License-Identifier: Apache-2.0 */
/* Which layers a target holds without loss. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "checkpoint/convert.h"
#include "checkpoint/gguf_model.h"
#include "num/bf16.h"
#include "num/e8m0.h"
#include "weights/hold.h"
#include "weights/rows.h"
#include "weights/weights.h"

static const mm_target targets[] = {
    {&mm_deepseek_v4, MEGAMOE_FORMAT_MXFP4, false, false, "weight", "I8", "scale", "F8_E8M0", NULL},
    {&mm_modelopt, MEGAMOE_FORMAT_NVFP4, false, false, "weight", "U8", "weight_scale", "F8_E4M3",
     "weight_scale_2"},
    {&mm_compressed_tensors, MEGAMOE_FORMAT_MXFP4, false, false, "weight_packed", "U8",
     "weight_scale", "U8", NULL},
    {&mm_compressed_tensors, MEGAMOE_FORMAT_NVFP4, false, true, "weight_packed", "U8",
     "weight_scale", "F8_E4M3", "weight_global_scale"},
    {&mm_gpt_oss, MEGAMOE_FORMAT_MXFP4, true, false, "_blocks", "U8", "_scales", "U8", NULL}};

const mm_target *mm_target_find(const char *family, megamoe_format format) {
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++)
        if (strcmp(targets[i].family->name, family) == 0 &&
            (format == 0 || targets[i].format == format))
            return &targets[i];
    return NULL;
}

/* The first names of gpt-oss and those of GGUF have blocks of their own, which no family knows. */
static megamoe_status form_block(mm_conversion *c) {
    const char *name = c->layer->first->name;
    if (c->layer->family == &mm_gguf) {
        MM_TRY(mm_gguf_conversion(c));
    } else if (mm_expert_name_parse(name, &c->like)) {
        snprintf(c->block, sizeof c->block, "%.*s", (int)c->like.block_bytes, name);
    } else {
        snprintf(c->block, sizeof c->block, "model.layers.%" PRId32 ".mlp.", c->layer->index);
        c->like = (mm_expert_name){.layer = c->layer->index};
    }
    c->like.block_bytes = strlen(c->block);
    c->like.expert = c->target->fused ? MM_EXPERTS_FUSED : 0;
    return MEGAMOE_OK;
}

/* By the config, or by the architecture; NULL if nothing tells it. */
static megamoe_status read_model_type(const mm_conversion *c, const char **model_type) {
    const mm_gguf_architecture *architecture;
    *model_type = NULL;
    if (c->layer->family != &mm_gguf)
        return mm_config_string(&c->checkpoint->config, "model_type", model_type);
    MM_TRY(mm_gguf_architecture_of(c->checkpoint, &architecture));
    *model_type = architecture->model_type;
    return MEGAMOE_OK;
}

/* What the names and the config of the target would say of the model has to be what it is. */
static megamoe_status check_model(const mm_conversion *c) {
    const mm_tensor *first = c->layer->first;
    const char *model_type;
    MM_TRY(read_model_type(c, &model_type));
    if (c->target->family == &mm_gpt_oss && !c->source.desc.has_bias)
        return mm_fail(
            MEGAMOE_EUNSUPPORTED,
            "%s: %s: layer %" PRId32 " has no biases and model_type \"%s\"; the names of "
            "gpt-oss stand for its biases, its activation and its router",
            first->file->path, first->name, c->layer->index, model_type ? model_type : "");
    bool v4;
    MM_TRY(mm_is_deepseek_v4(c->checkpoint, c->layer, &v4));
    if (c->target->family == &mm_deepseek_v4 && !model_type && !v4 && !c->source.desc.has_bias)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: %s: no config names the model_type, and under the names of deepseek-v4 "
                       "it would be taken for DeepSeek-V4",
                       first->file->path, first->name);
    return MEGAMOE_OK;
}

/* Exponents of E8M0 scales, and where the least of them stands. */
typedef struct range {
    int least, most;
    int32_t row, block;
} range;

/* Of a whole matrix of an expert that is held; with `look`, of groups that hold not only zeros. */
static range range_of(const mm_conversion *c, int32_t index, bool look) {
    const megamoe_projection projection = (megamoe_projection)(index % 3);
    const megamoe_matrix *matrix = mm_held_matrix(c->weights, index / 3, projection);
    const int32_t columns = mm_columns(&c->source.desc, projection);
    range r = {.least = INT32_MAX, .most = INT32_MIN};
    for (int32_t row = 0; row < mm_rows(&c->source.desc, projection); row++) {
        const uint8_t *codes = (const uint8_t *)matrix->codes + (size_t)row * matrix->codes_stride;
        const uint8_t *scales =
            (const uint8_t *)matrix->scales + (size_t)row * matrix->scales_stride;
        uint8_t present[MM_MAX_GROUPS] = {0};
        if (look)
            mm_row_present(MEGAMOE_FORMAT_MXFP4, codes, columns, present);
        for (int32_t g = 0; g < columns / mm_group_size(MEGAMOE_FORMAT_MXFP4); g++) {
            const int exponent = scales[g] - MM_E8M0_BIAS;
            if (present[g] == MM_ONLY_ZEROS)
                continue;
            if (exponent < r.least)
                r = (range){exponent, r.most, row, g};
            r.most = r.most > exponent ? r.most : exponent;
        }
    }
    if (r.most < r.least) /* only zeros */
        r.least = r.most = 0;
    return r;
}

enum {
    E4M3_LEAST = -9, /* powers of two that an E4M3 scale holds */
    E4M3_MOST = 8,
    GLOBAL_LEAST = -127 /* whose reciprocal FP32 holds too */
};

/* One global scale for a matrix such that each E8M0 scale over it is a power of two of E4M3. */
static megamoe_status find_global(mm_conversion *c, int32_t index) {
    range r = range_of(c, index, false);
    if (r.most - r.least > E4M3_MOST - E4M3_LEAST) /* rarely: then it is worth reading all codes */
        r = range_of(c, index, true);
    if (r.most - r.least > E4M3_MOST - E4M3_LEAST) {
        const mm_tensor *scales = c->source.sources[index].scales;
        return mm_fail(MEGAMOE_EINEXACT,
                       "%s: %s: expert %" PRId32 ", row %" PRId32 ", block %" PRId32
                       ": scale 2^%d lies %d binades below the matrix's largest, 2^%d; NVFP4 holds "
                       "at most %d",
                       scales->file->path, scales->name, index / 3, r.row, r.block, r.least,
                       r.most - r.least, r.most, E4M3_MOST - E4M3_LEAST);
    }
    const int global = r.most - E4M3_MOST;
    c->global_exponents[index] = (int16_t)(global < GLOBAL_LEAST ? GLOBAL_LEAST : global);
    return MEGAMOE_OK;
}

/* Runs `fn` on each matrix while its expert is held. */
static megamoe_status for_held(mm_conversion *c,
                               megamoe_status (*fn)(mm_conversion *c, int32_t index)) {
    for (int32_t expert = 0; expert < c->source.desc.experts; expert++) {
        MM_TRY(mm_weights_hold(c->weights, expert));
        megamoe_status status = MEGAMOE_OK;
        for (int32_t i = 0; i < 3 && status == MEGAMOE_OK; i++)
            status = fn(c, expert * 3 + i);
        mm_weights_drop(c->weights, expert);
        MM_TRY(status);
    }
    return MEGAMOE_OK;
}

static megamoe_status find_globals(mm_conversion *c) {
    const int32_t n = c->source.desc.experts * 3;
    c->global_exponents = calloc((size_t)n, sizeof *c->global_exponents);
    if (!c->global_exponents)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", c->checkpoint->path);
    return for_held(c, find_global);
}

bool mm_reciprocal_of(float global, float *divisor) {
    const float nearest = 1.0f / global;
    const float candidates[] = {nearest, nextafterf(nearest, 0.0f), nextafterf(nearest, INFINITY)};
    for (size_t i = 0; i < sizeof candidates / sizeof *candidates; i++)
        if (candidates[i] > 0.0f && isfinite(candidates[i]) && 1.0f / candidates[i] == global) {
            *divisor = candidates[i];
            return true;
        }
    return false;
}

static megamoe_status check_reciprocals(const mm_conversion *c) {
    for (int32_t index = 0; index < c->source.desc.experts * 3; index++) {
        float divisor;
        const float global = c->source.matrices[index].global_scale;
        const mm_tensor *codes = c->source.sources[index].codes;
        if (!mm_reciprocal_of(global, &divisor))
            return mm_fail(MEGAMOE_EINEXACT,
                           "%s: %s: expert %" PRId32 ": global scale %.9g; compressed-tensors "
                           "stores a divisor, and no FP32 number has this reciprocal",
                           codes->file->path, codes->name, index / 3, (double)global);
    }
    return MEGAMOE_OK;
}

/* gpt-oss stores BF16, the upper half of FP32. */
static megamoe_status check_bias(mm_conversion *c, int32_t index) {
    const megamoe_projection projection = (megamoe_projection)(index % 3);
    const megamoe_matrix *matrix = mm_held_matrix(c->weights, index / 3, projection);
    const mm_tensor *bias = c->source.sources[index].bias;
    if (matrix->bias_dtype == MEGAMOE_DTYPE_BF16)
        return MEGAMOE_OK;
    for (int32_t row = 0; row < mm_rows(&c->source.desc, projection); row++) {
        float value;
        memcpy(&value, (const uint8_t *)matrix->bias + (size_t)row * matrix->bias_stride,
               sizeof value);
        if ((mm_f32_bits(value) & 0xFFFF) != 0)
            return mm_fail(MEGAMOE_EINEXACT,
                           "%s: %s: expert %" PRId32 ", row %" PRId32
                           ": bias %.9g; gpt-oss holds BF16, which has no such number",
                           bias->file->path, bias->name, index / 3, row, (double)value);
    }
    return MEGAMOE_OK;
}

static megamoe_status check_format(mm_conversion *c) {
    const megamoe_format from = c->source.desc.format, to = c->target->format;
    if (from == to)
        return c->target->reciprocal ? check_reciprocals(c) : MEGAMOE_OK;
    if (from == MEGAMOE_FORMAT_MXFP4)
        return find_globals(c);
    return mm_fail(MEGAMOE_EINEXACT,
                   "%s: %s: layer %" PRId32
                   " is NVFP4, whose E4M3 scales for 16 weights no MXFP4 scale for 32 can take the "
                   "place of; %s would need rounding",
                   c->layer->first->file->path, c->layer->first->name, c->layer->index,
                   c->target->family->name);
}

megamoe_status mm_conversion_open(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                                  const mm_target *target, mm_conversion *conversion) {
    *conversion = (mm_conversion){.checkpoint = checkpoint, .layer = layer, .target = target};
    MM_TRY(megamoe_checkpoint_weights(checkpoint, layer->index, &conversion->weights));
    MM_TRY(layer->family->weights(checkpoint, layer, &conversion->source));
    MM_TRY(form_block(conversion));
    MM_TRY(check_model(conversion));
    if (target->family == &mm_gpt_oss)
        MM_TRY(for_held(conversion, check_bias));
    return check_format(conversion);
}

void mm_conversion_close(mm_conversion *conversion) {
    megamoe_weights_close(conversion->weights);
    free(conversion->source.matrices);
    free(conversion->source.sources);
    free(conversion->global_exponents);
    *conversion = (mm_conversion){0};
}
