/* SPDX-License-Identifier: Apache-2.0 */
/* Spans of forwards on the CPU: complete, in order, and without effect on the result. */
#include "megamoe/trace.h"

#include <stdlib.h>
#include <string.h>

#include "fixture.h"

enum { SPANS_MAX = 4096 };

static megamoe_span spans[SPANS_MAX];

/* All spans of a rank's last forward. */
static int64_t spans_of(const rank *r) {
    int64_t count, dropped;
    T_OK(megamoe_workspace_get_trace(r->workspace, spans, SPANS_MAX, &count, &dropped));
    T_CHECK(count > 0 && count < SPANS_MAX);
    T_EQ_INT(dropped, 0);
    return count;
}

/* Spans of one thread do not overlap: on the CPU none contains another. */
static void check_order(int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const megamoe_span *a = &spans[i];
        T_CHECK(a->begin_us >= 0 && a->end_us >= a->begin_us);
        T_EQ_INT(a->part, MEGAMOE_PART_WHOLE);
        T_EQ_INT(a->lane, MEGAMOE_LANE_WORKER);
        T_EQ_INT(a->team, -1);
        for (int64_t k = i + 1; k < n; k++)
            if (spans[k].worker == a->worker)
                T_CHECK(a->end_us <= spans[k].begin_us || spans[k].end_us <= a->begin_us);
    }
}

static int64_t count_phase(int64_t n, megamoe_span_phase phase, int32_t expert) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++)
        found += spans[i].phase == phase && spans[i].expert == expert;
    return found;
}

/* Every expert with tokens has tiles of both products, with as many tokens as it received. */
static void check_complete(const rank *r, int64_t n, int32_t threads) {
    int64_t received[8];
    const int32_t local = 4 / r->ranks;
    T_OK(megamoe_workspace_receive_counts(r->workspace, received, local));
    T_EQ_INT(count_phase(n, MEGAMOE_SPAN_COUNT, -1), 1);
    T_EQ_INT(count_phase(n, MEGAMOE_SPAN_DISPATCH, -1), threads);
    T_EQ_INT(count_phase(n, MEGAMOE_SPAN_COMBINE, -1), threads);
    for (int32_t e = 0; e < local; e++) {
        T_EQ_INT(count_phase(n, MEGAMOE_SPAN_FC1, e) > 0, received[e] > 0);
        T_EQ_INT(count_phase(n, MEGAMOE_SPAN_FC2, e) > 0, received[e] > 0);
        for (int64_t i = 0; i < n; i++)
            if (spans[i].expert == e)
                T_EQ_INT(spans[i].tokens, received[e]);
    }
}

T_CASE(spans_are_complete_and_in_order) {
    fixture *x = open_fixture(1);
    for (int32_t ranks = 1; ranks <= 4; ranks *= 2)
        for (int folded = 0; folded < 2; folded++)
            for (int32_t threads = 1; threads <= 3; threads += 2) {
                const setup s = {.weights = x->m.weights,
                                 .ranks = ranks,
                                 .folded = folded,
                                 .threads = threads,
                                 .trace = 256};
                fleet f = fleet_open(&s);
                for (int round = 0; round < 2; round++) {
                    fleet_forward(&f, &x->b, x->y);
                    T_EQ_MEM(x->y, x->want, sizeof x->y);
                    for (int32_t r = 0; r < ranks; r++) {
                        const int64_t n = spans_of(&f.rank[r]);
                        check_order(n);
                        check_complete(&f.rank[r], n, threads);
                    }
                }
                fleet_close(&f);
            }
    close_fixture(x);
}

T_CASE(a_trace_that_is_full_says_how_much_it_dropped) {
    fixture *x = open_fixture(2);
    setup s = {.weights = x->m.weights, .trace = 256};
    fleet f = fleet_open(&s);
    fleet_forward(&f, &x->b, x->y);
    const int64_t all = spans_of(&f.rank[0]);
    fleet_close(&f);
    s.trace = 3;
    f = fleet_open(&s);
    fleet_forward(&f, &x->b, x->y);
    T_EQ_MEM(x->y, x->want, sizeof x->y);
    int64_t count, dropped;
    T_OK(megamoe_workspace_get_trace(f.rank[0].workspace, spans, SPANS_MAX, &count, &dropped));
    T_EQ_INT(count, 3);
    T_EQ_INT(dropped, all - 3);
    /* What does not fit the caller's memory is counted, not written. */
    memset(spans, 0, sizeof spans);
    T_OK(megamoe_workspace_get_trace(f.rank[0].workspace, spans, 2, &count, NULL));
    T_EQ_INT(count, 3);
    T_EQ_F64(spans[2].end_us, 0);
    T_OK(megamoe_workspace_get_trace(f.rank[0].workspace, NULL, 0, &count, NULL));
    T_EQ_INT(count, 3);
    fleet_close(&f);
    close_fixture(x);
}

T_CASE(what_is_refused) {
    fixture *x = open_fixture(3);
    setup s = {.weights = x->m.weights};
    int64_t count, dropped;
    fleet f = fleet_open(&s);
    fleet_forward(&f, &x->b, x->y);
    T_STATUS(megamoe_workspace_get_trace(f.rank[0].workspace, spans, 1, &count, &dropped),
             MEGAMOE_ESTATE);
    T_CONTAINS(megamoe_last_error(), "capacity.trace");
    fleet_close(&f);

    s.trace = 1;
    f = fleet_open(&s);
    const megamoe_workspace *ws = f.rank[0].workspace;
    T_STATUS(megamoe_workspace_get_trace(ws, spans, 1, &count, &dropped), MEGAMOE_ESTATE);
    T_CONTAINS(megamoe_last_error(), "no forward");
    T_STATUS(megamoe_workspace_get_trace(NULL, spans, 1, &count, &dropped), MEGAMOE_EINVAL);
    T_STATUS(megamoe_workspace_get_trace(ws, spans, 1, NULL, &dropped), MEGAMOE_EINVAL);
    T_STATUS(megamoe_workspace_get_trace(ws, NULL, 1, &count, &dropped), MEGAMOE_EINVAL);
    T_STATUS(megamoe_workspace_get_trace(ws, spans, -1, &count, &dropped), MEGAMOE_EINVAL);
    rank *r = &f.rank[0];
    megamoe_workspace *none = NULL;
    static const int64_t bad[] = {-1, 65537, INT64_MAX};
    for (int i = 0; i < 3; i++) {
        megamoe_capacity capacity = r->capacity;
        capacity.trace = bad[i];
        T_STATUS(megamoe_workspace_create(r->comm, r->device, &r->shape, &capacity, &none),
                 MEGAMOE_EINVAL);
        T_CONTAINS(megamoe_last_error(), "capacity.trace");
    }
    fleet_close(&f);
    close_fixture(x);
}
