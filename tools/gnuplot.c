/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "gnuplot.h"

#include <errno.h>
#include <spawn.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "output.h"
#include "report.h"

/* Its files have no names, so nothing stays behind however this process ends. */
static int spawn(int script, int picture, int messages, pid_t *child) {
    /* -d: not with the settings of whoever calls it. */
    char name[] = "gnuplot", settings[] = "-d", input[] = "-";
    char *const arguments[] = {name, settings, input, NULL};
    posix_spawn_file_actions_t actions;
    if (posix_spawn_file_actions_init(&actions) != 0)
        return report_error("out of memory");
    posix_spawn_file_actions_adddup2(&actions, script, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, picture, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, messages, STDERR_FILENO);
    const int failed = posix_spawnp(child, name, &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (failed == ENOENT)
        return report_error("plot: there is no gnuplot in PATH; on Debian it is in the package "
                            "gnuplot-nox");
    if (failed)
        return report_error("plot: gnuplot cannot be started: %s", strerror(failed));
    return EXIT_DONE;
}

/* The last line that says something, without a line's end. */
static const char *last_words(FILE *messages, char *line, size_t bytes) {
    char text[512];
    snprintf(line, bytes, "it says nothing");
    rewind(messages);
    while (fgets(text, sizeof text, messages) != NULL) {
        text[strcspn(text, "\n")] = '\0';
        const char *words = text + strspn(text, " \t^");
        if (*words != '\0')
            snprintf(line, bytes, "%s", words);
    }
    return line;
}

static int run(FILE *script, int picture, const char *out) {
    FILE *messages = tmpfile();
    if (messages == NULL)
        return report_error("plot: no temporary file: %s", strerror(errno));
    pid_t child = 0;
    int code = spawn(fileno(script), picture, fileno(messages), &child);
    if (code == EXIT_DONE) {
        int ended = 0;
        while (waitpid(child, &ended, 0) < 0 && errno == EINTR)
            ;
        struct stat drawn;
        char words[256];
        if (ended != 0 || fstat(picture, &drawn) != 0 || drawn.st_size == 0)
            code = report_error("%s: gnuplot has not drawn it: %s", out,
                                last_words(messages, words, sizeof words));
    }
    fclose(messages);
    return code;
}

int gnuplot_draw(FILE *script, const char *out) {
    if (fflush(script) != 0 || lseek(fileno(script), 0, SEEK_SET) != 0)
        return report_error("plot: the script cannot be written: %s", strerror(errno));
    output o;
    TRY(output_open(out, &o));
    return output_close(&o, run(script, fileno(o.file), out));
}
