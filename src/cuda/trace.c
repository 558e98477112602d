/* SPDX-License-Identifier: Apache-2.0 */
/* The spans of a traced forward, from the stamps of its thread blocks. */
#include <stdlib.h>

#include "base/error.h"
#include "cuda/workspace.h"

#define NS_PER_US 1e3

/* What a forward has left on the device. */
typedef struct records {
    uint64_t *times;              /* [blocks][MM_CUDA_TIMES] */
    mm_cuda_traced_block *blocks; /* [blocks] */
    mm_cuda_traced_tile *tiles;   /* [blocks][MM_CUDA_TRACED_TEAMS][room] */
} records;

static megamoe_status copy(void *to, CUdeviceptr from, size_t bytes) {
    MM_CUDA_TRY(mm_cu.cuMemcpyDtoH(to, from, bytes), "trace: copying from the GPU");
    return MEGAMOE_OK;
}

static megamoe_status read_current(const mm_cuda_workspace *ws, const records *r) {
    const mm_cuda_local *l = &ws->buffers.local;
    const size_t blocks = (size_t)ws->blocks;
    const size_t tiles = blocks * MM_CUDA_TRACED_TEAMS * (size_t)ws->capacity.trace;
    MM_CUDA_TRY(mm_cu.cuCtxSynchronize(), "trace: waiting for the GPU");
    MM_TRY(copy(r->times, ws->local + l->times, blocks * MM_CUDA_TIMES * sizeof *r->times));
    MM_TRY(copy(r->blocks, ws->local + l->traced_blocks, blocks * sizeof *r->blocks));
    return copy(r->tiles, ws->local + l->traced_tiles, tiles * sizeof *r->tiles);
}

/* Where spans go, and from when they count. */
typedef struct sink {
    megamoe_span *spans;
    int64_t n, count;
    uint64_t begun;
} sink;

/* `span` has everything but its times. What did not happen, as after an error, is left out. */
static void add(sink *s, megamoe_span span, uint64_t begin, uint64_t end) {
    if (begin < s->begun || end < begin)
        return;
    span.begin_us = (double)(begin - s->begun) / NS_PER_US;
    span.end_us = (double)(end - s->begun) / NS_PER_US;
    if (s->count < s->n)
        s->spans[s->count] = span;
    s->count++;
}

static uint64_t sooner(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static uint64_t later(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

static void add_tiles(sink *s, const mm_cuda_traced_tile *tiles, int64_t n, megamoe_span span) {
    uint64_t loaded = 0, finished = 0;
    for (int64_t i = 0; i < n; i++) {
        const mm_cuda_traced_tile *tile = &tiles[i];
        const uint64_t *at = tile->stamps;
        /* A tile ends with its last warp: the first may have been at the next one by then. */
        const uint64_t first = later(at[MM_CUDA_STAMP_FIRST], finished);
        const uint64_t multiplied = later(at[MM_CUDA_STAMP_MULTIPLIED], first);
        finished = later(at[MM_CUDA_STAMP_FINISHED], multiplied);
        span.phase = tile->second ? MEGAMOE_SPAN_FC2 : MEGAMOE_SPAN_FC1;
        span.expert = tile->expert;
        span.tile = tile->tile;
        span.tokens = tile->tokens;
        const struct {
            megamoe_span_part part;
            megamoe_span_lane lane;
            uint64_t begin, end;
        } parts[] = {
            /* The next tile is claimed while this one still loads. */
            {MEGAMOE_PART_WAIT, MEGAMOE_LANE_LOAD, later(at[MM_CUDA_STAMP_CLAIMED], loaded),
             at[MM_CUDA_STAMP_READY]},
            {MEGAMOE_PART_LOAD, MEGAMOE_LANE_LOAD, at[MM_CUDA_STAMP_READY],
             at[MM_CUDA_STAMP_LOADED]},
            {MEGAMOE_PART_WHOLE, MEGAMOE_LANE_MULTIPLY, first, finished},
            {MEGAMOE_PART_MULTIPLY, MEGAMOE_LANE_MULTIPLY, first, multiplied},
            {MEGAMOE_PART_FINISH, MEGAMOE_LANE_MULTIPLY, multiplied, finished},
            {MEGAMOE_PART_STORE, MEGAMOE_LANE_STORE, finished, at[MM_CUDA_STAMP_STORED]},
        };
        for (size_t k = 0; k < sizeof parts / sizeof *parts; k++) {
            span.part = parts[k].part;
            span.lane = parts[k].lane;
            add(s, span, parts[k].begin, parts[k].end);
        }
        loaded = at[MM_CUDA_STAMP_LOADED];
    }
}

static void add_block(sink *s, const records *r, int32_t block, int64_t room, int64_t *dropped) {
    const uint64_t *times = r->times + (size_t)block * MM_CUDA_TIMES;
    const mm_cuda_traced_block *traced = &r->blocks[block];
    megamoe_span span = {.part = MEGAMOE_PART_WHOLE,
                         .lane = MEGAMOE_LANE_WORKER,
                         .worker = (int32_t)traced->multiprocessor,
                         .team = -1,
                         .expert = -1,
                         .tile = -1,
                         .tokens = -1};
    span.phase = MEGAMOE_SPAN_COUNT;
    add(s, span, times[MM_CUDA_TIME_ENTRY], times[MM_CUDA_TIME_BEGUN]);
    span.phase = MEGAMOE_SPAN_COMBINE;
    add(s, span, traced->stamps[MM_CUDA_STAMP_COMBINING], times[MM_CUDA_TIME_COMBINED]);
    span.phase = MEGAMOE_SPAN_DISPATCH;
    span.lane = MEGAMOE_LANE_DISPATCH;
    add(s, span, times[MM_CUDA_TIME_BEGUN],
        later(traced->stamps[MM_CUDA_STAMP_DISPATCHED],
              traced->stamps[MM_CUDA_STAMP_DISPATCHED_LAST]));
    for (int32_t team = 0; team < MM_CUDA_TRACED_TEAMS; team++) {
        const int64_t claimed = traced->tiles[team], kept = mm_min(claimed, room);
        *dropped += claimed - kept;
        span.team = team;
        add_tiles(s, r->tiles + ((int64_t)block * MM_CUDA_TRACED_TEAMS + team) * room, kept, span);
    }
}

megamoe_status mm_cuda_workspace_trace(const mm_cuda_workspace *workspace, megamoe_span *spans,
                                       int64_t n, int64_t *count, int64_t *dropped) {
    const mm_cuda_workspace *ws = workspace;
    const size_t blocks = (size_t)ws->blocks, room = (size_t)ws->capacity.trace;
    *count = *dropped = 0;
    if (!blocks)
        return mm_fail(MEGAMOE_ESTATE, "trace: there was no forward yet");
    records r = {.times = mm_alloc(blocks * MM_CUDA_TIMES * sizeof *r.times),
                 .blocks = mm_alloc(blocks * sizeof *r.blocks),
                 .tiles = mm_alloc(blocks * MM_CUDA_TRACED_TEAMS * room * sizeof *r.tiles)};
    CUcontext previous;
    megamoe_status status = r.times && r.blocks && r.tiles
                                ? mm_cuda_enter(ws->device, &previous)
                                : mm_fail(MEGAMOE_ENOMEM, "trace: out of memory");
    if (status == MEGAMOE_OK) {
        status = read_current(ws, &r);
        mm_cuda_leave(previous);
    }
    if (status == MEGAMOE_OK) {
        sink s = {.spans = spans, .n = n, .begun = UINT64_MAX};
        for (size_t i = 0; i < blocks; i++)
            s.begun = sooner(s.begun, r.times[i * MM_CUDA_TIMES + MM_CUDA_TIME_ENTRY]);
        for (size_t i = 0; i < blocks; i++)
            add_block(&s, &r, (int32_t)i, ws->capacity.trace, dropped);
        *count = s.count;
    }
    free(r.times);
    free(r.blocks);
    free(r.tiles);
    return status;
}
