/* SPDX-License-Identifier: Apache-2.0 */
/* What PATH names: a checkpoint (a directory or a .safetensors file) or a prepared file. */
#ifndef SOURCE_H
#define SOURCE_H

#include <megamoe/megamoe.h>

typedef struct source {
    const char *path;
    megamoe_checkpoint *checkpoint; /* NULL for a prepared file */
    megamoe_checkpoint_info info;   /* of the checkpoint */
    bool prepared;
    /* The layer, once there is one. */
    megamoe_weights *weights;
    megamoe_layer_desc layer;
    const megamoe_router *router; /* NULL if the source holds none for the layer */
    megamoe_router *owned_router;
    const megamoe_quantize_options *quantize; /* how to read wider weights; NULL: not at all */
} source;

/* --layer's default. */
enum { ONLY_LAYER = -1 };

/* These print their error and return an exit code. source_close is due in any case. */
int source_open(const char *path, source *s);

/* Opens a layer in place of the last one. ONLY_LAYER: the only one that there is. */
int source_open_layer(source *s, int64_t layer);

/* Describes a layer whose weights are too wide to be opened: fills `layer`, but no format. */
int source_open_wide(source *s, const megamoe_stored_layer *stored, int32_t layer);

void source_close(source *s);

#endif
