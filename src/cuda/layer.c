/* SPDX-License-Identifier: Apache-2.0 */
/* A layer's device memory. */
#include "base/memory.h"
#include "cuda/operation.h"

static megamoe_status allocate(CUdeviceptr *address, uint64_t count, uint64_t bytes_each,
                               const char *what) {
    size_t bytes;
    if (!mm_mul_size(count, bytes_each, &bytes))
        return mm_fail(MEGAMOE_ENOMEM, "layer: %s: %llu of %llu bytes are beyond any memory", what,
                       (unsigned long long)count, (unsigned long long)bytes_each);
    if (bytes)
        MM_CUDA_TRY(mm_cu.cuMemAlloc(address, bytes), "layer: %zu bytes of GPU memory for %s",
                    bytes, what);
    return MEGAMOE_OK;
}

static megamoe_status upload(CUdeviceptr to, const void *from, size_t bytes, const char *what) {
    MM_CUDA_TRY(mm_cu.cuMemcpyHtoD(to, from, bytes), "layer: copying %s to the GPU", what);
    return MEGAMOE_OK;
}

static megamoe_status open_map(mm_cuda_layer *layer) {
    const mm_placement *placement = layer->placement;
    if (placement->identity)
        return MEGAMOE_OK;
    const size_t starts = ((size_t)placement->logical + 1) * sizeof *placement->starts;
    const size_t replicas = (size_t)placement->physical * sizeof *placement->replicas;
    CUdeviceptr address = 0;
    MM_TRY(allocate(&address, 1, starts, "the expert map"));
    layer->replica_starts = address;
    MM_TRY(upload(address, placement->starts, starts, "the expert map"));
    MM_TRY(allocate(&address, 1, replicas, "the expert map"));
    layer->replicas = address;
    return upload(address, placement->replicas, replicas, "the expert map");
}

static megamoe_status open_current(mm_cuda_layer *layer) {
    CUdeviceptr address = 0;
    MM_TRY(allocate(&address, (uint64_t)layer->placement->local, layer->layout.blob_bytes,
                    "the experts"));
    layer->blobs = address;
    uint8_t table[MM_CUDA_DECODE_TABLE_BYTES];
    const size_t bytes = mm_cuda_decode_table(layer->layout.format, table);
    MM_TRY(allocate(&address, 1, bytes, "the decode table"));
    layer->decode_table = address;
    MM_TRY(upload(address, table, bytes, "the decode table"));
    return open_map(layer);
}

megamoe_status mm_cuda_layer_open(mm_cuda_layer *layer) {
    layer->blobs = layer->decode_table = layer->replica_starts = layer->replicas = 0;
    CUcontext previous;
    MM_TRY(mm_cuda_enter(layer->device, &previous));
    const megamoe_status status = open_current(layer);
    mm_cuda_leave(previous);
    return status;
}

megamoe_status mm_cuda_layer_upload(mm_cuda_layer *layer, int32_t local, const uint8_t *blob) {
    CUcontext previous;
    MM_TRY(mm_cuda_enter(layer->device, &previous));
    const megamoe_status status = upload(layer->blobs + (uint64_t)local * layer->layout.blob_bytes,
                                         blob, layer->layout.blob_bytes, "an expert");
    mm_cuda_leave(previous);
    return status;
}

void mm_cuda_layer_close(mm_cuda_layer *layer) {
    CUcontext previous;
    if (!layer->device || mm_cuda_enter(layer->device, &previous) != MEGAMOE_OK)
        return;
    /* Freeing waits for forwards that still read. A GPU that has failed has nothing to give back.
     */
    uint64_t *const memory[] = {&layer->blobs, &layer->decode_table, &layer->replica_starts,
                                &layer->replicas};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) {
        if (*memory[i])
            (void)mm_cu.cuMemFree(*memory[i]);
        *memory[i] = 0;
    }
    mm_cuda_leave(previous);
}
