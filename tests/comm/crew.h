/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that are processes, forked by a test. */
#ifndef TESTS_COMM_CREW_H
#define TESTS_COMM_CREW_H

#include <sys/types.h>

#include "megamoe/comm.h"
#include "t.h"

enum { CREW_MAX = 8, CREW_DEADLINE_MS = 20000 };

typedef struct member {
    int32_t rank, size;
    int32_t port;
    void *argument;
    void (*run)(const struct member *m);
} member;

typedef struct crew {
    int32_t size;
    int port_holder;
    member members[CREW_MAX];
    pid_t processes[CREW_MAX];
} crew;

/*
 * Forks `size` processes that run `run` each, with a port of this crew. The argument is theirs as
 * it is now; what crew_share has given they have in common.
 */
crew crew_start(int32_t size, void (*run)(const member *m), void *argument);

/*
 * Waits for all: codes[r] is the exit status of rank r, or minus the signal that ended it. A
 * process that has not ended after a minute is killed.
 */
void crew_wait(crew *c, int codes[CREW_MAX]);

/* Runs a crew of which no check may fail. */
void crew_run(int32_t size, void (*run)(const member *m), void *argument);

/* Zeroed memory that forked processes share. Ends the case if there is none. */
void *crew_share(size_t bytes);
void crew_unshare(void *memory, size_t bytes);

/* The communicator of a crew; a deadline of 0 means CREW_DEADLINE_MS. */
megamoe_status crew_meet(const member *m, int32_t deadline_ms, megamoe_comm **comm);

int64_t crew_now_ms(void);
void crew_pause_ms(int64_t ms);

#endif
