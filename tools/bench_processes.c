/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures in fresh processes: each is this tool, or that of an arm, with --json, whose object is
 * read and pooled. Where an arm is another build, or several ranks, each arm has processes of its
 * own, by turns.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"
#include "bench_pool.h"
#include "order.h"

/* With arms that need them; as many pairs as an interval of 95 % needs. */
enum { DEFAULT_PROCESSES = 6 };

enum { MAX_WORDS = 2 * BENCH_OPTIONS + 2 * BENCH_MAX_ARMS + 16, CODE_NOT_STARTED = 127 };

static const char self[] = "/proc/self/exe";

/* ---- The command of a process ---- */

typedef struct command {
    const char *words[MAX_WORDS + 1];
    int n;
    const char *preload; /* a library; NULL: that of the tool */
    char ranks[24];
    char names[BENCH_OPTIONS][32];
    char values[BENCH_OPTIONS][OPTION_TEXT_BYTES];
} command;

static bool of_parent(const char *option) {
    return strcmp(option, "processes") == 0 || strcmp(option, "json") == 0 ||
           strcmp(option, "csv") == 0;
}

/* The options that differ from their defaults: another build may not know all of them. */
static void add_options(bench_request *request, command *c) {
    bench_request defaults = bench_request_default();
    option_spec options[BENCH_OPTIONS], unset[BENCH_OPTIONS];
    bench_request_options(request, options);
    bench_request_options(&defaults, unset);
    for (int i = 0; i < BENCH_OPTIONS; i++) {
        char buffer[OPTION_TEXT_BYTES];
        const char *value, *of_default;
        if (of_parent(options[i].name) || !option_get(&options[i], c->values[i], &value))
            continue;
        if (option_get(&unset[i], buffer, &of_default) && strcmp(value, of_default) == 0)
            continue;
        snprintf(c->names[i], sizeof c->names[i], "--%s", options[i].name);
        c->words[c->n++] = c->names[i];
        if (options[i].kind != OPTION_FLAG)
            c->words[c->n++] = value;
    }
}

/* arm: the only one of the process; NULL: it has all. */
static void make_command(const bench *b, const bench_arm *arm, command *c) {
    bench_request request = *b->request;
    const char *tool = self;
    *c = (command){.n = 0};
    if (arm != NULL) {
        request.base = arm->config;
        tool = arm->config.binary != NULL ? arm->config.binary : self;
        c->preload = arm->config.library;
    }
    if (arm != NULL && arm->config.ranks > 1) {
        snprintf(c->ranks, sizeof c->ranks, "%" PRId64, arm->config.ranks);
        const char *const launch[] = {tool, "launch", "--ranks", c->ranks, "--"};
        for (size_t i = 0; i < sizeof launch / sizeof *launch; i++)
            c->words[c->n++] = launch[i];
    }
    c->words[c->n++] = tool;
    c->words[c->n++] = "bench";
    add_options(&request, c);
    for (int i = 0; arm == NULL && i < request.arms.n; i++) {
        c->words[c->n++] = "--arm";
        c->words[c->n++] = request.arms.items[i];
    }
    c->words[c->n++] = "--json";
    if (request.path != NULL) {
        c->words[c->n++] = "--";
        c->words[c->n++] = request.path;
    }
}

/* ---- Running it ---- */

/* In the child, which dies with its parent, however that ends. */
_Noreturn static void become(const command *c, int output) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (dup2(output, STDOUT_FILENO) >= 0 &&
        (c->preload == NULL || setenv("LD_PRELOAD", c->preload, 1) == 0))
        (void)execvp(c->words[0], (char *const *)(uintptr_t)c->words);
    report_error("bench: %s cannot be started: %s", c->words[0], strerror(errno));
    _exit(CODE_NOT_STARTED);
}

/* Its error has been printed where it could print one. */
static int wait_for(pid_t process, const char *program) {
    int status;
    while (waitpid(process, &status, 0) < 0)
        if (errno != EINTR)
            return report_error("bench: waiting for %s: %s", program, strerror(errno));
    if (WIFEXITED(status))
        return WEXITSTATUS(status) == EXIT_DONE ? EXIT_DONE : EXIT_BAD_INPUT;
    return report_error("bench: %s was ended by signal %d", program, WTERMSIG(status));
}

static int run_command(const command *c, json_t **result) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0)
        return report_error("bench: no pipe: %s", strerror(errno));
    const pid_t process = fork();
    if (process == 0)
        become(c, ends[1]);
    (void)close(ends[1]);
    if (process < 0) {
        (void)close(ends[0]);
        return report_error("bench: %s cannot be started: %s", c->words[0], strerror(errno));
    }
    json_error_t error;
    FILE *output = fdopen(ends[0], "r");
    *result = output != NULL ? json_loadf(output, 0, &error) : NULL;
    if (output != NULL)
        (void)fclose(output);
    const int code = wait_for(process, c->words[0]);
    if (code == EXIT_DONE && *result == NULL)
        return report_error("bench: %s printed no result: %s", c->words[0], error.text);
    return code;
}

/* ---- All of them ---- */

/* Arms that cannot share a process. */
static bool are_apart(const bench *b) {
    for (int i = 1; i < b->n_arms; i++) {
        const bench_config *c = &b->arms[i].config;
        if (c->binary != NULL || c->library != NULL || c->ranks > 1)
            return true;
    }
    return false;
}

bool bench_wants_processes(const bench *b) {
    return b->request->processes > 0 || are_apart(b);
}

static int measure_once(const bench *b, const bench_arm *arm, json_t **pooled) {
    command c;
    make_command(b, arm, &c);
    json_t *result = NULL;
    int code = run_command(&c, &result);
    if (code == EXIT_DONE)
        code = bench_pool_add(pooled, result);
    json_decref(result);
    return code;
}

static int measure_apart(const bench *b, int64_t processes, json_t **pooled) {
    for (int64_t i = 0; i < processes; i++)
        for (int j = 0; j < b->n_arms; j++) {
            const int n = order_of_round((uint64_t)b->request->seed, i, b->n_arms, j);
            TRY(measure_once(b, &b->arms[n], &pooled[n]));
        }
    return EXIT_DONE;
}

/* Started by a launcher as one of several, as the processes started here would think they are. */
static bool is_rank(void) {
    static const char *const sizes[] = {"WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE",
                                        "PMI_SIZE"};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const char *size = getenv(sizes[i]);
        if (size != NULL && strtol(size, NULL, 10) > 1)
            return true;
    }
    return false;
}

int bench_in_processes(bench *b, json_t **result) {
    if (is_rank())
        return report_error(
            "bench: --processes, binary=, library= and ranks= are for one process; a launcher "
            "has started several");
    const int64_t processes = b->request->processes > 0 ? b->request->processes : DEFAULT_PROCESSES;
    json_t *pooled[BENCH_MAX_ARMS] = {NULL};
    const bool apart = are_apart(b);
    int code = EXIT_DONE;
    if (apart)
        code = measure_apart(b, processes, pooled);
    for (int64_t i = 0; !apart && code == EXIT_DONE && i < processes; i++)
        code = measure_once(b, NULL, &pooled[0]);
    for (int i = 0; code == EXIT_DONE && i < (apart ? b->n_arms : 1); i++)
        code = bench_pool_finish(pooled[i]);
    if (code == EXIT_DONE && apart) {
        for (int i = 0; i < b->n_arms; i++)
            json_object_set_new(pooled[i], "arm", json_string(b->arms[i].name));
        code = bench_pool_join(pooled, b->n_arms, result);
    } else if (code == EXIT_DONE) {
        *result = json_incref(pooled[0]);
    }
    if (code == EXIT_DONE)
        json_object_update_new(*result,
                               json_pack("{s:I, s:s, s:s, s:s}", "processes", (json_int_t)processes,
                                         "paired_by", apart ? "process" : "round", "date", b->date,
                                         "command", b->command));
    for (int i = 0; i < b->n_arms; i++)
        json_decref(pooled[i]);
    return code;
}
