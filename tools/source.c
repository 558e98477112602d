/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "source.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "report.h"

static bool ends_with(const char *text, const char *suffix) {
    const size_t length = strlen(text), suffix_length = strlen(suffix);
    return length >= suffix_length && strcmp(text + length - suffix_length, suffix) == 0;
}

/*
 * Whether a file is to be read as a checkpoint: by its name, by GGUF's first bytes, or by the brace
 * that the header of safetensors begins with behind 8 bytes of length. Anything else must be a
 * prepared file.
 */
static bool looks_like_checkpoint(const char *path) {
    if (ends_with(path, ".safetensors") || ends_with(path, ".gguf"))
        return true;
    struct stat properties; /* opening a FIFO would wait for its writer */
    if (stat(path, &properties) != 0 || !S_ISREG(properties.st_mode))
        return false;
    FILE *stream = fopen(path, "rb");
    if (stream == NULL)
        return false;
    char start[9];
    const bool read = fread(start, 1, sizeof start, stream) == sizeof start;
    fclose(stream);
    return read && (start[8] == '{' || memcmp(start, "GGUF", 4) == 0);
}

int source_open(const char *path, source *s) {
    *s = (source){.path = path,
                  .info = MEGAMOE_INIT(megamoe_checkpoint_info),
                  .layer = MEGAMOE_INIT(megamoe_layer_desc)};
    struct stat properties;
    const bool directory = stat(path, &properties) == 0 && S_ISDIR(properties.st_mode);
    megamoe_status status;
    if (directory || looks_like_checkpoint(path)) {
        status = megamoe_checkpoint_open(path, &s->checkpoint);
        if (status == MEGAMOE_OK)
            status = megamoe_checkpoint_describe(s->checkpoint, &s->info);
    } else {
        status = megamoe_weights_open(path, &s->weights);
        s->prepared = true;
    }
    return status == MEGAMOE_OK ? EXIT_DONE : report_failure(status);
}

static void drop_layer(source *s) {
    megamoe_weights_close(s->weights);
    megamoe_router_close(s->owned_router);
    s->weights = NULL;
    s->router = s->owned_router = NULL;
}

/* Of a checkpoint that may hold none for the layer. */
static int open_router(source *s, int32_t layer) {
    const megamoe_status status = megamoe_checkpoint_router(s->checkpoint, layer, &s->owned_router);
    if (status != MEGAMOE_OK && status != MEGAMOE_ENOTFOUND)
        return report_failure(status);
    s->router = s->owned_router;
    return EXIT_DONE;
}

static int open_checkpoint_layer(source *s, int64_t layer) {
    if (layer == ONLY_LAYER) {
        if (s->info.layers != 1)
            return report_error("%s: holds %" PRId32 " expert layers; choose one with --layer",
                                s->path, s->info.layers);
        layer = megamoe_checkpoint_layer(s->checkpoint, 0);
    }
    drop_layer(s);
    const megamoe_status status =
        s->quantize != NULL
            ? megamoe_checkpoint_quantize(s->checkpoint, (int32_t)layer, s->quantize, &s->weights)
            : megamoe_checkpoint_weights(s->checkpoint, (int32_t)layer, &s->weights);
    return status == MEGAMOE_OK ? open_router(s, (int32_t)layer) : report_failure(status);
}

int source_open_wide(source *s, const megamoe_stored_layer *stored, int32_t layer) {
    drop_layer(s);
    s->layer = (megamoe_layer_desc)MEGAMOE_INIT(megamoe_layer_desc);
    s->layer.layer = layer;
    s->layer.hidden = stored->hidden;
    s->layer.intermediate = stored->intermediate;
    s->layer.experts = stored->experts;
    s->layer.topk = stored->topk;
    s->layer.activation = stored->activation;
    s->layer.has_bias = stored->has_bias;
    return open_router(s, layer);
}

int source_open_layer(source *s, int64_t layer) {
    if (!s->prepared) {
        const int code = open_checkpoint_layer(s, layer);
        if (code != EXIT_DONE)
            return code;
    } else {
        s->router = megamoe_weights_router(s->weights);
    }
    const megamoe_status status = megamoe_weights_describe(s->weights, &s->layer);
    if (status != MEGAMOE_OK)
        return report_failure(status);
    if (layer != ONLY_LAYER && layer != s->layer.layer)
        return report_error("%s: holds layer %" PRId32 ", not layer %" PRId64, s->path,
                            s->layer.layer, layer);
    return EXIT_DONE;
}

void source_close(source *s) {
    megamoe_weights_close(s->weights);
    megamoe_router_close(s->owned_router);
    megamoe_checkpoint_close(s->checkpoint);
}
