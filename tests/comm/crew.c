/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "crew.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PATIENCE_MS = 60000 };

int64_t crew_now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

void crew_pause_ms(int64_t ms) {
    const struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

void *crew_share(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    T_REQUIRE(memory != MAP_FAILED);
    return memory;
}

void crew_unshare(void *memory, size_t bytes) {
    munmap(memory, bytes);
}

/* Held as long as the socket is bound; rank 0 may listen at it all the same. */
static int32_t hold_port(int *holder) {
    static const int on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof address;
    *holder = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    T_REQUIRE(*holder >= 0);
    (void)setsockopt(*holder, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    T_REQUIRE(bind(*holder, (const struct sockaddr *)&address, bytes) == 0 &&
              getsockname(*holder, (struct sockaddr *)&address, &bytes) == 0);
    return ntohs(address.sin_port);
}

static void run_member(void *argument) {
    const member *m = argument;
    m->run(m);
}

crew crew_start(int32_t size, void (*run)(const member *m), void *argument) {
    crew c = {.size = size};
    T_REQUIRE(size <= CREW_MAX);
    const int32_t port = hold_port(&c.port_holder);
    for (int32_t r = 0; r < size; r++) {
        c.members[r] = (member){r, size, port, argument, run};
        c.processes[r] = t_fork(run_member, &c.members[r]);
    }
    return c;
}

void crew_wait(crew *c, int codes[CREW_MAX]) {
    const int64_t until = crew_now_ms() + PATIENCE_MS;
    for (int32_t r = 0; r < c->size; r++) {
        int status;
        pid_t ended;
        while ((ended = waitpid(c->processes[r], &status, WNOHANG)) == 0) {
            if (!T_CHECK_MSG(crew_now_ms() < until, "rank %d does not end", r)) {
                kill(c->processes[r], SIGKILL);
                ended = waitpid(c->processes[r], &status, 0);
                break;
            }
            crew_pause_ms(1);
        }
        T_CHECK(ended == c->processes[r]);
        codes[r] = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    }
    close(c->port_holder);
}

void crew_run(int32_t size, void (*run)(const member *m), void *argument) {
    crew c = crew_start(size, run, argument);
    int codes[CREW_MAX] = {0};
    crew_wait(&c, codes);
    for (int32_t r = 0; r < size; r++)
        T_CHECK_MSG(codes[r] == 0, "rank %d of %d: %d", r, size, codes[r]);
}

megamoe_status crew_meet(const member *m, int32_t deadline_ms, megamoe_comm **comm) {
    megamoe_comm_tcp_options options = MEGAMOE_INIT(megamoe_comm_tcp_options);
    options.rank = m->rank;
    options.size = m->size;
    options.port = m->port;
    options.creation_deadline_ms = deadline_ms ? deadline_ms : CREW_DEADLINE_MS;
    return megamoe_comm_tcp(&options, comm);
}
