/* SPDX-License-Identifier: Apache-2.0 */
/* A layer's device memory, and what it becomes when its experts are placed anew. */
#include <stdlib.h>

#include "base/memory.h"
#include "cuda/operation.h"

static megamoe_status allocate(uint64_t *address, uint64_t count, uint64_t bytes_each,
                               const char *what) {
    size_t bytes;
    CUdeviceptr memory = 0;
    if (!mm_mul_size(count, bytes_each, &bytes))
        return mm_fail(MEGAMOE_ENOMEM, "layer: %s: %llu of %llu bytes are beyond any memory", what,
                       (unsigned long long)count, (unsigned long long)bytes_each);
    if (bytes)
        MM_CUDA_TRY(mm_cu.cuMemAlloc(&memory, bytes), "layer: %zu bytes of GPU memory for %s",
                    bytes, what);
    *address = memory;
    return MEGAMOE_OK;
}

static void release(uint64_t *address) {
    if (*address)
        (void)mm_cu.cuMemFree(*address);
    *address = 0;
}

static megamoe_status upload(CUdeviceptr to, const void *from, size_t bytes, const char *what) {
    MM_CUDA_TRY(mm_cu.cuMemcpyHtoD(to, from, bytes), "layer: copying %s to the GPU", what);
    return MEGAMOE_OK;
}

static megamoe_status copy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    MM_CUDA_TRY(mm_cu.cuMemcpyDtoDAsync(to, from, bytes, NULL),
                "layer: copying an expert of %zu bytes", bytes);
    return MEGAMOE_OK;
}

static megamoe_status settle(void) {
    MM_CUDA_TRY(mm_cu.cuCtxSynchronize(), "layer: waiting for the GPU");
    return MEGAMOE_OK;
}

static CUdeviceptr blob_of(const mm_cuda_layer *layer, uint64_t blobs, int32_t index) {
    return blobs + (uint64_t)index * layer->layout.blob_bytes;
}

/* ---- words and map ---- */

/* The map has room for any number of physical experts, so that it stays where it is. */
static uint64_t starts_offset(void) {
    return sizeof(mm_cuda_layer_words);
}

static uint64_t replicas_offset(const mm_cuda_layer *layer) {
    return starts_offset() + ((uint64_t)layer->placement->logical + 1) * sizeof(int32_t);
}

static uint64_t tables_bytes(const mm_cuda_layer *layer) {
    return replicas_offset(layer) + MM_CUDA_EXPERTS_MAX * sizeof(int32_t);
}

/* Counts begin at zero. */
static megamoe_status set_words(const mm_cuda_layer *layer, uint32_t form) {
    const mm_cuda_layer_words words = {.key = layer->key, .form = form};
    return upload(layer->tables, &words, sizeof words, "its key");
}

static megamoe_status set_map(mm_cuda_layer *layer, const mm_placement *placement) {
    layer->replica_starts = layer->mapped ? layer->tables + starts_offset() : 0;
    layer->replicas = layer->mapped ? layer->tables + replicas_offset(layer) : 0;
    if (!layer->mapped)
        return MEGAMOE_OK;
    MM_TRY(upload(layer->replica_starts, placement->starts,
                  ((size_t)placement->logical + 1) * sizeof *placement->starts, "the expert map"));
    return upload(layer->replicas, placement->replicas,
                  (size_t)placement->physical * sizeof *placement->replicas, "the expert map");
}

/* ---- opening and closing ---- */

static megamoe_status open_current(mm_cuda_layer *layer) {
    MM_TRY(allocate(&layer->blobs, (uint64_t)layer->placement->local, layer->layout.blob_bytes,
                    "the experts"));
    uint8_t table[MM_CUDA_DECODE_TABLE_BYTES];
    const size_t bytes = mm_cuda_decode_table(layer->layout.format, table);
    MM_TRY(allocate(&layer->decode_table, 1, bytes, "the decode table"));
    MM_TRY(upload(layer->decode_table, table, bytes, "the decode table"));
    MM_TRY(allocate(&layer->tables, 1, tables_bytes(layer), "the expert map"));
    layer->form = 1;
    MM_TRY(set_words(layer, layer->form));
    return set_map(layer, layer->placement);
}

megamoe_status mm_cuda_layer_open(mm_cuda_layer *layer) {
    layer->blobs = layer->decode_table = layer->tables = 0;
    layer->replica_starts = layer->replicas = 0;
    layer->mapped = layer->mapped || !layer->placement->identity;
    const int32_t physical = layer->placement->physical;
    if (physical > MM_CUDA_EXPERTS_MAX)
        return mm_fail(MEGAMOE_EINVAL,
                       "layer: %d physical experts; on CUDA devices there are 1..%d", physical,
                       MM_CUDA_EXPERTS_MAX);
    CUcontext previous;
    MM_TRY(mm_cuda_enter(layer->device, &previous));
    const megamoe_status status = open_current(layer);
    mm_cuda_leave(previous);
    return status;
}

megamoe_status mm_cuda_layer_upload(mm_cuda_layer *layer, int32_t local, const uint8_t *blob) {
    CUcontext previous;
    MM_TRY(mm_cuda_enter(layer->device, &previous));
    const megamoe_status status =
        upload(blob_of(layer, layer->blobs, local), blob, layer->layout.blob_bytes, "an expert");
    mm_cuda_leave(previous);
    return status;
}

static megamoe_status download(void *to, CUdeviceptr from, size_t bytes, const char *what) {
    MM_CUDA_TRY(mm_cu.cuMemcpyDtoH(to, from, bytes), "layer: copying %s from the GPU", what);
    return MEGAMOE_OK;
}

megamoe_status mm_cuda_layer_download(const mm_cuda_layer *layer, int32_t local, uint8_t *blob) {
    CUcontext previous;
    MM_TRY(mm_cuda_enter(layer->device, &previous));
    const megamoe_status status =
        download(blob, blob_of(layer, layer->blobs, local), layer->layout.blob_bytes, "an expert");
    mm_cuda_leave(previous);
    return status;
}

void mm_cuda_layer_close(mm_cuda_layer *layer) {
    CUcontext previous;
    if (!layer->device || mm_cuda_enter(layer->device, &previous) != MEGAMOE_OK)
        return;
    /* Freeing waits for forwards that still read. A GPU that has failed has nothing to give back.
     */
    release(&layer->blobs);
    release(&layer->decode_table);
    release(&layer->tables);
    layer->replica_starts = layer->replicas = 0;
    mm_cuda_leave(previous);
}

/* ---- what experts have received ---- */

static CUdeviceptr received_of(const mm_cuda_layer *layer) {
    return layer->tables + offsetof(mm_cuda_layer_words, received);
}

static megamoe_status read_received(const mm_cuda_layer *layer, int64_t *counts) {
    MM_TRY(settle());
    return download(counts, received_of(layer), (size_t)layer->placement->local * sizeof(uint64_t),
                    "receive counts");
}

static megamoe_status clear_received(const mm_cuda_layer *layer) {
    MM_TRY(settle());
    MM_CUDA_TRY(
        mm_cu.cuMemsetD8Async(received_of(layer), 0, MM_CUDA_EXPERTS_MAX * sizeof(uint64_t), NULL),
        "layer: setting receive counts to zero");
    return settle();
}

megamoe_status mm_cuda_layer_received(const mm_cuda_layer *layer, int64_t *counts) {
    CUcontext previous;
    if (!layer->placement->local)
        return MEGAMOE_OK;
    MM_TRY(mm_cuda_enter(layer->device, &previous));
    const megamoe_status status = read_received(layer, counts);
    mm_cuda_leave(previous);
    return status;
}

megamoe_status mm_cuda_layer_clear_received(const mm_cuda_layer *layer) {
    CUcontext previous;
    MM_TRY(mm_cuda_enter(layer->device, &previous));
    const megamoe_status status = clear_received(layer);
    mm_cuda_leave(previous);
    return status;
}

/* ---- placing anew ---- */

/* Local experts have the same number and the same physical numbers. */
static bool is_alike(const mm_placement *a, const mm_placement *b) {
    return a->physical == b->physical && a->ranks == b->ranks && a->rank == b->rank;
}

megamoe_status mm_cuda_layer_settle(const mm_cuda_layer *layer) {
    CUcontext previous;
    MM_TRY(mm_cuda_enter(layer->device, &previous));
    const megamoe_status status = settle();
    mm_cuda_leave(previous);
    return status;
}

megamoe_status mm_cuda_successor_open(const mm_cuda_layer *layer, const mm_placement *placement,
                                      mm_cuda_successor *successor) {
    const mm_placement *old = layer->placement;
    mm_cuda_successor *s = successor;
    *s = (mm_cuda_successor){.placement = placement, .in_place = is_alike(old, placement)};
    s->places = mm_alloc((size_t)placement->local * sizeof *s->places);
    if (!s->places)
        return mm_fail(MEGAMOE_ENOMEM, "out of memory");
    int32_t coming = 0;
    for (int32_t e = 0; e < placement->local; e++) {
        const bool stays = s->in_place && old->logical_of[old->first + e] ==
                                              placement->logical_of[placement->first + e];
        s->places[e] = stays ? -1 : coming++;
    }
    CUcontext previous;
    MM_TRY(mm_cuda_enter(layer->device, &previous));
    const megamoe_status status = allocate(&s->blobs, (uint64_t)coming, layer->layout.blob_bytes,
                                           "experts that change places");
    mm_cuda_leave(previous);
    return status;
}

void mm_cuda_successor_close(const mm_cuda_layer *layer, mm_cuda_successor *successor) {
    CUcontext previous;
    if (successor->blobs && mm_cuda_enter(layer->device, &previous) == MEGAMOE_OK) {
        release(&successor->blobs);
        mm_cuda_leave(previous);
    }
    free(successor->places);
    successor->places = NULL;
}

bool mm_cuda_successor_stays(const mm_cuda_successor *successor, int32_t local) {
    return successor->places[local] < 0;
}

megamoe_status mm_cuda_successor_keep(const mm_cuda_layer *layer,
                                      const mm_cuda_successor *successor, int32_t local,
                                      int32_t old) {
    CUcontext previous;
    MM_TRY(mm_cuda_enter(layer->device, &previous));
    const megamoe_status status = copy(blob_of(layer, successor->blobs, successor->places[local]),
                                       blob_of(layer, layer->blobs, old), layer->layout.blob_bytes);
    mm_cuda_leave(previous);
    return status;
}

megamoe_status mm_cuda_successor_put(const mm_cuda_layer *layer, const mm_cuda_successor *successor,
                                     int32_t local, const uint8_t *blob) {
    CUcontext previous;
    MM_TRY(mm_cuda_enter(layer->device, &previous));
    const megamoe_status status = upload(blob_of(layer, successor->blobs, successor->places[local]),
                                         blob, layer->layout.blob_bytes, "an expert");
    mm_cuda_leave(previous);
    return status;
}

static megamoe_status move_in(mm_cuda_layer *layer, mm_cuda_successor *s) {
    if (!s->in_place) {
        const uint64_t old = layer->blobs;
        layer->blobs = s->blobs;
        s->blobs = old;
        return MEGAMOE_OK;
    }
    for (int32_t e = 0; e < s->placement->local; e++)
        if (s->places[e] >= 0)
            MM_TRY(copy(blob_of(layer, layer->blobs, e), blob_of(layer, s->blobs, s->places[e]),
                        layer->layout.blob_bytes));
    return MEGAMOE_OK;
}

/* Between the two uploads of words no forward of the layer computes, whoever launches it. */
static megamoe_status install(mm_cuda_layer *layer, mm_cuda_successor *s, uint64_t key) {
    const bool mapped = layer->mapped || !s->placement->identity;
    const bool same_form = s->in_place && mapped == layer->mapped;
    MM_TRY(set_words(layer, 0));
    MM_TRY(move_in(layer, s));
    layer->mapped = mapped;
    layer->key = key;
    MM_TRY(set_map(layer, s->placement));
    MM_TRY(settle());
    layer->form += !same_form;
    return set_words(layer, layer->form);
}

megamoe_status mm_cuda_successor_install(mm_cuda_layer *layer, mm_cuda_successor *successor,
                                         uint64_t key) {
    CUcontext previous;
    MM_TRY(mm_cuda_enter(layer->device, &previous));
    const megamoe_status status = install(layer, successor, key);
    if (status != MEGAMOE_OK)
        layer->form = UINT32_MAX; /* which the words never have */
    mm_cuda_leave(previous);
    return status;
}
