/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Experts of GGUF files: one tensor for all experts of a projection, of type MXFP4 or NVFP4.
 *
 *   blk.{L}.ffn_gate_exps.weight     [E, I, H]
 *   blk.{L}.ffn_up_exps.weight       [E, I, H]
 *   blk.{L}.ffn_gate_up_exps.weight  [E, 2 I, H], instead of both: gate rows before up rows
 *   blk.{L}.ffn_down_exps.weight     [E, H, I]
 *   ...exps.bias                     F32 [E, rows]
 *   ...exps.scale                    F32 [E], NVFP4's global scales; without it they are 1
 *   ...exps.input_scale              read over: activations are scaled as they come
 *
 * Both types mix scales and codes in blocks, and put the codes of a group in an order of their own:
 * the low nibbles hold its first half, the high ones its second. So matrices are unpacked as they
 * are read.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "checkpoint/experts.h"
#include "checkpoint/gguf.h"
#include "checkpoint/gguf_model.h"
#include "weights/rows.h"
#include "weights/weights.h"

/* A block: the scales of its groups, then their codes. */
typedef struct block_type {
    const char *dtype;
    megamoe_format format;
    size_t group, groups; /* values in a group, groups in a block */
} block_type;

static const block_type block_types[] = {{"MXFP4", MEGAMOE_FORMAT_MXFP4, 32, 1},
                                         {"NVFP4", MEGAMOE_FORMAT_NVFP4, 16, 4}};

static const block_type *block_type_of(const mm_tensor *tensor) {
    return tensor->dtype == mm_gguf_mxfp4   ? &block_types[0]
           : tensor->dtype == mm_gguf_nvfp4 ? &block_types[1]
                                            : NULL;
}

/* ---- Names ---- */

/* The first three by megamoe_projection. */
static const char *const stems[] = {"ffn_gate_exps.", "ffn_up_exps.", "ffn_down_exps.",
                                    "ffn_gate_up_exps."};
enum { GATE_UP = 3, STEMS = 4 };

typedef struct expert_name {
    mm_claim claim;
    int stem;
    const char *part; /* the rest of the name */
} expert_name;

static bool parse(const char *name, expert_name *parsed) {
    static const char start[] = "blk.";
    if (strncmp(name, start, sizeof start - 1) != 0)
        return false;
    const char *at = name + sizeof start - 1;
    if (!mm_name_take_index(&at, &parsed->claim.layer))
        return false;
    parsed->claim.block_bytes = (size_t)(at - name);
    for (parsed->stem = 0; parsed->stem < STEMS; parsed->stem++) {
        const size_t bytes = strlen(stems[parsed->stem]);
        if (strncmp(at, stems[parsed->stem], bytes) == 0) {
            parsed->part = at + bytes;
            return true;
        }
    }
    return false;
}

static bool is_weight(const mm_tensor *tensor, mm_claim *claim) {
    expert_name name;
    if (!parse(tensor->name, &name) || strcmp(name.part, "weight") != 0)
        return false;
    *claim = name.claim;
    return true;
}

static bool claims(const mm_tensor *tensor, mm_claim *claim) {
    return block_type_of(tensor) && is_weight(tensor, claim);
}

static bool claims_others(const mm_tensor *tensor, mm_claim *claim) {
    return !block_type_of(tensor) && is_weight(tensor, claim);
}

/* ---- A layer ---- */

typedef struct place {
    const megamoe_checkpoint *checkpoint;
    const mm_layer *layer;
} place;

/* NULL if there is none. */
static const mm_tensor *find(const place *at, int stem, const char *part) {
    char name[MM_NAME_TEXT];
    snprintf(name, sizeof name, "blk.%" PRId32 ".%s%s", at->layer->index, stems[stem], part);
    return mm_checkpoint_find(at->checkpoint, name);
}

static megamoe_status need(const place *at, int stem, const char *part, const mm_tensor **tensor) {
    *tensor = find(at, stem, part);
    if (*tensor)
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_EFORMAT, "%s: blk.%" PRId32 ".%s%s: this tensor is missing",
                   at->checkpoint->path, at->layer->index, stems[stem], part);
}

/* What else stands beside an expert may change what its weights mean. */
static megamoe_status check_parts(const place *at) {
    static const char *const parts[] = {"weight", "bias", "scale", "input_scale"};
    const bool merged = find(at, GATE_UP, "weight") != NULL;
    char prefix[32];
    snprintf(prefix, sizeof prefix, "blk.%" PRId32 ".ffn_", at->layer->index);
    size_t first;
    const size_t n = mm_checkpoint_find_prefix(at->checkpoint, prefix, &first);
    for (size_t i = first; i < first + n; i++) {
        const mm_tensor *tensor = at->checkpoint->tensors[i];
        expert_name name;
        if (!parse(tensor->name, &name))
            continue;
        bool known = false;
        for (size_t p = 0; p < sizeof parts / sizeof *parts; p++)
            known = known || strcmp(name.part, parts[p]) == 0;
        if (!known)
            return mm_fail(MEGAMOE_EUNSUPPORTED,
                           "%s: %s: unknown tensor beside the experts of layer %" PRId32
                           "; it may change what they mean",
                           tensor->file->path, tensor->name, at->layer->index);
        if (name.stem != MEGAMOE_DOWN && merged != (name.stem == GATE_UP))
            return mm_fail(MEGAMOE_EFORMAT,
                           "%s: %s: layer %" PRId32
                           " has gate and up in one tensor and in two at the same time",
                           tensor->file->path, tensor->name, at->layer->index);
    }
    return MEGAMOE_OK;
}

static megamoe_status check(const megamoe_checkpoint *checkpoint, const mm_layer *layer) {
    const mm_gguf_architecture *architecture;
    MM_TRY(mm_gguf_architecture_of(checkpoint, &architecture));
    const mm_gguf_key key = mm_gguf_key_of(architecture, "block_count", layer->index);
    int32_t blocks = INT32_MAX;
    MM_TRY(mm_gguf_int(checkpoint, &key, &blocks));
    if (layer->index < blocks)
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_EFORMAT, "%s: %s: %s of %s is %" PRId32, layer->first->file->path,
                   layer->first->name, key.text, checkpoint->config.path, blocks);
}

/* The tensor of a projection, in blocks that are read. */
static megamoe_status need_weight(const place *at, int stem, const mm_tensor **weight) {
    MM_TRY(need(at, stem, "weight", weight));
    if (block_type_of(*weight))
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_EUNSUPPORTED,
                   "%s: %s: its type is %s; experts are run in MXFP4 and NVFP4",
                   (*weight)->file->path, (*weight)->name, (*weight)->dtype->name);
}

static megamoe_status agree(const place *at, const mm_gguf_architecture *architecture,
                            const char *name, const mm_tensor *tensor, int64_t seen) {
    const mm_gguf_key key = mm_gguf_key_of(architecture, name, at->layer->index);
    int32_t stated = 0;
    MM_TRY(mm_gguf_int(at->checkpoint, &key, &stated));
    return mm_config_agree(at->checkpoint, key.text, stated, tensor, seen);
}

static megamoe_status describe_activation(const place *at, const mm_gguf_architecture *architecture,
                                          megamoe_activation *activation) {
    const mm_gguf_key key = mm_gguf_key_of(architecture, "swiglu_clamp_exp", at->layer->index);
    *activation = architecture->activation;
    float limit = architecture->limits ? -1.0f : 0.0f;
    MM_TRY(mm_gguf_float(at->checkpoint, &key, &limit));
    const char *path = at->checkpoint->config.path;
    if (limit < 0.0f)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s is missing for layer %" PRId32
                       " or negative; it limits the activation",
                       path, key.text, at->layer->index);
    if (limit != 0.0f && !architecture->limits)
        return mm_fail(MEGAMOE_EUNSUPPORTED, "%s: %s is %g; how %s limits is not known", path,
                       key.text, (double)limit, architecture->name);
    if (architecture->limits)
        activation->limit = limit;
    return MEGAMOE_OK;
}

/* From the shape of the gate's weights and from the metadata, which must agree. */
static megamoe_status describe(const place *at, const mm_tensor *gate, int64_t turns,
                               megamoe_layer_desc *desc) {
    const mm_gguf_architecture *architecture;
    MM_TRY(mm_gguf_architecture_of(at->checkpoint, &architecture));
    char shape[MM_SHAPE_TEXT];
    mm_shape_text(gate->shape, gate->rank, shape);
    if (gate->rank != 3 || gate->shape[1] % turns != 0)
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s: its shape is %s; it must be [experts, %srows, in]",
                       gate->file->path, gate->name, shape, turns > 1 ? "an even number of " : "");
    const int64_t experts = gate->shape[0], rows = gate->shape[1] / turns, hidden = gate->shape[2];
    if (experts > INT32_MAX || rows > INT32_MAX || hidden > INT32_MAX)
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s: its shape %s is larger than any layer's",
                       gate->file->path, gate->name, shape);
    *desc = (megamoe_layer_desc)MEGAMOE_INIT(megamoe_layer_desc);
    desc->layer = at->layer->index;
    desc->hidden = (int32_t)hidden;
    desc->intermediate = (int32_t)rows;
    desc->experts = (int32_t)experts;
    desc->format = block_type_of(gate)->format;
    for (int stem = 0; stem < STEMS; stem++)
        desc->has_bias = desc->has_bias || find(at, stem, "bias");
    MM_TRY(agree(at, architecture, "embedding_length", gate, hidden));
    MM_TRY(agree(at, architecture, "expert_feed_forward_length", gate, rows));
    MM_TRY(agree(at, architecture, "expert_count", gate, experts));
    const mm_gguf_key topk = mm_gguf_key_of(architecture, "expert_used_count", at->layer->index);
    MM_TRY(mm_gguf_int(at->checkpoint, &topk, &desc->topk));
    MM_TRY(describe_activation(at, architecture, &desc->activation));
    char where[1024];
    snprintf(where, sizeof where, "%s: %s", gate->file->path, gate->name);
    return mm_desc_check(desc, MEGAMOE_EFORMAT, where);
}

/* ---- Matrices ---- */

/* Codes in ascending k, two a byte, from `bytes` bytes with the first half in the low nibbles. */
static void join_halves(const uint8_t *halves, size_t bytes, uint8_t *codes) {
    uint8_t *second = codes + bytes / 2;
    for (size_t i = 0; i < bytes / 2; i++) {
        const uint8_t even = halves[2 * i], odd = halves[2 * i + 1];
        codes[i] = (uint8_t)((even & 15) | odd << 4);
        second[i] = (uint8_t)(even >> 4 | (odd & 0xF0));
    }
}

static void unpack(megamoe_format format, const uint8_t *blocks, size_t bytes, uint8_t *codes,
                   uint8_t *scales) {
    const block_type *type = &block_types[format == MEGAMOE_FORMAT_MXFP4 ? 0 : 1];
    const size_t group_bytes = type->group / 2;
    for (const uint8_t *end = blocks + bytes; blocks < end;) {
        memcpy(scales, blocks, type->groups);
        blocks += type->groups;
        scales += type->groups;
        for (size_t group = 0; group < type->groups; group++) {
            join_halves(blocks, group_bytes, codes);
            blocks += group_bytes;
            codes += group_bytes;
        }
    }
}

/* NVFP4's global scales: what the products of an expert are multiplied by, once. */
static megamoe_status check_scale(const mm_tensor *scale, const block_type *type, int64_t experts) {
    if (!scale)
        return MEGAMOE_OK;
    if (type->format == MEGAMOE_FORMAT_MXFP4)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: %s: scales of experts; beside MXFP4 weights there must be none",
                       scale->file->path, scale->name);
    return mm_tensor_expect(scale, "F32", 1, &experts);
}

static megamoe_status read_scale(const mm_tensor *scale, int32_t expert, float *value) {
    *value = 1.0f;
    if (!scale)
        return MEGAMOE_OK;
    MM_TRY(mm_tensor_read(scale, (uint64_t)expert * sizeof *value, value, sizeof *value));
    if (*value > 0.0f && isfinite(*value))
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_EFORMAT,
                   "%s: %s: the scale of expert %" PRId32 " is %g; it must be positive and finite",
                   scale->file->path, scale->name, expert, (double)*value);
}

/* `turns` projections, from `projection` on, whose rows follow each other in the tensors of stem.
 */
static megamoe_status fill(const place *at, int stem, megamoe_projection projection, int32_t turns,
                           mm_layer_tensors *tensors) {
    const megamoe_layer_desc *desc = &tensors->desc;
    const int64_t rows = mm_rows(desc, projection), columns = mm_columns(desc, projection);
    const mm_tensor *weight, *bias = NULL;
    MM_TRY(need_weight(at, stem, &weight));
    const block_type *type = block_type_of(weight);
    if (type->format != desc->format)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: %s: its type is %s; other projections of layer %" PRId32 " are %s",
                       weight->file->path, weight->name, type->dtype, desc->layer,
                       desc->format == MEGAMOE_FORMAT_MXFP4 ? "MXFP4" : "NVFP4");
    MM_TRY(mm_tensor_expect(weight, type->dtype, 3,
                            (int64_t[]){desc->experts, turns * rows, columns}));
    if (desc->has_bias) {
        MM_TRY(need(at, stem, "bias", &bias));
        MM_TRY(mm_tensor_expect(bias, "F32", 2, (int64_t[]){desc->experts, turns * rows}));
    }
    const mm_tensor *scale = find(at, stem, "scale");
    MM_TRY(check_scale(scale, type, desc->experts));

    const size_t matrix_bytes = weight->bytes / ((size_t)desc->experts * (size_t)turns);
    for (int32_t expert = 0; expert < desc->experts; expert++)
        for (int32_t turn = 0; turn < turns; turn++) {
            const size_t index = (size_t)expert * 3 + (size_t)projection + (size_t)turn;
            const size_t part = (size_t)expert * (size_t)turns + (size_t)turn;
            megamoe_matrix *matrix = &tensors->matrices[index];
            *matrix = (megamoe_matrix){.codes_stride = (size_t)columns / 2,
                                       .scales_stride = (size_t)columns / type->group,
                                       .bias_dtype = MEGAMOE_DTYPE_F32,
                                       .bias_stride = sizeof(float)};
            MM_TRY(read_scale(scale, expert, &matrix->global_scale));
            tensors->sources[index] =
                (mm_matrix_source){.codes = weight,
                                   .codes_at = part * matrix_bytes,
                                   .scales = weight,
                                   .scales_at = part * matrix_bytes,
                                   .bias = bias,
                                   .bias_at = part * (size_t)rows * sizeof(float)};
        }
    return MEGAMOE_OK;
}

static megamoe_status weights(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                              mm_layer_tensors *tensors) {
    const place at = {checkpoint, layer};
    MM_TRY(check_parts(&at));
    const bool merged = find(&at, GATE_UP, "weight") != NULL;
    const int32_t turns = merged ? 2 : 1;
    const int gate_stem = merged ? GATE_UP : MEGAMOE_GATE;
    const mm_tensor *gate;
    MM_TRY(need_weight(&at, gate_stem, &gate));
    MM_TRY(describe(&at, gate, turns, &tensors->desc));
    const mm_experts experts = {
        .checkpoint = checkpoint, .layer = layer, .like = {.expert = MM_EXPERTS_FUSED}};
    MM_TRY(mm_layer_tensors_reserve(&experts, tensors));
    tensors->unpack = unpack;
    MM_TRY(fill(&at, gate_stem, MEGAMOE_GATE, turns, tensors));
    if (!merged)
        MM_TRY(fill(&at, MEGAMOE_UP, MEGAMOE_UP, 1, tensors));
    return fill(&at, MEGAMOE_DOWN, MEGAMOE_DOWN, 1, tensors);
}

const mm_family mm_gguf = {
    .name = "gguf", .claims = claims, .check = check, .weights = weights, .router = mm_gguf_router};

/* Types that are not run: the message about the first tensor says which. */

static megamoe_status check_nothing(const megamoe_checkpoint *checkpoint, const mm_layer *layer) {
    (void)checkpoint;
    (void)layer;
    return MEGAMOE_OK;
}

static megamoe_status refuse(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                             mm_layer_tensors *tensors) {
    (void)checkpoint;
    (void)tensors;
    return mm_fail(
        MEGAMOE_EUNSUPPORTED,
        "%s: %s: the experts of layer %" PRId32 " are of type %s; MXFP4 and NVFP4 are run",
        layer->first->file->path, layer->first->name, layer->index, layer->first->dtype->name);
}

const mm_family mm_gguf_refused = {
    .claims = claims_others, .check = check_nothing, .weights = refuse, .router = mm_gguf_router};
