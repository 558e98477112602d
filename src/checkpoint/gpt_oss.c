/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpt-oss: MXFP4 experts with biases, all experts of a projection in one tensor. Row 2 i of
 * gate_up is gate's row i, row 2 i + 1 is up's, biases included.
 *
 *   {block}experts.gate_up_proj_blocks  U8 [E, 2 I, H/32, 16]   down_proj_blocks [E, H, I/32, 16]
 *   {block}experts.gate_up_proj_scales  U8 [E, 2 I, H/32]: E8M0
 *   {block}experts.gate_up_proj_bias    BF16 [E, 2 I]
 *   {block}router.weight, router.bias   BF16 [E, H], [E]
 *
 * The files that OpenAI published first have the same tensors as block.{L}.mlp.mlp1_weight.blocks,
 * mlp1_weight.scales, mlp1_bias, mlp2_... and gate.weight, gate.bias.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "checkpoint/declared.h"
#include "checkpoint/experts.h"
#include "weights/weights.h"

enum { BLOCK = 32, BLOCK_BYTES = BLOCK / 2, BIAS_BYTES = 2 };

/* One fused tensor of gate and up, or of down. */
typedef struct parts {
    const char *codes, *scales, *bias;
} parts;

/* A way to name the tensors of a block. */
typedef struct naming {
    const char *experts; /* how the names of all expert tensors start */
    parts gate_up, down;
    const char *router_weight, *router_bias;
} naming;

static const naming hugging_face = {
    "experts.",
    {"experts.gate_up_proj_blocks", "experts.gate_up_proj_scales", "experts.gate_up_proj_bias"},
    {"experts.down_proj_blocks", "experts.down_proj_scales", "experts.down_proj_bias"},
    "router.weight",
    "router.bias"};
static const naming original = {"mlp",
                                {"mlp1_weight.blocks", "mlp1_weight.scales", "mlp1_bias"},
                                {"mlp2_weight.blocks", "mlp2_weight.scales", "mlp2_bias"},
                                "gate.weight",
                                "gate.bias"};

/* Where a layer's tensors stand. */
typedef struct place {
    const megamoe_checkpoint *checkpoint;
    const mm_layer *layer;
    const naming *names;
    size_t block_bytes;
} place;

/* The block that a name starts with, and how the names in it are formed. False: as in neither. */
static bool take_block(const char *name, mm_claim *claim, const naming **names) {
    mm_expert_name parsed;
    if (mm_expert_name_parse(name, &parsed)) {
        *claim = mm_claim_of(&parsed);
        *names = &hugging_face;
        return parsed.expert == MM_EXPERTS_FUSED;
    }
    static const char start[] = "block.", block[] = "mlp.";
    if (strncmp(name, start, sizeof start - 1) != 0)
        return false;
    const char *at = name + sizeof start - 1;
    if (!mm_name_take_index(&at, &claim->layer) || strncmp(at, block, sizeof block - 1) != 0)
        return false;
    claim->block_bytes = (size_t)(at - name) + sizeof block - 1;
    *names = &original;
    return true;
}

/* Biases alone make no layer: unquantized files have the same ones. */
static bool claims(const mm_tensor *tensor, mm_claim *claim) {
    const naming *names;
    if (!take_block(tensor->name, claim, &names))
        return false;
    const char *part = tensor->name + claim->block_bytes;
    return strcmp(part, names->gate_up.codes) == 0 || strcmp(part, names->gate_up.scales) == 0 ||
           strcmp(part, names->down.codes) == 0 || strcmp(part, names->down.scales) == 0;
}

static bool is_part(const parts *known, const char *part) {
    return strcmp(part, known->codes) == 0 || strcmp(part, known->scales) == 0 ||
           strcmp(part, known->bias) == 0;
}

static place place_of(const megamoe_checkpoint *checkpoint, const mm_layer *layer) {
    mm_claim claim = {0};
    const naming *names = &hugging_face;
    take_block(layer->first->name, &claim, &names);
    return (place){checkpoint, layer, names, claim.block_bytes};
}

static void name_of(const place *at, const char *part, char text[MM_NAME_TEXT]) {
    snprintf(text, MM_NAME_TEXT, "%.*s%s", (int)at->block_bytes, at->layer->first->name, part);
}

static megamoe_status find(const place *at, const char *part, const mm_tensor **tensor) {
    char name[MM_NAME_TEXT];
    name_of(at, part, name);
    *tensor = mm_checkpoint_find(at->checkpoint, name);
    if (*tensor)
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_EFORMAT, "%s: %s: this tensor is missing", at->checkpoint->path, name);
}

/*
 * The names stand for the rows' order and the activation in gpt-oss alone; the method stands for
 * neither.
 */
static megamoe_status check(const megamoe_checkpoint *checkpoint, const mm_layer *layer) {
    static const char format[] = "gpt-oss MXFP4";
    const char *model_type = NULL;
    MM_TRY(mm_config_string(&checkpoint->config, "model_type", &model_type));
    if (model_type && strcmp(model_type, "gpt_oss") != 0)
        return mm_fail(
            MEGAMOE_EUNSUPPORTED,
            "%s: %s: is named as in gpt-oss, but model_type of %s is \"%s\"; whether its "
            "gate and up rows alternate is not known",
            layer->first->file->path, layer->first->name, checkpoint->config.path, model_type);
    mm_declared declared;
    MM_TRY(mm_declared_read(checkpoint, layer, &declared));
    if (declared.algorithm)
        return mm_declared_fail(layer, declared.path, "the ModelOpt algorithm", declared.algorithm,
                                format);
    if (declared.method && strcmp(declared.method, "mxfp4") != 0)
        return mm_declared_fail(layer, checkpoint->config.path, "quant_method", declared.method,
                                format);
    return MEGAMOE_OK;
}

static megamoe_status check_parts(const place *at) {
    char prefix[MM_NAME_TEXT];
    name_of(at, at->names->experts, prefix);
    size_t first;
    const size_t n = mm_checkpoint_find_prefix(at->checkpoint, prefix, &first);
    for (size_t i = first; i < first + n; i++) {
        const mm_tensor *tensor = at->checkpoint->tensors[i];
        const char *part = tensor->name + at->block_bytes;
        if (!is_part(&at->names->gate_up, part) && !is_part(&at->names->down, part))
            return mm_fail(MEGAMOE_EUNSUPPORTED,
                           "%s: %s: unknown tensor beside the experts of layer %" PRId32
                           " (%s); it may change what they mean",
                           tensor->file->path, tensor->name, at->layer->index,
                           at->layer->family->name);
    }
    return MEGAMOE_OK;
}

/* From the shape of the codes of gate and up, and from the config, which must agree. */
static megamoe_status describe(const place *at, megamoe_layer_desc *desc) {
    const megamoe_checkpoint *checkpoint = at->checkpoint;
    const mm_config *config = &checkpoint->config;
    const mm_tensor *codes;
    MM_TRY(find(at, at->names->gate_up.codes, &codes));
    MM_TRY(mm_tensor_expect_rank(codes, "U8", 4));
    if (codes->shape[1] % 2 != 0 || codes->shape[3] != BLOCK_BYTES) {
        char text[MM_SHAPE_TEXT];
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s: its shape is %s; it must be [experts, an even number of rows, "
                       "blocks, %d]",
                       codes->file->path, codes->name,
                       mm_shape_text(codes->shape, codes->rank, text), BLOCK_BYTES);
    }
    *desc = (megamoe_layer_desc)MEGAMOE_INIT(megamoe_layer_desc);
    desc->layer = at->layer->index;
    desc->format = MEGAMOE_FORMAT_MXFP4;
    desc->has_bias = true;
    const int64_t blocks = codes->shape[2] < INT32_MAX ? codes->shape[2] : INT32_MAX;
    const mm_gate_shape shape = {
        .fused = codes->shape[0], .rows = codes->shape[1] / 2, .row_bytes = blocks * BLOCK_BYTES};
    MM_TRY(mm_config_sizes(checkpoint, codes, shape, "intermediate_size", desc));
    const char *key;
    int32_t stated;
    MM_TRY(mm_config_experts(config, &stated, &key));
    MM_TRY(mm_config_agree(checkpoint, key, stated, codes, shape.fused));
    desc->experts = shape.fused < INT32_MAX ? (int32_t)shape.fused : INT32_MAX;
    MM_TRY(mm_config_int(config, "experts_per_token", &desc->topk));
    MM_TRY(mm_config_int(config, "num_experts_per_tok", &desc->topk));
    MM_TRY(mm_activation_read(checkpoint, at->layer, &desc->activation));
    char where[1024];
    snprintf(where, sizeof where, "%s: %s", codes->file->path, codes->name);
    return mm_desc_check(desc, MEGAMOE_EFORMAT, where);
}

/* The matrices whose rows take turns in one tensor: `turns` of them for each expert. */
static megamoe_status fill(const place *at, const parts *names, megamoe_projection projection,
                           size_t turns, mm_layer_tensors *tensors) {
    const int64_t rows = (int64_t)turns * mm_rows(&tensors->desc, projection);
    const int64_t columns = mm_columns(&tensors->desc, projection);
    const int64_t experts = tensors->desc.experts, blocks = columns / BLOCK;
    const mm_tensor *codes, *scales, *bias;
    MM_TRY(find(at, names->codes, &codes));
    MM_TRY(find(at, names->scales, &scales));
    MM_TRY(find(at, names->bias, &bias));
    MM_TRY(mm_tensor_expect(codes, "U8", 4, (int64_t[]){experts, rows, blocks, BLOCK_BYTES}));
    MM_TRY(mm_tensor_expect(scales, "U8", 3, (int64_t[]){experts, rows, blocks}));
    MM_TRY(mm_tensor_expect(bias, "BF16", 2, (int64_t[]){experts, rows}));
    const size_t codes_row = (size_t)columns / 2, scales_row = (size_t)blocks;
    for (size_t expert = 0; expert < (size_t)experts; expert++)
        for (size_t turn = 0; turn < turns; turn++) {
            const size_t row = expert * (size_t)rows + turn;
            const size_t matrix = expert * 3 + (size_t)projection + turn;
            tensors->matrices[matrix] = (megamoe_matrix){
                .codes_stride = turns * codes_row,
                .scales_stride = turns * scales_row,
                .bias_dtype = MEGAMOE_DTYPE_BF16,
                .bias_stride = turns * BIAS_BYTES,
            };
            tensors->sources[matrix] = (mm_matrix_source){.codes = codes,
                                                          .codes_at = row * codes_row,
                                                          .scales = scales,
                                                          .scales_at = row * scales_row,
                                                          .bias = bias,
                                                          .bias_at = row * BIAS_BYTES};
        }
    return MEGAMOE_OK;
}

static megamoe_status weights(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                              mm_layer_tensors *tensors) {
    const place at = place_of(checkpoint, layer);
    MM_TRY(check_parts(&at));
    MM_TRY(describe(&at, &tensors->desc));
    const mm_experts experts = {
        .checkpoint = checkpoint, .layer = layer, .like = {.expert = MM_EXPERTS_FUSED}};
    MM_TRY(mm_layer_tensors_reserve(&experts, tensors));
    MM_TRY(fill(&at, &at.names->gate_up, MEGAMOE_GATE, 2, tensors));
    return fill(&at, &at.names->down, MEGAMOE_DOWN, 1, tensors);
}

megamoe_status mm_gpt_oss_router(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                                 const char *weight_name, const char *bias_name,
                                 megamoe_router_desc *desc, megamoe_router **router) {
    mm_router_tensors tensors = {.weight = mm_checkpoint_find(checkpoint, weight_name),
                                 .linear_bias = mm_checkpoint_find(checkpoint, bias_name)};
    if (!tensors.weight)
        return mm_fail(MEGAMOE_ENOTFOUND, "%s: %s: layer %" PRId32 " has no router here",
                       checkpoint->path, weight_name, layer->index);
    if (!checkpoint->config.root)
        return mm_fail(MEGAMOE_ENOTFOUND,
                       "%s: there is no config.json beside it; the router of layer %" PRId32
                       " needs its num_experts_per_tok",
                       checkpoint->path, layer->index);
    if (!tensors.linear_bias)
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s: this tensor is missing", checkpoint->path,
                       bias_name);
    MM_TRY(mm_config_int(&checkpoint->config, "experts_per_token", &desc->topk));
    MM_TRY(mm_config_int(&checkpoint->config, "num_experts_per_tok", &desc->topk));
    if (desc->topk == 0)
        return mm_fail(MEGAMOE_ENOTFOUND,
                       "%s: num_experts_per_tok is missing; the router of layer %" PRId32
                       " needs it",
                       checkpoint->config.path, layer->index);
    desc->rule = MEGAMOE_ROUTER_SOFTMAX_SELECTED;
    return mm_router_from_tensors(&tensors, desc, router);
}

static megamoe_status router(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                             megamoe_router **router) {
    const place at = place_of(checkpoint, layer);
    char weight_name[MM_NAME_TEXT], bias_name[MM_NAME_TEXT];
    name_of(&at, at.names->router_weight, weight_name);
    name_of(&at, at.names->router_bias, bias_name);
    megamoe_layer_desc sizes;
    MM_TRY(describe(&at, &sizes));
    megamoe_router_desc desc = MEGAMOE_INIT(megamoe_router_desc);
    desc.hidden = sizes.hidden;
    desc.experts = sizes.experts;
    return mm_gpt_oss_router(checkpoint, layer, weight_name, bias_name, &desc, router);
}

const mm_family mm_gpt_oss = {
    .name = "gpt-oss", .claims = claims, .check = check, .weights = weights, .router = router};
