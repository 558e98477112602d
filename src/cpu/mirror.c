/* SPDX-License-Identifier: Apache-2.0 */
#include "cpu/mirror.h"

#include <string.h>

#include "base/error.h"

/* X(array of a window, its columns): what an expert needs of a token. */
#define TOKEN_ARRAYS(X)                                                                            \
    X(codes, ws->codes_stride)                                                                     \
    X(token_scale, 1)                                                                              \
    X(token_factor, 1)                                                                             \
    X(blocks, ws->blocks_stride)                                                                   \
    X(block_scale, ws->blocks_stride)                                                              \
    X(ids, ws->shape.topk)                                                                         \
    X(weights, ws->shape.topk)

size_t mm_cpu_mirror_token_bytes(const mm_cpu_workspace *ws) {
    size_t bytes = sizeof(int64_t);
#define X(name, columns) bytes += (size_t)(columns) * sizeof *ws->own->name;
    TOKEN_ARRAYS(X)
#undef X
    return bytes;
}

size_t mm_cpu_mirror_result_bytes(const mm_cpu_workspace *ws) {
    return sizeof(int64_t) + (size_t)ws->shape.hidden * sizeof(uint16_t);
}

size_t mm_cpu_mirror_card_bytes(const mm_cpu_workspace *ws) {
    return sizeof(mm_publication) + (size_t)ws->ranks * sizeof(int64_t) +
           (size_t)ws->shape.physical_experts * sizeof(int32_t);
}

/* Moves a token between a window and its message, and returns where the next one is. */
static uint8_t *put_token(const mm_cpu_workspace *ws, int64_t t, uint8_t *to) {
    memcpy(to, &t, sizeof t);
    to += sizeof t;
#define X(name, columns)                                                                           \
    memcpy(to, ws->own->name + t * (columns), (size_t)(columns) * sizeof *ws->own->name);          \
    to += (size_t)(columns) * sizeof *ws->own->name;
    TOKEN_ARRAYS(X)
#undef X
    return to;
}

/* False if it is none of the `tokens` that its rank has: the message has not come as it was sent.
 */
static bool take_token(const mm_cpu_workspace *ws, mm_cpu_window *window, int64_t tokens,
                       const uint8_t *from) {
    int64_t t;
    memcpy(&t, from, sizeof t);
    if (t < 0 || t >= tokens)
        return false;
    from += sizeof t;
#define X(name, columns)                                                                           \
    memcpy(window->name + t * (columns), from, (size_t)(columns) * sizeof *window->name);          \
    from += (size_t)(columns) * sizeof *window->name;
    TOKEN_ARRAYS(X)
#undef X
    return true;
}

static megamoe_status refuse(const mm_cpu_workspace *ws, int32_t rank, const char *what) {
    return mm_fail(MEGAMOE_EPEER, "rank %d: %s from rank %d have not come as they were sent",
                   ws->rank, what, rank);
}

/* ---- counts ---- */

static bool goes_to(const mm_cpu_workspace *ws, const mm_cpu_layer *layer, int64_t t,
                    int32_t rank) {
    const mm_placement *placement = layer->placement;
    const int32_t first = mm_share_start(placement->physical, rank, ws->ranks);
    const int32_t count = mm_share_count(placement->physical, rank, ws->ranks);
    for (int32_t slot = 0; slot < ws->shape.topk; slot++) {
        const int32_t id = ws->own->ids[t * ws->shape.topk + slot];
        const int32_t p = id < 0 ? -1 : mm_placement_of(placement, id, ws->rank, t);
        if (p >= first && p < first + count)
            return true;
    }
    return false;
}

static uint8_t *card_of(const mm_cpu_workspace *ws, int32_t rank) {
    return ws->mirror->cards + (size_t)rank * ws->mirror->card_bytes;
}

/* How many tokens rank `from` sends to rank `to`. */
static int64_t tokens_between(const mm_cpu_workspace *ws, int32_t from, int32_t to) {
    int64_t n;
    memcpy(&n, card_of(ws, from) + sizeof(mm_publication) + (size_t)to * sizeof n, sizeof n);
    return n;
}

static uint64_t parity_of(const mm_cpu_workspace *ws) {
    return ws->epoch & 1;
}

static int32_t *counts_of(const mm_cpu_workspace *ws, int32_t rank) {
    return ws->windows[rank].counts + parity_of(ws) * (uint64_t)ws->shape.physical_experts;
}

/* Whether what a rank has told can be: buffers are as large as the capacity demands. */
static bool plausible(const mm_cpu_workspace *ws, int32_t rank) {
    const int64_t tokens = ws->windows[rank].words->publications[parity_of(ws)].tokens;
    if (tokens < 0 || tokens > ws->capacity.tokens)
        return false;
    for (int32_t to = 0; to < ws->ranks; to++)
        if (tokens_between(ws, rank, to) < 0 || tokens_between(ws, rank, to) > tokens)
            return false;
    int64_t routes = 0;
    for (int32_t p = 0; p < ws->shape.physical_experts; p++) {
        const int32_t count = counts_of(ws, rank)[p];
        if (count < 0)
            return false;
        routes += count;
    }
    return routes <= tokens * ws->shape.topk;
}

megamoe_status mm_cpu_mirror_counts(mm_cpu_workspace *ws, const mm_cpu_layer *layer,
                                    megamoe_comm *comm, int32_t timeout_ms) {
    const size_t counts_bytes = (size_t)ws->shape.physical_experts * sizeof(int32_t);
    const size_t counts_at = sizeof(mm_publication) + (size_t)ws->ranks * sizeof(int64_t);
    const mm_publication *own = &ws->own->words->publications[parity_of(ws)];
    uint8_t *mine = card_of(ws, ws->ranks);
    memcpy(mine, own, sizeof *own);
    for (int32_t r = 0; r < ws->ranks; r++) {
        int64_t n = 0;
        for (int64_t t = 0; own->error.status == MEGAMOE_OK && t < ws->tokens; t++)
            n += r != ws->rank && goes_to(ws, layer, t, r);
        memcpy(mine + sizeof *own + (size_t)r * sizeof n, &n, sizeof n);
    }
    memcpy(mine + counts_at, counts_of(ws, ws->rank), counts_bytes);
    MM_TRY(mm_comm_tell(comm, mine, ws->mirror->cards, ws->mirror->card_bytes, timeout_ms));
    for (int32_t r = 0; r < ws->ranks; r++) {
        if (r == ws->rank)
            continue;
        memcpy(&ws->windows[r].words->publications[parity_of(ws)], card_of(ws, r), sizeof *own);
        memcpy(counts_of(ws, r), card_of(ws, r) + counts_at, counts_bytes);
        if (!plausible(ws, r))
            return refuse(ws, r, "counts");
    }
    return MEGAMOE_OK;
}

/* ---- tokens and results ---- */

/* Lays the parts out one after the other; bytes[] is set. */
static void place_parts(mm_parts *parts, int32_t ranks) {
    size_t offset = 0;
    for (int32_t r = 0; r < ranks; r++) {
        parts->offsets[r] = offset;
        offset += parts->bytes[r];
    }
}

megamoe_status mm_cpu_mirror_tokens(mm_cpu_workspace *ws, const mm_cpu_layer *layer,
                                    megamoe_comm *comm, int32_t timeout_ms) {
    mm_cpu_mirror *m = ws->mirror;
    for (int32_t r = 0; r < ws->ranks; r++) {
        m->sent.bytes[r] = (size_t)tokens_between(ws, ws->rank, r) * m->token_bytes;
        m->received.bytes[r] = (size_t)tokens_between(ws, r, ws->rank) * m->token_bytes;
    }
    place_parts(&m->sent, ws->ranks);
    place_parts(&m->received, ws->ranks);
    for (int32_t r = 0; r < ws->ranks; r++) {
        uint8_t *to = (uint8_t *)m->sent.data + m->sent.offsets[r];
        for (int64_t t = 0; m->sent.bytes[r] && t < ws->tokens; t++)
            if (goes_to(ws, layer, t, r))
                to = put_token(ws, t, to);
    }
    MM_TRY(mm_comm_exchange(comm, &m->sent, &m->received, timeout_ms));
    for (int32_t r = 0; r < ws->ranks; r++) {
        if (r == ws->rank)
            continue;
        mm_cpu_window *window = &ws->windows[r];
        const int64_t tokens = window->words->publications[parity_of(ws)].tokens;
        /* Tokens that have not come have no route to here. */
        for (int64_t i = 0; i < tokens * ws->shape.topk; i++)
            window->ids[i] = -1;
        const uint8_t *from = (const uint8_t *)m->received.data + m->received.offsets[r];
        for (size_t at = 0; at < m->received.bytes[r]; at += m->token_bytes)
            if (!take_token(ws, window, tokens, from + at))
                return refuse(ws, r, "tokens");
    }
    return MEGAMOE_OK;
}

static uint16_t *result_of(const mm_cpu_workspace *ws, int32_t rank, int64_t index) {
    return ws->windows[rank].results + index * ws->results_stride;
}

/* Routes of a rank's tokens to the experts of another. */
static int64_t routes_between(const mm_cpu_workspace *ws, int32_t from, int32_t to) {
    const int32_t first = mm_share_start(ws->shape.physical_experts, to, ws->ranks);
    const int32_t count = mm_share_count(ws->shape.physical_experts, to, ws->ranks);
    int64_t n = 0;
    for (int32_t p = first; p < first + count; p++)
        n += counts_of(ws, from)[p];
    return n;
}

megamoe_status mm_cpu_mirror_results(mm_cpu_workspace *ws, megamoe_comm *comm, int32_t timeout_ms) {
    mm_cpu_mirror *m = ws->mirror;
    const size_t row_bytes = (size_t)ws->shape.hidden * sizeof(uint16_t);
    for (int32_t r = 0; r < ws->ranks; r++) {
        const bool other = r != ws->rank;
        m->sent.bytes[r] = other ? (size_t)routes_between(ws, r, ws->rank) * m->result_bytes : 0;
        m->received.bytes[r] =
            other ? (size_t)routes_between(ws, ws->rank, r) * m->result_bytes : 0;
    }
    place_parts(&m->sent, ws->ranks);
    place_parts(&m->received, ws->ranks);
    for (int64_t i = 0; i < ws->received; i++) {
        const mm_route *route = &ws->pool[i];
        if (route->rank == ws->rank)
            continue;
        const int64_t index = route->token * ws->shape.topk + route->slot;
        uint8_t *to = (uint8_t *)m->sent.data + m->sent.offsets[route->rank];
        memcpy(to, &index, sizeof index);
        memcpy(to + sizeof index, result_of(ws, route->rank, index), row_bytes);
        m->sent.offsets[route->rank] += m->result_bytes; /* of the next one, until all are there */
    }
    place_parts(&m->sent, ws->ranks);
    MM_TRY(mm_comm_exchange(comm, &m->sent, &m->received, timeout_ms));
    for (int32_t r = 0; r < ws->ranks; r++) {
        const uint8_t *from = (const uint8_t *)m->received.data + m->received.offsets[r];
        for (size_t at = 0; at < m->received.bytes[r]; at += m->result_bytes) {
            int64_t index;
            memcpy(&index, from + at, sizeof index);
            if (index < 0 || index >= ws->tokens * ws->shape.topk)
                return refuse(ws, r, "results");
            memcpy(result_of(ws, ws->rank, index), from + at + sizeof index, row_bytes);
        }
    }
    return MEGAMOE_OK;
}
