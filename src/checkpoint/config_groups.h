/* SPDX-License-Identifier: Apache-2.0 */
/* What the config of compressed-tensors says of a layer's experts. */
#ifndef MM_CHECKPOINT_CONFIG_GROUPS_H
#define MM_CHECKPOINT_CONFIG_GROUPS_H

#include "checkpoint/checkpoint.h"

/* A format as its config groups spell it. */
typedef struct mm_packed_format {
    const char *name;   /* for messages: "NVFP4" */
    const char *format; /* "nvfp4-pack-quantized" */
    int32_t group_size;
    bool must_be_declared; /* its tensors alone do not tell it from others */
} mm_packed_format;

/*
 * Compares `is`, which the tensors of the layer are in, with the config. Groups may overlap, and
 * the first that matches a module need not be the one that was used: one of them must agree.
 */
MEGAMOE_CHECKED megamoe_status mm_config_groups_check(const megamoe_checkpoint *checkpoint,
                                                      const mm_layer *layer,
                                                      const mm_packed_format *is);

#endif
