/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MM_BASE_FILE_H
#define MM_BASE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "megamoe/status.h"

/*
 * A regular file that is open for reading. Zero-initialised is closed. Its bytes are copied out by
 * mm_file_read: a file that has become shorter since it was opened is an error there, where reading
 * a mapping of it would end the process with SIGBUS.
 */
typedef struct mm_file {
    char *path;
    int fd;
    uint64_t bytes; /* when it was opened */
} mm_file;

/* Never waits: what is no regular file is refused. Leaves *file closed in case of failure. */
MEGAMOE_CHECKED megamoe_status mm_file_open(const char *path, mm_file *file);
void mm_file_close(mm_file *file);

/* All of these bytes, or MEGAMOE_EIO. Thread: any, several at once. */
MEGAMOE_CHECKED megamoe_status mm_file_read(const mm_file *file, uint64_t offset, void *to,
                                            size_t bytes);

/*
 * A whole file of at most `most` bytes, else MEGAMOE_EFORMAT, with a zero behind its last byte.
 * Owns: the caller frees *data.
 */
MEGAMOE_CHECKED megamoe_status mm_file_read_all(const char *path, size_t most, char **data,
                                                size_t *bytes);

/* Whether there is something of this name, if only a link to nothing. */
bool mm_file_exists(const char *path);

/* A part of a file mapped for reading. Zero-initialised is closed. */
typedef struct mm_mapping {
    const uint8_t *data;
    size_t bytes;
} mm_mapping;

/*
 * The mapping outlives `file`. Whoever reads it where the file has become shorter gets SIGBUS.
 * `offset` is a multiple of MM_PAGE; `bytes` are at least 1 and end in the file.
 */
MEGAMOE_CHECKED megamoe_status mm_file_map(const mm_file *file, uint64_t offset, size_t bytes,
                                           mm_mapping *mapping);
void mm_mapping_close(mm_mapping *mapping);

/*
 * A file that appears under its name only when it is complete: written to a temporary name,
 * FILE.tmp-XXXXXX, in the same directory, then fsync, rename, fsync of the directory. Errors name
 * `path`.
 */
typedef struct mm_output {
    int fd; /* -1: closed */
    int directory;
    char *path; /* NULL: all is closed */
    char *temporary;
} mm_output;

MEGAMOE_CHECKED megamoe_status mm_output_open(const char *path, mm_output *output);
/* Any offset, in any order, from several threads at once. */
MEGAMOE_CHECKED megamoe_status mm_output_write(const mm_output *output, uint64_t offset,
                                               const void *data, size_t bytes);
/*
 * Closes in every case; on failure nothing is left under either name, unless it was the directory
 * that could not be synced.
 */
MEGAMOE_CHECKED megamoe_status mm_output_commit(mm_output *output);
/* Drops an output that is not committed; does nothing after a commit. */
void mm_output_discard(mm_output *output);

#endif
