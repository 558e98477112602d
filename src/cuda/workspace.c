/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/workspace.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "cuda/cubins.h"

/* The same error whichever part of its memory is not to be had. */
static megamoe_status explain(const mm_cuda_workspace *ws, megamoe_status status) {
    char why[512];
    snprintf(why, sizeof why, "%s", megamoe_last_error());
    return mm_fail(status,
                   "workspace of %" PRId64 " tokens and %" PRId64 " pool rows, %" PRIu64
                   " bytes of GPU memory: %s",
                   ws->capacity.tokens, ws->capacity.pool_rows, mm_cuda_workspace_bytes(ws), why);
}

static megamoe_status allocate(CUdeviceptr *address, uint64_t bytes) {
    MM_CUDA_TRY(mm_cu.cuMemAlloc(address, bytes), "%" PRIu64 " bytes", bytes);
    return MEGAMOE_OK;
}

static megamoe_status open_memory(mm_cuda_workspace *ws, const megamoe_comm *comm) {
    MM_TRY(mm_cuda_shared_open(comm, ws->device, ws->buffers.window.bytes, &ws->shared));
    ws->window = ws->shared.own;
    return allocate(&ws->local, ws->buffers.local.bytes);
}

static megamoe_status clear(CUdeviceptr address, uint64_t bytes) {
    MM_CUDA_TRY(mm_cu.cuMemsetD8Async(address, 0, bytes, NULL), "workspace: clearing its memory");
    return MEGAMOE_OK;
}

static megamoe_status open_page(mm_cuda_workspace *ws) {
    void *memory = NULL;
    MM_CUDA_TRY(mm_cu.cuMemHostAlloc(&memory, sizeof(mm_cuda_page),
                                     CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
                "workspace: %zu bytes of pinned memory", sizeof(mm_cuda_page));
    ws->page = memory;
    *ws->page = (mm_cuda_page){.aborted = 0};
    MM_CUDA_TRY(mm_cu.cuMemHostGetDevicePointer(&ws->page_address, memory, 0),
                "workspace: mapping pinned memory");
    return MEGAMOE_OK;
}

static megamoe_status open_current(mm_cuda_workspace *ws, const megamoe_comm *comm) {
    const megamoe_status status = open_memory(ws, comm);
    if (status != MEGAMOE_OK)
        return explain(ws, status);
    MM_TRY(clear(ws->window, ws->buffers.window.bytes));
    MM_TRY(clear(ws->local, ws->buffers.local.bytes));
    MM_TRY(open_page(ws));
    MM_CUDA_TRY(mm_cu.cuCtxSynchronize(), "workspace: clearing its memory");
    return MEGAMOE_OK;
}

/* Into a window of another process. The words of an epoch come last, as kernels have it. */
static void tell(CUdeviceptr to, const mm_cuda_cell *cell) {
    const size_t head = sizeof cell->epoch;
    (void)mm_cu.cuMemcpyHtoD(to + head, (const uint8_t *)cell + head, sizeof *cell - head);
    (void)mm_cu.cuCtxSynchronize();
    (void)mm_cu.cuMemcpyHtoD(to, &cell->epoch, head);
    (void)mm_cu.cuCtxSynchronize();
}

/*
 * This rank takes part in no forward any more. Others that have begun the next one, or begin it
 * later, wait for this rank's cell: it says so, and they end alike. Nothing reads it before that.
 */
static void bid_farewell(const mm_cuda_workspace *ws) {
    const CUdeviceptr state = ws->local + ws->buffers.local.state + offsetof(mm_cuda_state, epoch);
    mm_cuda_cell cell = {.status = MEGAMOE_EPEER, .token = -1, .slot = -1};
    if (!ws->met || mm_cu.cuMemcpyDtoH(&cell.epoch, state, sizeof cell.epoch) != CUDA_SUCCESS)
        return;
    cell.epoch++;
    const uint64_t index = (uint64_t)(cell.epoch & 1) * (uint64_t)ws->ranks + (uint64_t)ws->rank;
    for (int32_t r = 0; r < ws->ranks; r++)
        if (ws->shared.peers[r])
            tell(ws->shared.peers[r] + ws->buffers.window.cells + index * sizeof cell, &cell);
}

static void close_current(mm_cuda_workspace *ws) {
    /* Kernels may still report into the page. A GPU that has failed has nothing to give back. */
    (void)mm_cu.cuCtxSynchronize();
    bid_farewell(ws);
    mm_cuda_shared_close(&ws->shared);
    if (ws->local)
        (void)mm_cu.cuMemFree(ws->local);
    if (ws->page)
        (void)mm_cu.cuMemFreeHost((void *)ws->page);
}

megamoe_status mm_cuda_workspace_open(const megamoe_shape *shape, const megamoe_capacity *capacity,
                                      const megamoe_comm *comm, mm_cuda_device *device,
                                      mm_cuda_workspace **workspace) {
    *workspace = NULL;
    const int32_t ranks = megamoe_comm_size(comm);
    if (ranks > MM_CUDA_RANKS_MAX)
        return mm_fail(MEGAMOE_EINVAL, "workspace: %d ranks; expected 1..%d on GPUs", ranks,
                       MM_CUDA_RANKS_MAX);
    mm_cuda_workspace *ws = mm_alloc(sizeof *ws);
    if (!ws)
        return mm_fail(MEGAMOE_ENOMEM, "workspace: out of memory");
    ws->shape = *shape;
    ws->capacity = *capacity;
    ws->rank = megamoe_comm_rank(comm);
    ws->ranks = ranks;
    ws->device = device;
    ws->buffers = mm_cuda_buffers_of(shape, capacity, ranks);
    ws->kernels = mm_alloc((size_t)mm_forward_variant_count * sizeof *ws->kernels);
    CUcontext previous;
    megamoe_status status = ws->kernels ? mm_cuda_enter(device, &previous)
                                        : mm_fail(MEGAMOE_ENOMEM, "workspace: out of memory");
    if (status != MEGAMOE_OK) {
        free(ws->kernels);
        free(ws);
        return status;
    }
    status = open_current(ws, comm);
    mm_cuda_leave(previous);
    if (status == MEGAMOE_OK)
        *workspace = ws;
    else
        mm_cuda_workspace_close(ws);
    return status;
}

void mm_cuda_workspace_close(mm_cuda_workspace *workspace) {
    if (!workspace)
        return;
    CUcontext previous;
    if (mm_cuda_enter(workspace->device, &previous) == MEGAMOE_OK) {
        close_current(workspace);
        mm_cuda_leave(previous);
    }
    free(workspace->kernels);
    free(workspace);
}

static megamoe_status upload_windows(mm_cuda_workspace *ws) {
    MM_CUDA_TRY(mm_cu.cuMemcpyHtoD(ws->local + ws->buffers.local.windows, ws->windows,
                                   (size_t)ws->ranks * sizeof ws->windows[0]),
                "workspace: telling the GPU where the ranks' memory is");
    return MEGAMOE_OK;
}

mm_cuda_card mm_cuda_workspace_card(const mm_cuda_workspace *workspace) {
    return mm_cuda_shared_card_of(&workspace->shared, workspace->device);
}

megamoe_status mm_cuda_workspace_meet(mm_cuda_workspace *workspace, megamoe_comm *comm,
                                      const mm_cuda_card *cards) {
    mm_cuda_workspace *ws = workspace;
    CUcontext previous;
    const megamoe_status entered = mm_cuda_enter(ws->device, &previous);
    if (entered != MEGAMOE_OK) {
        megamoe_comm_abort(comm); /* the others may wait for this rank's descriptor */
        return entered;
    }
    megamoe_status status = mm_cuda_shared_meet(comm, ws->device, &ws->shared, cards, ws->windows);
    if (status == MEGAMOE_OK)
        status = upload_windows(ws);
    mm_cuda_leave(previous);
    ws->met = status == MEGAMOE_OK;
    return status;
}

uint64_t mm_cuda_workspace_bytes(const mm_cuda_workspace *workspace) {
    return workspace->buffers.window.bytes + workspace->buffers.local.bytes;
}

bool mm_cuda_workspace_part(const mm_cuda_workspace *workspace, int32_t index, const char **what,
                            uint64_t *bytes) {
    /* The last part is there only where it is used. */
    if (index < 0 || index >= (workspace->capacity.trace ? MM_CUDA_PART_COUNT : MM_CUDA_PART_TRACE))
        return false;
    *what = workspace->buffers.parts[index].what;
    *bytes = workspace->buffers.parts[index].bytes;
    return true;
}

uint64_t mm_cuda_workspace_epoch(const mm_cuda_workspace *workspace) {
    return workspace->epoch;
}

/* Words that hold an epoch, [count] at `offset` of the window. */
static megamoe_status set_words(const mm_cuda_workspace *ws, uint64_t offset, int64_t count,
                                uint32_t epoch) {
    MM_CUDA_TRY(mm_cu.cuMemsetD32Async(ws->window + offset, epoch, (size_t)count, NULL),
                "workspace: setting its epoch");
    return MEGAMOE_OK;
}

static megamoe_status set_epoch_current(const mm_cuda_workspace *ws, uint32_t epoch) {
    const mm_cuda_window *w = &ws->buffers.window;
    for (int32_t i = 0; i < 2 * ws->ranks; i++)
        MM_TRY(set_words(
            ws, w->cells + (uint64_t)i * sizeof(mm_cuda_cell) + offsetof(mm_cuda_cell, epoch), 1,
            epoch));
    MM_TRY(set_words(ws, w->arrivals, (int64_t)ws->buffers.local_max * ws->ranks, epoch));
    MM_TRY(set_words(ws, w->returned, ws->capacity.tokens * ws->shape.topk, epoch));
    const CUdeviceptr state = ws->local + ws->buffers.local.state + offsetof(mm_cuda_state, epoch);
    MM_CUDA_TRY(mm_cu.cuMemcpyHtoD(state, &epoch, sizeof epoch), "workspace: setting its epoch");
    MM_CUDA_TRY(mm_cu.cuCtxSynchronize(), "workspace: setting its epoch");
    return MEGAMOE_OK;
}

megamoe_status mm_cuda_workspace_set_epoch(mm_cuda_workspace *workspace, uint32_t epoch) {
    CUcontext previous;
    MM_TRY(mm_cuda_enter(workspace->device, &previous));
    const megamoe_status status = set_epoch_current(workspace, epoch);
    mm_cuda_leave(previous);
    workspace->page->found.epoch = workspace->seen = epoch;
    workspace->epoch = epoch;
    return status;
}

void mm_cuda_workspace_views(const mm_cuda_workspace *workspace, megamoe_workspace_views *views) {
    const mm_cuda_buffers *b = &workspace->buffers;
    const int64_t tokens = workspace->capacity.tokens;
    const int32_t topk = workspace->shape.topk;
#define AT(offset) ((void *)(uintptr_t)(workspace->local + b->local.offset))
    *views = (megamoe_workspace_views){
        .struct_size = sizeof *views,
        .codes = {AT(view_codes), MEGAMOE_DTYPE_E4M3, tokens, b->view_stride},
        .topk_ids = {AT(staged_ids), MEGAMOE_DTYPE_I32, tokens, topk},
        .topk_weights = {AT(staged_weights), MEGAMOE_DTYPE_F32, tokens, topk},
    };
    switch (workspace->shape.input_scale) {
    case MEGAMOE_SCALE_TOKEN:
        views->scales = (megamoe_view){AT(staged_scales), MEGAMOE_DTYPE_F32, tokens, 1};
        break;
    case MEGAMOE_SCALE_BLOCK:
        views->scales =
            (megamoe_view){AT(staged_blocks), MEGAMOE_DTYPE_E8M0, tokens, b->hidden_chunks};
        break;
    case MEGAMOE_SCALE_BLOCK_F32:
        views->scales =
            (megamoe_view){AT(staged_block_scales), MEGAMOE_DTYPE_F32, tokens, b->hidden_chunks};
        break;
    }
#undef AT
}

void mm_cuda_workspace_abort(mm_cuda_workspace *workspace) {
    workspace->page->aborted = 1;
}

static megamoe_status read_counts(const mm_cuda_workspace *ws, int32_t *received, int32_t n) {
    MM_CUDA_TRY(mm_cu.cuCtxSynchronize(), "receive counts: waiting for the GPU");
    MM_CUDA_TRY(mm_cu.cuMemcpyDtoH(received, ws->local + ws->buffers.local.received,
                                   (size_t)n * sizeof *received),
                "receive counts: copying from the GPU");
    return MEGAMOE_OK;
}

megamoe_status mm_cuda_workspace_receive_counts(const mm_cuda_workspace *workspace,
                                                int64_t *counts) {
    const mm_cuda_workspace *ws = workspace;
    const int32_t n = mm_share_count(ws->shape.physical_experts, ws->rank, ws->ranks);
    if (!n)
        return MEGAMOE_OK;
    int32_t *received = mm_alloc((size_t)n * sizeof *received);
    if (!received)
        return mm_fail(MEGAMOE_ENOMEM, "receive counts: out of memory");
    CUcontext previous;
    megamoe_status status = mm_cuda_enter(ws->device, &previous);
    if (status == MEGAMOE_OK) {
        status = read_counts(ws, received, n);
        mm_cuda_leave(previous);
    }
    for (int32_t e = 0; status == MEGAMOE_OK && e < n; e++)
        counts[e] = received[e];
    free(received);
    return status;
}
