/* SPDX-License-Identifier: Apache-2.0 */
#include "layer/layer.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "weights/weights.h"

enum { MAX_PHYSICAL = 65536 };

static megamoe_status check_options(const megamoe_layer_options *options,
                                    const megamoe_layer_desc *desc, const megamoe_device *device) {
    if (options->accumulate != MEGAMOE_ACCUMULATE_MMA &&
        options->accumulate != MEGAMOE_ACCUMULATE_PROMOTE)
        return mm_fail(MEGAMOE_EINVAL, "layer: accumulate %d; expected mma (0) or promote (1)",
                       (int)options->accumulate);
    if (options->nvfp4 != MEGAMOE_NVFP4_EXACT && options->nvfp4 != MEGAMOE_NVFP4_FOLDED)
        return mm_fail(MEGAMOE_EINVAL, "layer: nvfp4 mode %d; expected exact (0) or folded (1)",
                       (int)options->nvfp4);
    if (options->round_outside_window && !device->cuda)
        return mm_fail(MEGAMOE_EINVAL, "layer: round_outside_window is set; the CPU rounds no "
                                       "weights, only a CUDA device does");
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

/* Weights in checkpoint form fit every device, prepared ones the kind that they are packed for. */
static megamoe_status check_weights(const megamoe_weights *weights, const megamoe_device *device) {
    const char *prepared = megamoe_weights_device(weights);
    const char *kind = device->cuda ? "cuda" : "cpu";
    if (prepared && strcmp(prepared, kind) != 0)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "layer: the weights are prepared for device \"%s\" and this one is \"%s\"; "
                       "prepare them for \"%s\"",
                       prepared, kind, kind);
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
    MM_TRY(check_options(&wanted, &desc, device));
    MM_TRY(check_weights(weights, device));
    megamoe_layer *l = mm_alloc(sizeof *l);
    if (!l)
        return mm_fail(MEGAMOE_ENOMEM, "layer: out of memory");
    l->device = device;
    l->desc = desc;
    l->accumulate = wanted.accumulate;
    l->round_outside_window = wanted.round_outside_window;
    megamoe_status status;
    MM_TRY_GOTO(
        mm_placement_open(desc.experts,
                          wanted.physical_to_logical ? wanted.physical_experts : desc.experts,
                          wanted.physical_to_logical, megamoe_comm_rank(comm),
                          megamoe_comm_size(comm), &l->placement),
        fail);
    MM_TRY_GOTO(device->cuda ? mm_layer_load_cuda(l, weights, &wanted)
                             : mm_layer_load_cpu(l, weights, &wanted),
                fail);
    *layer = l;
    return MEGAMOE_OK;
fail:
    megamoe_layer_close(l);
    return status;
}

void megamoe_layer_close(megamoe_layer *layer) {
    if (!layer)
        return;
    if (!layer->device->cuda)
        free(layer->cpu.experts);
    else if (layer->cuda.device) /* else it was not begun */
        mm_cuda_layer_close(&layer->cuda);
    mm_placement_close(&layer->placement);
    free(layer->blobs);
    free((void *)layer->received);
    mm_mapping_close(&layer->mapped);
    free(layer);
}

uint64_t megamoe_layer_bytes(const megamoe_layer *layer) {
    return (uint64_t)layer->placement.local * layer->blob_bytes;
}
