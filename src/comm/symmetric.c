/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "comm/symmetric.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"

/* NULL where it cannot be mapped. */
static uint8_t *map(int fd, size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* Its size is sealed: a process that cut it would end others that touch what is gone. */
static megamoe_status open_shared(mm_symmetric *s) {
    s->fd = memfd_create("megamoe", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (s->fd < 0 || ftruncate(s->fd, (off_t)s->bytes) != 0 ||
        fcntl(s->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        return mm_fail(MEGAMOE_ENOMEM, "shared memory of %zu bytes: %s", s->bytes, strerror(errno));
    s->own = map(s->fd, s->bytes);
    return s->own ? MEGAMOE_OK
                  : mm_fail(MEGAMOE_ENOMEM, "mapping %zu bytes of shared memory: %s", s->bytes,
                            strerror(errno));
}

megamoe_status mm_symmetric_open(const megamoe_comm *comm, size_t bytes, mm_symmetric *symmetric) {
    *symmetric = (mm_symmetric){.bytes = bytes, .fd = -1};
    if (mm_comm_in_processes(comm))
        return open_shared(symmetric);
    symmetric->own = mm_reserve(bytes);
    return symmetric->own ? MEGAMOE_OK
                          : mm_fail(MEGAMOE_ENOMEM, "%zu bytes: out of address space", bytes);
}

/* The range of another process, whose size is not taken on trust. */
static megamoe_status map_peer(const mm_symmetric *s, int32_t rank, int fd, uint8_t **range) {
    struct stat status;
    if (fd < 0 || fstat(fd, &status) != 0 || (uint64_t)status.st_size != s->bytes ||
        !(fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK))
        return mm_fail(MEGAMOE_EIO, "rank %d shares no memory of %zu bytes", rank, s->bytes);
    *range = map(fd, s->bytes);
    return *range ? MEGAMOE_OK
                  : mm_fail(MEGAMOE_ENOMEM, "mapping %zu bytes of rank %d: %s", s->bytes, rank,
                            strerror(errno));
}

static megamoe_status meet_processes(megamoe_comm *comm, mm_symmetric *s, uint8_t **ranges) {
    const int32_t ranks = megamoe_comm_size(comm);
    int *fds = mm_alloc((size_t)ranks * sizeof *fds);
    s->mapped = mm_alloc((size_t)ranks * sizeof(uint8_t *));
    if (!fds || !s->mapped) {
        free(fds);
        megamoe_comm_abort(comm); /* the others wait for this rank's descriptor */
        return mm_fail(MEGAMOE_ENOMEM, "shared memory: out of memory");
    }
    s->ranks = ranks;
    megamoe_status status = mm_comm_share_fds(comm, s->fd, fds);
    const bool shared = status == MEGAMOE_OK;
    for (int32_t r = 0; shared && r < ranks; r++) {
        if (r == megamoe_comm_rank(comm)) {
            ranges[r] = s->own;
            continue;
        }
        if (status == MEGAMOE_OK)
            status = map_peer(s, r, fds[r], &s->mapped[r]);
        ranges[r] = s->mapped[r];
        if (fds[r] >= 0)
            close(fds[r]);
    }
    free(fds);
    close(s->fd);
    s->fd = -1;
    return status;
}

megamoe_status mm_symmetric_meet(megamoe_comm *comm, mm_symmetric *symmetric, const uint64_t *own,
                                 uint8_t **ranges) {
    if (mm_comm_in_processes(comm))
        return meet_processes(comm, symmetric, ranges);
    for (int32_t r = 0; r < megamoe_comm_size(comm); r++)
        ranges[r] = (uint8_t *)(uintptr_t)own[r];
    return MEGAMOE_OK;
}

void mm_symmetric_close(mm_symmetric *symmetric) {
    mm_symmetric *s = symmetric;
    for (int32_t r = 0; r < s->ranks; r++)
        if (s->mapped[r])
            munmap(s->mapped[r], s->bytes);
    free(s->mapped);
    if (s->own)
        munmap(s->own, s->bytes);
    if (s->fd > 0)
        close(s->fd);
    *s = (mm_symmetric){.fd = -1};
}
