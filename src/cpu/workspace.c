/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "base/error.h"
#include "cpu/mirror.h"
#include "cpu/operation.h"
#include "cpu/scratch.h"
#include "cpu/trace.h"

/* X(name, what it is for) */
#define PARTS(X)                                                                                   \
    X(BATCH, "the staged batch: codes, scales, expert ids and routing weights")                    \
    X(RESULTS, "a row of output for each route of this rank's tokens, before they are summed")     \
    X(ROUTES, "where each of pool_rows routes comes from, its weight and scales")                  \
    X(FC1_INPUT, "FC1's input: panels and scales of pool_rows routes")                             \
    X(FC2_INPUT, "FC2's input: panels and scales of pool_rows routes")                             \
    X(WORK, "counts of routes, tasks, and what each thread computes in")                           \
    X(MIRROR, "windows of ranks on other hosts, and messages to and from them")

enum {
#define X(name, what) PART_##name,
    PARTS(X)
#undef X
        PART_COUNT
};

/* Pages of one buffer; they are backed by memory only where a forward touches them. */
struct mm_reservation {
    struct mm_reservation *next;
    void *memory;
    size_t bytes;
    int32_t part;
    bool by_route; /* rows are the routes that this rank receives */
};

/* [rows][columns] elements of `size` bytes; NULL when they do not fit. */
static void *reserve_buffer(mm_cpu_workspace *ws, int32_t part, int64_t rows, int64_t columns,
                            size_t size, bool by_route) {
    size_t bytes;
    if (!mm_mul_size((size_t)rows, (size_t)columns, &bytes) || !mm_mul_size(bytes, size, &bytes))
        return NULL;
    struct mm_reservation *reservation = mm_alloc(sizeof *reservation);
    if (!reservation)
        return NULL;
    reservation->memory = mm_reserve(bytes);
    if (!reservation->memory) {
        free(reservation);
        return NULL;
    }
    reservation->bytes = bytes;
    reservation->part = part;
    reservation->by_route = by_route;
    reservation->next = ws->reservations;
    ws->reservations = reservation;
    ws->reserved_bytes += bytes;
    return reservation->memory;
}

static void *reserve(mm_cpu_workspace *ws, int32_t part, int64_t rows, int64_t columns,
                     size_t size) {
    return reserve_buffer(ws, part, rows, columns, size, false);
}

static void *reserve_routes(mm_cpu_workspace *ws, int32_t part, int64_t columns, size_t size) {
    return reserve_buffer(ws, part, ws->capacity.pool_rows, columns, size, true);
}

/*
 * Lays a window out from `base` on, each array on cache lines of its own. Returns its bytes, of
 * which the arrays of `part` have *part_bytes.
 */
static size_t lay_out(const mm_cpu_workspace *ws, uintptr_t base, mm_cpu_window *window,
                      int32_t part, size_t *part_bytes) {
    const size_t tokens = (size_t)ws->capacity.tokens, topk = (size_t)ws->shape.topk;
    const size_t physical = (size_t)ws->shape.physical_experts;
    const size_t codes_stride = (size_t)ws->codes_stride;
    const size_t results_stride = (size_t)ws->results_stride;
    const size_t blocks_stride = (size_t)ws->blocks_stride;
    size_t offset = 0, bytes = 0;
    *part_bytes = 0;
#define X(name, type, of, rows, columns)                                                           \
    bytes = mm_round_up((rows) * (columns) * sizeof(type), MM_CACHE_LINE);                         \
    window->name = (type *)(base + offset);                                                        \
    offset += bytes;                                                                               \
    *part_bytes += part == PART_##of ? bytes : 0;
    MM_CPU_WINDOW(X)
#undef X
    return offset;
}

/* Bytes of a window, or of a part of it. The bounds of shapes and capacities keep them in range. */
static size_t window_bytes(const mm_cpu_workspace *ws, int32_t part) {
    mm_cpu_window window;
    size_t part_bytes;
    const size_t bytes = lay_out(ws, 0, &window, part, &part_bytes);
    return part == PART_COUNT ? bytes : part_bytes;
}

static void find_window(mm_cpu_workspace *ws, int32_t rank, const uint8_t *base) {
    size_t unused;
    (void)lay_out(ws, (uintptr_t)base, &ws->windows[rank], PART_COUNT, &unused);
}

static bool reserve_pool(mm_cpu_workspace *ws) {
    const int64_t physical = ws->shape.physical_experts;
    const int64_t hidden_k = (int64_t)mm_round_up((size_t)ws->shape.hidden, MM_K_MULTIPLE);
    const int64_t intermediate_k =
        (int64_t)mm_round_up((size_t)ws->shape.intermediate, MM_K_MULTIPLE);
    const int64_t units =
        mm_max(mm_fc1_units((int32_t)mm_ceil_div(ws->shape.intermediate, MM_TILE_HALF)),
               mm_fc2_units((int32_t)mm_ceil_div(ws->shape.hidden, MM_TILE_ROWS)));
    ws->segments = reserve(ws, PART_WORK, physical + 1, 1, sizeof(int64_t));
    ws->next = reserve(ws, PART_WORK, physical, 1, sizeof(int64_t));
    ws->pool = reserve_routes(ws, PART_ROUTES, 1, sizeof(mm_route));
    ws->route_scale = reserve_routes(ws, PART_ROUTES, 1, sizeof(float));
    ws->route_factor = reserve_routes(ws, PART_ROUTES, 1, sizeof(float));
    ws->route_weight = reserve_routes(ws, PART_ROUTES, 1, sizeof(float));
    ws->panels = reserve_routes(ws, PART_ROUTES, 1, sizeof(mm_panel));
    ws->panel_starts = reserve(ws, PART_WORK, physical + 1, 1, sizeof(int32_t));
    ws->active = reserve(ws, PART_WORK, physical, 1, sizeof(int32_t));
    ws->tasks = reserve(ws, PART_WORK, physical, units, sizeof(mm_task));
    ws->fc1_panels = reserve_routes(ws, PART_FC1_INPUT, hidden_k / 2, sizeof(uint32_t));
    ws->fc2_panels = reserve_routes(ws, PART_FC2_INPUT, intermediate_k / 2, sizeof(uint32_t));
    ws->fc1_chunk_scale =
        reserve_routes(ws, PART_FC1_INPUT, mm_ceil_div(hidden_k, MM_CHUNK_K), sizeof(float));
    ws->fc2_chunk_scale =
        reserve_routes(ws, PART_FC2_INPUT, mm_ceil_div(intermediate_k, MM_CHUNK_K), sizeof(float));
    return ws->segments && ws->next && ws->pool && ws->route_scale && ws->route_factor &&
           ws->route_weight && ws->panels && ws->panel_starts && ws->active && ws->tasks &&
           ws->fc1_panels && ws->fc2_panels && ws->fc1_chunk_scale && ws->fc2_chunk_scale;
}

/* Rows that are not sent or received take no memory. */
static bool reserve_mirror(mm_cpu_workspace *ws) {
    mm_cpu_mirror *m = ws->mirror = mm_alloc(sizeof *m);
    if (!m)
        return false;
    const int64_t ranks = ws->ranks, tokens = ws->capacity.tokens;
    m->stride = mm_round_up(window_bytes(ws, PART_COUNT), MM_PAGE);
    m->card_bytes = mm_cpu_mirror_card_bytes(ws);
    m->token_bytes = mm_cpu_mirror_token_bytes(ws);
    m->result_bytes = mm_cpu_mirror_result_bytes(ws);
    const size_t tokens_bytes = (size_t)(ranks * tokens) * m->token_bytes;
    const size_t returned_bytes = (size_t)(tokens * ws->shape.topk) * m->result_bytes;
    const size_t pool_bytes = (size_t)ws->capacity.pool_rows * m->result_bytes;
    m->windows = reserve(ws, PART_MIRROR, ranks, (int64_t)m->stride, 1);
    m->cards = reserve(ws, PART_MIRROR, ranks + 1, (int64_t)m->card_bytes, 1);
    m->sent.data =
        reserve(ws, PART_MIRROR, 1, mm_max((int64_t)tokens_bytes, (int64_t)pool_bytes), 1);
    m->received.data =
        reserve(ws, PART_MIRROR, 1, mm_max((int64_t)tokens_bytes, (int64_t)returned_bytes), 1);
    mm_parts *both[] = {&m->sent, &m->received};
    bool complete = m->windows && m->cards && m->sent.data && m->received.data;
    for (int i = 0; i < 2; i++) {
        both[i]->bytes = reserve(ws, PART_MIRROR, ranks, 1, sizeof(size_t));
        both[i]->offsets = reserve(ws, PART_MIRROR, ranks, 1, sizeof(size_t));
        complete = complete && both[i]->bytes && both[i]->offsets;
    }
    return complete;
}

static bool reserve_trace(mm_cpu_workspace *ws, int32_t threads) {
    struct mm_cpu_trace *trace = ws->trace = mm_alloc(sizeof *trace);
    if (!trace)
        return false;
    trace->threads = threads;
    trace->room = ws->capacity.trace;
    trace->spans = reserve(ws, PART_WORK, threads, trace->room, sizeof *trace->spans);
    trace->of = reserve(ws, PART_WORK, threads, 1, sizeof *trace->of);
    return trace->spans && trace->of;
}

static bool reserve_all(mm_cpu_workspace *ws) {
    const int32_t threads = mm_pool_threads(ws->device->pool);
    ws->windows = mm_alloc((size_t)ws->ranks * sizeof *ws->windows);
    ws->scratch = reserve(ws, PART_WORK, threads, 1, sizeof(struct mm_scratch));
    ws->ranges = reserve(ws, PART_WORK, threads, 1, sizeof(struct mm_range));
    return ws->windows && ws->scratch && ws->ranges && reserve_pool(ws) &&
           (!ws->capacity.trace || reserve_trace(ws, threads));
}

megamoe_status mm_cpu_workspace_open(const megamoe_shape *shape, const megamoe_capacity *capacity,
                                     const megamoe_comm *comm, megamoe_device *device,
                                     mm_cpu_workspace **workspace) {
    *workspace = NULL;
    mm_cpu_workspace *ws = mm_alloc(sizeof *ws);
    if (!ws)
        return mm_fail(MEGAMOE_ENOMEM, "workspace: out of memory");
    ws->shape = *shape;
    ws->capacity = *capacity;
    ws->rank = megamoe_comm_rank(comm);
    ws->ranks = megamoe_comm_size(comm);
    ws->device = device;
    ws->codes_stride = (int64_t)mm_round_up((size_t)ws->shape.hidden, MM_CACHE_LINE);
    ws->results_stride = ws->codes_stride;
    ws->blocks_stride = (int32_t)mm_ceil_div(ws->shape.hidden, MM_BLOCK);
    const megamoe_status status =
        reserve_all(ws) && (!mm_comm_by_messages(comm) || reserve_mirror(ws))
            ? mm_symmetric_open(comm, window_bytes(ws, PART_COUNT), &ws->memory)
            : mm_fail(MEGAMOE_ENOMEM,
                      "workspace of %lld tokens and %lld pool rows: out of address "
                      "space",
                      (long long)capacity->tokens, (long long)capacity->pool_rows);
    if (status != MEGAMOE_OK) {
        mm_cpu_workspace_close(ws);
        return status;
    }
    ws->reserved_bytes += ws->memory.bytes;
    ws->own = &ws->windows[ws->rank];
    find_window(ws, ws->rank, ws->memory.own);
    *workspace = ws;
    return MEGAMOE_OK;
}

mm_cpu_card mm_cpu_workspace_card(const mm_cpu_workspace *workspace) {
    return (mm_cpu_card){(uint64_t)(uintptr_t)workspace->memory.own, workspace->memory.bytes};
}

megamoe_status mm_cpu_workspace_meet(mm_cpu_workspace *workspace, megamoe_comm *comm,
                                     const mm_cpu_card *cards) {
    mm_cpu_workspace *ws = workspace;
    for (int32_t r = 0; ws->mirror && r < ws->ranks; r++)
        if (r != ws->rank)
            find_window(ws, r, ws->mirror->windows + (size_t)r * ws->mirror->stride);
    if (ws->mirror)
        return MEGAMOE_OK;
    uint64_t *own = mm_alloc((size_t)ws->ranks * sizeof *own);
    uint8_t **ranges = mm_alloc((size_t)ws->ranks * sizeof(uint8_t *));
    megamoe_status status;
    if (!own || !ranges) {
        megamoe_comm_abort(comm); /* the others wait for this rank */
        status = mm_fail(MEGAMOE_ENOMEM, "workspace: out of memory");
        goto done;
    }
    for (int32_t r = 0; r < ws->ranks; r++)
        own[r] = cards[r].window;
    MM_TRY_GOTO(mm_symmetric_meet(comm, &ws->memory, own, ranges), done);
    for (int32_t r = 0; r < ws->ranks; r++)
        find_window(ws, r, ranges[r]);
done:
    free(own);
    free((void *)ranges);
    return status;
}

void mm_cpu_workspace_close(mm_cpu_workspace *workspace) {
    if (!workspace)
        return;
    for (struct mm_reservation *r = workspace->reservations; r;) {
        struct mm_reservation *next = r->next;
        mm_unreserve(r->memory, r->bytes);
        free(r);
        r = next;
    }
    mm_symmetric_close(&workspace->memory);
    free(workspace->trace);
    free(workspace->mirror);
    free(workspace->windows);
    free(workspace);
}

bool mm_cpu_workspace_part(const mm_cpu_workspace *workspace, int32_t index, const char **what,
                           uint64_t *bytes) {
    static const char *const texts[] = {
#define X(name, what) what,
        PARTS(X)
#undef X
    };
    /* The last part is there only where it is used. */
    if (index < 0 || index >= (workspace->mirror ? PART_COUNT : PART_MIRROR))
        return false;
    *what = texts[index];
    *bytes = window_bytes(workspace, index);
    for (const struct mm_reservation *r = workspace->reservations; r; r = r->next)
        if (r->part == index)
            *bytes += r->bytes;
    return true;
}

void mm_cpu_prewarm(const mm_cpu_workspace *ws, const mm_cpu_layer *layer) {
    /* Buffers for received routes have the bound of all routes of all ranks; an even share of them
     * arrives, twice that covers most routings. */
    const int64_t expected =
        mm_min(ws->capacity.pool_rows, 2 * ws->capacity.tokens * (int64_t)ws->shape.topk);
    mm_populate(ws->memory.own, ws->memory.bytes, true);
    for (const struct mm_reservation *r = ws->reservations; r; r = r->next) {
        if (r->part == PART_MIRROR)
            continue;
        const size_t row_bytes = r->bytes / (size_t)ws->capacity.pool_rows;
        mm_populate(r->memory, r->by_route ? row_bytes * (size_t)expected : r->bytes, true);
    }
    for (int32_t e = 0; e < layer->placement->local; e++)
        mm_populate(layer->experts[e].fc1 - layer->layout.fc1_offset, layer->layout.blob_bytes,
                    false);
}
