/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libFuzzer entry: prepared files. The input is one byte of choices, the fields of a header, and
 * bytes that go where the header puts the router; the rest of the file is zero. So a short input
 * makes a whole file, and most choices give it hashes that hold.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "weights/hold.h"
#include "weights/prepared.h"
#include "weights/weights.h"

enum {
    LARGEST_FILE = 1 << 20,
    KEEP_HEADER_HASH = 1,
    KEEP_PART_HASHES = 2,
    CUT_FILE = 4, /* after the last byte of the input */
    FILL_BLOBS = 8
};

static void hash_part(const uint8_t *file, uint64_t offset, uint64_t bytes, mm_hash *hash) {
    if (offset <= LARGEST_FILE && bytes <= LARGEST_FILE - offset)
        *hash = mm_hash_of(file + offset, bytes);
}

/* Returns the size of the file. */
static size_t make_file(const uint8_t *data, size_t bytes, uint8_t *file) {
    mm_prepared_header header = {0};
    const uint8_t choices = bytes ? *data++ : 0;
    bytes -= bytes > 0;
    const size_t n = bytes < sizeof header.fields ? bytes : sizeof header.fields;
    memcpy(&header.fields, data, n);
    data += n;
    bytes -= n;
    const mm_prepared_extents *extents = &header.fields.extents;
    size_t at = sizeof header;
    if (extents->router_offset >= at && extents->router_offset < LARGEST_FILE)
        at = extents->router_offset;
    if (choices & FILL_BLOBS && extents->blobs_offset >= at && extents->blobs_offset < LARGEST_FILE)
        memset(file + extents->blobs_offset, 0xA5, LARGEST_FILE - extents->blobs_offset);
    const size_t copied = bytes < LARGEST_FILE - at ? bytes : LARGEST_FILE - at;
    memcpy(file + at, data, copied);
    if (!(choices & KEEP_PART_HASHES)) {
        hash_part(file, extents->hashes_offset,
                  (uint64_t)(uint32_t)header.fields.experts * sizeof(mm_hash),
                  &header.fields.hashes_hash);
        hash_part(file, extents->router_offset, extents->router_bytes, &header.fields.router_hash);
    }
    if (!(choices & KEEP_HEADER_HASH))
        mm_prepared_seal(&header);
    memcpy(file, &header, sizeof header);
    if (choices & CUT_FILE || extents->file_bytes > LARGEST_FILE)
        return at + copied;
    return extents->file_bytes;
}

static void read_weights(const megamoe_weights *weights, const megamoe_layer_desc *desc) {
    double *values = malloc((size_t)desc->hidden * (size_t)desc->intermediate * sizeof *values);
    float *high = malloc(65536 * sizeof *high);
    float *low = malloc(65536 * sizeof *low);
    for (int32_t i = 0; values && high && low && i < 3 * desc->experts; i++) {
        const megamoe_projection projection = (megamoe_projection)(i % 3);
        int exponent;
        if (megamoe_weights_unpack(weights, i / 3, projection, values) != MEGAMOE_OK)
            abort();
        if (mm_weights_hold(weights, i / 3) != MEGAMOE_OK)
            abort();
        mm_weights_row(weights, MEGAMOE_NVFP4_EXACT, i / 3, projection,
                       mm_rows(desc, projection) - 1, high, low, &exponent);
        (void)mm_weights_bias(weights, i / 3, projection, 0);
        mm_weights_drop(weights, i / 3);
    }
    free(values);
    free(high);
    free(low);
}

static void use_router(const megamoe_router *router, const megamoe_layer_desc *desc) {
    megamoe_router_desc r = MEGAMOE_INIT(megamoe_router_desc);
    if (!router || megamoe_router_describe(router, &r) != MEGAMOE_OK)
        return;
    uint16_t *x = calloc((size_t)desc->hidden, sizeof *x);
    int32_t *ids = calloc((size_t)r.topk, sizeof *ids);
    float *chosen = calloc((size_t)r.topk, sizeof *chosen);
    int32_t token = 0;
    const megamoe_view rows = {x, MEGAMOE_DTYPE_BF16, 1, 0};
    const megamoe_view tokens = {&token, MEGAMOE_DTYPE_I32, 1, 0};
    const megamoe_view id_view = {ids, MEGAMOE_DTYPE_I32, 1, 0};
    const megamoe_view weight_view = {chosen, MEGAMOE_DTYPE_F32, 1, 0};
    if (x && ids && chosen &&
        megamoe_router_route(router, NULL, &rows, &tokens, 1, &id_view, &weight_view) == MEGAMOE_OK)
        for (int32_t i = 0; i < r.topk; i++)
            if (ids[i] < 0 || ids[i] >= r.experts)
                abort();
    free(x);
    free(ids);
    free(chosen);
}

static void use_file(const char *path) {
    megamoe_weights *weights;
    if (megamoe_weights_open(path, &weights) != MEGAMOE_OK)
        return;
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    if (megamoe_weights_describe(weights, &desc) != MEGAMOE_OK)
        abort();
    read_weights(weights, &desc);
    use_router(megamoe_weights_router(weights), &desc);
    const megamoe_status verified = megamoe_weights_verify(weights, (megamoe_progress){0});
    if (verified != MEGAMOE_OK && verified != MEGAMOE_ECHECK)
        abort();
    megamoe_weights_close(weights);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    uint8_t *file = calloc(1, LARGEST_FILE);
    const int fd = memfd_create("prepared", MFD_CLOEXEC);
    if (file && fd >= 0) {
        const size_t n = make_file(data, bytes, file);
        char path[32];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        if (write(fd, file, n) == (ssize_t)n)
            use_file(path);
    }
    if (fd >= 0)
        close(fd);
    free(file);
    return 0;
}
