/* SPDX-License-Identifier: Apache-2.0 */
/* Spans from the stamps of thread blocks, on a GPU that is host memory. */
#include "cuda/workspace.h"
#include "fake.h"
#include "t.h"

enum { ROOM = 3, SPANS_MAX = 64 };

static const megamoe_shape shape = {
    .hidden = 256, .intermediate = 128, .experts = 4, .topk = 2, .physical_experts = 4};

static megamoe_span spans[SPANS_MAX];

typedef struct fixture {
    mm_cuda_device device;
    megamoe_comm *comm;
    mm_cuda_workspace *ws;
} fixture;

static void open_all(fixture *f, int64_t room, int32_t blocks) {
    const megamoe_capacity capacity = {.tokens = 8, .pool_rows = 32, .trace = room};
    f->device = fake_open(0);
    T_OK(megamoe_comm_self(&f->comm));
    T_OK(mm_cuda_workspace_open(&shape, &capacity, f->comm, &f->device, &f->ws));
    f->ws->blocks = blocks;
}

static void close_all(fixture *f) {
    mm_cuda_workspace_close(f->ws);
    megamoe_comm_close(f->comm);
    T_EQ_INT(fake.allocations, 0);
    T_EQ_INT(fake.entered, 0);
}

static uint64_t *times_of(const fixture *f, int32_t block) {
    uint64_t *times = fake_memory(f->ws->local + f->ws->buffers.local.times);
    return times + (size_t)block * MM_CUDA_TIMES;
}

static mm_cuda_traced_block *block_of(const fixture *f, int32_t block) {
    mm_cuda_traced_block *blocks = fake_memory(f->ws->local + f->ws->buffers.local.traced_blocks);
    return blocks + block;
}

static mm_cuda_traced_tile *tiles_of(const fixture *f, int32_t block, int32_t team) {
    mm_cuda_traced_tile *tiles = fake_memory(f->ws->local + f->ws->buffers.local.traced_tiles);
    return tiles + ((size_t)block * MM_CUDA_TRACED_TEAMS + (size_t)team) * ROOM;
}

/* The span of that place, of which there is one. */
static const megamoe_span *find(int64_t n, int32_t worker, int32_t team, megamoe_span_phase phase,
                                megamoe_span_part part) {
    const megamoe_span *found = NULL;
    for (int64_t i = 0; i < n; i++)
        if (spans[i].worker == worker && spans[i].team == team && spans[i].phase == phase &&
            spans[i].part == part) {
            T_CHECK(!found);
            found = &spans[i];
        }
    T_REQUIRE(found);
    return found;
}

static void check(const megamoe_span *s, double begin, double end, megamoe_span_lane lane) {
    T_EQ_F64(s->begin_us, begin);
    T_EQ_F64(s->end_us, end);
    T_EQ_INT(s->lane, lane);
}

T_CASE(stamps_become_spans) {
    static fixture f;
    open_all(&f, ROOM, 2);
    for (int32_t block = 0; block < 2; block++) {
        uint64_t *t = times_of(&f, block);
        t[MM_CUDA_TIME_ENTRY] = 100000 + 1000 * (uint64_t)block;
        t[MM_CUDA_TIME_BEGUN] = 103000;
        t[MM_CUDA_TIME_COMBINED] = 150000;
        *block_of(&f, block) = (mm_cuda_traced_block){
            .stamps = {104000, block ? 105000 : 0, 140000},
            .multiprocessor = 70 - (uint32_t)block,
            .tiles = {block ? 2 : 0, 0},
        };
    }
    mm_cuda_traced_tile *tiles = tiles_of(&f, 1, 0);
    tiles[0] =
        (mm_cuda_traced_tile){{103000, 106000, 109000, 107000, 112000, 115000, 116000}, 0, 2, 5, 7};
    /* Its first warp was at the second tile before the last had left the first. */
    tiles[1] =
        (mm_cuda_traced_tile){{109500, 110000, 111000, 114000, 120000, 123000, 125000}, 1, 3, 6, 8};
    int64_t n, dropped;
    T_OK(mm_cuda_workspace_trace(f.ws, spans, SPANS_MAX, &n, &dropped));
    T_EQ_INT(n, 2 * 3 + 2 * 6);
    T_EQ_INT(dropped, 0);
    check(find(n, 70, -1, MEGAMOE_SPAN_COUNT, MEGAMOE_PART_WHOLE), 0, 3, MEGAMOE_LANE_WORKER);
    check(find(n, 69, -1, MEGAMOE_SPAN_COUNT, MEGAMOE_PART_WHOLE), 1, 3, MEGAMOE_LANE_WORKER);
    check(find(n, 70, -1, MEGAMOE_SPAN_DISPATCH, MEGAMOE_PART_WHOLE), 3, 4, MEGAMOE_LANE_DISPATCH);
    check(find(n, 69, -1, MEGAMOE_SPAN_DISPATCH, MEGAMOE_PART_WHOLE), 3, 5, MEGAMOE_LANE_DISPATCH);
    check(find(n, 69, -1, MEGAMOE_SPAN_COMBINE, MEGAMOE_PART_WHOLE), 40, 50, MEGAMOE_LANE_WORKER);
    const megamoe_span *whole = find(n, 69, 0, MEGAMOE_SPAN_FC1, MEGAMOE_PART_WHOLE);
    check(whole, 7, 15, MEGAMOE_LANE_MULTIPLY);
    T_EQ_INT(whole->expert, 2);
    T_EQ_INT(whole->tile, 5);
    T_EQ_INT(whole->tokens, 7);
    check(find(n, 69, 0, MEGAMOE_SPAN_FC1, MEGAMOE_PART_WAIT), 3, 6, MEGAMOE_LANE_LOAD);
    check(find(n, 69, 0, MEGAMOE_SPAN_FC1, MEGAMOE_PART_LOAD), 6, 9, MEGAMOE_LANE_LOAD);
    check(find(n, 69, 0, MEGAMOE_SPAN_FC1, MEGAMOE_PART_MULTIPLY), 7, 12, MEGAMOE_LANE_MULTIPLY);
    check(find(n, 69, 0, MEGAMOE_SPAN_FC1, MEGAMOE_PART_FINISH), 12, 15, MEGAMOE_LANE_MULTIPLY);
    check(find(n, 69, 0, MEGAMOE_SPAN_FC1, MEGAMOE_PART_STORE), 15, 16, MEGAMOE_LANE_STORE);
    check(find(n, 69, 0, MEGAMOE_SPAN_FC2, MEGAMOE_PART_WHOLE), 15, 23, MEGAMOE_LANE_MULTIPLY);
    check(find(n, 69, 0, MEGAMOE_SPAN_FC2, MEGAMOE_PART_MULTIPLY), 15, 20, MEGAMOE_LANE_MULTIPLY);
    close_all(&f);
}

T_CASE(tiles_without_room_are_counted) {
    static fixture f;
    open_all(&f, ROOM, 1);
    times_of(&f, 0)[MM_CUDA_TIME_ENTRY] = 5000;
    *block_of(&f, 0) = (mm_cuda_traced_block){.tiles = {ROOM + 4, ROOM + 1}};
    int64_t n, dropped;
    T_OK(mm_cuda_workspace_trace(f.ws, spans, SPANS_MAX, &n, &dropped));
    T_EQ_INT(dropped, 5);
    /* What was not reached, as after an error, is no span. */
    T_EQ_INT(n, 0);
    close_all(&f);
}

T_CASE(before_the_first_forward) {
    static fixture f;
    open_all(&f, ROOM, 0);
    int64_t n, dropped;
    T_STATUS(mm_cuda_workspace_trace(f.ws, spans, SPANS_MAX, &n, &dropped), MEGAMOE_ESTATE);
    close_all(&f);
}

T_CASE(a_workspace_without_a_trace_has_no_memory_for_it) {
    static fixture f;
    open_all(&f, 0, 0);
    T_EQ_INT(f.ws->buffers.local.traced_tiles, 0);
    const char *what;
    uint64_t bytes;
    T_CHECK(mm_cuda_workspace_part(f.ws, MM_CUDA_PART_TRACE - 1, &what, &bytes));
    T_CHECK(!mm_cuda_workspace_part(f.ws, MM_CUDA_PART_TRACE, &what, &bytes));
    close_all(&f);
    open_all(&f, 1, 0);
    T_CHECK(mm_cuda_workspace_part(f.ws, MM_CUDA_PART_TRACE, &what, &bytes));
    T_CHECK(bytes >= 2 * MM_CUDA_BLOCKS_MAX * sizeof(mm_cuda_traced_tile));
    close_all(&f);
}
