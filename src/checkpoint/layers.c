/* SPDX-License-Identifier: Apache-2.0 */
/* Which layers a checkpoint holds and to which family each belongs. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "checkpoint/family.h"
#include "checkpoint/gguf_model.h"

/* The claims on the tensors of one block of names. */
typedef struct block {
    mm_claim claim;
    const mm_tensor *first[MM_FAMILIES];
    size_t claims[MM_FAMILIES];
} block;

static bool same_block(const mm_tensor *a, const mm_claim *x, const mm_tensor *b,
                       const mm_claim *y) {
    return x->block_bytes == y->block_bytes && strncmp(a->name, b->name, x->block_bytes) == 0;
}

static mm_layer layer_of(const block *counted) {
    int winner = 0;
    for (int i = 1; i < MM_FAMILIES; i++)
        if (counted->claims[i] > counted->claims[winner])
            winner = i;
    return (mm_layer){counted->claim.layer, mm_families[winner], counted->first[winner]};
}

static int by_index(const void *a, const void *b) {
    const mm_layer *x = a, *y = b;
    return x->index < y->index ? -1 : x->index > y->index;
}

/* Doubles the room when it is full. */
static megamoe_status append(megamoe_checkpoint *checkpoint, mm_layer layer) {
    const size_t n = (size_t)checkpoint->n_layers;
    if ((n & (n - 1)) == 0) {
        mm_layer *grown = realloc(checkpoint->layers, (n ? 2 * n : 1) * sizeof *grown);
        if (!grown)
            return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory for its layers", checkpoint->path);
        checkpoint->layers = grown;
    }
    checkpoint->layers[checkpoint->n_layers++] = layer;
    return MEGAMOE_OK;
}

/* Tensors come in the order of their names, so those of a block are neighbours. */
static megamoe_status collect(megamoe_checkpoint *checkpoint) {
    block current = {0};
    const mm_tensor *member = NULL; /* of the current block */
    for (size_t i = 0; i < checkpoint->n_tensors; i++) {
        const mm_tensor *tensor = checkpoint->tensors[i];
        for (int f = 0; f < MM_FAMILIES; f++) {
            mm_claim claim;
            if (!mm_families[f]->claims(tensor, &claim))
                continue;
            if (!member || !same_block(member, &current.claim, tensor, &claim)) {
                if (member)
                    MM_TRY(append(checkpoint, layer_of(&current)));
                current = (block){.claim = claim};
                member = tensor;
            }
            if (current.claims[f]++ == 0)
                current.first[f] = tensor;
        }
    }
    if (!member)
        return MEGAMOE_OK;
    MM_TRY(append(checkpoint, layer_of(&current)));
    qsort(checkpoint->layers, (size_t)checkpoint->n_layers, sizeof *checkpoint->layers, by_index);
    for (int32_t i = 1; i < checkpoint->n_layers; i++) {
        const mm_layer *one = &checkpoint->layers[i - 1], *other = &checkpoint->layers[i];
        if (one->index == other->index)
            return mm_fail(
                MEGAMOE_EFORMAT, "%s: %s: layer %" PRId32 " has experts under another name too: %s",
                other->first->file->path, other->first->name, one->index, one->first->name);
    }
    return MEGAMOE_OK;
}

/* Some models number their draft blocks like layers, behind the last one. */
static megamoe_status drop_drafts(megamoe_checkpoint *checkpoint) {
    const mm_config *config = &checkpoint->config;
    int32_t layers = INT32_MAX, drafts = -1;
    MM_TRY(mm_config_int(config, "num_hidden_layers", &layers));
    MM_TRY(mm_config_int(config, "num_nextn_predict_layers", &drafts));
    int32_t n = checkpoint->n_layers;
    if (n == 0)
        return MEGAMOE_OK;
    const int32_t last = checkpoint->layers[n - 1].index;
    if (drafts >= 0 && (int64_t)last >= (int64_t)layers + drafts)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s: its layer %" PRId32 " contradicts num_hidden_layers %" PRId32
                       " and num_nextn_predict_layers %" PRId32 " of %s",
                       checkpoint->layers[n - 1].first->file->path,
                       checkpoint->layers[n - 1].first->name, last, layers, drafts, config->path);
    while (n > 0 && (checkpoint->layers[n - 1].index >= layers ||
                     mm_gguf_is_draft(checkpoint, &checkpoint->layers[n - 1])))
        n--;
    checkpoint->n_layers = n;
    return MEGAMOE_OK;
}

megamoe_status mm_checkpoint_find_layers(megamoe_checkpoint *checkpoint) {
    MM_TRY(collect(checkpoint));
    MM_TRY(drop_drafts(checkpoint));
    if (checkpoint->n_layers == 0)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: holds no expert tensors under names that are known", checkpoint->path);
    for (int32_t i = 0; i < checkpoint->n_layers; i++) {
        const mm_layer *layer = &checkpoint->layers[i];
        MM_TRY(layer->family->check(checkpoint, layer));
        if (!layer->family->name)
            continue;
        /* The first, but rather one whose layers can be run as they are. */
        if (!checkpoint->family || (checkpoint->family->wide && !layer->family->wide))
            checkpoint->family = layer->family;
    }
    if (checkpoint->family)
        return MEGAMOE_OK;
    /* Nothing here can be run: let the first layer say why. */
    mm_layer_tensors none = {0};
    return checkpoint->layers[0].family->weights(checkpoint, &checkpoint->layers[0], &none);
}
