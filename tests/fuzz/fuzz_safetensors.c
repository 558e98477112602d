/* SPDX-License-Identifier: Apache-2.0 */
/* The safetensors reader on a file in memory: it must refuse or give tensors inside the input. */
#include <stdlib.h>

#include "checkpoint/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    mm_tensor_file file;
    if (mm_safetensors_parse("input", data, size, &file) == MEGAMOE_OK) {
        uint64_t total = 0;
        for (size_t i = 0; i < file.n; i++) {
            const mm_tensor *tensor = &file.tensors[i];
            if (tensor->offset > size || tensor->bytes > size - tensor->offset)
                abort();
            total += tensor->bytes;
        }
        if (total > size)
            abort();
    }
    mm_tensor_file_close(&file);
    return 0;
}
