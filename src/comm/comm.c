/* SPDX-License-Identifier: Apache-2.0 */
#include "comm/comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "comm/bootstrap.h"
#include "comm/custom.h"
#include "comm/environment.h"
#include "comm/group.h"
#include "comm/links.h"
#include "comm/outcome.h"
#include "comm/tcp.h"

enum { MAX_RANKS = 1024, CREATION_DEADLINE_MS = 600000, MAX_PORT = 65535 };

struct megamoe_comm {
    int32_t rank, size;
    int32_t creation_deadline_ms;
    mm_alarm *alarm;
    /* Ranks of one process: */
    mm_group *group;
    bool folded;
    uint64_t meetings; /* joined so far */
    /* Ranks that are processes: */
    mm_links *links;
    /* Ranks whose messages the caller carries: */
    bool by_messages;
    megamoe_transport transport;
    mm_alarm own_alarm; /* of the last two */
};

struct mm_meeting {
    mm_gathering *gathering; /* of folded ranks, which may meet later; else NULL */
    _Alignas(16) uint8_t parts[];
};

/* ---- ranks of one process ---- */

static megamoe_status open_ranks(const char *what, int32_t size, bool folded,
                                 megamoe_comm **comms) {
    if (!comms || size < 1 || size > MAX_RANKS)
        return mm_fail(MEGAMOE_EINVAL, "%s: %d ranks; expected 1..%d and an array for them", what,
                       size, MAX_RANKS);
    bool complete = true;
    for (int32_t r = 0; r < size; r++) {
        comms[r] = mm_alloc(sizeof *comms[r]);
        complete = complete && comms[r];
    }
    mm_group *group = NULL;
    megamoe_status status =
        complete ? mm_group_open(size, &group)
                 : mm_fail(MEGAMOE_ENOMEM, "a communicator of %d ranks: out of memory", size);
    for (int32_t r = 0; r < size; r++) {
        if (status == MEGAMOE_OK) {
            *comms[r] = (megamoe_comm){.rank = r,
                                       .size = size,
                                       .creation_deadline_ms = CREATION_DEADLINE_MS,
                                       .alarm = mm_group_alarm(group),
                                       .group = group,
                                       .folded = folded};
        } else {
            free(comms[r]);
            comms[r] = NULL;
        }
    }
    return status;
}

megamoe_status megamoe_comm_self(megamoe_comm **comm) {
    if (!comm)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_comm_self: comm is NULL");
    return open_ranks("megamoe_comm_self", 1, false, comm);
}

megamoe_status megamoe_comm_threads(int32_t size, megamoe_comm **comms) {
    return open_ranks("megamoe_comm_threads", size, false, comms);
}

megamoe_status megamoe_comm_folded(int32_t size, megamoe_comm **comms) {
    return open_ranks("megamoe_comm_folded", size, true, comms);
}

/* ---- ranks that are processes ---- */

static megamoe_status take_deadline(int32_t given, int32_t *deadline_ms) {
    if (given < 0)
        return mm_fail(MEGAMOE_EINVAL,
                       "communicator: creation_deadline_ms is %d; expected 0 for "
                       "%d, or more",
                       given, CREATION_DEADLINE_MS);
    *deadline_ms = given ? given : CREATION_DEADLINE_MS;
    return MEGAMOE_OK;
}

static megamoe_status check_ranks(int32_t rank, int32_t size) {
    if (size < 1 || size > MAX_RANKS || rank < 0 || rank >= size)
        return mm_fail(MEGAMOE_EINVAL,
                       "communicator: rank %d of %d; expected 1..%d ranks, counted "
                       "from 0",
                       rank, size, MAX_RANKS);
    return MEGAMOE_OK;
}

/* Connects the ranks that a bootstrap has brought together, and closes that. */
static megamoe_status open_processes(mm_bootstrap *bootstrap, int32_t deadline_ms,
                                     megamoe_comm **comm) {
    megamoe_comm *c = mm_alloc(sizeof *c);
    megamoe_status status = c ? MEGAMOE_OK : mm_fail(MEGAMOE_ENOMEM, "communicator: out of memory");
    if (c) {
        c->rank = bootstrap->rank;
        c->size = bootstrap->size;
        c->creation_deadline_ms = deadline_ms;
        c->alarm = &c->own_alarm;
        mm_alarm_open(&c->own_alarm);
        status = mm_links_open(bootstrap, c->alarm, deadline_ms, &c->links);
    }
    if (status == MEGAMOE_OK)
        *comm = c;
    else {
        bootstrap->abort(bootstrap->state);
        megamoe_comm_close(c);
    }
    bootstrap->close(bootstrap->state);
    return status;
}

static megamoe_status open_tcp(const megamoe_comm_tcp_options *options, megamoe_comm **comm) {
    megamoe_comm_tcp_options o = *options;
    MM_TRY(check_ranks(o.rank, o.size));
    MM_TRY(take_deadline(options->creation_deadline_ms, &o.creation_deadline_ms));
    if (o.port < 1 || o.port > MAX_PORT)
        return mm_fail(MEGAMOE_EINVAL, "communicator: port %d; expected 1..%d", o.port, MAX_PORT);
    o.address = o.address ? o.address : "127.0.0.1";
    o.job = o.job ? o.job : "";
    mm_bootstrap bootstrap;
    MM_TRY(mm_tcp_open(&o, &bootstrap));
    return open_processes(&bootstrap, o.creation_deadline_ms, comm);
}

megamoe_status megamoe_comm_tcp(const megamoe_comm_tcp_options *options, megamoe_comm **comm) {
    if (!comm || !options)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_comm_tcp: %s is NULL", comm ? "options" : "comm");
    *comm = NULL;
    megamoe_comm_tcp_options o;
    MM_TRY(mm_take_struct(&o, sizeof o, options, "megamoe_comm_tcp_options"));
    return open_tcp(&o, comm);
}

megamoe_status megamoe_comm_from_env(const megamoe_comm_options *options, megamoe_comm **comm) {
    if (!comm)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_comm_from_env: comm is NULL");
    *comm = NULL;
    megamoe_comm_options wanted;
    MM_TRY(mm_take_struct(&wanted, sizeof wanted, options, "megamoe_comm_options"));
    megamoe_comm_tcp_options o = {.creation_deadline_ms = wanted.creation_deadline_ms};
    MM_TRY(mm_environment_read(&o));
    return open_tcp(&o, comm);
}

megamoe_status megamoe_comm_custom(const megamoe_bootstrap *bootstrap, megamoe_comm **comm) {
    if (!comm || !bootstrap)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_comm_custom: %s is NULL",
                       comm ? "bootstrap" : "comm");
    *comm = NULL;
    megamoe_bootstrap callers;
    int32_t deadline_ms = 0;
    MM_TRY(mm_take_struct(&callers, sizeof callers, bootstrap, "megamoe_bootstrap"));
    MM_TRY(check_ranks(callers.rank, callers.size));
    MM_TRY(take_deadline(callers.creation_deadline_ms, &deadline_ms));
    if (!callers.allgather)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_comm_custom: allgather is NULL");
    mm_bootstrap taken;
    MM_TRY(mm_custom_open(&callers, &taken));
    return open_processes(&taken, deadline_ms, comm);
}

/* ---- ranks that the caller connects ---- */

static void close_transport(const megamoe_transport *transport) {
    if (transport->close)
        transport->close(transport->user);
}

static megamoe_status open_messages(const megamoe_transport *transport, megamoe_comm **comm) {
    MM_TRY(mm_messages_meet(transport));
    megamoe_comm *c = *comm = mm_alloc(sizeof *c);
    if (!c)
        return mm_fail(MEGAMOE_ENOMEM, "communicator: out of memory");
    c->rank = transport->rank;
    c->size = transport->size;
    c->creation_deadline_ms = transport->creation_deadline_ms;
    c->by_messages = true;
    c->transport = *transport;
    c->alarm = &c->own_alarm;
    mm_alarm_open(&c->own_alarm);
    return MEGAMOE_OK;
}

megamoe_status megamoe_comm_transport(const megamoe_transport *transport, megamoe_comm **comm) {
    if (!comm || !transport)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_comm_transport: %s is NULL",
                       comm ? "transport" : "comm");
    *comm = NULL;
    megamoe_transport callers;
    MM_TRY(mm_take_struct(&callers, sizeof callers, transport, "megamoe_transport"));
    MM_TRY(check_ranks(callers.rank, callers.size));
    MM_TRY(take_deadline(callers.creation_deadline_ms, &callers.creation_deadline_ms));
    if (!callers.allgather || !callers.alltoallv)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_comm_transport: %s is NULL",
                       callers.allgather ? "alltoallv" : "allgather");
    const megamoe_status status = open_messages(&callers, comm);
    if (status == MEGAMOE_OK)
        return MEGAMOE_OK;
    if (callers.abort)
        callers.abort(callers.user);
    close_transport(&callers);
    return status;
}

/* ---- all ---- */

void megamoe_comm_close(megamoe_comm *comm) {
    if (!comm)
        return;
    if (comm->group)
        mm_group_close(comm->group);
    else {
        mm_links_close(comm->links);
        if (comm->by_messages)
            close_transport(&comm->transport);
        mm_alarm_close(&comm->own_alarm);
    }
    free(comm);
}

int32_t megamoe_comm_rank(const megamoe_comm *comm) {
    return comm->rank;
}

int32_t megamoe_comm_size(const megamoe_comm *comm) {
    return comm->size;
}

void megamoe_comm_abort(megamoe_comm *comm) {
    if (!comm)
        return;
    if (comm->links)
        mm_links_abort(comm->links);
    else if (mm_alarm_raise(comm->alarm, MM_ALARM_ABORTED, comm->rank) && comm->by_messages &&
             comm->transport.abort)
        comm->transport.abort(comm->transport.user);
}

bool mm_comm_folded(const megamoe_comm *comm) {
    return comm->folded;
}

bool mm_comm_in_processes(const megamoe_comm *comm) {
    return comm->links;
}

bool mm_comm_by_messages(const megamoe_comm *comm) {
    return comm->by_messages;
}

int32_t mm_comm_creation_deadline(const megamoe_comm *comm) {
    return comm->creation_deadline_ms;
}

bool mm_comm_aborted(const megamoe_comm *comm) {
    int32_t rank;
    return mm_alarm_look(comm->alarm, &rank) != MM_ALARM_NONE;
}

bool mm_comm_closed(const megamoe_comm *comm, int32_t rank) {
    return comm->links && mm_links_closed(comm->links, rank);
}

int32_t mm_comm_cause(const megamoe_comm *comm, char text[MM_COMM_CAUSE_BYTES]) {
    int32_t rank;
    const mm_alarm_cause cause = mm_alarm_look(comm->alarm, &rank);
    snprintf(text, MM_COMM_CAUSE_BYTES,
             cause == MM_ALARM_NONE    ? ""
             : cause == MM_ALARM_ENDED ? "the process of rank %d has ended"
                                       : "rank %d has aborted",
             rank);
    return rank;
}

void mm_comm_watch(megamoe_comm *comm, mm_abort_watch *watch) {
    mm_alarm_watch(comm->alarm, watch);
}

void mm_comm_unwatch(megamoe_comm *comm, mm_abort_watch *watch) {
    mm_alarm_unwatch(comm->alarm, watch);
}

/* ---- collectives ---- */

/* A rank that has aborted takes part in nothing. */
static megamoe_status check_messages(const megamoe_comm *comm) {
    return mm_comm_aborted(comm) ? mm_fail(MEGAMOE_EPEER, "rank %d has aborted", comm->rank)
                                 : MEGAMOE_OK;
}

megamoe_status mm_comm_tell(megamoe_comm *comm, const void *mine, void *all, size_t bytes,
                            int32_t timeout_ms) {
    MM_TRY(check_messages(comm));
    const megamoe_status status =
        mm_messages_allgather(&comm->transport, mine, all, bytes, timeout_ms);
    if (status != MEGAMOE_OK)
        megamoe_comm_abort(comm);
    return status;
}

megamoe_status mm_comm_exchange(megamoe_comm *comm, const mm_parts *sent, const mm_parts *received,
                                int32_t timeout_ms) {
    MM_TRY(check_messages(comm));
    const megamoe_status status =
        mm_messages_exchange(&comm->transport, sent, received, timeout_ms);
    if (status != MEGAMOE_OK)
        megamoe_comm_abort(comm);
    return status;
}

static megamoe_status allgather(megamoe_comm *comm, const void *mine, void *all, size_t bytes) {
    if (comm->by_messages)
        return mm_comm_tell(comm, mine, all, bytes, comm->creation_deadline_ms);
    return comm->links ? mm_links_allgather(comm->links, mine, all, bytes, -1, NULL,
                                            comm->creation_deadline_ms)
                       : mm_group_allgather(comm->group, comm->rank, comm->meetings++, mine, all,
                                            bytes, comm->creation_deadline_ms);
}

megamoe_status megamoe_comm_allgather(megamoe_comm *comm, const void *mine, void *all,
                                      size_t bytes) {
    if (!comm || !mine || !all || !bytes)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_comm_allgather: %s",
                       !comm ? "comm is NULL" : (bytes ? "mine or all is NULL" : "0 bytes"));
    if (comm->folded)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_comm_allgather: one thread drives all ranks of a "
                                       "folded communicator, so they cannot wait for each other");
    return allgather(comm, mine, all, bytes);
}

megamoe_status mm_meeting_join(megamoe_comm *comm, const void *part, size_t bytes,
                               mm_meeting **meeting) {
    const size_t parts = comm->folded ? 0 : (size_t)comm->size * bytes;
    mm_meeting *m = *meeting = mm_alloc(sizeof *m + parts);
    megamoe_status status;
    if (!m)
        status = mm_fail(MEGAMOE_ENOMEM, "rank %d: out of memory", comm->rank);
    else if (comm->folded)
        status = mm_gathering_join(comm->group, comm->rank, comm->meetings++, part, bytes,
                                   &m->gathering);
    else
        status = allgather(comm, part, m->parts, bytes);
    if (status == MEGAMOE_OK)
        return MEGAMOE_OK;
    megamoe_comm_abort(comm);
    free(m);
    *meeting = NULL;
    return status;
}

const void *mm_meeting_parts(const megamoe_comm *comm, const mm_meeting *meeting) {
    return meeting->gathering ? mm_gathering_all(comm->group, meeting->gathering) : meeting->parts;
}

void mm_meeting_leave(megamoe_comm *comm, mm_meeting *meeting) {
    if (!meeting)
        return;
    mm_gathering_leave(comm->group, meeting->gathering);
    free(meeting);
}

megamoe_status mm_meeting_outcome(megamoe_comm *comm, const char *what, megamoe_status status) {
    mm_outcome outcome = {.status = MEGAMOE_OK};
    mm_outcome_set(&outcome, status);
    mm_meeting *meeting;
    const megamoe_status joined = mm_meeting_join(comm, &outcome, sizeof outcome, &meeting);
    if (joined != MEGAMOE_OK) /* this rank's own failure may be what ended it */
        return status == MEGAMOE_OK ? joined : mm_fail(status, "%s", outcome.message);
    status = mm_outcome_of_all(what, mm_meeting_parts(comm, meeting), sizeof outcome, comm->rank,
                               comm->size);
    mm_meeting_leave(comm, meeting);
    return status;
}

megamoe_status mm_comm_share_fds(megamoe_comm *comm, int fd, int *fds) {
    const int32_t none = 0;
    int32_t *all = mm_alloc((size_t)comm->size * sizeof *all);
    if (!all) {
        megamoe_comm_abort(comm);
        return mm_fail(MEGAMOE_ENOMEM, "rank %d: out of memory", comm->rank);
    }
    const megamoe_status status = mm_links_allgather(comm->links, &none, all, sizeof none, fd, fds,
                                                     comm->creation_deadline_ms);
    free(all);
    return status;
}
