/* SPDX-License-Identifier: Apache-2.0 */
/* Communicators of processes that live. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/comm.h"
#include "comm/symmetric.h"
#include "crew.h"

/* ---- meeting and telling ---- */

static const size_t sizes[] = {1, 8, 1000, 16384, 16385, 70000};

static uint8_t byte_of(int32_t rank, size_t at, int round) {
    return (uint8_t)((uint32_t)rank * 31 + at * 7 + (size_t)round);
}

static void tell_all(const member *m, megamoe_comm *comm, size_t bytes, int round) {
    uint8_t *mine = malloc(bytes), *all = malloc(bytes * (size_t)m->size);
    if (T_CHECK(mine && all)) {
        for (size_t i = 0; i < bytes; i++)
            mine[i] = byte_of(m->rank, i, round);
        T_STATUS(megamoe_comm_allgather(comm, mine, all, bytes), MEGAMOE_OK);
        for (int32_t r = 0; r < m->size; r++)
            for (size_t i = 0; i < bytes; i++)
                if (!T_EQ_INT(all[(size_t)r * bytes + i], byte_of(r, i, round)))
                    break;
    }
    free(mine);
    free(all);
}

static void talk(const member *m, megamoe_comm *comm) {
    t_random random = t_random_start((uint64_t)m->rank);
    T_EQ_INT(megamoe_comm_rank(comm), m->rank);
    T_EQ_INT(megamoe_comm_size(comm), m->size);
    T_CHECK(mm_comm_in_processes(comm) && !mm_comm_folded(comm) && !mm_comm_aborted(comm));
    for (int round = 0; round < 60; round++) {
        if (t_below(&random, 10) == 0)
            crew_pause_ms(t_below(&random, 5));
        tell_all(m, comm, sizes[round % 6], round);
    }
}

static void meet_and_talk(const member *m) {
    megamoe_comm *comm;
    crew_pause_ms(t_below(&(t_random){{(uint64_t)m->rank, 1, 2, 3}}, 50));
    T_OK(crew_meet(m, 0, &comm));
    talk(m, comm);
    megamoe_comm_close(comm);
}

T_CASE(ranks_meet_over_tcp) {
    static const int32_t ranks[] = {1, 2, 4, 8};
    for (int i = 0; i < 4; i++)
        crew_run(ranks[i], meet_and_talk, NULL);
}

/* The first rank comes last. */
static void meet_late(const member *m) {
    megamoe_comm *comm;
    if (m->rank == 0)
        crew_pause_ms(700);
    T_OK(crew_meet(m, 0, &comm));
    tell_all(m, comm, 8, 0);
    megamoe_comm_close(comm);
}

T_CASE(the_first_rank_may_be_late) {
    crew_run(3, meet_late, NULL);
}

/* ---- the caller's own bootstrap ---- */

struct board {
    pthread_barrier_t barrier;
    uint8_t parts[CREW_MAX][1024];
    int calls[CREW_MAX], closed[CREW_MAX], aborted[CREW_MAX];
    bool mixes, fails; /* the last rank's entry stands first; rank 1's first call fails */
};

struct own {
    const member *m;
    struct board *board;
};

static int own_allgather(void *user, const void *mine, void *all, size_t bytes,
                         int32_t timeout_ms) {
    const struct own *own = user;
    struct board *board = own->board;
    T_CHECK(bytes <= 1024 && timeout_ms > 0 && timeout_ms <= CREW_DEADLINE_MS);
    board->calls[own->m->rank]++;
    memcpy(board->parts[own->m->rank], mine, bytes);
    pthread_barrier_wait(&board->barrier);
    for (int32_t r = 0; r < own->m->size; r++)
        memcpy((uint8_t *)all + (size_t)r * bytes,
               board->parts[board->mixes ? own->m->size - 1 - r : r], bytes);
    pthread_barrier_wait(&board->barrier);
    return board->fails && own->m->rank == 1 ? 7 : 0;
}

static void own_abort(void *user) {
    const struct own *own = user;
    own->board->aborted[own->m->rank]++;
}

static void own_close(void *user) {
    const struct own *own = user;
    own->board->closed[own->m->rank]++;
}

static megamoe_status meet_by_board(const struct own *own, megamoe_comm **comm) {
    megamoe_bootstrap bootstrap = MEGAMOE_INIT(megamoe_bootstrap);
    bootstrap.rank = own->m->rank;
    bootstrap.size = own->m->size;
    bootstrap.creation_deadline_ms = CREW_DEADLINE_MS;
    bootstrap.user = (void *)own;
    bootstrap.allgather = own_allgather;
    bootstrap.abort = own_abort;
    bootstrap.close = own_close;
    return megamoe_comm_custom(&bootstrap, comm);
}

static struct board *open_board(int32_t size) {
    struct board *board = crew_share(sizeof *board);
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    T_REQUIRE(pthread_barrier_init(&board->barrier, &attributes, (unsigned)size) == 0);
    return board;
}

static void talk_by_board(const member *m) {
    const struct own own = {m, m->argument};
    megamoe_comm *comm;
    T_OK(meet_by_board(&own, &comm));
    T_EQ_INT(own.board->closed[m->rank], 1);
    talk(m, comm);
    megamoe_comm_close(comm);
    T_EQ_INT(own.board->calls[m->rank], 2);
    T_EQ_INT(own.board->closed[m->rank], 1);
    T_EQ_INT(own.board->aborted[m->rank], 0);
}

T_CASE(ranks_meet_through_the_callers_allgather) {
    struct board *board = open_board(4);
    crew_run(4, talk_by_board, board);
    crew_unshare(board, sizeof *board);
}

static void refuse_mixed(const member *m) {
    const struct own own = {m, m->argument};
    megamoe_comm *comm;
    T_STATUS(meet_by_board(&own, &comm), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "rank 1 of 2 brought as that of rank 0 of 2");
    T_CHECK(!comm);
    T_EQ_INT(own.board->closed[m->rank], 1);
    T_EQ_INT(own.board->aborted[m->rank], 1);
}

T_CASE(an_allgather_that_mixes_ranks_up) {
    struct board *board = open_board(2);
    board->mixes = true;
    crew_run(2, refuse_mixed, board);
    crew_unshare(board, sizeof *board);
}

static void fail_together(const member *m) {
    const struct own own = {m, m->argument};
    megamoe_comm *comm;
    T_STATUS(meet_by_board(&own, &comm), MEGAMOE_EPEER);
    T_CONTAINS(megamoe_last_error(), m->rank == 1 ? "the caller's allgather returned 7"
                                                  : "the process of rank 1 has ended");
}

T_CASE(an_allgather_that_fails) {
    struct board *board = open_board(2);
    board->fails = true;
    crew_run(2, fail_together, board);
    crew_unshare(board, sizeof *board);
}

T_CASE(bootstraps_are_checked) {
    megamoe_comm *comm;
    megamoe_bootstrap b = MEGAMOE_INIT(megamoe_bootstrap);
    T_STATUS(megamoe_comm_custom(NULL, &comm), MEGAMOE_EINVAL);
    b.size = 2;
    T_STATUS(megamoe_comm_custom(&b, &comm), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "allgather is NULL");
    b.rank = 2;
    T_STATUS(megamoe_comm_custom(&b, &comm), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "rank 2 of 2");
    megamoe_comm_tcp_options o = MEGAMOE_INIT(megamoe_comm_tcp_options);
    T_STATUS(megamoe_comm_tcp(NULL, &comm), MEGAMOE_EINVAL);
    o.size = 1;
    T_STATUS(megamoe_comm_tcp(&o, &comm), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "port 0");
    o.port = 1;
    o.creation_deadline_ms = -1;
    T_STATUS(megamoe_comm_tcp(&o, &comm), MEGAMOE_EINVAL);
    o.creation_deadline_ms = 100;
    o.rank = 1;
    o.size = 2;
    o.address = "no.such.host.invalid";
    const megamoe_status status = megamoe_comm_tcp(&o, &comm);
    T_CHECK(status == MEGAMOE_EINVAL && !comm);
    T_CONTAINS(megamoe_last_error(), "no.such.host.invalid");
}

/* ---- the environment ---- */

struct launcher {
    const char *rank, *size, *also, *job;
};

static const struct launcher launchers[] = {
    {"RANK", "WORLD_SIZE", NULL, "TORCHELASTIC_RUN_ID"},
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_JOB_ID"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", NULL, "PMIX_NAMESPACE"},
    {"PMI_RANK", "PMI_SIZE", NULL, NULL}};

static void clear_environment(void) {
    for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++) {
        unsetenv(launchers[i].rank);
        unsetenv(launchers[i].size);
        if (launchers[i].also)
            unsetenv(launchers[i].also);
        if (launchers[i].job)
            unsetenv(launchers[i].job);
    }
    unsetenv("MASTER_ADDR");
    unsetenv("MASTER_PORT");
    unsetenv("MEGAMOE_PORT");
    unsetenv("MEGAMOE_JOB");
}

static void set_number(const char *name, int32_t number) {
    char text[16];
    snprintf(text, sizeof text, "%d", number);
    setenv(name, text, 1);
}

static void meet_by_environment(const member *m) {
    const struct launcher *l = m->argument;
    clear_environment();
    set_number(l->rank, m->rank);
    set_number(l->size, m->size);
    if (l->also)
        setenv(l->also, "0", 1);
    if (l->job)
        setenv(l->job, "job of its own", 1);
    if (m->port > 1000 && l == launchers) /* both ways to the same port */
        set_number("MASTER_PORT", m->port <= 64535 ? m->port - 1000 : m->port + 1000);
    else
        set_number("MEGAMOE_PORT", m->port);
    if (m->port > 64535)
        set_number("MEGAMOE_PORT", m->port);
    megamoe_comm_options options = MEGAMOE_INIT(megamoe_comm_options);
    options.creation_deadline_ms = CREW_DEADLINE_MS;
    megamoe_comm *comm;
    T_OK(megamoe_comm_from_env(&options, &comm));
    talk(m, comm);
    megamoe_comm_close(comm);
}

T_CASE(launchers_are_known_by_their_environment) {
    for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++)
        crew_run(2, meet_by_environment, (void *)&launchers[i]);
}

static void refuse_environment(const member *m) {
    (void)m;
    megamoe_comm *comm;
    clear_environment();
    T_STATUS(megamoe_comm_from_env(NULL, &comm), MEGAMOE_ENOTFOUND);
    setenv("RANK", "1", 1);
    T_STATUS(megamoe_comm_from_env(NULL, &comm), MEGAMOE_ENOTFOUND);
    /* A batch script of Slurm is no step. */
    setenv("SLURM_PROCID", "0", 1);
    setenv("SLURM_NTASKS", "4", 1);
    T_STATUS(megamoe_comm_from_env(NULL, &comm), MEGAMOE_ENOTFOUND);
    setenv("WORLD_SIZE", "1", 1);
    T_STATUS(megamoe_comm_from_env(NULL, &comm), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "RANK is '1'; expected 0..0");
    setenv("WORLD_SIZE", "2x", 1);
    T_STATUS(megamoe_comm_from_env(NULL, &comm), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "WORLD_SIZE is '2x'");
    setenv("WORLD_SIZE", "2", 1);
    setenv("MEGAMOE_PORT", "65536", 1);
    T_STATUS(megamoe_comm_from_env(NULL, &comm), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "MEGAMOE_PORT is '65536'; expected 1..65535");
}

T_CASE(environments_that_are_no_launchers) {
    crew_run(1, refuse_environment, NULL);
}

/* ---- memory ---- */

static void share_memory(const member *m) {
    enum { BYTES = 3 << 20 };
    megamoe_comm *comm;
    T_OK(crew_meet(m, 0, &comm));
    mm_symmetric memory;
    T_OK(mm_symmetric_open(comm, BYTES, &memory));
    for (size_t i = 0; i < BYTES; i += 4096)
        T_EQ_INT(memory.own[i], 0);
    uint64_t own[CREW_MAX] = {0};
    uint8_t *ranges[CREW_MAX];
    T_OK(mm_symmetric_meet(comm, &memory, own, ranges));
    T_CHECK(ranges[m->rank] == memory.own);
    for (int32_t r = 0; r < m->size; r++)
        ranges[r][m->rank * 4096] = (uint8_t)(100 + m->rank);
    tell_all(m, comm, 8, 0);
    for (int32_t r = 0; r < m->size; r++)
        for (int32_t writer = 0; writer < m->size; writer++)
            T_EQ_INT(ranges[r][writer * 4096], 100 + writer);
    mm_symmetric_close(&memory);
    megamoe_comm_close(comm);
}

T_CASE(every_rank_writes_into_all_memory) {
    crew_run(4, share_memory, NULL);
}

static void share_unequally(const member *m) {
    megamoe_comm *comm;
    T_OK(crew_meet(m, 0, &comm));
    mm_symmetric memory;
    T_OK(mm_symmetric_open(comm, m->rank == 1 ? 4096 : 8192, &memory));
    uint64_t own[CREW_MAX] = {0};
    uint8_t *ranges[CREW_MAX];
    T_STATUS(mm_symmetric_meet(comm, &memory, own, ranges), MEGAMOE_EIO);
    T_CONTAINS(megamoe_last_error(), m->rank == 1 ? "rank 0 shares no memory of 4096 bytes"
                                                  : "rank 1 shares no memory of 8192 bytes");
    mm_symmetric_close(&memory);
    megamoe_comm_close(comm);
}

T_CASE(memory_of_another_size_is_not_mapped) {
    crew_run(2, share_unequally, NULL);
}

/* ---- contradictions ---- */

/* What megamoe_version() gives, by way of the linker. */
const char *__real_megamoe_version(void);
const char *__wrap_megamoe_version(void);
static const char *version;

const char *__wrap_megamoe_version(void) {
    return version ? version : __real_megamoe_version();
}

static void bring_another_version(const member *m) {
    megamoe_comm *comm;
    version = m->rank == 2 ? "7.8.9" : "1.2.3";
    T_STATUS(crew_meet(m, 0, &comm), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(),
               "the library's version is 1.2.3 on rank 0 and 7.8.9 on rank 2");
}

T_CASE(versions_differ) {
    crew_run(3, bring_another_version, NULL);
}

static void count_differently(const member *m) {
    member mine = *m;
    mine.size = m->rank == 1 ? 4 : 3;
    megamoe_comm *comm;
    const megamoe_status status = crew_meet(&mine, 0, &comm);
    /* A rank that has not got through by then finds nobody there. */
    T_CHECK_MSG(status == MEGAMOE_EINVAL || (m->rank == 2 && status == MEGAMOE_ETIMEDOUT), "%s",
                megamoe_last_error());
    if (status == MEGAMOE_EINVAL)
        T_CONTAINS(megamoe_last_error(),
                   "rank 0 is one of 3 ranks, but another process is rank 1 of 4");
}

static void be_the_same(const member *m) {
    member mine = *m;
    mine.rank = m->rank ? 1 : 0;
    mine.size = 3;
    megamoe_comm *comm;
    T_STATUS(crew_meet(&mine, 0, &comm), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "two processes are rank 1 of 3");
}

T_CASE(ranks_that_contradict_each_other) {
    crew_run(2, count_differently, NULL);
    crew_run(3, be_the_same, NULL);
}

/* ---- who else comes to the port ---- */

static megamoe_status meet_for_job(const member *m, const char *job, megamoe_comm **comm) {
    megamoe_comm_tcp_options o = MEGAMOE_INIT(megamoe_comm_tcp_options);
    o.rank = m->rank % 2;
    o.size = 2;
    o.port = m->port;
    o.address = "localhost";
    o.job = job;
    o.creation_deadline_ms = CREW_DEADLINE_MS;
    return megamoe_comm_tcp(&o, comm);
}

/* Rank 2 is rank 0 of another job, which finds the port taken; its rank 1 asks at the wrong door.
 */
static void belong_to_two_jobs(const member *m) {
    megamoe_comm *comm;
    if (m->rank >= 2)
        crew_pause_ms(200);
    if (m->rank == 1)
        crew_pause_ms(600);
    const megamoe_status status = meet_for_job(m, m->rank < 2 ? "first" : "second", &comm);
    T_EQ_INT(status, m->rank < 2 ? MEGAMOE_OK : (m->rank == 2 ? MEGAMOE_EIO : MEGAMOE_EINVAL));
    if (m->rank == 2)
        T_CONTAINS(megamoe_last_error(), "cannot listen at localhost port");
    if (m->rank == 3)
        T_CONTAINS(megamoe_last_error(), "at this address waits job 'first', not 'second'");
    megamoe_comm_close(comm);
}

T_CASE(two_jobs_at_one_port_do_not_mix) {
    crew_run(4, belong_to_two_jobs, NULL);
}

T_CASE(two_jobs_at_once) {
    crew first = crew_start(3, meet_and_talk, NULL);
    crew second = crew_start(4, meet_and_talk, NULL);
    int codes[CREW_MAX];
    crew_wait(&first, codes);
    for (int32_t r = 0; r < 3; r++)
        T_EQ_INT(codes[r], 0);
    crew_wait(&second, codes);
    for (int32_t r = 0; r < 4; r++)
        T_EQ_INT(codes[r], 0);
}
