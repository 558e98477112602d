/* SPDX-License-Identifier: Apache-2.0 */
/* The prepared file: what its writer and reader share, and the reader. */
#define _GNU_SOURCE
#include "weights/prepared.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"
#include "base/memory.h"
#include "router/router.h"
#include "weights/hold.h"
#include "weights/object.h"

mm_hash mm_hash_of(const void *data, size_t bytes) {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, bytes));
    mm_hash hash;
    memcpy(hash.bytes, canonical.digest, sizeof hash.bytes);
    return hash;
}

static bool hash_holds(const mm_hash *hash, const void *data, size_t bytes) {
    const mm_hash actual = mm_hash_of(data, bytes);
    return memcmp(actual.bytes, hash->bytes, sizeof actual.bytes) == 0;
}

void mm_prepared_seal(mm_prepared_header *header) {
    header->hash = mm_hash_of(header, offsetof(mm_prepared_header, hash));
}

static const mm_prepared_kind kinds[] = {{"cpu", "tile32-k128", false},
                                         {"cuda", "frag64-k128", true}};

const mm_prepared_kind *mm_prepared_kind_of(const char *device) {
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strcmp(device, kinds[i].device) == 0)
            return &kinds[i];
    return NULL;
}

/* What of the extents the device's layout decides. */
static mm_prepared_extents extents_of_layout(const megamoe_layer_desc *desc,
                                             const mm_prepared_kind *kind,
                                             megamoe_nvfp4_mode mode) {
    if (kind->cuda) {
        const mm_cuda_layout layout = mm_cuda_layout_of(desc, mode);
        return (mm_prepared_extents){
            .hidden_k = (uint64_t)layout.hidden_chunks * MM_CUDA_CHUNK_K,
            .intermediate_k = (uint64_t)layout.intermediate_chunks * MM_CUDA_CHUNK_K,
            .fc1_tiles = (uint64_t)layout.fc1_tiles,
            .fc2_tiles = (uint64_t)layout.fc2_tiles,
            .blob_bytes = layout.blob_bytes,
        };
    }
    const mm_cpu_layout layout = mm_cpu_layout_of(desc, mode);
    return (mm_prepared_extents){
        .hidden_k = (uint64_t)layout.hidden_k,
        .intermediate_k = (uint64_t)layout.intermediate_k,
        .fc1_tiles = (uint64_t)layout.fc1_tiles,
        .fc2_tiles = (uint64_t)layout.fc2_tiles,
        .blob_bytes = layout.blob_bytes,
    };
}

mm_prepared_extents mm_prepared_extents_of(const megamoe_layer_desc *desc,
                                           const mm_prepared_kind *kind, megamoe_nvfp4_mode mode,
                                           uint64_t router_bytes) {
    mm_prepared_extents e = extents_of_layout(desc, kind, mode);
    e.hashes_offset = MM_PREPARED_HEADER_BYTES;
    e.router_bytes = router_bytes;
    const uint64_t experts = (uint64_t)desc->experts;
    e.router_offset = mm_round_up(e.hashes_offset + experts * sizeof(mm_hash), MM_PAGE);
    e.blobs_offset = mm_round_up(e.router_offset + router_bytes, MM_PAGE);
    e.file_bytes = e.blobs_offset + experts * e.blob_bytes;
    return e;
}

/* What stands before anything whose meaning depends on the version. */
static megamoe_status read_header(const mm_file *file, mm_prepared_header *header) {
    const char *path = file->path;
    const mm_prepared_fields *fields = &header->fields;
    *header = (mm_prepared_header){0};
    MM_TRY(mm_file_read(file, 0, header, (size_t)mm_min((int64_t)file->bytes, sizeof *header)));
    const size_t magic_bytes = sizeof fields->magic;
    if (file->bytes < magic_bytes || memcmp(fields->magic, MM_PREPARED_MAGIC, magic_bytes) != 0)
        return mm_fail(MEGAMOE_EFORMAT, "%s: not a prepared file: it does not begin with \"%s\"",
                       path, MM_PREPARED_MAGIC);
    if (file->bytes < MM_PREPARED_HEADER_BYTES)
        return mm_fail(MEGAMOE_EFORMAT, "%s: truncated: %" PRIu64 " bytes; the header alone has %d",
                       path, file->bytes, MM_PREPARED_HEADER_BYTES);
    if (fields->byte_order != MM_PREPARED_BYTE_ORDER)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: byte order mark 0x%08" PRIx32 "; this machine reads 0x%08x", path,
                       fields->byte_order, MM_PREPARED_BYTE_ORDER);
    if (fields->version != MM_PREPARED_VERSION)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: version %" PRIu32 "; this library reads version %d", path,
                       fields->version, MM_PREPARED_VERSION);
    return MEGAMOE_OK;
}

/* What the header describes, in weights->kind, ->desc and ->nvfp4. */
static megamoe_status take_layer(megamoe_weights *weights, const mm_prepared_fields *fields) {
    const char *path = weights->path;
    char device[sizeof fields->device + 1] = {0};
    memcpy(device, fields->device, sizeof fields->device);
    const mm_prepared_kind *kind = mm_prepared_kind_of(device);
    /* The kinds hold zeros behind their names. */
    if (!kind || memcmp(fields->device, kind->device, sizeof kind->device) != 0)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: prepared for device \"%s\"; expected " MM_PREPARED_DEVICES, path,
                       device);
    if (memcmp(fields->layout, kind->layout, sizeof kind->layout) != 0)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: layout \"%.16s\" for device \"%s\"; this library reads \"%s\"", path,
                       fields->layout, kind->device, kind->layout);
    if (fields->format != MEGAMOE_FORMAT_MXFP4 && fields->format != MEGAMOE_FORMAT_NVFP4)
        return mm_fail(MEGAMOE_EFORMAT, "%s: format %" PRIu32 "; expected %d (MXFP4) or %d (NVFP4)",
                       path, fields->format, MEGAMOE_FORMAT_MXFP4, MEGAMOE_FORMAT_NVFP4);
    const bool folds = fields->format == MEGAMOE_FORMAT_NVFP4;
    if (fields->nvfp4 > (folds ? MEGAMOE_NVFP4_FOLDED : MEGAMOE_NVFP4_EXACT))
        return mm_fail(MEGAMOE_EFORMAT, "%s: NVFP4 mode %" PRIu32 " with format %" PRIu32, path,
                       fields->nvfp4, fields->format);
    if (fields->has_bias > 1)
        return mm_fail(MEGAMOE_EFORMAT, "%s: has_bias is %" PRIu32 "; expected 0 or 1", path,
                       fields->has_bias);
    weights->kind = kind;
    weights->nvfp4 = (megamoe_nvfp4_mode)fields->nvfp4;
    weights->desc = (megamoe_layer_desc){
        .struct_size = sizeof weights->desc,
        .layer = fields->layer,
        .hidden = fields->hidden,
        .intermediate = fields->intermediate,
        .experts = fields->experts,
        .topk = fields->topk,
        .format = (megamoe_format)fields->format,
        .activation = {fields->alpha, fields->offset, fields->limit},
        .has_bias = fields->has_bias == 1,
    };
    return mm_desc_check(&weights->desc, MEGAMOE_EFORMAT, path);
}

static megamoe_status check_extents(const char *path, const mm_prepared_extents *stored,
                                    const mm_prepared_extents *expected, uint64_t file_bytes) {
#define X(name)                                                                                    \
    if (stored->name != expected->name)                                                            \
        return mm_fail(MEGAMOE_EFORMAT,                                                            \
                       "%s: " #name " is %" PRIu64 "; the geometry gives %" PRIu64, path,          \
                       stored->name, expected->name);
    MM_PREPARED_EXTENT_LIST(X)
#undef X
    if (file_bytes != expected->file_bytes)
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s: %" PRIu64 " bytes; its header says %" PRIu64, path,
                       file_bytes < expected->file_bytes ? "truncated" : "too long", file_bytes,
                       expected->file_bytes);
    return MEGAMOE_OK;
}

megamoe_status mm_prepared_check_router(const megamoe_router *router,
                                        const megamoe_layer_desc *desc, megamoe_status status,
                                        const char *where) {
    megamoe_router_desc r = MEGAMOE_INIT(megamoe_router_desc);
    MM_TRY(megamoe_router_describe(router, &r));
    if (r.hidden != desc->hidden || r.experts != desc->experts ||
        (desc->topk && r.topk != desc->topk))
        return mm_fail(status,
                       "%s: the router is for hidden %d, %d experts, top-%d; the layer has hidden "
                       "%d, %d experts, top-%d",
                       where, r.hidden, r.experts, r.topk, desc->hidden, desc->experts, desc->topk);
    return MEGAMOE_OK;
}

static megamoe_status load_router(megamoe_weights *weights, const mm_prepared_fields *fields) {
    const size_t n = (size_t)fields->extents.router_bytes;
    const char *path = weights->path;
    if (!n)
        return MEGAMOE_OK;
    megamoe_status status;
    void *bytes = malloc(n);
    if (!bytes)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory for its router of %zu bytes", path, n);
    MM_TRY_GOTO(mm_file_read(&weights->file, fields->extents.router_offset, bytes, n), end);
    if (hash_holds(&fields->router_hash, bytes, n))
        status = mm_router_load(bytes, n, path, &weights->router);
    else
        status = mm_fail(MEGAMOE_ECHECK, "%s: the router's hash does not hold", path);
end:
    free(bytes);
    if (status == MEGAMOE_OK)
        status = mm_prepared_check_router(weights->router, &weights->desc, MEGAMOE_EFORMAT, path);
    return status;
}

static megamoe_status load_hashes(megamoe_weights *weights, const mm_prepared_fields *fields) {
    const size_t n = (size_t)weights->desc.experts * sizeof(mm_hash);
    weights->hashes = mm_alloc(n);
    if (!weights->hashes)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory for its hashes", weights->path);
    MM_TRY(mm_file_read(&weights->file, fields->extents.hashes_offset, weights->hashes, n));
    if (!hash_holds(&fields->hashes_hash, weights->hashes, n))
        return mm_fail(MEGAMOE_ECHECK, "%s: the hash of the table of hashes does not hold",
                       weights->path);
    return MEGAMOE_OK;
}

static megamoe_status open_file(megamoe_weights *weights) {
    const mm_file *file = &weights->file;
    const char *path = weights->path;
    mm_prepared_header header;
    MM_TRY(read_header(file, &header));
    const mm_prepared_fields *fields = &header.fields;
    if (!hash_holds(&header.hash, &header, offsetof(mm_prepared_header, hash)))
        return mm_fail(MEGAMOE_ECHECK, "%s: the header's hash does not hold", path);
    MM_TRY(take_layer(weights, fields));
    const uint64_t router_bytes = fields->extents.router_bytes;
    if (router_bytes > file->bytes || router_bytes > MM_PREPARED_ROUTER_MAX)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: router_bytes is %" PRIu64 "; the file has %" PRIu64
                       " bytes, and at most %d are read",
                       path, router_bytes, file->bytes, MM_PREPARED_ROUTER_MAX);
    const mm_prepared_extents extents =
        mm_prepared_extents_of(&weights->desc, weights->kind, weights->nvfp4, router_bytes);
    MM_TRY(check_extents(path, &fields->extents, &extents, file->bytes));
    if (weights->kind->cuda) {
        weights->cuda_layout = mm_cuda_layout_of(&weights->desc, weights->nvfp4);
        (void)mm_cuda_decode_table(weights->cuda_layout.format, weights->decode_table);
    } else {
        weights->layout = mm_cpu_layout_of(&weights->desc, weights->nvfp4);
    }
    MM_TRY(load_hashes(weights, fields));
    MM_TRY(load_router(weights, fields));
    weights->blobs_offset = extents.blobs_offset;
    weights->blob_bytes = extents.blob_bytes;
    return mm_holds_open(weights);
}

megamoe_status megamoe_weights_open(const char *path, megamoe_weights **weights) {
    if (!path || !weights)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_weights_open: an argument is NULL");
    *weights = NULL;
    megamoe_status status;
    megamoe_weights *w = mm_weights_new();
    if (!w || !(w->path = strdup(path)))
        MM_TRY_GOTO(mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", path), fail);
    MM_TRY_GOTO(mm_file_open(path, &w->file), fail);
    MM_TRY_GOTO(open_file(w), fail);
    *weights = w;
    return MEGAMOE_OK;
fail:
    megamoe_weights_close(w);
    return status;
}

megamoe_status mm_weights_read_blob(const megamoe_weights *weights, int32_t expert, uint8_t *blob) {
    return mm_file_read(&weights->file,
                        weights->blobs_offset + (uint64_t)expert * weights->blob_bytes, blob,
                        weights->blob_bytes);
}

megamoe_status mm_weights_map_blobs(const megamoe_weights *weights, mm_mapping *mapping) {
    return mm_file_map(&weights->file, weights->blobs_offset,
                       (size_t)weights->desc.experts * weights->blob_bytes, mapping);
}

megamoe_status megamoe_weights_verify(const megamoe_weights *weights, megamoe_progress progress) {
    if (!weights)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_weights_verify: weights is NULL");
    if (weights->matrices)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "megamoe_weights_verify: weights in checkpoint form have no hashes");
    const size_t blob_bytes = weights->blob_bytes;
    const int32_t experts = weights->desc.experts;
    for (int32_t i = 0; i < experts; i++) {
        MM_TRY(mm_weights_hold(weights, i));
        const bool holds = hash_holds(&weights->hashes[i], mm_weights_blob(weights, i), blob_bytes);
        mm_weights_drop(weights, i);
        if (!holds)
            return mm_fail(MEGAMOE_ECHECK, "%s: expert %" PRId32 ": its hash does not hold",
                           weights->path, i);
        if (progress.fn)
            progress.fn(progress.user, (uint64_t)(i + 1) * blob_bytes,
                        (uint64_t)experts * blob_bytes);
    }
    return MEGAMOE_OK;
}
