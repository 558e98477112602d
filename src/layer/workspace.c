/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "layer/layer.h"

enum {
    MAX_DIMENSION = 1 << 20,
    MAX_EXPERTS = 65536,
    MAX_TOKENS = 1 << 24,
    DEFAULT_DEADLINE_MS = 30000
};

static megamoe_status check_range(const char *name, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most)
        return mm_fail(MEGAMOE_EINVAL,
                       "workspace: %s is %" PRId64 "; expected %" PRId64 "..%" PRId64, name, value,
                       least, most);
    return MEGAMOE_OK;
}

/* Checks the caller's wishes and fills in the defaults. */
static megamoe_status complete(megamoe_shape *shape, megamoe_capacity *capacity, int32_t ranks) {
    MM_TRY(check_range("shape.hidden", shape->hidden, 1, MAX_DIMENSION));
    MM_TRY(check_range("shape.intermediate", shape->intermediate, 1, MAX_DIMENSION));
    MM_TRY(check_range("shape.experts", shape->experts, 1, MAX_EXPERTS));
    MM_TRY(check_range("shape.topk", shape->topk, 1, MM_MAX_TOPK));
    MM_TRY(check_range("shape.input_scale", (int64_t)shape->input_scale, MEGAMOE_SCALE_TOKEN,
                       MEGAMOE_SCALE_BLOCK_F32));
    if (!shape->physical_experts)
        shape->physical_experts = shape->experts;
    MM_TRY(check_range("shape.physical_experts", shape->physical_experts, shape->experts,
                       MAX_EXPERTS));
    MM_TRY(check_range("capacity.tokens", capacity->tokens, 1, MAX_TOKENS));
    const int64_t bound = (int64_t)ranks * capacity->tokens * shape->topk;
    if (!capacity->pool_rows)
        capacity->pool_rows = mm_min(bound, INT32_MAX);
    MM_TRY(check_range("capacity.pool_rows", capacity->pool_rows, 1, INT32_MAX));
    if (!capacity->deadline_ms)
        capacity->deadline_ms = DEFAULT_DEADLINE_MS;
    return check_range("capacity.deadline_ms", capacity->deadline_ms, 1, INT32_MAX);
}

/* X(struct, field): what must be the same on all ranks. */
#define SHARED_FIELDS(X)                                                                           \
    X(shape, hidden)                                                                               \
    X(shape, intermediate)                                                                         \
    X(shape, experts)                                                                              \
    X(shape, topk)                                                                                 \
    X(shape, input_scale)                                                                          \
    X(shape, physical_experts)                                                                     \
    X(capacity, tokens)                                                                            \
    X(capacity, pool_rows)

static megamoe_status compare(const megamoe_workspace *first, const megamoe_workspace *other,
                              int32_t rank) {
#define X(part, field)                                                                             \
    if (first->part.field != other->part.field)                                                    \
        return mm_fail(MEGAMOE_EINVAL,                                                             \
                       "workspace: " #part "." #field " is %" PRId64 " on rank 0 and %" PRId64     \
                       " on rank %d; all ranks need the same",                                     \
                       (int64_t)first->part.field, (int64_t)other->part.field, rank);
    SHARED_FIELDS(X)
#undef X
    return MEGAMOE_OK;
}

/* Fills the peers from the parts of the meeting and compares shapes and capacities. */
static megamoe_status take_peers(megamoe_workspace *ws, void *const *parts) {
    const int32_t ranks = megamoe_comm_size(ws->comm);
    for (int32_t r = 0; r < ranks; r++)
        if (!parts[r])
            return mm_fail(MEGAMOE_EPEER, "workspace: rank %d could not create its own", r);
    for (int32_t r = 0; r < ranks; r++) {
        const megamoe_workspace *peer = parts[r];
        MM_TRY(compare(parts[0], peer, r));
        ws->cpu->peers[r] = peer->cpu;
    }
    ws->met = true;
    return MEGAMOE_OK;
}

megamoe_status mm_workspace_meet(megamoe_workspace *ws) {
    if (ws->met)
        return MEGAMOE_OK;
    void *const *parts = mm_meeting_parts(ws->comm, ws->meeting);
    if (!parts)
        return mm_fail(MEGAMOE_ESTATE, "workspace: not all ranks have created theirs");
    return take_peers(ws, parts);
}

static megamoe_status open_local(megamoe_comm *comm, megamoe_device *device,
                                 const megamoe_shape *shape, const megamoe_capacity *capacity,
                                 megamoe_workspace **workspace) {
    if (!device || !shape || !capacity)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_workspace_create: %s is NULL",
                       !device ? "device" : (!shape ? "shape" : "capacity"));
    megamoe_workspace *ws = mm_alloc(sizeof *ws);
    if (!ws)
        return mm_fail(MEGAMOE_ENOMEM, "workspace: out of memory");
    ws->comm = comm;
    ws->device = device;
    const int32_t rank = megamoe_comm_rank(comm), ranks = megamoe_comm_size(comm);
    megamoe_status status;
    MM_TRY_GOTO(mm_take_struct(&ws->shape, sizeof ws->shape, shape, "megamoe_shape"), fail);
    MM_TRY_GOTO(mm_take_struct(&ws->capacity, sizeof ws->capacity, capacity, "megamoe_capacity"),
                fail);
    MM_TRY_GOTO(complete(&ws->shape, &ws->capacity, ranks), fail);
    MM_TRY_GOTO(mm_cpu_workspace_open(&ws->shape, &ws->capacity, rank, ranks, device, &ws->cpu),
                fail);
    *workspace = ws;
    return MEGAMOE_OK;
fail:
    megamoe_workspace_close(ws);
    return status;
}

/*
 * Every rank brings its workspace, or NULL where it has none, so that all fail together. Ranks read
 * each other's until the meeting ends: nobody closes before.
 */
static megamoe_status meet_all(megamoe_comm *comm, megamoe_workspace *ws) {
    mm_meeting *meeting;
    MM_TRY(mm_meeting_join(comm, ws, &meeting));
    if (mm_comm_folded(comm)) {
        if (ws)
            ws->meeting = meeting;
        else
            mm_meeting_leave(comm, meeting);
        return MEGAMOE_OK;
    }
    const megamoe_status status = ws ? take_peers(ws, mm_meeting_parts(comm, meeting)) : MEGAMOE_OK;
    mm_meeting_end(comm, meeting);
    return status;
}

megamoe_status
megamoe_workspace_create(megamoe_comm *comm, megamoe_device *device, const megamoe_shape *shape,
                         const megamoe_capacity *capacity, megamoe_workspace **workspace) {
    if (!workspace)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_workspace_create: workspace is NULL");
    *workspace = NULL;
    if (!comm)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_workspace_create: comm is NULL");
    megamoe_workspace *ws = NULL;
    const megamoe_status opened = open_local(comm, device, shape, capacity, &ws);
    char message[1024];
    snprintf(message, sizeof message, "%s", megamoe_last_error());
    const megamoe_status met = meet_all(comm, ws);
    if (opened != MEGAMOE_OK)
        return mm_fail(opened, "%s", message);
    if (met != MEGAMOE_OK) {
        megamoe_workspace_close(ws);
        return met;
    }
    *workspace = ws;
    return MEGAMOE_OK;
}

void megamoe_workspace_close(megamoe_workspace *workspace) {
    if (!workspace)
        return;
    mm_meeting_leave(workspace->comm, workspace->meeting);
    mm_cpu_workspace_close(workspace->cpu);
    free(workspace);
}

uint64_t megamoe_workspace_bytes(const megamoe_workspace *workspace) {
    return workspace->cpu->reserved_bytes;
}

megamoe_status mm_workspace_take_pending(megamoe_workspace *ws) {
    if (ws->dead)
        return mm_fail(MEGAMOE_ESTATE, "workspace is dead: %s", ws->pending.message);
    if (ws->pending.status == MEGAMOE_OK)
        return MEGAMOE_OK;
    const megamoe_status status =
        mm_fail(ws->pending.status, "an earlier forward: %s", ws->pending.message);
    ws->pending.status = MEGAMOE_OK;
    return status;
}

megamoe_status megamoe_workspace_status(megamoe_workspace *workspace,
                                        megamoe_workspace_detail *detail) {
    if (!workspace)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_workspace_status: workspace is NULL");
    megamoe_workspace_detail found = workspace->pending;
    if (found.status == MEGAMOE_OK)
        found = (megamoe_workspace_detail){
            .rank = -1, .epoch = workspace->cpu->epoch, .token = -1, .slot = -1};
    if (detail)
        MM_TRY(mm_give_struct(detail, &found, sizeof found, "megamoe_workspace_detail"));
    if (!workspace->dead)
        workspace->pending.status = MEGAMOE_OK;
    return found.status == MEGAMOE_OK ? MEGAMOE_OK : mm_fail(found.status, "%s", found.message);
}

megamoe_status megamoe_workspace_receive_counts(const megamoe_workspace *workspace, int64_t *counts,
                                                int32_t n) {
    if (!workspace || !counts)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_workspace_receive_counts: %s is NULL",
                       workspace ? "counts" : "workspace");
    const mm_cpu_workspace *cpu = workspace->cpu;
    const int32_t local = mm_share_count(workspace->shape.physical_experts, cpu->rank, cpu->ranks);
    if (n != local)
        return mm_fail(MEGAMOE_EINVAL, "receive counts: room for %d; this rank has %d experts", n,
                       local);
    for (int32_t e = 0; e < local; e++)
        counts[e] = cpu->segments[e + 1] - cpu->segments[e];
    return MEGAMOE_OK;
}
