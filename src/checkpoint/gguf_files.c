/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "checkpoint/gguf_files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "checkpoint/gguf.h"

static const char suffix[] = ".gguf";

/* The names of parts end with "-00001-of-00003.gguf". */
enum { DIGITS = 5, NUMBERS_BYTES = 1 + DIGITS + 4 + DIGITS, SUFFIX_BYTES = sizeof suffix - 1 };

static bool has_suffix(const char *name) {
    const size_t bytes = strlen(name);
    return bytes > SUFFIX_BYTES && strcmp(name + bytes - SUFFIX_BYTES, suffix) == 0;
}

static bool take_digits(const char **at, int32_t *number) {
    *number = 0;
    for (int i = 0; i < DIGITS; i++, (*at)++) {
        if (**at < '0' || **at > '9')
            return false;
        *number = *number * 10 + (**at - '0');
    }
    return true;
}

/* Reads the numbers of a part from its name, of which the first *stem bytes are its model's. */
static bool parse_part(const char *name, size_t *stem, int32_t *number, int32_t *count) {
    const size_t bytes = strlen(name), tail = NUMBERS_BYTES + SUFFIX_BYTES;
    if (bytes < tail || !has_suffix(name))
        return false;
    *stem = bytes - tail;
    const char *at = name + *stem;
    if (*at++ != '-' || !take_digits(&at, number) || strncmp(at, "-of-", 4) != 0)
        return false;
    at += 4;
    return take_digits(&at, count) && strcmp(at, suffix) == 0;
}

/* Whether two files are parts of one model, by their names. */
static bool same_model(const char *a, const char *b) {
    size_t stem_a, stem_b;
    int32_t number_a, number_b, count_a, count_b;
    return parse_part(a, &stem_a, &number_a, &count_a) &&
           parse_part(b, &stem_b, &number_b, &count_b) && stem_a == stem_b && count_a == count_b &&
           strncmp(a, b, stem_a) == 0;
}

bool mm_gguf_is_file(const char *path) {
    if (has_suffix(path))
        return true;
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* of a pipe nothing is awaited */
    if (fd < 0)
        return false;
    uint8_t start[4];
    const ssize_t bytes = pread(fd, start, sizeof start, 0);
    close(fd);
    return bytes > 0 && mm_gguf_is(start, (size_t)bytes);
}

static int is_gguf_name(const struct dirent *entry) {
    return has_suffix(entry->d_name);
}

megamoe_status mm_gguf_find(const char *directory, char **path) {
    *path = NULL;
    struct dirent **entries;
    const int n = scandir(directory, &entries, is_gguf_name, alphasort);
    if (n < 0)
        return mm_fail(errno == ENOMEM ? MEGAMOE_ENOMEM : MEGAMOE_EIO, "%s: %s", directory,
                       strerror(errno));
    megamoe_status status = MEGAMOE_OK;
    if (n == 0)
        status = mm_fail(MEGAMOE_ENOTFOUND, "%s: holds no .safetensors file and no .gguf file",
                         directory);
    for (int i = 1; i < n && status == MEGAMOE_OK; i++)
        if (!same_model(entries[0]->d_name, entries[i]->d_name))
            status = mm_fail(MEGAMOE_EFORMAT,
                             "%s: holds %d .gguf files that are not the parts of one model (%s, "
                             "%s); open one by its name",
                             directory, n, entries[0]->d_name, entries[i]->d_name);
    if (status == MEGAMOE_OK && asprintf(path, "%s/%s", directory, entries[0]->d_name) < 0) {
        *path = NULL;
        status = mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", directory);
    }
    for (int i = 0; i < n; i++)
        free(entries[i]);
    free(entries);
    return status;
}

/* Opens one more file; *config, which is empty, gets its metadata and needs mm_config_close. */
static megamoe_status open_next(const char *path, megamoe_checkpoint *checkpoint,
                                mm_config *config) {
    MM_TRY(mm_gguf_open(path, &checkpoint->files[checkpoint->n_files++], &config->root));
    config->text = config->root;
    config->path = strdup(path);
    if (!config->path)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", path);
    return MEGAMOE_OK;
}

/* Part `number`, from 1, of the parts of `path`. */
static megamoe_status open_part(const char *path, size_t stem, int32_t number, int32_t count,
                                megamoe_checkpoint *checkpoint, mm_config *config) {
    char *part;
    if (asprintf(&part, "%.*s-%05" PRId32 "-of-%05" PRId32 "%s", (int)stem, path, number, count,
                 suffix) < 0)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", path);
    megamoe_status status = MEGAMOE_OK;
    int32_t stated_number = -1, stated_count = -1;
    if (access(part, F_OK) != 0) {
        status = mm_fail(MEGAMOE_ENOTFOUND,
                         "%s: %s; the model is split into %" PRId32
                         " parts, all of which are needed (is the download complete?)",
                         part, strerror(errno), count);
        goto end;
    }
    MM_TRY_GOTO(open_next(part, checkpoint, config), end);
    MM_TRY_GOTO(mm_config_int(config, "split.no", &stated_number), end);
    MM_TRY_GOTO(mm_config_int(config, "split.count", &stated_count), end);
    if (stated_number != number - 1 || stated_count != count)
        status = mm_fail(MEGAMOE_EFORMAT,
                         "%s: split.no %" PRId32 " and split.count %" PRId32
                         "; by its name they must be %" PRId32 " and %" PRId32,
                         part, stated_number, stated_count, number - 1, count);
end:
    free(part);
    return status;
}

/* Replaces the file that was opened first by all parts of its model. */
static megamoe_status open_parts(const char *path, int32_t count, megamoe_checkpoint *checkpoint) {
    size_t stem;
    int32_t number, named;
    if (!parse_part(path, &stem, &number, &named) || named != count)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: split.count is %" PRId32
                       ", so its name must end with -00001-of-%05" PRId32
                       ".gguf or the number of another part",
                       path, count, count);
    mm_tensor_file_close(&checkpoint->files[0]);
    free(checkpoint->files);
    checkpoint->n_files = 0;
    checkpoint->files = calloc((size_t)count, sizeof *checkpoint->files);
    if (!checkpoint->files)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory for %" PRId32 " parts", path, count);
    for (number = 1; number <= count; number++) {
        mm_config config = {0};
        const megamoe_status status = open_part(path, stem, number, count, checkpoint, &config);
        if (status == MEGAMOE_OK && number == 1) {
            mm_config_close(&checkpoint->config);
            checkpoint->config = config;
        } else {
            mm_config_close(&config);
        }
        MM_TRY(status);
    }
    return MEGAMOE_OK;
}

/* No name twice, in a file or in several; as many as the metadata promise. */
static megamoe_status check_tensors(const megamoe_checkpoint *checkpoint) {
    for (size_t i = 1; i < checkpoint->n_tensors; i++) {
        const mm_tensor *tensor = checkpoint->tensors[i];
        if (strcmp(checkpoint->tensors[i - 1]->name, tensor->name) == 0)
            return mm_fail(MEGAMOE_EFORMAT, "%s: %s: two tensors have this name",
                           tensor->file->path, tensor->name);
    }
    int32_t stated = -1;
    MM_TRY(mm_config_int(&checkpoint->config, "split.tensors.count", &stated));
    if (stated < 0 || (size_t)stated == checkpoint->n_tensors)
        return MEGAMOE_OK;
    return mm_fail(MEGAMOE_EFORMAT,
                   "%s: split.tensors.count is %" PRId32 ", but the parts hold %zu tensors",
                   checkpoint->config.path, stated, checkpoint->n_tensors);
}

megamoe_status mm_gguf_open_files(const char *path, megamoe_checkpoint *checkpoint) {
    mm_config_close(&checkpoint->config);
    checkpoint->files = calloc(1, sizeof *checkpoint->files);
    if (!checkpoint->files)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", path);
    MM_TRY(open_next(path, checkpoint, &checkpoint->config));
    int32_t count = 1;
    MM_TRY(mm_config_int(&checkpoint->config, "split.count", &count));
    if (count > 1)
        MM_TRY(open_parts(path, count, checkpoint));
    MM_TRY(mm_checkpoint_list_tensors(checkpoint, NULL));
    return check_tensors(checkpoint);
}
