/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "record.h"

#include <stdio.h>
#include <time.h>

void record_date(char text[RECORD_DATE_BYTES]) {
    const time_t now = time(NULL);
    struct tm utc;
    strftime(text, RECORD_DATE_BYTES, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
}

void record_command(int argc, char **argv, char text[RECORD_COMMAND_BYTES]) {
    const size_t bytes = RECORD_COMMAND_BYTES;
    size_t used = (size_t)snprintf(text, bytes, "megamoe");
    for (int i = 0; i < argc && used < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, " %s", argv[i]);
}
