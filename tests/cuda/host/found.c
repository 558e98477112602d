/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels report becomes errors in the CPU backend's words. */
#include "cuda/workspace.h"

#include "t.h"

static mm_cuda_page page;
static mm_cuda_workspace ws;
static const char *cause = ""; /* why the ranks gave up */

static void start(void) {
    page = (mm_cuda_page){.aborted = 0};
    ws = (mm_cuda_workspace){.shape = {.experts = 64, .topk = 4},
                             .capacity = {.pool_rows = 100},
                             .rank = 2,
                             .ranks = 4,
                             .page = &page};
}

static megamoe_workspace_detail report(mm_cuda_found found) {
    megamoe_workspace_detail detail = {.status = MEGAMOE_OK};
    page.found = found;
    T_CHECK(mm_cuda_workspace_found(&ws, cause, &detail));
    T_CHECK(!mm_cuda_workspace_found(&ws, cause, &detail));
    T_EQ_INT(detail.status, found.status);
    T_EQ_INT(detail.phase, found.phase);
    T_EQ_INT(detail.rank, found.rank);
    T_EQ_INT(detail.epoch, found.epoch);
    return detail;
}

T_CASE(nothing_is_found_before_a_report) {
    start();
    megamoe_workspace_detail detail = {.rank = 77};
    T_CHECK(!mm_cuda_workspace_found(&ws, cause, &detail));
    T_EQ_INT(detail.rank, 77);
}

T_CASE(an_expert_id_out_of_range) {
    start();
    const megamoe_workspace_detail d =
        report((mm_cuda_found){1, MEGAMOE_EID, MEGAMOE_PHASE_COUNT, 3, 17, 2, INT64_C(1) << 40});
    T_EQ_INT(d.token, 17);
    T_EQ_INT(d.slot, 2);
    T_EQ_INT(d.value, INT64_C(1) << 40);
    T_EQ_STR(d.message, "rank 3, token 17, slot 2: expert id 1099511627776; expected -1..63");
}

T_CASE(an_input_scale_out_of_range) {
    start();
    const megamoe_workspace_detail d =
        report((mm_cuda_found){1, MEGAMOE_EID, MEGAMOE_PHASE_COUNT, 0, 5, -1, 255});
    T_EQ_INT(d.token, 5);
    T_EQ_INT(d.slot, -1);
    T_EQ_INT(d.value, 255);
    T_EQ_STR(d.message, "rank 0, token 5: input scale byte 255; expected 79..174");
}

T_CASE(layers_that_differ) {
    start();
    const megamoe_workspace_detail d =
        report((mm_cuda_found){9, MEGAMOE_EINVAL, MEGAMOE_PHASE_COUNT, 1, -1, -1, 0});
    T_EQ_INT(d.token, -1);
    T_EQ_STR(d.message, "the layer of rank 1 has other options or another expert map than that of "
                        "rank 0");
}

T_CASE(a_layer_that_was_placed_after_the_capture) {
    start();
    T_EQ_STR(
        report((mm_cuda_found){9, MEGAMOE_ESTATE, MEGAMOE_PHASE_COUNT, 1, -1, -1, 0}).message,
        "the layer of rank 1 has been placed anew since its forward was captured, which has to "
        "be done again, or placing it has failed");
}

T_CASE(a_pool_that_overflows) {
    start();
    const megamoe_workspace_detail d =
        report((mm_cuda_found){9, MEGAMOE_ECAPACITY, MEGAMOE_PHASE_DISPATCH, 1, -1, -1, 101});
    T_EQ_INT(d.value, 101);
    T_EQ_STR(d.message, "rank 1 receives 101 routes; its pool has 100 rows (capacity.pool_rows)");
}

T_CASE(waits_that_end) {
    start();
    T_EQ_STR(
        report((mm_cuda_found){4, MEGAMOE_ETIMEDOUT, MEGAMOE_PHASE_COUNT, 1, -1, -1, 0}).message,
        "forward 4, rank 2, counting: waiting for rank 1: the deadline has passed");
    T_EQ_STR(
        report((mm_cuda_found){5, MEGAMOE_EPEER, MEGAMOE_PHASE_EXPERTS, -1, -1, -1, 0}).message,
        "forward 5, rank 2, experts: another rank has given up");
    cause = "the process of rank 3 has ended";
    T_EQ_STR(
        report((mm_cuda_found){7, MEGAMOE_EPEER, MEGAMOE_PHASE_COMBINE, -1, -1, -1, 0}).message,
        "forward 7, rank 2, combine: the process of rank 3 has ended");
    T_EQ_STR(report((mm_cuda_found){8, MEGAMOE_EPEER, MEGAMOE_PHASE_COUNT, 1, -1, -1, 0}).message,
             "forward 8, rank 2, counting: waiting for rank 1: it has closed its workspace");
    cause = "";
    T_EQ_STR(
        report((mm_cuda_found){6, MEGAMOE_ETIMEDOUT, MEGAMOE_PHASE_COMBINE, 0, -1, -1, 0}).message,
        "forward 6, rank 2, combine: waiting for rank 0: the deadline has passed");
}

T_CASE(the_same_error_in_a_later_forward_is_new) {
    start();
    (void)report((mm_cuda_found){1, MEGAMOE_EID, MEGAMOE_PHASE_COUNT, 3, 17, 2, 64});
    (void)report((mm_cuda_found){2, MEGAMOE_EID, MEGAMOE_PHASE_COUNT, 3, 17, 2, 64});
    (void)report((mm_cuda_found){UINT32_MAX, MEGAMOE_EID, MEGAMOE_PHASE_COUNT, 3, 17, 2, 64});
    (void)report((mm_cuda_found){0, MEGAMOE_EID, MEGAMOE_PHASE_COUNT, 3, 17, 2, 64});
}
