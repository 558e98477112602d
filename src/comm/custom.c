/* SPDX-License-Identifier: Apache-2.0 */
#include "comm/custom.h"

#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"

static megamoe_status custom_allgather(void *state, const void *mine, void *all, size_t bytes,
                                       int32_t timeout_ms) {
    const megamoe_bootstrap *callers = state;
    const int error = callers->allgather(callers->user, mine, all, bytes, timeout_ms);
    return error ? mm_fail(MEGAMOE_EPEER, "rank %d: the caller's allgather returned %d",
                           callers->rank, error)
                 : MEGAMOE_OK;
}

static void custom_abort(void *state) {
    const megamoe_bootstrap *callers = state;
    if (callers->abort)
        callers->abort(callers->user);
}

static void custom_close(void *state) {
    megamoe_bootstrap *callers = state;
    if (callers->close)
        callers->close(callers->user);
    free(callers);
}

megamoe_status mm_custom_open(const megamoe_bootstrap *callers, mm_bootstrap *bootstrap) {
    megamoe_bootstrap *copy = mm_alloc(sizeof *copy);
    if (!copy)
        return mm_fail(MEGAMOE_ENOMEM, "communicator: out of memory");
    *copy = *callers;
    *bootstrap =
        (mm_bootstrap){copy->rank, copy->size, copy, custom_allgather, custom_abort, custom_close};
    return MEGAMOE_OK;
}
