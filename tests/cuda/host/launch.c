/* SPDX-License-Identifier: Apache-2.0 */
/* What is allocated and launched, on a GPU that is host memory. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/cubins.h"
#include "cuda/tile_costs.h"
#include "cuda/workspace.h"
#include "fake.h"
#include "plan/plan.h"
#include "t.h"

enum { HIDDEN = 300, INTERMEDIATE = 260, EXPERTS = 12, TOPK = 3, TOKENS = 40, RANKS_MAX = 8 };

/* Ranks of one communicator on one GPU. */
typedef struct fixture {
    mm_cuda_device device;
    int32_t ranks;
    megamoe_comm *comms[RANKS_MAX];
    mm_placement placements[RANKS_MAX];
    mm_cuda_layer layers[RANKS_MAX];
    mm_cuda_workspace *workspaces[RANKS_MAX];
    mm_cuda_call calls[RANKS_MAX];
    megamoe_view y;
} fixture;

static const megamoe_shape shape = {.hidden = HIDDEN,
                                    .intermediate = INTERMEDIATE,
                                    .experts = EXPERTS,
                                    .topk = TOPK,
                                    .physical_experts = EXPERTS};
static const megamoe_capacity capacity = {
    .tokens = TOKENS, .pool_rows = 2 * TOKENS * TOPK, .deadline_ms = 1500};
static uint16_t y_data[TOKENS * HIDDEN];

static void open_layer(fixture *f, int32_t rank, megamoe_format format, const int32_t *map) {
    mm_cuda_layer *layer = &f->layers[rank];
    T_OK(mm_placement_open(EXPERTS, EXPERTS, map, rank, f->ranks, &f->placements[rank]));
    layer->desc = (megamoe_layer_desc){.hidden = HIDDEN,
                                       .intermediate = INTERMEDIATE,
                                       .experts = EXPERTS,
                                       .topk = TOPK,
                                       .format = format};
    layer->layout = mm_cuda_layout_of(&layer->desc, MEGAMOE_NVFP4_EXACT);
    layer->placement = &f->placements[rank];
    layer->device = &f->device;
    layer->key = 99;
    T_OK(mm_cuda_layer_open(layer));
}

/* Brings the workspaces of all ranks together. */
static megamoe_status meet(mm_cuda_workspace *workspace, megamoe_comm *comm,
                           mm_cuda_workspace *const *all, int32_t ranks) {
    mm_cuda_card cards[MM_CUDA_FOLDED_MAX];
    for (int32_t r = 0; r < ranks; r++)
        cards[r] = mm_cuda_workspace_card(all[r]);
    return mm_cuda_workspace_meet(workspace, comm, cards);
}

/* In place: layers and workspaces point into the fixture. */
static void open_all(fixture *f, int32_t ranks, megamoe_format format,
                     megamoe_input_scale input_scale) {
    *f = (fixture){.device = fake_open(0), .ranks = ranks};
    f->y = (megamoe_view){y_data, MEGAMOE_DTYPE_BF16, TOKENS, HIDDEN};
    megamoe_shape scaled = shape;
    scaled.input_scale = input_scale;
    T_OK(megamoe_comm_folded(ranks, f->comms));
    for (int32_t r = 0; r < ranks; r++) {
        open_layer(f, r, format, NULL);
        T_OK(
            mm_cuda_workspace_open(&scaled, &capacity, f->comms[r], &f->device, &f->workspaces[r]));
        f->calls[r] = (mm_cuda_call){&f->layers[r], f->workspaces[r], &f->y};
    }
    for (int32_t r = 0; r < ranks; r++)
        T_OK(meet(f->workspaces[r], f->comms[r], f->workspaces, ranks));
}

static void close_all(fixture *f) {
    for (int32_t r = 0; r < f->ranks; r++) {
        mm_cuda_workspace_close(f->workspaces[r]);
        mm_cuda_layer_close(&f->layers[r]);
        mm_placement_close(&f->placements[r]);
        megamoe_comm_close(f->comms[r]);
    }
    T_EQ_INT(fake.allocations, 0);
    T_EQ_INT(fake.entered, 0);
}

/* ---- memory ---- */

static const megamoe_plan chosen; /* for each batch */

T_CASE(a_layer_holds_experts_and_tables) {
    static fixture f;
    f = (fixture){.device = fake_open(0), .ranks = 2};
    open_layer(&f, 1, MEGAMOE_FORMAT_MXFP4, NULL);
    mm_cuda_layer *layer = &f.layers[1];
    uint8_t table[MM_CUDA_DECODE_TABLE_BYTES];
    const size_t bytes = mm_cuda_decode_table(MM_CUDA_MXFP4, table);
    T_EQ_MEM(fake_memory(layer->decode_table), table, bytes);
    T_EQ_INT(layer->replica_starts, 0);
    T_EQ_INT(layer->replicas, 0);
    const size_t blob_bytes = layer->layout.blob_bytes;
    uint8_t *blob = malloc(blob_bytes);
    T_REQUIRE(blob);
    for (int32_t e = 0; e < 6; e++) {
        memset(blob, e, blob_bytes);
        T_OK(mm_cuda_layer_upload(layer, e, blob));
    }
    const uint8_t *blobs = fake_memory(layer->blobs);
    for (size_t e = 0; e < 6; e++) {
        T_EQ_INT(blobs[e * blob_bytes], e);
        T_EQ_INT(blobs[(e + 1) * blob_bytes - 1], e);
    }
    free(blob);
    mm_cuda_layer_close(layer);
    mm_cuda_layer_close(layer);
    mm_placement_close(&f.placements[1]);
    T_EQ_INT(fake.allocations, 0);
}

T_CASE(a_layer_with_a_map_uploads_it) {
    static const int32_t map[EXPERTS] = {11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0};
    static fixture f;
    f = (fixture){.device = fake_open(0), .ranks = 1};
    open_layer(&f, 0, MEGAMOE_FORMAT_MXFP4, map);
    const mm_placement *p = &f.placements[0];
    T_EQ_MEM(fake_memory(f.layers[0].replica_starts), p->starts, (EXPERTS + 1) * sizeof(int32_t));
    T_EQ_MEM(fake_memory(f.layers[0].replicas), p->replicas, EXPERTS * sizeof(int32_t));
    close_all(&f);
}

T_CASE(a_layer_without_experts_opens) {
    static fixture f;
    f = (fixture){.device = fake_open(0), .ranks = 1};
    T_OK(mm_placement_open(1, 1, NULL, 1, 2, &f.placements[0]));
    f.layers[0].desc = (megamoe_layer_desc){
        .hidden = 1, .intermediate = 1, .experts = 1, .format = MEGAMOE_FORMAT_NVFP4};
    f.layers[0].layout = mm_cuda_layout_of(&f.layers[0].desc, MEGAMOE_NVFP4_FOLDED);
    f.layers[0].placement = &f.placements[0];
    f.layers[0].device = &f.device;
    T_OK(mm_cuda_layer_open(&f.layers[0]));
    T_EQ_INT(f.layers[0].blobs, 0);
    close_all(&f);
}

T_CASE(memory_that_runs_out_is_given_back) {
    static const int32_t map[EXPERTS] = {1, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
    static fixture f;
    f = (fixture){.device = fake_open(0), .ranks = 1};
    open_layer(&f, 0, MEGAMOE_FORMAT_MXFP4, map);
    const int32_t of_layer = fake.allocations;
    mm_cuda_layer_close(&f.layers[0]);
    for (int32_t k = 0; k < of_layer; k++) {
        fake.allocations_left = k;
        T_STATUS(mm_cuda_layer_open(&f.layers[0]), MEGAMOE_ENOMEM);
        mm_cuda_layer_close(&f.layers[0]);
        T_EQ_INT(fake.allocations, 0);
    }
    mm_cuda_workspace *ws = NULL;
    for (int32_t ranks = 1; ranks <= 2; ranks++) {
        const int32_t needed = ranks == 1 ? 3 : 4; /* several ranks: pages and where they are */
        megamoe_comm *comms[2];
        T_OK(megamoe_comm_folded(ranks, comms));
        for (int32_t k = 0; k < needed; k++) {
            fake.allocations_left = k;
            T_STATUS(mm_cuda_workspace_open(&shape, &capacity, comms[0], &f.device, &ws),
                     MEGAMOE_ENOMEM);
            T_CHECK(!ws);
            T_EQ_INT(fake.allocations, 0);
        }
        T_CONTAINS(megamoe_last_error(), "CUDA_ERROR_OUT_OF_MEMORY");
        fake.allocations_left = needed;
        T_OK(mm_cuda_workspace_open(&shape, &capacity, comms[0], &f.device, &ws));
        mm_cuda_workspace_close(ws);
        for (int32_t r = 0; r < ranks; r++)
            megamoe_comm_close(comms[r]);
    }
    close_all(&f);
}

T_CASE(a_workspace_begins_with_zeros) {
    static fixture f;
    open_all(&f, 2, MEGAMOE_FORMAT_MXFP4, MEGAMOE_SCALE_BLOCK);
    const mm_cuda_workspace *ws = f.workspaces[1];
    const uint8_t *window = fake_memory(ws->window), *local = fake_memory(ws->local);
    for (uint64_t i = 0; i < ws->buffers.window.bytes; i++)
        T_REQUIRE(window[i] == 0);
    for (uint64_t i = 0; i < ws->buffers.local.bytes; i++)
        T_REQUIRE(local[i] == 0 || i / 1024 == ws->buffers.local.windows / 1024);
    const uint64_t *windows = fake_memory(ws->local + ws->buffers.local.windows);
    for (int32_t r = 0; r < 2; r++)
        T_EQ_HEX(windows[r], f.workspaces[r]->window);
    T_EQ_INT(mm_cuda_workspace_bytes(ws), ws->buffers.window.bytes + ws->buffers.local.bytes);
    T_EQ_INT(mm_cuda_workspace_epoch(ws), 0);
    const char *what;
    uint64_t sum = 0, bytes;
    for (int32_t i = 0; mm_cuda_workspace_part(ws, i, &what, &bytes); i++)
        sum += bytes;
    T_EQ_INT(sum, mm_cuda_workspace_bytes(ws));
    T_CHECK(!mm_cuda_workspace_part(ws, MM_CUDA_PART_COUNT, &what, &bytes));
    T_CHECK(!mm_cuda_workspace_part(ws, -1, &what, &bytes));
    close_all(&f);
}

T_CASE(ranks_are_limited) {
    mm_cuda_device device = fake_open(0);
    mm_cuda_workspace *ws = NULL;
    megamoe_comm *comms[65];
    T_OK(megamoe_comm_folded(65, comms));
    T_STATUS(mm_cuda_workspace_open(&shape, &capacity, comms[0], &device, &ws), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "65 ranks; expected 1..64");
    for (int32_t r = 0; r < 65; r++)
        megamoe_comm_close(comms[r]);
}

T_CASE(the_epoch_can_be_set) {
    static fixture f;
    open_all(&f, 2, MEGAMOE_FORMAT_MXFP4, MEGAMOE_SCALE_TOKEN);
    mm_cuda_workspace *ws = f.workspaces[0];
    T_OK(mm_cuda_workspace_set_epoch(ws, 0xFFFFFFF0));
    const uint8_t *window = fake_memory(ws->window);
    const mm_cuda_window *w = &ws->buffers.window;
    const mm_cuda_cell *cells = (const mm_cuda_cell *)(window + w->cells);
    for (int32_t i = 0; i < 4; i++) {
        T_EQ_HEX(cells[i].epoch, 0xFFFFFFF0);
        T_EQ_INT(cells[i].status, 0);
        T_EQ_INT(cells[i].key, 0);
    }
    const uint32_t *arrivals = (const uint32_t *)(window + w->arrivals);
    for (int32_t i = 0; i < 6 * 2; i++)
        T_EQ_HEX(arrivals[i], 0xFFFFFFF0);
    const uint32_t *returned = (const uint32_t *)(window + w->returned);
    for (int32_t i = 0; i < TOKENS * TOPK; i++)
        T_EQ_HEX(returned[i], 0xFFFFFFF0);
    const mm_cuda_state *state = fake_memory(ws->local);
    T_EQ_HEX(state->epoch, 0xFFFFFFF0);
    T_EQ_INT(state->left, 0);
    T_EQ_INT(mm_cuda_workspace_epoch(ws), 0xFFFFFFF0);
    megamoe_workspace_detail detail;
    T_CHECK(!mm_cuda_workspace_found(ws, "", &detail));
    close_all(&f);
}

T_CASE(counts_are_read_back) {
    static fixture f;
    open_all(&f, 5, MEGAMOE_FORMAT_MXFP4, MEGAMOE_SCALE_TOKEN);
    for (int32_t r = 0; r < 5; r++) {
        mm_cuda_workspace *ws = f.workspaces[r];
        int32_t *received = fake_memory(ws->local + ws->buffers.local.received);
        for (int32_t e = 0; e < 3; e++)
            received[e] = 10 * r + e;
        int64_t counts[3] = {-1, -1, -1};
        T_OK(mm_cuda_workspace_receive_counts(ws, counts));
        T_EQ_INT(counts[0], 10 * r);
        T_EQ_INT(counts[1], 10 * r + 1);
        T_EQ_INT(counts[2], r < 2 ? 10 * r + 2 : -1); /* 12 = 3 + 3 + 2 + 2 + 2 */
    }
    close_all(&f);
}

/* ---- staging ---- */

static void check_staged(const mm_cuda_staged *staged, const mm_cuda_workspace *ws) {
    const mm_cuda_local *l = &ws->buffers.local;
    const uint8_t *local = fake_memory(ws->local);
    const megamoe_input_scale scale = ws->shape.input_scale;
    T_CHECK(staged->codes == local + l->staged_codes);
    T_CHECK(staged->tiny == local + l->staged_tiny);
    T_CHECK((const uint8_t *)staged->ids == local + l->staged_ids);
    T_CHECK((const uint8_t *)staged->weights == local + l->staged_weights);
    T_EQ_INT(staged->scales != NULL, scale == MEGAMOE_SCALE_TOKEN);
    T_EQ_INT(staged->blocks != NULL, scale == MEGAMOE_SCALE_BLOCK);
    T_EQ_INT(staged->block_scales != NULL, scale == MEGAMOE_SCALE_BLOCK_F32);
}

T_CASE(a_batch_is_staged) {
    static uint16_t x[TOKENS * 320], weights[TOKENS * 4];
    static int64_t ids[TOKENS * TOPK];
    const megamoe_view x_view = {x, MEGAMOE_DTYPE_BF16, TOKENS, 320};
    const megamoe_view ids_view = {ids, MEGAMOE_DTYPE_I64, TOKENS, 0};
    const megamoe_view weights_view = {weights, MEGAMOE_DTYPE_BF16, TOKENS, 4};
    static fixture f;
    open_all(&f, 1, MEGAMOE_FORMAT_MXFP4, MEGAMOE_SCALE_BLOCK);
    mm_cuda_workspace *ws = f.workspaces[0];
    mm_cuda_state *state = fake_memory(ws->local);
    T_OK(mm_cuda_stage(ws, &x_view, &ids_view, &weights_view, 17, &f));
    T_EQ_HEX(state->order, UINT64_MAX);
    T_EQ_INT(fake.launches, 1);
    T_EQ_STR(fake.last.kernel, "stage");
    const CUlaunchConfig *config = &fake.last.config;
    T_EQ_INT(config->gridDimX, 17);
    T_EQ_INT(config->blockDimX, 256);
    T_EQ_INT(config->sharedMemBytes, 0);
    T_EQ_INT(config->numAttrs, 0);
    T_CHECK((void *)config->hStream == &f);
    const mm_cuda_stage_args *args = &fake.last.stage;
    T_EQ_INT(args->tokens, 17);
    T_EQ_INT(args->hidden, HIDDEN);
    T_EQ_INT(args->chunks, 3);
    T_EQ_INT(args->topk, TOPK);
    T_EQ_INT(args->experts, EXPERTS);
    T_EQ_INT(args->input_scale, MEGAMOE_SCALE_BLOCK);
    T_CHECK(args->x == x && args->ids == ids && args->weights == weights);
    T_EQ_INT(args->x_stride, 320);
    T_EQ_INT(args->ids_stride, TOPK);
    T_EQ_INT(args->weights_stride, 4);
    T_EQ_INT(args->ids_are_64, 1);
    T_EQ_INT(args->weights_are_bf16, 1);
    T_EQ_INT(args->view_stride, 304);
    T_CHECK(args->state == state);
    check_staged(&args->staged, ws);
    T_EQ_INT(fake.functions, 1);
    T_OK(mm_cuda_stage(ws, NULL, NULL, NULL, 0, NULL));
    T_EQ_INT(fake.functions, 1);
    T_EQ_INT(fake.last.config.gridDimX, 1);
    T_EQ_INT(fake.last.stage.tokens, 0);
    T_CHECK(!fake.last.stage.x);
    close_all(&f);
}

T_CASE(large_batches_share_blocks) {
    static fixture f;
    open_all(&f, 1, MEGAMOE_FORMAT_MXFP4, MEGAMOE_SCALE_TOKEN);
    f.device.multiprocessors = 3;
    T_OK(mm_cuda_commit_staged(f.workspaces[0], TOKENS, NULL));
    T_EQ_INT(fake.last.config.gridDimX, 24);
    T_EQ_INT(fake.last.stage.tokens, TOKENS);
    close_all(&f);
}

T_CASE(views_are_what_the_kernel_reads) {
    for (int32_t scale = MEGAMOE_SCALE_TOKEN; scale <= MEGAMOE_SCALE_BLOCK_F32; scale++) {
        static fixture f;
        open_all(&f, 1, MEGAMOE_FORMAT_MXFP4, (megamoe_input_scale)scale);
        mm_cuda_workspace *ws = f.workspaces[0];
        megamoe_workspace_views views;
        mm_cuda_workspace_views(ws, &views);
        T_OK(mm_cuda_commit_staged(ws, 5, NULL));
        const mm_cuda_stage_args *args = &fake.last.stage;
        check_staged(&args->staged, ws);
        T_CHECK(!args->x && !args->ids && !args->weights);
        T_CHECK(views.codes.data == args->view_codes);
        T_EQ_INT(views.codes.stride, args->view_stride);
        T_EQ_INT(views.codes.dtype, MEGAMOE_DTYPE_E4M3);
        T_CHECK(views.topk_ids.data == args->staged.ids);
        T_CHECK(views.topk_weights.data == args->staged.weights);
        const void *const scales[] = {args->staged.scales, args->staged.blocks,
                                      args->staged.block_scales};
        const megamoe_dtype dtypes[] = {MEGAMOE_DTYPE_F32, MEGAMOE_DTYPE_E8M0, MEGAMOE_DTYPE_F32};
        T_CHECK(views.scales.data && views.scales.data == scales[scale]);
        T_EQ_INT(views.scales.dtype, dtypes[scale]);
        T_EQ_INT(views.scales.stride, scale == MEGAMOE_SCALE_TOKEN ? 1 : 3);
        T_EQ_INT(views.scales.rows, TOKENS);
        close_all(&f);
    }
}

/* ---- forward ---- */

T_CASE(a_forward_is_one_cooperative_launch) {
    static fixture f;
    open_all(&f, 1, MEGAMOE_FORMAT_NVFP4, MEGAMOE_SCALE_TOKEN);
    mm_cuda_workspace *ws = f.workspaces[0];
    T_OK(mm_cuda_commit_staged(ws, 4, NULL));
    T_OK(mm_cuda_forward(f.calls, 1, &chosen, &f));
    T_EQ_STR(fake.last.kernel, "forward_nvfp4_exact_n8");
    T_CHECK(fake.last.cooperative);
    const CUlaunchConfig *config = &fake.last.config;
    const mm_cuda_forward_args *args = &fake.last.forward;
    T_EQ_INT(config->gridDimX, 132);
    T_EQ_INT(config->blockDimX, FAKE_THREADS);
    T_CHECK((void *)config->hStream == &f);
    T_EQ_INT(config->sharedMemBytes, mm_cuda_block_smem(2048, EXPERTS) + mm_cuda_team_smem(8) +
                                         (uint32_t)args->stages * mm_cuda_stage_smem(8, 18432, 1));
    T_CHECK(config->sharedMemBytes <= 232448 && args->stages >= 10);
    const mm_cuda_layout *layout = &f.layers[0].layout;
    T_EQ_INT(args->here, 1);
    T_EQ_INT(args->blocks, 132);
    T_EQ_INT(args->ranks, 1);
    T_EQ_INT(args->physical, EXPERTS);
    T_EQ_INT(args->topk, TOPK);
    T_EQ_INT(args->hidden, HIDDEN);
    T_EQ_INT(args->hidden_chunks, 3);
    T_EQ_INT(args->intermediate_chunks, 3);
    T_EQ_INT(args->fc1_tiles, 3);
    T_EQ_INT(args->fc2_tiles, 2);
    T_EQ_INT(args->lag, INT32_MAX); /* FC2 after all of FC1 */
    T_EQ_INT(args->pool_rows, capacity.pool_rows);
    T_EQ_INT(args->rows, ws->buffers.rows);
    T_EQ_INT(args->units, ws->buffers.units);
    T_EQ_INT(args->deadline_ns, INT64_C(1500000000));
    T_EQ_F64((double)args->alpha, 1);
    T_EQ_F64((double)args->offset, 0);
    T_CHECK(isinf(args->limit) && args->limit > 0);
    T_EQ_INT(args->blob_bytes, layout->blob_bytes);
    T_EQ_INT(args->globals_offset, layout->globals_offset);
    T_EQ_HEX((uintptr_t)args->decode_table, f.layers[0].decode_table);
    T_EQ_MEM(&args->window, &ws->buffers.window, sizeof args->window);
    const mm_cuda_rank *rank = &args->rank[0];
    T_EQ_INT(rank->rank, 0);
    T_EQ_INT(rank->local, EXPERTS);
    T_EQ_HEX((uintptr_t)rank->blobs, f.layers[0].blobs);
    T_CHECK(!rank->replica_start && !rank->replicas);
    T_EQ_HEX((uintptr_t)rank->windows, ws->local + ws->buffers.local.windows);
    T_EQ_HEX((uintptr_t)rank->state, ws->local);
    T_CHECK(rank->found == (mm_cuda_found *)&ws->page->found);
    T_CHECK(rank->host_abort == &ws->page->aborted);
    check_staged(&rank->staged, ws);
    T_CHECK(rank->y == y_data);
    T_EQ_INT(rank->y_stride, HIDDEN);
    const mm_cuda_layer_words *words = rank->layer;
    T_CHECK(words == fake_memory(f.layers[0].tables));
    T_EQ_INT(words->key, 99);
    T_EQ_INT(words->form, 1);
    T_EQ_INT(rank->form, 1);
    T_EQ_INT(mm_cuda_workspace_epoch(ws), 1);
    T_EQ_INT(*rank->host_abort, 0);
    mm_cuda_workspace_abort(ws);
    T_CHECK(*rank->host_abort != 0);
    close_all(&f);
}

T_CASE(options_reach_the_kernel) {
    static fixture f;
    open_all(&f, 1, MEGAMOE_FORMAT_MXFP4, MEGAMOE_SCALE_BLOCK_F32);
    mm_cuda_layer *layer = &f.layers[0];
    layer->desc.activation = (megamoe_activation){1.702f, 1.0f, 7.0f};
    layer->accumulate = MEGAMOE_ACCUMULATE_PROMOTE;
    layer->weight_after_fc2 = true;
    f.calls[0].y = NULL;
    T_OK(mm_cuda_commit_staged(f.workspaces[0], 0, NULL));
    T_OK(mm_cuda_forward(f.calls, 1, &chosen, NULL));
    T_EQ_STR(fake.last.kernel, "forward_mxfp4_n16_promote");
    const mm_cuda_forward_args *args = &fake.last.forward;
    T_EQ_F64((double)args->alpha, (double)1.702f);
    T_EQ_F64((double)args->offset, 1);
    T_EQ_F64((double)args->limit, 7);
    T_EQ_INT(args->weight_after_fc2, 1);
    T_EQ_INT(args->input_scale, MEGAMOE_SCALE_BLOCK_F32);
    T_EQ_INT(fake.last.config.sharedMemBytes,
             mm_cuda_block_smem(128, EXPERTS) + mm_cuda_team_smem(16) +
                 (uint32_t)args->stages * mm_cuda_stage_smem(16, 17408, 4));
    T_CHECK(!args->rank[0].y);
    close_all(&f);
}

/* Widths of MXFP4 with one accumulator, and the widest of them. */
static int32_t count_widths(const mm_forward_variant **widest) {
    int32_t count = 0;
    for (int32_t i = 0; i < mm_forward_variant_count; i++) {
        const mm_forward_variant *v = &mm_forward_variants[i];
        if (v->format != MM_CUDA_MXFP4 || v->promote)
            continue;
        *widest = v;
        count++;
    }
    return count;
}

T_CASE(the_batch_chooses_the_tile_unless_told) {
    static fixture f;
    const mm_forward_variant *widest = NULL;
    T_CHECK(count_widths(&widest) > 1);
    open_all(&f, 1, MEGAMOE_FORMAT_MXFP4, MEGAMOE_SCALE_TOKEN);
    T_OK(mm_cuda_commit_staged(f.workspaces[0], TOKENS, NULL)); /* 10 routes to an expert */
    T_OK(mm_cuda_forward(f.calls, 1, &chosen, NULL));
    T_EQ_STR(fake.last.kernel, "forward_mxfp4_n24");
    T_OK(mm_cuda_forward(f.calls, 1, &(megamoe_plan){.token_tile = 8}, NULL));
    T_EQ_STR(fake.last.kernel, "forward_mxfp4_n8");
    T_OK(mm_cuda_forward(f.calls, 1, &(megamoe_plan){.token_tile = widest->tile_tokens}, NULL));
    T_EQ_STR(fake.last.kernel, widest->cubin);
    const int32_t launches = fake.launches;
    T_STATUS(mm_cuda_forward(f.calls, 1, &(megamoe_plan){.token_tile = 12}, NULL), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "tiles of 12 tokens");
    T_EQ_INT(fake.launches, launches);
    T_EQ_INT(mm_cuda_workspace_epoch(f.workspaces[0]), 3);
    close_all(&f);
}

T_CASE(each_kernel_has_its_cost) {
    for (int32_t i = 0; i < mm_forward_variant_count; i++) {
        const mm_forward_variant *v = &mm_forward_variants[i];
        int32_t rows = 0;
#define X(of_format, of_promote, tokens, cost)                                                     \
    rows += v->format == (of_format) && v->promote == (of_promote) && v->tile_tokens == (tokens);
        MM_TILE_COSTS(X)
#undef X
        T_CHECK_MSG(rows == 1, "%s has %d rows in tile_costs.h", v->cubin, rows);
    }
}

/* All of them are legal and different, and the first is what an untold forward does. */
T_CASE(candidates_begin_with_the_built_in_choice) {
    enum { MOST = 64 };
    static fixture f;
    const mm_forward_variant *widest = NULL;
    const int32_t widths = count_widths(&widest);
    open_all(&f, 1, MEGAMOE_FORMAT_MXFP4, MEGAMOE_SCALE_TOKEN);
    T_OK(mm_cuda_commit_staged(f.workspaces[0], TOKENS, NULL));
    megamoe_plan plans[MOST];
    const int32_t n = mm_cuda_candidates(f.workspaces[0], &f.layers[0], TOKENS, plans, MOST);
    T_REQUIRE(n >= widths && n <= MOST);
    const mm_cuda_forward_args *args = &fake.last.forward;
    T_OK(mm_cuda_forward(f.calls, 1, &chosen, NULL));
    T_EQ_INT(plans[0].token_tile, 24);
    T_EQ_INT(plans[0].lag, args->lag);
    for (int32_t i = 0; i < n; i++) {
        T_CHECK(plans[i].lag > 0 && mm_cuda_has_tile(&f.layers[0], plans[i].token_tile));
        T_OK(mm_cuda_forward(f.calls, 1, &plans[i], NULL));
        T_EQ_INT(args->lag, plans[i].lag);
        for (int32_t j = 0; j < i; j++)
            T_CHECK(plans[i].token_tile != plans[j].token_tile || plans[i].lag != plans[j].lag);
    }
    T_EQ_INT(mm_cuda_candidates(f.workspaces[0], &f.layers[0], TOKENS, plans, 1), n);
    T_EQ_INT(mm_cuda_candidates(f.workspaces[0], &f.layers[0], TOKENS, NULL, 0), n);
    T_CHECK(!mm_cuda_has_tile(&f.layers[0], 12));
    close_all(&f);
}

T_CASE(prewarming_leaves_nothing_to_load) {
    static fixture f;
    open_all(&f, 1, MEGAMOE_FORMAT_MXFP4, MEGAMOE_SCALE_TOKEN);
    T_OK(mm_cuda_prewarm(f.workspaces[0], &f.layers[0]));
    const int32_t functions = fake.functions;
    const mm_forward_variant *widest = NULL;
    T_EQ_INT(functions, count_widths(&widest) + 1); /* and staging */
    T_OK(mm_cuda_prewarm(f.workspaces[0], &f.layers[0]));
    fake.allocations_left = 0;
    for (int32_t tokens = 0; tokens <= TOKENS; tokens++) {
        T_OK(mm_cuda_commit_staged(f.workspaces[0], tokens, NULL));
        T_OK(mm_cuda_forward(f.calls, 1, &chosen, NULL));
    }
    T_EQ_INT(fake.functions, functions);
    close_all(&f);
}

/* Marks of one block; `first` is 0 for one without tiles, `combined` for one that found an error.
 */
static void mark(const mm_cuda_workspace *ws, int32_t block, uint64_t entry, uint64_t begun,
                 uint64_t first, uint64_t fc1, uint64_t fc2, uint64_t combined) {
    uint64_t *m = fake_memory(ws->local + ws->buffers.local.times);
    m += (size_t)block * MM_CUDA_TIMES;
    m[MM_CUDA_TIME_ENTRY] = entry;
    m[MM_CUDA_TIME_BEGUN] = begun;
    m[MM_CUDA_TIME_FIRST] = first;
    m[MM_CUDA_TIME_FC1] = fc1;
    m[MM_CUDA_TIME_FC2] = fc2;
    m[MM_CUDA_TIME_LAST] = first ? begun + fc1 + fc2 : 0;
    m[MM_CUDA_TIME_COMBINED] = combined;
}

T_CASE(times_are_means_over_blocks) {
    static fixture f;
    open_all(&f, 1, MEGAMOE_FORMAT_MXFP4, MEGAMOE_SCALE_TOKEN);
    const mm_cuda_workspace *ws = f.workspaces[0];
    megamoe_workspace_times t;
    T_STATUS(mm_cuda_workspace_times(ws, &t), MEGAMOE_ESTATE);
    f.device.max_ctas = 2;
    T_OK(mm_cuda_commit_staged(f.workspaces[0], TOKENS, NULL));
    T_OK(mm_cuda_forward(f.calls, 1, &chosen, NULL));
    mark(ws, 0, 10000, 11000, 11500, 3000, 2000, 18000);
    mark(ws, 1, 12000, 13000, 0, 0, 0, 20000);
    T_OK(mm_cuda_workspace_times(ws, &t));
    T_EQ_F64(t.begin_us, 1);
    T_EQ_F64(t.dispatch_us, 0.25);
    T_EQ_F64(t.fc1_us, 1.25);
    T_EQ_F64(t.fc2_us, 1);
    T_EQ_F64(t.combine_us, 4.5);
    T_EQ_F64(t.idle_us, 2);
    T_EQ_F64(t.total_us, 10);
    /* The second block has FC2 tiles alone: what its first one waited for is none of FC1's time. */
    mark(ws, 1, 12000, 13000, 14000, 0, 3000, 20000);
    T_OK(mm_cuda_workspace_times(ws, &t));
    T_EQ_F64(t.dispatch_us, 0.75);
    T_EQ_F64(t.fc1_us, 1.25);
    T_EQ_F64(t.fc2_us, 2);
    T_EQ_F64(t.combine_us, 3);
    T_EQ_F64(t.begin_us + t.dispatch_us + t.fc1_us + t.fc2_us + t.combine_us + t.idle_us, 10);
    mark(ws, 0, 10000, 11000, 0, 0, 0, 0);
    mark(ws, 1, 10000, 13000, 0, 0, 0, 0);
    T_OK(mm_cuda_workspace_times(ws, &t));
    T_EQ_F64(t.begin_us, 2);
    T_EQ_F64(t.idle_us, 1);
    T_EQ_F64(t.combine_us, 0);
    T_EQ_F64(t.total_us, 3);
    close_all(&f);
}

T_CASE(folded_ranks_share_a_launch) {
    for (int32_t ranks = 2; ranks <= 8; ranks *= 2) {
        static fixture f;
        open_all(&f, ranks, MEGAMOE_FORMAT_MXFP4, MEGAMOE_SCALE_TOKEN);
        f.device.max_ctas = 100;
        for (int32_t r = 0; r < ranks; r++)
            T_OK(mm_cuda_commit_staged(f.workspaces[r], r, NULL));
        T_OK(mm_cuda_forward(f.calls, ranks, &chosen, NULL));
        const mm_cuda_forward_args *args = &fake.last.forward;
        T_EQ_INT(args->here, ranks);
        T_EQ_INT(args->ranks, ranks);
        T_EQ_INT(args->blocks, 100 / ranks);
        T_EQ_INT(fake.last.config.gridDimX, ranks * (100 / ranks));
        int32_t experts = 0;
        for (int32_t r = 0; r < ranks; r++) {
            T_EQ_INT(args->rank[r].rank, r);
            T_EQ_HEX((uintptr_t)args->rank[r].state, f.workspaces[r]->local);
            T_EQ_INT(mm_cuda_workspace_epoch(f.workspaces[r]), 1);
            experts += args->rank[r].local;
        }
        T_EQ_INT(experts, EXPERTS);
        close_all(&f);
    }
}

/* Those of the others are launched elsewhere. */
T_CASE(a_launch_may_take_some_of_the_ranks) {
    static fixture f;
    open_all(&f, 4, MEGAMOE_FORMAT_MXFP4, MEGAMOE_SCALE_TOKEN);
    f.device.max_ctas = 100;
    for (int32_t r = 0; r < 4; r++)
        T_OK(mm_cuda_commit_staged(f.workspaces[r], r, NULL));
    const mm_cuda_call calls[2] = {f.calls[1], f.calls[3]}, turned[2] = {f.calls[3], f.calls[1]};
    T_STATUS(mm_cuda_forward(turned, 2, &chosen, NULL), MEGAMOE_EINVAL);
    T_OK(mm_cuda_forward(calls, 2, &chosen, NULL));
    const mm_cuda_forward_args *args = &fake.last.forward;
    T_EQ_INT(args->here, 2);
    T_EQ_INT(args->ranks, 4);
    T_EQ_INT(args->blocks, 50);
    T_EQ_INT(args->rank[0].rank, 1);
    T_EQ_INT(args->rank[1].rank, 3);
    for (int32_t r = 0; r < 4; r++)
        T_EQ_INT(mm_cuda_workspace_epoch(f.workspaces[r]), r % 2);
    close_all(&f);
}

T_CASE(calls_that_do_not_belong_together_are_refused) {
    static fixture f;
    open_all(&f, 2, MEGAMOE_FORMAT_MXFP4, MEGAMOE_SCALE_TOKEN);
    mm_cuda_workspace *stranger = NULL;
    T_OK(mm_cuda_workspace_open(&shape, &capacity, f.comms[1], &f.device, &stranger));
    mm_cuda_call calls[2] = {f.calls[0], f.calls[1]};
    calls[1].workspace = stranger;
    T_STATUS(mm_cuda_forward(calls, 2, &chosen, NULL), MEGAMOE_ESTATE);
    T_OK(meet(stranger, f.comms[1], (mm_cuda_workspace *[]){f.workspaces[0], stranger}, 2));
    T_STATUS(mm_cuda_forward(calls, 2, &chosen, NULL), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "call 1 has the workspace of rank 1 of another set");
    calls[0] = f.calls[1];
    calls[1] = f.calls[0];
    T_STATUS(mm_cuda_forward(calls, 2, &chosen, NULL), MEGAMOE_EINVAL);
    mm_cuda_device other = f.device;
    other.ordinal = 3;
    f.layers[1].device = &other;
    T_STATUS(mm_cuda_forward(f.calls, 2, &chosen, NULL), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "rank 1 has its workspace on cuda:0 and its layer on cuda:3");
    f.layers[1].device = &f.device;
    f.layers[1].desc.has_bias = true;
    T_STATUS(mm_cuda_forward(f.calls, 2, &chosen, NULL), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "ranks 0 and 1 only one has biases");
    T_EQ_INT(fake.launches, 0);
    mm_cuda_workspace_close(stranger);
    close_all(&f);
}

T_CASE(a_gpu_with_too_little_is_refused) {
    static fixture f;
    open_all(&f, 4, MEGAMOE_FORMAT_MXFP4, MEGAMOE_SCALE_TOKEN);
    f.device.max_ctas = 3;
    T_STATUS(mm_cuda_forward(f.calls, 4, &chosen, NULL), MEGAMOE_EUNSUPPORTED);
    T_CONTAINS(megamoe_last_error(), "4 ranks share 3 thread blocks");
    f.device.max_ctas = 132;
    fake.blocks_resident = 0;
    T_STATUS(mm_cuda_forward(f.calls, 4, &chosen, NULL), MEGAMOE_EUNSUPPORTED);
    T_CONTAINS(megamoe_last_error(), "'forward_mxfp4_n8'");
    fake.blocks_resident = 1;
    f.device.shared_bytes = 30000;
    T_STATUS(mm_cuda_forward(f.calls, 4, &chosen, NULL), MEGAMOE_EUNSUPPORTED);
    T_CONTAINS(megamoe_last_error(), "gives a thread block 30000");
    f.device.shared_bytes = 232448;
    T_OK(mm_cuda_forward(f.calls, 4, &chosen, NULL));
    close_all(&f);
}
