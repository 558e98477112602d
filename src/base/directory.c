/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "base/directory.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"

static megamoe_status check_free(const char *path) {
    DIR *stream = opendir(path);
    if (!stream && errno == ENOENT)
        return MEGAMOE_OK;
    if (!stream)
        return mm_fail(errno == ENOMEM ? MEGAMOE_ENOMEM : MEGAMOE_EIO, "%s: %s", path,
                       errno == ENOTDIR ? "exists and is not a directory" : strerror(errno));
    int entries = 0;
    while (readdir(stream))
        entries++;
    closedir(stream);
    if (entries > 2) /* . and .. */
        return mm_fail(MEGAMOE_EIO, "%s: exists and is not empty", path);
    return MEGAMOE_OK;
}

static megamoe_status open_temporary(mm_output_directory *output) {
    char *temporary = NULL;
    if (asprintf(&temporary, "%s.tmp-XXXXXX", output->path) < 0)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", output->path);
    if (!mkdtemp(temporary)) {
        const int error = errno;
        free(temporary);
        return mm_fail(MEGAMOE_EIO, "%s: cannot create: %s", output->path, strerror(error));
    }
    output->temporary = temporary;
    output->entries = opendir(temporary);
    if (output->entries)
        return MEGAMOE_OK;
    const int error = errno;
    rmdir(temporary); /* there is nothing in it that only `entries` could list */
    return mm_fail(error == ENOMEM ? MEGAMOE_ENOMEM : MEGAMOE_EIO, "%s: cannot create: %s",
                   output->path, strerror(error));
}

/* Now, so that nothing of it can fail once the directory has its name. */
static megamoe_status open_parent(mm_output_directory *output) {
    const char *slash = strrchr(output->path, '/');
    char *parent =
        !slash ? strdup(".")
               : strndup(output->path, slash == output->path ? 1 : (size_t)(slash - output->path));
    if (!parent)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", output->path);
    output->parent = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    free(parent);
    if (output->parent < 0)
        return mm_fail(MEGAMOE_EIO, "%s: cannot create: %s", output->path, strerror(errno));
    return MEGAMOE_OK;
}

megamoe_status mm_output_directory_open(const char *path, mm_output_directory *output) {
    *output = (mm_output_directory){.parent = -1};
    MM_TRY(check_free(path));
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/')
        length--;
    output->path = strndup(path, length);
    megamoe_status status =
        output->path ? open_parent(output) : mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", path);
    if (status == MEGAMOE_OK)
        status = open_temporary(output);
    if (status != MEGAMOE_OK)
        mm_output_directory_discard(output);
    return status;
}

megamoe_status mm_output_directory_commit(mm_output_directory *output) {
    const mode_t mask = umask(0);
    umask(mask);
    megamoe_status status = MEGAMOE_OK;
    if (chmod(output->temporary, 0777 & ~mask) != 0 || fsync(dirfd(output->entries)) != 0 ||
        rename(output->temporary, output->path) != 0) {
        status = mm_fail(MEGAMOE_EIO, "%s: cannot finish: %s", output->path, strerror(errno));
    } else {
        free(output->temporary);
        output->temporary = NULL;
        /* It is whole under its name; only its survival of a power loss depends on this. */
        if (fsync(output->parent) != 0)
            status = mm_fail(MEGAMOE_EIO, "%s: cannot sync its directory: %s", output->path,
                             strerror(errno));
    }
    mm_output_directory_discard(output);
    return status;
}

void mm_output_directory_discard(mm_output_directory *output) {
    if (!output->path)
        return;
    if (output->temporary && output->entries) {
        rewinddir(output->entries);
        for (const struct dirent *entry; (entry = readdir(output->entries)) != NULL;)
            unlinkat(dirfd(output->entries), entry->d_name, 0);
        rmdir(output->temporary);
    }
    if (output->entries)
        closedir(output->entries);
    if (output->parent >= 0)
        close(output->parent);
    free(output->path);
    free(output->temporary);
    *output = (mm_output_directory){.parent = -1};
}
