/* SPDX-License-Identifier: Apache-2.0 */
/* Turns what kernels report into errors, in the words of the CPU backend. */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>

#include "cuda/workspace.h"
#include "num/input.h"

static const char *phase_word(int32_t phase) {
    switch (phase) {
    case MEGAMOE_PHASE_COUNT:
        return "counting";
    case MEGAMOE_PHASE_DISPATCH:
        return "dispatch";
    case MEGAMOE_PHASE_EXPERTS:
        return "experts";
    case MEGAMOE_PHASE_COMBINE:
        return "combine";
    default:
        return "unknown phase";
    }
}

static void describe_batch(const mm_cuda_workspace *ws, const mm_cuda_found *found,
                           megamoe_workspace_detail *detail) {
    detail->token = found->token;
    detail->slot = found->slot;
    detail->value = found->value;
    if (found->slot >= 0)
        snprintf(detail->message, sizeof detail->message,
                 "rank %d, token %d, slot %d: expert id %" PRId64 "; expected -1..%d", found->rank,
                 found->token, found->slot, found->value, ws->shape.experts - 1);
    else
        snprintf(detail->message, sizeof detail->message,
                 "rank %d, token %d: input scale byte %" PRId64 "; expected %d..%d", found->rank,
                 found->token, found->value, MM_BLOCK_EXPONENT_MIN + MM_BLOCK_BYTE_ZERO,
                 MM_BLOCK_EXPONENT_MAX + MM_BLOCK_BYTE_ZERO);
}

static void describe_waiting(const mm_cuda_workspace *ws, const mm_cuda_found *found,
                             const char *cause, megamoe_workspace_detail *detail) {
    if (found->status != MEGAMOE_EPEER)
        cause = "the deadline has passed";
    else if (found->rank >= 0) /* it has said so itself */
        cause = "it has closed its workspace";
    else if (!*cause) /* told by the kernel of a rank whose host does not know it yet */
        cause = "another rank has given up";
    char waiting[32] = "";
    if (found->rank >= 0)
        snprintf(waiting, sizeof waiting, "waiting for rank %d: ", found->rank);
    snprintf(detail->message, sizeof detail->message, "forward %" PRIu32 ", rank %d, %s: %s%s",
             found->epoch, ws->rank, phase_word(found->phase), waiting, cause);
}

void mm_cuda_found_describe(const mm_cuda_workspace *ws, const mm_cuda_found *found,
                            const char *cause, megamoe_workspace_detail *detail) {
    *detail = (megamoe_workspace_detail){.struct_size = sizeof *detail,
                                         .status = (megamoe_status)found->status,
                                         .phase = (megamoe_phase)found->phase,
                                         .rank = found->rank,
                                         .epoch = found->epoch,
                                         .token = -1,
                                         .slot = -1};
    switch (found->status) {
    case MEGAMOE_EID:
        describe_batch(ws, found, detail);
        break;
    case MEGAMOE_EINVAL:
        snprintf(detail->message, sizeof detail->message,
                 "the layer of rank %d has other options or another expert map than that of rank 0",
                 found->rank);
        break;
    case MEGAMOE_ESTATE:
        snprintf(detail->message, sizeof detail->message,
                 "the layer of rank %d has been placed anew since its forward was captured, which "
                 "has to be done again, or placing it has failed",
                 found->rank);
        break;
    case MEGAMOE_ECAPACITY:
        detail->value = found->value;
        snprintf(detail->message, sizeof detail->message,
                 "rank %d receives %" PRId64 " routes; its pool has %" PRId64
                 " rows (capacity.pool_rows)",
                 found->rank, found->value, ws->capacity.pool_rows);
        break;
    default:
        describe_waiting(ws, found, cause, detail);
        break;
    }
}

/* Words that kernels store. An acquiring load keeps those after it behind it. */
static uint32_t load_u32(const volatile uint32_t *word) {
    return atomic_load_explicit((const volatile _Atomic uint32_t *)word, memory_order_acquire);
}

static int32_t load_i32(const volatile int32_t *word) {
    return atomic_load_explicit((const volatile _Atomic int32_t *)word, memory_order_acquire);
}

static int64_t load_i64(const volatile int64_t *word) {
    return atomic_load_explicit((const volatile _Atomic int64_t *)word, memory_order_acquire);
}

/*
 * Pairs with the kernels' release of `epoch`. A later forward may replace the record meanwhile;
 * then its epoch has changed and the copy is made again.
 */
static mm_cuda_found read_record(const volatile mm_cuda_found *record) {
    mm_cuda_found copy;
    do {
        copy.epoch = load_u32(&record->epoch);
        copy.status = load_i32(&record->status);
        copy.phase = load_i32(&record->phase);
        copy.rank = load_i32(&record->rank);
        copy.token = load_i32(&record->token);
        copy.slot = load_i32(&record->slot);
        copy.value = load_i64(&record->value);
    } while (copy.epoch != load_u32(&record->epoch));
    return copy;
}

bool mm_cuda_workspace_found(mm_cuda_workspace *workspace, const char *cause,
                             megamoe_workspace_detail *detail) {
    const mm_cuda_found found = read_record(&workspace->page->found);
    if (found.epoch == workspace->seen)
        return false;
    workspace->seen = found.epoch;
    mm_cuda_found_describe(workspace, &found, cause, detail);
    return true;
}
