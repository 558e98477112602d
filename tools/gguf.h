/* SPDX-License-Identifier: Apache-2.0 */
/* Writes GGUF files, version 3. */
#ifndef GGUF_H
#define GGUF_H

#include <megamoe/types.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum gguf_type { GGUF_F32 = 0, GGUF_I32 = 26, GGUF_MXFP4 = 39, GGUF_NVFP4 = 40 } gguf_type;

enum { GGUF_NAME_BYTES = 64 };

typedef struct gguf_tensor {
    char name[GGUF_NAME_BYTES];
    gguf_type type;
    uint32_t rank;
    int64_t shape[4]; /* the last one varies fastest */
} gguf_tensor;

uint64_t gguf_tensor_bytes(const gguf_tensor *tensor);

/* A header in the making: keys come first, then all tensors at once. */
typedef struct gguf_writer gguf_writer;

/* NULL: out of memory. */
gguf_writer *gguf_open(void);
/* Accepts NULL. */
void gguf_close(gguf_writer *writer);

void gguf_add_string(gguf_writer *writer, const char *key, const char *value);
void gguf_add_u32(gguf_writer *writer, const char *key, uint32_t value);
void gguf_add_f32(gguf_writer *writer, const char *key, float value);
void gguf_add_bool(gguf_writer *writer, const char *key, bool value);
/* The same number n times. */
void gguf_add_f32s(gguf_writer *writer, const char *key, float value, uint64_t n);

/* Fills the bytes of tensor `index`, which are zero; called for each tensor once, in order. */
typedef bool (*gguf_fill)(void *user, size_t index, void *data);

/*
 * Writes the file. Only one tensor is in memory at a time. False after an error, which is printed;
 * what has been written then stays. `fill` prints its own.
 */
bool gguf_save(gguf_writer *writer, const char *path, const gguf_tensor *tensors, size_t n,
               gguf_fill fill, void *user, megamoe_progress progress);

/*
 * Packs codes, two a byte in ascending k, and block scales of `values` values into blocks of type
 * MXFP4 or NVFP4.
 */
void gguf_pack(gguf_type type, const uint8_t *codes, const uint8_t *scales, size_t values,
               uint8_t *blocks);

#endif
