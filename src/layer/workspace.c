/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "comm/outcome.h"
#include "layer/layer.h"

enum {
    MAX_DIMENSION = 1 << 20,
    MAX_EXPERTS = 65536,
    MAX_TOKENS = 1 << 24,
    CUDA_MAX_TOPK = 16,
    DEFAULT_DEADLINE_MS = 30000,
    MAX_TRACE = 65536
};

static megamoe_status check_range(const char *name, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most)
        return mm_fail(MEGAMOE_EINVAL,
                       "workspace: %s is %" PRId64 "; expected %" PRId64 "..%" PRId64, name, value,
                       least, most);
    return MEGAMOE_OK;
}

/* Of the backend whose kernels have them. */
static megamoe_status check_cuda_limits(const megamoe_shape *shape, const megamoe_comm *comm) {
    const int32_t ranks = megamoe_comm_size(comm);
    const bool folded = mm_comm_folded(comm);
    const int32_t most = folded ? MM_CUDA_FOLDED_MAX : MM_CUDA_RANKS_MAX;
    if (ranks > most)
        return mm_fail(MEGAMOE_EINVAL, "workspace: %d %sranks; on CUDA devices there are 1..%d",
                       ranks, folded ? "folded " : "", most);
    if (shape->topk > CUDA_MAX_TOPK)
        return mm_fail(MEGAMOE_EINVAL, "workspace: shape.topk is %d; on CUDA devices it is 1..%d",
                       shape->topk, CUDA_MAX_TOPK);
    if (shape->physical_experts > MM_CUDA_EXPERTS_MAX)
        return mm_fail(MEGAMOE_EINVAL,
                       "workspace: %d physical experts; on CUDA devices there are 1..%d",
                       shape->physical_experts, MM_CUDA_EXPERTS_MAX);
    return MEGAMOE_OK;
}

static megamoe_status check_activations(const megamoe_shape *shape, bool cuda) {
    MM_TRY(check_range("shape.activations", (int64_t)shape->activations, MEGAMOE_ACTIVATIONS_E4M3,
                       MEGAMOE_ACTIVATIONS_INT8));
    if (shape->activations == MEGAMOE_ACTIVATIONS_E4M3)
        return MEGAMOE_OK;
    if (cuda)
        return mm_fail(MEGAMOE_EUNSUPPORTED, "workspace: shape.activations is int8; a CUDA device "
                                             "multiplies E4M3 only, int8 is for the CPU");
    if (shape->input_scale != MEGAMOE_SCALE_TOKEN)
        return mm_fail(MEGAMOE_EINVAL,
                       "workspace: shape.input_scale is %d; with int8 activations, which have one "
                       "scale for 128 channels, it stays 0",
                       (int)shape->input_scale);
    return MEGAMOE_OK;
}

/* Checks the caller's wishes and fills in the defaults. */
static megamoe_status complete(megamoe_shape *shape, megamoe_capacity *capacity,
                               const megamoe_comm *comm, bool cuda) {
    const int32_t ranks = megamoe_comm_size(comm);
    MM_TRY(check_range("shape.hidden", shape->hidden, 1, MAX_DIMENSION));
    MM_TRY(check_range("shape.intermediate", shape->intermediate, 1, MAX_DIMENSION));
    MM_TRY(check_range("shape.experts", shape->experts, 1, MAX_EXPERTS));
    MM_TRY(check_range("shape.topk", shape->topk, 1, MM_MAX_TOPK));
    MM_TRY(check_range("shape.input_scale", (int64_t)shape->input_scale, MEGAMOE_SCALE_TOKEN,
                       MEGAMOE_SCALE_BLOCK_F32));
    MM_TRY(check_activations(shape, cuda));
    if (!shape->physical_experts)
        shape->physical_experts = shape->experts;
    MM_TRY(check_range("shape.physical_experts", shape->physical_experts, shape->experts,
                       MAX_EXPERTS));
    if (cuda)
        MM_TRY(check_cuda_limits(shape, comm));
    MM_TRY(check_range("capacity.tokens", capacity->tokens, 1, MAX_TOKENS));
    /* On the CPU rows that nobody uses cost address space only. */
    const int64_t shares = cuda ? mm_min(ranks, 2) : ranks;
    if (!capacity->pool_rows)
        capacity->pool_rows = mm_min(shares * capacity->tokens * shape->topk, INT32_MAX);
    MM_TRY(check_range("capacity.pool_rows", capacity->pool_rows, 1, INT32_MAX));
    if (!capacity->deadline_ms)
        capacity->deadline_ms = DEFAULT_DEADLINE_MS;
    MM_TRY(check_range("capacity.deadline_ms", capacity->deadline_ms, 1, INT32_MAX));
    return check_range("capacity.trace", capacity->trace, 0, MAX_TRACE);
}

/* What a rank brings to the collective creation. */
struct card {
    mm_outcome outcome;
    bool on_cuda;
    megamoe_shape shape;
    megamoe_capacity capacity;
    uint64_t workspace; /* its address */
    union {
        mm_cpu_card cpu;
        mm_cuda_card cuda;
    };
};

static struct card card_of(const megamoe_workspace *ws) {
    struct card card = {.on_cuda = ws->cuda,
                        .shape = ws->shape,
                        .capacity = ws->capacity,
                        .workspace = (uint64_t)(uintptr_t)ws};
    if (ws->cuda)
        card.cuda = mm_cuda_workspace_card(ws->cuda);
    else
        card.cpu = mm_cpu_workspace_card(ws->cpu);
    return card;
}

/* X(struct, field): what must be the same on all ranks. */
#define SHARED_FIELDS(X)                                                                           \
    X(shape, hidden)                                                                               \
    X(shape, intermediate)                                                                         \
    X(shape, experts)                                                                              \
    X(shape, topk)                                                                                 \
    X(shape, input_scale)                                                                          \
    X(shape, physical_experts)                                                                     \
    X(shape, activations)                                                                          \
    X(capacity, tokens)                                                                            \
    X(capacity, pool_rows)

static megamoe_status compare(const struct card *first, const struct card *other, int32_t rank) {
    if (first->on_cuda != other->on_cuda)
        return mm_fail(MEGAMOE_EINVAL,
                       "workspace: the device is \"%s\" on rank 0 and \"%s\" on rank %d; all ranks "
                       "need the same kind",
                       first->on_cuda ? "cuda" : "cpu", other->on_cuda ? "cuda" : "cpu", rank);
#define X(part, field)                                                                             \
    if (first->part.field != other->part.field)                                                    \
        return mm_fail(MEGAMOE_EINVAL,                                                             \
                       "workspace: " #part "." #field " is %" PRId64 " on rank 0 and %" PRId64     \
                       " on rank %d; all ranks need the same",                                     \
                       (int64_t)first->part.field, (int64_t)other->part.field, rank);
    SHARED_FIELDS(X)
#undef X
    if (!first->on_cuda && first->cpu.bytes != other->cpu.bytes)
        return mm_fail(MEGAMOE_EINVAL,
                       "workspace: its layout has %" PRIu64 " shared bytes on rank 0 and %" PRIu64
                       " on rank %d; all ranks need the same build of the library",
                       first->cpu.bytes, other->cpu.bytes, rank);
    return MEGAMOE_OK;
}

static megamoe_status meet_on_cuda(const megamoe_workspace *ws, const struct card *cards) {
    mm_cuda_card peers[MM_CUDA_RANKS_MAX];
    for (int32_t r = 0; r < megamoe_comm_size(ws->comm); r++)
        peers[r] = cards[r].cuda;
    return mm_cuda_workspace_meet(ws->cuda, ws->comm, peers);
}

static megamoe_status meet_on_cpu(const megamoe_workspace *ws, const struct card *cards) {
    const int32_t ranks = megamoe_comm_size(ws->comm);
    mm_cpu_card *peers = mm_alloc((size_t)ranks * sizeof *peers);
    if (!peers) {
        megamoe_comm_abort(ws->comm); /* the others may wait for this rank */
        return mm_fail(MEGAMOE_ENOMEM, "workspace: out of memory");
    }
    for (int32_t r = 0; r < ranks; r++)
        peers[r] = cards[r].cpu;
    const megamoe_status status = mm_cpu_workspace_meet(ws->cpu, ws->comm, peers);
    free(peers);
    return status;
}

/* Compares what all have brought, which comes out alike on all ranks. */
static megamoe_status compare_all(const megamoe_comm *comm, const struct card *cards) {
    const int32_t rank = megamoe_comm_rank(comm), ranks = megamoe_comm_size(comm);
    MM_TRY(mm_outcome_of_all("workspace", &cards[0].outcome, sizeof *cards, rank, ranks));
    for (int32_t r = 1; r < ranks; r++)
        MM_TRY(compare(&cards[0], &cards[r], r));
    return MEGAMOE_OK;
}

/* Makes the memory of all ranks known to this one. */
static megamoe_status take_peers(megamoe_workspace *ws, const struct card *cards) {
    MM_TRY(ws->cuda ? meet_on_cuda(ws, cards) : meet_on_cpu(ws, cards));
    for (int32_t r = 0; r < megamoe_comm_size(ws->comm); r++)
        ws->peers[r] = cards[r].workspace;
    ws->met = true;
    return MEGAMOE_OK;
}

megamoe_status mm_workspace_meet(megamoe_workspace *ws) {
    if (ws->met)
        return MEGAMOE_OK;
    const struct card *cards = mm_meeting_parts(ws->comm, ws->meeting);
    if (!cards)
        return mm_fail(MEGAMOE_ESTATE, "workspace: not all ranks have created theirs");
    MM_TRY(compare_all(ws->comm, cards));
    return take_peers(ws, cards);
}

static void abort_kernels(void *user) {
    mm_cuda_workspace_abort(((const megamoe_workspace *)user)->cuda);
}

/* The backend's part. */
static megamoe_status open_part(megamoe_workspace *ws) {
    if (ws->device->cuda && mm_comm_by_messages(ws->comm))
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "workspace: the ranks of a communicator whose messages "
                       "the caller carries are on CPUs");
    if (!ws->device->cuda)
        return mm_cpu_workspace_open(&ws->shape, &ws->capacity, ws->comm, ws->device, &ws->cpu);
    MM_TRY(
        mm_cuda_workspace_open(&ws->shape, &ws->capacity, ws->comm, ws->device->cuda, &ws->cuda));
    ws->watch = (mm_abort_watch){.fn = abort_kernels, .user = ws};
    mm_comm_watch(ws->comm, &ws->watch);
    return MEGAMOE_OK;
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
    ws->tokens = -1;
    megamoe_status status;
    MM_TRY_GOTO(mm_take_struct(&ws->shape, sizeof ws->shape, shape, "megamoe_shape"), fail);
    MM_TRY_GOTO(mm_take_struct(&ws->capacity, sizeof ws->capacity, capacity, "megamoe_capacity"),
                fail);
    MM_TRY_GOTO(complete(&ws->shape, &ws->capacity, comm, device->cuda), fail);
    ws->peers = mm_alloc((size_t)megamoe_comm_size(comm) * sizeof *ws->peers);
    if (!ws->peers) {
        status = mm_fail(MEGAMOE_ENOMEM, "workspace: out of memory");
        goto fail;
    }
    MM_TRY_GOTO(open_part(ws), fail);
    *workspace = ws;
    return MEGAMOE_OK;
fail:
    megamoe_workspace_close(ws);
    return status;
}

/* Every rank comes, also one that could not open its part, so that all fail together. */
static megamoe_status meet_all(megamoe_comm *comm, megamoe_workspace *ws, const struct card *mine) {
    mm_meeting *meeting;
    MM_TRY(mm_meeting_join(comm, mine, sizeof *mine, &meeting));
    if (mm_comm_folded(comm)) {
        if (ws)
            ws->meeting = meeting;
        else
            mm_meeting_leave(comm, meeting);
        return MEGAMOE_OK;
    }
    const struct card *cards = mm_meeting_parts(comm, meeting);
    megamoe_status status = compare_all(comm, cards);
    if (status == MEGAMOE_OK && ws) /* without one this rank's outcome is not MEGAMOE_OK */
        /* Its end is the moment from which on deadlines of forwards count. */
        status = mm_meeting_outcome(comm, "workspace", take_peers(ws, cards));
    mm_meeting_leave(comm, meeting);
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
    struct card card = ws ? card_of(ws) : (struct card){.on_cuda = false};
    mm_outcome_set(&card.outcome, opened);
    const megamoe_status met = meet_all(comm, ws, &card);
    if (opened != MEGAMOE_OK)
        return mm_fail(opened, "%s", card.outcome.message);
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
    mm_comm_unwatch(workspace->comm, &workspace->watch);
    mm_cpu_workspace_close(workspace->cpu);
    mm_cuda_workspace_close(workspace->cuda);
    mm_workspace_forget_tuned(workspace);
    free(workspace->peers);
    free(workspace);
}

uint64_t megamoe_workspace_bytes(const megamoe_workspace *workspace) {
    return workspace->cuda ? mm_cuda_workspace_bytes(workspace->cuda)
                           : workspace->cpu->reserved_bytes;
}

bool megamoe_workspace_part(const megamoe_workspace *workspace, int32_t index, const char **what,
                            uint64_t *bytes) {
    return workspace->cuda ? mm_cuda_workspace_part(workspace->cuda, index, what, bytes)
                           : mm_cpu_workspace_part(workspace->cpu, index, what, bytes);
}

megamoe_status megamoe_workspace_get_times(const megamoe_workspace *workspace,
                                           megamoe_workspace_times *times) {
    if (!workspace || !times)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_workspace_get_times: %s is NULL",
                       workspace ? "times" : "workspace");
    if (!workspace->cuda)
        return mm_fail(MEGAMOE_EUNSUPPORTED, "times of a forward: only CUDA devices keep them");
    megamoe_workspace_times found;
    MM_TRY(mm_cuda_workspace_times(workspace->cuda, &found));
    return mm_give_struct(times, &found, sizeof found, "megamoe_workspace_times");
}

megamoe_status megamoe_workspace_set_plan(megamoe_workspace *workspace, const megamoe_plan *plan) {
    if (!workspace || !plan)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_workspace_set_plan: %s is NULL",
                       workspace ? "plan" : "workspace");
    if (!workspace->cuda)
        return mm_fail(MEGAMOE_EUNSUPPORTED, "plan of a forward: only CUDA devices have one");
    megamoe_plan taken = MEGAMOE_INIT(megamoe_plan);
    MM_TRY(mm_take_struct(&taken, sizeof taken, plan, "megamoe_plan"));
    if (taken.token_tile < 0 || taken.lag < 0)
        return mm_fail(MEGAMOE_EINVAL,
                       "megamoe_plan: token_tile %d, lag %d; expected 0 or a positive number",
                       taken.token_tile, taken.lag);
    workspace->plan = taken;
    return MEGAMOE_OK;
}

void mm_workspace_die(megamoe_workspace *ws, const megamoe_workspace_detail *detail) {
    ws->dead = true;
    ws->pending = *detail;
    megamoe_comm_abort(ws->comm);
}

/*
 * Makes pending what the device has reported. Of several the first is told, except that nothing
 * hides a death. The CPU reports by itself.
 */
static void look_at_device(megamoe_workspace *ws) {
    if (!ws->cuda || ws->dead)
        return;
    megamoe_workspace_detail found;
    char cause[MM_COMM_CAUSE_BYTES];
    const int32_t lost = mm_comm_cause(ws->comm, cause);
    if (!mm_cuda_workspace_found(ws->cuda, cause, &found))
        return;
    if (found.status == MEGAMOE_EPEER && found.rank < 0)
        found.rank = lost;
    if (found.status == MEGAMOE_ETIMEDOUT || found.status == MEGAMOE_EPEER)
        mm_workspace_die(ws, &found);
    else if (ws->pending.status == MEGAMOE_OK)
        ws->pending = found;
}

megamoe_status mm_workspace_take_pending(megamoe_workspace *ws) {
    if (ws->dead)
        return mm_fail(MEGAMOE_ESTATE, "workspace is dead: %s", ws->pending.message);
    look_at_device(ws);
    if (ws->pending.status == MEGAMOE_OK)
        return MEGAMOE_OK;
    const megamoe_status status =
        mm_fail(ws->pending.status, "an earlier forward: %s", ws->pending.message);
    if (!ws->dead)
        ws->pending.status = MEGAMOE_OK;
    return status;
}

megamoe_status megamoe_workspace_status(megamoe_workspace *workspace,
                                        megamoe_workspace_detail *detail) {
    if (!workspace)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_workspace_status: workspace is NULL");
    look_at_device(workspace);
    megamoe_workspace_detail found = workspace->pending;
    if (found.status == MEGAMOE_OK)
        found = (megamoe_workspace_detail){
            .rank = -1, .epoch = mm_workspace_epoch(workspace), .token = -1, .slot = -1};
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
    const megamoe_comm *comm = workspace->comm;
    const int32_t local = mm_share_count(workspace->shape.physical_experts, megamoe_comm_rank(comm),
                                         megamoe_comm_size(comm));
    if (n != local)
        return mm_fail(MEGAMOE_EINVAL, "receive counts: room for %d; this rank has %d experts", n,
                       local);
    if (workspace->cuda)
        return mm_cuda_workspace_receive_counts(workspace->cuda, counts);
    mm_cpu_receive_counts(workspace->cpu, counts, local);
    return MEGAMOE_OK;
}
