/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"

megamoe_status mm_mapping_open(const char *path, mm_mapping *mapping) {
    *mapping = (mm_mapping){0};
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return mm_fail(errno == ENOENT ? MEGAMOE_ENOTFOUND : MEGAMOE_EIO, "%s: %s", path,
                       strerror(errno));
    megamoe_status status = MEGAMOE_OK;
    struct stat st;
    if (fstat(fd, &st) != 0)
        status = mm_fail(MEGAMOE_EIO, "%s: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        status = mm_fail(MEGAMOE_EIO, "%s: not a regular file", path);
    else if (st.st_size > 0) {
        void *data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (data == MAP_FAILED)
            status = mm_fail(MEGAMOE_EIO, "%s: cannot map: %s", path, strerror(errno));
        else
            *mapping = (mm_mapping){data, (size_t)st.st_size};
    }
    close(fd);
    return status;
}

void mm_mapping_close(mm_mapping *mapping) {
    if (mapping->data)
        munmap((void *)(uintptr_t)mapping->data, mapping->bytes);
    *mapping = (mm_mapping){0};
}

megamoe_status mm_output_open(const char *path, mm_output *output) {
    *output = (mm_output){.fd = -1};
    struct stat st;
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return mm_fail(MEGAMOE_EIO, "%s: exists and is not a regular file", path);
    output->path = strdup(path);
    if (!output->path || asprintf(&output->temporary, "%s.XXXXXX", path) < 0) {
        output->temporary = NULL;
        mm_output_discard(output);
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", path);
    }
    output->fd = mkostemp(output->temporary, O_CLOEXEC);
    if (output->fd < 0) {
        const int error = errno;
        mm_output_discard(output);
        return mm_fail(MEGAMOE_EIO, "%s: cannot create: %s", path, strerror(error));
    }
    const mode_t mask = umask(0);
    umask(mask);
    if (fchmod(output->fd, 0666 & ~mask) != 0) {
        const int error = errno;
        mm_output_discard(output);
        return mm_fail(MEGAMOE_EIO, "%s: cannot set permissions: %s", path, strerror(error));
    }
    return MEGAMOE_OK;
}

megamoe_status mm_output_write(const mm_output *output, uint64_t offset, const void *data,
                               size_t bytes) {
    const char *from = data;
    while (bytes) {
        const ssize_t n = pwrite(output->fd, from, bytes, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return mm_fail(MEGAMOE_EIO, "%s: cannot write: %s", output->path,
                           n == 0 ? "no space" : strerror(errno));
        from += n;
        offset += (uint64_t)n;
        bytes -= (size_t)n;
    }
    return MEGAMOE_OK;
}

static int sync_directory_of(const char *path) {
    char *copy = strdup(path);
    if (!copy)
        return -1;
    char *slash = strrchr(copy, '/');
    if (slash == copy)
        slash[1] = 0;
    else if (slash)
        *slash = 0;
    const int fd = open(slash ? copy : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    free(copy);
    if (fd < 0)
        return -1;
    const int result = fsync(fd);
    close(fd);
    return result;
}

megamoe_status mm_output_commit(mm_output *output) {
    int failed = fsync(output->fd);
    if (!failed)
        failed = rename(output->temporary, output->path);
    if (failed) {
        const megamoe_status status =
            mm_fail(MEGAMOE_EIO, "%s: cannot finish: %s", output->path, strerror(errno));
        mm_output_discard(output);
        return status;
    }
    close(output->fd);
    output->fd = -1;
    /* The file is whole under its name; only its survival of a power loss depends on this. */
    const int unsynced = sync_directory_of(output->path);
    megamoe_status status = MEGAMOE_OK;
    if (unsynced)
        status = mm_fail(MEGAMOE_EIO, "%s: cannot sync its directory: %s", output->path,
                         strerror(errno));
    mm_output_discard(output);
    return status;
}

void mm_output_discard(mm_output *output) {
    if (output->fd >= 0 && output->temporary) {
        close(output->fd);
        unlink(output->temporary);
    }
    free(output->path);
    free(output->temporary);
    *output = (mm_output){.fd = -1};
}
