/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the metadata of a GGUF file say of its model. Keys begin with the architecture's name
 * ("gpt-oss.expert_count"); what an architecture always does has no key.
 */
#ifndef MM_CHECKPOINT_GGUF_MODEL_H
#define MM_CHECKPOINT_GGUF_MODEL_H

#include "checkpoint/checkpoint.h"

typedef struct mm_gguf_architecture {
    const char *name;
    const char *model_type;  /* in a config.json */
    const char *experts_key; /* of that, for the number of experts */
    /* Where expert_gating_func is silent; 0: sigmoid if there is a selection bias, else softmax. */
    megamoe_router_rule rule;
    bool normalizes; /* where expert_weights_norm is silent */
    bool limits;     /* swiglu_clamp_exp, a number for each layer, limits the activation */
    megamoe_activation activation;
} mm_gguf_architecture;

/* MEGAMOE_EUNSUPPORTED for one that is not known: its activation may be any. */
MEGAMOE_CHECKED megamoe_status mm_gguf_architecture_of(const megamoe_checkpoint *checkpoint,
                                                       const mm_gguf_architecture **architecture);

/* A key of a layer's model. */
typedef struct mm_gguf_key {
    char text[96];
    int32_t layer;
} mm_gguf_key;

mm_gguf_key mm_gguf_key_of(const mm_gguf_architecture *architecture, const char *name,
                           int32_t layer);

/*
 * Its value, or the layer's element of a list. These leave *value as it is when the key is absent,
 * or the list ends before the layer; a wrong type or range is MEGAMOE_EFORMAT. Integers are
 * 0..INT32_MAX, numbers finite.
 */
MEGAMOE_CHECKED megamoe_status mm_gguf_int(const megamoe_checkpoint *checkpoint,
                                           const mm_gguf_key *key, int32_t *value);
MEGAMOE_CHECKED megamoe_status mm_gguf_float(const megamoe_checkpoint *checkpoint,
                                             const mm_gguf_key *key, float *value);

/* Whether a layer is a draft block, which is numbered like a layer. */
bool mm_gguf_is_draft(const megamoe_checkpoint *checkpoint, const mm_layer *layer);

/* gguf_router.c */
MEGAMOE_CHECKED megamoe_status mm_gguf_router(const megamoe_checkpoint *checkpoint,
                                              const mm_layer *layer, megamoe_router **router);

#endif
