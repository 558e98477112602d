/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of one file, whatever its format. */
#ifndef MM_CHECKPOINT_TENSORS_H
#define MM_CHECKPOINT_TENSORS_H

#include <stdint.h>

#include "base/file.h"
#include "megamoe/status.h"

enum { MM_TENSOR_RANK_MAX = 8 };

/* A type of elements. Static storage, one object for each type of a format. */
typedef struct mm_dtype {
    const char *name; /* as the format spells it */
    uint32_t bits;    /* of an element; 0 where elements come in blocks */
} mm_dtype;

struct mm_tensor_file;

/* Borrowed from its file: the name lives as long as that. */
typedef struct mm_tensor {
    const struct mm_tensor_file *file;
    const char *name;
    const mm_dtype *dtype;
    uint64_t offset; /* of its bytes in the file; no alignment */
    uint64_t bytes;
    int32_t rank;
    int64_t shape[MM_TENSOR_RANK_MAX]; /* the last one varies fastest */
} mm_tensor;

/* Zero-initialised is closed. It must not move while tensors of it are in use. */
typedef struct mm_tensor_file {
    char *path;
    mm_file source;     /* closed for a file that was parsed in memory */
    mm_tensor *tensors; /* in the order of their data */
    size_t n;
    char *names; /* all names, each ending with a NUL */
} mm_tensor_file;

void mm_tensor_file_close(mm_tensor_file *file);

/* The last part of its path. */
const char *mm_tensor_file_name(const mm_tensor_file *file);

/* A part of a tensor's bytes, which must lie in them. Thread: any. */
MEGAMOE_CHECKED megamoe_status mm_tensor_read(const mm_tensor *tensor, uint64_t offset, void *to,
                                              size_t bytes);

/* A shape for messages: "[2048, 64]". */
enum { MM_SHAPE_TEXT = 192 };
const char *mm_shape_text(const int64_t *shape, int32_t rank, char text[MM_SHAPE_TEXT]);

#endif
