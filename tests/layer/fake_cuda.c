/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_cuda.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "t.h"

fake_cuda fake;

/* Ranks may be threads. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void add(int32_t *count, int32_t n) {
    pthread_mutex_lock(&lock);
    *count += n;
    pthread_mutex_unlock(&lock);
}

#define FAKE(type, name, ...)                                                                      \
    type __wrap_##name(__VA_ARGS__);                                                               \
    type __wrap_##name(__VA_ARGS__)

/* ---- devices ---- */

FAKE(megamoe_status, mm_cuda_open, int32_t ordinal, int32_t max_ctas, mm_cuda_device **device) {
    (void)max_ctas;
    *device = calloc(1, sizeof **device);
    T_CHECK(*device);
    (*device)->ordinal = ordinal;
    add(&fake.devices, 1);
    return MEGAMOE_OK;
}

FAKE(void, mm_cuda_close, mm_cuda_device *device) {
    add(&fake.devices, device ? -1 : 0);
    free(device);
}

FAKE(megamoe_status, mm_cuda_enter, const mm_cuda_device *device, CUcontext *previous) {
    T_CHECK(device);
    *previous = NULL;
    return MEGAMOE_OK;
}

FAKE(void, mm_cuda_leave, CUcontext previous) {
    T_CHECK(!previous);
}

/* ---- the driver ---- */

/* Whether this is the call that fails. */
static bool counts_down(int32_t *calls) {
    pthread_mutex_lock(&lock);
    const bool fails = *calls == 1;
    *calls -= *calls > 0;
    pthread_mutex_unlock(&lock);
    return fails;
}

static void *memory_of(CUdeviceptr address) {
    return (void *)(uintptr_t)address;
}

static CUresult allocate(CUdeviceptr *address, size_t bytes) {
    if (counts_down(&fake.allocations_until_failure))
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *memory = malloc(bytes);
    if (!memory)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(memory, 0xA5, bytes);
    *address = (CUdeviceptr)(uintptr_t)memory;
    add(&fake.memories, 1);
    return CUDA_SUCCESS;
}

static CUresult release(CUdeviceptr address) {
    free(memory_of(address));
    add(&fake.memories, -1);
    return CUDA_SUCCESS;
}

static CUresult to_device(CUdeviceptr to, const void *from, size_t bytes) {
    memcpy(memory_of(to), from, bytes);
    return CUDA_SUCCESS;
}

static CUresult to_host(void *to, CUdeviceptr from, size_t bytes) {
    memcpy(to, memory_of(from), bytes);
    return CUDA_SUCCESS;
}

static CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    T_CHECK(!stream);
    if (counts_down(&fake.copies_until_failure))
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(memory_of(to), memory_of(from), bytes);
    return CUDA_SUCCESS;
}

static CUresult fill(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    T_CHECK(!stream);
    memset(memory_of(to), value, bytes);
    return CUDA_SUCCESS;
}

static CUresult synchronize(void) {
    return CUDA_SUCCESS;
}

static CUresult say(CUresult result, const char **text) {
    *text = result == CUDA_ERROR_OUT_OF_MEMORY ? "no memory" : "as the fake says";
    return CUDA_SUCCESS;
}

void fake_start(void) {
    fake = (fake_cuda){0};
    mm_cu = (mm_cuda_driver){.cuMemAlloc = allocate,
                             .cuMemFree = release,
                             .cuMemcpyHtoD = to_device,
                             .cuMemcpyDtoH = to_host,
                             .cuMemcpyDtoDAsync = copy,
                             .cuMemsetD8Async = fill,
                             .cuCtxSynchronize = synchronize,
                             .cuGetErrorName = say,
                             .cuGetErrorString = say};
}

/* ---- layers ---- */

megamoe_status __real_mm_cuda_layer_open(mm_cuda_layer *layer);
megamoe_status __real_mm_cuda_layer_upload(mm_cuda_layer *layer, int32_t local,
                                           const uint8_t *blob);
void __real_mm_cuda_layer_close(mm_cuda_layer *layer);

FAKE(megamoe_status, mm_cuda_layer_open, mm_cuda_layer *layer) {
    add(&fake.layers, 1);
    return __real_mm_cuda_layer_open(layer);
}

FAKE(megamoe_status, mm_cuda_layer_upload, mm_cuda_layer *layer, int32_t local,
     const uint8_t *blob) {
    T_CHECK(local >= 0 && local < layer->placement->local);
    add(&fake.uploads, 1);
    return __real_mm_cuda_layer_upload(layer, local, blob);
}

FAKE(void, mm_cuda_layer_close, mm_cuda_layer *layer) {
    add(&fake.layers, -1);
    __real_mm_cuda_layer_close(layer);
}

/* ---- workspaces ---- */

FAKE(megamoe_status, mm_cuda_workspace_open, const megamoe_shape *shape,
     const megamoe_capacity *capacity, const megamoe_comm *comm, mm_cuda_device *device,
     mm_cuda_workspace **workspace) {
    *workspace = calloc(1, sizeof **workspace);
    T_CHECK(*workspace);
    **workspace = (mm_cuda_workspace){.shape = *shape,
                                      .capacity = *capacity,
                                      .rank = megamoe_comm_rank(comm),
                                      .ranks = megamoe_comm_size(comm),
                                      .device = device};
    add(&fake.workspaces, 1);
    return MEGAMOE_OK;
}

FAKE(void, mm_cuda_workspace_close, mm_cuda_workspace *workspace) {
    add(&fake.workspaces, workspace ? -1 : 0);
    free(workspace);
}

/* The address stands for the window. */
FAKE(mm_cuda_card, mm_cuda_workspace_card, const mm_cuda_workspace *workspace) {
    return (mm_cuda_card){.address = (uint64_t)(uintptr_t)workspace,
                          .ordinal = workspace->device->ordinal};
}

FAKE(megamoe_status, mm_cuda_workspace_meet, mm_cuda_workspace *workspace, megamoe_comm *comm,
     const mm_cuda_card *cards) {
    T_EQ_INT(megamoe_comm_rank(comm), workspace->rank);
    for (int32_t r = 0; r < workspace->ranks && !mm_comm_in_processes(comm); r++)
        T_EQ_INT(((const mm_cuda_workspace *)(uintptr_t)cards[r].address)->rank, r);
    T_CHECK(cards[workspace->rank].address == (uint64_t)(uintptr_t)workspace);
    workspace->met = true;
    return MEGAMOE_OK;
}

FAKE(uint64_t, mm_cuda_workspace_bytes, const mm_cuda_workspace *workspace) {
    return (uint64_t)workspace->capacity.pool_rows;
}

FAKE(bool, mm_cuda_workspace_part, const mm_cuda_workspace *workspace, int32_t index,
     const char **what, uint64_t *bytes) {
    *what = "rows";
    *bytes = (uint64_t)workspace->capacity.pool_rows;
    return index == 0;
}

FAKE(uint64_t, mm_cuda_workspace_epoch, const mm_cuda_workspace *workspace) {
    return workspace->epoch;
}

FAKE(megamoe_status, mm_cuda_prewarm, mm_cuda_workspace *workspace, const mm_cuda_layer *layer) {
    (void)layer;
    T_CHECK(workspace->met);
    workspace->warm = true;
    return MEGAMOE_OK;
}

FAKE(megamoe_status, mm_cuda_stage, mm_cuda_workspace *workspace, const megamoe_view *x,
     const megamoe_view *topk_ids, const megamoe_view *topk_weights, int64_t n_tokens,
     void *stream) {
    T_CHECK(n_tokens == 0 || (x && topk_ids && topk_weights));
    workspace->tokens = n_tokens;
    workspace->committed = false;
    workspace->stream = stream;
    return MEGAMOE_OK;
}

FAKE(void, mm_cuda_workspace_views, const mm_cuda_workspace *workspace,
     megamoe_workspace_views *views) {
    *views = (megamoe_workspace_views){.topk_ids.rows = workspace->capacity.tokens};
}

FAKE(megamoe_status, mm_cuda_commit_staged, mm_cuda_workspace *workspace, int64_t n_tokens,
     void *stream) {
    workspace->tokens = n_tokens;
    workspace->committed = true;
    workspace->stream = stream;
    return MEGAMOE_OK;
}

FAKE(megamoe_status, mm_cuda_forward, const mm_cuda_call *calls, int32_t n,
     const megamoe_plan *plan, void *stream) {
    if (fake.launches_until_failure && fake.launches == fake.launches_until_failure)
        return mm_fail(MEGAMOE_EDEVICE, "no more launches");
    add(&fake.launches, 1);
    pthread_mutex_lock(&lock);
    fake.ranks = n;
    fake.plan = *plan;
    fake.layer = calls[0].layer;
    fake.y = calls[0].y;
    fake.stream = stream;
    pthread_mutex_unlock(&lock);
    for (int32_t i = 0; i < n; i++) {
        T_CHECK(i == 0 || calls[i].workspace->rank > calls[i - 1].workspace->rank);
        T_EQ_INT(calls[i].workspace->device->ordinal, calls[0].workspace->device->ordinal);
        calls[i].workspace->epoch++;
    }
    return MEGAMOE_OK;
}

FAKE(int32_t, mm_cuda_candidates, const mm_cuda_workspace *workspace, const mm_cuda_layer *layer,
     int64_t tokens, megamoe_plan *plans, int32_t n) {
    T_CHECK(workspace && layer);
    for (int32_t i = 0; i < n && i < 2; i++)
        plans[i] = (megamoe_plan){.token_tile = 8 << i, .lag = (int32_t)tokens};
    return 2;
}

FAKE(bool, mm_cuda_workspace_found, mm_cuda_workspace *workspace, const char *cause,
     megamoe_workspace_detail *detail) {
    snprintf(workspace->cause, sizeof workspace->cause, "%s", cause);
    if (!workspace->reports)
        return false;
    workspace->reports = false;
    *detail = workspace->report;
    return true;
}

FAKE(void, mm_cuda_workspace_abort, mm_cuda_workspace *workspace) {
    workspace->aborted = true;
}

FAKE(megamoe_status, mm_cuda_workspace_times, const mm_cuda_workspace *workspace,
     megamoe_workspace_times *times) {
    *times = (megamoe_workspace_times){.struct_size = sizeof *times,
                                       .total_us = (double)workspace->tokens};
    return MEGAMOE_OK;
}

FAKE(megamoe_status, mm_cuda_workspace_trace, const mm_cuda_workspace *workspace,
     megamoe_span *spans, int64_t n, int64_t *count, int64_t *dropped) {
    *count = 1;
    *dropped = workspace->tokens;
    if (n > 0)
        spans[0] = (megamoe_span){.worker = workspace->rank, .expert = -1};
    return MEGAMOE_OK;
}

FAKE(megamoe_status, mm_cuda_workspace_receive_counts, const mm_cuda_workspace *workspace,
     int64_t *counts) {
    const int32_t n =
        mm_share_count(workspace->shape.physical_experts, workspace->rank, workspace->ranks);
    for (int32_t e = 0; e < n; e++)
        counts[e] = 10 * workspace->rank + e;
    return MEGAMOE_OK;
}
