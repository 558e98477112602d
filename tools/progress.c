/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "progress.h"

#include <stdio.h>
#include <unistd.h>

enum { BAR_WIDTH = 32, REDRAW_MS = 100 };

static void draw(void *user, uint64_t done, uint64_t total) {
    progress *bar = user;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t elapsed_ms =
        (now.tv_sec - bar->drawn.tv_sec) * 1000 + (now.tv_nsec - bar->drawn.tv_nsec) / 1000000;
    if (bar->drawn.tv_sec != 0 && elapsed_ms < REDRAW_MS)
        return;
    bar->drawn = now;
    const double fraction = total > 0 ? (double)done / (double)total : 1;
    char cells[BAR_WIDTH + 1];
    for (int i = 0; i < BAR_WIDTH; i++)
        cells[i] = i < fraction * BAR_WIDTH ? '#' : '.';
    cells[BAR_WIDTH] = '\0';
    fprintf(stderr, "\r%-24.24s [%s] %3.0f %%", bar->label, cells, fraction * 100);
    fflush(stderr);
}

megamoe_progress progress_begin(progress *bar, const char *label) {
    *bar = (progress){.label = label};
    return (megamoe_progress){.fn = isatty(STDERR_FILENO) ? draw : NULL, .user = bar};
}

void progress_end(progress *bar) {
    if (bar->drawn.tv_sec != 0)
        fprintf(stderr, "\r\033[K");
    *bar = (progress){0};
}
