/* SPDX-License-Identifier: Apache-2.0 */
/* What each expert has had to do. */
#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"
#include "layer/layer.h"
#include "plan/balance.h"

enum { MAX_RANKS = 1024, MAX_PHYSICAL = 65536 };

void mm_layer_count(megamoe_layer *layer, const mm_cpu_workspace *workspace) {
    for (int32_t e = 0; e < layer->placement.local; e++)
        atomic_fetch_add_explicit(&layer->received[e],
                                  workspace->segments[e + 1] - workspace->segments[e],
                                  memory_order_relaxed);
}

static megamoe_status read_counts(const megamoe_layer *layer, int64_t *counts) {
    if (layer->device->cuda)
        return mm_cuda_layer_received(&layer->cuda, counts);
    for (int32_t e = 0; e < layer->placement.local; e++)
        counts[e] = atomic_load_explicit(&layer->received[e], memory_order_relaxed);
    return MEGAMOE_OK;
}

megamoe_status megamoe_layer_receive_counts(const megamoe_layer *layer, int64_t *counts,
                                            int32_t n) {
    if (!layer)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_layer_receive_counts: layer is NULL");
    if (!counts || n != layer->placement.local)
        return mm_fail(MEGAMOE_EINVAL, "receive counts: room for %d; this rank has %d experts",
                       counts ? n : 0, layer->placement.local);
    return read_counts(layer, counts);
}

megamoe_status megamoe_layer_reset_counts(megamoe_layer *layer) {
    if (!layer)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_layer_reset_counts: layer is NULL");
    if (layer->device->cuda)
        return mm_cuda_layer_clear_received(&layer->cuda);
    for (int32_t e = 0; e < layer->placement.local; e++)
        atomic_store_explicit(&layer->received[e], 0, memory_order_relaxed);
    return MEGAMOE_OK;
}

megamoe_status megamoe_layer_loads(megamoe_comm *comm, const megamoe_layer *layer, int64_t *loads,
                                   int32_t experts) {
    if (!layer)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_layer_loads: layer is NULL");
    if (!comm || !loads || experts != layer->placement.logical)
        return mm_fail(MEGAMOE_EINVAL, "loads: %s; the layer has %d experts",
                       !comm ? "comm is NULL" : "no room for one of each expert",
                       layer->placement.logical);
    const mm_placement *placement = &layer->placement;
    const int32_t ranks = megamoe_comm_size(comm);
    const size_t bytes = (size_t)experts * sizeof *loads;
    int64_t *mine = mm_alloc(bytes), *all = mm_alloc((size_t)ranks * bytes);
    int64_t *counts = mm_alloc((size_t)placement->local * sizeof *counts);
    megamoe_status status = mine && all && counts ? read_counts(layer, counts)
                                                  : mm_fail(MEGAMOE_ENOMEM, "loads: out of memory");
    if (status != MEGAMOE_OK) {
        megamoe_comm_abort(comm); /* the others wait for this rank */
        goto done;
    }
    for (int32_t e = 0; e < placement->local; e++)
        mine[placement->logical_of[placement->first + e]] += counts[e];
    MM_TRY_GOTO(megamoe_comm_allgather(comm, mine, all, bytes), done);
    for (int32_t e = 0; e < experts; e++) {
        loads[e] = 0;
        for (int32_t r = 0; r < ranks; r++)
            loads[e] += all[(size_t)r * (size_t)experts + (size_t)e];
    }
done:
    free(mine);
    free(all);
    free(counts);
    return status;
}

megamoe_status megamoe_placement_balance(const int64_t *loads, int32_t experts, int32_t ranks,
                                         int32_t physical, int32_t *physical_to_logical) {
    if (!loads || !physical_to_logical)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_placement_balance: %s is NULL",
                       loads ? "physical_to_logical" : "loads");
    if (experts < 1 || physical < experts || physical > MAX_PHYSICAL || ranks < 1 ||
        ranks > MAX_RANKS)
        return mm_fail(MEGAMOE_EINVAL,
                       "placement: %d experts as %d physical ones on %d ranks; expected at least "
                       "one, as many or more (at most %d), on 1..%d",
                       experts, physical, ranks, MAX_PHYSICAL, MAX_RANKS);
    for (int32_t e = 0; e < experts; e++)
        if (loads[e] < 0)
            return mm_fail(MEGAMOE_EINVAL, "placement: the load of expert %d is %lld", e,
                           (long long)loads[e]);
    return mm_balance(loads, experts, ranks, physical, physical_to_logical);
}
