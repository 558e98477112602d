/* SPDX-License-Identifier: Apache-2.0 */
/* Enqueues kernels: staging and forwards. Nothing here waits or allocates. */
#include <inttypes.h>
#include <math.h>

#include "base/view.h"
#include "cuda/cubins.h"
#include "cuda/tiles.h"
#include "cuda/workspace.h"
#include "plan/plan.h"

enum {
    STAGE_THREADS = 256,
    STAGE_BLOCKS_PER_MULTIPROCESSOR = 8,
    PARAMETER_BYTES_MAX = 4096, /* of a kernel, with any driver */
    NS_PER_MS = 1000000
};

_Static_assert(sizeof(mm_cuda_forward_args) <= PARAMETER_BYTES_MAX, "the driver's limit");
_Static_assert(sizeof(mm_cuda_stage_args) <= PARAMETER_BYTES_MAX, "the driver's limit");

/* Device memory as the kernels' arguments want it. */
static void *pointer(CUdeviceptr address) {
    return (void *)(uintptr_t)address;
}

/* A buffer of the workspace; NULL where its input scale mode has none. */
static void *buffer(const mm_cuda_workspace *ws, uint64_t offset) {
    return offset ? pointer(ws->local + offset) : NULL;
}

static mm_cuda_staged staged_of(const mm_cuda_workspace *ws) {
    const mm_cuda_local *l = &ws->buffers.local;
    return (mm_cuda_staged){
        .codes = buffer(ws, l->staged_codes),
        .scales = buffer(ws, l->staged_scales),
        .tiny = buffer(ws, l->staged_tiny),
        .blocks = buffer(ws, l->staged_blocks),
        .block_scales = buffer(ws, l->staged_block_scales),
        .ids = buffer(ws, l->staged_ids),
        .weights = buffer(ws, l->staged_weights),
    };
}

/* ---- staging ---- */

static megamoe_status find_stage(mm_cuda_workspace *ws) {
    return ws->stage ? MEGAMOE_OK : mm_cuda_function(ws->device, "stage", "mm_stage", &ws->stage);
}

static megamoe_status launch_stage(mm_cuda_workspace *ws, mm_cuda_stage_args *args,
                                   CUstream stream) {
    MM_TRY(find_stage(ws));
    const CUdeviceptr state = ws->local + ws->buffers.local.state;
    MM_CUDA_TRY(mm_cu.cuMemsetD8Async(state + offsetof(mm_cuda_state, order), 0xFF,
                                      sizeof(uint64_t), stream),
                "stage: forgetting the batch before");
    const int64_t blocks =
        mm_min(mm_max(args->tokens, 1),
               (int64_t)STAGE_BLOCKS_PER_MULTIPROCESSOR * ws->device->multiprocessors);
    const CUlaunchConfig config = {.gridDimX = (unsigned)blocks,
                                   .gridDimY = 1,
                                   .gridDimZ = 1,
                                   .blockDimX = STAGE_THREADS,
                                   .blockDimY = 1,
                                   .blockDimZ = 1,
                                   .hStream = stream};
    void *arguments[] = {args};
    MM_CUDA_TRY(mm_cu.cuLaunchKernelEx(&config, ws->stage, arguments, NULL),
                "stage: launching the kernel for %d tokens", args->tokens);
    return MEGAMOE_OK;
}

static megamoe_status enqueue_stage(mm_cuda_workspace *ws, mm_cuda_stage_args *args, void *stream) {
    const mm_cuda_buffers *b = &ws->buffers;
    args->hidden = ws->shape.hidden;
    args->chunks = b->hidden_chunks;
    args->topk = ws->shape.topk;
    args->experts = ws->shape.experts;
    args->input_scale = (int32_t)ws->shape.input_scale;
    args->view_codes = buffer(ws, b->local.view_codes);
    args->view_stride = b->view_stride;
    args->staged = staged_of(ws);
    args->state = pointer(ws->local + b->local.state);
    CUcontext previous;
    MM_TRY(mm_cuda_enter(ws->device, &previous));
    const megamoe_status status = launch_stage(ws, args, stream);
    mm_cuda_leave(previous);
    if (status == MEGAMOE_OK)
        ws->tokens = args->tokens;
    return status;
}

megamoe_status mm_cuda_stage(mm_cuda_workspace *workspace, const megamoe_view *x,
                             const megamoe_view *topk_ids, const megamoe_view *topk_weights,
                             int64_t n_tokens, void *stream) {
    if (n_tokens == 0)
        return mm_cuda_commit_staged(workspace, 0, stream);
    const int32_t hidden = workspace->shape.hidden, topk = workspace->shape.topk;
    mm_cuda_stage_args args = {
        .tokens = (int32_t)n_tokens,
        .x = x->data,
        .x_stride = mm_view_stride(x, hidden),
        .ids = topk_ids->data,
        .ids_stride = mm_view_stride(topk_ids, topk),
        .ids_are_64 = topk_ids->dtype == MEGAMOE_DTYPE_I64,
        .weights = topk_weights->data,
        .weights_stride = mm_view_stride(topk_weights, topk),
        .weights_are_bf16 = topk_weights->dtype == MEGAMOE_DTYPE_BF16,
    };
    return enqueue_stage(workspace, &args, stream);
}

megamoe_status mm_cuda_commit_staged(mm_cuda_workspace *workspace, int64_t n_tokens, void *stream) {
    mm_cuda_stage_args args = {.tokens = (int32_t)n_tokens};
    return enqueue_stage(workspace, &args, stream);
}

/* ---- kernels ---- */

/* Its shared memory depends on the workspace too, so a kernel is planned once for each. */
static megamoe_status plan_kernel(mm_cuda_workspace *ws, const mm_cuda_layer *layer,
                                  const mm_forward_variant *variant, mm_cuda_kernel *kernel) {
    uint8_t table[MM_CUDA_DECODE_TABLE_BYTES];
    const uint32_t table_bytes = (uint32_t)mm_cuda_decode_table(variant->format, table);
    const uint32_t n = (uint32_t)variant->tile_tokens;
    const uint32_t scale_bytes =
        ws->shape.input_scale == MEGAMOE_SCALE_BLOCK_F32 ? sizeof(float) : 1;
    const uint32_t teams = MM_CUDA_TEAMS(variant->format, n, variant->promote);
    const uint32_t fixed = mm_cuda_block_smem(table_bytes, (uint32_t)ws->shape.physical_experts) +
                           teams * mm_cuda_team_smem(n);
    const uint32_t stage =
        teams * mm_cuda_stage_smem(n, (uint32_t)layer->layout.stage_bytes, scale_bytes);
    const int32_t stages = mm_plan_stages(ws->device->shared_bytes, fixed, stage);
    if (!stages)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "forward with tiles of %u tokens and %d experts needs %u bytes of shared "
                       "memory; cuda:%d gives a thread block %d",
                       n, ws->shape.physical_experts, fixed + MM_PLAN_STAGES_MIN * stage,
                       ws->device->ordinal, ws->device->shared_bytes);
    kernel->teams = (int32_t)teams;
    kernel->stages = stages;
    kernel->shared_bytes = fixed + (uint32_t)stages * stage;
    return MEGAMOE_OK;
}

static megamoe_status load_kernel(mm_cuda_workspace *ws, const mm_forward_variant *variant,
                                  mm_cuda_kernel *kernel) {
    CUfunction function;
    MM_TRY(mm_cuda_function(ws->device, variant->cubin, "mm_forward", &function));
    /* All that there is: workspaces of other shapes may share the function. */
    MM_TRY(mm_cuda_allow_shared(ws->device, function, ws->device->shared_bytes));
    /* A kernel is compiled for one number of threads, which is the most that it takes. */
    MM_CUDA_TRY(mm_cu.cuFuncGetAttribute(&kernel->threads, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
                                         function),
                "forward: threads of '%s'", variant->cubin);
    int resident = 0;
    MM_CUDA_TRY(mm_cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    &resident, function, kernel->threads, kernel->shared_bytes),
                "forward: occupancy of '%s'", variant->cubin);
    if (resident < 1)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "forward: no thread block of '%s' with %u bytes of shared memory fits on a "
                       "multiprocessor of cuda:%d, which gives a block %d bytes",
                       variant->cubin, kernel->shared_bytes, ws->device->ordinal,
                       ws->device->shared_bytes);
    kernel->function = function;
    return MEGAMOE_OK;
}

static megamoe_status find_kernel(mm_cuda_workspace *ws, const mm_cuda_layer *layer,
                                  const mm_forward_variant *variant, const mm_cuda_kernel **found) {
    mm_cuda_kernel *kernel = &ws->kernels[variant - mm_forward_variants];
    *found = kernel;
    if (kernel->function)
        return MEGAMOE_OK;
    MM_TRY(plan_kernel(ws, layer, variant, kernel));
    return load_kernel(ws, variant, kernel);
}

static bool promotes(const mm_cuda_layer *layer) {
    return layer->accumulate == MEGAMOE_ACCUMULATE_PROMOTE;
}

static bool serves(const mm_forward_variant *variant, const mm_cuda_layer *layer) {
    return variant->format == layer->layout.format && variant->promote == promotes(layer);
}

static megamoe_status prewarm_current(mm_cuda_workspace *ws, const mm_cuda_layer *layer) {
    MM_TRY(find_stage(ws));
    for (int32_t i = 0; i < mm_forward_variant_count; i++) {
        const mm_cuda_kernel *kernel;
        if (serves(&mm_forward_variants[i], layer))
            MM_TRY(find_kernel(ws, layer, &mm_forward_variants[i], &kernel));
    }
    return MEGAMOE_OK;
}

megamoe_status mm_cuda_prewarm(mm_cuda_workspace *workspace, const mm_cuda_layer *layer) {
    CUcontext previous;
    MM_TRY(mm_cuda_enter(workspace->device, &previous));
    const megamoe_status status = prewarm_current(workspace, layer);
    mm_cuda_leave(previous);
    return status;
}

/* ---- forward ---- */

/* The variant whose tile suits this batch, or that has the tile asked for. */
static megamoe_status choose(const mm_cuda_call *calls, int32_t n, const megamoe_plan *plan,
                             const mm_forward_variant **variant) {
    const mm_cuda_layer *layer = calls[0].layer;
    const mm_cuda_workspace *ws = calls[0].workspace;
    int64_t tokens = 0;
    for (int32_t i = 0; i < n; i++)
        tokens += calls[i].workspace->tokens;
    /* What other ranks have staged is not known here: as much as these. */
    const double routes =
        mm_plan_routes(tokens * ws->ranks / n, ws->shape.topk, ws->shape.physical_experts);
    const mm_cuda_format format = layer->layout.format;
    const int32_t tile =
        plan->token_tile ? plan->token_tile : mm_cuda_token_tile(format, promotes(layer), routes);
    *variant = mm_forward_variant_find(format, tile, promotes(layer));
    if (*variant)
        return MEGAMOE_OK;
    mm_plan_tile tiles[MM_CUDA_TILES_MAX] = {{0}};
    const int32_t count = mm_cuda_tiles(format, promotes(layer), tiles);
    return mm_fail(MEGAMOE_EINVAL,
                   "forward: there is no kernel with tiles of %d tokens; "
                   "expected one of %d widths from %d to %d",
                   tile, count, tiles[0].tokens, tiles[count - 1].tokens);
}

static mm_cuda_rank rank_of(const mm_cuda_call *call) {
    const mm_cuda_layer *layer = call->layer;
    const mm_cuda_workspace *ws = call->workspace;
    const mm_cuda_local *l = &ws->buffers.local;
    return (mm_cuda_rank){
        .rank = ws->rank,
        .local = layer->placement->local,
        .blobs = pointer(layer->blobs),
        .replica_start = pointer(layer->replica_starts),
        .replicas = pointer(layer->replicas),
        .windows = buffer(ws, l->windows),
        .state = pointer(ws->local + l->state),
        .found = pointer(ws->page_address + offsetof(mm_cuda_page, found)),
        .host_abort = pointer(ws->page_address + offsetof(mm_cuda_page, aborted)),
        .staged = staged_of(ws),
        .order = buffer(ws, l->order),
        .dispatched = buffer(ws, l->dispatched),
        .fc1_done = buffer(ws, l->fc1_done),
        .fc2_done = buffer(ws, l->fc2_done),
        .received = buffer(ws, l->received),
        .times = buffer(ws, l->times),
        .traced_blocks = buffer(ws, l->traced_blocks),
        .traced_tiles = buffer(ws, l->traced_tiles),
        .traced_room = ws->capacity.trace,
        .hidden_codes = buffer(ws, l->hidden_codes),
        .hidden_scales = buffer(ws, l->hidden_scales),
        .y = call->y ? call->y->data : NULL,
        .y_stride = call->y ? mm_view_stride(call->y, ws->shape.hidden) : 0,
        .layer = pointer(layer->tables),
        .form = layer->form,
    };
}

/* Bytes of rows that a rank returns to ranks outside of this launch, if all have as many tokens. */
static double returned_bytes(const mm_cuda_workspace *ws, int64_t tokens, int32_t n) {
    const double routes = (double)tokens * ws->shape.topk * (ws->ranks - n) / ws->ranks;
    return routes * ws->shape.hidden * sizeof(uint16_t);
}

/* What the ranks of a launch share is taken from the first. */
static void fill(const mm_cuda_call *calls, int32_t n, int32_t blocks, const mm_cuda_kernel *kernel,
                 int32_t lag, mm_cuda_forward_args *args) {
    const mm_cuda_layer *layer = calls[0].layer;
    const mm_cuda_layout *layout = &layer->layout;
    const mm_cuda_workspace *ws = calls[0].workspace;
    const megamoe_activation *activation = &layer->desc.activation;
    *args = (mm_cuda_forward_args){
        .here = n,
        .blocks = blocks,
        .ranks = ws->ranks,
        .physical = ws->shape.physical_experts,
        .topk = ws->shape.topk,
        .hidden = ws->shape.hidden,
        .hidden_chunks = layout->hidden_chunks,
        .intermediate_chunks = layout->intermediate_chunks,
        .fc1_tiles = layout->fc1_tiles,
        .fc2_tiles = layout->fc2_tiles,
        .input_scale = (int32_t)ws->shape.input_scale,
        .weight_after_fc2 = layer->weight_after_fc2,
        .has_bias = layer->desc.has_bias,
        .stages = kernel->stages,
        .lag = lag ? lag
                   : mm_plan_lag(blocks * kernel->teams, layout->fc1_tiles,
                                 returned_bytes(ws, ws->tokens, n)),
        .pool_rows = (int32_t)ws->capacity.pool_rows,
        .rows = ws->buffers.rows,
        .units = ws->buffers.units,
        .results_stride = ws->buffers.results_stride,
        .deadline_ns = (uint64_t)ws->capacity.deadline_ms * NS_PER_MS,
        .alpha = activation->alpha == 0.0f ? 1.0f : activation->alpha,
        .offset = activation->offset,
        .limit = activation->limit == 0.0f ? INFINITY : activation->limit,
        .blob_bytes = layout->blob_bytes,
        .fc1_offset = layout->fc1_offset,
        .fc2_offset = layout->fc2_offset,
        .fc1_exponents_offset = layout->fc1_exponents_offset,
        .fc2_exponents_offset = layout->fc2_exponents_offset,
        .fc1_bias_offset = layout->fc1_bias_offset,
        .fc2_bias_offset = layout->fc2_bias_offset,
        .globals_offset = layout->globals_offset,
        .decode_table = pointer(layer->decode_table),
        .window = ws->buffers.window,
    };
    for (int32_t i = 0; i < n; i++)
        args->rank[i] = rank_of(&calls[i]);
}

static megamoe_status launch(const mm_cuda_call *calls, int32_t n, int32_t blocks,
                             const mm_forward_variant *variant, int32_t lag, CUstream stream) {
    const mm_cuda_kernel *kernel;
    MM_TRY(find_kernel(calls[0].workspace, calls[0].layer, variant, &kernel));
    mm_cuda_forward_args args;
    fill(calls, n, blocks, kernel, lag, &args);
    /* Blocks wait for each other, so all of them have to be resident. */
    CUlaunchAttribute attribute = {.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, .value.cooperative = 1};
    const CUlaunchConfig config = {.gridDimX = (unsigned)(n * blocks),
                                   .gridDimY = 1,
                                   .gridDimZ = 1,
                                   .blockDimX = (unsigned)kernel->threads,
                                   .blockDimY = 1,
                                   .blockDimZ = 1,
                                   .sharedMemBytes = kernel->shared_bytes,
                                   .hStream = stream,
                                   .attrs = &attribute,
                                   .numAttrs = 1};
    void *arguments[] = {&args};
    MM_CUDA_TRY(mm_cu.cuLaunchKernelEx(&config, kernel->function, arguments, NULL),
                "forward: launching %u blocks of '%s' with %u bytes of shared memory each",
                config.gridDimX, variant->cubin, kernel->shared_bytes);
    return MEGAMOE_OK;
}

/* Layers with different keys may meet here: the kernel finds and reports that as an error. */
static megamoe_status check(const mm_cuda_call *calls, int32_t n) {
    const mm_cuda_workspace *first = calls[0].workspace;
    if (n > MM_CUDA_FOLDED_MAX)
        return mm_fail(MEGAMOE_EUNSUPPORTED, "forward: %d ranks on one GPU; expected 1..%d", n,
                       MM_CUDA_FOLDED_MAX);
    for (int32_t i = 0; i < n; i++) {
        const mm_cuda_workspace *ws = calls[i].workspace;
        if (!ws->met)
            return mm_fail(MEGAMOE_ESTATE,
                           "forward: the workspace of rank %d has not met those of its peers",
                           ws->rank);
        if (ws->device->ordinal != first->device->ordinal ||
            calls[i].layer->device->ordinal != first->device->ordinal)
            return mm_fail(
                MEGAMOE_EINVAL,
                "forward: rank %d has its workspace on cuda:%d and its layer on cuda:%d; "
                "expected both on cuda:%d",
                ws->rank, ws->device->ordinal, calls[i].layer->device->ordinal,
                first->device->ordinal);
        if (first->windows[ws->rank] != ws->window ||
            (i > 0 && ws->rank <= calls[i - 1].workspace->rank))
            return mm_fail(MEGAMOE_EINVAL,
                           "forward: call %d has the workspace of rank %d of another set", i,
                           ws->rank);
        if (calls[i].layer->desc.has_bias != calls[0].layer->desc.has_bias)
            return mm_fail(MEGAMOE_EINVAL,
                           "forward: of the layers of ranks %d and %d only one has biases",
                           first->rank, ws->rank);
    }
    return MEGAMOE_OK;
}

megamoe_status mm_cuda_forward(const mm_cuda_call *calls, int32_t n, const megamoe_plan *plan,
                               void *stream) {
    MM_TRY(check(calls, n));
    const mm_cuda_device *device = calls[0].workspace->device;
    const int32_t blocks = mm_plan_blocks((int32_t)mm_min(device->max_ctas, MM_CUDA_BLOCKS_MAX), n);
    if (!blocks)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "forward: %d ranks share %d thread blocks (max_ctas); expected at least one "
                       "each",
                       n, device->max_ctas);
    const mm_forward_variant *variant;
    MM_TRY(choose(calls, n, plan, &variant));
    CUcontext previous;
    MM_TRY(mm_cuda_enter(device, &previous));
    const megamoe_status status = launch(calls, n, blocks, variant, plan->lag, stream);
    mm_cuda_leave(previous);
    for (int32_t i = 0; status == MEGAMOE_OK && i < n; i++) {
        calls[i].workspace->epoch++;
        calls[i].workspace->blocks = blocks;
    }
    return status;
}

/* ---- what may be tuned ---- */

bool mm_cuda_has_tile(const mm_cuda_layer *layer, int32_t token_tile) {
    return mm_forward_variant_find(layer->layout.format, token_tile, promotes(layer)) != NULL;
}

/* Of a tile, for each rank. */
static int32_t teams_of(const mm_cuda_workspace *ws, const mm_cuda_layer *layer, int32_t tile) {
    return (int32_t)mm_min(ws->device->max_ctas, MM_CUDA_BLOCKS_MAX) *
           MM_CUDA_TEAMS(layer->layout.format, tile, promotes(layer));
}

int32_t mm_cuda_candidates(const mm_cuda_workspace *workspace, const mm_cuda_layer *layer,
                           int64_t tokens, megamoe_plan *plans, int32_t n) {
    const mm_cuda_workspace *ws = workspace;
    const int32_t local = layer->placement->local, fc1_tiles = layer->layout.fc1_tiles;
    const double routes =
        mm_plan_routes(tokens * ws->ranks, ws->shape.topk, ws->shape.physical_experts);
    mm_plan_tile tiles[MM_CUDA_TILES_MAX] = {{0}};
    const int32_t count = mm_cuda_tiles(layer->layout.format, promotes(layer), tiles);
    megamoe_plan built_in = MEGAMOE_INIT(megamoe_plan);
    built_in.token_tile = mm_cuda_token_tile(layer->layout.format, promotes(layer), routes);
    built_in.lag = mm_plan_lag(teams_of(ws, layer, built_in.token_tile), fc1_tiles,
                               returned_bytes(ws, tokens, 1));
    int32_t found = 0;
    if (found++ < n)
        plans[0] = built_in;
    for (int32_t i = 0; i < count; i++) {
        const int32_t tile = tiles[i].tokens;
        const double token_tiles = fmin(local * routes, local * (1 + routes / tile));
        int32_t lags[MM_PLAN_LAGS_MAX];
        const int32_t m = mm_plan_lags(teams_of(ws, layer, tile), fc1_tiles, token_tiles, lags);
        for (int32_t j = 0; j < m; j++) {
            if (tile == built_in.token_tile && lags[j] == built_in.lag)
                continue;
            if (found++ < n)
                plans[found - 1] =
                    (megamoe_plan){sizeof(megamoe_plan), .token_tile = tile, .lag = lags[j]};
        }
    }
    return found;
}
