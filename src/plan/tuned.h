/* SPDX-License-Identifier: Apache-2.0 */
/* The file of measured plans (include/megamoe/tune.h, docs/tuning.md) and what is found in it. */
#ifndef MM_PLAN_TUNED_H
#define MM_PLAN_TUNED_H

#include "megamoe/tune.h"

/* Plans for one key, in ascending order of tokens. Zero-initialised has none. */
typedef struct mm_tuned {
    megamoe_tuned_plan *plans;
    int32_t n;
} mm_tuned;

/* The plan for a batch of `tokens`; NULL if nothing near was measured. */
const megamoe_tuned_plan *mm_tuned_near(const mm_tuned *tuned, int64_t tokens);

/*
 * The plans of exactly this key, else of the one that differs by the next larger capacity, else
 * none. `path` as in tune.h. Owns: the caller frees found->plans. MEGAMOE_ENOMEM.
 */
MEGAMOE_CHECKED megamoe_status mm_tuned_find(const char *path, const megamoe_tuned_key *key,
                                             mm_tuned *found);

#endif
