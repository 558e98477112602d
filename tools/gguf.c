/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "gguf.h"

#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "report.h"

enum { VERSION = 3, ALIGNMENT = 32 };
enum { VALUE_U32 = 4, VALUE_F32 = 6, VALUE_BOOL = 7, VALUE_STRING = 8, VALUE_ARRAY = 9 };

struct gguf_writer {
    char *keys; /* with their values, as the file has them */
    size_t keys_bytes;
    uint64_t n_keys;
    FILE *stream; /* that fills `keys` */
};

gguf_writer *gguf_open(void) {
    gguf_writer *writer = calloc(1, sizeof *writer);
    if (writer == NULL)
        return NULL;
    writer->stream = open_memstream(&writer->keys, &writer->keys_bytes);
    if (writer->stream == NULL) {
        free(writer);
        return NULL;
    }
    return writer;
}

void gguf_close(gguf_writer *writer) {
    if (writer == NULL)
        return;
    fclose(writer->stream);
    free(writer->keys);
    free(writer);
}

/* Errors of streams are looked at when all is written. */

static void put_u32(FILE *stream, uint32_t value) {
    value = htole32(value);
    fwrite(&value, sizeof value, 1, stream);
}

static void put_u64(FILE *stream, uint64_t value) {
    value = htole64(value);
    fwrite(&value, sizeof value, 1, stream);
}

static void put_f32(FILE *stream, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_u32(stream, bits);
}

static void put_string(FILE *stream, const char *text) {
    put_u64(stream, strlen(text));
    fputs(text, stream);
}

static FILE *add(gguf_writer *writer, const char *key, uint32_t type) {
    writer->n_keys++;
    put_string(writer->stream, key);
    put_u32(writer->stream, type);
    return writer->stream;
}

void gguf_add_string(gguf_writer *writer, const char *key, const char *value) {
    put_string(add(writer, key, VALUE_STRING), value);
}

void gguf_add_u32(gguf_writer *writer, const char *key, uint32_t value) {
    put_u32(add(writer, key, VALUE_U32), value);
}

void gguf_add_f32(gguf_writer *writer, const char *key, float value) {
    put_f32(add(writer, key, VALUE_F32), value);
}

void gguf_add_bool(gguf_writer *writer, const char *key, bool value) {
    fputc(value, add(writer, key, VALUE_BOOL));
}

void gguf_add_f32s(gguf_writer *writer, const char *key, float value, uint64_t n) {
    FILE *stream = add(writer, key, VALUE_ARRAY);
    put_u32(stream, VALUE_F32);
    put_u64(stream, n);
    for (uint64_t i = 0; i < n; i++)
        put_f32(stream, value);
}

/* Values in a block, values that share a scale, bytes of a block. */
static void block_of(gguf_type type, size_t *values, size_t *group, size_t *bytes) {
    const bool mxfp4 = type == GGUF_MXFP4, nvfp4 = type == GGUF_NVFP4;
    *values = mxfp4 ? 32 : nvfp4 ? 64 : 1;
    *group = mxfp4 ? 32 : nvfp4 ? 16 : 1;
    *bytes = mxfp4 ? 17 : nvfp4 ? 36 : 4;
}

uint64_t gguf_tensor_bytes(const gguf_tensor *tensor) {
    size_t values, group, bytes;
    block_of(tensor->type, &values, &group, &bytes);
    uint64_t n = 1;
    for (uint32_t i = 0; i < tensor->rank; i++)
        n *= (uint64_t)tensor->shape[i];
    return n / values * bytes;
}

void gguf_pack(gguf_type type, const uint8_t *codes, const uint8_t *scales, size_t values,
               uint8_t *blocks) {
    size_t block, group, bytes;
    block_of(type, &block, &group, &bytes);
    const size_t groups = block / group;
    for (size_t b = 0; b < values / block; b++) {
        memcpy(blocks, scales, groups);
        blocks += groups;
        scales += groups;
        /* Of each group the first half goes to the low nibbles, the second to the high ones. */
        for (size_t g = 0; g < groups; g++) {
            const uint8_t *second = codes + group / 4;
            for (size_t i = 0; i < group / 4; i++) {
                *blocks++ = (uint8_t)((codes[i] & 15) | second[i] << 4);
                *blocks++ = (uint8_t)(codes[i] >> 4 | (second[i] & 0xF0));
            }
            codes += group / 2;
        }
    }
}

static uint64_t padded(uint64_t bytes) {
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static void put_padding(FILE *stream, uint64_t written) {
    static const char zeros[ALIGNMENT];
    fwrite(zeros, 1, padded(written) - written, stream);
}

static void put_header(const gguf_writer *writer, FILE *out, const gguf_tensor *tensors, size_t n) {
    fputs("GGUF", out);
    put_u32(out, VERSION);
    put_u64(out, n);
    put_u64(out, writer->n_keys);
    fwrite(writer->keys, 1, writer->keys_bytes, out);
    uint64_t offset = 0;
    for (size_t i = 0; i < n; i++) {
        const gguf_tensor *tensor = &tensors[i];
        put_string(out, tensor->name);
        put_u32(out, tensor->rank);
        for (uint32_t d = tensor->rank; d-- > 0;)
            put_u64(out, (uint64_t)tensor->shape[d]);
        put_u32(out, tensor->type);
        put_u64(out, offset);
        offset += padded(gguf_tensor_bytes(tensor));
    }
    put_padding(out, (uint64_t)ftello(out));
}

static bool put_tensors(FILE *out, const gguf_tensor *tensors, size_t n, gguf_fill fill, void *user,
                        megamoe_progress progress) {
    uint64_t total = 0, done = 0;
    for (size_t i = 0; i < n; i++)
        total += gguf_tensor_bytes(&tensors[i]);
    for (size_t i = 0; i < n; i++) {
        const uint64_t bytes = gguf_tensor_bytes(&tensors[i]);
        void *data = calloc(1, bytes ? bytes : 1);
        if (data == NULL) {
            report_error("out of memory");
            return false;
        }
        const bool filled = fill(user, i, data);
        if (filled) {
            fwrite(data, 1, bytes, out);
            put_padding(out, bytes);
        }
        free(data);
        if (!filled)
            return false;
        done += bytes;
        if (progress.fn != NULL)
            progress.fn(progress.user, done, total);
    }
    return true;
}

bool gguf_save(gguf_writer *writer, const char *path, const gguf_tensor *tensors, size_t n,
               gguf_fill fill, void *user, megamoe_progress progress) {
    if (fflush(writer->stream) != 0 || ferror(writer->stream)) {
        report_error("out of memory");
        return false;
    }
    FILE *out = fopen(path, "wbe");
    if (out == NULL) {
        report_error("%s: cannot be made: %s", path, strerror(errno));
        return false;
    }
    put_header(writer, out, tensors, n);
    const bool complete = put_tensors(out, tensors, n, fill, user, progress);
    const bool failed = fflush(out) != 0 || ferror(out) || fsync(fileno(out)) != 0;
    const int error = errno;
    if ((fclose(out) != 0 || failed) && complete)
        report_error("%s: cannot be written: %s", path, strerror(error));
    return complete && !failed;
}
