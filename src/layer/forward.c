/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <time.h>

#include "base/error.h"
#include "base/view.h"
#include "cpu/mirror.h"
#include "layer/layer.h"

static int32_t gpu_of(const megamoe_device *device) {
    return device->cuda ? device->cuda->ordinal : -1;
}

megamoe_status mm_layer_check_fit(const megamoe_layer *layer, const megamoe_workspace *ws) {
    const megamoe_layer_desc *desc = &layer->desc;
    const mm_placement *placement = &layer->placement;
    const megamoe_shape *shape = &ws->shape;
#define SAME(what, of_layer, of_workspace)                                                         \
    if ((of_layer) != (of_workspace))                                                              \
        return mm_fail(MEGAMOE_EINVAL, what " is %d in the layer and %d in the workspace",         \
                       (int)(of_layer), (int)(of_workspace));
    SAME("number of the GPU (-1: on the CPU)", gpu_of(layer->device), gpu_of(ws->device))
    SAME("hidden", desc->hidden, shape->hidden)
    SAME("intermediate", desc->intermediate, shape->intermediate)
    SAME("number of experts", placement->logical, shape->experts)
    SAME("number of physical experts", placement->physical, shape->physical_experts)
    SAME("rank", placement->rank, megamoe_comm_rank(ws->comm))
    SAME("number of ranks", placement->ranks, megamoe_comm_size(ws->comm))
#undef SAME
    if (shape->input_scale == MEGAMOE_SCALE_BLOCK_F32 &&
        layer->accumulate != MEGAMOE_ACCUMULATE_PROMOTE)
        return mm_fail(MEGAMOE_EINVAL, "F32 input scales per block need a layer that accumulates "
                                       "with promotion");
    if (shape->activations == MEGAMOE_ACTIVATIONS_INT8 && layer->cpu.layout.format == MM_TILE_E4M3)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "int8 activations need weights of 4 bits; folded NVFP4 "
                       "has 8, use the exact form");
    return MEGAMOE_OK;
}

megamoe_status megamoe_prewarm(megamoe_layer *layer, megamoe_workspace *workspace) {
    if (!layer || !workspace)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_prewarm: %s is NULL",
                       layer ? "workspace" : "layer");
    MM_TRY(mm_layer_check_fit(layer, workspace));
    if (workspace->cuda) {
        /* Folded ranks would meet in their first forward, which may be under capture. */
        MM_TRY(mm_workspace_meet(workspace));
        return mm_cuda_prewarm(workspace->cuda, &layer->cuda);
    }
    mm_cpu_prewarm(workspace->cpu, &layer->cpu);
    return MEGAMOE_OK;
}

static megamoe_status check_objects(const megamoe_layer *layer, const megamoe_workspace *ws) {
    if (!layer || !ws)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_forward: %s is NULL",
                       layer ? "workspace" : "layer");
    return MEGAMOE_OK;
}

static megamoe_status check_call(const megamoe_layer *layer, const megamoe_workspace *ws,
                                 const megamoe_view *y) {
    if (ws->tokens < 0)
        return mm_fail(MEGAMOE_ESTATE, "megamoe_forward: no batch is staged; ranks without tokens "
                                       "stage 0");
    MM_TRY(mm_layer_check_fit(layer, ws));
    return mm_view_check(y, "y", MEGAMOE_DTYPE_BF16, MEGAMOE_DTYPE_NONE, ws->tokens,
                         ws->shape.hidden);
}

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/*
 * Ends the forward, which waits for `waited`, or was not begun (-1): MEGAMOE_EPEER where a rank is
 * lost, for what mm_comm_cause says or because `waited` has closed its communicator.
 */
static megamoe_status die(megamoe_workspace *ws, megamoe_status status, uint64_t epoch,
                          megamoe_phase phase, int32_t waited) {
    char cause[MM_COMM_CAUSE_BYTES] = "the deadline has passed";
    int32_t rank = waited;
    if (status == MEGAMOE_EPEER) {
        rank = mm_comm_cause(ws->comm, cause);
        if (rank < 0) {
            rank = waited;
            snprintf(cause, sizeof cause, "it has closed its communicator");
        }
    }
    megamoe_workspace_detail detail = {.struct_size = sizeof detail,
                                       .status = status,
                                       .phase = phase,
                                       .rank = rank,
                                       .epoch = epoch,
                                       .token = -1,
                                       .slot = -1};
    char waiting[32] = "";
    if (waited >= 0)
        snprintf(waiting, sizeof waiting, "waiting for rank %d: ", waited);
    snprintf(detail.message, sizeof detail.message, "forward %" PRIu64 ", rank %d, %s: %s%s", epoch,
             megamoe_comm_rank(ws->comm), phase == MEGAMOE_PHASE_COUNT ? "counting" : "experts",
             waiting, cause);
    mm_workspace_die(ws, &detail);
    return mm_fail(status, "%s", detail.message);
}

/* A rank that is late by this much will not come in a moment: its core may serve others. */
enum { NAP_AFTER_MS = 3, NAP_NS = 50000, SPINS_PER_LOOK = 64 };

/*
 * Waits until every rank's word has reached this epoch; the workspace is dead if that fails. After
 * an abort the memory of ranks of this process may be gone, so their words are not looked at.
 */
static megamoe_status await(megamoe_workspace *ws, bool published, megamoe_phase phase) {
    const mm_cpu_workspace *cpu = ws->cpu;
    if (mm_comm_aborted(ws->comm))
        return die(ws, MEGAMOE_EPEER, cpu->epoch, phase, -1);
    int64_t begun = 0;
    uint32_t spins = 0;
    for (int32_t r = 0; r < cpu->ranks; r++) {
        const mm_cpu_words *words = cpu->windows[r].words;
        const _Atomic uint64_t *word = published ? &words->published : &words->finished;
        while (atomic_load_explicit(word, memory_order_acquire) < cpu->epoch) {
            mm_relax(spins++);
            if (spins % SPINS_PER_LOOK)
                continue;
            const int64_t now = now_ms();
            begun = begun ? begun : now;
            if (mm_comm_aborted(ws->comm))
                return die(ws, MEGAMOE_EPEER, cpu->epoch, phase, r);
            /* What it stored before it closed is seen by now. */
            if (mm_comm_closed(ws->comm, r) &&
                atomic_load_explicit(word, memory_order_acquire) < cpu->epoch)
                return die(ws, MEGAMOE_EPEER, cpu->epoch, phase, r);
            if (now - begun > ws->capacity.deadline_ms)
                return die(ws, MEGAMOE_ETIMEDOUT, cpu->epoch, phase, r);
            if (now - begun > NAP_AFTER_MS) {
                nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
                spins = SPINS_PER_LOOK - 1;
            }
        }
    }
    return MEGAMOE_OK;
}

/* After `publish` of every rank: true if the batch is to be computed. */
static bool agree(megamoe_layer *layer, megamoe_workspace *ws) {
    mm_cpu_agree(ws->cpu, &layer->cpu, &ws->pending);
    return ws->pending.status == MEGAMOE_OK;
}

/* Ends the forward after a failure of the transport, which has said why. */
static megamoe_status die_of_messages(megamoe_workspace *ws, megamoe_status status,
                                      megamoe_phase phase) {
    megamoe_workspace_detail detail = {.struct_size = sizeof detail,
                                       .status = status,
                                       .phase = phase,
                                       .rank = -1,
                                       .epoch = ws->cpu->epoch,
                                       .token = -1,
                                       .slot = -1};
    snprintf(detail.message, sizeof detail.message, "forward %" PRIu64 ", %s: %.150s", detail.epoch,
             phase == MEGAMOE_PHASE_COUNT      ? "counting"
             : phase == MEGAMOE_PHASE_DISPATCH ? "dispatching"
                                               : "combining",
             megamoe_last_error());
    mm_workspace_die(ws, &detail);
    return mm_fail(status, "%s", detail.message);
}

/* The same phases with messages between them (src/cpu/mirror.h), where memory is not shared. */
static megamoe_status forward_by_messages(megamoe_layer *layer, megamoe_workspace *ws,
                                          const megamoe_view *y) {
    const int32_t timeout_ms = ws->capacity.deadline_ms;
    mm_cpu_publish(ws->cpu, &layer->cpu);
    megamoe_status status = mm_cpu_mirror_counts(ws->cpu, &layer->cpu, ws->comm, timeout_ms);
    if (status != MEGAMOE_OK)
        return die_of_messages(ws, status, MEGAMOE_PHASE_COUNT);
    if (!agree(layer, ws))
        return MEGAMOE_OK;
    status = mm_cpu_mirror_tokens(ws->cpu, &layer->cpu, ws->comm, timeout_ms);
    if (status != MEGAMOE_OK)
        return die_of_messages(ws, status, MEGAMOE_PHASE_DISPATCH);
    mm_cpu_compute(ws->cpu, &layer->cpu);
    mm_layer_count(layer, ws->cpu);
    status = mm_cpu_mirror_results(ws->cpu, ws->comm, timeout_ms);
    if (status != MEGAMOE_OK)
        return die_of_messages(ws, status, MEGAMOE_PHASE_COMBINE);
    mm_cpu_combine(ws->cpu, y);
    return MEGAMOE_OK;
}

static megamoe_status forward_on_cpu(megamoe_layer *layer, megamoe_workspace *ws,
                                     const megamoe_view *y) {
    if (ws->cpu->mirror)
        return forward_by_messages(layer, ws, y);
    mm_cpu_publish(ws->cpu, &layer->cpu);
    MM_TRY(await(ws, true, MEGAMOE_PHASE_COUNT));
    if (!agree(layer, ws))
        return MEGAMOE_OK;
    mm_cpu_compute(ws->cpu, &layer->cpu);
    mm_layer_count(layer, ws->cpu);
    MM_TRY(await(ws, false, MEGAMOE_PHASE_EXPERTS));
    mm_cpu_combine(ws->cpu, y);
    return MEGAMOE_OK;
}

/*
 * Before a launch: MEGAMOE_OK unless the ranks have given up, or one has closed its communicator.
 * That one took part in no forward that this rank did not begin, so it will not in this one.
 */
static megamoe_status check_alive(megamoe_workspace *ws) {
    const uint64_t epoch = mm_workspace_epoch(ws) + 1;
    if (mm_comm_aborted(ws->comm))
        return die(ws, MEGAMOE_EPEER, epoch, MEGAMOE_PHASE_COUNT, -1);
    for (int32_t r = 0; r < megamoe_comm_size(ws->comm); r++)
        if (mm_comm_closed(ws->comm, r))
            return die(ws, MEGAMOE_EPEER, epoch, MEGAMOE_PHASE_COUNT, r);
    return MEGAMOE_OK;
}

static mm_cuda_call cuda_call_of(const megamoe_forward_call *call) {
    const megamoe_workspace *ws = call->workspace;
    return (mm_cuda_call){&call->layer->cuda, ws->cuda, ws->tokens ? call->y : NULL};
}

static megamoe_status forward_on_cuda(const megamoe_forward_call *call) {
    megamoe_workspace *ws = call->workspace;
    MM_TRY(check_alive(ws));
    const mm_cuda_call launch = cuda_call_of(call);
    const megamoe_plan plan = mm_workspace_plan(ws, call->layer);
    return mm_cuda_forward(&launch, 1, &plan, call->stream);
}

megamoe_status megamoe_forward(megamoe_layer *layer, megamoe_workspace *workspace,
                               const megamoe_view *y, void *stream) {
    MM_TRY(check_objects(layer, workspace));
    MM_TRY(mm_workspace_take_pending(workspace));
    MM_TRY(check_call(layer, workspace, y));
    if (mm_comm_folded(workspace->comm))
        return mm_fail(MEGAMOE_EINVAL, "megamoe_forward: the ranks of a folded communicator run "
                                       "together; use megamoe_forward_group");
    if (!workspace->cuda)
        return forward_on_cpu(layer, workspace, y);
    return forward_on_cuda(&(megamoe_forward_call){layer, workspace, y, stream});
}

static megamoe_status check_group(const megamoe_forward_call *calls, int32_t n) {
    for (int32_t i = 0; i < n; i++)
        MM_TRY(check_objects(calls[i].layer, calls[i].workspace));
    /* The ranks agreed on their error: it is returned once for all of them. */
    megamoe_status pending = MEGAMOE_OK;
    for (int32_t i = 0; i < n; i++) {
        const megamoe_status status = mm_workspace_take_pending(calls[i].workspace);
        pending = pending == MEGAMOE_OK ? status : pending;
    }
    MM_TRY(pending);
    for (int32_t i = 0; i < n; i++) {
        MM_TRY(check_call(calls[i].layer, calls[i].workspace, calls[i].y));
        const megamoe_comm *comm = calls[i].workspace->comm;
        const int32_t rank = megamoe_comm_rank(comm), ranks = megamoe_comm_size(comm);
        if (ranks != n || rank != i)
            return mm_fail(
                MEGAMOE_EINVAL,
                "megamoe_forward_group: call %d of %d belongs to rank %d of %d; expected "
                "one call for each rank in order",
                i, n, rank, ranks);
        MM_TRY(mm_workspace_meet(calls[i].workspace));
        for (int32_t r = 0; r < n; r++)
            if (calls[i].workspace->peers[r] != (uint64_t)(uintptr_t)calls[r].workspace)
                return mm_fail(MEGAMOE_EINVAL,
                               "megamoe_forward_group: the workspaces of ranks %d and %d were not "
                               "created together",
                               i, r);
    }
    return MEGAMOE_OK;
}

static megamoe_status forward_group_on_cpu(const megamoe_forward_call *calls, int32_t n) {
    for (int32_t i = 0; i < n; i++)
        mm_cpu_publish(calls[i].workspace->cpu, &calls[i].layer->cpu);
    bool good = true;
    for (int32_t i = 0; i < n; i++)
        good = agree(calls[i].layer, calls[i].workspace) && good;
    if (!good)
        return MEGAMOE_OK;
    for (int32_t i = 0; i < n; i++) {
        mm_cpu_compute(calls[i].workspace->cpu, &calls[i].layer->cpu);
        mm_layer_count(calls[i].layer, calls[i].workspace->cpu);
    }
    for (int32_t i = 0; i < n; i++)
        mm_cpu_combine(calls[i].workspace->cpu, calls[i].y);
    return MEGAMOE_OK;
}

/* One launch of all ranks that are on the GPU of rank `first`. */
static megamoe_status launch_gpu(const megamoe_forward_call *calls, int32_t n, int32_t first) {
    mm_cuda_call launch[MM_CUDA_FOLDED_MAX];
    int32_t here = 0;
    for (int32_t i = first; i < n; i++)
        if (gpu_of(calls[i].workspace->device) == gpu_of(calls[first].workspace->device))
            launch[here++] = cuda_call_of(&calls[i]);
    const megamoe_plan plan = mm_workspace_plan(calls[first].workspace, calls[first].layer);
    return mm_cuda_forward(launch, here, &plan, calls[first].stream);
}

/* The first rank that is on the GPU of rank i. */
static int32_t first_on_gpu(const megamoe_forward_call *calls, int32_t i) {
    int32_t first = 0;
    while (gpu_of(calls[first].workspace->device) != gpu_of(calls[i].workspace->device))
        first++;
    return first;
}

static megamoe_status check_group_on_cuda(const megamoe_forward_call *calls, int32_t n) {
    if (n > 1 && !mm_comm_folded(calls[0].workspace->comm))
        return mm_fail(MEGAMOE_EINVAL,
                       "megamoe_forward_group: on CUDA devices the communicator must be folded; "
                       "ranks that are threads call megamoe_forward");
    for (int32_t i = 1; i < n; i++) {
        const int32_t first = first_on_gpu(calls, i);
        if (calls[i].stream != calls[first].stream)
            return mm_fail(MEGAMOE_EINVAL,
                           "megamoe_forward_group: call %d has another stream than call %d; all "
                           "ranks of one GPU run in one launch",
                           i, first);
    }
    return MEGAMOE_OK;
}

/* A launch that fails leaves those before it waiting for its ranks: they are told to give up. */
static megamoe_status forward_group_on_cuda(const megamoe_forward_call *calls, int32_t n) {
    MM_TRY(check_group_on_cuda(calls, n));
    for (int32_t i = 0; i < n; i++)
        MM_TRY(check_alive(calls[i].workspace));
    for (int32_t i = 0; i < n; i++) {
        if (first_on_gpu(calls, i) != i)
            continue;
        const megamoe_status status = launch_gpu(calls, n, i);
        if (status != MEGAMOE_OK && i > 0)
            megamoe_comm_abort(calls[0].workspace->comm);
        if (status != MEGAMOE_OK)
            return status;
    }
    return MEGAMOE_OK;
}

megamoe_status megamoe_forward_group(const megamoe_forward_call *calls, int32_t n) {
    if (!calls || n < 1)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_forward_group: %d calls", n);
    MM_TRY(check_group(calls, n));
    return calls[0].workspace->cuda ? forward_group_on_cuda(calls, n)
                                    : forward_group_on_cpu(calls, n);
}
