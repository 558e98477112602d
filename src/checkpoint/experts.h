/* SPDX-License-Identifier: Apache-2.0 */
/* What families have in common, most of it for those that name their experts as in names.h. */
#ifndef MM_CHECKPOINT_EXPERTS_H
#define MM_CHECKPOINT_EXPERTS_H

#include "checkpoint/family.h"
#include "checkpoint/names.h"

/* The expert tensors of a layer. */
typedef struct mm_experts {
    const megamoe_checkpoint *checkpoint;
    const mm_layer *layer;
    mm_expert_name like; /* how their names are formed, with layer->first */
    bool has_bias;       /* the model is gpt-oss: each projection of an expert has a "bias" */
    int32_t named;       /* one more than the highest expert in a name; 0 if fused */
    size_t tensors;
} mm_experts;

/* A claim on a tensor whose name parses. */
mm_claim mm_claim_of(const mm_expert_name *name);

/*
 * Looks through all tensors of the layer. Each must hold one of `parts` (NULL ends the list), or be
 * a bias of gpt-oss: what else stands beside an expert may change what its weights mean.
 */
MEGAMOE_CHECKED megamoe_status mm_experts_scan(const megamoe_checkpoint *checkpoint,
                                               const mm_layer *layer, const char *const *parts,
                                               mm_experts *experts);

/* An expert's tensor, or MEGAMOE_EFORMAT naming the one that is missing. */
MEGAMOE_CHECKED megamoe_status mm_experts_find(const mm_experts *experts, int32_t expert,
                                               megamoe_projection projection, const char *part,
                                               const mm_tensor **tensor);

/* MEGAMOE_EFORMAT unless the tensor has this dtype and shape. */
MEGAMOE_CHECKED megamoe_status mm_tensor_expect(const mm_tensor *tensor, const char *dtype,
                                                int32_t rank, const int64_t *shape);
/* The same for the dtype and rank alone. */
MEGAMOE_CHECKED megamoe_status mm_tensor_expect_rank(const mm_tensor *tensor, const char *dtype,
                                                     int32_t rank);

/* What the tensor of gate codes shows. */
typedef struct mm_gate_shape {
    int64_t row_bytes; /* hidden / 2 */
    int64_t rows;      /* intermediate */
    int64_t fused;     /* experts in the tensor; 0: one tensor for each expert */
} mm_gate_shape;

/* MEGAMOE_EFORMAT unless a number of the config is that of a tensor, or 0: the config is silent. */
MEGAMOE_CHECKED megamoe_status mm_config_agree(const megamoe_checkpoint *checkpoint,
                                               const char *key, int32_t stated,
                                               const mm_tensor *tensor, int64_t seen);

/* Fills hidden and intermediate from the shape and compares them with hidden_size and the key. */
MEGAMOE_CHECKED megamoe_status mm_config_sizes(const megamoe_checkpoint *checkpoint,
                                               const mm_tensor *gate_codes, mm_gate_shape shape,
                                               const char *intermediate_key,
                                               megamoe_layer_desc *desc);

/* Fills the description of the layer from that shape and from the config, which must agree. */
MEGAMOE_CHECKED megamoe_status mm_experts_describe(const mm_experts *experts,
                                                   const mm_tensor *gate_codes, mm_gate_shape shape,
                                                   megamoe_format format, megamoe_layer_desc *desc);

/*
 * Room for the matrices of tensors->desc, to be filled in the order of experts up to the first
 * tensor that is missing: a number that is only stated makes no room.
 */
MEGAMOE_CHECKED megamoe_status mm_layer_tensors_reserve(const mm_experts *experts,
                                                        mm_layer_tensors *tensors);

/* Adds an expert's bias to its matrix and source, if the model has biases. */
MEGAMOE_CHECKED megamoe_status mm_experts_bias(const mm_experts *experts, int32_t expert,
                                               megamoe_projection projection,
                                               mm_layer_tensors *tensors);

/* activation.c: by the model's type and its config. */
MEGAMOE_CHECKED megamoe_status mm_activation_read(const megamoe_checkpoint *checkpoint,
                                                  const mm_layer *layer,
                                                  megamoe_activation *activation);

/* Whether model_type says gpt-oss, whose experts and routers have biases under any names. */
MEGAMOE_CHECKED megamoe_status mm_is_gpt_oss(const megamoe_checkpoint *checkpoint, bool *is);

/* Whether the model is DeepSeek-V4: by its type or, where no config names one, by its names. */
MEGAMOE_CHECKED megamoe_status mm_is_deepseek_v4(const megamoe_checkpoint *checkpoint,
                                                 const mm_layer *layer, bool *is);

/* The number of experts by the config; 0 if it is silent. *key names the key that says so. */
MEGAMOE_CHECKED megamoe_status mm_config_experts(const mm_config *config, int32_t *experts,
                                                 const char **key);

/* The tensors of a router; NULL where a part is absent. */
typedef struct mm_router_tensors {
    const mm_tensor *weight;         /* BF16 or F32 [experts, hidden] */
    const mm_tensor *selection_bias; /* F32 or BF16 [experts] */
    const mm_tensor *linear_bias;    /* the same */
    const mm_tensor *hash_table;     /* I64 or I32 [vocabulary, topk] */
} mm_router_tensors;

/* Checks the tensors against *desc, whose hash_vocab is filled in here, and copies them. */
MEGAMOE_CHECKED megamoe_status mm_router_from_tensors(const mm_router_tensors *tensors,
                                                      megamoe_router_desc *desc,
                                                      megamoe_router **router);

/*
 * gpt-oss's router: the names are those of its tensors. Of `desc` the hidden size, experts and
 * top-k are filled in; 0 means that the config does not say.
 */
MEGAMOE_CHECKED megamoe_status mm_gpt_oss_router(const megamoe_checkpoint *checkpoint,
                                                 const mm_layer *layer, const char *weight_name,
                                                 const char *bias_name, megamoe_router_desc *desc,
                                                 megamoe_router **router);

/* routers.c: the routers of models that name their experts as in names.h. */
MEGAMOE_CHECKED megamoe_status mm_router_read(const megamoe_checkpoint *checkpoint,
                                              const mm_layer *layer, megamoe_router **router);

#endif
