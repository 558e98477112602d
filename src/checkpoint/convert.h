/* SPDX-License-Identifier: Apache-2.0 */
/* Writing a layer's experts as another family names and stores them. */
#ifndef MM_CHECKPOINT_CONVERT_H
#define MM_CHECKPOINT_CONVERT_H

#include <jansson.h>

#include "checkpoint/experts.h"
#include "checkpoint/family.h"

/* How a family that can be written stores a matrix, in one format. */
typedef struct mm_target {
    const mm_family *family;
    megamoe_format format;
    bool fused;      /* all experts in one tensor, gate and up rows in turn */
    bool reciprocal; /* the global scale is a divisor of shape [1] */
    const char *codes, *codes_dtype;
    const char *scales, *scales_dtype;
    const char *global; /* NULL: none */
} mm_target;

/* NULL if the family is not written in this format; with format 0 the first that it has. */
const mm_target *mm_target_find(const char *family, megamoe_format format);

/* Families that are written, for messages. */
#define MM_TARGET_FAMILIES "deepseek-v4, modelopt-nvfp4, compressed-tensors, gpt-oss"

enum { MM_BLOCK_TEXT = 96 }; /* room for every block of names.h */

/* A router's tensor, and its name behind the block of the layer. */
typedef struct mm_router_copy {
    const mm_tensor *from;
    const char *part;
} mm_router_copy;

enum { MM_GGUF_ROUTER_PARTS = 4 };

/* A layer to be written. Zero-initialised is closed. */
typedef struct mm_conversion {
    const megamoe_checkpoint *checkpoint;
    const mm_layer *layer;
    const mm_target *target;
    mm_layer_tensors source;
    megamoe_weights *weights;  /* the same matrices, whose bytes are read by holding experts */
    char block[MM_BLOCK_TEXT]; /* what the names of its tensors begin with */
    mm_expert_name like;       /* how the rest of an expert's name is formed */
    int16_t *global_exponents; /* MXFP4 to NVFP4: the global scale of each matrix is 2^this */
    /* Of GGUF; routers of other sources have names that stay, or almost. */
    mm_router_copy router[MM_GGUF_ROUTER_PARTS];
    size_t n_router;
} mm_conversion;

/*
 * Reads the layer and makes sure that the target holds it without loss; a failure says which tensor
 * and value it is that it cannot hold. Needs mm_conversion_close in any case.
 */
MEGAMOE_CHECKED megamoe_status mm_conversion_open(const megamoe_checkpoint *checkpoint,
                                                  const mm_layer *layer, const mm_target *target,
                                                  mm_conversion *conversion);
void mm_conversion_close(mm_conversion *conversion);

/* A divisor whose reciprocal, rounded to FP32, is `global`. False if there is none. */
bool mm_reciprocal_of(float global, float *divisor);

/* One tensor of a file. */
typedef struct mm_converted {
    enum { MM_CODES, MM_SCALES, MM_GLOBAL, MM_BIAS, MM_COPY } what;
    int32_t expert;
    megamoe_projection projection;
    const mm_tensor *copied; /* MM_COPY */
    char name[MM_NAME_TEXT];
} mm_converted;

typedef struct mm_converted_file {
    const mm_conversion *conversion;
    mm_converted *tensors;
    megamoe_tensor_spec *specs; /* specs[i].name is tensors[i].name */
    size_t n;
    uint64_t bytes;
    int32_t held; /* the expert that is in memory, for the tensors that follow; -1: none */
} mm_converted_file;

/*
 * Lists the tensors of experts first..end-1, which are all of them where the target is fused, and
 * those of the router with expert 0. Needs mm_converted_file_close in any case.
 */
MEGAMOE_CHECKED megamoe_status mm_converted_file_open(const mm_conversion *conversion,
                                                      int32_t first, int32_t end,
                                                      mm_converted_file *file);
void mm_converted_file_close(mm_converted_file *file);

/* A megamoe_tensor_fill_fn; `user` is a mm_converted_file. */
megamoe_status mm_converted_fill(void *user, size_t index, void *data, uint64_t bytes);

/* The router of a layer, which the caller closes; NULL if it has none. */
MEGAMOE_CHECKED megamoe_status mm_router_if_any(const megamoe_checkpoint *checkpoint, int32_t layer,
                                                megamoe_router **router);

/*
 * convert_gguf.c: the block, the names and the router of a layer of a GGUF file whose `source` has
 * been read. Refuses biases and tensors of the router that no family holds in such a model.
 */
MEGAMOE_CHECKED megamoe_status mm_gguf_conversion(mm_conversion *conversion);

/*
 * Adds to the empty object `config` what a config.json says of the model. Refuses layers that no
 * single config describes.
 */
MEGAMOE_CHECKED megamoe_status mm_gguf_config(const megamoe_checkpoint *checkpoint, json_t *config);

/*
 * convert_config.c: config.json of the converted checkpoint, and hf_quant_config.json, which is
 * NULL except for ModelOpt. Owns: the caller calls json_decref on both.
 */
MEGAMOE_CHECKED megamoe_status mm_converted_config(const megamoe_checkpoint *checkpoint,
                                                   const mm_target *target, json_t **config,
                                                   json_t **quant);

#endif
