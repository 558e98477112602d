/* SPDX-License-Identifier: Apache-2.0 */
/* An open checkpoint as its families see it: tensors by name, the config, the layers. */
#ifndef MM_CHECKPOINT_CHECKPOINT_H
#define MM_CHECKPOINT_CHECKPOINT_H

#include <pthread.h>
#include <stdatomic.h>

#include "checkpoint/config.h"
#include "checkpoint/safetensors.h"
#include "megamoe/checkpoint.h"

typedef struct mm_family mm_family;

typedef struct mm_layer {
    int32_t index;
    const mm_family *family;
    const mm_tensor
        *first; /* an expert tensor that its family claims: shows how names are formed */
} mm_layer;

struct megamoe_checkpoint {
    atomic_int users; /* the handle and every megamoe_weights taken from it */
    char *path;       /* as it was opened */
    mm_tensor_file *files;
    size_t n_files;
    const mm_tensor **tensors; /* ascending by name; of a sharded one, those that the index lists */
    size_t n_tensors;
    pthread_mutex_t copies_lock;
    void **copies; /* bytes of tensors[i], once megamoe_checkpoint_tensor has been asked for it */
    mm_config config;
    mm_layer *layers; /* ascending by index */
    int32_t n_layers;
    const mm_family *family; /* NULL: opened for its tensors alone */
};

/* NULL if there is none. */
const mm_tensor *mm_checkpoint_find(const megamoe_checkpoint *checkpoint, const char *name);

/* The tensors whose names start with `prefix`: count of them, the first at tensors[*first]. */
size_t mm_checkpoint_find_prefix(const megamoe_checkpoint *checkpoint, const char *prefix,
                                 size_t *first);

/* The layer with the model's index, or MEGAMOE_ENOTFOUND. */
MEGAMOE_CHECKED megamoe_status mm_checkpoint_find_layer(const megamoe_checkpoint *checkpoint,
                                                        int32_t index, const mm_layer **layer);

struct mm_layer_tensors;

/*
 * Weights of what a family has made of a layer. They keep the checkpoint alive and take the sources
 * of `tensors`, from which they are read. Or else, if it is not NULL, they own `memory` of
 * mm_reserve, which the matrices point into; on failure it is released too.
 */
MEGAMOE_CHECKED megamoe_status mm_checkpoint_own(const megamoe_checkpoint *checkpoint,
                                                 struct mm_layer_tensors *tensors, void *memory,
                                                 size_t memory_bytes, megamoe_weights **weights);

/* shards.c: opens the files of a path and fills files and tensors. */
MEGAMOE_CHECKED megamoe_status mm_checkpoint_open_files(const char *path,
                                                        megamoe_checkpoint *checkpoint);
MEGAMOE_CHECKED megamoe_status mm_checkpoint_open_file(const char *path,
                                                       megamoe_checkpoint *checkpoint);

/*
 * Lists the tensors of the open files; with a weight_map (NULL: without) those that it maps to the
 * file they are in.
 */
MEGAMOE_CHECKED megamoe_status mm_checkpoint_list_tensors(megamoe_checkpoint *checkpoint,
                                                          const json_t *weight_map);

/* layers.c: gives every layer its family and checks the config against them. */
MEGAMOE_CHECKED megamoe_status mm_checkpoint_find_layers(megamoe_checkpoint *checkpoint);

#endif
