/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MM_BASE_MEMORY_H
#define MM_BASE_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "megamoe/types.h"

enum { MM_CACHE_LINE = 64, MM_PAGE = 4096 };

static inline size_t mm_round_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

static inline int64_t mm_ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

static inline int64_t mm_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static inline int64_t mm_max(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* False if a * b does not fit. */
static inline bool mm_mul_size(size_t a, size_t b, size_t *product) {
    return !__builtin_mul_overflow(a, b, product);
}

static inline bool mm_add_size(size_t a, size_t b, size_t *sum) {
    return !__builtin_add_overflow(a, b, sum);
}

/* Zeroed and aligned to a cache line; freed by free(). NULL when out of memory. */
void *mm_alloc(size_t bytes);

/* The same in huge pages where the system has them, for what is streamed through often. */
void *mm_alloc_huge(size_t bytes);

/* Asks for huge pages before memory is first touched; a hint. */
void mm_advise_huge(void *memory, size_t bytes);

/*
 * Zeroed pages that are backed by memory only once touched; for buffers sized by a bound.
 * NULL when out of address space; release with mm_unreserve(memory, same bytes).
 */
void *mm_reserve(size_t bytes);
void mm_unreserve(void *memory, size_t bytes);

/*
 * Backs pages with memory now rather than at their first touch, for writing or for reading. A hint:
 * where the system cannot, the first touch does it. Contents stay.
 */
void mm_populate(const void *memory, size_t bytes, bool writable);

/*
 * Copies a caller's struct that begins with `size_t struct_size` into `to` (of to_bytes): missing
 * members become zero. MEGAMOE_EINVAL if struct_size is 0 or extra bytes are not zero.
 * `from` may be NULL for all zero. `what` names the struct in the message.
 */
MEGAMOE_CHECKED megamoe_status mm_take_struct(void *to, size_t to_bytes, const void *from,
                                              const char *what);

/* The other direction, for structs that the library fills: writes at most the caller's size. */
MEGAMOE_CHECKED megamoe_status mm_give_struct(void *to, const void *from, size_t from_bytes,
                                              const char *what);

#endif
