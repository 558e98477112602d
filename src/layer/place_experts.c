/* SPDX-License-Identifier: Apache-2.0 */
/* The experts of this rank while they are placed anew: those that it has and those to be. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "layer/place.h"
#include "weights/cpu_pack.h"
#include "weights/hold.h"
#include "weights/weights.h"

megamoe_status mm_place_check_weights(const megamoe_layer *layer, const megamoe_weights *weights) {
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    MM_TRY(megamoe_weights_describe(weights, &desc));
    const megamoe_layer_desc *own = &layer->desc;
    const bool same = desc.layer == own->layer && desc.hidden == own->hidden &&
                      desc.intermediate == own->intermediate && desc.experts == own->experts &&
                      desc.format == own->format && desc.has_bias == own->has_bias;
    const char *device = megamoe_weights_device(weights);
    if (!same || (device && strcmp(device, "cpu") != 0))
        return mm_fail(MEGAMOE_EINVAL,
                       "the weights are those of layer %d with %d experts of %d x %d%s%s, the "
                       "layer is %d with %d of %d x %d",
                       desc.layer, desc.experts, desc.hidden, desc.intermediate,
                       device ? ", prepared for " : "", device ? device : "", own->layer,
                       own->experts, own->hidden, own->intermediate);
    if (device &&
        mm_cpu_layout_of(&desc, mm_weights_nvfp4_mode(weights, MEGAMOE_NVFP4_EXACT)).format !=
            layer->cpu.layout.format)
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

/* The packed expert where the host has it, or NULL. */
static const uint8_t *own_blob(const megamoe_layer *layer, int32_t expert) {
    if (layer->mapped.data)
        return layer->mapped.data + (size_t)expert * layer->blob_bytes;
    const int32_t local = find_local(layer, expert);
    return local < 0 ? NULL : layer->blobs + (size_t)local * layer->blob_bytes;
}

static megamoe_status pack(const mm_move *m, int32_t expert, uint8_t *to) {
    if (megamoe_weights_prepared(m->weights))
        return mm_weights_read_blob(m->weights, expert, to);
    mm_inexact inexact = {0};
    memset(to, 0, m->layer->blob_bytes);
    MM_TRY(mm_cpu_pack(m->weights, &m->layer->cpu.layout, expert, to, &inexact));
    return mm_inexact_status(m->weights, &inexact);
}

megamoe_status mm_place_read(const mm_move *m, int32_t expert, uint8_t *to) {
    const uint8_t *from = own_blob(m->layer, expert);
    if (!from)
        return pack(m, expert, to);
    memcpy(to, from, m->layer->blob_bytes);
    return MEGAMOE_OK;
}

/* ---- those to be ---- */

static uint8_t *new_blob(const mm_move *m, int32_t local) {
    return m->blobs + (size_t)local * m->layer->blob_bytes;
}

megamoe_status mm_place_open_experts(mm_move *m) {
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

void mm_place_close_experts(mm_move *m) {
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
    memcpy(new_blob(m, local), slot->blob, m->layer->blob_bytes);
    return check(m, slot, mm_place_logical(m, local), new_blob(m, local));
}

void mm_place_commit(mm_move *m) {
    megamoe_layer *layer = m->layer;
    for (int32_t e = 0; e < m->placement.local; e++) {
        const int32_t at = m->blobs ? e : mm_place_logical(m, e);
        const uint8_t *blobs = m->blobs ? m->blobs : layer->mapped.data;
        m->experts[e] =
            mm_cpu_expert_of(&layer->cpu.layout, blobs + (size_t)at * layer->blob_bytes);
    }
    mm_placement_close(&layer->placement);
    free(layer->cpu.experts);
    free(layer->blobs);
    free((void *)layer->received);
    layer->placement = m->placement;
    layer->cpu.experts = m->experts;
    layer->blobs = m->blobs;
    layer->received = m->received;
    layer->cpu.key = m->cards[0].key;
    m->placement = (mm_placement){0};
    m->experts = NULL;
    m->blobs = NULL;
    m->received = NULL;
}
