/* SPDX-License-Identifier: Apache-2.0 */
/* One safetensors file, every check of docs/formats.md made before a tensor is handed out. */
#ifndef MM_CHECKPOINT_SAFETENSORS_H
#define MM_CHECKPOINT_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/file.h"
#include "megamoe/status.h"

enum { MM_TENSOR_RANK_MAX = 8, MM_SAFETENSORS_HEADER_MAX = 100000000 };

/* The element types that the format defines. X(name, bits per element) */
#define MM_SAFETENSORS_DTYPES(X)                                                                   \
    X(BOOL, 8)                                                                                     \
    X(F4, 4)                                                                                       \
    X(F6_E2M3, 6)                                                                                  \
    X(F6_E3M2, 6)                                                                                  \
    X(U8, 8)                                                                                       \
    X(I8, 8)                                                                                       \
    X(F8_E5M2, 8)                                                                                  \
    X(F8_E4M3, 8)                                                                                  \
    X(F8_E8M0, 8)                                                                                  \
    X(F8_E4M3FNUZ, 8)                                                                              \
    X(F8_E5M2FNUZ, 8)                                                                              \
    X(I16, 16)                                                                                     \
    X(U16, 16)                                                                                     \
    X(F16, 16)                                                                                     \
    X(BF16, 16)                                                                                    \
    X(I32, 32)                                                                                     \
    X(U32, 32)                                                                                     \
    X(F32, 32)                                                                                     \
    X(C64, 64)                                                                                     \
    X(F64, 64)                                                                                     \
    X(I64, 64)                                                                                     \
    X(U64, 64)

typedef struct mm_safetensors_dtype {
    const char *name;
    uint32_t bits;
} mm_safetensors_dtype;

/* NULL for a name that the format does not define. Static storage. */
const mm_safetensors_dtype *mm_safetensors_dtype_find(const char *name);

/* Bytes of a tensor. False if the product overflows or is no whole number of bytes. */
bool mm_safetensors_bytes(const mm_safetensors_dtype *dtype, const int64_t *shape, int32_t rank,
                          uint64_t *bytes);

/* A shape for messages: "[2048, 64]". */
enum { MM_SHAPE_TEXT = 192 };
const char *mm_shape_text(const int64_t *shape, int32_t rank, char text[MM_SHAPE_TEXT]);

struct mm_safetensors;

/* Borrowed from its file: the name lives as long as that. */
typedef struct mm_tensor {
    const struct mm_safetensors *file;
    const char *name;
    const mm_safetensors_dtype *dtype;
    uint64_t offset; /* of its bytes in the file; no alignment */
    uint64_t bytes;
    int32_t rank;
    int64_t shape[MM_TENSOR_RANK_MAX];
} mm_tensor;

/* Zero-initialised is closed. It must not move while tensors of it are in use. */
typedef struct mm_safetensors {
    char *path;
    mm_file source;
    mm_tensor *tensors; /* in the order of their data */
    size_t n;
    char *names; /* all names, each ending with a NUL */
} mm_safetensors;

/* Needs mm_safetensors_close in case of failure too. */
MEGAMOE_CHECKED megamoe_status mm_safetensors_open(const char *path, mm_safetensors *file);
void mm_safetensors_close(mm_safetensors *file);

/* The last part of its path. */
const char *mm_safetensors_name(const mm_safetensors *file);

/* The same for a file in memory; `path` is for messages. Its tensors cannot be read. */
MEGAMOE_CHECKED megamoe_status mm_safetensors_parse(const char *path, const uint8_t *data,
                                                    uint64_t bytes, mm_safetensors *file);

/* A part of a tensor's bytes, which must lie in them. Thread: any. */
MEGAMOE_CHECKED megamoe_status mm_tensor_read(const mm_tensor *tensor, uint64_t offset, void *to,
                                              size_t bytes);

#endif
