/* SPDX-License-Identifier: Apache-2.0 */
/* Taking a batch into a workspace. */
#include <inttypes.h>
#include <stdio.h>

#include "base/error.h"
#include "base/view.h"
#include "cpu/scratch.h"
#include "layer/layer.h"
#include "num/input.h"

/* Errors common to both ways of staging. */
static megamoe_status begin(megamoe_workspace *ws, const char *what, int64_t n_tokens) {
    if (!ws)
        return mm_fail(MEGAMOE_EINVAL, "%s: workspace is NULL", what);
    MM_TRY(mm_workspace_take_pending(ws));
    if (n_tokens < 0)
        return mm_fail(MEGAMOE_EINVAL, "%s: %" PRId64 " tokens", what, n_tokens);
    if (n_tokens > ws->capacity.tokens)
        return mm_fail(MEGAMOE_ECAPACITY,
                       "%s: %" PRId64 " tokens; the workspace has a capacity of %" PRId64, what,
                       n_tokens, ws->capacity.tokens);
    return MEGAMOE_OK;
}

static void record(mm_cpu_workspace *cpu, int64_t token, int32_t slot, int64_t value) {
    megamoe_workspace_detail *error = &cpu->staged_error;
    if (error->status != MEGAMOE_OK)
        return;
    *error = (megamoe_workspace_detail){.struct_size = sizeof *error,
                                        .status = MEGAMOE_EID,
                                        .phase = MEGAMOE_PHASE_COUNT,
                                        .rank = cpu->rank,
                                        .token = token,
                                        .slot = slot,
                                        .value = value};
    if (slot >= 0)
        snprintf(error->message, sizeof error->message,
                 "rank %d, token %" PRId64 ", slot %d: expert id %" PRId64 "; expected -1..%d",
                 cpu->rank, token, slot, value, cpu->shape.experts - 1);
    else
        snprintf(error->message, sizeof error->message,
                 "rank %d, token %" PRId64 ": input scale byte %" PRId64 "; expected %d..%d",
                 cpu->rank, token, value, MM_BLOCK_EXPONENT_MIN + MM_BLOCK_BYTE_ZERO,
                 MM_BLOCK_EXPONENT_MAX + MM_BLOCK_BYTE_ZERO);
}

struct staging {
    mm_cpu_workspace *cpu;
    const megamoe_view *x;
};

static void quantize(void *argument, int32_t thread, int32_t threads) {
    const struct staging *staging = argument;
    mm_cpu_workspace *cpu = staging->cpu;
    const mm_kernels *kernels = cpu->device->kernels;
    const int32_t hidden = cpu->shape.hidden;
    int32_t t;
    while ((t = mm_ranges_take(cpu->ranges, thread, threads)) >= 0) {
        const uint16_t *x = mm_view_row(staging->x, t, hidden);
        uint8_t *codes = cpu->codes + (int64_t)t * cpu->codes_stride;
        cpu->token_scale[t] = 1.0f;
        cpu->token_factor[t] = 1.0f;
        if (cpu->shape.input_scale == MEGAMOE_SCALE_TOKEN)
            kernels->quantize_token(x, hidden, codes, &cpu->token_scale[t], &cpu->token_factor[t]);
        else
            kernels->quantize_blocks(x, hidden, codes,
                                     cpu->blocks + (int64_t)t * cpu->blocks_stride);
    }
}

megamoe_status megamoe_stage(megamoe_workspace *workspace, const megamoe_view *x,
                             const megamoe_view *topk_ids, const megamoe_view *topk_weights,
                             int64_t n_tokens, void *stream) {
    (void)stream;
    MM_TRY(begin(workspace, "megamoe_stage", n_tokens));
    const megamoe_shape *shape = &workspace->shape;
    if (shape->input_scale == MEGAMOE_SCALE_BLOCK_F32)
        return mm_fail(MEGAMOE_EINVAL,
                       "megamoe_stage: F32 scales per block take the caller's codes only; use "
                       "megamoe_workspace_get_views and megamoe_commit_staged");
    MM_TRY(mm_view_check(x, "x", MEGAMOE_DTYPE_BF16, MEGAMOE_DTYPE_NONE, n_tokens, shape->hidden));
    if (n_tokens > 1 && mm_view_stride(x, shape->hidden) % 8)
        return mm_fail(MEGAMOE_EINVAL, "x: row stride %" PRId64 "; expected a multiple of 8",
                       mm_view_stride(x, shape->hidden));
    MM_TRY(mm_view_check(topk_ids, "topk_ids", MEGAMOE_DTYPE_I32, MEGAMOE_DTYPE_I64, n_tokens,
                         shape->topk));
    MM_TRY(mm_view_check(topk_weights, "topk_weights", MEGAMOE_DTYPE_F32, MEGAMOE_DTYPE_BF16,
                         n_tokens, shape->topk));
    mm_cpu_workspace *cpu = workspace->cpu;
    cpu->staged_error.status = MEGAMOE_OK;
    for (int64_t t = 0; t < n_tokens; t++)
        for (int32_t slot = 0; slot < shape->topk; slot++) {
            const int64_t id = mm_view_integer(topk_ids, t, slot, shape->topk);
            if (id < -1 || id >= shape->experts)
                record(cpu, t, slot, id);
            cpu->ids[t * shape->topk + slot] = (int32_t)id;
            cpu->weights[t * shape->topk + slot] =
                mm_view_float(topk_weights, t, slot, shape->topk);
        }
    struct staging staging = {cpu, x};
    mm_ranges_set(cpu->ranges, mm_pool_threads(cpu->device->pool), (int32_t)n_tokens);
    mm_pool_run(cpu->device->pool, quantize, &staging);
    cpu->tokens = n_tokens;
    workspace->staged = true;
    return MEGAMOE_OK;
}

megamoe_status megamoe_workspace_get_views(megamoe_workspace *workspace,
                                           megamoe_workspace_views *views) {
    if (!workspace || !views)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_workspace_get_views: %s is NULL",
                       workspace ? "views" : "workspace");
    const mm_cpu_workspace *cpu = workspace->cpu;
    const int64_t tokens = workspace->capacity.tokens;
    const int32_t topk = workspace->shape.topk;
    megamoe_workspace_views found = {
        .codes = {cpu->codes, MEGAMOE_DTYPE_E4M3, tokens, cpu->codes_stride},
        .topk_ids = {cpu->ids, MEGAMOE_DTYPE_I32, tokens, topk},
        .topk_weights = {cpu->weights, MEGAMOE_DTYPE_F32, tokens, topk},
    };
    switch (workspace->shape.input_scale) {
    case MEGAMOE_SCALE_TOKEN:
        found.scales = (megamoe_view){cpu->token_scale, MEGAMOE_DTYPE_F32, tokens, 1};
        break;
    case MEGAMOE_SCALE_BLOCK:
        found.scales = (megamoe_view){cpu->blocks, MEGAMOE_DTYPE_E8M0, tokens, cpu->blocks_stride};
        break;
    case MEGAMOE_SCALE_BLOCK_F32:
        found.scales =
            (megamoe_view){cpu->block_scale, MEGAMOE_DTYPE_F32, tokens, cpu->blocks_stride};
        break;
    }
    return mm_give_struct(views, &found, sizeof found, "megamoe_workspace_views");
}

megamoe_status megamoe_commit_staged(megamoe_workspace *workspace, int64_t n_tokens, void *stream) {
    (void)stream;
    MM_TRY(begin(workspace, "megamoe_commit_staged", n_tokens));
    mm_cpu_workspace *cpu = workspace->cpu;
    const megamoe_shape *shape = &workspace->shape;
    cpu->staged_error.status = MEGAMOE_OK;
    for (int64_t t = 0; t < n_tokens; t++) {
        for (int32_t slot = 0; slot < shape->topk; slot++) {
            const int32_t id = cpu->ids[t * shape->topk + slot];
            if (id < -1 || id >= shape->experts)
                record(cpu, t, slot, id);
        }
        cpu->token_factor[t] = 1.0f;
        if (shape->input_scale == MEGAMOE_SCALE_TOKEN)
            continue;
        cpu->token_scale[t] = 1.0f;
        for (int32_t b = 0; shape->input_scale == MEGAMOE_SCALE_BLOCK && b < cpu->blocks_stride;
             b++) {
            const int32_t byte = cpu->blocks[t * cpu->blocks_stride + b];
            const int32_t exponent = byte - MM_BLOCK_BYTE_ZERO;
            if (exponent < MM_BLOCK_EXPONENT_MIN || exponent > MM_BLOCK_EXPONENT_MAX)
                record(cpu, t, -1, byte);
        }
    }
    cpu->tokens = n_tokens;
    workspace->staged = true;
    return MEGAMOE_OK;
}
