/* SPDX-License-Identifier: Apache-2.0 */
#include "layer/layer.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"
#include "base/memory.h"
#include "weights/cpu_pack.h"
#include "weights/weights.h"

enum { MAX_PHYSICAL = 65536 };

/* Sorts physical experts by the logical expert that they hold; identity where there is no map. */
static megamoe_status place(mm_placement *placement, const int32_t *physical_to_logical,
                            int32_t *logical_of) {
    placement->starts = mm_alloc(((size_t)placement->logical + 1) * sizeof(int32_t));
    placement->replicas = mm_alloc((size_t)placement->physical * sizeof(int32_t));
    if (!placement->starts || !placement->replicas)
        return mm_fail(MEGAMOE_ENOMEM, "expert map: out of memory");
    int32_t *counts = placement->starts + 1;
    for (int32_t p = 0; p < placement->physical; p++) {
        const int32_t e = physical_to_logical ? physical_to_logical[p] : p;
        if (e < 0 || e >= placement->logical)
            return mm_fail(MEGAMOE_EINVAL,
                           "physical_to_logical[%d] is %d; expected a logical expert, 0..%d", p, e,
                           placement->logical - 1);
        logical_of[p] = e;
        counts[e]++;
    }
    for (int32_t e = 0; e < placement->logical; e++) {
        if (counts[e] == 0)
            return mm_fail(MEGAMOE_EINVAL,
                           "physical_to_logical: logical expert %d is nowhere; each needs at least "
                           "one physical expert",
                           e);
        counts[e] += placement->starts[e];
    }
    int32_t *next = mm_alloc((size_t)placement->logical * sizeof *next);
    if (!next)
        return mm_fail(MEGAMOE_ENOMEM, "expert map: out of memory");
    for (int32_t p = 0; p < placement->physical; p++) {
        const int32_t e = logical_of[p];
        placement->replicas[placement->starts[e] + next[e]++] = p;
    }
    free(next);
    return MEGAMOE_OK;
}

/* Packs this rank's experts on all threads. */
struct packing {
    const megamoe_weights *weights;
    const mm_cpu_layer *layer;
    const int32_t *logical_of; /* by local expert */
    uint8_t *blobs;
    mm_inexact *inexact; /* by local expert */
    atomic_int next;
};

static void pack(void *argument, int32_t thread, int32_t threads) {
    (void)thread;
    (void)threads;
    struct packing *packing = argument;
    const mm_cpu_layout *layout = &packing->layer->layout;
    int32_t e;
    while ((e = atomic_fetch_add(&packing->next, 1)) < packing->layer->placement.local)
        mm_cpu_pack(packing->weights, layout, packing->logical_of[e],
                    packing->blobs + (size_t)e * layout->blob_bytes, &packing->inexact[e]);
}

static megamoe_status allocate_blobs(megamoe_layer *layer) {
    size_t bytes;
    if (!mm_mul_size((size_t)layer->cpu.placement.local, layer->cpu.layout.blob_bytes, &bytes) ||
        !(layer->blobs = mm_alloc_huge(bytes)))
        return mm_fail(MEGAMOE_ENOMEM, "layer: %d experts of %zu bytes: out of memory",
                       layer->cpu.placement.local, layer->cpu.layout.blob_bytes);
    return MEGAMOE_OK;
}

static megamoe_status pack_experts(megamoe_layer *layer, megamoe_device *device,
                                   const megamoe_weights *weights, const int32_t *logical_of) {
    MM_TRY(allocate_blobs(layer));
    const int32_t local = layer->cpu.placement.local;
    mm_inexact *inexact = mm_alloc((size_t)local * sizeof *inexact);
    if (!inexact)
        return mm_fail(MEGAMOE_ENOMEM, "layer: out of memory");
    struct packing packing = {.weights = weights,
                              .layer = &layer->cpu,
                              .logical_of = logical_of,
                              .blobs = layer->blobs,
                              .inexact = inexact};
    mm_pool_run(device->pool, pack, &packing);
    mm_inexact total = {0};
    for (int32_t e = 0; e < local; e++)
        mm_inexact_add(&total, &inexact[e]);
    free(inexact);
    return mm_inexact_status(weights, &total);
}

static megamoe_status copy_experts(megamoe_layer *layer, const megamoe_weights *weights,
                                   const int32_t *logical_of) {
    MM_TRY(allocate_blobs(layer));
    const size_t bytes = layer->cpu.layout.blob_bytes;
    for (int32_t e = 0; e < layer->cpu.placement.local; e++)
        memcpy(layer->blobs + (size_t)e * bytes, mm_weights_blob(weights, logical_of[e]), bytes);
    return MEGAMOE_OK;
}

/* What all ranks need to have in common for a forward. */
static uint64_t key_of(const mm_cpu_layer *layer, const int32_t *logical_of) {
    const megamoe_activation *a = &layer->desc.activation;
    const float activation[] = {a->alpha, a->offset, a->limit};
    const int32_t options[] = {layer->desc.hidden,         layer->desc.intermediate,
                               layer->desc.experts,        (int32_t)layer->layout.format,
                               (int32_t)layer->accumulate, layer->weight_after_fc2};
    XXH64_hash_t key = XXH3_64bits(options, sizeof options);
    key = XXH3_64bits_withSeed(activation, sizeof activation, key);
    return XXH3_64bits_withSeed(logical_of, (size_t)layer->placement.physical * sizeof *logical_of,
                                key);
}

static megamoe_status check_options(const megamoe_layer_options *options,
                                    const megamoe_layer_desc *desc) {
    if (options->accumulate != MEGAMOE_ACCUMULATE_MMA &&
        options->accumulate != MEGAMOE_ACCUMULATE_PROMOTE)
        return mm_fail(MEGAMOE_EINVAL, "layer: accumulate %d; expected mma (0) or promote (1)",
                       (int)options->accumulate);
    if (options->nvfp4 != MEGAMOE_NVFP4_EXACT && options->nvfp4 != MEGAMOE_NVFP4_FOLDED)
        return mm_fail(MEGAMOE_EINVAL, "layer: nvfp4 mode %d; expected exact (0) or folded (1)",
                       (int)options->nvfp4);
    const bool mapped = options->physical_to_logical != NULL;
    if (mapped != (options->physical_experts != 0) ||
        (mapped &&
         (options->physical_experts < desc->experts || options->physical_experts > MAX_PHYSICAL)))
        return mm_fail(
            MEGAMOE_EINVAL,
            "layer: physical_experts is %d; expected 0 without a map, or %d..%d with one",
            options->physical_experts, desc->experts, MAX_PHYSICAL);
    return MEGAMOE_OK;
}

megamoe_status megamoe_layer_create(megamoe_comm *comm, megamoe_device *device,
                                    const megamoe_weights *weights,
                                    const megamoe_layer_options *options, megamoe_layer **layer) {
    if (!layer)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_layer_create: layer is NULL");
    *layer = NULL;
    if (!comm || !device || !weights)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_layer_create: %s is NULL",
                       !comm ? "comm" : (!device ? "device" : "weights"));
    megamoe_layer_options wanted;
    MM_TRY(mm_take_struct(&wanted, sizeof wanted, options, "megamoe_layer_options"));
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    MM_TRY(megamoe_weights_describe(weights, &desc));
    MM_TRY(check_options(&wanted, &desc));
    megamoe_layer *l = mm_alloc(sizeof *l);
    const int32_t physical = wanted.physical_to_logical ? wanted.physical_experts : desc.experts;
    int32_t *logical_of = mm_alloc((size_t)physical * sizeof *logical_of);
    megamoe_status status = MEGAMOE_OK;
    if (!l || !logical_of) {
        status = mm_fail(MEGAMOE_ENOMEM, "layer: out of memory");
        goto done;
    }
    mm_cpu_layer *cpu = &l->cpu;
    cpu->desc = desc;
    cpu->accumulate = wanted.accumulate;
    cpu->weight_after_fc2 = wanted.weight_after_fc2;
    cpu->layout = mm_cpu_layout_of(&desc, mm_weights_nvfp4_mode(weights, wanted.nvfp4));
    const int32_t rank = megamoe_comm_rank(comm), ranks = megamoe_comm_size(comm);
    cpu->placement = (mm_placement){.logical = desc.experts,
                                    .physical = physical,
                                    .rank = rank,
                                    .ranks = ranks,
                                    .first = mm_share_start(physical, rank, ranks),
                                    .local = mm_share_count(physical, rank, ranks)};
    MM_TRY_GOTO(place(&cpu->placement, wanted.physical_to_logical, logical_of), done);
    cpu->key = key_of(cpu, logical_of);
    cpu->experts = mm_alloc((size_t)cpu->placement.local * sizeof *cpu->experts);
    if (!cpu->experts) {
        status = mm_fail(MEGAMOE_ENOMEM, "layer: out of memory");
        goto done;
    }
    const int32_t *mine = logical_of + cpu->placement.first;
    if (!megamoe_weights_prepared(weights))
        MM_TRY_GOTO(pack_experts(l, device, weights, mine), done);
    else if (wanted.copy_prepared)
        MM_TRY_GOTO(copy_experts(l, weights, mine), done);
    else
        l->weights = mm_weights_acquire(weights);
    for (int32_t e = 0; e < cpu->placement.local; e++)
        cpu->experts[e] =
            mm_cpu_expert_of(&cpu->layout, l->blobs ? l->blobs + (size_t)e * cpu->layout.blob_bytes
                                                    : mm_weights_blob(weights, mine[e]));
done:
    free(logical_of);
    if (status != MEGAMOE_OK) {
        megamoe_layer_close(l);
        return status;
    }
    *layer = l;
    return MEGAMOE_OK;
}

void megamoe_layer_close(megamoe_layer *layer) {
    if (!layer)
        return;
    free(layer->cpu.placement.starts);
    free(layer->cpu.placement.replicas);
    free(layer->cpu.experts);
    free(layer->blobs);
    megamoe_weights_close(layer->weights);
    free(layer);
}

uint64_t megamoe_layer_bytes(const megamoe_layer *layer) {
    return (uint64_t)layer->cpu.placement.local * layer->cpu.layout.blob_bytes;
}
