/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "checkpoint/checkpoint.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "checkpoint/family.h"
#include "weights/weights.h"

typedef megamoe_status (*open_files)(const char *path, megamoe_checkpoint *checkpoint);

static megamoe_status open_with(open_files open, const char *path, bool layers,
                                megamoe_checkpoint **checkpoint) {
    if (!path || !checkpoint)
        return mm_fail(MEGAMOE_EINVAL,
                       "opening a checkpoint: path and checkpoint must not be NULL");
    *checkpoint = NULL;
    megamoe_checkpoint *opened = calloc(1, sizeof *opened);
    if (!opened)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", path);
    atomic_init(&opened->users, 1);
    pthread_mutex_init(&opened->copies_lock, NULL);
    megamoe_status status = MEGAMOE_OK;
    opened->path = strdup(path);
    if (!opened->path) {
        status = mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", path);
        goto fail;
    }
    MM_TRY_GOTO(open(path, opened), fail);
    if (layers)
        MM_TRY_GOTO(mm_checkpoint_find_layers(opened), fail);
    *checkpoint = opened;
    return MEGAMOE_OK;
fail:
    megamoe_checkpoint_close(opened);
    return status;
}

megamoe_status megamoe_checkpoint_open(const char *path, megamoe_checkpoint **checkpoint) {
    return open_with(mm_checkpoint_open_files, path, true, checkpoint);
}

megamoe_status megamoe_tensors_open(const char *path, megamoe_checkpoint **checkpoint) {
    return open_with(mm_checkpoint_open_file, path, false, checkpoint);
}

void megamoe_checkpoint_close(megamoe_checkpoint *checkpoint) {
    /* Acquire and release pair up: whoever frees has seen what the other users did. */
    if (!checkpoint || atomic_fetch_sub_explicit(&checkpoint->users, 1, memory_order_acq_rel) != 1)
        return;
    for (size_t i = 0; i < checkpoint->n_files; i++)
        mm_tensor_file_close(&checkpoint->files[i]);
    free(checkpoint->files);
    for (size_t i = 0; checkpoint->copies && i < checkpoint->n_tensors; i++)
        free(checkpoint->copies[i]);
    free(checkpoint->copies);
    pthread_mutex_destroy(&checkpoint->copies_lock);
    free(checkpoint->tensors);
    free(checkpoint->layers);
    free(checkpoint->path);
    mm_config_close(&checkpoint->config);
    free(checkpoint);
}

megamoe_status megamoe_checkpoint_describe(const megamoe_checkpoint *checkpoint,
                                           megamoe_checkpoint_info *info) {
    if (!checkpoint || !info)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_checkpoint_describe: arguments must not be NULL");
    megamoe_checkpoint_info filled = MEGAMOE_INIT(megamoe_checkpoint_info);
    const json_t *model_type = json_object_get(checkpoint->config.root, "model_type");
    if (!model_type)
        model_type = json_object_get(checkpoint->config.root, "general.architecture");
    if (checkpoint->family)
        snprintf(filled.family, sizeof filled.family, "%s", checkpoint->family->name);
    if (json_is_string(model_type))
        snprintf(filled.model_type, sizeof filled.model_type, "%s", json_string_value(model_type));
    filled.files = checkpoint->n_files;
    filled.tensors = checkpoint->n_tensors;
    for (size_t i = 0; i < checkpoint->n_files; i++)
        filled.bytes += checkpoint->files[i].source.bytes;
    filled.layers = checkpoint->n_layers;
    return mm_give_struct(info, &filled, sizeof filled, "megamoe_checkpoint_info");
}

int32_t megamoe_checkpoint_layer(const megamoe_checkpoint *checkpoint, int32_t i) {
    return checkpoint && i >= 0 && i < checkpoint->n_layers ? checkpoint->layers[i].index : -1;
}

static size_t lower_bound(const megamoe_checkpoint *checkpoint, const char *name) {
    size_t low = 0, high = checkpoint->n_tensors;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (strcmp(checkpoint->tensors[middle]->name, name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Its place among the tensors, or n_tensors. */
static size_t find(const megamoe_checkpoint *checkpoint, const char *name) {
    const size_t at = lower_bound(checkpoint, name);
    if (at < checkpoint->n_tensors && strcmp(checkpoint->tensors[at]->name, name) == 0)
        return at;
    return checkpoint->n_tensors;
}

const mm_tensor *mm_checkpoint_find(const megamoe_checkpoint *checkpoint, const char *name) {
    const size_t at = find(checkpoint, name);
    return at < checkpoint->n_tensors ? checkpoint->tensors[at] : NULL;
}

size_t mm_checkpoint_find_prefix(const megamoe_checkpoint *checkpoint, const char *prefix,
                                 size_t *first) {
    const size_t bytes = strlen(prefix);
    *first = lower_bound(checkpoint, prefix);
    size_t end = *first;
    while (end < checkpoint->n_tensors &&
           strncmp(checkpoint->tensors[end]->name, prefix, bytes) == 0)
        end++;
    return end - *first;
}

static megamoe_status copy_tensor(const mm_tensor *tensor, void **copy) {
    void *bytes = malloc(tensor->bytes ? tensor->bytes : 1);
    if (!bytes)
        return mm_fail(MEGAMOE_ENOMEM, "%s: %s: out of memory for its %" PRIu64 " bytes",
                       tensor->file->path, tensor->name, tensor->bytes);
    const megamoe_status status = mm_tensor_read(tensor, 0, bytes, tensor->bytes);
    if (status == MEGAMOE_OK)
        *copy = bytes;
    else
        free(bytes);
    return status;
}

megamoe_status megamoe_checkpoint_tensor(const megamoe_checkpoint *checkpoint, const char *name,
                                         megamoe_tensor *tensor) {
    if (!checkpoint || !name || !tensor)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_checkpoint_tensor: arguments must not be NULL");
    const size_t at = find(checkpoint, name);
    if (at == checkpoint->n_tensors)
        return mm_fail(MEGAMOE_ENOTFOUND, "%s: %s: there is no such tensor", checkpoint->path,
                       name);
    /* The copies are all that changes, so a const checkpoint may be shared by threads. */
    pthread_mutex_t *lock = &((megamoe_checkpoint *)checkpoint)->copies_lock;
    const mm_tensor *found = checkpoint->tensors[at];
    void **copy = &checkpoint->copies[at];
    pthread_mutex_lock(lock);
    const megamoe_status status = *copy ? MEGAMOE_OK : copy_tensor(found, copy);
    pthread_mutex_unlock(lock);
    MM_TRY(status);
    *tensor = (megamoe_tensor){.rank = found->rank, .data = *copy, .bytes = found->bytes};
    snprintf(tensor->dtype, sizeof tensor->dtype, "%s", found->dtype->name);
    memcpy(tensor->shape, found->shape, sizeof tensor->shape);
    return MEGAMOE_OK;
}

megamoe_status mm_checkpoint_find_layer(const megamoe_checkpoint *checkpoint, int32_t index,
                                        const mm_layer **layer) {
    for (int32_t i = 0; i < checkpoint->n_layers; i++)
        if (checkpoint->layers[i].index == index) {
            *layer = &checkpoint->layers[i];
            return MEGAMOE_OK;
        }
    if (checkpoint->n_layers == 0)
        return mm_fail(MEGAMOE_ENOTFOUND, "%s: was opened without its layers", checkpoint->path);
    return mm_fail(MEGAMOE_ENOTFOUND,
                   "%s: holds no experts of layer %" PRId32 "; its %" PRId32
                   " MoE layers lie in %" PRId32 "..%" PRId32,
                   checkpoint->path, index, checkpoint->n_layers, checkpoint->layers[0].index,
                   checkpoint->layers[checkpoint->n_layers - 1].index);
}

/* What weights keep of the checkpoint that they are read from. */
typedef struct weights_owner {
    megamoe_checkpoint *checkpoint;
    mm_matrix_source *sources;
    void *memory; /* of mm_reserve; NULL: all bytes are the checkpoint's */
    size_t memory_bytes;
} weights_owner;

static void release_owner(void *owner) {
    weights_owner *released = owner;
    megamoe_checkpoint_close(released->checkpoint);
    free(released->sources);
    if (released->memory)
        mm_unreserve(released->memory, released->memory_bytes);
    free(released);
}

static mm_place place_in(const megamoe_checkpoint *checkpoint, const mm_tensor *tensor,
                         uint64_t at) {
    return (mm_place){(size_t)(tensor->file - checkpoint->files), tensor->offset + at};
}

static void place_matrix(const void *owner, int32_t expert, megamoe_projection projection,
                         mm_matrix_places *places) {
    const weights_owner *o = owner;
    const mm_matrix_source *s = &o->sources[(size_t)expert * 3 + (size_t)projection];
    places->codes = place_in(o->checkpoint, s->codes, s->codes_at);
    places->scales = place_in(o->checkpoint, s->scales, s->scales_at);
    if (s->bias)
        places->bias = place_in(o->checkpoint, s->bias, s->bias_at);
}

static megamoe_status read_bytes(const void *owner, mm_place from, void *to, size_t bytes) {
    const megamoe_checkpoint *checkpoint = ((const weights_owner *)owner)->checkpoint;
    return mm_file_read(&checkpoint->files[from.file].source, from.offset, to, bytes);
}

static void name_matrix(const void *owner, int32_t expert, megamoe_projection projection,
                        bool scales, char *text, size_t text_bytes) {
    const mm_matrix_source *source =
        &((const weights_owner *)owner)->sources[(size_t)expert * 3 + (size_t)projection];
    const mm_tensor *tensor = scales && source->scales ? source->scales : source->codes;
    if (tensor->rank > 2) /* all experts in one tensor */
        snprintf(text, text_bytes, "%s: %s: expert %" PRId32, tensor->file->path, tensor->name,
                 expert);
    else
        snprintf(text, text_bytes, "%s: %s", tensor->file->path, tensor->name);
}

megamoe_status mm_checkpoint_own(const megamoe_checkpoint *checkpoint, mm_layer_tensors *tensors,
                                 void *memory, size_t memory_bytes, megamoe_weights **weights) {
    weights_owner *owner = calloc(1, sizeof *owner);
    if (!owner) {
        if (memory)
            mm_unreserve(memory, memory_bytes);
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", checkpoint->path);
    }
    /* Counting users is all that changes, so a const checkpoint may be shared by threads. */
    owner->checkpoint = (megamoe_checkpoint *)checkpoint;
    atomic_fetch_add_explicit(&owner->checkpoint->users, 1, memory_order_relaxed);
    owner->sources = tensors->sources;
    owner->memory = memory;
    owner->memory_bytes = memory_bytes;
    tensors->sources = NULL;
    mm_matrix_owner matrix_owner = {.owner = owner, .release = release_owner, .name = name_matrix};
    if (!memory) {
        matrix_owner.places = place_matrix;
        matrix_owner.read = read_bytes;
        matrix_owner.unpack = tensors->unpack;
    }
    return mm_weights_create(&tensors->desc, tensors->matrices, matrix_owner, weights);
}

megamoe_status megamoe_checkpoint_weights(const megamoe_checkpoint *checkpoint, int32_t layer,
                                          megamoe_weights **weights) {
    if (!checkpoint || !weights)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_checkpoint_weights: arguments must not be NULL");
    *weights = NULL;
    const mm_layer *found = NULL;
    MM_TRY(mm_checkpoint_find_layer(checkpoint, layer, &found));
    mm_layer_tensors tensors = {0};
    megamoe_status status = found->family->weights(checkpoint, found, &tensors);
    if (status == MEGAMOE_OK)
        status = mm_checkpoint_own(checkpoint, &tensors, NULL, 0, weights);
    free(tensors.matrices);
    free(tensors.sources);
    return status;
}

megamoe_status megamoe_checkpoint_router(const megamoe_checkpoint *checkpoint, int32_t layer,
                                         megamoe_router **router) {
    if (!checkpoint || !router)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_checkpoint_router: arguments must not be NULL");
    *router = NULL;
    const mm_layer *found = NULL;
    MM_TRY(mm_checkpoint_find_layer(checkpoint, layer, &found));
    return found->family->router(checkpoint, found, router);
}
