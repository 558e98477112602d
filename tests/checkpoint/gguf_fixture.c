/* SPDX-License-Identifier: Apache-2.0 */
#include "gguf_fixture.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

gguf gguf_start(void) {
    static uint64_t stream = 1000;
    return (gguf){.alignment = 32, .random = t_random_start(stream++)};
}

void gguf_free(gguf *file) {
    for (size_t i = 0; i < file->n; i++)
        free(file->tensors[i].data);
    free(file->keys.data);
    *file = (gguf){0};
}

static void append(buffer *to, const void *data, size_t n) {
    to->data = realloc(to->data, to->n + n + 1);
    memcpy(to->data + to->n, data, n);
    to->n += n;
}

static void append_number(buffer *to, uint64_t value, size_t n) {
    uint8_t little[8];
    for (size_t i = 0; i < n; i++)
        little[i] = (uint8_t)(value >> 8 * i);
    append(to, little, n);
}

static void append_text(buffer *to, const char *text) {
    append_number(to, strlen(text), 8);
    append(to, text, strlen(text));
}

void gguf_value(gguf *file, const char *key, uint32_t type, const void *value, size_t n) {
    append_text(&file->keys, key);
    append_number(&file->keys, type, 4);
    append(&file->keys, value, n);
    file->n_keys++;
}

void gguf_text(gguf *file, const char *key, const char *text) {
    buffer value = {0};
    append_text(&value, text);
    gguf_value(file, key, VALUE_STRING, value.data, value.n);
    free(value.data);
}

void gguf_u32(gguf *file, const char *key, uint32_t value) {
    gguf_value(file, key, VALUE_U32, &value, sizeof value);
}

void gguf_f32(gguf *file, const char *key, float value) {
    gguf_value(file, key, VALUE_F32, &value, sizeof value);
}

void gguf_bool(gguf *file, const char *key, bool value) {
    gguf_value(file, key, VALUE_BOOL, &(uint8_t){value}, 1);
}

void gguf_f32s(gguf *file, const char *key, const float *values, size_t n) {
    buffer value = {0};
    append_number(&value, VALUE_F32, 4);
    append_number(&value, n, 8);
    append(&value, values, n * sizeof *values);
    gguf_value(file, key, VALUE_ARRAY, value.data, value.n);
    free(value.data);
}

static void block_of(uint32_t type, uint64_t *elements, uint64_t *n) {
    *elements = type == GGUF_MXFP4 || type == GGUF_Q8_0 ? 32
                : type == GGUF_NVFP4                    ? 64
                : type == GGUF_Q4_K                     ? 256
                                                        : 1;
    *n = type == GGUF_MXFP4   ? 17
         : type == GGUF_NVFP4 ? 36
         : type == GGUF_Q8_0  ? 34
         : type == GGUF_Q4_K  ? 144
         : type == GGUF_BF16  ? 2
                              : 4;
}

gguf_tensor *gguf_add(gguf *file, uint32_t type, const int64_t *shape, const char *format, ...) {
    T_REQUIRE(file->n < sizeof file->tensors / sizeof *file->tensors);
    gguf_tensor *tensor = &file->tensors[file->n++];
    *tensor = (gguf_tensor){.type = type};
    va_list args;
    va_start(args, format);
    vsnprintf(tensor->name, sizeof tensor->name, format, args);
    va_end(args);
    uint64_t elements, block;
    block_of(type, &elements, &block);
    uint64_t count = 1;
    for (; shape[tensor->rank] >= 0; tensor->rank++)
        count *= (uint64_t)shape[tensor->rank];
    for (uint32_t i = 0; i < tensor->rank; i++)
        tensor->dims[i] = (uint64_t)shape[tensor->rank - 1 - i];
    tensor->bytes = count / elements * block;
    tensor->data = calloc(1, tensor->bytes + 1);
    return tensor;
}

gguf_tensor *gguf_find(gguf *file, const char *name) {
    for (size_t i = 0; i < file->n; i++)
        if (strcmp(file->tensors[i].name, name) == 0)
            return &file->tensors[i];
    T_CHECK_MSG(false, "the fixture has no %s", name);
    t_leave();
}

void gguf_remove(gguf *file, const char *name) {
    gguf_tensor *tensor = gguf_find(file, name);
    free(tensor->data);
    file->n--;
    memmove(tensor, tensor + 1, (size_t)(file->tensors + file->n - tensor) * sizeof *tensor);
}

static void pad(buffer *to, uint64_t alignment) {
    static const uint8_t zeros[256];
    append(to, zeros, (alignment - to->n % alignment) % alignment);
}

buffer gguf_bytes(const gguf *file) {
    buffer all = {0};
    append(&all, "GGUF", 4);
    append_number(&all, 3, 4);
    append_number(&all, file->n, 8);
    append_number(&all, file->n_keys, 8);
    append(&all, file->keys.data ? file->keys.data : (const uint8_t *)"", file->keys.n);
    uint64_t offset = 0;
    for (size_t i = 0; i < file->n; i++) {
        const gguf_tensor *tensor = &file->tensors[i];
        append_text(&all, tensor->name);
        append_number(&all, tensor->rank, 4);
        for (uint32_t d = 0; d < tensor->rank; d++)
            append_number(&all, tensor->dims[d], 8);
        append_number(&all, tensor->type, 4);
        append_number(&all, offset, 8);
        offset +=
            tensor->bytes + (file->alignment - tensor->bytes % file->alignment) % file->alignment;
    }
    for (size_t i = 0; i < file->n; i++) {
        pad(&all, file->alignment);
        append(&all, file->tensors[i].data, file->tensors[i].bytes);
    }
    if (file->n)
        pad(&all, file->alignment);
    return all;
}

const char *gguf_save(const gguf *file, const char *name) {
    const buffer all = gguf_bytes(file);
    t_write_file(t_path(name), all.data, all.n);
    free(all.data);
    return t_path(name);
}

void gguf_randomize(gguf *file, gguf_tensor *tensor) {
    uint64_t elements, block;
    block_of(tensor->type, &elements, &block);
    for (uint64_t i = 0; i < tensor->bytes; i += block) {
        if (elements == 1) {
            const float value = (float)t_normal(&file->random);
            memcpy(tensor->data + i, &value, block);
            continue;
        }
        for (uint64_t j = 0; j < block; j++)
            tensor->data[i + j] = (uint8_t)t_below(&file->random, 256);
        if (tensor->type == GGUF_MXFP4)
            tensor->data[i] = (uint8_t)(110 + t_below(&file->random, 20));
        for (int j = 0; j < 4 && tensor->type == GGUF_NVFP4; j++)
            tensor->data[i + (uint64_t)j] = (uint8_t)t_below(&file->random, 0x7F);
    }
}

/* Twice the value of each code, for scales that are half as large. */
static const int doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

double gguf_element(const gguf_tensor *tensor, int64_t expert, int64_t row, int64_t k) {
    uint64_t elements, bytes;
    block_of(tensor->type, &elements, &bytes);
    const uint64_t row_index = (uint64_t)expert * tensor->dims[1] + (uint64_t)row;
    const uint8_t *block = tensor->data + row_index * (tensor->dims[0] / elements) * bytes +
                           (uint64_t)k / elements * bytes;
    const uint64_t at = (uint64_t)k % elements;
    if (tensor->type == GGUF_MXFP4) {
        const uint8_t byte = block[1 + at % 16];
        return doubled[at < 16 ? byte & 15 : byte >> 4] * ldexp(1, block[0] - 128);
    }
    const uint64_t group = at / 16, in_group = at % 16;
    const uint8_t byte = block[4 + 8 * group + in_group % 8];
    const int exponent = block[group] >> 3, mantissa = block[group] & 7;
    const double scale = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return doubled[in_group < 8 ? byte & 15 : byte >> 4] * scale / 2;
}

float gguf_number(const gguf_tensor *tensor, int64_t index) {
    float value;
    memcpy(&value, tensor->data + (size_t)index * sizeof value, sizeof value);
    return value;
}

void gguf_add_experts(gguf *file, const gguf_layer *layer) {
    static const char *const separate[] = {"gate", "up", "down"};
    static const char *const merged[] = {"gate_up", "down"};
    const sizes s = layer->s;
    const int n = layer->merged ? 2 : 3;
    for (int i = 0; i < n; i++) {
        const bool down = i == n - 1;
        const char *stem = layer->merged ? merged[i] : separate[i];
        const int64_t rows = down ? s.hidden : s.intermediate * (layer->merged ? 2 : 1);
        const int64_t columns = down ? s.intermediate : s.hidden;
        gguf_randomize(file, gguf_add(file, layer->type, SHAPE(s.experts, rows, columns),
                                      "blk.%d.ffn_%s_exps.weight", layer->layer, stem));
        if (layer->bias)
            gguf_randomize(file, gguf_add(file, GGUF_F32, SHAPE(s.experts, rows),
                                          "blk.%d.ffn_%s_exps.bias", layer->layer, stem));
        if (!layer->scale)
            continue;
        gguf_tensor *scale = gguf_add(file, GGUF_F32, SHAPE(s.experts), "blk.%d.ffn_%s_exps.scale",
                                      layer->layer, stem);
        for (int32_t e = 0; e < s.experts; e++) {
            const float value = (float)(1e-5 * (1 + t_uniform(&file->random)));
            memcpy(scale->data + (size_t)e * sizeof value, &value, sizeof value);
        }
    }
}
