/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "comm/tcp.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"
#include "comm/deadline.h"

enum {
    VISITORS = 64, /* connections that have not said yet who they are */
    GREETING_MS = 10000,
    FAREWELL_MS = 500,
    VERDICT_MS = 300, /* rank 0, which may have begun later, tells who has not come */
    LATE_MS = 2000,
    RETRY_FIRST_MS = 5,
    RETRY_MOST_MS = 500,
    MESSAGE_BYTES = 320
};

static const char magic[8] = "mmoetcp1";

/* What a rank says when it has connected to rank 0. */
struct hello {
    char magic[8];
    int32_t rank, size;
    char job[64];
};

/* What follows goes both ways: a rank's part, all parts, or a failure with its message. */
struct frame {
    char magic[8];
    int32_t status;
    uint32_t bytes;
    uint64_t number; /* of the call */
};

struct tcp {
    int32_t rank, size;
    int listener; /* of rank 0, until all have come */
    int *sockets; /* [size] on rank 0, by rank; else [1], to rank 0; -1 where there is none */
    uint64_t number;
    char failure[MESSAGE_BYTES]; /* rank 0: what it told the others; "": nothing */
};

/* ---- bytes ---- */

/* False with errno; 0 for the end of the connection, ETIMEDOUT for the deadline. */
static bool receive(int socket, void *data, size_t bytes, int64_t deadline) {
    for (size_t got = 0; got < bytes;) {
        const ssize_t n = recv(socket, (char *)data + got, bytes - got, MSG_DONTWAIT);
        if (n > 0) {
            got += (size_t)n;
            continue;
        }
        if (n == 0) {
            errno = 0;
            return false;
        }
        if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
            return false;
        struct pollfd readable = {.fd = socket, .events = POLLIN};
        if (mm_left_ms(deadline) == 0) {
            errno = ETIMEDOUT;
            return false;
        }
        (void)poll(&readable, 1, mm_left_ms(deadline));
    }
    return true;
}

static bool transmit(int socket, const void *data, size_t bytes, int64_t deadline) {
    for (size_t sent = 0; sent < bytes;) {
        const ssize_t n =
            send(socket, (const char *)data + sent, bytes - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n >= 0) {
            sent += (size_t)n;
            continue;
        }
        if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
            return false;
        struct pollfd writable = {.fd = socket, .events = POLLOUT};
        if (mm_left_ms(deadline) == 0) {
            errno = ETIMEDOUT;
            return false;
        }
        (void)poll(&writable, 1, mm_left_ms(deadline));
    }
    return true;
}

static const char *reason(void) {
    return errno ? strerror(errno) : "it has closed the connection";
}

/* A failed transfer with a rank. */
static megamoe_status broken(int32_t rank) {
    return errno == ETIMEDOUT
               ? mm_fail(MEGAMOE_ETIMEDOUT, "rank %d did not answer in time", rank)
               : mm_fail(MEGAMOE_EPEER, "the connection to rank %d is lost: %s", rank, reason());
}

static bool is_ours(const char text[sizeof magic]) {
    return memcmp(text, magic, sizeof magic) == 0;
}

/* ---- rank 0 ---- */

/* Tells a rank why there will be no communicator; it may be gone. */
static void tell(int socket, megamoe_status status, const char *message) {
    const size_t bytes = strlen(message);
    struct frame frame = {.status = status, .bytes = (uint32_t)bytes};
    memcpy(frame.magic, magic, sizeof magic);
    if (transmit(socket, &frame, sizeof frame, 0) && transmit(socket, message, bytes, 0))
        (void)shutdown(socket, SHUT_WR);
}

/* Makes a failure of rank 0 that of all; the first counts. Returns `status`. */
static megamoe_status fail_all(struct tcp *t, megamoe_status status, const char *message) {
    if (*t->failure)
        return status;
    snprintf(t->failure, sizeof t->failure, "%s", message);
    for (int32_t r = 1; r < t->size; r++)
        if (t->sockets[r] >= 0)
            tell(t->sockets[r], status, t->failure);
    return status;
}

/*
 * Lets a visitor in who has said who it is, or turns it away: *error is a contradiction between
 * ranks of this job.
 */
static megamoe_status admit(struct tcp *t, const char *job, int socket, const struct hello *hello) {
    char message[MESSAGE_BYTES];
    if (!is_ours(hello->magic)) {
        close(socket);
        return MEGAMOE_OK;
    }
    if (strncmp(hello->job, job, sizeof hello->job - 1) != 0) {
        snprintf(message, sizeof message,
                 "at this address waits job '%s', not '%.63s'; jobs at one address need ports of "
                 "their own (MEGAMOE_PORT)",
                 job, hello->job);
        tell(socket, MEGAMOE_EINVAL, message);
        close(socket);
        return MEGAMOE_OK;
    }
    const int32_t rank = hello->rank;
    const bool fits = hello->size == t->size && rank > 0 && rank < t->size;
    if (fits && t->sockets[rank] < 0) {
        t->sockets[rank] = socket;
        if (*t->failure)
            tell(socket, MEGAMOE_EPEER, t->failure);
        return MEGAMOE_OK;
    }
    const megamoe_status status =
        fits ? mm_fail(MEGAMOE_EINVAL, "two processes are rank %d of %d", rank, t->size)
             : mm_fail(MEGAMOE_EINVAL,
                       "rank 0 is one of %d ranks, but another process is rank %d "
                       "of %d",
                       t->size, rank, hello->size);
    tell(socket, status, megamoe_last_error());
    close(socket);
    return status;
}

/* A connection that has not said yet who it is. */
struct visitor {
    int socket;
    int64_t deadline;
    size_t got;
    struct hello hello;
};

/* Reads on. True once the visitor is done with: admitted, turned away or gone. */
static bool hear(struct tcp *t, const char *job, struct visitor *v, megamoe_status *status) {
    const ssize_t n =
        recv(v->socket, (char *)&v->hello + v->got, sizeof v->hello - v->got, MSG_DONTWAIT);
    if (n > 0)
        v->got += (size_t)n;
    if (v->got == sizeof v->hello) {
        v->hello.job[sizeof v->hello.job - 1] = '\0';
        *status = admit(t, job, v->socket, &v->hello);
        return true;
    }
    const bool waiting = n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
    if (waiting && mm_now_ms() < v->deadline)
        return false;
    close(v->socket);
    return true;
}

static megamoe_status missing(const struct tcp *t, int32_t timeout_ms) {
    char list[128] = "";
    int32_t n = 0;
    for (int32_t r = 1; r < t->size; r++)
        if (t->sockets[r] < 0 && n++ < 8)
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%d", *list ? ", " : "", r);
    return mm_fail(MEGAMOE_ETIMEDOUT,
                   "%d of %d ranks have not connected to rank 0 within %d ms: %s%s", n, t->size,
                   timeout_ms, list, n > 8 ? ", ..." : "");
}

/* Takes a new connection, if need be in place of the one that has been silent for longest. */
static void receive_visitor(struct tcp *t, struct visitor *visitors) {
    struct visitor *place = &visitors[0];
    for (int i = 0; i < VISITORS && place->socket >= 0; i++)
        if (visitors[i].socket < 0 || visitors[i].deadline < place->deadline)
            place = &visitors[i];
    const int socket = accept4(t->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (socket < 0)
        return;
    if (place->socket >= 0)
        close(place->socket);
    *place = (struct visitor){.socket = socket, .deadline = mm_now_ms() + GREETING_MS};
}

/* One round of waiting for visitors and what they say. */
static megamoe_status receive_visitors(struct tcp *t, const char *job, struct visitor *visitors,
                                       struct pollfd *polled, int64_t deadline) {
    nfds_t n = 0;
    polled[n++] = (struct pollfd){.fd = t->listener, .events = POLLIN};
    for (int i = 0; i < VISITORS; i++)
        polled[n++] = (struct pollfd){.fd = visitors[i].socket, .events = POLLIN};
    for (int32_t r = 1; r < t->size; r++)
        polled[n++] = (struct pollfd){.fd = *t->failure ? -1 : t->sockets[r], .events = POLLRDHUP};
    const int wait = mm_left_ms(deadline);
    (void)poll(polled, n, wait > 1000 ? 1000 : wait); /* visitors have deadlines too */
    for (int32_t r = 1; r < t->size; r++)
        if (t->sockets[r] >= 0 &&
            (polled[VISITORS + r].revents & (POLLRDHUP | POLLHUP | POLLERR))) {
            errno = 0;
            return broken(r);
        }
    megamoe_status status = MEGAMOE_OK;
    for (int i = 0; i < VISITORS && status == MEGAMOE_OK; i++)
        if (visitors[i].socket >= 0 && hear(t, job, &visitors[i], &status))
            visitors[i].socket = -1;
    if (status == MEGAMOE_OK && polled[0].revents)
        receive_visitor(t, visitors);
    return status;
}

static bool all_here(const struct tcp *t) {
    for (int32_t r = 1; r < t->size; r++)
        if (t->sockets[r] < 0)
            return false;
    return true;
}

static megamoe_status receive_ranks(struct tcp *t, const megamoe_comm_tcp_options *options,
                                    int64_t deadline) {
    struct visitor visitors[VISITORS];
    for (int i = 0; i < VISITORS; i++)
        visitors[i].socket = -1;
    struct pollfd *polled = mm_alloc((1 + VISITORS + (size_t)t->size) * sizeof *polled);
    if (!polled)
        return mm_fail(MEGAMOE_ENOMEM, "communicator: out of memory");
    megamoe_status status = MEGAMOE_OK;
    while (status == MEGAMOE_OK && !all_here(t))
        status = mm_left_ms(deadline)
                     ? receive_visitors(t, options->job, visitors, polled, deadline)
                     : missing(t, options->creation_deadline_ms);
    if (status != MEGAMOE_OK) {
        (void)fail_all(t, status, megamoe_last_error());
        /* Those that are on their way would knock until their deadline. */
        const int64_t late = mm_now_ms() + (status == MEGAMOE_ETIMEDOUT ? 0 : LATE_MS);
        while (!all_here(t) && mm_left_ms(late))
            (void)receive_visitors(t, options->job, visitors, polled, late);
        status = mm_fail(status, "%s", t->failure);
    }
    for (int i = 0; i < VISITORS; i++)
        if (visitors[i].socket >= 0)
            close(visitors[i].socket);
    free(polled);
    return status;
}

static megamoe_status listen_at(struct tcp *t, const megamoe_comm_tcp_options *o,
                                const struct addrinfo *found) {
    static const int on = 1;
    const struct addrinfo *at = found;
    struct sockaddr_in6 any6 = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)o->port)};
    struct sockaddr_in any4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)o->port)};
    t->listener = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (t->listener < 0)
        return mm_fail(MEGAMOE_EIO, "no socket to listen at: %s", strerror(errno));
    (void)setsockopt(t->listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    int failed = bind(t->listener, at->ai_addr, at->ai_addrlen);
    if (failed && errno == EADDRNOTAVAIL) /* the others know this host by a translated address */
        failed = at->ai_family == AF_INET6
                     ? bind(t->listener, (const struct sockaddr *)&any6, sizeof any6)
                     : bind(t->listener, (const struct sockaddr *)&any4, sizeof any4);
    if (failed || listen(t->listener, SOMAXCONN) != 0)
        return mm_fail(MEGAMOE_EIO, "rank 0 cannot listen at %s port %d: %s", o->address, o->port,
                       strerror(errno));
    return MEGAMOE_OK;
}

/* ---- the other ranks ---- */

static int try_connect(const struct addrinfo *at, int64_t deadline) {
    const int to = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (to < 0)
        return -1;
    int error = 0;
    socklen_t bytes = sizeof error;
    if (connect(to, at->ai_addr, at->ai_addrlen) != 0) {
        error = errno;
        struct pollfd writable = {.fd = to, .events = POLLOUT};
        if (error == EINPROGRESS) {
            error = ETIMEDOUT;
            if (poll(&writable, 1, mm_left_ms(deadline)) > 0)
                (void)getsockopt(to, SOL_SOCKET, SO_ERROR, &error, &bytes);
        }
    }
    if (!error)
        return to;
    close(to);
    errno = error;
    return -1;
}

/* Rank 0 may not listen yet. */
static megamoe_status connect_to_first(struct tcp *t, const megamoe_comm_tcp_options *o,
                                       const struct addrinfo *found, int64_t deadline) {
    static const int on = 1;
    for (int wait = RETRY_FIRST_MS;; wait = wait * 2 < RETRY_MOST_MS ? wait * 2 : RETRY_MOST_MS) {
        for (const struct addrinfo *at = found; at && t->sockets[0] < 0; at = at->ai_next)
            t->sockets[0] = try_connect(at, deadline);
        if (t->sockets[0] >= 0)
            break;
        const char *why = strerror(errno);
        const int left = mm_left_ms(deadline);
        if (left == 0)
            return mm_fail(MEGAMOE_ETIMEDOUT,
                           "rank %d cannot connect to rank 0 at %s port %d within %d ms: %s",
                           o->rank, o->address, o->port, o->creation_deadline_ms, why);
        (void)poll(NULL, 0, wait < left ? wait : left);
    }
    (void)setsockopt(t->sockets[0], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct hello hello = {.rank = o->rank, .size = o->size};
    memcpy(hello.magic, magic, sizeof magic);
    snprintf(hello.job, sizeof hello.job, "%s", o->job);
    return transmit(t->sockets[0], &hello, sizeof hello, deadline) ? MEGAMOE_OK : broken(0);
}

/* ---- the collective ---- */

/* The frame of one part; a failure that the other side tells is this rank's. */
static megamoe_status receive_frame(int socket, int32_t rank, uint64_t number, void *data,
                                    size_t bytes, int64_t deadline) {
    struct frame frame;
    if (!receive(socket, &frame, sizeof frame, deadline))
        return broken(rank);
    if (!is_ours(frame.magic))
        return mm_fail(MEGAMOE_EINVAL, "what answers at the address of rank %d is no megamoe",
                       rank);
    if (frame.status != MEGAMOE_OK) {
        char message[MESSAGE_BYTES] = "";
        const size_t n = frame.bytes < sizeof message ? frame.bytes : sizeof message - 1;
        (void)receive(socket, message, n, deadline);
        return mm_fail((megamoe_status)frame.status, "rank %d says: %s", rank, message);
    }
    if (frame.number != number || frame.bytes != bytes)
        return mm_fail(MEGAMOE_EINVAL, "rank %d brings %u bytes where %zu are expected", rank,
                       frame.bytes, bytes);
    return receive(socket, data, bytes, deadline) ? MEGAMOE_OK : broken(rank);
}

static megamoe_status send_frame(int socket, int32_t rank, uint64_t number, const void *data,
                                 size_t bytes, int64_t deadline) {
    struct frame frame = {.status = MEGAMOE_OK, .bytes = (uint32_t)bytes, .number = number};
    memcpy(frame.magic, magic, sizeof magic);
    return transmit(socket, &frame, sizeof frame, deadline) &&
                   transmit(socket, data, bytes, deadline)
               ? MEGAMOE_OK
               : broken(rank);
}

/* The parts of all others in whatever order they come, so that a loss is noticed at once. */
static megamoe_status collect(struct tcp *t, uint8_t *all, size_t bytes, int64_t deadline) {
    struct pollfd *polled = mm_alloc((size_t)t->size * sizeof *polled);
    if (!polled)
        return mm_fail(MEGAMOE_ENOMEM, "communicator: out of memory");
    for (int32_t r = 0; r < t->size; r++)
        polled[r] = (struct pollfd){.fd = t->sockets[r], .events = POLLIN};
    megamoe_status status = MEGAMOE_OK;
    for (int32_t missing_parts = t->size - 1; missing_parts > 0 && status == MEGAMOE_OK;) {
        const int n = poll(polled, (nfds_t)t->size, mm_left_ms(deadline));
        if (n == 0)
            status = mm_fail(MEGAMOE_ETIMEDOUT, "%d of %d ranks did not take part in time",
                             missing_parts, t->size);
        for (int32_t r = 1; r < t->size && n > 0 && status == MEGAMOE_OK; r++)
            if (polled[r].revents) {
                polled[r].fd = -1;
                missing_parts--;
                status = receive_frame(t->sockets[r], r, t->number, all + (size_t)r * bytes, bytes,
                                       deadline);
            }
    }
    free(polled);
    return status;
}

static megamoe_status allgather_first(struct tcp *t, const void *mine, uint8_t *all, size_t bytes,
                                      int64_t deadline) {
    if (*t->failure)
        return mm_fail(MEGAMOE_EPEER, "%s", t->failure);
    memcpy(all, mine, bytes);
    MM_TRY(collect(t, all, bytes, deadline));
    for (int32_t r = 1; r < t->size; r++)
        MM_TRY(send_frame(t->sockets[r], r, t->number, all, (size_t)t->size * bytes, deadline));
    return MEGAMOE_OK;
}

static megamoe_status tcp_allgather(void *state, const void *mine, void *all, size_t bytes,
                                    int32_t timeout_ms) {
    struct tcp *t = state;
    const int64_t deadline = mm_now_ms() + timeout_ms;
    megamoe_status status;
    if (t->rank == 0) {
        status = allgather_first(t, mine, all, bytes, deadline);
        if (status != MEGAMOE_OK)
            status = fail_all(t, status, megamoe_last_error());
    } else {
        status = send_frame(t->sockets[0], 0, t->number, mine, bytes, deadline);
        /* Rank 0 may have told why it does not listen any more. */
        if (status == MEGAMOE_OK || status == MEGAMOE_EPEER)
            status = receive_frame(t->sockets[0], 0, t->number, all, (size_t)t->size * bytes,
                                   deadline + VERDICT_MS);
    }
    t->number++;
    return status;
}

/* ---- opening and closing ---- */

static void tcp_abort(void *state) {
    struct tcp *t = state;
    if (t->rank == 0)
        (void)fail_all(t, MEGAMOE_EPEER, "rank 0 has aborted");
    else if (t->sockets[0] >= 0)
        (void)shutdown(t->sockets[0], SHUT_RDWR);
}

/*
 * After a failure was told: to close while something has arrived that was not read would take from
 * the other side what it has not read yet.
 */
static void hear_out(const struct tcp *t) {
    const int64_t deadline = mm_now_ms() + FAREWELL_MS;
    char unread[256];
    for (int32_t r = 1; r < t->size; r++)
        while (t->sockets[r] >= 0 && receive(t->sockets[r], unread, sizeof unread, deadline))
            ;
}

static void tcp_close(void *state) {
    struct tcp *t = state;
    if (t->listener >= 0)
        close(t->listener);
    if (*t->failure)
        hear_out(t);
    for (int32_t r = 0; t->sockets && r < (t->rank == 0 ? t->size : 1); r++)
        if (t->sockets[r] >= 0)
            close(t->sockets[r]);
    free(t->sockets);
    free(t);
}

static megamoe_status resolve(const megamoe_comm_tcp_options *o, int64_t deadline,
                              struct addrinfo **found) {
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    char port[16];
    snprintf(port, sizeof port, "%d", o->port);
    int error;
    while ((error = getaddrinfo(o->address, port, &hints, found)) == EAI_AGAIN &&
           mm_left_ms(deadline) > 0)
        (void)poll(NULL, 0, RETRY_MOST_MS);
    return error ? mm_fail(MEGAMOE_EINVAL, "the address of rank 0, '%s': %s", o->address,
                           gai_strerror(error))
                 : MEGAMOE_OK;
}

megamoe_status mm_tcp_open(const megamoe_comm_tcp_options *options, mm_bootstrap *bootstrap) {
    const megamoe_comm_tcp_options *o = options;
    const int64_t deadline = mm_now_ms() + o->creation_deadline_ms;
    const size_t sockets = o->rank == 0 ? (size_t)o->size : 1;
    struct tcp *t = mm_alloc(sizeof *t);
    if (!t)
        return mm_fail(MEGAMOE_ENOMEM, "communicator: out of memory");
    *t = (struct tcp){.rank = o->rank,
                      .size = o->size,
                      .listener = -1,
                      .sockets = mm_alloc(sockets * sizeof *t->sockets)};
    *bootstrap = (mm_bootstrap){o->rank, o->size, t, tcp_allgather, tcp_abort, tcp_close};
    for (size_t i = 0; t->sockets && i < sockets; i++)
        t->sockets[i] = -1;
    struct addrinfo *found = NULL;
    megamoe_status status = t->sockets ? resolve(o, deadline, &found)
                                       : mm_fail(MEGAMOE_ENOMEM, "communicator: out of memory");
    if (status == MEGAMOE_OK && o->rank == 0) {
        status = listen_at(t, o, found);
        if (status == MEGAMOE_OK)
            status = receive_ranks(t, o, deadline);
        if (t->listener >= 0)
            close(t->listener);
        t->listener = -1;
    } else if (status == MEGAMOE_OK)
        status = connect_to_first(t, o, found, deadline);
    if (found)
        freeaddrinfo(found);
    if (status != MEGAMOE_OK)
        tcp_close(t);
    return status;
}
