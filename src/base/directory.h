/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MM_BASE_DIRECTORY_H
#define MM_BASE_DIRECTORY_H

#include <dirent.h>

#include "megamoe/status.h"

/*
 * A directory of files that appears under its name only when all of them are complete: a temporary
 * directory beside it, then fsync, rename, fsync of the parent. Errors name `path`.
 */
typedef struct mm_output_directory {
    char *path;
    char *temporary; /* where the files go; NULL: closed */
    DIR *entries;    /* of temporary */
    int parent;      /* -1: not open */
} mm_output_directory;

/* `path` must not exist, or be an empty directory. */
MEGAMOE_CHECKED megamoe_status mm_output_directory_open(const char *path,
                                                        mm_output_directory *output);
/*
 * Closes in every case; on failure nothing is left under either name, unless it was the parent that
 * could not be synced.
 */
MEGAMOE_CHECKED megamoe_status mm_output_directory_commit(mm_output_directory *output);
/* Drops it and the files in it (it holds no directories); does nothing after a commit. */
void mm_output_directory_discard(mm_output_directory *output);

#endif
