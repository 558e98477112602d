/* SPDX-License-Identifier: Apache-2.0 */
/* A file that appears, or replaces another one, once it is whole. */
#ifndef OUTPUT_H
#define OUTPUT_H

#include <stdio.h>

typedef struct output {
    const char *path; /* borrowed */
    char *temporary;  /* beside it */
    FILE *file;
} output;

/* Prints its error and returns an exit code; only after EXIT_DONE output_close is due. */
int output_open(const char *path, output *o);

/* With EXIT_DONE as `code` the file takes its name, else it is removed. Returns the exit code. */
int output_close(output *o, int code);

#endif
