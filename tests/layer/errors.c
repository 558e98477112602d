/* SPDX-License-Identifier: Apache-2.0 */
/* What is refused, what the ranks agree on, and that y stays unwritten. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

enum { POISON = 0x7E57 };

static void poison(fixture *x) {
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        x->y[i] = POISON;
}

static bool poisoned(const fixture *x) {
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        if (x->y[i] != POISON)
            return false;
    return true;
}

/* A forward whose error the ranks agree on: OK now, y unwritten, the same detail everywhere. */
static megamoe_workspace_detail agreed(fleet *f, fixture *x) {
    megamoe_status status[MAX_RANKS];
    megamoe_workspace_detail first = MEGAMOE_INIT(megamoe_workspace_detail);
    poison(x);
    fleet_compute(f, &x->b, x->y, status);
    T_CHECK(poisoned(x));
    for (int32_t r = 0; r < f->ranks; r++) {
        T_STATUS(status[r], MEGAMOE_OK);
        megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
        const megamoe_status found = megamoe_workspace_status(f->rank[r].workspace, &d);
        T_EQ_INT(found, d.status);
        if (r == 0)
            first = d;
        T_EQ_INT(d.status, first.status);
        T_EQ_INT(d.phase, first.phase);
        T_EQ_INT(d.rank, first.rank);
        T_EQ_INT((int64_t)d.epoch, (int64_t)first.epoch);
        T_EQ_INT(d.token, first.token);
        T_EQ_INT(d.slot, first.slot);
        T_EQ_INT(d.value, first.value);
        T_EQ_STR(d.message, first.message);
        T_EQ_STR(megamoe_last_error(), first.message);
        /* It is told once. */
        T_STATUS(megamoe_workspace_status(f->rank[r].workspace, &d), MEGAMOE_OK);
        T_EQ_INT(d.status, MEGAMOE_OK);
    }
    return first;
}

T_CASE(id_out_of_range) {
    fixture *x = open_fixture(1);
    static const int32_t bad[] = {4, -2, 1000000, INT32_MIN};
    for (int folded = 0; folded < 2; folded++) {
        const setup s = {.weights = x->m.weights, .ranks = 4, .folded = folded};
        fleet f = fleet_open(&s);
        for (uint64_t i = 0; i < 4; i++) {
            /* Rank 2 of 4 has tokens 11..15. */
            const int32_t good = x->b.ids[13 * TOPK + 1];
            x->b.ids[13 * TOPK + 1] = bad[i];
            fleet_stage(&f, &x->b);
            x->b.ids[13 * TOPK + 1] = good;
            const megamoe_workspace_detail d = agreed(&f, x);
            T_EQ_INT(d.status, MEGAMOE_EID);
            T_EQ_INT(d.phase, MEGAMOE_PHASE_COUNT);
            T_EQ_INT(d.rank, 2);
            T_EQ_INT(d.token, 2);
            T_EQ_INT(d.slot, 1);
            T_EQ_INT(d.value, bad[i]);
            T_EQ_INT((int64_t)d.epoch, (int64_t)(3 * i + 1));
            T_CONTAINS(d.message, "slot 1");
            /* The bad batch is still staged: the same error again. */
            T_EQ_INT(agreed(&f, x).status, MEGAMOE_EID);
            check_recovery(&f, x);
        }
        fleet_close(&f);
    }
    close_fixture(x);
}

T_CASE(id_beyond_int32) {
    fixture *x = open_fixture(2);
    const setup s = {.weights = x->m.weights};
    fleet f = fleet_open(&s);
    int64_t ids[TOKENS * TOPK];
    for (int i = 0; i < TOKENS * TOPK; i++)
        ids[i] = x->b.ids[i];
    ids[7] = INT64_C(1) << 32; /* expert 0 if cut to 32 bits */
    const megamoe_view vx = view_x(&x->b), vw = view_weights(&x->b);
    const megamoe_view vi = {ids, MEGAMOE_DTYPE_I64, TOKENS, 0};
    T_OK(megamoe_stage(f.rank[0].workspace, &vx, &vi, &vw, TOKENS, NULL));
    const megamoe_workspace_detail d = agreed(&f, x);
    T_EQ_INT(d.status, MEGAMOE_EID);
    T_EQ_INT(d.value, INT64_C(1) << 32);
    T_EQ_INT(d.token, 3);
    check_recovery(&f, x);
    fleet_close(&f);
    close_fixture(x);
}

/* The pending error comes back from the next call that can return one, once. */
T_CASE(pending_error_is_returned_once) {
    fixture *x = open_fixture(3);
    for (int way = 0; way < 4; way++) {
        const setup s = {.weights = x->m.weights, .ranks = 2, .folded = way == 3};
        fleet f = fleet_open(&s);
        megamoe_status status[MAX_RANKS];
        x->b.ids[3] = 99;
        fleet_stage(&f, &x->b);
        x->b.ids[3] = 0;
        fleet_compute(&f, &x->b, x->y, status);
        for (int32_t r = 0; r < 2 && way < 2; r++) {
            int64_t first;
            const batch part = share_of(&x->b, r, 2, &first);
            const megamoe_view vx = view_x(&part), vi = view_ids(&part), vw = view_weights(&part);
            megamoe_workspace *ws = f.rank[r].workspace;
            if (way == 0)
                T_STATUS(megamoe_stage(ws, &vx, &vi, &vw, part.tokens, NULL), MEGAMOE_EID);
            else
                T_STATUS(megamoe_commit_staged(ws, part.tokens, NULL), MEGAMOE_EID);
            T_CONTAINS(megamoe_last_error(), "token 1");
            T_STATUS(megamoe_workspace_status(ws, NULL), MEGAMOE_OK);
            T_STATUS(megamoe_stage(ws, &vx, &vi, &vw, part.tokens, NULL), MEGAMOE_OK);
        }
        if (way >= 2) {
            poison(x);
            fleet_compute(&f, &x->b, x->y, status);
            T_STATUS(status[0], MEGAMOE_EID);
            T_STATUS(status[1], MEGAMOE_EID);
            T_CHECK(poisoned(x));
        }
        check_recovery(&f, x);
        fleet_close(&f);
    }
    x->b.ids[3] = -1;
    close_fixture(x);
}

T_CASE(input_scale_byte_out_of_range) {
    fixture *x = open_fixture(4);
    static const uint8_t bad[] = {78, 175, 0, 255};
    const setup s = {.weights = x->m.weights, .ranks = 2, .input_scale = MEGAMOE_SCALE_BLOCK};
    fleet f = fleet_open(&s);
    uint16_t want[TOKENS * HIDDEN];
    fleet_forward(&f, &x->b, want);
    for (int i = 0; i < 4; i++) {
        fleet_stage(&f, &x->b);
        megamoe_workspace_views v = MEGAMOE_INIT(megamoe_workspace_views);
        T_OK(megamoe_workspace_get_views(f.rank[1].workspace, &v));
        uint8_t *byte = (uint8_t *)v.scales.data + 4 * v.scales.stride;
        const uint8_t good = *byte;
        *byte = bad[i];
        T_OK(megamoe_commit_staged(f.rank[1].workspace, 10, NULL));
        const megamoe_workspace_detail d = agreed(&f, x);
        T_EQ_INT(d.status, MEGAMOE_EID);
        T_EQ_INT(d.rank, 1);
        T_EQ_INT(d.token, 4);
        T_EQ_INT(d.slot, -1);
        T_EQ_INT(d.value, bad[i]);
        *byte = good;
        T_OK(megamoe_commit_staged(f.rank[1].workspace, 10, NULL));
        megamoe_status status[MAX_RANKS];
        fleet_compute(&f, &x->b, x->y, status);
        T_EQ_MEM(x->y, want, sizeof want);
    }
    fleet_close(&f);
    close_fixture(x);
}

/* Ids in the views are the caller's too. */
T_CASE(id_out_of_range_in_views) {
    fixture *x = open_fixture(5);
    const setup s = {.weights = x->m.weights};
    fleet f = fleet_open(&s);
    fleet_stage(&f, &x->b);
    megamoe_workspace_views v = MEGAMOE_INIT(megamoe_workspace_views);
    T_OK(megamoe_workspace_get_views(f.rank[0].workspace, &v));
    ((int32_t *)v.topk_ids.data)[6 * v.topk_ids.stride] = 4;
    T_OK(megamoe_commit_staged(f.rank[0].workspace, TOKENS, NULL));
    const megamoe_workspace_detail d = agreed(&f, x);
    T_EQ_INT(d.status, MEGAMOE_EID);
    T_EQ_INT(d.token, 6);
    T_EQ_INT(d.slot, 0);
    /* Tokens that are not committed are not looked at. */
    T_OK(megamoe_commit_staged(f.rank[0].workspace, 6, NULL));
    megamoe_status status[MAX_RANKS];
    fleet_compute(&f, &x->b, x->y, status);
    T_STATUS(megamoe_workspace_status(f.rank[0].workspace, NULL), MEGAMOE_OK);
    T_EQ_MEM(x->y, x->want, 6 * HIDDEN * sizeof *x->y);
    fleet_close(&f);
    close_fixture(x);
}

T_CASE(capacity_is_checked_before_staging) {
    fixture *x = open_fixture(6);
    const setup s = {.weights = x->m.weights, .tokens = TOKENS - 1};
    fleet f = fleet_open(&s);
    megamoe_workspace *ws = f.rank[0].workspace;
    const batch fits = batch_part(&x->b, 0, TOKENS - 1);
    fleet_stage(&f, &fits);
    const megamoe_view vx = view_x(&x->b), vi = view_ids(&x->b), vw = view_weights(&x->b);
    T_STATUS(megamoe_stage(ws, &vx, &vi, &vw, TOKENS, NULL), MEGAMOE_ECAPACITY);
    T_CONTAINS(megamoe_last_error(), "21 tokens");
    T_STATUS(megamoe_commit_staged(ws, TOKENS, NULL), MEGAMOE_ECAPACITY);
    T_STATUS(megamoe_stage(ws, &vx, &vi, &vw, -1, NULL), MEGAMOE_EINVAL);
    /* What was staged before still is. */
    megamoe_status status[MAX_RANKS];
    fleet_compute(&f, &fits, x->y, status);
    T_STATUS(status[0], MEGAMOE_OK);
    T_EQ_MEM(x->y, x->want, (TOKENS - 1) * HIDDEN * sizeof *x->y);
    fleet_close(&f);
    close_fixture(x);
}

T_CASE(pool_overflow_is_agreed) {
    fixture *x = open_fixture(7);
    for (int folded = 0; folded < 2; folded++) {
        setup s = {.weights = x->m.weights, .ranks = 2, .folded = folded, .pool_rows = TOKENS};
        int64_t need = 0; /* experts 2 and 3 are rank 1's */
        for (int i = 0; i < TOKENS * TOPK; i++)
            need += x->b.ids[i] >= 2;
        int32_t ids[TOKENS * TOPK];
        memcpy(ids, x->b.ids, sizeof ids);
        for (int i = 0; i < TOKENS * TOPK && need <= TOKENS; i++)
            if (x->b.ids[i] < 2) {
                x->b.ids[i] += 2;
                need++;
            }
        fleet f = fleet_open(&s);
        fleet_stage(&f, &x->b);
        const megamoe_workspace_detail d = agreed(&f, x);
        T_EQ_INT(d.status, MEGAMOE_ECAPACITY);
        T_EQ_INT(d.rank, 1);
        T_EQ_INT(d.value, need);
        T_CONTAINS(d.message, "pool_rows");
        fleet_close(&f);
        /* Exactly as many rows as are needed. */
        uint16_t want[TOKENS * HIDDEN];
        const setup one = {.weights = x->m.weights};
        run_once(&one, &x->b, want);
        s.pool_rows = need;
        run_once(&s, &x->b, x->y);
        T_EQ_MEM(x->y, want, sizeof want);
        memcpy(x->b.ids, ids, sizeof ids);
    }
    close_fixture(x);
}

T_CASE(layers_that_differ_between_ranks) {
    fixture *x = open_fixture(9);
    for (int folded = 0; folded < 2; folded++) {
        const setup s = {.weights = x->m.weights, .ranks = 2, .folded = folded};
        fleet f = fleet_open(&s);
        megamoe_layer_options promote = MEGAMOE_INIT(megamoe_layer_options);
        promote.accumulate = MEGAMOE_ACCUMULATE_PROMOTE;
        megamoe_layer *of_both = f.rank[1].layer;
        T_OK(megamoe_layer_create(f.rank[1].comm, f.rank[1].device, x->m.weights, &promote,
                                  &f.rank[1].layer));
        fleet_stage(&f, &x->b);
        const megamoe_workspace_detail d = agreed(&f, x);
        T_EQ_INT(d.status, MEGAMOE_EINVAL);
        T_EQ_INT(d.rank, 1);
        T_CONTAINS(d.message, "options");
        megamoe_layer_close(f.rank[1].layer);
        f.rank[1].layer = of_both;
        check_recovery(&f, x);
        fleet_close(&f);
    }
    close_fixture(x);
}

T_CASE(order_of_calls) {
    fixture *x = open_fixture(8);
    const setup s = {.weights = x->m.weights, .ranks = 2, .folded = true};
    fleet f = fleet_open(&s);
    const megamoe_view y = view_y(x->y, &x->b);
    const setup alone = {.weights = x->m.weights};
    fleet g = fleet_open(&alone);
    T_STATUS(megamoe_forward(g.rank[0].layer, g.rank[0].workspace, &y, NULL), MEGAMOE_ESTATE);
    megamoe_status status[MAX_RANKS];
    fleet_compute(&f, &x->b, x->y, status);
    T_STATUS(status[0], MEGAMOE_ESTATE);
    check_recovery(&f, x);
    check_recovery(&g, x);
    /* A folded communicator has no forward of a single rank. */
    T_STATUS(megamoe_forward(f.rank[0].layer, f.rank[0].workspace, &y, NULL), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "megamoe_forward_group");
    check_recovery(&f, x);
    fleet_close(&f);
    fleet_close(&g);
    close_fixture(x);
}

T_CASE(group_calls) {
    fixture *x = open_fixture(9);
    const setup s = {.weights = x->m.weights, .ranks = 2, .folded = true};
    fleet f = fleet_open(&s), g = fleet_open(&s);
    fleet_stage(&f, &x->b);
    fleet_stage(&g, &x->b);
    int64_t first;
    const batch parts[2] = {share_of(&x->b, 0, 2, &first), share_of(&x->b, 1, 2, &first)};
    const megamoe_view y[2] = {view_y(x->y, &parts[0]), view_y(x->y + first * HIDDEN, &parts[1])};
#define CALL(fleet, r)                                                                             \
    { (fleet).rank[r].layer, (fleet).rank[r].workspace, &y[r], NULL }
    const megamoe_forward_call good[2] = {CALL(f, 0), CALL(f, 1)};
    const megamoe_forward_call swapped[2] = {CALL(f, 1), CALL(f, 0)};
    const megamoe_forward_call foreign[2] = {CALL(f, 0), CALL(g, 1)};
    const megamoe_forward_call no_workspace[2] = {CALL(f, 0), {f.rank[1].layer, NULL, &y[1], NULL}};
    const megamoe_forward_call no_layer[2] = {CALL(f, 0), {NULL, f.rank[1].workspace, &y[1], NULL}};
    const megamoe_forward_call no_y[2] = {CALL(f, 0),
                                          {f.rank[1].layer, f.rank[1].workspace, NULL, NULL}};
#undef CALL
    poison(x);
    T_STATUS(megamoe_forward_group(NULL, 2), MEGAMOE_EINVAL);
    T_STATUS(megamoe_forward_group(good, 0), MEGAMOE_EINVAL);
    T_STATUS(megamoe_forward_group(good, 1), MEGAMOE_EINVAL);
    T_STATUS(megamoe_forward_group(swapped, 2), MEGAMOE_EINVAL);
    T_STATUS(megamoe_forward_group(foreign, 2), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "created together");
    T_STATUS(megamoe_forward_group(no_workspace, 2), MEGAMOE_EINVAL);
    T_STATUS(megamoe_forward_group(no_layer, 2), MEGAMOE_EINVAL);
    T_STATUS(megamoe_forward_group(no_y, 2), MEGAMOE_EINVAL);
    T_CHECK(poisoned(x));
    T_OK(megamoe_forward_group(good, 2));
    T_EQ_MEM(x->y, x->want, sizeof x->y);
    fleet_close(&f);
    fleet_close(&g);
    close_fixture(x);
}

/* A layer and a workspace that do not belong together. */
T_CASE(misfits) {
    fixture *x = open_fixture(10);
    t_random r = t_random_start(11);
    static const int32_t map[] = {0, 1, 2, 3, 0};
    static const struct {
        model_recipe recipe;
        const char *named;
    } others[] = {
        {{MEGAMOE_FORMAT_MXFP4, HIDDEN + 32, 32, 4, MEGAMOE_DTYPE_NONE, {0, 0, 0}}, "hidden"},
        {{MEGAMOE_FORMAT_MXFP4, HIDDEN, 64, 4, MEGAMOE_DTYPE_NONE, {0, 0, 0}}, "intermediate"},
        {{MEGAMOE_FORMAT_MXFP4, HIDDEN, 32, 5, MEGAMOE_DTYPE_NONE, {0, 0, 0}}, "experts"},
    };
    const setup s = {.weights = x->m.weights};
    fleet f = fleet_open(&s);
    const megamoe_view y = view_y(x->y, &x->b);
    fleet_stage(&f, &x->b);
    poison(x);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        model m = model_open(&others[i].recipe, &r);
        megamoe_layer *layer;
        T_OK(megamoe_layer_create(f.rank[0].comm, f.rank[0].device, m.weights, NULL, &layer));
        T_STATUS(megamoe_prewarm(layer, f.rank[0].workspace), MEGAMOE_EINVAL);
        T_CONTAINS(megamoe_last_error(), others[i].named);
        T_STATUS(megamoe_forward(layer, f.rank[0].workspace, &y, NULL), MEGAMOE_EINVAL);
        megamoe_layer_close(layer);
        model_close(&m);
    }
    setup replicas = s;
    replicas.options.physical_to_logical = map;
    replicas.options.physical_experts = 5;
    fleet g = fleet_open(&replicas);
    T_STATUS(megamoe_prewarm(g.rank[0].layer, f.rank[0].workspace), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "physical");
    fleet_close(&g);
    setup ranks = s;
    ranks.ranks = 2;
    g = fleet_open(&ranks);
    T_STATUS(megamoe_prewarm(g.rank[0].layer, f.rank[0].workspace), MEGAMOE_EINVAL);
    T_STATUS(megamoe_prewarm(g.rank[1].layer, g.rank[0].workspace), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "rank");
    fleet_close(&g);
    T_CHECK(poisoned(x));
    /* F32 scales per block need promotion, and the caller's codes. */
    setup blocks = s;
    blocks.input_scale = MEGAMOE_SCALE_BLOCK_F32;
    blocks.options.accumulate = MEGAMOE_ACCUMULATE_PROMOTE;
    g = fleet_open(&blocks);
    T_STATUS(megamoe_prewarm(f.rank[0].layer, g.rank[0].workspace), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "promotion");
    const megamoe_view vx = view_x(&x->b), vi = view_ids(&x->b), vw = view_weights(&x->b);
    T_STATUS(megamoe_stage(g.rank[0].workspace, &vx, &vi, &vw, TOKENS, NULL), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "megamoe_commit_staged");
    fleet_close(&g);
    check_recovery(&f, x);
    T_STATUS(megamoe_prewarm(NULL, f.rank[0].workspace), MEGAMOE_EINVAL);
    T_STATUS(megamoe_prewarm(f.rank[0].layer, NULL), MEGAMOE_EINVAL);
    fleet_close(&f);
    close_fixture(x);
}

/* Folded NVFP4 is not of 4 bits. The layer of exact weights serves both kinds of workspaces. */
T_CASE(int8_activations_and_folded_weights) {
    t_random r = t_random_start(15);
    const model_recipe recipe = {MEGAMOE_FORMAT_NVFP4, HIDDEN,   32, 4,
                                 MEGAMOE_DTYPE_NONE,   {0, 0, 0}};
    model m = model_open(&recipe, &r);
    batch b = batch_random(&m, TOKENS, TOPK, ROUTING_RANDOM, &r);
    uint16_t y[2][TOKENS * HIDDEN], again[TOKENS * HIDDEN];
    const setup e4m3 = {.weights = m.weights};
    setup int8 = e4m3, folded = e4m3;
    int8.activations = MEGAMOE_ACTIVATIONS_INT8;
    folded.options.nvfp4 = MEGAMOE_NVFP4_FOLDED;
    fleet f = fleet_open(&int8), g = fleet_open(&folded), h = fleet_open(&e4m3);
    fleet_forward(&f, &b, y[0]);
    T_STATUS(megamoe_prewarm(g.rank[0].layer, f.rank[0].workspace), MEGAMOE_EUNSUPPORTED);
    T_CONTAINS(megamoe_last_error(), "folded NVFP4");
    const megamoe_view vy = view_y(again, &b);
    T_STATUS(megamoe_forward(g.rank[0].layer, f.rank[0].workspace, &vy, NULL),
             MEGAMOE_EUNSUPPORTED);
    T_OK(megamoe_forward(h.rank[0].layer, f.rank[0].workspace, &vy, NULL));
    T_EQ_MEM(again, y[0], sizeof again);
    fleet_forward(&h, &b, y[1]);
    T_CHECK(memcmp(y[0], y[1], sizeof y[0]) != 0);
    fleet_close(&f);
    fleet_close(&g);
    fleet_close(&h);
    megamoe_reference_options options = MEGAMOE_INIT(megamoe_reference_options);
    options.nvfp4 = MEGAMOE_NVFP4_FOLDED;
    options.activations = MEGAMOE_ACTIVATIONS_INT8;
    const megamoe_view vx = view_x(&b), vi = view_ids(&b), vw = view_weights(&b);
    T_STATUS(megamoe_reference_forward(m.weights, &options, TOPK, &vx, &vi, &vw, TOKENS, &vy),
             MEGAMOE_EUNSUPPORTED);
    T_CONTAINS(megamoe_last_error(), "folded NVFP4");
    batch_free(&b);
    model_close(&m);
}

T_CASE(views_that_do_not_fit) {
    fixture *x = open_fixture(12);
    const setup s = {.weights = x->m.weights};
    fleet f = fleet_open(&s);
    megamoe_workspace *ws = f.rank[0].workspace;
    const megamoe_view vx = view_x(&x->b), vi = view_ids(&x->b), vw = view_weights(&x->b);
    const megamoe_view vy = view_y(x->y, &x->b);
    megamoe_view bad;
#define REFUSED(view, member, value, x_, i_, w_, named)                                            \
    bad = view;                                                                                    \
    bad.member = value;                                                                            \
    T_STATUS(megamoe_stage(ws, x_, i_, w_, TOKENS, NULL), MEGAMOE_EINVAL);                         \
    T_CONTAINS(megamoe_last_error(), named)
    REFUSED(vx, data, NULL, &bad, &vi, &vw, "x");
    REFUSED(vx, dtype, MEGAMOE_DTYPE_F32, &bad, &vi, &vw, "x: dtype F32");
    REFUSED(vx, rows, TOKENS - 1, &bad, &vi, &vw, "x: 20 rows");
    REFUSED(vx, stride, HIDDEN - 8, &bad, &vi, &vw, "x: stride");
    REFUSED(vx, stride, HIDDEN + 4, &bad, &vi, &vw, "multiple of 8");
    REFUSED(vx, stride, -HIDDEN, &bad, &vi, &vw, "x: stride");
    REFUSED(vx, data, (uint8_t *)x->b.x + 1, &bad, &vi, &vw, "aligned");
    REFUSED(vi, dtype, MEGAMOE_DTYPE_F32, &vx, &bad, &vw, "topk_ids");
    REFUSED(vi, rows, 0, &vx, &bad, &vw, "topk_ids");
    REFUSED(vi, stride, 1, &vx, &bad, &vw, "topk_ids");
    REFUSED(vi, data, NULL, &vx, &bad, &vw, "topk_ids");
    REFUSED(vw, dtype, MEGAMOE_DTYPE_I32, &vx, &vi, &bad, "topk_weights");
    REFUSED(vw, rows, 3, &vx, &vi, &bad, "topk_weights");
    REFUSED(vw, data, NULL, &vx, &vi, &bad, "topk_weights");
#undef REFUSED
    T_STATUS(megamoe_stage(ws, NULL, &vi, &vw, TOKENS, NULL), MEGAMOE_EINVAL);
    T_STATUS(megamoe_stage(NULL, &vx, &vi, &vw, TOKENS, NULL), MEGAMOE_EINVAL);
    T_STATUS(megamoe_commit_staged(NULL, 0, NULL), MEGAMOE_EINVAL);
    T_STATUS(megamoe_workspace_get_views(ws, NULL), MEGAMOE_EINVAL);
    T_STATUS(megamoe_workspace_status(NULL, NULL), MEGAMOE_EINVAL);
    /* None of them staged anything. */
    T_STATUS(megamoe_forward(f.rank[0].layer, ws, &vy, NULL), MEGAMOE_ESTATE);
    fleet_stage(&f, &x->b);
    poison(x);
    T_STATUS(megamoe_forward(NULL, ws, &vy, NULL), MEGAMOE_EINVAL);
    T_STATUS(megamoe_forward(f.rank[0].layer, NULL, &vy, NULL), MEGAMOE_EINVAL);
    T_STATUS(megamoe_forward(f.rank[0].layer, ws, NULL, NULL), MEGAMOE_EINVAL);
    bad = vy;
    bad.rows = TOKENS - 1;
    T_STATUS(megamoe_forward(f.rank[0].layer, ws, &bad, NULL), MEGAMOE_EINVAL);
    bad = vy;
    bad.dtype = MEGAMOE_DTYPE_F32;
    T_STATUS(megamoe_forward(f.rank[0].layer, ws, &bad, NULL), MEGAMOE_EINVAL);
    bad = vy;
    bad.stride = HIDDEN - 1;
    T_STATUS(megamoe_forward(f.rank[0].layer, ws, &bad, NULL), MEGAMOE_EINVAL);
    T_CHECK(poisoned(x));
    T_OK(megamoe_forward(f.rank[0].layer, ws, &vy, NULL));
    T_EQ_MEM(x->y, x->want, sizeof x->y);
    fleet_close(&f);
    close_fixture(x);
}
