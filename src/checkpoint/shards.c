/* SPDX-License-Identifier: Apache-2.0 */
/* From a path to its open files and a list of their tensors. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/log.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/gguf_files.h"
#include "checkpoint/json.h"

static const char index_name[] = "model.safetensors.index.json";
static const char single_name[] = "model.safetensors";

static int by_name(const void *a, const void *b) {
    const mm_tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

/* NULL when out of memory; the caller frees. */
static char *join(const char *directory, const char *name) {
    char *path;
    return asprintf(&path, "%s/%s", directory, name) < 0 ? NULL : path;
}

static megamoe_status out_of_memory(const char *path) {
    return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", path);
}

static megamoe_status reserve_files(megamoe_checkpoint *checkpoint, size_t n) {
    checkpoint->files = calloc(n, sizeof *checkpoint->files);
    if (!checkpoint->files)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory for %zu files", checkpoint->path, n);
    return MEGAMOE_OK;
}

megamoe_status mm_checkpoint_list_tensors(megamoe_checkpoint *checkpoint,
                                          const json_t *weight_map) {
    size_t n = 0;
    for (size_t i = 0; i < checkpoint->n_files; i++)
        n += checkpoint->files[i].n;
    checkpoint->tensors = calloc(n ? n : 1, sizeof *checkpoint->tensors);
    checkpoint->copies = calloc(n ? n : 1, sizeof *checkpoint->copies);
    if (!checkpoint->tensors || !checkpoint->copies)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory for %zu tensors", checkpoint->path, n);
    for (size_t i = 0; i < checkpoint->n_files; i++) {
        const mm_tensor_file *file = &checkpoint->files[i];
        const char *base = mm_tensor_file_name(file);
        for (size_t j = 0; j < file->n; j++) {
            const char *mapped =
                json_string_value(json_object_get(weight_map, file->tensors[j].name));
            if (!weight_map || (mapped && strcmp(mapped, base) == 0))
                checkpoint->tensors[checkpoint->n_tensors++] = &file->tensors[j];
        }
    }
    if (weight_map && checkpoint->n_tensors < n)
        mm_log(MEGAMOE_LOG_WARN, "%s: %zu tensors of its files are not in the index and ignored",
               checkpoint->path, n - checkpoint->n_tensors);
    qsort(checkpoint->tensors, checkpoint->n_tensors, sizeof *checkpoint->tensors, by_name);
    return MEGAMOE_OK;
}

megamoe_status mm_checkpoint_open_file(const char *path, megamoe_checkpoint *checkpoint) {
    if (mm_gguf_is_file(path))
        return mm_gguf_open_files(path, checkpoint);
    MM_TRY(reserve_files(checkpoint, 1));
    checkpoint->n_files = 1;
    MM_TRY(mm_safetensors_open(path, &checkpoint->files[0]));
    return mm_checkpoint_list_tensors(checkpoint, NULL);
}

/* Names in an index come from strangers: a plain name in the index's own directory, or nothing. */
static bool plain_name(const char *name) {
    return name[0] && !strchr(name, '/') && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

/* Collects the file names of a weight_map as the keys of `names`. */
static megamoe_status collect_names(const char *index, const json_t *weight_map, json_t *names) {
    const char *tensor;
    json_t *value;
    json_object_foreach((json_t *)weight_map, tensor, value) {
        const char *name = json_string_value(value);
        if (!name)
            return mm_fail(MEGAMOE_EFORMAT, "%s: %s: its file must be a string", index, tensor);
        if (!plain_name(name))
            return mm_fail(MEGAMOE_EFORMAT,
                           "%s: %s: its file \"%s\" must be the plain name of a file in the same "
                           "directory",
                           index, tensor, name);
        if (json_object_set(names, name, value) != 0)
            return out_of_memory(index);
    }
    return MEGAMOE_OK;
}

static megamoe_status open_named(const char *directory, const char *index, json_t *names,
                                 megamoe_checkpoint *checkpoint) {
    MM_TRY(reserve_files(checkpoint, json_object_size(names) + 1));
    const char *name;
    json_t *unused;
    json_object_foreach(names, name, unused) {
        char *path = join(directory, name);
        if (!path)
            return out_of_memory(directory);
        megamoe_status status;
        if (access(path, F_OK) != 0)
            status = mm_fail(MEGAMOE_ENOTFOUND,
                             "%s: %s: the index lists this file, but it is not there: %s "
                             "(is the download complete? One file alone can be opened by its name)",
                             index, name, strerror(errno));
        else
            status = mm_safetensors_open(path, &checkpoint->files[checkpoint->n_files++]);
        free(path);
        MM_TRY(status);
    }
    return MEGAMOE_OK;
}

static megamoe_status check_mapped(const char *index, const json_t *weight_map,
                                   const megamoe_checkpoint *checkpoint) {
    if (json_object_size(weight_map) == checkpoint->n_tensors)
        return MEGAMOE_OK;
    const char *tensor;
    json_t *value;
    json_object_foreach((json_t *)weight_map, tensor, value) {
        if (!mm_checkpoint_find(checkpoint, tensor))
            return mm_fail(MEGAMOE_EFORMAT, "%s: %s: the index places it in %s, which lacks it",
                           index, tensor, json_string_value(value));
    }
    return MEGAMOE_OK;
}

static megamoe_status open_index(const char *directory, const char *index,
                                 megamoe_checkpoint *checkpoint) {
    json_t *root = NULL;
    json_t *names = json_object();
    megamoe_status status = MEGAMOE_OK;
    MM_TRY_GOTO(mm_json_read(index, &root), end);
    const json_t *weight_map = json_object_get(root, "weight_map");
    if (!json_is_object(weight_map)) {
        status =
            mm_fail(MEGAMOE_EFORMAT, "%s: weight_map must be an object from tensor to file", index);
        goto end;
    }
    MM_TRY_GOTO(collect_names(index, weight_map, names), end);
    MM_TRY_GOTO(open_named(directory, index, names, checkpoint), end);
    MM_TRY_GOTO(mm_checkpoint_list_tensors(checkpoint, weight_map), end);
    status = check_mapped(index, weight_map, checkpoint);
end:
    json_decref(names);
    json_decref(root);
    return status;
}

/* The only *.safetensors file of a directory without an index; NULL if there is none. */
static megamoe_status find_only_file(const char *directory, char **path) {
    *path = NULL;
    DIR *stream = opendir(directory);
    if (!stream)
        return mm_fail(MEGAMOE_EIO, "%s: %s", directory, strerror(errno));
    static const char suffix[] = ".safetensors";
    const size_t suffix_bytes = sizeof suffix - 1;
    size_t found = 0;
    megamoe_status status = MEGAMOE_OK;
    for (const struct dirent *entry; status == MEGAMOE_OK && (entry = readdir(stream));) {
        const size_t bytes = strlen(entry->d_name);
        if (bytes <= suffix_bytes || strcmp(entry->d_name + bytes - suffix_bytes, suffix) != 0)
            continue;
        if (found++ > 0)
            continue;
        *path = join(directory, entry->d_name);
        if (!*path)
            status = out_of_memory(directory);
    }
    closedir(stream);
    if (status == MEGAMOE_OK && found > 1)
        status = mm_fail(MEGAMOE_EFORMAT,
                         "%s: holds %zu .safetensors files but neither %s nor %s, which would say "
                         "what belongs together",
                         directory, found, index_name, single_name);
    if (status != MEGAMOE_OK) {
        free(*path);
        *path = NULL;
    }
    return status;
}

static megamoe_status open_directory(const char *directory, megamoe_checkpoint *checkpoint) {
    char *index = join(directory, index_name);
    char *single = join(directory, single_name);
    megamoe_status status = MEGAMOE_OK;
    if (!index || !single) {
        status = out_of_memory(directory);
        goto end;
    }
    if (mm_file_exists(index)) {
        status = open_index(directory, index, checkpoint);
        goto end;
    }
    if (!mm_file_exists(single)) {
        free(single);
        MM_TRY_GOTO(find_only_file(directory, &single), end);
        if (!single)
            MM_TRY_GOTO(mm_gguf_find(directory, &single), end);
    }
    status = mm_checkpoint_open_file(single, checkpoint);
end:
    free(index);
    free(single);
    return status;
}

megamoe_status mm_checkpoint_open_files(const char *path, megamoe_checkpoint *checkpoint) {
    struct stat st;
    if (stat(path, &st) != 0)
        return mm_fail(errno == ENOENT ? MEGAMOE_ENOTFOUND : MEGAMOE_EIO, "%s: %s", path,
                       strerror(errno));
    if (S_ISDIR(st.st_mode)) {
        MM_TRY(mm_config_open(path, &checkpoint->config));
        return open_directory(path, checkpoint);
    }
    if (mm_gguf_is_file(path)) /* has its config inside */
        return mm_gguf_open_files(path, checkpoint);
    const char *slash = strrchr(path, '/');
    const size_t bytes = slash ? (size_t)(slash - path) : 0; /* 0 is the root, "/" and the name */
    char *directory = slash ? strndup(path, bytes) : strdup(".");
    if (!directory)
        return out_of_memory(path);
    const megamoe_status status = mm_config_open(directory, &checkpoint->config);
    free(directory);
    MM_TRY(status);
    return mm_checkpoint_open_file(path, checkpoint);
}
