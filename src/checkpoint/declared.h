/* SPDX-License-Identifier: Apache-2.0 */
/* What the configs say of the format of a layer's experts. */
#ifndef MM_CHECKPOINT_DECLARED_H
#define MM_CHECKPOINT_DECLARED_H

#include "checkpoint/checkpoint.h"

typedef struct mm_declared {
    const char *expert_dtype; /* DeepSeek's key: "fp4", "fp8"; NULL: silent */
    const char *algorithm;    /* ModelOpt's, such as "NVFP4"; NULL: silent about this layer */
    int32_t group_size;       /* beside the algorithm; 0: silent */
    const char *method;       /* quant_method; NULL: silent */
    const char *path;         /* of the file that gives the algorithm */
} mm_declared;

/*
 * In a repository of mixed precision quantized_layers decides for each layer, and a layer that it
 * does not list keeps the format it had; else moe_quant_algo, else quant_algo.
 */
MEGAMOE_CHECKED megamoe_status mm_declared_read(const megamoe_checkpoint *checkpoint,
                                                const mm_layer *layer, mm_declared *declared);

/* MEGAMOE_EFORMAT: the config says `value` for `key`, but the layer's tensors are `format`. */
MEGAMOE_CHECKED megamoe_status mm_declared_fail(const mm_layer *layer, const char *path,
                                                const char *key, const char *value,
                                                const char *format);

/* The check of families whose tensors are not FP4: MEGAMOE_EFORMAT where expert_dtype says so. */
MEGAMOE_CHECKED megamoe_status mm_declared_not_fp4(const megamoe_checkpoint *checkpoint,
                                                   const mm_layer *layer);

#endif
