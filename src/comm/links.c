/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "comm/links.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"
#include "comm/connect.h"
#include "comm/deadline.h"

enum { CHUNK_BYTES = 16384, MAGIC = 0x4c4d4f45 };

enum message_kind { MESSAGE_PART = 1, MESSAGE_ABORT = 2, MESSAGE_CLOSE = 3 };

/* One packet each; `bytes` of a part follow. */
struct header {
    uint32_t magic, kind;
    uint64_t number; /* of the exchange */
    uint64_t total;  /* bytes of the whole collective, of which this is a chunk */
    uint32_t bytes;
    int32_t cause, whose; /* of an abort, as mm_alarm_look gives them */
};

/* A part that has arrived. */
struct message {
    struct message *next;
    struct header header;
    int fd;
    uint8_t part[];
};

struct peer {
    int socket;                    /* -1: this rank itself */
    int process;                   /* a pidfd, or -1 */
    atomic_bool closed;            /* said so: set by the reading thread */
    bool gone;                     /* nothing more is read from it; of the reading thread */
    struct message *first, **last; /* guarded by `lock` */
};

struct mm_links {
    int32_t rank, size;
    mm_alarm *alarm;
    mm_abort_watch waker; /* of an exchange that waits for `changed` */
    struct peer *peers;   /* [size] */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t exchanges; /* made so far */
    pthread_t reader;
    bool reading;
    atomic_bool told;      /* the others of an abort */
    int stop;              /* eventfd that ends the reading thread */
    struct pollfd *polled; /* [1 + 2 * size]: of the reading thread */
};

/* ---- the reading thread ---- */

/* Takes what one packet holds. False when there was none. */
static bool read_packet(mm_links *links, int32_t rank) {
    struct peer *peer = &links->peers[rank];
    struct header header;
    uint8_t part[CHUNK_BYTES];
    struct iovec vectors[] = {{&header, sizeof header}, {part, sizeof part}};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr packet = {.msg_iov = vectors,
                            .msg_iovlen = 2,
                            .msg_control = control.bytes,
                            .msg_controllen = sizeof control.bytes};
    const ssize_t got = recvmsg(peer->socket, &packet, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return false;
    if (got < 0 && (errno == EINTR || errno == ECONNRESET))
        return true; /* a reset stands before packets that came earlier, and is told once */
    int fd = -1;
    const struct cmsghdr *c = got > 0 ? CMSG_FIRSTHDR(&packet) : NULL;
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
        memcpy(&fd, CMSG_DATA(c), sizeof fd);
    if (got < (ssize_t)sizeof header || header.magic != MAGIC ||
        (size_t)got != sizeof header + header.bytes) {
        peer->gone = true; /* the end, or nothing that a rank sends */
    } else if (header.kind == MESSAGE_ABORT) {
        /* As the sender knows it, so that all name the rank with which it began. */
        (void)mm_alarm_raise(links->alarm, (mm_alarm_cause)header.cause, header.whose);
    } else if (header.kind == MESSAGE_CLOSE) {
        atomic_store_explicit(&peer->closed, true, memory_order_release);
        peer->gone = true;
    } else {
        struct message *message = mm_alloc(sizeof *message + header.bytes);
        if (message) {
            message->header = header;
            message->fd = fd;
            memcpy(message->part, part, header.bytes);
            fd = -1;
            pthread_mutex_lock(&links->lock);
            *peer->last = message;
            peer->last = &message->next;
            pthread_cond_broadcast(&links->changed);
            pthread_mutex_unlock(&links->lock);
        } else {
            /* Its part is lost, so that nothing more can come of this communicator. */
            mm_links_abort(links);
        }
    }
    if (fd >= 0)
        close(fd);
    return !peer->gone;
}

/* What a peer has sent, and whether it is still there. */
static void look_at(mm_links *links, int32_t rank, bool ended) {
    struct peer *peer = &links->peers[rank];
    while (read_packet(links, rank))
        ;
    if (!peer->gone && !ended)
        return;
    peer->gone = true;
    if (!atomic_load_explicit(&peer->closed, memory_order_relaxed)) {
        (void)mm_alarm_raise(links->alarm, MM_ALARM_ENDED, rank);
        return;
    }
    pthread_mutex_lock(&links->lock);
    pthread_cond_broadcast(&links->changed);
    pthread_mutex_unlock(&links->lock);
}

static void *read_all(void *argument) {
    mm_links *links = argument;
    for (;;) {
        links->polled[0] = (struct pollfd){.fd = links->stop, .events = POLLIN};
        for (int32_t r = 0; r < links->size; r++) {
            const struct peer *peer = &links->peers[r];
            /* poll() passes over negative descriptors. */
            links->polled[1 + 2 * r] =
                (struct pollfd){.fd = peer->gone ? -1 : peer->socket, .events = POLLIN};
            links->polled[2 + 2 * r] =
                (struct pollfd){.fd = peer->gone ? -1 : peer->process, .events = POLLIN};
        }
        if (poll(links->polled, 1 + 2 * (nfds_t)links->size, -1) < 0)
            continue;
        if (links->polled[0].revents)
            return NULL;
        for (int32_t r = 0; r < links->size; r++)
            if (links->polled[1 + 2 * r].revents || links->polled[2 + 2 * r].revents)
                look_at(links, r, links->polled[2 + 2 * r].revents);
    }
}

/* Signals are for the caller's threads. */
static megamoe_status start_reading(mm_links *links) {
    links->stop = eventfd(0, EFD_CLOEXEC);
    links->polled = mm_alloc((1 + 2 * (size_t)links->size) * sizeof *links->polled);
    if (links->stop < 0 || !links->polled)
        return mm_fail(MEGAMOE_ENOMEM, "communicator: no eventfd: %s", strerror(errno));
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&links->reader, NULL, read_all, links);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    links->reading = error == 0;
    return error ? mm_fail(MEGAMOE_ENOMEM, "communicator: its thread cannot be started: %s",
                           strerror(error))
                 : MEGAMOE_OK;
}

/* ---- sending ---- */

/* A peer that is gone is no error here: the reading thread knows better what that means. */
static megamoe_status send_packet(const mm_links *links, int32_t rank, const struct header *header,
                                  const void *part, int fd, int64_t deadline) {
    struct iovec vectors[] = {{(void *)header, sizeof *header}, {(void *)part, header->bytes}};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.bytes = {0}};
    struct msghdr packet = {.msg_iov = vectors, .msg_iovlen = header->bytes ? 2 : 1};
    if (fd >= 0) {
        packet.msg_control = control.bytes;
        packet.msg_controllen = sizeof control.bytes;
        control.header = (struct cmsghdr){
            .cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    }
    const int socket = links->peers[rank].socket;
    while (sendmsg(socket, &packet, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
        if (errno == EPIPE || errno == ECONNRESET)
            return MEGAMOE_OK;
        if (errno == EAGAIN || errno == EWOULDBLOCK) {
            /* Its reading thread does not read: it is stopped. */
            struct pollfd writable = {.fd = socket, .events = POLLOUT};
            if (mm_left_ms(deadline) == 0)
                return mm_fail(MEGAMOE_ETIMEDOUT, "rank %d: rank %d does not answer", links->rank,
                               rank);
            (void)poll(&writable, 1, mm_left_ms(deadline));
        } else if (errno != EINTR)
            return mm_fail(MEGAMOE_EIO, "rank %d: sending to rank %d: %s", links->rank, rank,
                           strerror(errno));
    }
    return MEGAMOE_OK;
}

/* To all that may still listen, without waiting. */
static void tell_all(const mm_links *links, const struct header *header) {
    for (int32_t r = 0; r < links->size; r++)
        if (r != links->rank && links->peers[r].socket >= 0)
            (void)send_packet(links, r, header, NULL, -1, 0);
}

/* The others may not have noticed yet what this rank knows. */
static void tell_alarm(mm_links *links) {
    struct header header = {.magic = MAGIC, .kind = MESSAGE_ABORT};
    header.cause = (int32_t)mm_alarm_look(links->alarm, &header.whose);
    if (header.cause != MM_ALARM_NONE && !atomic_exchange(&links->told, true))
        tell_all(links, &header);
}

void mm_links_abort(mm_links *links) {
    (void)mm_alarm_raise(links->alarm, MM_ALARM_ABORTED, links->rank);
    tell_alarm(links);
}

bool mm_links_closed(const mm_links *links, int32_t rank) {
    return atomic_load_explicit(&links->peers[rank].closed, memory_order_acquire);
}

/* ---- the collective ---- */

static megamoe_status lost(const mm_links *links, int32_t waited) {
    int32_t by;
    switch (mm_alarm_look(links->alarm, &by)) {
    case MM_ALARM_ENDED:
        return mm_fail(MEGAMOE_EPEER,
                       "rank %d: the process of rank %d has ended during a collective call",
                       links->rank, by);
    case MM_ALARM_ABORTED:
        return mm_fail(MEGAMOE_EPEER, "rank %d: rank %d aborted during a collective call",
                       links->rank, by);
    default:
        return mm_fail(MEGAMOE_EPEER,
                       "rank %d: rank %d has closed its communicator during a collective call",
                       links->rank, waited);
    }
}

/* The next part of a rank; the caller frees. */
static megamoe_status await_part(mm_links *links, int32_t rank, int64_t deadline,
                                 struct message **message) {
    struct peer *peer = &links->peers[rank];
    const struct timespec until = mm_timespec_of(deadline);
    int waited = 0;
    int32_t by;
    pthread_mutex_lock(&links->lock);
    while (!peer->first && waited != ETIMEDOUT &&
           mm_alarm_look(links->alarm, &by) == MM_ALARM_NONE && !mm_links_closed(links, rank))
        waited = pthread_cond_timedwait(&links->changed, &links->lock, &until);
    struct message *m = *message = peer->first;
    if (m) {
        peer->first = m->next;
        if (!peer->first)
            peer->last = &peer->first;
    }
    pthread_mutex_unlock(&links->lock);
    if (m)
        return MEGAMOE_OK;
    if (waited == ETIMEDOUT)
        return mm_fail(MEGAMOE_ETIMEDOUT,
                       "rank %d: rank %d did not take part in a collective call in time",
                       links->rank, rank);
    return lost(links, rank);
}

/* One chunk: `bytes` at `at` of each rank's `total`. */
static megamoe_status exchange(mm_links *links, const uint8_t *mine, uint8_t *all, size_t at,
                               size_t bytes, size_t total, int fd, int *fds, int64_t deadline) {
    const struct header header = {.magic = MAGIC,
                                  .kind = MESSAGE_PART,
                                  .number = links->exchanges++,
                                  .total = total,
                                  .bytes = (uint32_t)bytes};
    for (int32_t r = 0; r < links->size; r++)
        if (r != links->rank)
            MM_TRY(send_packet(links, r, &header, mine + at, fd, deadline));
    memcpy(all + (size_t)links->rank * total + at, mine + at, bytes);
    for (int32_t r = 0; r < links->size; r++) {
        if (r == links->rank)
            continue;
        struct message *m;
        MM_TRY(await_part(links, r, deadline, &m));
        const struct header theirs = m->header;
        const bool same =
            theirs.number == header.number && theirs.total == total && theirs.bytes == bytes;
        if (same)
            memcpy(all + (size_t)r * total + at, m->part, bytes);
        if (fds && same)
            fds[r] = m->fd;
        else if (m->fd >= 0)
            close(m->fd);
        free(m);
        if (!same)
            return mm_fail(MEGAMOE_EINVAL,
                           "rank %d brings %zu bytes to collective call %llu and rank %d %llu to "
                           "its %llu; all ranks make the same collective calls in the same order",
                           links->rank, total, (unsigned long long)header.number + 1, r,
                           (unsigned long long)theirs.total, (unsigned long long)theirs.number + 1);
    }
    return MEGAMOE_OK;
}

megamoe_status mm_links_allgather(mm_links *links, const void *mine, void *all, size_t bytes,
                                  int fd, int *fds, int32_t timeout_ms) {
    const int64_t deadline = mm_now_ms() + timeout_ms;
    int32_t by;
    for (int32_t r = 0; fds && r < links->size; r++)
        fds[r] = -1;
    megamoe_status status =
        mm_alarm_look(links->alarm, &by) == MM_ALARM_NONE ? MEGAMOE_OK : lost(links, -1);
    for (size_t at = 0; status == MEGAMOE_OK && at < bytes; at += CHUNK_BYTES) {
        const size_t chunk = bytes - at < CHUNK_BYTES ? bytes - at : CHUNK_BYTES;
        const bool first = at == 0;
        status = exchange(links, mine, all, at, chunk, bytes, first ? fd : -1, first ? fds : NULL,
                          deadline);
    }
    if (status == MEGAMOE_OK)
        return MEGAMOE_OK;
    for (int32_t r = 0; fds && r < links->size; r++)
        if (fds[r] >= 0) {
            close(fds[r]);
            fds[r] = -1;
        }
    mm_links_abort(links);
    return status;
}

/* ---- opening and closing ---- */

static void wake(void *user) {
    mm_links *links = user;
    pthread_mutex_lock(&links->lock);
    pthread_cond_broadcast(&links->changed);
    pthread_mutex_unlock(&links->lock);
}

static mm_links *allocate(const mm_bootstrap *bootstrap, mm_alarm *alarm) {
    mm_links *links = mm_alloc(sizeof *links);
    struct peer *peers = mm_alloc((size_t)bootstrap->size * sizeof *peers);
    if (!links || !peers) {
        free(links);
        free(peers);
        return NULL;
    }
    links->rank = bootstrap->rank;
    links->size = bootstrap->size;
    links->alarm = alarm;
    links->peers = peers;
    links->stop = -1;
    for (int32_t r = 0; r < links->size; r++) {
        peers[r].socket = peers[r].process = -1;
        peers[r].last = &peers[r].first;
    }
    pthread_mutex_init(&links->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&links->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    links->waker = (mm_abort_watch){.fn = wake, .user = links};
    mm_alarm_watch(alarm, &links->waker);
    return links;
}

megamoe_status mm_links_open(const mm_bootstrap *bootstrap, mm_alarm *alarm, int32_t timeout_ms,
                             mm_links **links) {
    const int64_t deadline = mm_now_ms() + timeout_ms;
    *links = NULL;
    mm_links *l = allocate(bootstrap, alarm);
    mm_connection *connections = mm_alloc((size_t)bootstrap->size * sizeof *connections);
    mm_outcome outcome = {.status = MEGAMOE_OK};
    if (!l || !connections)
        mm_outcome_set(&outcome, mm_fail(MEGAMOE_ENOMEM, "communicator: out of memory"));
    megamoe_status status = mm_connect(bootstrap, &outcome, deadline, connections);
    if (status == MEGAMOE_OK && l && connections) { /* else it is not MEGAMOE_OK */
        for (int32_t r = 0; r < l->size; r++) {
            l->peers[r].socket = connections[r].socket;
            l->peers[r].process = connections[r].process;
        }
        mm_outcome_set(&outcome, start_reading(l));
        /* A rank that has ended tells and hears nothing; the others learn by the abort. */
        status = outcome.status == MEGAMOE_EPEER ? mm_fail(MEGAMOE_EPEER, "%s", outcome.message)
                                                 : mm_outcome_share(bootstrap, &outcome, deadline);
    }
    free(connections);
    if (status == MEGAMOE_OK)
        *links = l;
    else
        mm_links_close(l);
    return status;
}

void mm_links_close(mm_links *links) {
    if (!links)
        return;
    const struct header farewell = {.magic = MAGIC, .kind = MESSAGE_CLOSE};
    tell_alarm(links);
    tell_all(links, &farewell);
    mm_alarm_unwatch(links->alarm, &links->waker);
    if (links->reading) {
        (void)eventfd_write(links->stop, 1);
        pthread_join(links->reader, NULL);
    }
    for (int32_t r = 0; r < links->size; r++) {
        struct peer *peer = &links->peers[r];
        if (peer->socket >= 0)
            close(peer->socket);
        if (peer->process >= 0)
            close(peer->process);
        for (struct message *m = peer->first; m;) {
            struct message *next = m->next;
            if (m->fd >= 0)
                close(m->fd);
            free(m);
            m = next;
        }
    }
    if (links->stop >= 0)
        close(links->stop);
    pthread_cond_destroy(&links->changed);
    pthread_mutex_destroy(&links->lock);
    free(links->polled);
    free(links->peers);
    free(links);
}
