/* SPDX-License-Identifier: Apache-2.0 */
/* Public models: geometry, tensor names and config. */
#ifndef MODELS_H
#define MODELS_H

#include <jansson.h>
#include <megamoe/megamoe.h>

/* How a model names its expert layers. */
typedef enum model_naming {
    NAMES_DEEPSEEK_V4,
    NAMES_DEEPSEEK_V3,
    NAMES_QWEN3,
    NAMES_GPT_OSS
} model_naming;

typedef struct model {
    const char *name;
    const char *architecture;
    const char *type;      /* model_type of config.json */
    const char *text_type; /* model_type of the nested text_config; NULL if config.json is flat */
    model_naming naming;
    megamoe_format published;
    int32_t hidden, intermediate, experts, topk;
    int32_t layers, dense_layers; /* the first `dense_layers` have no experts */
    int32_t dense_intermediate;
    int32_t hash_layers; /* the first ones, of the layers with experts */
    int32_t vocabulary;
    megamoe_router_rule rule;
    int32_t groups, groups_kept; /* 0: the router has none */
    float scaling;               /* of the routing weights */
    float limit;                 /* of the activation; 0: none */
    float alpha, offset;         /* of the activation */
    bool has_bias;               /* of experts and router */
    int32_t quantization_block;  /* side of the blocks of the dense FP8 weights */
    bool names_expert_dtype;     /* config.json says "expert_dtype": "fp4" */
} model;

/* The i-th model, NULL behind the last. */
const model *model_at(size_t i);

/* NULL if there is none of that name. */
const model *model_find(const char *name);

/* A smaller (or larger) model: the rule of `synth --scale`. */
model model_scaled(const model *full, double scale);

/* Whether checkpoints of the model exist in a format. */
bool model_has_format(const model *m, megamoe_format format);

megamoe_layer_desc model_layer(const model *m, int32_t layer, megamoe_format format);

enum { MODEL_NAME_BYTES = 128 };

/* The name of an expert's matrix without ".weight", or of a router's part. */
void model_matrix_name(const model *m, int32_t layer, int32_t expert, megamoe_projection projection,
                       char name[MODEL_NAME_BYTES]);
void model_router_name(const model *m, int32_t layer, const char *part,
                       char name[MODEL_NAME_BYTES]);

/*
 * Whether one tensor holds a matrix of all experts, and its name without "_blocks": gate and up,
 * whose rows take turns, are one matrix here.
 */
bool model_is_fused(const model *m);
void model_fused_name(int32_t layer, megamoe_projection projection, char name[MODEL_NAME_BYTES]);

/* The part of a router that biases selection: "bias" or "e_score_correction_bias"; NULL if none. */
const char *model_selection_bias(const model *m, int32_t layer);

/* What GGUF files call the model's architecture. */
const char *model_gguf_architecture(const model *m);

/* config.json of a checkpoint with the layers first_layer..first_layer+n-1. NULL: out of memory. */
json_t *model_config(const model *m, megamoe_format format, int32_t first_layer, int32_t n);

/* hf_quant_config.json, which ModelOpt writes beside it. */
json_t *model_quant_config(const model *m, int32_t first_layer, int32_t n);

#endif
