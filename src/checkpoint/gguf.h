/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One GGUF file, version 3: every check of docs/formats.md made before a tensor is handed
 * out. Shapes are turned around, so that the last dimension varies fastest as it does in
 * safetensors; a shape counts elements, also of types that come in blocks.
 */
#ifndef MM_CHECKPOINT_GGUF_H
#define MM_CHECKPOINT_GGUF_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "checkpoint/tensors.h"

enum {
    MM_GGUF_VERSION = 3,
    MM_GGUF_ALIGNMENT = 32,   /* of tensors, where the file does not say another */
    MM_GGUF_RANK_MAX = 4,     /* dimensions of a tensor */
    MM_GGUF_NAME_MAX = 63,    /* bytes of a tensor's name */
    MM_GGUF_KEY_MAX = 65535,  /* of a key */
    MM_GGUF_LIST_KEPT = 4096, /* longest array that is kept of the metadata */
};

/* The types that experts are run in. */
extern const mm_dtype *const mm_gguf_mxfp4;
extern const mm_dtype *const mm_gguf_nvfp4;

/* Whether a file that starts with these bytes is a GGUF file, of whatever version. */
bool mm_gguf_is(const uint8_t *data, size_t bytes);

/*
 * Reads the file into *file, which needs mm_tensor_file_close in case of failure too, and its
 * metadata into *metadata, an object by the file's keys. Of the values it holds numbers, truth
 * values, short lists of both and the architecture; null stands for any other. Owns: the caller
 * calls json_decref(*metadata); it is NULL after a failure.
 */
MEGAMOE_CHECKED megamoe_status mm_gguf_open(const char *path, mm_tensor_file *file,
                                            json_t **metadata);

/*
 * The same for a file in memory; `path` is for messages. Its tensors cannot be read.
 */
MEGAMOE_CHECKED megamoe_status mm_gguf_parse(const char *path, const uint8_t *data, size_t bytes,
                                             mm_tensor_file *file, json_t **metadata);

#endif
