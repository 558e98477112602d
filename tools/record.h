/* SPDX-License-Identifier: Apache-2.0 */
/* What the results of a run are recorded with. */
#ifndef RECORD_H
#define RECORD_H

#include <stddef.h>

enum { RECORD_DATE_BYTES = 32, RECORD_COMMAND_BYTES = 1024 };

/* The time now, "2026-01-02T03:04:05Z". */
void record_date(char text[RECORD_DATE_BYTES]);

/* The command line, cut where it does not fit. */
void record_command(int argc, char **argv, char text[RECORD_COMMAND_BYTES]);

#endif
