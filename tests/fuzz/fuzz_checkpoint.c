/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A whole checkpoint: the input holds config.json, hf_quant_config.json, the index and
 * model.safetensors, with a byte 0x1E between them. An empty part is a file that is not there.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "megamoe/checkpoint.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char directory[] = "/tmp/megamoe-fuzz-XXXXXX";

static const char *const names[] = {"config.json", "hf_quant_config.json",
                                    "model.safetensors.index.json", "model.safetensors"};
enum { PARTS = sizeof names / sizeof *names };

static void in_directory(char path[128], const char *name) {
    snprintf(path, 128, "%s/%s", directory, name);
}

static void remove_directory(void) {
    char path[128];
    for (int i = 0; i < PARTS; i++) {
        in_directory(path, names[i]);
        unlink(path);
    }
    rmdir(directory);
}

static void place(const char *name, const uint8_t *data, size_t size) {
    char path[128];
    in_directory(path, name);
    unlink(path);
    if (size == 0)
        return;
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size)
        abort();
    close(fd);
}

static void read_all(const megamoe_weights *weights) {
    static megamoe_weights_report report;
    report.struct_size = sizeof report;
    megamoe_matrix matrix;
    if (megamoe_weights_analyze(weights, 1, (megamoe_progress){0}, &report) != MEGAMOE_OK ||
        megamoe_weights_matrix(weights, 0, MEGAMOE_DOWN, &matrix) != MEGAMOE_OK || !matrix.codes)
        abort();
}

/* Of wide layers; what is described can be quantized, but for weights that are not finite. */
static void quantize(const megamoe_checkpoint *checkpoint, int32_t layer) {
    megamoe_stored_layer stored = MEGAMOE_INIT(megamoe_stored_layer);
    const megamoe_status described = megamoe_checkpoint_stored(checkpoint, layer, &stored);
    megamoe_quantize_options options = MEGAMOE_INIT(megamoe_quantize_options);
    options.format = MEGAMOE_FORMAT_NVFP4;
    options.threads = 1;
    megamoe_weights *weights = NULL;
    const megamoe_status status =
        megamoe_checkpoint_quantize(checkpoint, layer, &options, &weights);
    if ((status == MEGAMOE_OK) != (weights != NULL) ||
        (status == MEGAMOE_OK && (described != MEGAMOE_OK || !stored.wide)))
        abort();
    megamoe_weights_close(weights);
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
        quantize(checkpoint, layer);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static bool made;
    if (!made) {
        if (!mkdtemp(directory))
            abort();
        atexit(remove_directory);
        made = true;
    }
    for (int i = 0; i < PARTS; i++) {
        const uint8_t *end = i < PARTS - 1 ? memchr(data, 0x1E, size) : NULL;
        const size_t part = end ? (size_t)(end - data) : size;
        place(names[i], data, part);
        data += part;
        size -= part;
        if (size) {
            data++;
            size--;
        }
    }
    megamoe_checkpoint *checkpoint = NULL;
    if (megamoe_checkpoint_open(directory, &checkpoint) == MEGAMOE_OK)
        use(checkpoint);
    megamoe_checkpoint_close(checkpoint);
    return 0;
}
