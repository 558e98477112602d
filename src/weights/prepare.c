/* SPDX-License-Identifier: Apache-2.0 */
/* Writes the prepared file. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/file.h"
#include "base/memory.h"
#include "base/pool.h"
#include "router/router.h"
#include "weights/cpu_pack.h"
#include "weights/cuda_pack.h"
#include "weights/object.h"
#include "weights/prepared.h"

/* Experts are packed in waves, one for each thread, and written by the caller between them. */
struct writer {
    const megamoe_weights *weights;
    const mm_prepared_kind *kind;
    mm_cpu_layout layout;       /* for "cpu" */
    mm_cuda_layout cuda_layout; /* for "cuda" */
    bool round_outside;         /* likewise */
    size_t blob_bytes;
    mm_prepared_header header;
    mm_output output;
    mm_pool *pool;
    int32_t wave;        /* experts at once */
    int32_t first;       /* of the wave that runs */
    uint8_t *blobs;      /* [wave] */
    mm_inexact *inexact; /* [wave] */
    mm_hash *hashes;     /* [experts] */
    mm_carried failure;  /* of a thread that could not read an expert */
};

static void fill_header(struct writer *w, megamoe_nvfp4_mode mode, uint64_t router_bytes) {
    const megamoe_layer_desc *desc = &w->weights->desc;
    if (w->kind->cuda)
        w->cuda_layout = mm_cuda_layout_of(desc, mode);
    else
        w->layout = mm_cpu_layout_of(desc, mode);
    w->header.fields = (mm_prepared_fields){
        .magic = MM_PREPARED_MAGIC,
        .byte_order = MM_PREPARED_BYTE_ORDER,
        .version = MM_PREPARED_VERSION,
        .layer = desc->layer,
        .hidden = desc->hidden,
        .intermediate = desc->intermediate,
        .experts = desc->experts,
        .topk = desc->topk,
        .format = desc->format,
        .nvfp4 = mode,
        .has_bias = desc->has_bias,
        .alpha = desc->activation.alpha,
        .offset = desc->activation.offset,
        .limit = desc->activation.limit,
        .extents = mm_prepared_extents_of(desc, w->kind, mode, router_bytes),
    };
    mm_prepared_fields *fields = &w->header.fields;
    memcpy(fields->device, w->kind->device, sizeof fields->device);
    memcpy(fields->layout, w->kind->layout, sizeof fields->layout);
    w->blob_bytes = fields->extents.blob_bytes;
}

static megamoe_status allocate(struct writer *w) {
    const size_t experts = (size_t)w->weights->desc.experts;
    w->wave = (int32_t)mm_min(mm_pool_threads(w->pool), w->weights->desc.experts);
    size_t bytes;
    if (mm_mul_size((size_t)w->wave, w->blob_bytes, &bytes))
        w->blobs = mm_alloc(bytes);
    w->inexact = mm_alloc((size_t)w->wave * sizeof *w->inexact);
    w->hashes = mm_alloc(experts * sizeof *w->hashes);
    if (!w->blobs || !w->inexact || !w->hashes)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory for %d experts of %zu bytes at once",
                       w->output.path, w->wave, w->blob_bytes);
    return MEGAMOE_OK;
}

static uint8_t *wave_blob(const struct writer *w, int32_t i) {
    return w->blobs + (size_t)i * w->blob_bytes;
}

static void pack_one(void *argument, int32_t thread, int32_t threads) {
    (void)threads;
    struct writer *w = argument;
    const int32_t expert = w->first + thread;
    if (thread >= w->wave || expert >= w->weights->desc.experts)
        return;
    uint8_t *blob = wave_blob(w, thread);
    memset(blob, 0, w->blob_bytes);
    mm_carry(&w->failure, w->kind->cuda ? mm_cuda_pack(w->weights, &w->cuda_layout, expert, blob,
                                                       w->round_outside, &w->inexact[thread])
                                        : mm_cpu_pack(w->weights, &w->layout, expert, blob,
                                                      &w->inexact[thread]));
    w->hashes[expert] = mm_hash_of(blob, w->blob_bytes);
}

static megamoe_status write_wave(struct writer *w, megamoe_progress progress) {
    const int32_t experts = w->weights->desc.experts;
    const uint64_t bytes = w->blob_bytes;
    for (int32_t i = 0; i < w->wave && w->first + i < experts; i++) {
        const uint64_t expert = (uint64_t)(w->first + i);
        MM_TRY(mm_output_write(&w->output, w->header.fields.extents.blobs_offset + expert * bytes,
                               wave_blob(w, i), bytes));
        if (progress.fn)
            progress.fn(progress.user, (expert + 1) * bytes, (uint64_t)experts * bytes);
    }
    return MEGAMOE_OK;
}

/* Groups that do not fit end the writing, but all of them are counted first. */
static megamoe_status write_blobs(struct writer *w, megamoe_progress progress) {
    mm_inexact total = {0};
    for (w->first = 0; w->first < w->weights->desc.experts; w->first += w->wave) {
        memset(w->inexact, 0, (size_t)w->wave * sizeof *w->inexact);
        mm_pool_run(w->pool, pack_one, w);
        MM_TRY(mm_carried_status(&w->failure));
        for (int32_t i = 0; i < w->wave; i++)
            mm_inexact_add(&total, &w->inexact[i]);
        if (!total.groups)
            MM_TRY(write_wave(w, progress));
    }
    return mm_inexact_status(w->weights, &total);
}

static megamoe_status write_router(struct writer *w, const megamoe_router *router) {
    mm_prepared_fields *fields = &w->header.fields;
    if (!fields->extents.router_bytes)
        return MEGAMOE_OK;
    void *bytes = mm_alloc(fields->extents.router_bytes);
    if (!bytes)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory for the router", w->output.path);
    mm_router_save(router, bytes);
    fields->router_hash = mm_hash_of(bytes, fields->extents.router_bytes);
    const megamoe_status status = mm_output_write(&w->output, fields->extents.router_offset, bytes,
                                                  fields->extents.router_bytes);
    free(bytes);
    return status;
}

static megamoe_status write_all(struct writer *w, const megamoe_router *router,
                                megamoe_progress progress) {
    const size_t hashes_bytes = (size_t)w->weights->desc.experts * sizeof *w->hashes;
    MM_TRY(allocate(w));
    MM_TRY(write_router(w, router));
    MM_TRY(write_blobs(w, progress));
    MM_TRY(mm_output_write(&w->output, w->header.fields.extents.hashes_offset, w->hashes,
                           hashes_bytes));
    w->header.fields.hashes_hash = mm_hash_of(w->hashes, hashes_bytes);
    mm_prepared_seal(&w->header);
    MM_TRY(mm_output_write(&w->output, 0, &w->header, sizeof w->header));
    return mm_output_commit(&w->output);
}

static megamoe_status check_arguments(const megamoe_weights *weights, const megamoe_router *router,
                                      const megamoe_prepare_options *options,
                                      const mm_prepared_kind *kind) {
    if (weights->matrices == NULL)
        return mm_fail(MEGAMOE_EUNSUPPORTED, "%s: these weights are prepared already",
                       weights->path);
    if (!kind)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "device \"%s\": weights can be prepared for " MM_PREPARED_DEVICES,
                       options->device);
    if (options->round_outside_window && !kind->cuda)
        return mm_fail(MEGAMOE_EINVAL,
                       "round_outside_window with device \"%s\"; only \"cuda\" has a window",
                       kind->device);
    if (options->nvfp4 != MEGAMOE_NVFP4_EXACT && options->nvfp4 != MEGAMOE_NVFP4_FOLDED)
        return mm_fail(MEGAMOE_EINVAL, "nvfp4 mode %d; expected %d (exact) or %d (folded)",
                       (int)options->nvfp4, MEGAMOE_NVFP4_EXACT, MEGAMOE_NVFP4_FOLDED);
    if (!router)
        return MEGAMOE_OK;
    return mm_prepared_check_router(router, &weights->desc, MEGAMOE_EINVAL,
                                    "megamoe_weights_prepare");
}

megamoe_status megamoe_weights_prepare(const megamoe_weights *weights, const megamoe_router *router,
                                       const megamoe_prepare_options *options, const char *path) {
    if (!weights || !path)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_weights_prepare: weights or path is NULL");
    megamoe_prepare_options o;
    MM_TRY(mm_take_struct(&o, sizeof o, options, "megamoe_prepare_options"));
    const mm_prepared_kind *kind = mm_prepared_kind_of(o.device ? o.device : "cpu");
    MM_TRY(check_arguments(weights, router, &o, kind));
    const bool folds = weights->desc.format == MEGAMOE_FORMAT_NVFP4;
    struct writer w = {.weights = weights,
                       .kind = kind,
                       .round_outside = o.round_outside_window,
                       .output = {.fd = -1}};
    fill_header(&w, folds ? o.nvfp4 : MEGAMOE_NVFP4_EXACT,
                router ? mm_router_saved_bytes(router) : 0);
    megamoe_status status = mm_pool_open(o.threads, 0, false, &w.pool);
    if (status == MEGAMOE_OK)
        status = mm_output_open(path, &w.output);
    if (status == MEGAMOE_OK)
        status = write_all(&w, router, o.progress);
    mm_output_discard(&w.output);
    mm_pool_close(w.pool);
    free(w.blobs);
    free(w.inexact);
    free(w.hashes);
    return status;
}
