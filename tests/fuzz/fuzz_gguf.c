/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A GGUF file: the reader must refuse it or give tensors inside the input; then the layers and
 * routers that it holds are read.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "checkpoint/gguf.h"
#include "megamoe/checkpoint.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char path[] = "/tmp/megamoe-fuzz-XXXXXX.gguf";

static void remove_file(void) {
    unlink(path);
}

static void place(const uint8_t *data, size_t size) {
    static int fd = -1;
    if (fd < 0) {
        fd = mkostemps(path, sizeof ".gguf" - 1, O_CLOEXEC);
        atexit(remove_file);
    }
    if (fd < 0 || ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != (ssize_t)size)
        abort();
}

/* Tensors follow each other, each inside the input. */
static void check(size_t size, const mm_tensor_file *file) {
    uint64_t end = 0;
    for (size_t i = 0; i < file->n; i++) {
        const mm_tensor *tensor = &file->tensors[i];
        if (tensor->offset < end || tensor->offset > size || tensor->bytes > size - tensor->offset)
            abort();
        end = tensor->offset + tensor->bytes;
    }
}

static void read_all(const megamoe_weights *weights) {
    static megamoe_weights_report report;
    report.struct_size = sizeof report;
    megamoe_matrix matrix;
    if (megamoe_weights_analyze(weights, 1, (megamoe_progress){0}, &report) != MEGAMOE_OK ||
        megamoe_weights_matrix(weights, 0, MEGAMOE_DOWN, &matrix) != MEGAMOE_OK || !matrix.codes)
        abort();
}

static void use(const megamoe_checkpoint *checkpoint) {
    megamoe_checkpoint_info info = MEGAMOE_INIT(megamoe_checkpoint_info);
    if (megamoe_checkpoint_describe(checkpoint, &info) != MEGAMOE_OK)
        abort();
    for (int32_t i = 0; i < info.layers; i++) {
        const int32_t layer = megamoe_checkpoint_layer(checkpoint, i);
        megamoe_weights *weights = NULL;
        megamoe_router *router = NULL;
        const megamoe_status status = megamoe_checkpoint_weights(checkpoint, layer, &weights);
        if ((status == MEGAMOE_OK) != (weights != NULL))
            abort();
        if (weights)
            read_all(weights);
        if (megamoe_checkpoint_router(checkpoint, layer, &router) == MEGAMOE_OK)
            megamoe_router_close(router);
        megamoe_weights_close(weights);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    mm_tensor_file file;
    json_t *metadata;
    const megamoe_status status = mm_gguf_parse("input", data, size, &file, &metadata);
    if (status == MEGAMOE_OK)
        check(size, &file);
    mm_tensor_file_close(&file);
    json_decref(metadata);
    if (status != MEGAMOE_OK)
        return 0;
    place(data, size);
    megamoe_checkpoint *checkpoint = NULL;
    if (megamoe_checkpoint_open(path, &checkpoint) == MEGAMOE_OK)
        use(checkpoint);
    megamoe_checkpoint_close(checkpoint);
    return 0;
}
