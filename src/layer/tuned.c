/* SPDX-License-Identifier: Apache-2.0 */
/* Measured plans for a layer in a workspace. */
#include "megamoe/tune.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "base/memory.h"
#include "cuda/tiles.h"
#include "layer/layer.h"
#include "megamoe/version.h"
#include "weights/prepared.h"

static const char default_routing[] = "random";

/* ---- Keys ---- */

static bool is_tunable(const megamoe_workspace *ws) {
    return ws->cuda && !mm_comm_folded(ws->comm);
}

static megamoe_status key_of(const megamoe_layer *layer, const megamoe_workspace *ws,
                             const char *routing, megamoe_tuned_key *key) {
    const mm_cuda_device *device = ws->device->cuda;
    const int32_t ranks = megamoe_comm_size(ws->comm);
    *key = (megamoe_tuned_key){
        .struct_size = sizeof *key,
        .layout = MM_PREPARED_VERSION,
        .capability_major = device->major,
        .capability_minor = device->minor,
        .multiprocessors = device->multiprocessors,
        .max_ctas = device->max_ctas,
        .l2_bytes = device->l2_bytes,
        .clock_khz = device->clock_khz,
        .memory_clock_khz = device->memory_clock_khz,
        .memory_bus_bits = device->memory_bus_bits,
        .hidden = ws->shape.hidden,
        .intermediate = ws->shape.intermediate,
        .experts = mm_share_count(ws->shape.physical_experts, 0, ranks),
        .topk = ws->shape.topk,
        .format = layer->desc.format,
        .nvfp4 = layer->cuda.layout.format == MM_CUDA_NVFP4_FOLDED ? MEGAMOE_NVFP4_FOLDED
                                                                   : MEGAMOE_NVFP4_EXACT,
        .accumulate = layer->accumulate,
        .input_scale = ws->shape.input_scale,
        .ranks = ranks,
        .capacity = ws->capacity.tokens,
    };
    snprintf(key->library, sizeof key->library, "%s", megamoe_version());
    if (!routing)
        routing = default_routing;
    if (strlen(routing) >= sizeof key->routing)
        return mm_fail(MEGAMOE_EINVAL,
                       "measured plans: the name of a routing profile has %zu bytes; at most %zu "
                       "are kept",
                       strlen(routing), sizeof key->routing - 1);
    snprintf(key->routing, sizeof key->routing, "%s", routing);
    return MEGAMOE_OK;
}

megamoe_status megamoe_tuned_key_of(const megamoe_layer *layer, const megamoe_workspace *workspace,
                                    const char *routing, megamoe_tuned_key *key) {
    if (!layer || !workspace || !key)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_tuned_key_of: %s is NULL",
                       !layer ? "layer" : (!workspace ? "workspace" : "key"));
    MM_TRY(mm_layer_check_fit(layer, workspace));
    if (!is_tunable(workspace))
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "measured plans are for CUDA devices, one rank in a launch");
    megamoe_tuned_key found;
    MM_TRY(key_of(layer, workspace, routing, &found));
    return mm_give_struct(key, &found, sizeof found, "megamoe_tuned_key");
}

int32_t megamoe_plan_candidates(const megamoe_layer *layer, const megamoe_workspace *workspace,
                                int64_t tokens, megamoe_plan *plans, int32_t n) {
    if (!layer || !workspace || !is_tunable(workspace))
        return 0;
    return mm_cuda_candidates(workspace->cuda, &layer->cuda, tokens, plans, plans ? n : 0);
}

int32_t megamoe_plan_token_tile(const megamoe_layer_desc *desc, megamoe_nvfp4_mode nvfp4,
                                megamoe_accumulate accumulate, int32_t ranks, int64_t tokens) {
    if (!desc || desc->experts < 1 || desc->topk < 1 || ranks < 1 || tokens < 0)
        return 0;
    return mm_cuda_token_tile(mm_cuda_format_of(desc->format, nvfp4),
                              accumulate == MEGAMOE_ACCUMULATE_PROMOTE,
                              mm_plan_routes(tokens * ranks, desc->topk, desc->experts));
}

int32_t megamoe_plan_token_tiles(const megamoe_layer_desc *desc, megamoe_nvfp4_mode nvfp4,
                                 megamoe_accumulate accumulate, int32_t *tiles, int32_t n) {
    if (!desc)
        return 0;
    mm_plan_tile found[MM_CUDA_TILES_MAX] = {{0}};
    const int32_t count = mm_cuda_tiles(mm_cuda_format_of(desc->format, nvfp4),
                                        accumulate == MEGAMOE_ACCUMULATE_PROMOTE, found);
    for (int32_t i = 0; i < count && i < n; i++)
        tiles[i] = found[i].tokens;
    return count;
}

/* ---- Plans in use ---- */

static mm_tuned *tuned_of(megamoe_workspace *ws, const megamoe_layer *layer) {
    return &ws->tuned[layer->cuda.layout.format][layer->accumulate == MEGAMOE_ACCUMULATE_PROMOTE];
}

void mm_workspace_forget_tuned(megamoe_workspace *ws) {
    for (int32_t format = 0; format < MM_CUDA_FORMATS; format++)
        for (int32_t promote = 0; promote < 2; promote++)
            free(ws->tuned[format][promote].plans);
}

megamoe_plan mm_workspace_plan(const megamoe_workspace *ws, const megamoe_layer *layer) {
    megamoe_plan plan = ws->plan;
    if (plan.token_tile || plan.lag)
        return plan;
    const bool promote = layer->accumulate == MEGAMOE_ACCUMULATE_PROMOTE;
    const megamoe_tuned_plan *tuned =
        mm_tuned_near(&ws->tuned[layer->cuda.layout.format][promote], ws->tokens);
    if (tuned) {
        plan.token_tile = tuned->token_tile;
        plan.lag = tuned->lag;
    }
    return plan;
}

/* A library that was built otherwise may have had other tiles. */
static void drop_unknown_tiles(const megamoe_layer *layer, mm_tuned *tuned) {
    int32_t kept = 0;
    for (int32_t i = 0; i < tuned->n; i++) {
        const megamoe_tuned_plan plan = tuned->plans[i];
        if (plan.token_tile == 0 || mm_cuda_has_tile(&layer->cuda, plan.token_tile))
            tuned->plans[kept++] = plan;
    }
    if (kept < tuned->n)
        mm_log(MEGAMOE_LOG_WARN,
               "%d of %d measured plans are ignored: this library has no tiles of their width",
               tuned->n - kept, tuned->n);
    tuned->n = kept;
}

static megamoe_status find(const megamoe_layer *layer, const megamoe_workspace *ws,
                           const megamoe_tuned_options *options, mm_tuned *tuned) {
    const char *on = getenv("MEGAMOE_TUNED");
    *tuned = (mm_tuned){0};
    if (!is_tunable(ws) || (on && strcmp(on, "0") == 0))
        return MEGAMOE_OK;
    megamoe_tuned_key key;
    MM_TRY(key_of(layer, ws, options->routing, &key));
    MM_TRY(mm_tuned_find(options->path, &key, tuned));
    drop_unknown_tiles(layer, tuned);
    return MEGAMOE_OK;
}

megamoe_status megamoe_use_tuned(megamoe_layer *layer, megamoe_workspace *workspace,
                                 const megamoe_tuned_options *options, int32_t *found) {
    if (!layer || !workspace)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_use_tuned: %s is NULL",
                       layer ? "workspace" : "layer");
    MM_TRY(mm_layer_check_fit(layer, workspace));
    megamoe_tuned_options o;
    MM_TRY(mm_take_struct(&o, sizeof o, options, "megamoe_tuned_options"));
    mm_tuned tuned;
    MM_TRY(find(layer, workspace, &o, &tuned));
    if (workspace->cuda) {
        mm_tuned *used = tuned_of(workspace, layer);
        free(used->plans);
        *used = tuned;
    }
    if (found)
        *found = tuned.n;
    return MEGAMOE_OK;
}
