/* SPDX-License-Identifier: Apache-2.0 */
/* What each thread of a forward has to itself. */
#ifndef MM_CPU_SCRATCH_H
#define MM_CPU_SCRATCH_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/memory.h"
#include "cpu/kernels.h"

enum {
    MM_FC1_UNIT_TILES = MM_BLOCK / MM_TILE_HALF, /* the 128 channels that share a scale */
    MM_FC2_UNIT_TILES = 16,
    MM_FEW_TOKENS = 3, /* of one expert: up to here its weights are read from memory once */
    MM_TASKS_PER_THREAD = 8,
    MM_SCRATCH_SUMS = MM_FC2_UNIT_TILES * MM_PANEL_TOKENS /* (tile, token) pairs */
};

static inline int32_t mm_fc1_units(int32_t tiles) {
    return (tiles + MM_FC1_UNIT_TILES - 1) / MM_FC1_UNIT_TILES;
}

static inline int32_t mm_fc2_units(int32_t tiles) {
    return (tiles + MM_FC2_UNIT_TILES - 1) / MM_FC2_UNIT_TILES;
}

struct mm_scratch {
    _Alignas(MM_CACHE_LINE) float sums[MM_SCRATCH_SUMS * MM_TILE_ROWS];
    float h[MM_PANEL_TOKENS * MM_BLOCK];
    uint8_t codes[MM_BLOCK];
};

/*
 * Tasks 0..n-1 spread over threads: each takes its own contiguous range from the front, so that
 * it streams through memory, then helps with what is left of the others'.
 */
struct mm_range {
    _Alignas(MM_CACHE_LINE) atomic_int next;
    int32_t end;
};

static inline void mm_ranges_set(struct mm_range *ranges, int32_t threads, int32_t tasks) {
    for (int32_t i = 0; i < threads; i++) {
        atomic_store_explicit(&ranges[i].next, (int)((int64_t)tasks * i / threads),
                              memory_order_relaxed);
        ranges[i].end = (int32_t)((int64_t)tasks * (i + 1) / threads);
    }
}

/* The next task of a thread, or -1. */
static inline int32_t mm_ranges_take(struct mm_range *ranges, int32_t thread, int32_t threads) {
    for (int32_t i = 0; i < threads; i++) {
        struct mm_range *range = &ranges[(thread + i) % threads];
        if (atomic_load_explicit(&range->next, memory_order_relaxed) >= range->end)
            continue;
        const int32_t task = atomic_fetch_add_explicit(&range->next, 1, memory_order_relaxed);
        if (task < range->end)
            return task;
    }
    return -1;
}

#endif
