/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "allocation.h"

#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A sanitizer's own functions where there is one, else the C library's. */
#define REAL(result, name, libc, parameters)                                                       \
    result __interceptor_##name parameters __attribute__((weak));                                  \
    result libc parameters;
REAL(void *, malloc, __libc_malloc, (size_t))
REAL(void *, calloc, __libc_calloc, (size_t, size_t))
REAL(void *, realloc, __libc_realloc, (void *, size_t))
REAL(void *, memalign, __libc_memalign, (size_t, size_t))
REAL(void, free, __libc_free, (void *))
void *__interceptor_mmap(void *, size_t, int, int, int, off_t) __attribute__((weak));
int __interceptor_munmap(void *, size_t) __attribute__((weak));
#define CALL(name, libc, ...)                                                                      \
    (__interceptor_##name ? __interceptor_##name(__VA_ARGS__) : libc(__VA_ARGS__))

static _Thread_local int64_t left; /* allocations until one fails; 0: none does */
static _Thread_local bool keeps_failing, has_failed;
static atomic_long live;

void allocation_fail(int64_t k, bool all_after) {
    has_failed = false;
    keeps_failing = all_after;
    left = k;
}

bool allocation_failed(void) {
    keeps_failing = false;
    left = 0;
    return has_failed;
}

int64_t allocation_live(void) {
    return atomic_load(&live);
}

static bool fails(void) {
    if (left > 0 && --left == 0)
        has_failed = true;
    else if (!keeps_failing || !has_failed)
        return false;
    errno = ENOMEM;
    return true;
}

static void *counted(void *memory) {
    if (memory)
        atomic_fetch_add(&live, 1);
    return memory;
}

void *malloc(size_t bytes) {
    return fails() ? NULL : counted(CALL(malloc, __libc_malloc, bytes));
}

void *calloc(size_t n, size_t bytes) {
    return fails() ? NULL : counted(CALL(calloc, __libc_calloc, n, bytes));
}

void *realloc(void *memory, size_t bytes) {
    if (fails())
        return NULL;
    void *grown = CALL(realloc, __libc_realloc, memory, bytes);
    return memory ? grown : counted(grown);
}

void *memalign(size_t alignment, size_t bytes) {
    return fails() ? NULL : counted(CALL(memalign, __libc_memalign, alignment, bytes));
}

void *aligned_alloc(size_t alignment, size_t bytes) {
    return memalign(alignment, bytes);
}

int posix_memalign(void **memory, size_t alignment, size_t bytes) {
    *memory = memalign(alignment, bytes);
    return *memory ? 0 : ENOMEM;
}

void free(void *memory) {
    if (memory)
        atomic_fetch_sub(&live, 1);
    CALL(free, __libc_free, memory);
}

/* A sanitizer's would not come here for their memory. */
char *strndup(const char *text, size_t n) {
    const size_t bytes = strnlen(text, n);
    char *copy = malloc(bytes + 1);
    if (copy) {
        memcpy(copy, text, bytes);
        copy[bytes] = 0;
    }
    return copy;
}

char *strdup(const char *text) {
    return strndup(text, strlen(text));
}

static void *real_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    if (__interceptor_mmap)
        return __interceptor_mmap(at, bytes, protection, flags, fd, offset);
    return (void *)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);
}

void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    if (fails())
        return MAP_FAILED;
    void *memory = real_mmap(at, bytes, protection, flags, fd, offset);
    if (memory != MAP_FAILED)
        atomic_fetch_add(&live, 1);
    return memory;
}

int munmap(void *memory, size_t bytes) {
    const int result = __interceptor_munmap ? __interceptor_munmap(memory, bytes)
                                            : (int)syscall(SYS_munmap, memory, bytes);
    if (result == 0)
        atomic_fetch_sub(&live, 1);
    return result;
}
