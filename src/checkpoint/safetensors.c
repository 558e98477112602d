/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "checkpoint/safetensors.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "checkpoint/json.h"

enum { LENGTH_BYTES = 8 };

const mm_dtype *mm_safetensors_dtype_find(const char *name) {
    static const mm_dtype dtypes[] = {
#define X(dtype, bits) {#dtype, bits},
        MM_SAFETENSORS_DTYPES(X)
#undef X
    };
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (strcmp(dtypes[i].name, name) == 0)
            return &dtypes[i];
    return NULL;
}

bool mm_safetensors_bytes(const mm_dtype *dtype, const int64_t *shape, int32_t rank,
                          uint64_t *bytes) {
    uint64_t bits = dtype->bits;
    for (int32_t i = 0; i < rank; i++)
        if (__builtin_mul_overflow(bits, (uint64_t)shape[i], &bits))
            return false;
    *bytes = bits / 8;
    return bits % 8 == 0;
}

/* A tensor's place in the data, read before anything else about it is believed. */
static megamoe_status read_offsets(const char *path, const char *name, const json_t *entry,
                                   uint64_t data_bytes, uint64_t *begin, uint64_t *end) {
    const json_t *offsets = json_object_get(entry, "data_offsets");
    const json_t *first = json_array_get(offsets, 0);
    const json_t *second = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(second))
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s: data_offsets must be an array of two integers, begin and end", path,
                       name);
    const json_int_t b = json_integer_value(first);
    const json_int_t e = json_integer_value(second);
    if (b < 0 || e < 0)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s: data_offsets [%" PRId64 ", %" PRId64 "] must not be negative", path,
                       name, (int64_t)b, (int64_t)e);
    if (e < b)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s: data_offsets [%" PRId64 ", %" PRId64 "] end before they begin",
                       path, name, (int64_t)b, (int64_t)e);
    if ((uint64_t)e > data_bytes)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s: data_offsets [%" PRId64 ", %" PRId64
                       "] reach past the end of the file, which holds %" PRIu64
                       " bytes of data (is the download complete?)",
                       path, name, (int64_t)b, (int64_t)e, data_bytes);
    *begin = (uint64_t)b;
    *end = (uint64_t)e;
    return MEGAMOE_OK;
}

static megamoe_status read_shape(const char *path, const json_t *entry, mm_tensor *tensor) {
    const json_t *shape = json_object_get(entry, "shape");
    if (!json_is_array(shape))
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s: shape must be an array of integers", path,
                       tensor->name);
    const size_t rank = json_array_size(shape);
    if (rank > MM_TENSOR_RANK_MAX)
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s: shape has %zu dimensions; at most %d are read",
                       path, tensor->name, rank, MM_TENSOR_RANK_MAX);
    for (size_t i = 0; i < rank; i++) {
        const json_t *size = json_array_get(shape, i);
        if (!json_is_integer(size) || json_integer_value(size) < 0)
            return mm_fail(MEGAMOE_EFORMAT,
                           "%s: %s: shape[%zu] must be an integer that is not negative", path,
                           tensor->name, i);
        tensor->shape[i] = json_integer_value(size);
    }
    tensor->rank = (int32_t)rank;
    return MEGAMOE_OK;
}

/* The data begin at data_begin of the file. */
static megamoe_status read_tensor(const char *path, const json_t *entry, uint64_t data_begin,
                                  uint64_t data_bytes, mm_tensor *tensor) {
    if (!json_is_object(entry))
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s: must be an object with dtype, shape and data_offsets", path,
                       tensor->name);
    uint64_t begin = 0, end = 0;
    MM_TRY(read_offsets(path, tensor->name, entry, data_bytes, &begin, &end));
    MM_TRY(read_shape(path, entry, tensor));
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    if (!dtype)
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s: dtype must be a string", path, tensor->name);
    tensor->dtype = mm_safetensors_dtype_find(dtype);
    if (!tensor->dtype)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: %s: dtype \"%s\" is none that safetensors defines (BF16, F8_E4M3, ...)",
                       path, tensor->name, dtype);
    char shape[MM_SHAPE_TEXT];
    mm_shape_text(tensor->shape, tensor->rank, shape);
    uint64_t bytes;
    if (!mm_safetensors_bytes(tensor->dtype, tensor->shape, tensor->rank, &bytes))
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s: shape %s in %s overflows 2^64 bits or is no whole number of bytes",
                       path, tensor->name, shape, dtype);
    if (bytes != end - begin)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s: data_offsets span %" PRIu64
                       " bytes, but shape %s in %s takes %" PRIu64,
                       path, tensor->name, end - begin, shape, dtype, bytes);
    tensor->offset = data_begin + begin;
    tensor->bytes = bytes;
    return MEGAMOE_OK;
}

static megamoe_status check_metadata(const char *path, const json_t *metadata) {
    if (!json_is_object(metadata))
        return mm_fail(MEGAMOE_EFORMAT, "%s: __metadata__ must be an object of strings", path);
    for (void *i = json_object_iter((json_t *)metadata); i;
         i = json_object_iter_next((json_t *)metadata, i))
        if (!json_is_string(json_object_iter_value(i)))
            return mm_fail(MEGAMOE_EFORMAT, "%s: __metadata__: \"%s\" must be a string", path,
                           json_object_iter_key(i));
    return MEGAMOE_OK;
}

static int by_place(const void *a, const void *b) {
    const mm_tensor *x = a, *y = b;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    /* An empty tensor shares its begin with the one that follows. */
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

/* The tensors must tile the data: no gap, no overlap, nothing behind the last. */
static megamoe_status check_tiling(const char *path, mm_tensor_file *file, uint64_t data_begin,
                                   uint64_t data_bytes) {
    qsort(file->tensors, file->n, sizeof *file->tensors, by_place);
    uint64_t end = 0;
    for (size_t i = 0; i < file->n; i++) {
        const mm_tensor *tensor = &file->tensors[i];
        const uint64_t begin = tensor->offset - data_begin;
        const char *before = i ? file->tensors[i - 1].name : "the start of the data";
        if (begin < end)
            return mm_fail(MEGAMOE_EFORMAT,
                           "%s: %s: its data begin at %" PRIu64 " and overlap those of %s, which "
                           "end at %" PRIu64,
                           path, tensor->name, begin, before, end);
        if (begin > end)
            return mm_fail(MEGAMOE_EFORMAT,
                           "%s: %s: its data begin at %" PRIu64
                           ", which leaves a gap behind %s at %" PRIu64,
                           path, tensor->name, begin, before, end);
        end = begin + tensor->bytes;
    }
    if (end != data_bytes)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %" PRIu64 " bytes follow the last tensor, which ends at %" PRIu64
                       " of %" PRIu64
                       "; the file was padded or appended to, or its header was cut: "
                       "write it again without them",
                       path, data_bytes - end, end, data_bytes);
    return MEGAMOE_OK;
}

static megamoe_status read_header(const char *path, const char *text, size_t bytes,
                                  json_t **header) {
    if (bytes == 0 || text[0] != '{')
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: its header must start with '{'; this is no safetensors file", path);
    if (text[bytes - 1] == 0) {
        size_t last = bytes;
        while (last && text[last - 1] == 0)
            last--;
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: its header is padded with %zu NUL bytes; the format pads with spaces: "
                       "write it again with those",
                       path, bytes - last);
    }
    json_error_t error;
    const megamoe_status status = mm_json_parse(text, bytes, header, &error);
    if (status == MEGAMOE_OK)
        return status;
    if (status == MEGAMOE_ENOMEM)
        return mm_fail(status, "%s: out of memory for its header", path);
    return mm_fail(status, "%s: its header is not valid: %s (byte %d)", path, error.text,
                   error.position);
}

static megamoe_status read_tensors(const char *path, json_t *header, uint64_t data_begin,
                                   uint64_t data_bytes, mm_tensor_file *file) {
    size_t n = 0, names_bytes = 0;
    const char *key;
    json_t *entry;
    json_object_foreach(header, key, entry) {
        if (strcmp(key, "__metadata__") == 0) {
            MM_TRY(check_metadata(path, entry));
            continue;
        }
        n++;
        names_bytes += strlen(key) + 1;
    }
    file->tensors = calloc(n ? n : 1, sizeof *file->tensors);
    file->names = malloc(names_bytes ? names_bytes : 1);
    if (!file->tensors || !file->names)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory for %zu tensors", path, n);
    char *name = file->names;
    json_object_foreach(header, key, entry) {
        if (strcmp(key, "__metadata__") == 0)
            continue;
        mm_tensor *tensor = &file->tensors[file->n++];
        tensor->file = file;
        tensor->name = name;
        name = stpcpy(name, key) + 1;
        MM_TRY(read_tensor(path, entry, data_begin, data_bytes, tensor));
    }
    return check_tiling(path, file, data_begin, data_bytes);
}

/* Of a file that begins with `data`. */
static megamoe_status read_length(const char *path, const uint8_t *data, uint64_t file_bytes,
                                  uint64_t *header_bytes) {
    if (file_bytes < LENGTH_BYTES)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: it has %" PRIu64
                       " bytes; a safetensors file starts with %d bytes of header length",
                       path, file_bytes, LENGTH_BYTES);
    uint64_t length = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--)
        length = length << 8 | data[i];
    if (length > file_bytes - LENGTH_BYTES)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: its header length is %" PRIu64 ", but only %" PRIu64 " bytes follow",
                       path, length, file_bytes - LENGTH_BYTES);
    if (length > MM_SAFETENSORS_HEADER_MAX)
        return mm_fail(MEGAMOE_EFORMAT, "%s: its header length is %" PRIu64 "; at most %d is read",
                       path, length, MM_SAFETENSORS_HEADER_MAX);
    *header_bytes = length;
    return MEGAMOE_OK;
}

/* Fills all but the path and the source. */
static megamoe_status parse(const char *path, const char *text, uint64_t header_bytes,
                            uint64_t file_bytes, mm_tensor_file *file) {
    json_t *header = NULL;
    MM_TRY(read_header(path, text, header_bytes, &header));
    const uint64_t data_begin = LENGTH_BYTES + header_bytes;
    const megamoe_status status =
        read_tensors(path, header, data_begin, file_bytes - data_begin, file);
    json_decref(header);
    return status;
}

static megamoe_status set_path(mm_tensor_file *file, const char *path) {
    *file = (mm_tensor_file){.path = strdup(path)};
    return file->path ? MEGAMOE_OK : mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", path);
}

megamoe_status mm_safetensors_parse(const char *path, const uint8_t *data, uint64_t bytes,
                                    mm_tensor_file *file) {
    uint64_t header_bytes = 0;
    MM_TRY(set_path(file, path));
    MM_TRY(read_length(path, data, bytes, &header_bytes));
    return parse(path, (const char *)data + LENGTH_BYTES, header_bytes, bytes, file);
}

megamoe_status mm_safetensors_open(const char *path, mm_tensor_file *file) {
    uint8_t length[LENGTH_BYTES] = {0};
    uint64_t header_bytes = 0;
    MM_TRY(set_path(file, path));
    MM_TRY(mm_file_open(path, &file->source));
    const uint64_t bytes = file->source.bytes;
    if (bytes >= LENGTH_BYTES)
        MM_TRY(mm_file_read(&file->source, 0, length, sizeof length));
    MM_TRY(read_length(path, length, bytes, &header_bytes));
    char *text = malloc(header_bytes + 1);
    if (!text)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory for its header", path);
    megamoe_status status = mm_file_read(&file->source, LENGTH_BYTES, text, header_bytes);
    if (status == MEGAMOE_OK)
        status = parse(path, text, header_bytes, bytes, file);
    free(text);
    return status;
}
