/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/experts.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "weights/weights.h"

static const char bias_part[] = "bias";

mm_claim mm_claim_of(const mm_expert_name *name) {
    return (mm_claim){name->layer, name->block_bytes};
}

static bool known_part(const char *part, const char *const *parts) {
    for (; *parts; parts++)
        if (strcmp(part, *parts) == 0)
            return true;
    return false;
}

megamoe_status mm_experts_scan(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                               const char *const *parts, mm_experts *experts) {
    *experts = (mm_experts){.checkpoint = checkpoint, .layer = layer};
    MM_TRY(mm_is_gpt_oss(checkpoint, &experts->has_bias));
    mm_expert_name_parse(layer->first->name, &experts->like);
    char prefix[MM_NAME_TEXT];
    mm_block_name_form(layer->first->name, &experts->like, "experts.", prefix);
    size_t first;
    experts->tensors = mm_checkpoint_find_prefix(checkpoint, prefix, &first);
    for (size_t i = first; i < first + experts->tensors; i++) {
        const mm_tensor *tensor = checkpoint->tensors[i];
        mm_expert_name name;
        const bool parsed = mm_expert_name_parse(tensor->name, &name);
        const bool bias = experts->has_bias && parsed && strcmp(name.part, bias_part) == 0;
        if (!parsed || (!bias && !known_part(name.part, parts)))
            return mm_fail(MEGAMOE_EUNSUPPORTED,
                           "%s: %s: unknown tensor beside the experts of layer %" PRId32
                           " (%s); it may change what they mean",
                           tensor->file->path, tensor->name, layer->index, layer->family->name);
        const mm_expert_name *like = &experts->like;
        const bool fused = name.expert == MM_EXPERTS_FUSED;
        if (fused != (like->expert == MM_EXPERTS_FUSED) || name.numbered != like->numbered)
            return mm_fail(MEGAMOE_EFORMAT, "%s: %s: is named in another way than %s",
                           tensor->file->path, tensor->name, layer->first->name);
        if (name.expert >= experts->named && name.expert < INT32_MAX)
            experts->named = name.expert + 1;
    }
    return MEGAMOE_OK;
}

megamoe_status mm_experts_find(const mm_experts *experts, int32_t expert,
                               megamoe_projection projection, const char *part,
                               const mm_tensor **tensor) {
    char name[MM_NAME_TEXT];
    mm_expert_name_form(experts->layer->first->name, &experts->like, expert, projection, part,
                        name);
    *tensor = mm_checkpoint_find(experts->checkpoint, name);
    if (*tensor)
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_EFORMAT, "%s: %s: this tensor is missing", experts->checkpoint->path,
                   name);
}

megamoe_status mm_tensor_expect_rank(const mm_tensor *tensor, const char *dtype, int32_t rank) {
    if (strcmp(tensor->dtype->name, dtype) != 0)
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s: its dtype is %s; it must be %s",
                       tensor->file->path, tensor->name, tensor->dtype->name, dtype);
    if (tensor->rank != rank) {
        char text[MM_SHAPE_TEXT];
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s: its shape is %s; it must have %d dimensions",
                       tensor->file->path, tensor->name,
                       mm_shape_text(tensor->shape, tensor->rank, text), rank);
    }
    return MEGAMOE_OK;
}

megamoe_status mm_tensor_expect(const mm_tensor *tensor, const char *dtype, int32_t rank,
                                const int64_t *shape) {
    MM_TRY(mm_tensor_expect_rank(tensor, dtype, rank));
    if (memcmp(tensor->shape, shape, (size_t)rank * sizeof *shape) == 0)
        return MEGAMOE_OK;
    char is[MM_SHAPE_TEXT], must[MM_SHAPE_TEXT];
    return mm_fail(MEGAMOE_EFORMAT, "%s: %s: its shape is %s; it must be %s", tensor->file->path,
                   tensor->name, mm_shape_text(tensor->shape, rank, is),
                   mm_shape_text(shape, rank, must));
}

megamoe_status mm_is_deepseek_v4(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                                 bool *is) {
    static const char v4[] = "deepseek_v4";
    const char *model_type = NULL;
    MM_TRY(mm_config_string(&checkpoint->config, "model_type", &model_type));
    mm_expert_name name;
    const bool parsed = mm_expert_name_parse(layer->first->name, &name);
    const bool named = parsed && name.block_bytes >= 4 &&
                       strncmp(layer->first->name + name.block_bytes - 4, "ffn.", 4) == 0;
    *is = model_type ? strncmp(model_type, v4, sizeof v4 - 1) == 0
                     : named || layer->family == &mm_deepseek_v4;
    return MEGAMOE_OK;
}

megamoe_status mm_config_experts(const mm_config *config, int32_t *experts, const char **key) {
    static const char *const keys[] = {"n_routed_experts", "num_experts", "num_local_experts"};
    *experts = 0;
    for (size_t i = 0; i < sizeof keys / sizeof *keys && *experts == 0; i++) {
        *key = keys[i];
        MM_TRY(mm_config_int(config, *key, experts));
    }
    return MEGAMOE_OK;
}

megamoe_status mm_config_agree(const megamoe_checkpoint *checkpoint, const char *key,
                               int32_t stated, const mm_tensor *tensor, int64_t seen) {
    if (stated == 0 || stated == seen)
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_EFORMAT, "%s: %s: its shape makes %s %" PRId64 ", but %s says %" PRId32,
                   tensor->file->path, tensor->name, key, seen, checkpoint->config.path, stated);
}

megamoe_status mm_config_sizes(const megamoe_checkpoint *checkpoint, const mm_tensor *gate_codes,
                               mm_gate_shape shape, const char *intermediate_key,
                               megamoe_layer_desc *desc) {
    /* A tensor without elements can have any shape. */
    if (shape.row_bytes > INT32_MAX / 2 || shape.rows > INT32_MAX) {
        char text[MM_SHAPE_TEXT];
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s: its shape %s is larger than any layer's",
                       gate_codes->file->path, gate_codes->name,
                       mm_shape_text(gate_codes->shape, gate_codes->rank, text));
    }
    desc->hidden = (int32_t)shape.row_bytes * 2;
    desc->intermediate = (int32_t)shape.rows;
    int32_t stated_hidden = 0, stated_intermediate = 0;
    MM_TRY(mm_config_int(&checkpoint->config, "hidden_size", &stated_hidden));
    MM_TRY(mm_config_int(&checkpoint->config, intermediate_key, &stated_intermediate));
    MM_TRY(mm_config_agree(checkpoint, "hidden_size", stated_hidden, gate_codes, desc->hidden));
    return mm_config_agree(checkpoint, intermediate_key, stated_intermediate, gate_codes,
                           desc->intermediate);
}

static megamoe_status describe_sizes(const mm_experts *experts, const mm_tensor *gate_codes,
                                     mm_gate_shape shape, megamoe_layer_desc *desc) {
    const char *key = "moe_intermediate_size";
    int32_t stated = 0;
    MM_TRY(mm_config_int(&experts->checkpoint->config, key, &stated));
    /* Models whose layers are all MoE give the size of an expert under the plain key. */
    if (stated == 0 && (experts->has_bias || strstr(gate_codes->name, ".block_sparse_moe.")))
        key = "intermediate_size";
    return mm_config_sizes(experts->checkpoint, gate_codes, shape, key, desc);
}

/* The config counts the experts, or the router's rows, or else the tensors' names. */
static megamoe_status describe_experts(const mm_experts *experts, int64_t fused,
                                       megamoe_layer_desc *desc) {
    const megamoe_checkpoint *checkpoint = experts->checkpoint;
    const mm_tensor *first = experts->layer->first;
    int32_t stated;
    const char *key;
    MM_TRY(mm_config_experts(&checkpoint->config, &stated, &key));
    char name[MM_NAME_TEXT];
    mm_block_name_form(first->name, &experts->like,
                       experts->has_bias ? "router.weight" : "gate.weight", name);
    const mm_tensor *gate = mm_checkpoint_find(checkpoint, name);
    const int64_t rows = gate && gate->rank == 2 ? gate->shape[0] : 0;
    if (rows)
        MM_TRY(mm_config_agree(checkpoint, key, stated, gate, rows));
    if (fused)
        MM_TRY(mm_config_agree(checkpoint, key, stated, first, fused));
    const int64_t seen = fused ? fused : experts->named;
    if (rows && (fused ? seen != rows : seen > rows))
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s: layer %" PRId32 " has %" PRId64
                       " experts, but the router %s has %" PRId64 " rows",
                       first->file->path, first->name, experts->layer->index, seen, name, rows);
    if (stated && seen > stated)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s: layer %" PRId32 " names experts up to %" PRId64
                       ", but %s of %s is %" PRId32,
                       first->file->path, first->name, experts->layer->index, seen - 1, key,
                       checkpoint->config.path, stated);
    const int64_t count = stated ? stated : rows ? rows : seen;
    desc->experts = count < INT32_MAX ? (int32_t)count : INT32_MAX;
    return MEGAMOE_OK;
}

static megamoe_status describe_topk(const mm_experts *experts, int32_t *topk) {
    const megamoe_checkpoint *checkpoint = experts->checkpoint;
    if (experts->has_bias)
        MM_TRY(mm_config_int(&checkpoint->config, "experts_per_token", topk));
    MM_TRY(mm_config_int(&checkpoint->config, "num_experts_per_tok", topk));
    char name[MM_NAME_TEXT];
    mm_block_name_form(experts->layer->first->name, &experts->like, "gate.tid2eid", name);
    const mm_tensor *table = mm_checkpoint_find(checkpoint, name);
    if (*topk == 0 && table && table->rank == 2 && table->shape[1] <= INT32_MAX)
        *topk = (int32_t)table->shape[1];
    return MEGAMOE_OK;
}

/* Kimi-K3's experts see a projection of the hidden states, not these. */
static megamoe_status refuse_latent(const mm_experts *experts) {
    static const char *const keys[] = {"latent_moe_use_norm", "moe_latent_size"};
    const mm_config *config = &experts->checkpoint->config;
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (mm_config_has(config, keys[i]))
            return mm_fail(MEGAMOE_EUNSUPPORTED,
                           "%s: %s: the experts of layer %" PRId32
                           " lie between projections to a smaller size and back, which are not run",
                           config->path, keys[i], experts->layer->index);
    return MEGAMOE_OK;
}

megamoe_status mm_experts_describe(const mm_experts *experts, const mm_tensor *gate_codes,
                                   mm_gate_shape shape, megamoe_format format,
                                   megamoe_layer_desc *desc) {
    *desc = (megamoe_layer_desc)MEGAMOE_INIT(megamoe_layer_desc);
    desc->layer = experts->layer->index;
    desc->format = format;
    desc->has_bias = experts->has_bias;
    MM_TRY(refuse_latent(experts));
    MM_TRY(mm_activation_read(experts->checkpoint, experts->layer, &desc->activation));
    MM_TRY(describe_sizes(experts, gate_codes, shape, desc));
    MM_TRY(describe_experts(experts, shape.fused, desc));
    MM_TRY(describe_topk(experts, &desc->topk));
    char where[1024];
    snprintf(where, sizeof where, "%s: %s", gate_codes->file->path, gate_codes->name);
    return mm_desc_check(desc, MEGAMOE_EFORMAT, where);
}

megamoe_status mm_layer_tensors_reserve(const mm_experts *experts, mm_layer_tensors *tensors) {
    size_t n = (size_t)tensors->desc.experts;
    /* With fewer tensors than experts, whoever fills the matrices stops at a missing one in time.
     */
    if (experts->like.expert != MM_EXPERTS_FUSED && n > experts->tensors)
        n = experts->tensors;
    tensors->matrices = calloc(n * 3, sizeof *tensors->matrices);
    tensors->sources = calloc(n * 3, sizeof *tensors->sources);
    if (!tensors->matrices || !tensors->sources)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory for %zu experts",
                       experts->checkpoint->path, n);
    return MEGAMOE_OK;
}

megamoe_status mm_experts_bias(const mm_experts *experts, int32_t expert,
                               megamoe_projection projection, mm_layer_tensors *tensors) {
    if (!experts->has_bias)
        return MEGAMOE_OK;
    const mm_tensor *bias;
    MM_TRY(mm_experts_find(experts, expert, projection, bias_part, &bias));
    const bool f32 = strcmp(bias->dtype->name, "F32") == 0;
    MM_TRY(mm_tensor_expect(bias, f32 ? "F32" : "BF16", 1,
                            (int64_t[]){mm_rows(&tensors->desc, projection)}));
    const size_t at = (size_t)expert * 3 + (size_t)projection;
    tensors->sources[at].bias = bias;
    megamoe_matrix *matrix = &tensors->matrices[at];
    matrix->bias_dtype = f32 ? MEGAMOE_DTYPE_F32 : MEGAMOE_DTYPE_BF16;
    matrix->bias_stride = f32 ? sizeof(float) : sizeof(uint16_t);
    return MEGAMOE_OK;
}
