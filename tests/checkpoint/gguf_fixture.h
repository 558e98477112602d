/* SPDX-License-Identifier: Apache-2.0 */
/* Small GGUF files built key by key and tensor by tensor, and values of their blocks. */
#ifndef GGUF_FIXTURE_H
#define GGUF_FIXTURE_H

#include "fixture.h"

/* The numbers of types in the file. */
enum { GGUF_F32 = 0, GGUF_Q8_0 = 8, GGUF_Q4_K = 12, GGUF_I32 = 26, GGUF_BF16 = 30 };
enum { GGUF_MXFP4 = 39, GGUF_NVFP4 = 40 };
enum { VALUE_U8, VALUE_I8, VALUE_U16, VALUE_I16, VALUE_U32, VALUE_I32, VALUE_F32, VALUE_BOOL };
enum { VALUE_STRING = 8, VALUE_ARRAY, VALUE_U64, VALUE_I64, VALUE_F64 };

typedef struct buffer {
    uint8_t *data;
    size_t n;
} buffer;

typedef struct gguf_tensor {
    char name[96];
    uint32_t type;
    uint32_t rank;
    uint64_t dims[5]; /* the first varies fastest */
    uint8_t *data;
    uint64_t bytes;
} gguf_tensor;

typedef struct gguf {
    buffer keys;
    uint64_t n_keys;
    gguf_tensor tensors[24];
    size_t n;
    uint64_t alignment; /* how tensors are placed; a key for it is the caller's */
    t_random random;
} gguf;

gguf gguf_start(void);
void gguf_free(gguf *file);

/* Keys: the value's type and bytes, or one of the usual kinds. */
void gguf_value(gguf *file, const char *key, uint32_t type, const void *value, size_t bytes);
void gguf_text(gguf *file, const char *key, const char *text);
void gguf_u32(gguf *file, const char *key, uint32_t value);
void gguf_f32(gguf *file, const char *key, float value);
void gguf_bool(gguf *file, const char *key, bool value);
void gguf_f32s(gguf *file, const char *key, const float *values, size_t n);

/* Bytes are zero. `shape` is {..., -1} with the last dimension varying fastest. */
gguf_tensor *gguf_add(gguf *file, uint32_t type, const int64_t *shape, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
gguf_tensor *gguf_find(gguf *file, const char *name); /* ends the case if it is not there */
void gguf_remove(gguf *file, const char *name);

/* The whole file; the caller frees .data. */
buffer gguf_bytes(const gguf *file);
const char *gguf_save(const gguf *file, const char *name); /* in the program's directory */

/* Random codes and scales, or F32 numbers of about 1. */
void gguf_randomize(gguf *file, gguf_tensor *tensor);

/* An element of a tensor [experts, rows, k] by ggml's own tables, without a scale of the expert. */
double gguf_element(const gguf_tensor *tensor, int64_t expert, int64_t row, int64_t k);
float gguf_number(const gguf_tensor *tensor, int64_t index); /* of F32 */

/* The expert tensors of a layer, random. */
typedef struct gguf_layer {
    int32_t layer;
    uint32_t type;
    sizes s;
    bool merged, bias, scale;
} gguf_layer;
void gguf_add_experts(gguf *file, const gguf_layer *layer);

#endif
