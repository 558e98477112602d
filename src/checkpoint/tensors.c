/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/tensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void mm_tensor_file_close(mm_tensor_file *file) {
    free(file->tensors);
    free(file->names);
    free(file->path);
    mm_file_close(&file->source);
    *file = (mm_tensor_file){0};
}

const char *mm_tensor_file_name(const mm_tensor_file *file) {
    const char *slash = strrchr(file->path, '/');
    return slash ? slash + 1 : file->path;
}

megamoe_status mm_tensor_read(const mm_tensor *tensor, uint64_t offset, void *to, size_t bytes) {
    return mm_file_read(&tensor->file->source, tensor->offset + offset, to, bytes);
}

const char *mm_shape_text(const int64_t *shape, int32_t rank, char text[MM_SHAPE_TEXT]) {
    size_t n = 1;
    text[0] = '[';
    for (int32_t i = 0; i < rank; i++)
        n += (size_t)snprintf(text + n, MM_SHAPE_TEXT - n, "%s%" PRId64, i ? ", " : "", shape[i]);
    snprintf(text + n, MM_SHAPE_TEXT - n, "]");
    return text;
}
