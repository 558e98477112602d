/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "base/memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/error.h"

void *mm_alloc(size_t bytes) {
    if (bytes > SIZE_MAX - MM_CACHE_LINE)
        return NULL;
    const size_t rounded = mm_round_up(bytes ? bytes : 1, MM_CACHE_LINE);
    void *memory = aligned_alloc(MM_CACHE_LINE, rounded);
    if (memory)
        memset(memory, 0, rounded);
    return memory;
}

void mm_advise_huge(void *memory, size_t bytes) {
    const uintptr_t start = mm_round_up((uintptr_t)memory, MM_PAGE);
    const uintptr_t end = ((uintptr_t)memory + bytes) / MM_PAGE * MM_PAGE;
    if (start < end)
        (void)madvise((void *)start, end - start, MADV_HUGEPAGE);
}

void *mm_alloc_huge(size_t bytes) {
    enum { HUGE_PAGE = 2 << 20 };
    if (bytes > SIZE_MAX - HUGE_PAGE)
        return NULL;
    const size_t rounded = mm_round_up(bytes ? bytes : 1, HUGE_PAGE);
    void *memory = aligned_alloc(HUGE_PAGE, rounded);
    if (!memory)
        return NULL;
    mm_advise_huge(memory, rounded);
    memset(memory, 0, rounded);
    return memory;
}

void *mm_reserve(size_t bytes) {
    void *memory = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void mm_unreserve(void *memory, size_t bytes) {
    if (memory)
        munmap(memory, bytes ? bytes : 1);
}

void mm_populate(const void *memory, size_t bytes, bool writable) {
#if defined(MADV_POPULATE_WRITE)
    const uintptr_t start = (uintptr_t)memory / MM_PAGE * MM_PAGE;
    const uintptr_t end = mm_round_up((uintptr_t)memory + bytes, MM_PAGE);
    (void)madvise((void *)start, end - start, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
#else
    (void)memory;
    (void)bytes;
    (void)writable;
#endif
}

megamoe_status mm_take_struct(void *to, size_t to_bytes, const void *from, const char *what) {
    memset(to, 0, to_bytes);
    memcpy(to, &to_bytes, sizeof to_bytes);
    if (!from)
        return MEGAMOE_OK;
    size_t from_bytes;
    memcpy(&from_bytes, from, sizeof from_bytes);
    if (from_bytes < sizeof from_bytes)
        return mm_fail(MEGAMOE_EINVAL,
                       "%s: struct_size is %zu; initialise it with MEGAMOE_INIT(%s)", what,
                       from_bytes, what);
    const unsigned char *bytes = from;
    for (size_t i = to_bytes; i < from_bytes; i++)
        if (bytes[i])
            return mm_fail(MEGAMOE_EINVAL,
                           "%s: a member beyond this library's version is set (struct_size %zu, "
                           "known %zu)",
                           what, from_bytes, to_bytes);
    const size_t n = from_bytes < to_bytes ? from_bytes : to_bytes;
    memcpy((unsigned char *)to + sizeof n, bytes + sizeof n, n - sizeof n);
    return MEGAMOE_OK;
}

megamoe_status mm_give_struct(void *to, const void *from, size_t from_bytes, const char *what) {
    size_t to_bytes;
    memcpy(&to_bytes, to, sizeof to_bytes);
    if (to_bytes < sizeof to_bytes)
        return mm_fail(MEGAMOE_EINVAL,
                       "%s: struct_size is %zu; initialise it with MEGAMOE_INIT(%s)", what,
                       to_bytes, what);
    const size_t n = from_bytes < to_bytes ? from_bytes : to_bytes;
    memset((unsigned char *)to + sizeof n, 0, to_bytes - sizeof n);
    memcpy((unsigned char *)to + sizeof n, (const unsigned char *)from + sizeof n, n - sizeof n);
    return MEGAMOE_OK;
}

const char *megamoe_dtype_name(megamoe_dtype dtype) {
    switch (dtype) {
#define X(name, value, text, bits)                                                                 \
    case name:                                                                                     \
        return text;
        MEGAMOE_DTYPE_LIST(X)
#undef X
    }
    return "unknown";
}
