/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"

megamoe_status mm_file_open(const char *path, mm_file *file) {
    *file = (mm_file){0};
    /* Without O_NONBLOCK a FIFO would wait here for its writer. */
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return mm_fail(errno == ENOENT ? MEGAMOE_ENOTFOUND : MEGAMOE_EIO, "%s: %s", path,
                       strerror(errno));
    megamoe_status status = MEGAMOE_OK;
    struct stat st;
    if (fstat(fd, &st) != 0)
        status = mm_fail(MEGAMOE_EIO, "%s: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        status = mm_fail(MEGAMOE_EIO, "%s: not a regular file", path);
    else if (!(file->path = strdup(path)))
        status = mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", path);
    if (status != MEGAMOE_OK) {
        close(fd);
        return status;
    }
    file->fd = fd;
    file->bytes = (uint64_t)st.st_size;
    return MEGAMOE_OK;
}

void mm_file_close(mm_file *file) {
    if (file->path)
        close(file->fd);
    free(file->path);
    *file = (mm_file){0};
}

megamoe_status mm_file_read(const mm_file *file, uint64_t offset, void *to, size_t bytes) {
    char *at = to;
    while (bytes) {
        const ssize_t n = pread(file->fd, at, bytes, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return mm_fail(MEGAMOE_EIO, "%s: cannot read: %s", file->path, strerror(errno));
        if (n == 0)
            return mm_fail(MEGAMOE_EIO,
                           "%s: ends at byte %" PRIu64 ", %zu bytes too early; it had %" PRIu64
                           " bytes when it was opened",
                           file->path, offset, bytes, file->bytes);
        at += n;
        offset += (uint64_t)n;
        bytes -= (size_t)n;
    }
    return MEGAMOE_OK;
}

megamoe_status mm_file_read_all(const char *path, size_t most, char **data, size_t *bytes) {
    *data = NULL;
    mm_file file;
    MM_TRY(mm_file_open(path, &file));
    megamoe_status status = MEGAMOE_OK;
    char *read = NULL;
    if (file.bytes > most)
        status = mm_fail(MEGAMOE_EFORMAT, "%s: it has %" PRIu64 " bytes; at most %zu are read",
                         path, file.bytes, most);
    else if (!(read = malloc((size_t)file.bytes + 1)))
        status = mm_fail(MEGAMOE_ENOMEM, "%s: out of memory for its %" PRIu64 " bytes", path,
                         file.bytes);
    else
        status = mm_file_read(&file, 0, read, (size_t)file.bytes);
    if (status == MEGAMOE_OK) {
        read[file.bytes] = 0;
        *data = read;
        *bytes = (size_t)file.bytes;
    } else {
        free(read);
    }
    mm_file_close(&file);
    return status;
}

bool mm_file_exists(const char *path) {
    struct stat st;
    return lstat(path, &st) == 0;
}

megamoe_status mm_file_map(const mm_file *file, uint64_t offset, size_t bytes,
                           mm_mapping *mapping) {
    *mapping = (mm_mapping){0};
    void *data = mmap(NULL, bytes, PROT_READ, MAP_SHARED, file->fd, (off_t)offset);
    if (data == MAP_FAILED)
        return mm_fail(errno == ENOMEM ? MEGAMOE_ENOMEM : MEGAMOE_EIO, "%s: cannot map: %s",
                       file->path, strerror(errno));
    *mapping = (mm_mapping){data, bytes};
    return MEGAMOE_OK;
}

void mm_mapping_close(mm_mapping *mapping) {
    if (mapping->data)
        munmap((void *)(uintptr_t)mapping->data, mapping->bytes);
    *mapping = (mm_mapping){0};
}

/* The directory that a file is in; -1 with errno. */
static int open_directory_of(const char *path) {
    const char *slash = strrchr(path, '/');
    const size_t bytes = slash == path ? 1 : slash ? (size_t)(slash - path) : 0;
    char *directory = slash ? strndup(path, bytes) : strdup(".");
    if (!directory)
        return -1;
    const int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const int error = errno;
    free(directory);
    errno = error;
    return fd;
}

static megamoe_status create_temporary(mm_output *output) {
    const char *path = output->path;
    output->directory = open_directory_of(path);
    if (output->directory < 0)
        return mm_fail(errno == ENOMEM ? MEGAMOE_ENOMEM : MEGAMOE_EIO,
                       "%s: cannot open its directory: %s", path, strerror(errno));
    output->fd = mkostemp(output->temporary, O_CLOEXEC);
    if (output->fd < 0)
        return mm_fail(MEGAMOE_EIO, "%s: cannot create: %s", path, strerror(errno));
    const mode_t mask = umask(0);
    umask(mask);
    if (fchmod(output->fd, 0666 & ~mask) != 0)
        return mm_fail(MEGAMOE_EIO, "%s: cannot set permissions: %s", path, strerror(errno));
    return MEGAMOE_OK;
}

megamoe_status mm_output_open(const char *path, mm_output *output) {
    *output = (mm_output){.fd = -1, .directory = -1};
    struct stat st;
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return mm_fail(MEGAMOE_EIO, "%s: exists and is not a regular file", path);
    output->path = strdup(path);
    if (asprintf(&output->temporary, "%s.tmp-XXXXXX", path) < 0)
        output->temporary = NULL;
    const megamoe_status status = output->path && output->temporary
                                      ? create_temporary(output)
                                      : mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", path);
    if (status != MEGAMOE_OK)
        mm_output_discard(output);
    return status;
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
    megamoe_status status = MEGAMOE_OK;
    if (fsync(output->directory) != 0)
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
    if (output->path && output->directory >= 0)
        close(output->directory);
    free(output->path);
    free(output->temporary);
    *output = (mm_output){.fd = -1, .directory = -1};
}
