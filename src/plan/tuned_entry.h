/* SPDX-License-Identifier: Apache-2.0 */
/* An entry of the file of measured plans: its JSON, and what makes it a sound one. */
#ifndef MM_PLAN_TUNED_ENTRY_H
#define MM_PLAN_TUNED_ENTRY_H

#include <jansson.h>

#include "plan/tuned.h"

enum { MM_TUNED_VERSION = 1, MM_TUNED_PLANS_MAX = 1024 };

typedef struct mm_tuned_entry {
    megamoe_tuned_key key;
    mm_tuned tuned;
} mm_tuned_entry;

/* Owns: mm_tuned_entry_close, in case of success. MEGAMOE_EFORMAT, MEGAMOE_ENOMEM. */
MEGAMOE_CHECKED megamoe_status mm_tuned_entry_read(const json_t *value, mm_tuned_entry *entry);
void mm_tuned_entry_close(mm_tuned_entry *entry);

/* NULL when out of memory. */
json_t *mm_tuned_entry_json(const mm_tuned_entry *entry);

/* NULL for a sound entry, else what is wrong with it. */
const char *mm_tuned_entry_fault(const mm_tuned_entry *entry);

/* Adds plans, which come before those for the same tokens. MEGAMOE_EINVAL, MEGAMOE_ENOMEM. */
MEGAMOE_CHECKED megamoe_status mm_tuned_entry_add(mm_tuned_entry *entry,
                                                  const megamoe_tuned_plan *plans, int32_t n);

/* Whether all is equal but the capacity. */
bool mm_tuned_same_kind(const megamoe_tuned_key *a, const megamoe_tuned_key *b);

#endif
