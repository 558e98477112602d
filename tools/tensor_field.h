/* SPDX-License-Identifier: Apache-2.0 */
/* A tensor that a command takes from a safetensors file. */
#ifndef TENSOR_FIELD_H
#define TENSOR_FIELD_H

#include <megamoe/checkpoint.h>

typedef struct tensor_field {
    const char *name;
    int32_t rank;
    megamoe_dtype dtypes[2]; /* those allowed */
    megamoe_dtype dtype;
    int64_t shape[2];
    void *data; /* an aligned copy, to be freed by the caller; NULL if the file does not hold it */
} tensor_field;

/* These print their error and return an exit code. */
int tensor_field_read(const char *path, const megamoe_checkpoint *file, tensor_field *f);

/* Every id must be in least..n-1. */
int tensor_field_check_ids(const char *path, const tensor_field *f, int64_t least, int64_t n);

/* The i-th of I32 or I64 values. */
int64_t tensor_field_id(const tensor_field *f, int64_t i);

#endif
