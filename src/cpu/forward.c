/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/view.h"
#include "cpu/operation.h"
#include "cpu/scratch.h"
#include "cpu/trace.h"
#include "num/exp.h"
#include "num/input.h"

/* What the threads of one phase work on. */
struct work {
    mm_cpu_workspace *ws;
    const mm_cpu_layer *layer;
    const megamoe_view *y;
};

/* ---- publish, agree ---- */

void mm_cpu_publish(mm_cpu_workspace *ws, const mm_cpu_layer *layer) {
    mm_cpu_trace_begin(ws);
    const mm_placement *placement = layer->placement;
    const mm_cpu_window *own = ws->own;
    const uint64_t parity = ++ws->epoch & 1;
    mm_publication *publication = &own->words->publications[parity];
    int32_t *counts = own->counts + parity * (uint64_t)placement->physical;
    publication->error = ws->staged_error;
    publication->layer = layer->key;
    publication->tokens = ws->tokens;
    memset(counts, 0, (size_t)placement->physical * sizeof *counts);
    if (publication->error.status == MEGAMOE_OK)
        for (int64_t t = 0; t < ws->tokens; t++)
            for (int32_t slot = 0; slot < ws->shape.topk; slot++) {
                const int32_t id = own->ids[t * ws->shape.topk + slot];
                if (id >= 0)
                    counts[mm_placement_of(placement, id, ws->rank, t)]++;
            }
    atomic_store_explicit(&own->words->published, ws->epoch, memory_order_release);
}

static const mm_publication *publication_of(const mm_cpu_workspace *ws, int32_t rank) {
    return &ws->windows[rank].words->publications[ws->epoch & 1];
}

/* Routes of a rank's tokens to each physical expert. */
static const int32_t *counts_of(const mm_cpu_workspace *ws, int32_t rank) {
    return ws->windows[rank].counts + (ws->epoch & 1) * (uint64_t)ws->shape.physical_experts;
}

void mm_cpu_agree(mm_cpu_workspace *ws, const mm_cpu_layer *layer,
                  megamoe_workspace_detail *detail) {
    const mm_placement *placement = layer->placement;
    *detail = (megamoe_workspace_detail){
        .struct_size = sizeof *detail, .rank = -1, .epoch = ws->epoch, .token = -1, .slot = -1};
    for (int32_t r = 0; r < ws->ranks; r++) {
        const mm_publication *publication = publication_of(ws, r);
        if (publication->error.status != MEGAMOE_OK) {
            *detail = publication->error;
            detail->epoch = ws->epoch;
            return;
        }
    }
    for (int32_t r = 1; r < ws->ranks; r++) {
        if (publication_of(ws, r)->layer == publication_of(ws, 0)->layer)
            continue;
        detail->status = MEGAMOE_EINVAL;
        detail->phase = MEGAMOE_PHASE_COUNT;
        detail->rank = r;
        snprintf(detail->message, sizeof detail->message,
                 "the layer of rank %d has other options or another expert map than that of rank 0",
                 r);
        return;
    }
    for (int32_t owner = 0; owner < ws->ranks; owner++) {
        const int32_t first = mm_share_start(placement->physical, owner, ws->ranks);
        const int32_t count = mm_share_count(placement->physical, owner, ws->ranks);
        int64_t need = 0;
        for (int32_t r = 0; r < ws->ranks; r++)
            for (int32_t p = first; p < first + count; p++)
                need += counts_of(ws, r)[p];
        if (need > ws->capacity.pool_rows) {
            detail->status = MEGAMOE_ECAPACITY;
            detail->phase = MEGAMOE_PHASE_DISPATCH;
            detail->rank = owner;
            detail->value = need;
            snprintf(detail->message, sizeof detail->message,
                     "rank %d receives %" PRId64 " routes; its pool has %" PRId64
                     " rows (capacity.pool_rows)",
                     owner, need, ws->capacity.pool_rows);
            return;
        }
    }
}

/* ---- compute: which routes ---- */

/* Sorts the routes of all ranks to this rank's experts and cuts them into panels. */
static void gather_routes(mm_cpu_workspace *ws, const mm_cpu_layer *layer) {
    const mm_placement *placement = layer->placement;
    const int32_t topk = ws->shape.topk, first = placement->first, local = placement->local;
    int64_t total = 0;
    for (int32_t e = 0; e < local; e++) {
        ws->segments[e] = ws->next[e] = total;
        for (int32_t r = 0; r < ws->ranks; r++)
            total += counts_of(ws, r)[first + e];
    }
    ws->segments[local] = ws->received = total;
    for (int32_t r = 0; r < ws->ranks; r++) {
        const mm_cpu_window *peer = &ws->windows[r];
        const int64_t tokens = publication_of(ws, r)->tokens;
        for (int64_t t = 0; t < tokens; t++)
            for (int32_t slot = 0; slot < topk; slot++) {
                const int32_t id = peer->ids[t * topk + slot];
                const int32_t e = id < 0 ? -1 : mm_placement_of(placement, id, r, t) - first;
                if (e >= 0 && e < local)
                    ws->pool[ws->next[e]++] =
                        (mm_route){t, r, slot, peer->weights[t * topk + slot]};
            }
    }
    ws->n_panels = 0;
    ws->n_active = 0;
    for (int32_t e = 0; e < local; e++) {
        ws->panel_starts[e] = ws->n_panels;
        const int32_t routes = (int32_t)(ws->segments[e + 1] - ws->segments[e]);
        const int32_t panels = (int32_t)mm_ceil_div(routes, MM_PANEL_TOKENS);
        for (int32_t p = 0; p < panels; p++)
            ws->panels[ws->n_panels++] =
                (mm_panel){e, mm_share_count(routes, p, panels),
                           ws->segments[e] + mm_share_start(routes, p, panels)};
        if (routes)
            ws->active[ws->n_active++] = e;
    }
    ws->panel_starts[local] = ws->n_panels;
}

void mm_cpu_receive_counts(const mm_cpu_workspace *ws, int64_t *counts, int32_t local) {
    for (int32_t e = 0; e < local; e++)
        counts[e] = ws->segments[e + 1] - ws->segments[e];
}

/* ---- compute: dispatch ---- */

static bool int8_of(const mm_cpu_workspace *ws) {
    return ws->shape.activations == MEGAMOE_ACTIVATIONS_INT8;
}

/* k that share a scale of the weights. */
static int32_t group_of(mm_tile_format format) {
    return format == MM_TILE_NVFP4 ? 16 : 32;
}

/* Words of one token's k columns in a panel. */
static int32_t panel_words(const struct work *work, int32_t k) {
    return int8_of(work->ws) ? mm_int8_panel_words(k, group_of(work->layer->layout.format)) : k / 2;
}

/* The codes of one route's token into its column of an FC1 panel. */
static void pull_token(const struct work *work, const mm_panel *panel, int32_t column) {
    mm_cpu_workspace *ws = work->ws;
    const mm_cpu_layout *layout = &work->layer->layout;
    const int64_t row = panel->start + column;
    const mm_route *route = &ws->pool[row];
    const mm_cpu_window *source = &ws->windows[route->rank];
    const int64_t t = route->token;
    const bool promote = work->layer->accumulate == MEGAMOE_ACCUMULATE_PROMOTE;
    const bool by_block = ws->shape.input_scale == MEGAMOE_SCALE_BLOCK;
    const uint8_t *codes = source->codes + t * ws->codes_stride;
    const uint8_t *blocks = source->blocks + t * ws->blocks_stride;
    uint32_t *values = ws->fc1_panels + panel->start * panel_words(work, layout->hidden_k);
    if (int8_of(ws))
        ws->device->kernels->expand_int8(codes, ws->shape.hidden, layout->hidden_k,
                                         group_of(layout->format), values, panel->tokens, column);
    else
        ws->device->kernels->expand(codes, by_block && !promote ? blocks : NULL, ws->shape.hidden,
                                    layout->hidden_k, values, panel->tokens, column);
    ws->route_scale[row] = source->token_scale[t];
    ws->route_factor[row] = source->token_factor[t];
    ws->route_weight[row] = route->weight;
    if (!promote && !int8_of(ws))
        return;
    const int32_t chunks = ws->blocks_stride;
    float *scales = ws->fc1_chunk_scale + panel->start * chunks + column;
    for (int32_t c = 0; c < chunks; c++)
        scales[(int64_t)c * panel->tokens] =
            int8_of(ws) || ws->shape.input_scale == MEGAMOE_SCALE_BLOCK_F32
                ? source->block_scale[t * chunks + c]
                : (by_block ? mm_exp2i(blocks[c] - MM_BLOCK_BYTE_ZERO) : 1.0f);
}

static void run_dispatch(void *argument, int32_t thread, int32_t threads) {
    const struct work *work = argument;
    const int64_t begin = mm_cpu_trace_now(work->ws);
    int32_t task;
    while ((task = mm_ranges_take(work->ws->ranges, thread, threads)) >= 0) {
        const mm_panel *panel = &work->ws->panels[task];
        for (int32_t column = 0; column < panel->tokens; column++)
            pull_token(work, panel, column);
    }
    mm_cpu_trace_add(work->ws, thread, begin, MEGAMOE_SPAN_DISPATCH, NULL);
}

/* ---- compute: tasks and products ---- */

/* What FC1 and FC2 differ in for their dot products. */
struct sweep {
    size_t tile_bytes;
    int32_t k;
    const uint32_t *panels;
    const float *chunk_scale;
};

static int64_t routes_of(const mm_cpu_workspace *ws, int32_t expert) {
    return ws->segments[expert + 1] - ws->segments[expert];
}

/*
 * Units of a task that go through the kernels in one call. With few tokens memory is the limit, and
 * it streams best in long runs; with many, one unit stays in cache while all panels pass.
 */
static int32_t units_at_once(const mm_cpu_workspace *ws, const mm_task *task, int32_t unit_tiles) {
    const int64_t routes = routes_of(ws, task->expert);
    if (routes > MM_FEW_TOKENS)
        return 1;
    return (int32_t)mm_max(1, MM_SCRATCH_SUMS / (routes * unit_tiles));
}

/*
 * Lists the tasks of a sweep: an expert's units (128 channels of FC1, 512 rows of FC2) one by one
 * where it has many tokens, else in as few spans as keep all threads busy.
 */
static int32_t list_tasks(mm_cpu_workspace *ws, int32_t units) {
    const int32_t threads = mm_pool_threads(ws->device->pool);
    const int32_t wanted =
        threads == 1 ? 1 : (int32_t)mm_ceil_div(MM_TASKS_PER_THREAD * threads, ws->n_active);
    int32_t n = 0;
    for (int32_t i = 0; i < ws->n_active; i++) {
        const int32_t expert = ws->active[i];
        const bool few = routes_of(ws, expert) <= MM_FEW_TOKENS;
        const int32_t spans = few && wanted < units ? wanted : units;
        for (int32_t span = 0; span < spans; span++)
            ws->tasks[n++] = (mm_task){expert, mm_share_start(units, span, spans),
                                       mm_share_count(units, span, spans)};
    }
    return n;
}

/* What undoes the layout's bias in a sum. Those of int8 activations do not have it. */
static float sum_scale(const struct work *work) {
    const bool biased = work->layer->layout.format == MM_TILE_MXFP4 && !int8_of(work->ws);
    return biased ? mm_exp2i(-MM_MXFP4_BIAS) : 1.0f;
}

/* The part of a sweep over one panel: `tiles` tiles from `first` on, their sums into scratch. */
static void multiply(const struct work *work, const struct sweep *sweep, const uint8_t *weights,
                     const mm_panel *panel, int32_t first, int32_t tiles,
                     struct mm_scratch *scratch) {
    const int64_t chunks = mm_ceil_div(sweep->k, MM_CHUNK_K);
    const bool int8 = int8_of(work->ws);
    const bool by_chunk = int8 || work->layer->accumulate == MEGAMOE_ACCUMULATE_PROMOTE;
    const mm_dot dot = {
        .weights = weights + (size_t)first * sweep->tile_bytes,
        .tile_bytes = sweep->tile_bytes,
        .tiles = tiles,
        .k = sweep->k,
        .tokens = panel->tokens,
        .x = sweep->panels + panel->start * panel_words(work, sweep->k),
        .chunk_scale = by_chunk ? sweep->chunk_scale + panel->start * chunks : NULL,
        .out = scratch->sums,
    };
    const mm_kernels *kernels = work->ws->device->kernels;
    switch (work->layer->layout.format) {
    case MM_TILE_MXFP4:
        (int8 ? kernels->dot_mxfp4_int8 : kernels->dot_mxfp4)(&dot);
        break;
    case MM_TILE_NVFP4:
        (int8 ? kernels->dot_nvfp4_int8 : kernels->dot_nvfp4)(&dot);
        break;
    default:
        kernels->dot_e4m3(&dot);
    }
}

static const float *sums_of(const struct mm_scratch *scratch, const mm_panel *panel, int32_t tile) {
    return scratch->sums + (size_t)tile * (size_t)panel->tokens * MM_TILE_ROWS;
}

/* ---- compute: FC1 ---- */

/* Quantizes the block of h of one panel into its place in the FC2 panel. */
static void store_hidden(const struct work *work, const mm_panel *panel, int32_t block,
                         struct mm_scratch *scratch) {
    mm_cpu_workspace *ws = work->ws;
    const mm_kernels *kernels = ws->device->kernels;
    const mm_cpu_layout *layout = &work->layer->layout;
    const bool promote = work->layer->accumulate == MEGAMOE_ACCUMULATE_PROMOTE;
    const int32_t channel = block * MM_BLOCK;
    const int32_t n = (int32_t)mm_min(MM_BLOCK, ws->shape.intermediate - channel);
    const int32_t padded = (int32_t)mm_min(MM_BLOCK, layout->intermediate_k - channel);
    const int64_t chunks = mm_ceil_div(layout->intermediate_k, MM_CHUNK_K);
    uint32_t *values = ws->fc2_panels + panel->start * panel_words(work, layout->intermediate_k) +
                       (int64_t)panel_words(work, channel) * panel->tokens;
    float *scales = ws->fc2_chunk_scale + panel->start * chunks + (int64_t)block * panel->tokens;
    for (int32_t i = 0; i < panel->tokens; i++) {
        const float *h = scratch->h + (size_t)i * MM_BLOCK;
        if (int8_of(ws)) {
            kernels->quantize_hidden_int8(h, n, scratch->codes, &scales[i]);
            kernels->expand_int8(scratch->codes, n, padded, group_of(layout->format), values,
                                 panel->tokens, i);
            continue;
        }
        uint8_t scale;
        kernels->quantize_hidden(h, n, scratch->codes, &scale);
        kernels->expand(scratch->codes, promote ? NULL : &scale, n, padded, values, panel->tokens,
                        i);
        if (promote)
            scales[i] = mm_exp2i(scale - MM_BLOCK_BYTE_ZERO);
    }
}

/* The tiles of one block, whose sums start at tile `first_sums` of the scratch. */
static void activate_block(const struct work *work, const mm_panel *panel, int32_t first_tile,
                           int32_t tiles, int32_t first_sums, struct mm_scratch *scratch) {
    const mm_cpu_workspace *ws = work->ws;
    const mm_cpu_layer *layer = work->layer;
    const mm_cpu_expert *weights = &layer->experts[panel->expert];
    const megamoe_activation *activation = &layer->desc.activation;
    const size_t row = (size_t)first_tile * MM_TILE_ROWS;
    const mm_activate activate = {
        .sums = sums_of(scratch, panel, first_sums),
        .tiles = tiles,
        .tokens = panel->tokens,
        .sum_scale = sum_scale(work),
        .token_scale = ws->route_scale + panel->start,
        .token_factor = ws->route_factor + panel->start,
        .gate_global = weights->global[MEGAMOE_GATE],
        .up_global = weights->global[MEGAMOE_UP],
        .exponents = weights->fc1_exponents + row,
        .bias = weights->fc1_bias ? weights->fc1_bias + row : NULL,
        .alpha = activation->alpha == 0.0f ? 1.0f : activation->alpha,
        .offset = activation->offset,
        .limit = activation->limit == 0.0f ? INFINITY : activation->limit,
        .route_weight = layer->weight_after_fc2 ? NULL : ws->route_weight + panel->start,
        .h = scratch->h,
    };
    ws->device->kernels->activate(&activate);
}

static void run_fc1_task(const struct work *work, const struct sweep *sweep, const mm_task *task,
                         struct mm_scratch *scratch) {
    const mm_cpu_workspace *ws = work->ws;
    const uint8_t *weights = work->layer->experts[task->expert].fc1;
    const int32_t step = units_at_once(ws, task, MM_FC1_UNIT_TILES);
    for (int32_t unit = task->first; unit < task->first + task->count; unit += step) {
        const int32_t units = (int32_t)mm_min(step, task->first + task->count - unit);
        const int32_t first = unit * MM_FC1_UNIT_TILES;
        const int32_t tiles =
            (int32_t)mm_min(units * MM_FC1_UNIT_TILES, work->layer->layout.fc1_tiles - first);
        for (int32_t p = ws->panel_starts[task->expert]; p < ws->panel_starts[task->expert + 1];
             p++) {
            const mm_panel *panel = &ws->panels[p];
            multiply(work, sweep, weights, panel, first, tiles, scratch);
            for (int32_t done = 0; done < tiles; done += MM_FC1_UNIT_TILES) {
                activate_block(work, panel, first + done,
                               (int32_t)mm_min(MM_FC1_UNIT_TILES, tiles - done), done, scratch);
                store_hidden(work, panel, (first + done) / MM_FC1_UNIT_TILES, scratch);
            }
        }
    }
}

static void run_fc1(void *argument, int32_t thread, int32_t threads) {
    const struct work *work = argument;
    const mm_cpu_workspace *ws = work->ws;
    const mm_cpu_layout *layout = &work->layer->layout;
    const struct sweep sweep = {layout->fc1_tile_bytes, layout->hidden_k, ws->fc1_panels,
                                ws->fc1_chunk_scale};
    int32_t task;
    while ((task = mm_ranges_take(ws->ranges, thread, threads)) >= 0) {
        const int64_t begin = mm_cpu_trace_now(ws);
        run_fc1_task(work, &sweep, &ws->tasks[task], &ws->scratch[thread]);
        mm_cpu_trace_add(ws, thread, begin, MEGAMOE_SPAN_FC1, &ws->tasks[task]);
    }
}

/* ---- compute: FC2 ---- */

/* The rows of one tile, stored at the tokens' ranks. */
static void finish_tile(const struct work *work, const mm_panel *panel, int32_t tile,
                        const float *sums) {
    const mm_cpu_workspace *ws = work->ws;
    const mm_cpu_layer *layer = work->layer;
    const mm_cpu_expert *weights = &layer->experts[panel->expert];
    const int32_t row = tile * MM_TILE_ROWS;
    uint16_t *out[MM_PANEL_TOKENS];
    for (int32_t c = 0; c < panel->tokens; c++) {
        const mm_route *route = &ws->pool[panel->start + c];
        out[c] = ws->windows[route->rank].results +
                 (route->token * ws->shape.topk + route->slot) * ws->results_stride + row;
    }
    const mm_finish finish = {
        .sums = sums,
        .tokens = panel->tokens,
        .rows = (int32_t)mm_min(MM_TILE_ROWS, ws->shape.hidden - row),
        .sum_scale = sum_scale(work),
        .global = weights->global[MEGAMOE_DOWN],
        .exponents = weights->fc2_exponents + row,
        .bias = weights->fc2_bias ? weights->fc2_bias + row : NULL,
        .route_weight = ws->route_weight + panel->start,
        .weight_after = layer->weight_after_fc2,
        .out = out,
    };
    ws->device->kernels->finish(&finish);
}

static void run_fc2_task(const struct work *work, const struct sweep *sweep, const mm_task *task,
                         struct mm_scratch *scratch) {
    const mm_cpu_workspace *ws = work->ws;
    const uint8_t *weights = work->layer->experts[task->expert].fc2;
    const int32_t step = units_at_once(ws, task, MM_FC2_UNIT_TILES);
    for (int32_t unit = task->first; unit < task->first + task->count; unit += step) {
        const int32_t units = (int32_t)mm_min(step, task->first + task->count - unit);
        const int32_t first = unit * MM_FC2_UNIT_TILES;
        const int32_t tiles =
            (int32_t)mm_min(units * MM_FC2_UNIT_TILES, work->layer->layout.fc2_tiles - first);
        for (int32_t p = ws->panel_starts[task->expert]; p < ws->panel_starts[task->expert + 1];
             p++) {
            const mm_panel *panel = &ws->panels[p];
            multiply(work, sweep, weights, panel, first, tiles, scratch);
            for (int32_t i = 0; i < tiles; i++)
                finish_tile(work, panel, first + i, sums_of(scratch, panel, i));
        }
    }
}

static void run_fc2(void *argument, int32_t thread, int32_t threads) {
    const struct work *work = argument;
    const mm_cpu_workspace *ws = work->ws;
    const mm_cpu_layout *layout = &work->layer->layout;
    const struct sweep sweep = {layout->fc2_tile_bytes, layout->intermediate_k, ws->fc2_panels,
                                ws->fc2_chunk_scale};
    int32_t task;
    while ((task = mm_ranges_take(ws->ranges, thread, threads)) >= 0) {
        const int64_t begin = mm_cpu_trace_now(ws);
        run_fc2_task(work, &sweep, &ws->tasks[task], &ws->scratch[thread]);
        mm_cpu_trace_add(ws, thread, begin, MEGAMOE_SPAN_FC2, &ws->tasks[task]);
    }
}

/* ---- compute, combine ---- */

static void run_tasks(struct work *work, mm_pool_fn fn, int32_t tasks) {
    mm_pool *pool = work->ws->device->pool;
    mm_ranges_set(work->ws->ranges, mm_pool_threads(pool), tasks);
    mm_pool_run(pool, fn, work);
}

void mm_cpu_compute(mm_cpu_workspace *ws, const mm_cpu_layer *layer) {
    struct work work = {.ws = ws, .layer = layer};
    const mm_cpu_layout *layout = &layer->layout;
    gather_routes(ws, layer);
    if (ws->trace)
        mm_cpu_trace_add(ws, 0, ws->trace->begun_ns, MEGAMOE_SPAN_COUNT, NULL);
    if (ws->received) {
        run_tasks(&work, run_dispatch, ws->n_panels);
        run_tasks(&work, run_fc1, list_tasks(ws, mm_fc1_units(layout->fc1_tiles)));
        run_tasks(&work, run_fc2, list_tasks(ws, mm_fc2_units(layout->fc2_tiles)));
    }
    atomic_store_explicit(&ws->own->words->finished, ws->epoch, memory_order_release);
}

static void run_combine(void *argument, int32_t thread, int32_t threads) {
    const struct work *work = argument;
    mm_cpu_workspace *ws = work->ws;
    const int32_t topk = ws->shape.topk;
    const int64_t begin = mm_cpu_trace_now(ws);
    int32_t t;
    while ((t = mm_ranges_take(ws->ranges, thread, threads)) >= 0) {
        const uint16_t *routes[MM_MAX_TOPK];
        int32_t n = 0;
        for (int32_t slot = 0; slot < topk; slot++)
            if (ws->own->ids[(int64_t)t * topk + slot] >= 0)
                routes[n++] = ws->own->results + ((int64_t)t * topk + slot) * ws->results_stride;
        ws->device->kernels->combine(routes, n, ws->shape.hidden,
                                     mm_view_row(work->y, t, ws->shape.hidden));
    }
    mm_cpu_trace_add(ws, thread, begin, MEGAMOE_SPAN_COMBINE, NULL);
}

void mm_cpu_combine(mm_cpu_workspace *ws, const megamoe_view *y) {
    struct work work = {.ws = ws, .y = y};
    run_tasks(&work, run_combine, (int32_t)ws->tokens);
}
