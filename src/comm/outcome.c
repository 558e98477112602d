/* SPDX-License-Identifier: Apache-2.0 */
#include "comm/outcome.h"

#include <stdio.h>

#include "base/error.h"

void mm_outcome_set(mm_outcome *outcome, megamoe_status status) {
    if (outcome->status != MEGAMOE_OK || status == MEGAMOE_OK)
        return;
    outcome->status = status;
    snprintf(outcome->message, sizeof outcome->message, "%s", megamoe_last_error());
}

static const mm_outcome *at(const mm_outcome *first, size_t stride, int32_t rank) {
    return (const mm_outcome *)((const char *)first + (size_t)rank * stride);
}

megamoe_status mm_outcome_of_all(const char *what, const mm_outcome *first, size_t stride,
                                 int32_t rank, int32_t size) {
    int32_t failed = 0;
    while (failed < size && at(first, stride, failed)->status == MEGAMOE_OK)
        failed++;
    if (failed == size)
        return MEGAMOE_OK;
    const int32_t own = at(first, stride, rank)->status;
    const char *message = at(first, stride, failed)->message;
    const megamoe_status status = own != MEGAMOE_OK ? (megamoe_status)own : MEGAMOE_EPEER;
    return size == 1 ? mm_fail(status, "%s", message)
                     : mm_fail(status, "%s on rank %d: %s", what, failed, message);
}
