/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ranks of one process. A gathering is one collective: every rank brings some bytes and gets
 * those of all. The n-th gathering of a rank is the n-th of every other.
 */
#ifndef MM_COMM_GROUP_H
#define MM_COMM_GROUP_H

#include <stdbool.h>

#include "comm/alarm.h"
#include "comm/bootstrap.h"

typedef struct mm_group mm_group;
typedef struct mm_gathering mm_gathering;

/* Owns: each of `size` members is closed by mm_group_close; the shared part goes with the last. */
MEGAMOE_CHECKED megamoe_status mm_group_open(int32_t size, mm_group **group);
void mm_group_close(mm_group *group);

mm_alarm *mm_group_alarm(mm_group *group);

/*
 * Brings the rank's bytes to gathering `number` without waiting: for ranks that one thread drives.
 * Owns: mm_gathering_leave ends this rank's use. Returns MEGAMOE_ENOMEM or MEGAMOE_EINVAL (not as
 * many bytes as another rank has brought).
 */
MEGAMOE_CHECKED megamoe_status mm_gathering_join(mm_group *group, int32_t rank, uint64_t number,
                                                 const void *mine, size_t bytes,
                                                 mm_gathering **gathering);

/* [size][bytes] once all have joined, else NULL. */
const void *mm_gathering_all(mm_group *group, const mm_gathering *gathering);

/* The last one frees. Accepts NULL. */
void mm_gathering_leave(mm_group *group, mm_gathering *gathering);

/* For ranks that are threads: mm_bootstrap's allgather. `number` counts the rank's calls. */
MEGAMOE_CHECKED megamoe_status mm_group_allgather(mm_group *group, int32_t rank, uint64_t number,
                                                  const void *mine, void *all, size_t bytes,
                                                  int32_t timeout_ms);

#endif
