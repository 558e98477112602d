/* SPDX-License-Identifier: Apache-2.0 */
#include <megamoe/megamoe.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "commands.h"
#include "report.h"

static const struct {
    const char *name;
    const char *summary;
    int (*run)(int argc, char **argv);
} commands[] = {
#define X(name, summary) {#name, summary, cmd_##name},
    COMMAND_LIST(X)
#undef X
};

enum { COMMANDS = sizeof commands / sizeof *commands };

static void print_help(void) {
    printf("Runs mixture-of-experts layers with 4-bit weights.\n\n"
           "usage: megamoe COMMAND [options]\n\n");
    for (int i = 0; i < COMMANDS; i++)
        printf("  %-10s %s\n", commands[i].name, commands[i].summary);
    printf("\nmegamoe COMMAND --help describes a command; megamoe --version shows the version.\n\n"
           "example:\n  megamoe synth --model qwen3-30b-a3b --out qwen && megamoe run qwen "
           "--tokens 64 --ranks 4 --verify\n");
}

/* Errors are reported by the commands, which know which of them matter. */
static void print_warning(void *user, megamoe_log_level level, const char *message) {
    (void)user;
    if (level == MEGAMOE_LOG_WARN)
        fprintf(stderr, "megamoe: warning: %s\n", message);
}

static int dispatch(int argc, char **argv) {
    if (argc < 2) {
        print_help();
        return EXIT_BAD_INPUT;
    }
    const char *name = argv[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "help") == 0) {
        print_help();
        return EXIT_DONE;
    }
    if (strcmp(name, "--version") == 0) {
        printf("megamoe %s\n", megamoe_version());
        return EXIT_DONE;
    }
    for (int i = 0; i < COMMANDS; i++)
        if (strcmp(name, commands[i].name) == 0)
            return commands[i].run(argc - 1, argv + 1);
    return report_error("%s: no such command (see megamoe --help)", name);
}

int main(int argc, char **argv) {
    signal(SIGXFSZ, SIG_IGN); /* a file beyond the limit is an error of writing, which names it */
    megamoe_log_set(print_warning, NULL, MEGAMOE_LOG_WARN);
    const int code = dispatch(argc, argv);
    if (fflush(stdout) != 0 || ferror(stdout))
        return report_error("standard output could not be written");
    return code;
}
