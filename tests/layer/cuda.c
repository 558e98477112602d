/* SPDX-License-Identifier: Apache-2.0 */
/* What the public operation asks of the CUDA backend, on machines without a GPU: fake_cuda.h. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "../comm/crew.h"
#include "fake_cuda.h"
#include "fixture.h"
#include "layer/layer.h"
#include "weights/cpu_layout.h"
#include "weights/cuda_pack.h"

static int streams[2]; /* their addresses serve as streams */

static void check_nothing_open(void) {
    T_EQ_INT(fake.devices, 0);
    T_EQ_INT(fake.layers, 0);
    T_EQ_INT(fake.workspaces, 0);
    T_EQ_INT(fake.memories, 0);
}

static setup on_cuda(const fixture *x) {
    fake_start();
    return (setup){.weights = x->m.weights, .device = "cuda"};
}

/* ---- layers ---- */

static void check_experts(const megamoe_layer *layer, const megamoe_weights *weights, bool round) {
    const mm_cuda_layout *layout = &layer->cuda.layout;
    const uint8_t *blobs = (const uint8_t *)(uintptr_t)layer->cuda.blobs;
    const mm_placement *placement = &layer->placement;
    uint8_t *blob = malloc(layout->blob_bytes);
    T_REQUIRE(blob);
    for (int32_t e = 0; e < placement->local; e++) {
        mm_inexact inexact = {0};
        memset(blob, 0, layout->blob_bytes);
        T_OK(mm_cuda_pack(weights, layout, placement->logical_of[placement->first + e], blob, round,
                          &inexact));
        T_EQ_INT(inexact.groups, 0);
        T_EQ_MEM(blobs + (size_t)e * layout->blob_bytes, blob, layout->blob_bytes);
    }
    free(blob);
}

static void note_progress(void *user, uint64_t done, uint64_t total) {
    uint64_t *last = user;
    T_CHECK(done >= last[0] && done <= total);
    last[0] = done;
    last[1] = total;
}

/* In waves of as many experts as there are threads; or from a prepared file. */
T_CASE(experts_are_packed_and_uploaded) {
    fixture *x = open_fixture(30);
    static const int32_t map[] = {2, 0, 1, 3, 0, 2, 2, 1, 3};
    const char *path = t_path("layer");
    megamoe_prepare_options preparing = MEGAMOE_INIT(megamoe_prepare_options);
    preparing.device = "cuda";
    T_OK(megamoe_weights_prepare(x->m.weights, NULL, &preparing, path));
    megamoe_weights *prepared;
    T_OK(megamoe_weights_open(path, &prepared));
    for (int32_t threads = 1; threads <= 6; threads++)
        for (int from_file = 0; from_file < 2; from_file++) {
            setup s = on_cuda(x);
            s.folded = true;
            s.ranks = 2;
            s.threads = threads;
            fleet f = fleet_open_comms(&s);
            for (int32_t r = 0; r < 2; r++) {
                megamoe_layer_options o = MEGAMOE_INIT(megamoe_layer_options);
                uint64_t last[2] = {0, 0};
                o.progress = (megamoe_progress){note_progress, last};
                o.physical_to_logical = map;
                o.physical_experts = 9;
                o.weight_after_fc2 = true;
                o.accumulate = MEGAMOE_ACCUMULATE_PROMOTE;
                T_OK(megamoe_layer_create(f.rank[r].comm, f.rank[r].device,
                                          from_file ? prepared : x->m.weights, &o,
                                          &f.rank[r].layer));
                const megamoe_layer *layer = f.rank[r].layer;
                T_CHECK(layer->cuda.weight_after_fc2);
                T_EQ_INT(layer->cuda.accumulate, MEGAMOE_ACCUMULATE_PROMOTE);
                T_EQ_INT(layer->cuda.placement->local, r ? 4 : 5);
                T_EQ_INT(fake.uploads, r ? 9 : 5);
                T_EQ_HEX(last[0], megamoe_layer_bytes(layer));
                T_EQ_HEX(last[1], last[0]);
                check_experts(layer, x->m.weights, false);
            }
            T_EQ_HEX(f.rank[0].layer->cuda.key, f.rank[1].layer->cuda.key);
            fleet_close(&f);
            check_nothing_open();
        }
    megamoe_weights_close(prepared);
    close_fixture(x);
}

T_CASE(weights_prepared_for_the_cpu) {
    fixture *x = open_fixture(31);
    const char *path = t_path("layer");
    T_OK(megamoe_weights_prepare(x->m.weights, NULL, NULL, path));
    megamoe_weights *prepared;
    T_OK(megamoe_weights_open(path, &prepared));
    const setup s = on_cuda(x);
    fleet f = fleet_open_comms(&s);
    T_STATUS(
        megamoe_layer_create(f.rank[0].comm, f.rank[0].device, prepared, NULL, &f.rank[0].layer),
        MEGAMOE_EUNSUPPORTED);
    T_CONTAINS(megamoe_last_error(), "prepared for device \"cpu\" and this one is \"cuda\"");
    fleet_close(&f);
    megamoe_weights_close(prepared);
    check_nothing_open();
    close_fixture(x);
}

/* Row 3 of expert 1's gate holds scales 40 binades apart. */
T_CASE(groups_outside_of_the_window) {
    fixture *x = open_fixture(32);
    memset(layer_scales(&x->m.layer, 1, MEGAMOE_GATE, 3), 127, HIDDEN / 32);
    *layer_scales(&x->m.layer, 1, MEGAMOE_GATE, 3) = 87;
    memset(layer_codes(&x->m.layer, 1, MEGAMOE_GATE, 3), 0x35, HIDDEN / 2);
    setup s = on_cuda(x);
    s.threads = 2;
    fleet f = fleet_open_comms(&s);
    megamoe_layer_options o = MEGAMOE_INIT(megamoe_layer_options);
    T_STATUS(
        megamoe_layer_create(f.rank[0].comm, f.rank[0].device, x->m.weights, &o, &f.rank[0].layer),
        MEGAMOE_EINEXACT);
    T_CONTAINS(megamoe_last_error(), "row 3, block 0");
    T_EQ_INT(fake.layers, 0);
    T_EQ_INT(fake.uploads, 0); /* neither this wave nor the next */
    o.round_outside_window = true;
    T_OK(
        megamoe_layer_create(f.rank[0].comm, f.rank[0].device, x->m.weights, &o, &f.rank[0].layer));
    check_experts(f.rank[0].layer, x->m.weights, true);
    fleet_close(&f);
    check_nothing_open();
    close_fixture(x);
}

/* ---- workspaces ---- */

T_CASE(limits_and_pool_rows) {
    fixture *x = open_fixture(33);
    for (int32_t ranks = 1; ranks <= 4; ranks++) {
        setup s = on_cuda(x);
        s.folded = true;
        s.ranks = ranks;
        s.tokens = 100;
        fleet f = fleet_open(&s);
        /* The fake's bytes are its rows. */
        const uint64_t rows = 100u * TOPK * (ranks < 2 ? 1 : 2);
        T_EQ_HEX(megamoe_workspace_bytes(f.rank[0].workspace), rows);
        const char *what;
        uint64_t bytes;
        T_CHECK(megamoe_workspace_part(f.rank[0].workspace, 0, &what, &bytes));
        T_EQ_STR(what, "rows");
        T_EQ_HEX(bytes, rows);
        T_CHECK(!megamoe_workspace_part(f.rank[0].workspace, 1, &what, &bytes));
        fleet_close(&f);
    }
    const setup s = on_cuda(x);
    fleet f = fleet_open_comms(&s);
    rank *r = &f.rank[0];
    const megamoe_shape shape = r->shape;
#define REFUSED(member, value, named)                                                              \
    r->shape = shape;                                                                              \
    r->shape.member = value;                                                                       \
    T_STATUS(megamoe_workspace_create(r->comm, r->device, &r->shape, &r->capacity, &r->workspace), \
             MEGAMOE_EINVAL);                                                                      \
    T_CONTAINS(megamoe_last_error(), named)
    REFUSED(topk, 17, "topk is 17; on CUDA devices it is 1..16");
    REFUSED(physical_experts, 1025, "1025 physical experts; on CUDA devices there are 1..1024");
    REFUSED(experts, 1025, "1025 physical experts");
#undef REFUSED
    r->shape = shape;
    r->shape.activations = MEGAMOE_ACTIVATIONS_INT8;
    T_STATUS(megamoe_workspace_create(r->comm, r->device, &r->shape, &r->capacity, &r->workspace),
             MEGAMOE_EUNSUPPORTED);
    T_CONTAINS(megamoe_last_error(), "int8 is for the CPU");
    megamoe_comm *comms[MM_CUDA_FOLDED_MAX + 1];
    T_OK(megamoe_comm_folded(MM_CUDA_FOLDED_MAX + 1, comms));
    T_STATUS(megamoe_workspace_create(comms[0], r->device, &shape, &r->capacity, &r->workspace),
             MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "9 folded ranks; on CUDA devices there are 1..8");
    for (int i = 0; i <= MM_CUDA_FOLDED_MAX; i++)
        megamoe_comm_close(comms[i]);
    fleet_close(&f);
    check_nothing_open();
    close_fixture(x);
}

static void create_refused(rank *r, void *argument) {
    T_STATUS(megamoe_workspace_create(r->comm, r->device, &r->shape, &r->capacity, &r->workspace),
             MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), argument);
}

T_CASE(ranks_on_different_kinds_of_device) {
    fixture *x = open_fixture(34);
    setup s = on_cuda(x);
    s.ranks = 2;
    s.device = NULL;
    fleet f = fleet_open_comms(&s);
    megamoe_device_close(f.rank[1].device);
    T_OK(megamoe_device_open("cuda", NULL, &f.rank[1].device));
    char named[] = "the device is \"cpu\" on rank 0 and \"cuda\" on rank 1";
    fleet_each(&f, create_refused, named);
    fleet_close(&f);
    check_nothing_open();
    close_fixture(x);
}

T_CASE(a_layer_on_another_device) {
    fixture *x = open_fixture(35);
    const setup s = on_cuda(x);
    fleet f = fleet_open(&s);
    static const char *const others[] = {"cpu", "cuda:1"};
    for (int i = 0; i < 2; i++) {
        megamoe_device *device;
        megamoe_layer *layer;
        T_OK(megamoe_device_open(others[i], NULL, &device));
        T_OK(megamoe_layer_create(f.rank[0].comm, device, x->m.weights, NULL, &layer));
        T_STATUS(megamoe_prewarm(layer, f.rank[0].workspace), MEGAMOE_EINVAL);
        T_CONTAINS(megamoe_last_error(), "GPU");
        megamoe_layer_close(layer);
        megamoe_device_close(device);
    }
    fleet_close(&f);
    check_nothing_open();
    close_fixture(x);
}

/* ---- plans ---- */

static void expect_plan(fleet *f, fixture *x, int64_t tokens, int32_t token_tile, int32_t lag) {
    megamoe_workspace *ws = f->rank[0].workspace;
    const megamoe_view y = view_y(x->y, &x->b);
    T_OK(megamoe_commit_staged(ws, tokens, NULL));
    T_OK(megamoe_forward(f->rank[0].layer, ws, &y, NULL));
    T_EQ_INT(fake.plan.token_tile, token_tile);
    T_EQ_INT(fake.plan.lag, lag);
}

/* The batch decides between what was measured; what the caller sets comes before. */
T_CASE(measured_plans_are_used) {
    fixture *x = open_fixture(37);
    const setup s = on_cuda(x);
    fleet f = fleet_open(&s);
    megamoe_layer *layer = f.rank[0].layer;
    megamoe_workspace *ws = f.rank[0].workspace;
    setenv("MEGAMOE_CACHE_DIR", t_path("cache"), 1);
    int32_t found = -1;
    T_OK(megamoe_use_tuned(layer, ws, NULL, &found));
    T_EQ_INT(found, 0);
    expect_plan(&f, x, 8, 0, 0);

    megamoe_tuned_key key = MEGAMOE_INIT(megamoe_tuned_key);
    T_OK(megamoe_tuned_key_of(layer, ws, NULL, &key));
    T_EQ_STR(key.library, megamoe_version());
    T_EQ_STR(key.routing, "random");
    T_EQ_INT(key.capacity, 64);
    T_EQ_INT(key.experts, ws->shape.experts);
    const megamoe_tuned_plan plans[] = {
        {4, 0, 0, 20, 20, 1}, {8, 16, 3, 20, 18, 1.1}, {16, 1000, 3, 20, 18, 1.1}};
    T_OK(megamoe_tuned_store(NULL, &key, plans, 3));
    expect_plan(&f, x, 8, 0, 0); /* not by itself */
    T_OK(megamoe_use_tuned(layer, ws, NULL, &found));
    T_EQ_INT(found, 2); /* no kernel has tiles of 1000 tokens */
    expect_plan(&f, x, 8, 16, 3);
    expect_plan(&f, x, 7, 16, 3);
    expect_plan(&f, x, 4, 0, 0);
    expect_plan(&f, x, 21, 0, 0);
    expect_plan(&f, x, 0, 0, 0);
    megamoe_plan plan = MEGAMOE_INIT(megamoe_plan);
    plan.lag = 7;
    T_OK(megamoe_workspace_set_plan(ws, &plan));
    expect_plan(&f, x, 8, 0, 7);
    plan.lag = 0;
    T_OK(megamoe_workspace_set_plan(ws, &plan));
    expect_plan(&f, x, 8, 16, 3);

    megamoe_tuned_options options = MEGAMOE_INIT(megamoe_tuned_options);
    options.routing = "balanced";
    T_OK(megamoe_use_tuned(layer, ws, &options, &found));
    T_EQ_INT(found, 0);
    expect_plan(&f, x, 8, 0, 0);
    char long_name[MEGAMOE_ROUTING_BYTES + 1] = {0};
    memset(long_name, 'x', MEGAMOE_ROUTING_BYTES);
    options.routing = long_name;
    T_STATUS(megamoe_use_tuned(layer, ws, &options, &found), MEGAMOE_EINVAL);
    options.routing = NULL;
    options.path = t_path("cache/plans.json");
    T_OK(megamoe_use_tuned(layer, ws, &options, NULL));
    expect_plan(&f, x, 8, 16, 3);
    setenv("MEGAMOE_TUNED", "0", 1);
    T_OK(megamoe_use_tuned(layer, ws, NULL, &found));
    T_EQ_INT(found, 0);
    expect_plan(&f, x, 8, 0, 0);
    unsetenv("MEGAMOE_TUNED");

    megamoe_plan candidates[4];
    T_EQ_INT(megamoe_plan_candidates(layer, ws, 5, candidates, 4), 2);
    T_CHECK(candidates[1].token_tile == 16 && candidates[1].lag == 5);
    T_EQ_INT(megamoe_plan_candidates(layer, ws, 5, NULL, 0), 2);
    T_EQ_INT(megamoe_plan_candidates(NULL, ws, 5, candidates, 4), 0);
    const megamoe_layer_desc *desc = &x->m.layer.desc;
    const int32_t one =
        megamoe_plan_token_tile(desc, MEGAMOE_NVFP4_EXACT, MEGAMOE_ACCUMULATE_MMA, 1, 4096);
    T_CHECK(one > 0 && one <= megamoe_plan_token_tile(desc, MEGAMOE_NVFP4_EXACT,
                                                      MEGAMOE_ACCUMULATE_MMA, 2, 4096));
    T_EQ_INT(megamoe_plan_token_tile(NULL, MEGAMOE_NVFP4_EXACT, MEGAMOE_ACCUMULATE_MMA, 1, 1), 0);
    int32_t tiles[32] = {0}, first = 0;
    const int32_t n =
        megamoe_plan_token_tiles(desc, MEGAMOE_NVFP4_EXACT, MEGAMOE_ACCUMULATE_MMA, tiles, 32);
    T_REQUIRE(n > 1 && n <= 32);
    bool has_one = false;
    for (int32_t i = 0; i < n; i++) {
        T_CHECK(i == 0 || tiles[i] > tiles[i - 1]);
        has_one |= tiles[i] == one;
    }
    T_CHECK(has_one);
    T_EQ_INT(megamoe_plan_token_tiles(desc, MEGAMOE_NVFP4_EXACT, MEGAMOE_ACCUMULATE_MMA, &first, 1),
             n);
    T_EQ_INT(first, tiles[0]);
    T_EQ_INT(megamoe_plan_token_tiles(desc, MEGAMOE_NVFP4_EXACT, MEGAMOE_ACCUMULATE_MMA, NULL, 0),
             n);
    T_EQ_INT(megamoe_plan_token_tiles(NULL, MEGAMOE_NVFP4_EXACT, MEGAMOE_ACCUMULATE_MMA, tiles, 32),
             0);
    T_STATUS(megamoe_use_tuned(NULL, ws, NULL, NULL), MEGAMOE_EINVAL);
    T_STATUS(megamoe_use_tuned(layer, NULL, NULL, NULL), MEGAMOE_EINVAL);
    T_STATUS(megamoe_tuned_key_of(layer, ws, NULL, NULL), MEGAMOE_EINVAL);
    fleet_close(&f);
    close_fixture(x);
}

T_CASE(folded_ranks_have_no_measured_plans) {
    fixture *x = open_fixture(38);
    setup s = on_cuda(x);
    s.ranks = 2;
    s.folded = true;
    fleet f = fleet_open(&s);
    int32_t found = -1;
    megamoe_tuned_key key = MEGAMOE_INIT(megamoe_tuned_key);
    T_OK(megamoe_use_tuned(f.rank[0].layer, f.rank[0].workspace, NULL, &found));
    T_EQ_INT(found, 0);
    T_STATUS(megamoe_tuned_key_of(f.rank[0].layer, f.rank[0].workspace, NULL, &key),
             MEGAMOE_EUNSUPPORTED);
    fleet_close(&f);
    close_fixture(x);
}

/* ---- calls ---- */

T_CASE(calls_reach_the_device) {
    fixture *x = open_fixture(36);
    const setup s = on_cuda(x);
    fleet f = fleet_open(&s);
    megamoe_workspace *ws = f.rank[0].workspace;
    const megamoe_layer *layer = f.rank[0].layer;
    T_CHECK(ws->cuda->met && ws->cuda->warm);
    const megamoe_view vx = view_x(&x->b), vi = view_ids(&x->b), vw = view_weights(&x->b);
    const megamoe_view y = view_y(x->y, &x->b);
    T_STATUS(megamoe_forward(f.rank[0].layer, ws, &y, NULL), MEGAMOE_ESTATE);
    T_OK(megamoe_stage(ws, &vx, &vi, &vw, TOKENS, &streams[0]));
    T_CHECK(ws->cuda->stream == &streams[0] && !ws->cuda->committed);
    T_EQ_INT(ws->cuda->tokens, TOKENS);
    T_OK(megamoe_forward(f.rank[0].layer, ws, &y, &streams[1]));
    T_EQ_INT(fake.launches, 1);
    T_EQ_INT(fake.ranks, 1);
    T_EQ_INT(fake.plan.token_tile, 0);
    T_CHECK(fake.stream == &streams[1]);
    T_CHECK(fake.layer == &layer->cuda);
    T_CHECK(fake.y == &y);
    T_STATUS(megamoe_forward(f.rank[0].layer, ws, NULL, NULL), MEGAMOE_EINVAL);

    megamoe_workspace_views views = MEGAMOE_INIT(megamoe_workspace_views);
    T_OK(megamoe_workspace_get_views(ws, &views));
    T_EQ_INT(views.topk_ids.rows, 64);
    T_OK(megamoe_commit_staged(ws, 0, &streams[1]));
    T_CHECK(ws->cuda->stream == &streams[1] && ws->cuda->committed);
    megamoe_plan plan = MEGAMOE_INIT(megamoe_plan);
    plan.token_tile = 48;
    plan.lag = 5;
    T_OK(megamoe_workspace_set_plan(ws, &plan));
    T_OK(megamoe_forward(f.rank[0].layer, ws, &y, NULL));
    T_CHECK(!fake.y); /* no tokens, no y */
    T_EQ_INT(fake.plan.token_tile, 48);
    T_EQ_INT(fake.plan.lag, 5);
    plan.lag = -1;
    T_STATUS(megamoe_workspace_set_plan(ws, &plan), MEGAMOE_EINVAL);
    T_STATUS(megamoe_workspace_set_plan(ws, NULL), MEGAMOE_EINVAL);
    T_STATUS(megamoe_workspace_set_plan(NULL, &plan), MEGAMOE_EINVAL);

    int64_t counts[4];
    T_OK(megamoe_workspace_receive_counts(ws, counts, 4));
    T_EQ_INT(counts[3], 3);
    T_STATUS(megamoe_workspace_receive_counts(ws, counts, 3), MEGAMOE_EINVAL);
    megamoe_workspace_times times = MEGAMOE_INIT(megamoe_workspace_times);
    ws->cuda->tokens = 7;
    T_OK(megamoe_workspace_get_times(ws, &times));
    T_EQ_F64(times.total_us, 7);
    T_STATUS(megamoe_workspace_get_times(ws, NULL), MEGAMOE_EINVAL);
    T_STATUS(megamoe_workspace_get_times(NULL, &times), MEGAMOE_EINVAL);
    megamoe_span span;
    int64_t spans, dropped;
    T_STATUS(megamoe_workspace_get_trace(ws, &span, 1, &spans, &dropped), MEGAMOE_ESTATE);
    ws->capacity.trace = 1;
    T_OK(megamoe_workspace_get_trace(ws, &span, 1, &spans, &dropped));
    T_EQ_INT(spans, 1);
    T_EQ_INT(dropped, 7);
    T_EQ_INT(span.expert, -1);
    megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
    T_OK(megamoe_workspace_status(ws, &d));
    T_EQ_INT((int64_t)d.epoch, 2);
    fleet_close(&f);
    check_nothing_open();
    close_fixture(x);
}

static void make_report(megamoe_workspace *ws, megamoe_status status, const char *message) {
    ws->cuda->reports = true;
    ws->cuda->report = (megamoe_workspace_detail){
        .status = status, .rank = 0, .epoch = ws->cuda->epoch, .token = 5, .slot = 1, .value = 99};
    strcpy(ws->cuda->report.message, message);
}

T_CASE(what_the_device_found_is_told_once) {
    fixture *x = open_fixture(37);
    const setup s = on_cuda(x);
    fleet f = fleet_open(&s);
    megamoe_workspace *ws = f.rank[0].workspace;
    megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
    fleet_stage(&f, &x->b);
    make_report(ws, MEGAMOE_EID, "bad id");
    T_STATUS(megamoe_workspace_status(ws, &d), MEGAMOE_EID);
    T_EQ_INT(d.token, 5);
    T_EQ_INT(d.value, 99);
    T_EQ_STR(d.message, "bad id");
    T_OK(megamoe_workspace_status(ws, &d));
    T_EQ_INT(d.token, -1);

    make_report(ws, MEGAMOE_ECAPACITY, "too many");
    const megamoe_view y = view_y(x->y, &x->b);
    T_STATUS(megamoe_forward(f.rank[0].layer, ws, &y, NULL), MEGAMOE_ECAPACITY);
    T_CONTAINS(megamoe_last_error(), "an earlier forward: too many");
    T_EQ_INT(fake.launches, 0);
    T_OK(megamoe_forward(f.rank[0].layer, ws, &y, NULL));
    T_EQ_INT(fake.launches, 1);
    make_report(ws, MEGAMOE_EID, "bad id");
    T_STATUS(megamoe_stage(ws, NULL, NULL, NULL, 0, NULL), MEGAMOE_EID);
    make_report(ws, MEGAMOE_EID, "bad id");
    T_STATUS(megamoe_commit_staged(ws, 0, NULL), MEGAMOE_EID);
    T_OK(megamoe_commit_staged(ws, 0, NULL));
    fleet_close(&f);
    check_nothing_open();
    close_fixture(x);
}

/* A deadline of one rank ends the others' forwards, running and future. */
T_CASE(a_deadline_aborts_all_ranks) {
    fixture *x = open_fixture(38);
    setup s = on_cuda(x);
    s.ranks = 3;
    fleet f = fleet_open(&s);
    megamoe_workspace *ws = f.rank[1].workspace;
    fleet_stage(&f, &x->b);
    make_report(ws, MEGAMOE_ETIMEDOUT, "rank 0 is late");
    T_STATUS(megamoe_stage(ws, NULL, NULL, NULL, 0, NULL), MEGAMOE_ETIMEDOUT);
    T_CONTAINS(megamoe_last_error(), "rank 0 is late");
    for (int again = 0; again < 2; again++) {
        T_STATUS(megamoe_stage(ws, NULL, NULL, NULL, 0, NULL), MEGAMOE_ESTATE);
        T_CONTAINS(megamoe_last_error(), "dead: rank 0 is late");
        T_STATUS(megamoe_workspace_status(ws, NULL), MEGAMOE_ETIMEDOUT);
    }
    for (int32_t r = 0; r < 3; r++)
        T_CHECK(f.rank[r].workspace->cuda->aborted);
    /* Rank 0's kernel has given up; rank 2 had none that runs. */
    make_report(f.rank[0].workspace, MEGAMOE_EPEER, "a rank has aborted");
    f.rank[0].workspace->cuda->report.rank = -1;
    megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
    T_STATUS(megamoe_workspace_status(f.rank[0].workspace, &d), MEGAMOE_EPEER);
    T_EQ_STR(f.rank[0].workspace->cuda->cause, "rank 1 has aborted");
    T_EQ_INT(d.rank, 1);
    T_STATUS(megamoe_stage(f.rank[0].workspace, NULL, NULL, NULL, 0, NULL), MEGAMOE_ESTATE);
    const megamoe_view y = view_y(x->y, &x->b);
    T_STATUS(megamoe_forward(f.rank[2].layer, f.rank[2].workspace, &y, NULL), MEGAMOE_EPEER);
    T_CONTAINS(megamoe_last_error(), "forward 1, rank 2, counting: rank 1 has aborted");
    T_STATUS(megamoe_forward(f.rank[2].layer, f.rank[2].workspace, &y, NULL), MEGAMOE_ESTATE);
    T_EQ_INT(fake.launches, 0);
    fleet_close(&f);
    check_nothing_open();
    close_fixture(x);
}

/* A workspace that is closed is not told any more. */
/* Its own cell says that it takes part no more: no alarm has told of it. */
T_CASE(a_rank_that_has_closed_its_workspace_is_named) {
    fixture *x = open_fixture(51);
    setup s = on_cuda(x);
    s.ranks = 2;
    fleet f = fleet_open(&s);
    make_report(f.rank[0].workspace, MEGAMOE_EPEER, "it has closed its workspace");
    f.rank[0].workspace->cuda->report.rank = 1;
    megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
    T_STATUS(megamoe_workspace_status(f.rank[0].workspace, &d), MEGAMOE_EPEER);
    T_EQ_INT(d.rank, 1);
    T_STATUS(megamoe_stage(f.rank[0].workspace, NULL, NULL, NULL, 0, NULL), MEGAMOE_ESTATE);
    fleet_close(&f);
    check_nothing_open();
    close_fixture(x);
}

static void close_before_a_forward(const member *m) {
    const fixture *x = m->argument;
    fake_start();
    const setup alone = {.weights = x->m.weights, .device = "cuda"};
    fleet f = fleet_open_comms(&alone);
    rank r = f.rank[0];
    megamoe_comm_close(r.comm);
    T_OK(crew_meet(m, 0, &r.comm));
    T_OK(megamoe_layer_create(r.comm, r.device, x->m.weights, NULL, &r.layer));
    T_OK(megamoe_workspace_create(r.comm, r.device, &r.shape, &r.capacity, &r.workspace));
    T_OK(megamoe_stage(r.workspace, NULL, NULL, NULL, 0, NULL));
    T_OK(megamoe_forward(r.layer, r.workspace, NULL, NULL));
    int32_t mine = 0, all[2];
    T_OK(megamoe_comm_allgather(r.comm, &mine, all, sizeof mine)); /* both have */
    const int64_t until = crew_now_ms() + CREW_DEADLINE_MS;
    while (m->rank != 1 && !mm_comm_closed(r.comm, 1) && crew_now_ms() < until)
        crew_pause_ms(1);
    if (m->rank != 1) {
        megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
        T_STATUS(megamoe_forward(r.layer, r.workspace, NULL, NULL), MEGAMOE_EPEER);
        T_CONTAINS(megamoe_last_error(), "waiting for rank 1: it has closed its communicator");
        T_STATUS(megamoe_workspace_status(r.workspace, &d), MEGAMOE_EPEER);
        T_EQ_INT(d.rank, 1);
        T_EQ_INT(d.epoch, 2);
        T_EQ_INT(fake.launches, 1);
    }
    megamoe_workspace_close(r.workspace);
    megamoe_layer_close(r.layer);
    megamoe_device_close(r.device);
    megamoe_comm_close(r.comm);
}

T_CASE(a_forward_without_a_rank_that_has_closed) {
    fixture *x = open_fixture(50);
    crew_run(2, close_before_a_forward, x);
    close_fixture(x);
}

T_CASE(an_abort_reaches_open_workspaces) {
    fixture *x = open_fixture(39);
    setup s = on_cuda(x);
    s.ranks = 2;
    fleet f = fleet_open(&s);
    megamoe_workspace_close(f.rank[0].workspace);
    f.rank[0].workspace = NULL;
    T_CHECK(!f.rank[1].workspace->cuda->aborted);
    megamoe_comm_abort(f.rank[0].comm);
    T_CHECK(f.rank[1].workspace->cuda->aborted);
    fleet_close(&f);
    check_nothing_open();
    close_fixture(x);
}

T_CASE(ranks_that_are_threads_launch_by_themselves) {
    fixture *x = open_fixture(40);
    setup s = on_cuda(x);
    s.ranks = 3;
    fleet f = fleet_open(&s);
    fleet_forward(&f, &x->b, x->y);
    T_EQ_INT(fake.launches, 3);
    T_EQ_INT(fake.ranks, 1);
    megamoe_forward_call calls[3];
    const megamoe_view y = view_y(x->y, &x->b);
    for (int32_t r = 0; r < 3; r++)
        calls[r] = (megamoe_forward_call){f.rank[r].layer, f.rank[r].workspace, &y, NULL};
    T_STATUS(megamoe_forward_group(calls, 3), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "must be folded");
    fleet_close(&f);
    check_nothing_open();
    close_fixture(x);
}

T_CASE(folded_ranks_run_in_one_launch) {
    fixture *x = open_fixture(41);
    setup s = on_cuda(x);
    s.ranks = 4;
    s.folded = true;
    fleet f = fleet_open(&s);
    fleet_forward(&f, &x->b, x->y);
    T_EQ_INT(fake.launches, 1);
    T_EQ_INT(fake.ranks, 4);
    megamoe_forward_call calls[4];
    const megamoe_view y = view_y(x->y, &x->b);
    for (int32_t r = 0; r < 4; r++)
        calls[r] =
            (megamoe_forward_call){f.rank[r].layer, f.rank[r].workspace, &y, &streams[r == 2]};
    T_STATUS(megamoe_forward_group(calls, 4), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "call 2 has another stream");
    calls[2].stream = &streams[0];
    T_OK(megamoe_forward_group(calls, 4));
    T_CHECK(fake.stream == &streams[0]);
    T_EQ_INT(fake.launches, 2);
    fleet_close(&f);
    check_nothing_open();
    close_fixture(x);
}

/* Four folded ranks on two GPUs in turn. */
static void open_on_two(fleet *f) {
    static const char *const names[2] = {"cuda:0", "cuda:1"};
    for (int32_t r = 0; r < f->ranks; r++) {
        megamoe_device_close(f->rank[r].device);
        T_OK(megamoe_device_open(names[r % 2], NULL, &f->rank[r].device));
    }
}

static void create_rank(rank *r, void *argument) {
    T_STATUS(megamoe_layer_create(r->comm, r->device, argument, NULL, &r->layer), MEGAMOE_OK);
    T_STATUS(megamoe_workspace_create(r->comm, r->device, &r->shape, &r->capacity, &r->workspace),
             MEGAMOE_OK);
}

T_CASE(folded_ranks_run_in_one_launch_of_each_gpu) {
    fixture *x = open_fixture(43);
    setup s = on_cuda(x);
    s.ranks = 4;
    s.folded = true;
    fleet f = fleet_open_comms(&s);
    open_on_two(&f);
    fleet_each(&f, create_rank, x->m.weights);
    fleet_stage(&f, &x->b);
    megamoe_forward_call calls[4];
    const megamoe_view y = view_y(x->y, &x->b);
    for (int32_t r = 0; r < 4; r++)
        calls[r] =
            (megamoe_forward_call){f.rank[r].layer, f.rank[r].workspace, &y, &streams[r % 2]};
    T_OK(megamoe_forward_group(calls, 4));
    T_EQ_INT(fake.launches, 2);
    T_EQ_INT(fake.ranks, 2);
    T_CHECK(fake.stream == &streams[1]);
    for (int32_t r = 0; r < 4; r++)
        T_EQ_INT(f.rank[r].workspace->cuda->epoch, 1);
    calls[3].stream = &streams[0];
    T_STATUS(megamoe_forward_group(calls, 4), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "call 3 has another stream than call 1");
    calls[3].stream = &streams[1];
    /* The GPU that has begun waits for the one that has not: it is told to give up. */
    fake.launches_until_failure = 3;
    T_STATUS(megamoe_forward_group(calls, 4), MEGAMOE_EDEVICE);
    T_CONTAINS(megamoe_last_error(), "no more launches");
    for (int32_t r = 0; r < 4; r++)
        T_CHECK(f.rank[r].workspace->cuda->aborted);
    T_STATUS(megamoe_forward_group(calls, 4), MEGAMOE_EPEER);
    fleet_close(&f);
    check_nothing_open();
    close_fixture(x);
}

/* Meeting copies to the device, so it is done before a forward can be captured. */
T_CASE(folded_ranks_meet_when_they_prewarm) {
    fixture *x = open_fixture(42);
    setup s = on_cuda(x);
    s.ranks = 2;
    s.folded = true;
    fleet f = fleet_open_comms(&s);
    for (int32_t i = 0; i < 2; i++) {
        rank *r = &f.rank[i];
        T_OK(megamoe_layer_create(r->comm, r->device, x->m.weights, NULL, &r->layer));
        T_OK(megamoe_workspace_create(r->comm, r->device, &r->shape, &r->capacity, &r->workspace));
        T_STATUS(megamoe_prewarm(f.rank[0].layer, f.rank[0].workspace),
                 i ? MEGAMOE_OK : MEGAMOE_ESTATE);
    }
    T_CHECK(f.rank[0].workspace->cuda->met && !f.rank[1].workspace->cuda->met);
    fleet_close(&f);
    check_nothing_open();
    close_fixture(x);
}
