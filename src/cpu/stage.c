/* SPDX-License-Identifier: Apache-2.0 */
/* Taking a batch into a workspace. */
#include <inttypes.h>
#include <stdio.h>

#include "base/view.h"
#include "cpu/operation.h"
#include "cpu/scratch.h"
#include "num/input.h"

static void record(mm_cpu_workspace *ws, int64_t token, int32_t slot, int64_t value) {
    megamoe_workspace_detail *error = &ws->staged_error;
    if (error->status != MEGAMOE_OK)
        return;
    *error = (megamoe_workspace_detail){.struct_size = sizeof *error,
                                        .status = MEGAMOE_EID,
                                        .phase = MEGAMOE_PHASE_COUNT,
                                        .rank = ws->rank,
                                        .token = token,
                                        .slot = slot,
                                        .value = value};
    if (slot >= 0)
        snprintf(error->message, sizeof error->message,
                 "rank %d, token %" PRId64 ", slot %d: expert id %" PRId64 "; expected -1..%d",
                 ws->rank, token, slot, value, ws->shape.experts - 1);
    else
        snprintf(error->message, sizeof error->message,
                 "rank %d, token %" PRId64 ": input scale byte %" PRId64 "; expected %d..%d",
                 ws->rank, token, value, MM_BLOCK_EXPONENT_MIN + MM_BLOCK_BYTE_ZERO,
                 MM_BLOCK_EXPONENT_MAX + MM_BLOCK_BYTE_ZERO);
}

struct staging {
    mm_cpu_workspace *ws;
    const megamoe_view *x;
};

static void quantize(void *argument, int32_t thread, int32_t threads) {
    const struct staging *staging = argument;
    mm_cpu_workspace *ws = staging->ws;
    const mm_kernels *kernels = ws->device->kernels;
    const int32_t hidden = ws->shape.hidden;
    int32_t t;
    while ((t = mm_ranges_take(ws->ranges, thread, threads)) >= 0) {
        const uint16_t *x = mm_view_row(staging->x, t, hidden);
        uint8_t *codes = ws->own->codes + (int64_t)t * ws->codes_stride;
        ws->own->token_scale[t] = 1.0f;
        ws->own->token_factor[t] = 1.0f;
        if (ws->shape.activations == MEGAMOE_ACTIVATIONS_INT8)
            kernels->quantize_int8(x, hidden, codes,
                                   ws->own->block_scale + (int64_t)t * ws->blocks_stride);
        else if (ws->shape.input_scale == MEGAMOE_SCALE_TOKEN)
            kernels->quantize_token(x, hidden, codes, &ws->own->token_scale[t],
                                    &ws->own->token_factor[t]);
        else
            kernels->quantize_blocks(x, hidden, codes,
                                     ws->own->blocks + (int64_t)t * ws->blocks_stride);
    }
}

void mm_cpu_stage(mm_cpu_workspace *ws, const megamoe_view *x, const megamoe_view *topk_ids,
                  const megamoe_view *topk_weights, int64_t n_tokens) {
    const int32_t topk = ws->shape.topk;
    ws->staged_error.status = MEGAMOE_OK;
    for (int64_t t = 0; t < n_tokens; t++)
        for (int32_t slot = 0; slot < topk; slot++) {
            const int64_t id = mm_view_integer(topk_ids, t, slot, topk);
            if (id < -1 || id >= ws->shape.experts)
                record(ws, t, slot, id);
            ws->own->ids[t * topk + slot] = (int32_t)id;
            ws->own->weights[t * topk + slot] = mm_view_float(topk_weights, t, slot, topk);
        }
    struct staging staging = {ws, x};
    mm_ranges_set(ws->ranges, mm_pool_threads(ws->device->pool), (int32_t)n_tokens);
    mm_pool_run(ws->device->pool, quantize, &staging);
    ws->tokens = n_tokens;
}

void mm_cpu_workspace_views(const mm_cpu_workspace *ws, megamoe_workspace_views *views) {
    const int64_t tokens = ws->capacity.tokens;
    const int32_t topk = ws->shape.topk;
    const bool int8 = ws->shape.activations == MEGAMOE_ACTIVATIONS_INT8;
    *views = (megamoe_workspace_views){
        .codes = {ws->own->codes, int8 ? MEGAMOE_DTYPE_I8 : MEGAMOE_DTYPE_E4M3, tokens,
                  ws->codes_stride},
        .topk_ids = {ws->own->ids, MEGAMOE_DTYPE_I32, tokens, topk},
        .topk_weights = {ws->own->weights, MEGAMOE_DTYPE_F32, tokens, topk},
    };
    switch (int8 ? MEGAMOE_SCALE_BLOCK_F32 : ws->shape.input_scale) {
    case MEGAMOE_SCALE_TOKEN:
        views->scales = (megamoe_view){ws->own->token_scale, MEGAMOE_DTYPE_F32, tokens, 1};
        break;
    case MEGAMOE_SCALE_BLOCK:
        views->scales =
            (megamoe_view){ws->own->blocks, MEGAMOE_DTYPE_E8M0, tokens, ws->blocks_stride};
        break;
    case MEGAMOE_SCALE_BLOCK_F32:
        views->scales =
            (megamoe_view){ws->own->block_scale, MEGAMOE_DTYPE_F32, tokens, ws->blocks_stride};
        break;
    }
}

void mm_cpu_commit_staged(mm_cpu_workspace *ws, int64_t n_tokens) {
    const megamoe_shape *shape = &ws->shape;
    ws->staged_error.status = MEGAMOE_OK;
    for (int64_t t = 0; t < n_tokens; t++) {
        for (int32_t slot = 0; slot < shape->topk; slot++) {
            const int32_t id = ws->own->ids[t * shape->topk + slot];
            if (id < -1 || id >= shape->experts)
                record(ws, t, slot, id);
        }
        ws->own->token_factor[t] = 1.0f;
        const bool int8 = shape->activations == MEGAMOE_ACTIVATIONS_INT8;
        if (shape->input_scale == MEGAMOE_SCALE_TOKEN && !int8)
            continue;
        ws->own->token_scale[t] = 1.0f;
        for (int32_t b = 0; shape->input_scale == MEGAMOE_SCALE_BLOCK && b < ws->blocks_stride;
             b++) {
            const int32_t byte = ws->own->blocks[t * ws->blocks_stride + b];
            const int32_t exponent = byte - MM_BLOCK_BYTE_ZERO;
            if (exponent < MM_BLOCK_EXPONENT_MIN || exponent > MM_BLOCK_EXPONENT_MAX)
                record(ws, t, -1, byte);
        }
    }
    ws->tokens = n_tokens;
}
