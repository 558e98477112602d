/* SPDX-License-Identifier: Apache-2.0 */
/* Communicators of processes of which one dies, stops, aborts or goes. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/comm.h"
#include "comm/connect.h"
#include "comm/symmetric.h"
#include "crew.h"

enum { RANKS = 4, VICTIM = 2, NOTICED_MS = 1000 };

/* Where the victim is when it happens to it. */
enum moment {
    BEFORE_CONNECTING, /* with a bootstrap only */
    BEFORE_SHARING,    /* connected, the others may not be */
    BEFORE_A_CALL,
    BEFORE_SHARING_MEMORY,
    MOMENTS
};

struct plan {
    enum moment moment;
    int signal;
    bool forks; /* the victim has a child that keeps its sockets */
};

static struct plan plan;
static bool is_victim;
static bool *moved; /* the victim changes to another host: NULL if it does not */

static void befall(enum moment moment) {
    if (!is_victim || plan.moment != moment)
        return;
    if (plan.forks && fork() == 0) {
        (void)prctl(PR_SET_PDEATHSIG, 0);
        crew_pause_ms(3000);
        _exit(0);
    }
    (void)raise(plan.signal);
}

megamoe_status __real_mm_connect(const mm_bootstrap *bootstrap, mm_outcome *outcome,
                                 int64_t deadline, mm_connection *connections);
megamoe_status __wrap_mm_connect(const mm_bootstrap *bootstrap, mm_outcome *outcome,
                                 int64_t deadline, mm_connection *connections);
megamoe_status __real_mm_outcome_share(const mm_bootstrap *bootstrap, const mm_outcome *outcome,
                                       int64_t deadline);
megamoe_status __wrap_mm_outcome_share(const mm_bootstrap *bootstrap, const mm_outcome *outcome,
                                       int64_t deadline);

megamoe_status __wrap_mm_connect(const mm_bootstrap *bootstrap, mm_outcome *outcome,
                                 int64_t deadline, mm_connection *connections) {
    befall(BEFORE_CONNECTING);
    /* The connections that it has stay with it. */
    if (moved && is_victim)
        *moved = unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0;
    return __real_mm_connect(bootstrap, outcome, deadline, connections);
}

megamoe_status __wrap_mm_outcome_share(const mm_bootstrap *bootstrap, const mm_outcome *outcome,
                                       int64_t deadline) {
    befall(BEFORE_SHARING);
    return __real_mm_outcome_share(bootstrap, outcome, deadline);
}

/* Goes as far as it can. The survivors' first error is all of them's. */
static megamoe_status live(const member *m, megamoe_comm **comm, mm_symmetric *memory) {
    enum { DEADLINE_MS = 1500 };
    uint64_t own[CREW_MAX] = {0};
    uint8_t *ranges[CREW_MAX];
    int32_t mine = m->rank, all[CREW_MAX];
    megamoe_status status = crew_meet(m, plan.signal == SIGSTOP ? DEADLINE_MS : 0, comm);
    if (status == MEGAMOE_OK) {
        befall(BEFORE_A_CALL);
        status = megamoe_comm_allgather(*comm, &mine, all, sizeof mine);
    }
    if (status == MEGAMOE_OK)
        status = mm_symmetric_open(*comm, 4096, memory);
    if (status == MEGAMOE_OK) {
        befall(BEFORE_SHARING_MEMORY);
        status = mm_symmetric_meet(*comm, memory, own, ranges);
    }
    return status;
}

static void survive(const member *m) {
    plan = *(const struct plan *)m->argument;
    is_victim = m->rank == VICTIM;
    megamoe_comm *comm = NULL;
    mm_symmetric memory = {0};
    const megamoe_status status = live(m, &comm, &memory);
    if (plan.signal == SIGSTOP)
        T_CHECK(status == MEGAMOE_ETIMEDOUT || status == MEGAMOE_EPEER);
    else {
        T_EQ_INT(status, MEGAMOE_EPEER);
        if (plan.moment != BEFORE_CONNECTING)
            T_CHECK_MSG(strstr(megamoe_last_error(), "rank 2") != NULL, "%s", megamoe_last_error());
    }
    if (comm) { /* what has come of it is over */
        int32_t all[CREW_MAX];
        T_STATUS(megamoe_comm_allgather(comm, &m->rank, all, sizeof m->rank), MEGAMOE_EPEER);
        T_CHECK(mm_comm_aborted(comm));
    }
    mm_symmetric_close(&memory);
    megamoe_comm_close(comm);
}

static void check_fault(struct plan p, int64_t at_most_ms) {
    struct plan copy = p;
    const int64_t start = crew_now_ms();
    crew c = crew_start(RANKS, survive, &copy);
    int codes[CREW_MAX] = {0};
    if (p.signal == SIGSTOP) {
        crew_pause_ms(at_most_ms);
        kill(c.processes[VICTIM], SIGKILL);
    }
    crew_wait(&c, codes);
    T_CHECK_MSG(crew_now_ms() - start < at_most_ms + NOTICED_MS, "moment %d: %d ms", (int)p.moment,
                (int)(crew_now_ms() - start));
    for (int32_t r = 0; r < RANKS; r++)
        T_CHECK_MSG(codes[r] == (r == VICTIM ? -SIGKILL : 0), "moment %d, rank %d: %d",
                    (int)p.moment, r, codes[r]);
}

T_CASE(a_killed_rank_is_noticed_at_once) {
    for (int moment = 0; moment < MOMENTS; moment++)
        check_fault((struct plan){.moment = moment, .signal = SIGKILL}, 1000);
}

T_CASE(a_stopped_rank_is_waited_for_until_the_deadline) {
    for (int moment = 0; moment < MOMENTS; moment++)
        check_fault((struct plan){.moment = moment, .signal = SIGSTOP}, 3000);
}

T_CASE(a_killed_rank_whose_child_keeps_its_sockets) {
    check_fault((struct plan){.moment = BEFORE_A_CALL, .signal = SIGKILL, .forks = true}, 1000);
}

/* ---- a rank that is missing, and strangers ---- */

static void miss_two(const member *m) {
    megamoe_comm *comm;
    if (m->rank >= 2)
        return;
    const int64_t start = crew_now_ms();
    T_STATUS(crew_meet(m, 400, &comm), MEGAMOE_ETIMEDOUT);
    T_CONTAINS(megamoe_last_error(),
               "2 of 4 ranks have not connected to rank 0 within 400 ms: 2, 3");
    T_CHECK(crew_now_ms() - start < 400 + NOTICED_MS);
}

static void miss_the_first(const member *m) {
    megamoe_comm *comm;
    if (m->rank == 0)
        return;
    T_STATUS(crew_meet(m, 300, &comm), MEGAMOE_ETIMEDOUT);
    T_CONTAINS(megamoe_last_error(), "cannot connect to rank 0 at 127.0.0.1 port");
}

T_CASE(ranks_that_never_come) {
    crew_run(4, miss_two, NULL);
    crew_run(2, miss_the_first, NULL);
}

static int knock(int32_t port) {
    const struct sockaddr_in address = {.sin_family = AF_INET,
                                        .sin_port = htons((uint16_t)port),
                                        .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const int to = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    for (int i = 0; i < 2000; i++) {
        if (connect(to, (const struct sockaddr *)&address, sizeof address) == 0)
            return to;
        crew_pause_ms(1);
    }
    return -1;
}

/* Before it comes itself, the last rank sends strangers to the port. */
static void come_after_strangers(const member *m) {
    enum { STRANGERS = 100 }; /* more than are heard at a time */
    int sockets[STRANGERS];
    megamoe_comm *comm;
    if (m->rank == 1) {
        char garbage[200];
        memset(garbage, 'G', sizeof garbage);
        for (int i = 0; i < STRANGERS; i++) {
            sockets[i] = knock(m->port);
            T_CHECK(sockets[i] >= 0);
            const size_t bytes = (size_t)i % 3 * 100;
            if (bytes)
                (void)send(sockets[i], garbage, bytes, MSG_NOSIGNAL);
            if (i % 3 == 0 && i > 30) /* some stay and say nothing */
                close(sockets[i]);
        }
    }
    T_OK(crew_meet(m, 0, &comm));
    megamoe_comm_close(comm);
}

T_CASE(strangers_at_the_port_are_turned_away) {
    crew_run(2, come_after_strangers, NULL);
}

/* ---- aborts and departures ---- */

static void abort_others(const member *m) {
    megamoe_comm *comm;
    int32_t all[CREW_MAX];
    char cause[MM_COMM_CAUSE_BYTES];
    T_OK(crew_meet(m, 0, &comm));
    if (m->rank == 1) {
        crew_pause_ms(50);
        megamoe_comm_abort(comm);
    } else {
        T_STATUS(megamoe_comm_allgather(comm, &m->rank, all, sizeof m->rank), MEGAMOE_EPEER);
        T_CONTAINS(megamoe_last_error(), "rank 1 aborted during a collective call");
    }
    T_EQ_INT(mm_comm_cause(comm, cause), 1);
    T_EQ_STR(cause, "rank 1 has aborted");
    megamoe_comm_close(comm);
}

T_CASE(an_abort_reaches_other_processes) {
    crew_run(3, abort_others, NULL);
}

static void go_early(const member *m) {
    megamoe_comm *comm;
    int32_t all[CREW_MAX];
    T_OK(crew_meet(m, 0, &comm));
    T_STATUS(megamoe_comm_allgather(comm, &m->rank, all, sizeof m->rank), MEGAMOE_OK);
    if (m->rank != 1) {
        while (!mm_comm_closed(comm, 1))
            crew_pause_ms(1);
        char cause[MM_COMM_CAUSE_BYTES]; /* another rank may have noticed before, and aborted */
        T_CHECK(mm_comm_cause(comm, cause) != 1);
        T_STATUS(megamoe_comm_allgather(comm, &m->rank, all, sizeof m->rank), MEGAMOE_EPEER);
        T_CHECK_MSG(strstr(megamoe_last_error(), "rank 1 has closed its communicator") != NULL ||
                        strstr(megamoe_last_error(), "aborted during a collective call") != NULL,
                    "%s", megamoe_last_error());
    }
    megamoe_comm_close(comm);
}

T_CASE(a_rank_that_closes_is_no_death) {
    crew_run(3, go_early, NULL);
}

/* Ranks in calls of different kinds: told apart by what they bring. */
static void call_differently(const member *m) {
    megamoe_comm *comm;
    uint8_t mine[64] = {0}, all[64 * CREW_MAX];
    T_OK(crew_meet(m, 0, &comm));
    const megamoe_status status = megamoe_comm_allgather(comm, mine, all, m->rank == 1 ? 32 : 64);
    T_CHECK(status == MEGAMOE_EINVAL || status == MEGAMOE_EPEER);
    megamoe_comm_close(comm);
}

T_CASE(different_calls_do_not_mix) {
    crew_run(3, call_differently, NULL);
}

/* ---- several hosts ---- */

/* Network namespaces stand for hosts. */
static void meet_from_afar(const member *m) {
    megamoe_comm *comm;
    moved = m->argument;
    is_victim = m->rank == VICTIM;
    const megamoe_status status = crew_meet(m, 0, &comm);
    T_EQ_INT(status, *moved ? MEGAMOE_EUNSUPPORTED : MEGAMOE_OK);
    if (*moved)
        T_CONTAINS(megamoe_last_error(), "ranks 0 and 2 are on different hosts");
    megamoe_comm_close(comm);
}

T_CASE(ranks_on_several_hosts_are_refused) {
    bool *to = crew_share(sizeof *to);
    crew_run(3, meet_from_afar, to);
    const bool tested = *to;
    crew_unshare(to, sizeof *to);
    if (!tested)
        T_SKIP("no network namespaces here");
}
