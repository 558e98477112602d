/* SPDX-License-Identifier: Apache-2.0 */
/* A map of experts that spreads their loads over ranks. */
#ifndef MM_PLAN_BALANCE_H
#define MM_PLAN_BALANCE_H

#include <stdint.h>

#include "megamoe/status.h"

/* megamoe_placement_balance, which states the rule; the arguments are checked. */
MEGAMOE_CHECKED megamoe_status mm_balance(const int64_t *loads, int32_t experts, int32_t ranks,
                                          int32_t physical, int32_t *physical_to_logical);

#endif
