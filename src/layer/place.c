/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Placing a layer's experts anew. Every rank tells which experts it has; the new map and these
 * lists say, on all ranks alike, who publishes which experts. They pass in rounds: publish, all
 * meet, take, all meet. The layer changes after the last meeting only.
 */
#include "layer/place.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"

static const char what[] = MM_PLACING;

enum { MAX_PHYSICAL = 65536, MISSING_NAMED = 8 };

/* ---- what this rank brings ---- */

static megamoe_status take_map(mm_move *m, const megamoe_placement *placement) {
    megamoe_placement wanted;
    MM_TRY(mm_take_struct(&wanted, sizeof wanted, placement, "megamoe_placement"));
    const int32_t logical = m->layer->placement.logical;
    const int32_t most =
        m->layer->device->cuda ? (int32_t)MM_CUDA_EXPERTS_MAX : (int32_t)MAX_PHYSICAL;
    const bool mapped = wanted.physical_to_logical != NULL;
    if (mapped != (wanted.physical_experts != 0) ||
        (mapped && (wanted.physical_experts < logical || wanted.physical_experts > most)))
        return mm_fail(MEGAMOE_EINVAL,
                       "physical_experts is %d; expected 0 without a map, or %d..%d with one",
                       wanted.physical_experts, logical, most);
    if (wanted.weights)
        MM_TRY(mm_place_check_weights(m->layer, wanted.weights));
    m->weights = wanted.weights;
    return mm_placement_open(logical, mapped ? wanted.physical_experts : logical,
                             wanted.physical_to_logical, m->rank, m->ranks, &m->placement);
}

static void set_has(mm_place_card *card, int32_t expert) {
    card->has[expert / 8] |= (uint8_t)(1u << expert % 8);
}

static void fill_card(const mm_move *m, mm_place_card *card) {
    const megamoe_layer *layer = m->layer;
    const mm_placement *old = &layer->placement;
    const bool cuda = layer->device->cuda;
    card->key =
        mm_layer_key(layer, &m->placement,
                     cuda ? (int32_t)layer->cuda.layout.format : (int32_t)layer->cpu.layout.format,
                     cuda ? layer->cuda.weight_after_fc2 : layer->cpu.weight_after_fc2);
    card->blob_bytes = layer->blob_bytes;
    for (int32_t e = 0; e < old->logical && (m->weights || layer->mapped.data); e++)
        set_has(card, e);
    for (int32_t p = old->first; p < old->first + old->local; p++)
        set_has(card, old->logical_of[p]);
}

/* ---- what follows from all cards, on all ranks alike ---- */

static megamoe_status list_missing(const mm_move *m, const int32_t *holders) {
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

static bool wants(const mm_move *m, int32_t rank, int32_t expert) {
    const int32_t first = mm_share_start(m->placement.physical, rank, m->ranks);
    const int32_t count = mm_share_count(m->placement.physical, rank, m->ranks);
    for (int32_t i = m->placement.starts[expert]; i < m->placement.starts[expert + 1]; i++)
        if (m->placement.replicas[i] >= first && m->placement.replicas[i] < first + count)
            return true;
    return false;
}

bool mm_place_takes(const mm_move *m, int32_t rank, int32_t expert) {
    return !mm_place_has(&m->cards[rank], expert) && wants(m, rank, expert);
}

/* Those that hold an expert take turns in publishing. */
static int32_t publisher_of(const mm_move *m, int32_t expert, int32_t holders) {
    bool needed = false;
    for (int32_t r = 0; r < m->ranks; r++)
        needed = needed || (mm_place_takes(m, r, expert));
    if (!needed)
        return -1;
    int32_t skipped = expert % holders, r = 0;
    while (!mm_place_has(&m->cards[r], expert) || skipped-- > 0)
        r++;
    return r;
}

static megamoe_status plan_moves(mm_move *m) {
    const int32_t logical = m->placement.logical;
    int32_t *holders = mm_alloc((size_t)logical * sizeof *holders);
    m->publisher = mm_alloc((size_t)logical * sizeof *m->publisher);
    megamoe_status status = MEGAMOE_OK;
    if (!holders || !m->publisher) {
        megamoe_comm_abort(m->comm); /* the others go on */
        status = mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", what);
        goto done;
    }
    for (int32_t e = 0; e < logical; e++)
        for (int32_t r = 0; r < m->ranks; r++)
            holders[e] += mm_place_has(&m->cards[r], e);
    MM_TRY_GOTO(list_missing(m, holders), done);
    for (int32_t e = 0; e < logical; e++)
        m->publisher[e] = publisher_of(m, e, holders[e]);
    status = mm_place_plan_passing(m);
done:
    free(holders);
    return status;
}

static megamoe_status compare(const mm_move *m) {
    MM_TRY(mm_outcome_of_all(what, &m->cards[0].outcome, sizeof *m->cards, m->rank, m->ranks));
    for (int32_t r = 1; r < m->ranks; r++)
        if (m->cards[r].key != m->cards[0].key || m->cards[r].blob_bytes != m->cards[0].blob_bytes)
            return mm_fail(MEGAMOE_EINVAL,
                           "%s: the layer or the map of rank %d is another one than that of rank 0",
                           what, r);
    return MEGAMOE_OK;
}

/* ---- the whole ---- */

/* What this rank brings; no forward of it is on its way any more. */
static megamoe_status prepare(mm_move *m, const megamoe_placement *placement) {
    if (m->layer->device->cuda)
        MM_TRY(mm_cuda_layer_settle(&m->layer->cuda));
    return take_map(m, placement);
}

static megamoe_status begin(mm_move *m) {
    if (m->slots > 0)
        MM_TRY(mm_place_open_passing(m));
    return mm_place_open_experts(m);
}

static megamoe_status place(mm_move *m) {
    MM_TRY(compare(m));
    MM_TRY(plan_moves(m));
    MM_TRY(mm_meeting_outcome(m->comm, what, begin(m)));
    if (m->slots > 0)
        MM_TRY(mm_place_pass(m));
    const megamoe_status status = mm_place_commit(m);
    return m->layer->device->cuda ? mm_meeting_outcome(m->comm, what, status) : status;
}

static void close_move(mm_move *m) {
    mm_place_close_passing(m);
    mm_place_close_experts(m);
    mm_placement_close(&m->placement);
    mm_meeting_leave(m->comm, m->meeting);
    free(m->publisher);
}

megamoe_status megamoe_layer_place(megamoe_comm *comm, megamoe_layer *layer,
                                   const megamoe_placement *placement) {
    if (!comm || !layer)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_layer_place: %s is NULL", comm ? "layer" : "comm");
    if (mm_comm_folded(comm))
        return mm_fail(MEGAMOE_EINVAL,
                       "%s: one thread drives all ranks of a folded communicator, so they cannot "
                       "wait for each other",
                       what);
    mm_move m = {.comm = comm,
                 .layer = layer,
                 .rank = megamoe_comm_rank(comm),
                 .ranks = megamoe_comm_size(comm),
                 .window = {.fd = -1}};
    mm_place_card card = {.key = 0};
    const megamoe_status taken = prepare(&m, placement);
    mm_outcome_set(&card.outcome, taken);
    if (taken == MEGAMOE_OK)
        fill_card(&m, &card);
    megamoe_status status = mm_meeting_join(comm, &card, sizeof card, &m.meeting);
    if (status == MEGAMOE_OK) {
        m.cards = mm_meeting_parts(comm, m.meeting);
        status = place(&m);
    }
    const bool met = m.meeting;
    close_move(&m);
    /* Freeing waits for the GPU, which may be another rank's too: nobody launches before. */
    if (met && layer->device->cuda)
        MM_TRY(mm_meeting_outcome(comm, what, MEGAMOE_OK));
    return status;
}
