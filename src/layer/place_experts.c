/* SPDX-License-Identifier: Apache-2.0 */
/* The experts of this rank while they are placed anew: those that it has and those to be. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "layer/place.h"
#include "weights/cpu_pack.h"
#include "weights/cuda_pack.h"
#include "weights/hold.h"
#include "weights/weights.h"

/* A mm_tile_format or a mm_cuda_format. */
static int32_t packed_format(const megamoe_layer *layer, const megamoe_layer_desc *desc,
                             megamoe_nvfp4_mode mode) {
    return layer->device->cuda ? (int32_t)mm_cuda_layout_of(desc, mode).format
                               : (int32_t)mm_cpu_layout_of(desc, mode).format;
}

static int32_t own_format(const megamoe_layer *layer) {
    return layer->device->cuda ? (int32_t)layer->cuda.layout.format
                               : (int32_t)layer->cpu.layout.format;
}

megamoe_status mm_place_check_weights(const megamoe_layer *layer, const megamoe_weights *weights) {
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    MM_TRY(megamoe_weights_describe(weights, &desc));
    const megamoe_layer_desc *own = &layer->desc;
    const bool same = desc.layer == own->layer && desc.hidden == own->hidden &&
                      desc.intermediate == own->intermediate && desc.experts == own->experts &&
                      desc.format == own->format && desc.has_bias == own->has_bias;
    const char *device = megamoe_weights_device(weights);
    const char *kind = layer->device->cuda ? "cuda" : "cpu";
    if (!same || (device && strcmp(device, kind) != 0))
        return mm_fail(MEGAMOE_EINVAL,
                       "the weights are those of layer %d with %d experts of %d x %d%s%s, the "
                       "layer is %d with %d of %d x %d",
                       desc.layer, desc.experts, desc.hidden, desc.intermediate,
                       device ? ", prepared for " : "", device ? device : "", own->layer,
                       own->experts, own->hidden, own->intermediate);
    const megamoe_nvfp4_mode mode = mm_weights_nvfp4_mode(weights, MEGAMOE_NVFP4_EXACT);
    if (device && packed_format(layer, &desc, mode) != own_format(layer))
        return mm_fail(MEGAMOE_EINVAL, "the weights are prepared in another NVFP4 mode than the "
                                       "layer's");
    return MEGAMOE_OK;
}

/* ---- those that it has ---- */

/* The local number of an expert that the layer has in memory of its own, or -1. */
static int32_t find_local(const megamoe_layer *layer, int32_t expert) {
    const mm_placement *old = &layer->placement;
    for (int32_t e = 0; e < old->local; e++)
        if (old->logical_of[old->first + e] == expert)
            return e;
    return -1;
}

static megamoe_status pack(const mm_move *m, int32_t expert, uint8_t *to) {
    if (megamoe_weights_prepared(m->weights))
        return mm_weights_read_blob(m->weights, expert, to);
    mm_inexact inexact = {0};
    memset(to, 0, m->layer->blob_bytes);
    const megamoe_layer *layer = m->layer;
    if (layer->device->cuda)
        MM_TRY(mm_cuda_pack(m->weights, &layer->cuda.layout, expert, to,
                            layer->round_outside_window, &inexact));
    else
        MM_TRY(mm_cpu_pack(m->weights, &layer->cpu.layout, expert, to, &inexact));
    return mm_inexact_status(m->weights, &inexact);
}

megamoe_status mm_place_read(const mm_move *m, int32_t expert, uint8_t *to) {
    const megamoe_layer *layer = m->layer;
    const int32_t local = layer->mapped.data ? expert : find_local(layer, expert);
    if (local < 0)
        return pack(m, expert, to);
    if (layer->device->cuda)
        return mm_cuda_layer_download(&layer->cuda, local, to);
    const uint8_t *blobs = layer->mapped.data ? layer->mapped.data : layer->blobs;
    memcpy(to, blobs + (size_t)local * layer->blob_bytes, layer->blob_bytes);
    return MEGAMOE_OK;
}

/* ---- those to be ---- */

static uint8_t *new_blob(const mm_move *m, int32_t local) {
    return m->blobs + (size_t)local * m->layer->blob_bytes;
}

/* Local experts stay where they are, or are copied on the GPU, or come from the weights. */
static megamoe_status keep_on_cuda(const mm_move *m, int32_t local) {
    const mm_cuda_layer *layer = &m->layer->cuda;
    const int32_t expert = mm_place_logical(m, local);
    if (mm_cuda_successor_stays(&m->successor, local) || !mm_place_has(&m->cards[m->rank], expert))
        return MEGAMOE_OK;
    const int32_t old = find_local(m->layer, expert);
    if (old >= 0)
        return mm_cuda_successor_keep(layer, &m->successor, local, old);
    MM_TRY(pack(m, expert, m->packed));
    return mm_cuda_successor_put(layer, &m->successor, local, m->packed);
}

static megamoe_status open_on_cuda(mm_move *m) {
    m->packed = mm_alloc(m->layer->blob_bytes);
    if (!m->packed)
        return mm_fail(MEGAMOE_ENOMEM, "out of memory");
    MM_TRY(mm_cuda_successor_open(&m->layer->cuda, &m->placement, &m->successor));
    for (int32_t e = 0; e < m->placement.local; e++)
        MM_TRY(keep_on_cuda(m, e));
    return MEGAMOE_OK;
}

static megamoe_status open_on_cpu(mm_move *m) {
    const size_t local = (size_t)m->placement.local;
    size_t bytes;
    m->experts = mm_alloc(local * sizeof *m->experts);
    m->received = mm_alloc(local * sizeof *m->received);
    if (!m->experts || !m->received)
        return mm_fail(MEGAMOE_ENOMEM, "out of memory");
    if (m->layer->mapped.data)
        return MEGAMOE_OK;
    if (!mm_mul_size(local, m->layer->blob_bytes, &bytes) || !(m->blobs = mm_alloc_huge(bytes)))
        return mm_fail(MEGAMOE_ENOMEM, "%d experts of %zu bytes: out of memory", m->placement.local,
                       m->layer->blob_bytes);
    for (int32_t e = 0; e < m->placement.local; e++)
        if (mm_place_has(&m->cards[m->rank], mm_place_logical(m, e)))
            MM_TRY(mm_place_read(m, mm_place_logical(m, e), new_blob(m, e)));
    return MEGAMOE_OK;
}

megamoe_status mm_place_open_experts(mm_move *m) {
    return m->layer->device->cuda ? open_on_cuda(m) : open_on_cpu(m);
}

void mm_place_close_experts(mm_move *m) {
    if (m->layer->device->cuda)
        mm_cuda_successor_close(&m->layer->cuda, &m->successor);
    free(m->packed);
    free(m->blobs);
    free(m->experts);
    free((void *)m->received);
}

/* `blob` is what has arrived. */
static megamoe_status check(const mm_move *m, const mm_place_slot *slot, int32_t expert,
                            const uint8_t *blob) {
    const mm_hash hash = mm_hash_of(blob, m->layer->blob_bytes);
    if (slot->expert != expert || memcmp(&hash, &slot->hash, sizeof hash) != 0)
        return mm_fail(MEGAMOE_ECHECK,
                       "expert %d has not arrived from rank %d as it was sent: its hash differs",
                       expert, m->publisher[expert]);
    return MEGAMOE_OK;
}

megamoe_status mm_place_take(const mm_move *m, int32_t local, const mm_place_slot *slot) {
    const int32_t expert = mm_place_logical(m, local);
    if (m->layer->device->cuda) {
        MM_TRY(check(m, slot, expert, slot->blob));
        return mm_cuda_successor_put(&m->layer->cuda, &m->successor, local, slot->blob);
    }
    memcpy(new_blob(m, local), slot->blob, m->layer->blob_bytes);
    return check(m, slot, expert, new_blob(m, local));
}

static void replace_placement(mm_move *m) {
    mm_placement_close(&m->layer->placement);
    m->layer->placement = m->placement;
    m->placement = (mm_placement){0};
}

static void commit_on_cpu(mm_move *m) {
    megamoe_layer *layer = m->layer;
    for (int32_t e = 0; e < m->placement.local; e++) {
        const int32_t at = m->blobs ? e : mm_place_logical(m, e);
        const uint8_t *blobs = m->blobs ? m->blobs : layer->mapped.data;
        m->experts[e] =
            mm_cpu_expert_of(&layer->cpu.layout, blobs + (size_t)at * layer->blob_bytes);
    }
    free(layer->cpu.experts);
    free(layer->blobs);
    free((void *)layer->received);
    layer->cpu.experts = m->experts;
    layer->blobs = m->blobs;
    layer->received = m->received;
    layer->cpu.key = m->cards[0].key;
    m->experts = NULL;
    m->blobs = NULL;
    m->received = NULL;
}

megamoe_status mm_place_commit(mm_move *m) {
    if (m->layer->device->cuda)
        MM_TRY(mm_cuda_successor_install(&m->layer->cuda, &m->successor, m->cards[0].key));
    else
        commit_on_cpu(m);
    replace_placement(m);
    return MEGAMOE_OK;
}
