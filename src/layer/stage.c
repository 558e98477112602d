/* SPDX-License-Identifier: Apache-2.0 */
/* Taking a batch into a workspace. */
#include <inttypes.h>

#include "base/error.h"
#include "base/view.h"
#include "layer/layer.h"

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

megamoe_status megamoe_stage(megamoe_workspace *workspace, const megamoe_view *x,
                             const megamoe_view *topk_ids, const megamoe_view *topk_weights,
                             int64_t n_tokens, void *stream) {
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
    if (workspace->cuda)
        MM_TRY(mm_cuda_stage(workspace->cuda, x, topk_ids, topk_weights, n_tokens, stream));
    else
        mm_cpu_stage(workspace->cpu, x, topk_ids, topk_weights, n_tokens);
    workspace->tokens = n_tokens;
    return MEGAMOE_OK;
}

megamoe_status megamoe_workspace_get_views(megamoe_workspace *workspace,
                                           megamoe_workspace_views *views) {
    if (!workspace || !views)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_workspace_get_views: %s is NULL",
                       workspace ? "views" : "workspace");
    megamoe_workspace_views found = {0};
    if (workspace->cuda)
        mm_cuda_workspace_views(workspace->cuda, &found);
    else
        mm_cpu_workspace_views(workspace->cpu, &found);
    return mm_give_struct(views, &found, sizeof found, "megamoe_workspace_views");
}

megamoe_status megamoe_commit_staged(megamoe_workspace *workspace, int64_t n_tokens, void *stream) {
    MM_TRY(begin(workspace, "megamoe_commit_staged", n_tokens));
    if (workspace->cuda)
        MM_TRY(mm_cuda_commit_staged(workspace->cuda, n_tokens, stream));
    else
        mm_cpu_commit_staged(workspace->cpu, n_tokens);
    workspace->tokens = n_tokens;
    return MEGAMOE_OK;
}
