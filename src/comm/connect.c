/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "comm/connect.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"
#include "base/memory.h"
#include "comm/deadline.h"
#include "megamoe/version.h"

static const char what[] = "connecting the ranks";

/* What a rank tells all others. */
struct card {
    mm_outcome outcome;
    char version[16];
    int32_t rank, size;
    uint64_t host; /* of the running system and its network namespace, in which names lie */
    uint64_t pids; /* of the namespace in which `process` is a number */
    int64_t process;
    uint64_t token[2]; /* names the socket at which it listens, and lets others in */
};

_Static_assert(sizeof(struct card) <= MM_BOOTSTRAP_BYTES, "a bootstrap carries it");

/* The first words over a new connection. */
struct hello {
    uint64_t token[2]; /* of the rank that listens */
    int32_t rank;      /* that connects */
};

/* ---- who this rank is ---- */

static uint64_t namespace_of(const char *kind) {
    char path[64];
    struct stat status;
    snprintf(path, sizeof path, "/proc/self/ns/%s", kind);
    return stat(path, &status) == 0 ? (uint64_t)status.st_ino : 0;
}

static uint64_t host_of(void) {
    char boot[64] = "";
    const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        const ssize_t got = read(fd, boot, sizeof boot - 1);
        boot[got > 0 ? got : 0] = '\0';
        close(fd);
    }
    return XXH3_64bits_withSeed(boot, strlen(boot), namespace_of("net"));
}

/* Abstract: a name that lives as long as the socket, so that nothing is left behind. */
static socklen_t address_of(const struct card *card, struct sockaddr_un *address) {
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    const int n = snprintf(address->sun_path + 1, sizeof address->sun_path - 1,
                           "megamoe-%016" PRIx64 "%016" PRIx64, card->token[0], card->token[1]);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static megamoe_status listen_as(struct card *card, int *listener) {
    struct sockaddr_un address;
    if (getrandom(card->token, sizeof card->token, 0) != (ssize_t)sizeof card->token)
        return mm_fail(MEGAMOE_EIO, "no random numbers: %s", strerror(errno));
    const socklen_t bytes = address_of(card, &address);
    *listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (*listener < 0 || bind(*listener, (struct sockaddr *)&address, bytes) != 0 ||
        listen(*listener, card->size) != 0)
        return mm_fail(MEGAMOE_EIO, "a Unix socket to listen at: %s", strerror(errno));
    return MEGAMOE_OK;
}

/* ---- whether the ranks belong together: the same on all of them ---- */

static megamoe_status compare(const struct card *cards, int32_t size) {
    for (int32_t r = 0; r < size; r++) {
        const struct card *card = &cards[r];
        if (card->rank != r || card->size != size)
            return mm_fail(MEGAMOE_EINVAL,
                           "the bootstrap gave what rank %d of %d brought as that of rank %d of %d",
                           card->rank, card->size, r, size);
        if (strncmp(card->version, cards[0].version, sizeof card->version) != 0)
            return mm_fail(MEGAMOE_EINVAL,
                           "the library's version is %.15s on rank 0 and %.15s on rank %d; all "
                           "ranks need the same",
                           cards[0].version, card->version, r);
        if (card->host != cards[0].host)
            return mm_fail(MEGAMOE_EUNSUPPORTED,
                           "ranks 0 and %d are on different hosts or in different network "
                           "namespaces; the ranks of a communicator share one",
                           r);
    }
    return MEGAMOE_OK;
}

/* ---- connecting ---- */

/* Only this user's processes are let in: names in the abstract namespace have no permissions. */
static bool same_user(int socket) {
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

static megamoe_status connect_to(const struct card *cards, int32_t own, int32_t rank, int *to) {
    struct sockaddr_un address;
    const socklen_t bytes = address_of(&cards[rank], &address);
    const struct hello hello = {{cards[rank].token[0], cards[rank].token[1]}, own};
    /* The other one listens already and has room for all ranks, so this does not wait. */
    *to = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (*to < 0 || connect(*to, (struct sockaddr *)&address, bytes) != 0)
        return mm_fail(MEGAMOE_EIO, "rank %d cannot connect to rank %d: %s", own, rank,
                       strerror(errno));
    if (!same_user(*to))
        return mm_fail(MEGAMOE_EIO, "rank %d belongs to another user than rank %d", rank, own);
    if (send(*to, &hello, sizeof hello, MSG_NOSIGNAL) != (ssize_t)sizeof hello)
        return mm_fail(MEGAMOE_EPEER, "rank %d cannot greet rank %d: %s", own, rank,
                       strerror(errno));
    return MEGAMOE_OK;
}

/* The rank that a new connection comes from, or -1 for a stranger. */
static int32_t greeted_by(int socket, const struct card *card, int64_t deadline) {
    struct hello hello;
    struct pollfd readable = {.fd = socket, .events = POLLIN};
    if (!same_user(socket) || poll(&readable, 1, mm_left_ms(deadline)) <= 0 ||
        recv(socket, &hello, sizeof hello, MSG_DONTWAIT) != (ssize_t)sizeof hello ||
        memcmp(hello.token, card->token, sizeof hello.token) != 0 || hello.rank <= card->rank ||
        hello.rank >= card->size)
        return -1;
    return hello.rank;
}

/* Waits for a connection, but not for a rank that has died meanwhile. */
static megamoe_status await_visitor(int listener, const struct card *card,
                                    const mm_connection *connections, struct pollfd *polled,
                                    int64_t deadline) {
    polled[0] = (struct pollfd){.fd = listener, .events = POLLIN};
    for (int32_t r = 0; r < card->size; r++)
        polled[1 + r] = (struct pollfd){
            .fd = connections[r].socket < 0 ? connections[r].process : -1, .events = POLLIN};
    const int n = poll(polled, 1 + (nfds_t)card->size, mm_left_ms(deadline));
    if (n == 0)
        return mm_fail(MEGAMOE_ETIMEDOUT, "not all ranks have connected to rank %d in time",
                       card->rank);
    for (int32_t r = 0; r < card->size && n > 0 && !polled[0].revents; r++)
        if (polled[1 + r].revents)
            return mm_fail(MEGAMOE_EPEER, "the process of rank %d has ended", r);
    return MEGAMOE_OK;
}

static megamoe_status accept_all(int listener, const struct card *card, mm_connection *connections,
                                 struct pollfd *polled, int64_t deadline) {
    for (int32_t missing = card->size - 1 - card->rank; missing > 0;) {
        MM_TRY(await_visitor(listener, card, connections, polled, deadline));
        const int socket = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (socket < 0)
            continue;
        const int32_t rank = greeted_by(socket, card, deadline);
        if (rank < 0 || connections[rank].socket >= 0) {
            close(socket);
            continue;
        }
        connections[rank].socket = socket;
        missing--;
    }
    return MEGAMOE_OK;
}

static megamoe_status connect_all(int listener, const struct card *cards, int32_t own,
                                  mm_connection *connections, int64_t deadline) {
    const int32_t size = cards[own].size;
    for (int32_t r = 0; r < size; r++) {
        if (r == own || cards[r].pids != cards[own].pids)
            continue;
        connections[r].process = (int)syscall(SYS_pidfd_open, cards[r].process, 0);
        if (connections[r].process < 0 && errno == ESRCH)
            return mm_fail(MEGAMOE_EPEER, "the process of rank %d has ended", r);
    }
    for (int32_t r = 0; r < own; r++)
        MM_TRY(connect_to(cards, own, r, &connections[r].socket));
    struct pollfd *polled = mm_alloc((1 + (size_t)size) * sizeof *polled);
    if (!polled)
        return mm_fail(MEGAMOE_ENOMEM, "out of memory");
    const megamoe_status status = accept_all(listener, &cards[own], connections, polled, deadline);
    free(polled);
    return status;
}

megamoe_status mm_connect(const mm_bootstrap *bootstrap, mm_outcome *outcome, int64_t deadline,
                          mm_connection *connections) {
    const int32_t own = bootstrap->rank, size = bootstrap->size;
    struct card mine = {.rank = own,
                        .size = size,
                        .host = host_of(),
                        .pids = namespace_of("pid"),
                        .process = getpid()};
    int listener = -1;
    snprintf(mine.version, sizeof mine.version, "%s", megamoe_version());
    struct card *cards = mm_alloc((size_t)size * sizeof *cards);
    if (!cards)
        return mm_fail(MEGAMOE_ENOMEM, "communicator: out of memory");
    for (int32_t r = 0; connections && r < size; r++)
        connections[r] = (mm_connection){-1, -1};
    if (outcome->status == MEGAMOE_OK)
        mm_outcome_set(outcome, listen_as(&mine, &listener));
    mine.outcome = *outcome;
    megamoe_status status =
        bootstrap->allgather(bootstrap->state, &mine, cards, sizeof mine, mm_left_ms(deadline));
    if (status == MEGAMOE_OK)
        status = compare(cards, size);
    if (status == MEGAMOE_OK)
        status = mm_outcome_of_all(what, &cards[0].outcome, sizeof *cards, own, size);
    if (status == MEGAMOE_OK)
        mm_outcome_set(outcome, connect_all(listener, cards, own, connections, deadline));
    if (listener >= 0)
        close(listener);
    free(cards);
    return status;
}

megamoe_status mm_outcome_share(const mm_bootstrap *bootstrap, const mm_outcome *outcome,
                                int64_t deadline) {
    mm_outcome *all = mm_alloc((size_t)bootstrap->size * sizeof *all);
    if (!all)
        return mm_fail(MEGAMOE_ENOMEM, "communicator: out of memory");
    megamoe_status status =
        bootstrap->allgather(bootstrap->state, outcome, all, sizeof *outcome, mm_left_ms(deadline));
    if (status == MEGAMOE_OK)
        status = mm_outcome_of_all(what, all, sizeof *all, bootstrap->rank, bootstrap->size);
    free(all);
    return status;
}
