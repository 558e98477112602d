/* SPDX-License-Identifier: Apache-2.0 */
/* One safetensors file, every check of docs/formats.md made before a tensor is handed out. */
#ifndef MM_CHECKPOINT_SAFETENSORS_H
#define MM_CHECKPOINT_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "checkpoint/tensors.h"

enum { MM_SAFETENSORS_HEADER_MAX = 100000000 };

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

/* NULL for a name that the format does not define. Static storage. */
const mm_dtype *mm_safetensors_dtype_find(const char *name);

/* Bytes of a tensor. False if the product overflows or is no whole number of bytes. */
bool mm_safetensors_bytes(const mm_dtype *dtype, const int64_t *shape, int32_t rank,
                          uint64_t *bytes);

/* Needs mm_tensor_file_close in case of failure too. */
MEGAMOE_CHECKED megamoe_status mm_safetensors_open(const char *path, mm_tensor_file *file);

/* The same for a file in memory; `path` is for messages. Its tensors cannot be read. */
MEGAMOE_CHECKED megamoe_status mm_safetensors_parse(const char *path, const uint8_t *data,
                                                    uint64_t bytes, mm_tensor_file *file);

#endif
