/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/inexact.h"

#include <inttypes.h>
#include <stdlib.h>

#include "weights/object.h"

void mm_inexact_add(mm_inexact *total, const mm_inexact *found) {
    const uint64_t groups = total->groups + found->groups;
    if (!total->groups)
        *total = *found;
    total->groups = groups;
}

void mm_inexact_count(mm_inexact *total, mm_inexact group) {
    group.groups = 1;
    mm_inexact_add(total, &group);
}

megamoe_status mm_inexact_status(const megamoe_weights *weights, const mm_inexact *inexact) {
    if (!inexact->groups)
        return MEGAMOE_OK;
    return mm_matrix_fail(weights, MEGAMOE_EINEXACT, inexact->expert, inexact->projection, true,
                          "row %" PRId32 ", block %" PRId32
                          ": the scale lies %d binades %s the row's base; %s; "
                          "groups outside: %" PRIu64,
                          inexact->row, inexact->block, abs(inexact->binades),
                          inexact->binades < 0 ? "below" : "above", inexact->held, inexact->groups);
}
