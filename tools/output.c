/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "report.h"

int output_open(const char *path, output *o) {
    *o = (output){.path = path};
    if (asprintf(&o->temporary, "%s.tmp-XXXXXX", path) < 0)
        return report_error("out of memory");
    const int descriptor = mkostemp(o->temporary, O_CLOEXEC);
    if (descriptor >= 0)
        o->file = fdopen(descriptor, "w");
    if (o->file != NULL)
        return EXIT_DONE;
    report_error("%s: cannot be written: %s", path, strerror(errno));
    if (descriptor >= 0) {
        unlink(o->temporary);
        close(descriptor);
    }
    free(o->temporary);
    return EXIT_BAD_INPUT;
}

int output_close(output *o, int code) {
    const mode_t mask = umask(0);
    umask(mask);
    const int descriptor = fileno(o->file);
    if (code == EXIT_DONE &&
        (fflush(o->file) != 0 || ferror(o->file) || fchmod(descriptor, 0666 & ~mask) != 0 ||
         fsync(descriptor) != 0 || rename(o->temporary, o->path) != 0))
        code = report_error("%s: cannot be written: %s", o->path, strerror(errno));
    if (code != EXIT_DONE)
        unlink(o->temporary);
    fclose(o->file);
    free(o->temporary);
    return code;
}
