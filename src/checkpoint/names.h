/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Names of expert tensors as most checkpoints form them:
 *
 *   block  [model.|language_model.|...]layers.{L}.{ffn|mlp|block_sparse_moe}.
 *   one    {block}experts.{E}.{gate_proj|up_proj|down_proj|w1|w3|w2}.{part}
 *   fused  {block}experts.{part}
 *
 * Draft blocks (mtp.*) and shared experts have other names and do not parse.
 */
#ifndef MM_CHECKPOINT_NAMES_H
#define MM_CHECKPOINT_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "megamoe/weights.h"

enum {
    MM_NAME_TEXT = 256, /* room for every name that parses, with a part of ours */
    MM_EXPERTS_FUSED = -1
};

typedef struct mm_expert_name {
    int32_t layer;
    size_t block_bytes;            /* length of the block at the start of the name */
    int32_t expert;                /* MM_EXPERTS_FUSED: the tensor holds all experts */
    megamoe_projection projection; /* of one expert */
    bool numbered;                 /* w1, w3, w2 rather than gate_proj, up_proj, down_proj */
    const char *part;              /* the rest of the name, such as "weight" */
} mm_expert_name;

bool mm_expert_name_parse(const char *name, mm_expert_name *parsed);

/*
 * The name of another tensor of the same layer; `like` was parsed from `name`. For a fused layer
 * `expert` and `projection` are ignored.
 */
void mm_expert_name_form(const char *name, const mm_expert_name *like, int32_t expert,
                         megamoe_projection projection, const char *part, char text[MM_NAME_TEXT]);

/* The name of a tensor of the same block that is no expert's, such as "gate.weight". */
void mm_block_name_form(const char *name, const mm_expert_name *like, const char *part,
                        char text[MM_NAME_TEXT]);

/* Takes a decimal without leading zeros, and the dot behind it, from the start of *at. */
bool mm_name_take_index(const char **at, int32_t *index);

/* What may stand before "layers."; NULL ends the list. */
extern const char *const mm_name_prefixes[];

#endif
