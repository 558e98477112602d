/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "gnuplot.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

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

static int draw_into(FILE *script, int picture, const char *temporary, const char *out) {
    TRY(run(script, picture, out));
    const mode_t mask = umask(0);
    umask(mask);
    if (fchmod(picture, 0666 & ~mask) != 0 || fsync(picture) != 0 || rename(temporary, out) != 0)
        return report_error("%s: cannot be written: %s", out, strerror(errno));
    return EXIT_DONE;
}

int gnuplot_draw(FILE *script, const char *out) {
    char *temporary = NULL;
    if (fflush(script) != 0 || lseek(fileno(script), 0, SEEK_SET) != 0)
        return report_error("plot: the script cannot be written: %s", strerror(errno));
    if (asprintf(&temporary, "%s.tmp-XXXXXX", out) < 0)
        return report_error("out of memory");
    int code;
    const int picture = mkostemp(temporary, O_CLOEXEC);
    if (picture < 0) {
        code = report_error("%s: cannot be written: %s", out, strerror(errno));
    } else {
        code = draw_into(script, picture, temporary, out);
        if (code != EXIT_DONE)
            unlink(temporary);
        close(picture);
    }
    free(temporary);
    return code;
}
