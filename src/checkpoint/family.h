/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A family: how a kind of checkpoint names and stores the experts and routers of its layers.
 * To add one, write its file and enter it in the table of families.c.
 */
#ifndef MM_CHECKPOINT_FAMILY_H
#define MM_CHECKPOINT_FAMILY_H

#include "checkpoint/checkpoint.h"
#include "megamoe/checkpoint.h"
#include "weights/weights.h"

/* A tensor that a family takes for an expert tensor in its format. */
typedef struct mm_claim {
    int32_t layer;
    size_t block_bytes; /* the start of the name that all tensors of this layer share */
} mm_claim;

/* The tensors of a matrix, and where in their bytes its first row begins. */
typedef struct mm_matrix_source {
    const mm_tensor *codes, *scales, *bias; /* bias: NULL if there is none */
    uint64_t codes_at, scales_at, bias_at;
} mm_matrix_source;

/* What a family makes of a layer. Zero-initialised is empty. */
typedef struct mm_layer_tensors {
    megamoe_layer_desc desc;
    megamoe_matrix *matrices;  /* experts * 3; their pointers stay NULL */
    mm_matrix_source *sources; /* one for each matrix */
    mm_unpack_fn unpack;       /* of matrices in blocks, which codes and codes_at show; else NULL */
} mm_layer_tensors;

typedef struct mm_wide_layer mm_wide_layer;

struct mm_family {
    const char *name; /* megamoe_checkpoint_info.family; NULL: recognised but not run */

    /*
     * Whether the tensor's name and dtype are this family's. A layer goes to the family that claims
     * most of its tensors; what is wrong with the others is said when its weights are taken.
     */
    bool (*claims)(const mm_tensor *tensor, mm_claim *claim);

    /* Compares what the config says of the layer's format with what the tensors are. */
    megamoe_status (*check)(const megamoe_checkpoint *checkpoint, const mm_layer *layer);

    /* Fills `tensors`; the caller frees what they own, also after a failure. */
    megamoe_status (*weights)(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                              mm_layer_tensors *tensors);

    /*
     * Of families whose experts are wider than 4 bits, which `weights` refuses: fills `wide` for
     * quantizing to `format`; the caller frees its arrays, also after a failure. Else NULL.
     */
    megamoe_status (*wide)(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                           megamoe_format format, mm_wide_layer *wide);

    megamoe_status (*router)(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                             megamoe_router **router);
};

extern const mm_family mm_deepseek_v4;
extern const mm_family mm_modelopt;
extern const mm_family mm_compressed_tensors;
extern const mm_family mm_gpt_oss;
extern const mm_family mm_mimo;
extern const mm_family mm_fp8;
extern const mm_family mm_bf16;
extern const mm_family mm_gguf;
/* Formats that are recognised so that the message can name them. */
extern const mm_family mm_refused;
extern const mm_family mm_gguf_refused;

enum { MM_FAMILIES = 10 };
extern const mm_family *const mm_families[MM_FAMILIES];

#endif
