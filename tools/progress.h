/* SPDX-License-Identifier: Apache-2.0 */
/* A progress bar on standard error, where that is a terminal. */
#ifndef PROGRESS_H
#define PROGRESS_H

#include <megamoe/types.h>

#include <time.h>

typedef struct progress {
    const char *label;
    struct timespec drawn; /* when the bar was last drawn; zero: never */
} progress;

/* The callback that draws the bar. `bar` must live until progress_end. */
megamoe_progress progress_begin(progress *bar, const char *label);

/* Erases the bar. */
void progress_end(progress *bar);

#endif
