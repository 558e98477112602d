/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF checkpoints: one file, or the parts of a split one. */
#ifndef MM_CHECKPOINT_GGUF_FILES_H
#define MM_CHECKPOINT_GGUF_FILES_H

#include "checkpoint/checkpoint.h"

/* Whether the file at `path` is to be read as GGUF: by its name or by its first bytes. */
bool mm_gguf_is_file(const char *path);

/*
 * The GGUF file of a directory, or the first part of the one that is split there. Owns: the caller
 * frees *path. MEGAMOE_ENOTFOUND if there is none, MEGAMOE_EFORMAT if there are several.
 */
MEGAMOE_CHECKED megamoe_status mm_gguf_find(const char *directory, char **path);

/*
 * Opens the file, or all parts of which it is one, and fills files and tensors. The metadata (of
 * the first part, which alone has them) become the config.
 */
MEGAMOE_CHECKED megamoe_status mm_gguf_open_files(const char *path, megamoe_checkpoint *checkpoint);

#endif
