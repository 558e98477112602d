/* SPDX-License-Identifier: Apache-2.0 */
/* A rank's experts on their way to the device. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"
#include "base/memory.h"
#include "layer/layer.h"
#include "weights/cpu_pack.h"
#include "weights/cuda_pack.h"
#include "weights/hold.h"
#include "weights/weights.h"

uint64_t mm_layer_key(const megamoe_layer *layer, const mm_placement *placement, int32_t format,
                      bool weight_after_fc2) {
    const megamoe_layer_desc *desc = &layer->desc;
    const megamoe_activation *a = &desc->activation;
    const float activation[] = {a->alpha, a->offset, a->limit};
    const int32_t options[] = {desc->hidden, desc->intermediate,         desc->experts,
                               format,       (int32_t)layer->accumulate, weight_after_fc2};
    XXH64_hash_t key = XXH3_64bits(options, sizeof options);
    key = XXH3_64bits_withSeed(activation, sizeof activation, key);
    return XXH3_64bits_withSeed(placement->logical_of,
                                (size_t)placement->physical * sizeof placement->logical_of[0], key);
}

static void report(const megamoe_layer *layer, const megamoe_layer_options *options,
                   int32_t experts) {
    if (options->progress.fn)
        options->progress.fn(options->progress.user, (uint64_t)experts * layer->blob_bytes,
                             megamoe_layer_bytes(layer));
}

/* ---- Packing, or reading what is packed, on all threads ---- */

struct packing {
    const megamoe_layer *layer;
    const megamoe_weights *weights;
    const megamoe_layer_options *options;
    int32_t first, count; /* of the local experts, in this wave */
    uint8_t *blobs;       /* [count] */
    mm_inexact *inexact;  /* [local] */
    atomic_int next;      /* of this wave */
    atomic_int done;      /* of all waves */
    mm_carried failure;   /* of a thread that could not read an expert */
};

static void pack(void *argument, int32_t thread, int32_t threads) {
    (void)threads;
    struct packing *p = argument;
    const megamoe_layer *layer = p->layer;
    int32_t i;
    while ((i = atomic_fetch_add(&p->next, 1)) < p->count) {
        const int32_t local = p->first + i;
        const int32_t expert = layer->placement.logical_of[layer->placement.first + local];
        uint8_t *blob = p->blobs + (size_t)i * layer->blob_bytes;
        megamoe_status status;
        if (megamoe_weights_prepared(p->weights))
            status = mm_weights_read_blob(p->weights, expert, blob);
        else if (layer->device->cuda) {
            memset(blob, 0, layer->blob_bytes); /* the wave before has been here */
            status = mm_cuda_pack(p->weights, &layer->cuda.layout, expert, blob,
                                  p->options->round_outside_window, &p->inexact[local]);
        } else
            status = mm_cpu_pack(p->weights, &layer->cpu.layout, expert, blob, &p->inexact[local]);
        mm_carry(&p->failure, status);
        const int32_t done = atomic_fetch_add(&p->done, 1) + 1;
        if (thread == 0) /* the caller's, so that reports do not meet */
            report(layer, p->options, done);
    }
}

static megamoe_status pack_wave(struct packing *packing, int32_t first, int32_t count) {
    packing->first = first;
    packing->count = count;
    atomic_store(&packing->next, 0);
    mm_pool_run(packing->layer->device->pool, pack, packing);
    report(packing->layer, packing->options, first + count);
    return mm_carried_status(&packing->failure);
}

static megamoe_status allocate_blobs(const megamoe_layer *layer, int32_t count, uint8_t **blobs) {
    size_t bytes;
    if (!mm_mul_size((size_t)count, layer->blob_bytes, &bytes) || !(*blobs = mm_alloc_huge(bytes)))
        return mm_fail(MEGAMOE_ENOMEM, "layer: %d experts of %zu bytes: out of memory", count,
                       layer->blob_bytes);
    return MEGAMOE_OK;
}

/* MEGAMOE_OK if no group of any expert is outside of what the layout holds. */
static megamoe_status check_exact(const struct packing *packing, int32_t experts) {
    mm_inexact total = {0};
    for (int32_t e = 0; e < experts; e++)
        mm_inexact_add(&total, &packing->inexact[e]);
    return mm_inexact_status(packing->weights, &total);
}

/* ---- CPU ---- */

static megamoe_status pack_experts(megamoe_layer *layer, const megamoe_weights *weights,
                                   const megamoe_layer_options *options) {
    const int32_t local = layer->placement.local;
    MM_TRY(allocate_blobs(layer, local, &layer->blobs));
    struct packing packing = {.layer = layer,
                              .weights = weights,
                              .options = options,
                              .blobs = layer->blobs,
                              .inexact = mm_alloc((size_t)local * sizeof *packing.inexact)};
    if (!packing.inexact)
        return mm_fail(MEGAMOE_ENOMEM, "layer: out of memory");
    megamoe_status status = pack_wave(&packing, 0, local);
    if (status == MEGAMOE_OK)
        status = check_exact(&packing, local);
    free(packing.inexact);
    return status;
}

megamoe_status mm_layer_load_cpu(megamoe_layer *layer, const megamoe_weights *weights,
                                 const megamoe_layer_options *options) {
    const mm_placement *placement = &layer->placement;
    mm_cpu_layer *cpu = &layer->cpu;
    *cpu = (mm_cpu_layer){
        .desc = layer->desc,
        .accumulate = layer->accumulate,
        .weight_after_fc2 = options->weight_after_fc2,
        .layout = mm_cpu_layout_of(&layer->desc, mm_weights_nvfp4_mode(weights, options->nvfp4)),
        .placement = placement,
        .experts = mm_alloc((size_t)placement->local * sizeof *cpu->experts)};
    layer->received = mm_alloc((size_t)placement->local * sizeof *layer->received);
    if (!cpu->experts || !layer->received)
        return mm_fail(MEGAMOE_ENOMEM, "layer: out of memory");
    cpu->key = mm_layer_key(layer, placement, (int32_t)cpu->layout.format, cpu->weight_after_fc2);
    layer->blob_bytes = cpu->layout.blob_bytes;
    if (options->map_prepared && megamoe_weights_prepared(weights))
        MM_TRY(mm_weights_map_blobs(weights, &layer->mapped));
    else
        MM_TRY(pack_experts(layer, weights, options));
    for (int32_t e = 0; e < placement->local; e++) {
        const int32_t at = layer->blobs ? e : placement->logical_of[placement->first + e];
        const uint8_t *blobs = layer->blobs ? layer->blobs : layer->mapped.data;
        cpu->experts[e] = mm_cpu_expert_of(&cpu->layout, blobs + (size_t)at * layer->blob_bytes);
    }
    return MEGAMOE_OK;
}

/* ---- CUDA ---- */

/*
 * Packs and uploads in waves of one expert for each thread. All are packed even after one that does
 * not fit, because the message counts.
 */
static megamoe_status pack_and_upload(megamoe_layer *layer, const megamoe_weights *weights,
                                      const megamoe_layer_options *options) {
    const int32_t local = layer->placement.local;
    const int32_t wave = (int32_t)mm_min(local, mm_pool_threads(layer->device->pool));
    struct packing packing = {.layer = layer, .weights = weights, .options = options};
    megamoe_status status;
    MM_TRY_GOTO(allocate_blobs(layer, wave, &packing.blobs), done);
    packing.inexact = mm_alloc((size_t)local * sizeof *packing.inexact);
    if (!packing.inexact) {
        status = mm_fail(MEGAMOE_ENOMEM, "layer: out of memory");
        goto done;
    }
    bool exact = true;
    for (int32_t first = 0; first < local; first += wave) {
        const int32_t count = (int32_t)mm_min(wave, local - first);
        MM_TRY_GOTO(pack_wave(&packing, first, count), done);
        for (int32_t e = first; e < first + count; e++)
            exact = exact && packing.inexact[e].groups == 0;
        for (int32_t i = 0; exact && i < count; i++)
            MM_TRY_GOTO(mm_cuda_layer_upload(&layer->cuda, first + i,
                                             packing.blobs + (size_t)i * layer->blob_bytes),
                        done);
    }
    status = check_exact(&packing, local);
done:
    free(packing.blobs);
    free(packing.inexact);
    return status;
}

static megamoe_status upload_prepared(megamoe_layer *layer, const megamoe_weights *weights,
                                      const megamoe_layer_options *options) {
    const mm_placement *placement = &layer->placement;
    for (int32_t e = 0; e < placement->local; e++) {
        const int32_t expert = placement->logical_of[placement->first + e];
        MM_TRY(mm_weights_hold(weights, expert));
        const megamoe_status status =
            mm_cuda_layer_upload(&layer->cuda, e, mm_weights_blob(weights, expert));
        mm_weights_drop(weights, expert);
        MM_TRY(status);
        report(layer, options, e + 1);
    }
    return MEGAMOE_OK;
}

megamoe_status mm_layer_load_cuda(megamoe_layer *layer, const megamoe_weights *weights,
                                  const megamoe_layer_options *options) {
    const mm_placement *placement = &layer->placement;
    mm_cuda_layer *cuda = &layer->cuda;
    *cuda = (mm_cuda_layer){
        .desc = layer->desc,
        .accumulate = layer->accumulate,
        .weight_after_fc2 = options->weight_after_fc2,
        .layout = mm_cuda_layout_of(&layer->desc, mm_weights_nvfp4_mode(weights, options->nvfp4)),
        .placement = placement,
        .device = layer->device->cuda,
        .mapped = options->physical_to_logical != NULL};
    cuda->key =
        mm_layer_key(layer, placement, (int32_t)cuda->layout.format, cuda->weight_after_fc2);
    layer->blob_bytes = cuda->layout.blob_bytes;
    MM_TRY(mm_cuda_layer_open(cuda));
    return megamoe_weights_prepared(weights) ? upload_prepared(layer, weights, options)
                                             : pack_and_upload(layer, weights, options);
}
