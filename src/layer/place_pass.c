/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Experts on their way. Where ranks have memory in common they lie in a window of their publisher,
 * once for all ranks that take them; otherwise they are sent to each.
 */
#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"
#include "layer/place.h"

size_t mm_place_window_bytes = 64 << 20;

static mm_place_slot *slot_at(const mm_move *m, void *slots, int64_t index) {
    return (mm_place_slot *)((uint8_t *)slots + (size_t)index * m->slot_bytes);
}

static megamoe_status fill_slot(const mm_move *m, int32_t expert, mm_place_slot *slot) {
    MM_TRY(mm_place_read(m, expert, slot->blob));
    slot->expert = expert;
    slot->hash = mm_hash_of(slot->blob, m->layer->blob_bytes);
    return MEGAMOE_OK;
}

/* ---- through memory in common ---- */

static mm_place_slot *slot_of(const mm_move *m, int32_t expert) {
    return slot_at(m, m->windows[m->publisher[expert]], m->turn[expert] % m->slots);
}

static bool passes_in(const mm_move *m, int32_t expert, int32_t round) {
    return m->publisher[expert] >= 0 && m->turn[expert] / m->slots == round;
}

static megamoe_status publish(const mm_move *m, int32_t round) {
    for (int32_t e = 0; e < m->placement.logical; e++)
        if (m->publisher[e] == m->rank && passes_in(m, e, round))
            MM_TRY(fill_slot(m, e, slot_of(m, e)));
    return MEGAMOE_OK;
}

static megamoe_status take(const mm_move *m, int32_t round) {
    for (int32_t i = 0; i < m->placement.local; i++) {
        const int32_t e = mm_place_logical(m, i);
        if (!mm_place_has(&m->cards[m->rank], e) && passes_in(m, e, round))
            MM_TRY(mm_place_take(m, i, slot_of(m, e)));
    }
    return MEGAMOE_OK;
}

/* Where the windows are. Collective. */
static megamoe_status find_windows(mm_move *m) {
    const uint64_t own = (uint64_t)(uintptr_t)m->window.own;
    mm_meeting *meeting;
    m->shared = true;
    MM_TRY(mm_meeting_join(m->comm, &own, sizeof own, &meeting));
    const megamoe_status status =
        mm_symmetric_meet(m->comm, &m->window, mm_meeting_parts(m->comm, meeting), m->windows);
    mm_meeting_leave(m->comm, meeting);
    return mm_meeting_outcome(m->comm, MM_PLACING, status);
}

/* ---- by messages ---- */

/* The experts that one rank sends another in a round, in ascending order; returns how many. */
static int32_t list_passing(const mm_move *m, int32_t from, int32_t to, int32_t round) {
    int32_t before = 0, n = 0;
    for (int32_t e = 0; e < m->placement.logical; e++)
        if (m->publisher[e] == from && mm_place_takes(m, to, e) && before++ / m->slots == round)
            m->passing[n++] = e;
    return n;
}

static megamoe_status send_slots(const mm_move *m, int32_t round) {
    for (int32_t r = 0; r < m->ranks; r++) {
        const int32_t n = list_passing(m, m->rank, r, round);
        for (int32_t i = 0; i < n; i++)
            MM_TRY(
                fill_slot(m, m->passing[i], slot_at(m, m->sent.data, (int64_t)r * m->slots + i)));
    }
    return MEGAMOE_OK;
}

static megamoe_status exchange_slots(const mm_move *m, int32_t round) {
    for (int32_t r = 0; r < m->ranks; r++) {
        const size_t offset = (size_t)r * (size_t)m->slots * m->slot_bytes;
        m->sent.offsets[r] = m->taken.offsets[r] = offset;
        m->sent.bytes[r] = (size_t)list_passing(m, m->rank, r, round) * m->slot_bytes;
        m->taken.bytes[r] = (size_t)list_passing(m, r, m->rank, round) * m->slot_bytes;
    }
    return mm_comm_exchange(m->comm, &m->sent, &m->taken, mm_comm_creation_deadline(m->comm));
}

/* Replicas on this rank come once. */
static megamoe_status take_slot(const mm_move *m, int32_t expert, const mm_place_slot *slot) {
    for (int32_t i = 0; i < m->placement.local; i++)
        if (mm_place_logical(m, i) == expert)
            MM_TRY(mm_place_take(m, i, slot));
    return MEGAMOE_OK;
}

static megamoe_status take_slots(const mm_move *m, int32_t round) {
    for (int32_t r = 0; r < m->ranks; r++) {
        const int32_t n = list_passing(m, r, m->rank, round);
        for (int32_t i = 0; i < n; i++)
            MM_TRY(
                take_slot(m, m->passing[i], slot_at(m, m->taken.data, (int64_t)r * m->slots + i)));
    }
    return MEGAMOE_OK;
}

static megamoe_status pass_by_messages(const mm_move *m, int32_t round) {
    MM_TRY(mm_meeting_outcome(m->comm, MM_PLACING, send_slots(m, round)));
    MM_TRY(exchange_slots(m, round));
    return mm_meeting_outcome(m->comm, MM_PLACING, take_slots(m, round));
}

/* ---- both ---- */

static megamoe_status plan_turns(mm_move *m) {
    int32_t *published = mm_alloc((size_t)m->ranks * sizeof *published);
    m->turn = mm_alloc((size_t)m->placement.logical * sizeof *m->turn);
    const bool complete = published && m->turn;
    for (int32_t e = 0; complete && e < m->placement.logical; e++) {
        if (m->publisher[e] < 0)
            continue;
        m->turn[e] = published[m->publisher[e]]++;
        m->most = (int32_t)mm_max(m->most, published[m->publisher[e]]);
    }
    free(published);
    return complete ? MEGAMOE_OK : mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", MM_PLACING);
}

static megamoe_status plan_messages(mm_move *m) {
    const size_t pairs = (size_t)m->ranks * (size_t)m->ranks;
    int32_t *sent = mm_alloc(pairs * sizeof *sent);
    if (!sent)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", MM_PLACING);
    for (int32_t e = 0; e < m->placement.logical; e++)
        for (int32_t r = 0; m->publisher[e] >= 0 && r < m->ranks; r++)
            if (mm_place_takes(m, r, e))
                m->most = (int32_t)mm_max(m->most, ++sent[m->publisher[e] * m->ranks + r]);
    free(sent);
    return MEGAMOE_OK;
}

megamoe_status mm_place_plan_passing(mm_move *m) {
    const bool messages = mm_comm_by_messages(m->comm);
    const megamoe_status status = messages ? plan_messages(m) : plan_turns(m);
    if (status != MEGAMOE_OK)
        megamoe_comm_abort(m->comm); /* the others go on */
    m->slot_bytes = mm_round_up(sizeof(mm_place_slot) + m->layer->blob_bytes, MM_CACHE_LINE);
    const size_t room = mm_place_window_bytes / m->slot_bytes / (messages ? (size_t)m->ranks : 1);
    m->slots = m->most ? (int32_t)mm_max(1, mm_min(m->most, (int64_t)room)) : 0;
    return status;
}

static megamoe_status open_parts(mm_parts *parts, int32_t ranks, size_t bytes) {
    parts->bytes = mm_alloc((size_t)ranks * sizeof *parts->bytes);
    parts->offsets = mm_alloc((size_t)ranks * sizeof *parts->offsets);
    parts->data = mm_reserve(bytes);
    return parts->bytes && parts->offsets && parts->data
               ? MEGAMOE_OK
               : mm_fail(MEGAMOE_ENOMEM, "%zu bytes of messages: out of memory", bytes);
}

static void close_parts(mm_parts *parts, size_t bytes) {
    free(parts->bytes);
    free(parts->offsets);
    if (parts->data)
        mm_unreserve(parts->data, bytes);
}

megamoe_status mm_place_open_passing(mm_move *m) {
    if (mm_comm_by_messages(m->comm)) {
        m->passing = mm_alloc((size_t)m->slots * sizeof *m->passing);
        if (!m->passing)
            return mm_fail(MEGAMOE_ENOMEM, "out of memory");
        m->parts_bytes = (size_t)m->ranks * (size_t)m->slots * m->slot_bytes;
        MM_TRY(open_parts(&m->sent, m->ranks, m->parts_bytes));
        return open_parts(&m->taken, m->ranks, m->parts_bytes);
    }
    m->windows = mm_alloc((size_t)m->ranks * sizeof *m->windows);
    if (!m->windows)
        return mm_fail(MEGAMOE_ENOMEM, "out of memory");
    return mm_symmetric_open(m->comm, (size_t)m->slots * m->slot_bytes, &m->window);
}

/* After an abort another rank of this process may still read the window: it is left to it. */
void mm_place_close_passing(mm_move *m) {
    if (!m->shared || mm_comm_in_processes(m->comm) || !mm_comm_aborted(m->comm))
        mm_symmetric_close(&m->window);
    free((void *)m->windows);
    free(m->turn);
    close_parts(&m->sent, m->parts_bytes);
    close_parts(&m->taken, m->parts_bytes);
    free(m->passing);
}

megamoe_status mm_place_pass(mm_move *m) {
    const bool messages = mm_comm_by_messages(m->comm);
    if (!messages)
        MM_TRY(find_windows(m));
    for (int32_t round = 0; round * m->slots < m->most; round++) {
        if (messages) {
            MM_TRY(pass_by_messages(m, round));
            continue;
        }
        MM_TRY(mm_meeting_outcome(m->comm, MM_PLACING, publish(m, round)));
        MM_TRY(mm_meeting_outcome(m->comm, MM_PLACING, take(m, round)));
    }
    return MEGAMOE_OK;
}
