/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/buffers.h"

#include "base/memory.h"
#include "weights/cuda_layout.h"

enum {
    ALIGNMENT = 1024,  /* of every buffer */
    TILE_MIN = 8,      /* tokens of the narrowest tile */
    VIEW_MULTIPLE = 16 /* bytes: rows are read in pieces of 16 */
};

/* Appends a buffer that ends at *end, counts it to a part and returns its offset, 0 if empty. */
static uint64_t append(mm_cuda_buffers *buffers, uint64_t *end, int32_t part, int64_t elements,
                       size_t element_bytes) {
    if (!elements)
        return 0;
    const uint64_t offset = *end;
    const uint64_t bytes = mm_round_up((uint64_t)elements * element_bytes, ALIGNMENT);
    *end += bytes;
    buffers->parts[part].bytes += bytes;
    return offset;
}

static void place_window(mm_cuda_buffers *b, const megamoe_shape *shape,
                         const megamoe_capacity *capacity, int32_t ranks) {
    const int64_t routes = capacity->tokens * shape->topk;
    const int64_t scales = b->rows * b->hidden_chunks;
    mm_cuda_window *w = &b->window;
    uint64_t end = 0;
    w->cells = append(b, &end, MM_CUDA_PART_WORDS, 2 * (int64_t)ranks, sizeof(mm_cuda_cell));
    w->counts = append(b, &end, MM_CUDA_PART_WORDS, 2 * (int64_t)ranks * shape->physical_experts,
                       sizeof(int32_t));
    w->arrivals =
        append(b, &end, MM_CUDA_PART_WORDS, (int64_t)b->local_max * ranks, sizeof(uint32_t));
    w->aborted = append(b, &end, MM_CUDA_PART_WORDS, 1, sizeof(uint32_t));
    w->returned = append(b, &end, MM_CUDA_PART_WORDS, routes, sizeof(uint32_t));
    w->codes = append(b, &end, MM_CUDA_PART_FC1_POOL, scales, MM_CUDA_CHUNK_K);
    w->scales = append(b, &end, MM_CUDA_PART_FC1_POOL,
                       shape->input_scale == MEGAMOE_SCALE_TOKEN ? 0 : scales,
                       shape->input_scale == MEGAMOE_SCALE_BLOCK_F32 ? sizeof(float) : 1);
    w->records = append(b, &end, MM_CUDA_PART_FC1_POOL, b->rows, sizeof(mm_cuda_record));
    w->results =
        append(b, &end, MM_CUDA_PART_RESULTS, routes * b->results_stride, sizeof(uint16_t));
    w->bytes = end;
}

static void place_local(mm_cuda_buffers *b, const megamoe_shape *shape,
                        const megamoe_capacity *capacity, int32_t ranks) {
    const int64_t tokens = capacity->tokens, routes = tokens * shape->topk;
    const int64_t chunks = tokens * b->hidden_chunks;
    const bool by_token = shape->input_scale == MEGAMOE_SCALE_TOKEN;
    const bool by_block = shape->input_scale == MEGAMOE_SCALE_BLOCK;
    const bool by_float = shape->input_scale == MEGAMOE_SCALE_BLOCK_F32;
    mm_cuda_local *l = &b->local;
    uint64_t end = 0;
    l->state = append(b, &end, MM_CUDA_PART_WORDS, 1, sizeof(mm_cuda_state));
    l->windows = append(b, &end, MM_CUDA_PART_WORDS, ranks, sizeof(uint8_t *));
    l->staged_codes = append(b, &end, MM_CUDA_PART_BATCH, chunks, MM_CUDA_CHUNK_K);
    l->staged_scales = append(b, &end, MM_CUDA_PART_BATCH, by_token ? tokens : 0, sizeof(float));
    l->staged_tiny = append(b, &end, MM_CUDA_PART_BATCH, tokens, sizeof(uint8_t));
    l->staged_blocks = append(b, &end, MM_CUDA_PART_BATCH, by_block ? chunks : 0, sizeof(uint8_t));
    l->staged_block_scales =
        append(b, &end, MM_CUDA_PART_BATCH, by_float ? chunks : 0, sizeof(float));
    l->staged_ids = append(b, &end, MM_CUDA_PART_BATCH, routes, sizeof(int32_t));
    l->staged_weights = append(b, &end, MM_CUDA_PART_BATCH, routes, sizeof(float));
    l->view_codes = append(b, &end, MM_CUDA_PART_VIEWS, tokens * b->view_stride, 1);
    l->order = append(b, &end, MM_CUDA_PART_DISPATCH, routes, 4 * sizeof(int32_t));
    l->dispatched =
        append(b, &end, MM_CUDA_PART_WORDS, 2 * (int64_t)shape->physical_experts, sizeof(uint32_t));
    l->fc1_done = append(b, &end, MM_CUDA_PART_WORDS, 2 * b->units, sizeof(uint32_t));
    l->fc2_done = append(b, &end, MM_CUDA_PART_WORDS, 2 * b->units, sizeof(uint32_t));
    l->received = append(b, &end, MM_CUDA_PART_WORDS, b->local_max, sizeof(int32_t));
    l->times =
        append(b, &end, MM_CUDA_PART_WORDS, MM_CUDA_BLOCKS_MAX * MM_CUDA_TIMES, sizeof(uint64_t));
    l->hidden_codes =
        append(b, &end, MM_CUDA_PART_FC2_POOL, b->rows * b->intermediate_chunks, MM_CUDA_CHUNK_K);
    l->hidden_scales =
        append(b, &end, MM_CUDA_PART_FC2_POOL, b->rows * b->intermediate_chunks, sizeof(uint8_t));
    const int64_t blocks = capacity->trace ? MM_CUDA_BLOCKS_MAX : 0;
    l->traced_blocks = append(b, &end, MM_CUDA_PART_TRACE, blocks, sizeof(mm_cuda_traced_block));
    l->traced_tiles =
        append(b, &end, MM_CUDA_PART_TRACE, blocks * MM_CUDA_TRACED_TEAMS * capacity->trace,
               sizeof(mm_cuda_traced_tile));
    l->bytes = end;
}

mm_cuda_buffers mm_cuda_buffers_of(const megamoe_shape *shape, const megamoe_capacity *capacity,
                                   int32_t ranks) {
    mm_cuda_buffers buffers = {
        .hidden_chunks = (int32_t)mm_ceil_div(shape->hidden, MM_CUDA_CHUNK_K),
        .intermediate_chunks = (int32_t)mm_ceil_div(shape->intermediate, MM_CUDA_CHUNK_K),
        .local_max = (int32_t)mm_ceil_div(shape->physical_experts, ranks),
        .results_stride = (int64_t)mm_round_up((size_t)shape->hidden, MM_CUDA_TILE_ROWS),
        .view_stride = (int64_t)mm_round_up((size_t)shape->hidden, VIEW_MULTIPLE),
        .parts =
            {
#define X(name, text) [MM_CUDA_PART_##name] = {.what = (text)},
                MM_CUDA_PARTS(X)
#undef X
            },
    };
    /* Each expert may leave a gap before the next one's rows; a wide tile may look beyond the last.
     */
    buffers.rows = (int64_t)mm_round_up((size_t)capacity->pool_rows, MM_CUDA_ROW_MULTIPLE) +
                   (int64_t)MM_CUDA_ROW_MULTIPLE * buffers.local_max + MM_CUDA_ROWS_BEYOND;
    /* Each expert may end in a tile that is not full. */
    buffers.units = capacity->pool_rows / TILE_MIN + buffers.local_max + 1;
    place_window(&buffers, shape, capacity, ranks);
    place_local(&buffers, shape, capacity, ranks);
    return buffers;
}
