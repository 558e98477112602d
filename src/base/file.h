/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MM_BASE_FILE_H
#define MM_BASE_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "megamoe/status.h"

/* A whole file mapped for reading. Zero-initialised is closed. */
typedef struct mm_mapping {
    const uint8_t *data; /* NULL for an empty file */
    size_t bytes;
} mm_mapping;

MEGAMOE_CHECKED megamoe_status mm_mapping_open(const char *path, mm_mapping *mapping);
void mm_mapping_close(mm_mapping *mapping);

/*
 * A file that appears under its name only when it is complete: written to a temporary name in the
 * same directory, then fsync, rename, fsync of the directory. Errors name `path`.
 */
typedef struct mm_output {
    int fd; /* -1: closed */
    char *path;
    char *temporary;
} mm_output;

MEGAMOE_CHECKED megamoe_status mm_output_open(const char *path, mm_output *output);
/* Any offset, in any order, from several threads at once. */
MEGAMOE_CHECKED megamoe_status mm_output_write(const mm_output *output, uint64_t offset,
                                               const void *data, size_t bytes);
/* Closes in every case; on failure nothing is left under either name. */
MEGAMOE_CHECKED megamoe_status mm_output_commit(mm_output *output);
/* Drops an output that is not committed; does nothing after a commit. */
void mm_output_discard(mm_output *output);

#endif
