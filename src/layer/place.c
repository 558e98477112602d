/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Placing a layer's experts anew. Every rank tells which experts it has; the new map and these
 * lists say, on all ranks alike, who publishes which experts. They pass in rounds through a window
 * of each rank: publish, all meet, take, all meet. The layer changes after the last meeting only.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "comm/outcome.h"
#include "comm/symmetric.h"
#include "layer/layer.h"
#include "weights/cpu_pack.h"
#include "weights/hold.h"
#include "weights/prepared.h"
#include "weights/rows.h"
#include "weights/weights.h"

static const char what[] = "placing experts";

enum { MAX_PHYSICAL = 65536, MISSING_NAMED = 8 };

size_t mm_place_window_bytes = 64 << 20;

/* What a rank tells all others at the beginning. */
struct card {
    mm_outcome outcome;
    uint64_t key; /* of the layer as it is to be: equal on all ranks */
    uint64_t blob_bytes;
    uint8_t has[MM_MAX_EXPERTS / 8]; /* by logical expert */
};

/* An expert on its way. */
struct slot {
    _Alignas(MM_CACHE_LINE) mm_hash hash;
    int32_t expert;
    _Alignas(MM_CACHE_LINE) uint8_t blob[];
};

struct move {
    megamoe_comm *comm;
    megamoe_layer *layer;
    const megamoe_weights *weights; /* borrowed; NULL: none */
    int32_t rank, ranks;
    mm_placement placement; /* to be */
    mm_meeting *meeting;    /* holds the cards */
    const struct card *cards;
    int32_t *publisher; /* [logical]: the rank that publishes it, or -1 */
    int32_t *turn;      /* [logical]: how many that rank publishes before */
    int32_t most;       /* that one rank publishes */
    int32_t slots;      /* of a window */
    size_t slot_bytes;
    mm_symmetric window;
    bool shared;               /* others have it */
    uint8_t **windows;         /* [ranks] */
    uint8_t *blobs;            /* [placement.local], to be; NULL where a file is mapped */
    mm_cpu_expert *experts;    /* [placement.local], to be */
    _Atomic int64_t *received; /* [placement.local], to be */
};

/* ---- what this rank brings ---- */

static megamoe_status check_weights(const megamoe_layer *layer, const megamoe_weights *weights) {
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

static megamoe_status take_map(struct move *m, const megamoe_placement *placement) {
    megamoe_placement wanted;
    MM_TRY(mm_take_struct(&wanted, sizeof wanted, placement, "megamoe_placement"));
    const int32_t logical = m->layer->placement.logical;
    const bool mapped = wanted.physical_to_logical != NULL;
    if (mapped != (wanted.physical_experts != 0) ||
        (mapped && (wanted.physical_experts < logical || wanted.physical_experts > MAX_PHYSICAL)))
        return mm_fail(MEGAMOE_EINVAL,
                       "physical_experts is %d; expected 0 without a map, or %d..%d with one",
                       wanted.physical_experts, logical, MAX_PHYSICAL);
    if (wanted.weights)
        MM_TRY(check_weights(m->layer, wanted.weights));
    m->weights = wanted.weights;
    return mm_placement_open(logical, mapped ? wanted.physical_experts : logical,
                             wanted.physical_to_logical, m->rank, m->ranks, &m->placement);
}

static void set_has(struct card *card, int32_t expert) {
    card->has[expert / 8] |= (uint8_t)(1u << expert % 8);
}

static bool has(const struct card *card, int32_t expert) {
    return card->has[expert / 8] >> expert % 8 & 1;
}

static void fill_card(const struct move *m, struct card *card) {
    const megamoe_layer *layer = m->layer;
    const mm_placement *old = &layer->placement;
    card->key = mm_layer_key(layer, &m->placement, (int32_t)layer->cpu.layout.format,
                             layer->cpu.weight_after_fc2);
    card->blob_bytes = layer->blob_bytes;
    for (int32_t e = 0; e < old->logical && (m->weights || layer->mapped.data); e++)
        set_has(card, e);
    for (int32_t p = old->first; p < old->first + old->local; p++)
        set_has(card, old->logical_of[p]);
}

/* ---- what follows from all cards, on all ranks alike ---- */

static megamoe_status list_missing(const struct move *m, const int32_t *holders) {
    char text[16 * MISSING_NAMED] = "";
    int32_t missing = 0;
    for (int32_t e = 0; e < m->placement.logical; e++) {
        if (holders[e])
            continue;
        const size_t used = strlen(text);
        if (missing++ < MISSING_NAMED)
            snprintf(text + used, sizeof text - used, "%s%d", used ? ", " : "", e);
    }
    if (missing == 0)
        return MEGAMOE_OK;
    char more[32] = "";
    if (missing > MISSING_NAMED)
        snprintf(more, sizeof more, " and %d more", missing - MISSING_NAMED);
    return mm_fail(MEGAMOE_ENOTFOUND,
                   "%s: logical expert%s %s%s: held by no rank and in no weights that a rank "
                   "brings (megamoe_placement.weights)",
                   what, missing == 1 ? "" : "s", text, more);
}

static bool wants(const struct move *m, int32_t rank, int32_t expert) {
    const int32_t first = mm_share_start(m->placement.physical, rank, m->ranks);
    const int32_t count = mm_share_count(m->placement.physical, rank, m->ranks);
    for (int32_t i = m->placement.starts[expert]; i < m->placement.starts[expert + 1]; i++)
        if (m->placement.replicas[i] >= first && m->placement.replicas[i] < first + count)
            return true;
    return false;
}

/* Those that hold an expert take turns in publishing. */
static int32_t publisher_of(const struct move *m, int32_t expert, int32_t holders) {
    bool needed = false;
    for (int32_t r = 0; r < m->ranks; r++)
        needed = needed || (!has(&m->cards[r], expert) && wants(m, r, expert));
    if (!needed)
        return -1;
    int32_t skipped = expert % holders, r = 0;
    while (!has(&m->cards[r], expert) || skipped-- > 0)
        r++;
    return r;
}

static megamoe_status plan_moves(struct move *m) {
    const int32_t logical = m->placement.logical;
    int32_t *holders = mm_alloc((size_t)logical * sizeof *holders);
    int32_t *published = mm_alloc((size_t)m->ranks * sizeof *published);
    m->publisher = mm_alloc((size_t)logical * sizeof *m->publisher);
    m->turn = mm_alloc((size_t)logical * sizeof *m->turn);
    megamoe_status status = MEGAMOE_OK;
    if (!holders || !published || !m->publisher || !m->turn) {
        megamoe_comm_abort(m->comm); /* the others go on */
        status = mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", what);
        goto done;
    }
    for (int32_t e = 0; e < logical; e++)
        for (int32_t r = 0; r < m->ranks; r++)
            holders[e] += has(&m->cards[r], e);
    MM_TRY_GOTO(list_missing(m, holders), done);
    for (int32_t e = 0; e < logical; e++) {
        m->publisher[e] = publisher_of(m, e, holders[e]);
        if (m->publisher[e] < 0)
            continue;
        m->turn[e] = published[m->publisher[e]]++;
        m->most = (int32_t)mm_max(m->most, published[m->publisher[e]]);
    }
    m->slot_bytes = mm_round_up(sizeof(struct slot) + m->layer->blob_bytes, MM_CACHE_LINE);
    m->slots =
        (int32_t)mm_max(1, mm_min(m->most, (int64_t)(mm_place_window_bytes / m->slot_bytes)));
done:
    free(holders);
    free(published);
    return status;
}

static megamoe_status compare(const struct move *m) {
    MM_TRY(mm_outcome_of_all(what, &m->cards[0].outcome, sizeof *m->cards, m->rank, m->ranks));
    for (int32_t r = 1; r < m->ranks; r++)
        if (m->cards[r].key != m->cards[0].key || m->cards[r].blob_bytes != m->cards[0].blob_bytes)
            return mm_fail(MEGAMOE_EINVAL,
                           "%s: the layer or the map of rank %d is another one than that of rank 0",
                           what, r);
    return MEGAMOE_OK;
}

/* ---- experts ---- */

/* The blob of an expert that the layer has, or NULL. */
static const uint8_t *own_blob(const struct move *m, int32_t expert) {
    const megamoe_layer *layer = m->layer;
    const mm_placement *old = &layer->placement;
    if (layer->mapped.data)
        return layer->mapped.data + (size_t)expert * layer->blob_bytes;
    for (int32_t e = 0; e < old->local; e++)
        if (old->logical_of[old->first + e] == expert)
            return layer->blobs + (size_t)e * layer->blob_bytes;
    return NULL;
}

/* An expert that this rank has. */
static megamoe_status copy_own(const struct move *m, int32_t expert, uint8_t *to) {
    const uint8_t *from = own_blob(m, expert);
    if (from) {
        memcpy(to, from, m->layer->blob_bytes);
        return MEGAMOE_OK;
    }
    if (megamoe_weights_prepared(m->weights))
        return mm_weights_read_blob(m->weights, expert, to);
    mm_inexact inexact = {0};
    memset(to, 0, m->layer->blob_bytes);
    MM_TRY(mm_cpu_pack(m->weights, &m->layer->cpu.layout, expert, to, &inexact));
    return mm_inexact_status(m->weights, &inexact);
}

static uint8_t *new_blob(const struct move *m, int32_t local) {
    return m->blobs + (size_t)local * m->layer->blob_bytes;
}

static int32_t new_logical(const struct move *m, int32_t local) {
    return m->placement.logical_of[m->placement.first + local];
}

/* Memory for what is to be, and the experts that this rank has already. */
static megamoe_status begin(struct move *m) {
    const size_t local = (size_t)m->placement.local;
    size_t bytes;
    m->experts = mm_alloc(local * sizeof *m->experts);
    m->received = mm_alloc(local * sizeof *m->received);
    m->windows = mm_alloc((size_t)m->ranks * sizeof *m->windows);
    if (!m->experts || !m->received || !m->windows)
        return mm_fail(MEGAMOE_ENOMEM, "out of memory");
    if (m->most > 0)
        MM_TRY(mm_symmetric_open(m->comm, (size_t)m->slots * m->slot_bytes, &m->window));
    if (m->layer->mapped.data)
        return MEGAMOE_OK;
    if (!mm_mul_size(local, m->layer->blob_bytes, &bytes) || !(m->blobs = mm_alloc_huge(bytes)))
        return mm_fail(MEGAMOE_ENOMEM, "%d experts of %zu bytes: out of memory", m->placement.local,
                       m->layer->blob_bytes);
    for (int32_t e = 0; e < m->placement.local; e++)
        if (has(&m->cards[m->rank], new_logical(m, e)))
            MM_TRY(copy_own(m, new_logical(m, e), new_blob(m, e)));
    return MEGAMOE_OK;
}

/* ---- rounds ---- */

static struct slot *slot_of(const struct move *m, int32_t expert) {
    return (struct slot *)(m->windows[m->publisher[expert]] +
                           (size_t)(m->turn[expert] % m->slots) * m->slot_bytes);
}

static bool passes_in(const struct move *m, int32_t expert, int32_t round) {
    return m->publisher[expert] >= 0 && m->turn[expert] / m->slots == round;
}

static megamoe_status publish(const struct move *m, int32_t round) {
    for (int32_t e = 0; e < m->placement.logical; e++) {
        if (m->publisher[e] != m->rank || !passes_in(m, e, round))
            continue;
        struct slot *slot = slot_of(m, e);
        MM_TRY(copy_own(m, e, slot->blob));
        slot->expert = e;
        slot->hash = mm_hash_of(slot->blob, m->layer->blob_bytes);
    }
    return MEGAMOE_OK;
}

static megamoe_status take(const struct move *m, int32_t round) {
    for (int32_t i = 0; i < m->placement.local; i++) {
        const int32_t e = new_logical(m, i);
        if (has(&m->cards[m->rank], e) || !passes_in(m, e, round))
            continue;
        const struct slot *slot = slot_of(m, e);
        memcpy(new_blob(m, i), slot->blob, m->layer->blob_bytes);
        const mm_hash hash = mm_hash_of(new_blob(m, i), m->layer->blob_bytes);
        if (slot->expert != e || memcmp(&hash, &slot->hash, sizeof hash) != 0)
            return mm_fail(MEGAMOE_ECHECK,
                           "expert %d has not arrived from rank %d as it was sent: its hash "
                           "differs",
                           e, m->publisher[e]);
    }
    return MEGAMOE_OK;
}

/* Where the windows are. Collective. */
static megamoe_status find_windows(struct move *m) {
    const uint64_t own = (uint64_t)(uintptr_t)m->window.own;
    mm_meeting *meeting;
    m->shared = true;
    MM_TRY(mm_meeting_join(m->comm, &own, sizeof own, &meeting));
    const megamoe_status status =
        mm_symmetric_meet(m->comm, &m->window, mm_meeting_parts(m->comm, meeting), m->windows);
    mm_meeting_leave(m->comm, meeting);
    return mm_meeting_outcome(m->comm, what, status);
}

static megamoe_status pass_experts(struct move *m) {
    MM_TRY(find_windows(m));
    for (int32_t round = 0; round * m->slots < m->most; round++) {
        MM_TRY(mm_meeting_outcome(m->comm, what, publish(m, round)));
        MM_TRY(mm_meeting_outcome(m->comm, what, take(m, round)));
    }
    return MEGAMOE_OK;
}

/* ---- the whole ---- */

/* Nothing here can fail: the layer is the new one on all ranks. */
static void commit(struct move *m) {
    megamoe_layer *layer = m->layer;
    for (int32_t e = 0; e < m->placement.local; e++) {
        const int32_t at = m->blobs ? e : new_logical(m, e);
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

/* After an abort another rank of this process may still read the window: it is left to it. */
static void close_move(struct move *m) {
    if (!m->shared || mm_comm_in_processes(m->comm) || !mm_comm_aborted(m->comm))
        mm_symmetric_close(&m->window);
    mm_placement_close(&m->placement);
    mm_meeting_leave(m->comm, m->meeting);
    free(m->publisher);
    free(m->turn);
    free((void *)m->windows);
    free(m->blobs);
    free(m->experts);
    free((void *)m->received);
}

static megamoe_status place(struct move *m) {
    MM_TRY(compare(m));
    MM_TRY(plan_moves(m));
    MM_TRY(mm_meeting_outcome(m->comm, what, begin(m)));
    if (m->most > 0)
        MM_TRY(pass_experts(m));
    commit(m);
    return MEGAMOE_OK;
}

megamoe_status megamoe_layer_place(megamoe_comm *comm, megamoe_layer *layer,
                                   const megamoe_placement *placement) {
    if (!comm || !layer)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_layer_place: %s is NULL", comm ? "layer" : "comm");
    if (layer->device->cuda)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "%s: not of a layer on a CUDA device; create it anew "
                       "with the map",
                       what);
    if (mm_comm_by_messages(comm))
        return mm_fail(MEGAMOE_EUNSUPPORTED, "%s: not between ranks without memory in common",
                       what);
    if (mm_comm_folded(comm))
        return mm_fail(MEGAMOE_EINVAL,
                       "%s: one thread drives all ranks of a folded communicator, so they cannot "
                       "wait for each other",
                       what);
    struct move m = {.comm = comm,
                     .layer = layer,
                     .rank = megamoe_comm_rank(comm),
                     .ranks = megamoe_comm_size(comm),
                     .window = {.fd = -1}};
    struct card card = {.key = 0};
    const megamoe_status taken = take_map(&m, placement);
    mm_outcome_set(&card.outcome, taken);
    if (taken == MEGAMOE_OK)
        fill_card(&m, &card);
    megamoe_status status = mm_meeting_join(comm, &card, sizeof card, &m.meeting);
    if (status == MEGAMOE_OK) {
        m.cards = mm_meeting_parts(comm, m.meeting);
        status = place(&m);
    }
    close_move(&m);
    return status;
}
