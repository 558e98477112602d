/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe launch: starts a program once for each rank on this machine. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "commands.h"
#include "monotonic.h"
#include "options.h"
#include "report.h"

enum { MAX_RANKS = 1024, GRACE_MS = 3000, CODE_OF_SIGNAL = 128, CODE_NOT_STARTED = 127 };

typedef struct job {
    int32_t ranks;
    char **program; /* with its arguments, NULL at the end */
    int port_holder;
    int port;
    uint64_t name;
    pid_t *processes; /* [ranks]; 0 for those that have ended */
    int32_t running;
    pid_t group; /* of all processes */
    int code;    /* of the first that ended badly, else 0 */
} job;

/*
 * A port that is free, and stays so: as long as the socket is bound nobody is given its port, but
 * rank 0 may listen there, because both allow it and this one does not listen.
 */
static int reserve_port(job *j) {
    static const int on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof address;
    j->port_holder = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (j->port_holder < 0 ||
        setsockopt(j->port_holder, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
        bind(j->port_holder, (const struct sockaddr *)&address, bytes) != 0 ||
        getsockname(j->port_holder, (struct sockaddr *)&address, &bytes) != 0)
        return report_error("launch: no port for rank 0: %s", strerror(errno));
    j->port = ntohs(address.sin_port);
    return EXIT_DONE;
}

static bool set_number(const char *name, int64_t number) {
    char text[24];
    snprintf(text, sizeof text, "%" PRId64, number);
    return setenv(name, text, 1) == 0;
}

/* In the child. It dies with the launcher, however that ends. */
_Noreturn static void become_rank(const job *j, int32_t rank, pid_t launcher,
                                  const sigset_t *signals) {
    char name[24];
    snprintf(name, sizeof name, "%016" PRIx64, j->name);
    (void)setpgid(0, j->group);
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != launcher)
        _exit(CODE_OF_SIGNAL + SIGKILL);
    (void)sigprocmask(SIG_SETMASK, signals, NULL);
    /* A group in the background may not read from a terminal. */
    const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (nothing >= 0)
        (void)dup2(nothing, STDIN_FILENO);
    if (set_number("RANK", rank) && set_number("LOCAL_RANK", rank) &&
        set_number("WORLD_SIZE", j->ranks) && set_number("LOCAL_WORLD_SIZE", j->ranks) &&
        set_number("MEGAMOE_PORT", j->port) && setenv("MASTER_ADDR", "127.0.0.1", 1) == 0 &&
        setenv("MEGAMOE_JOB", name, 1) == 0)
        (void)execvp(j->program[0], j->program);
    report_error("launch: %s cannot be started: %s", j->program[0], strerror(errno));
    _exit(CODE_NOT_STARTED);
}

static int start_all(job *j, const sigset_t *signals) {
    const pid_t launcher = getpid();
    for (int32_t r = 0; r < j->ranks; r++) {
        const pid_t process = fork();
        if (process == 0)
            become_rank(j, r, launcher, signals);
        if (process < 0)
            return report_error("launch: rank %d cannot be started: %s", r, strerror(errno));
        if (r == 0)
            j->group = process;
        (void)setpgid(process, j->group); /* here too: it is needed before the child gets to it */
        j->processes[r] = process;
        j->running++;
    }
    return EXIT_DONE;
}

static int32_t rank_of(const job *j, pid_t process) {
    int32_t r = 0;
    while (r < j->ranks && j->processes[r] != process)
        r++;
    return r;
}

/* Takes notice of processes that have ended. True once one has ended badly. */
static bool reap(job *j) {
    int status;
    pid_t process;
    const int before = j->code;
    while ((process = waitpid(-1, &status, WNOHANG)) > 0) {
        const int32_t rank = rank_of(j, process);
        if (rank == j->ranks || (!WIFEXITED(status) && !WIFSIGNALED(status)))
            continue;
        j->processes[rank] = 0;
        j->running--;
        const int code =
            WIFEXITED(status) ? WEXITSTATUS(status) : CODE_OF_SIGNAL + WTERMSIG(status);
        if (code == 0 || j->code != 0)
            continue;
        j->code = code;
        if (WIFSIGNALED(status))
            report_error("launch: rank %d was ended by signal %d (%s)", rank, WTERMSIG(status),
                         strsignal(WTERMSIG(status)));
        else
            report_error("launch: rank %d ended with exit status %d", rank, code);
    }
    return before == 0 && j->code != 0;
}

/* Until all have ended. `watched` are blocked: those of the launcher go to all ranks. */
static void watch(job *j, const sigset_t *watched) {
    double kill_at = 0; /* 0: nothing has gone wrong */
    while (j->running > 0) {
        const struct timespec while_ending = {.tv_nsec = 100000000};
        const int signal = sigtimedwait(watched, NULL, &while_ending);
        if (signal > 0 && signal != SIGCHLD)
            (void)kill(-j->group, signal);
        if (reap(j)) {
            (void)kill(-j->group, SIGTERM);
            kill_at = monotonic_ms() + GRACE_MS;
        }
        if (kill_at > 0 && monotonic_ms() >= kill_at)
            (void)kill(-j->group, SIGKILL);
    }
}

static int run(job *j) {
    j->processes = calloc((size_t)j->ranks, sizeof *j->processes);
    if (j->processes == NULL)
        return report_error("out of memory");
    if (getrandom(&j->name, sizeof j->name, 0) != (ssize_t)sizeof j->name)
        return report_error("launch: no random numbers: %s", strerror(errno));
    TRY(reserve_port(j));
    static const int caught[] = {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
    sigset_t watched, before;
    sigemptyset(&watched);
    for (size_t i = 0; i < sizeof caught / sizeof *caught; i++)
        sigaddset(&watched, caught[i]);
    (void)sigprocmask(SIG_BLOCK, &watched, &before);
    fflush(NULL); /* or children would write it again */
    if (start_all(j, &before) != EXIT_DONE) {
        j->code = EXIT_BAD_INPUT;
        if (j->running > 0)
            (void)kill(-j->group, SIGKILL);
    }
    watch(j, &watched);
    return j->code;
}

int cmd_launch(int argc, char **argv) {
    int64_t ranks = 0;
    const option_spec options[] = {{"ranks", OPTION_INTEGER, &ranks, "N",
                                    "processes to start; -n N is the same", 1, MAX_RANKS}};
    const command_syntax syntax = {
        "launch",
        "",
        "Starts the program that follows -- once for each rank; ends with the first bad exit code.",
        "megamoe launch -n 4 -- megamoe run qwen --layer 0 --verify",
        options,
        sizeof options / sizeof *options,
        0,
        0};
    static char long_name[] = "--ranks";
    int own = 1;
    while (own < argc && strcmp(argv[own], "--") != 0) {
        if (strcmp(argv[own], "-n") == 0)
            argv[own] = long_name;
        own++;
    }
    const char *arguments[OPTION_MAX_ARGUMENTS];
    int code;
    if (!options_parse(&syntax, own, argv, arguments, &code))
        return code;
    if (ranks == 0)
        return report_error("launch: --ranks is missing (see megamoe launch --help)");
    if (own + 1 >= argc)
        return report_error("launch: no program after -- (see megamoe launch --help)");
    job j = {.ranks = (int32_t)ranks, .program = argv + own + 1, .port_holder = -1};
    code = run(&j);
    if (j.port_holder >= 0)
        close(j.port_holder);
    free(j.processes);
    return code;
}
