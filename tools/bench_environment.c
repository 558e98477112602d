/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "bench.h"
#include "parallel.h"

void bench_record(bench *b, int argc, char **argv) {
    record_command(argc, argv, b->command);
    record_date(b->date);
}

/* The first line of a file, from behind `prefix`; false where there is none. */
static bool read_line(const char *path, const char *prefix, char text[128]) {
    FILE *file = fopen(path, "re");
    bool found = false;
    while (file != NULL && !found && fgets(text, 128, file) != NULL)
        found = strncmp(text, prefix, strlen(prefix)) == 0;
    if (file != NULL)
        (void)fclose(file);
    if (!found)
        return false;
    const char *at = text + strlen(prefix);
    at += strspn(at, " \t:");
    memmove(text, at, strlen(at) + 1);
    text[strcspn(text, "\n")] = '\0';
    return true;
}

json_t *bench_host_json(void) {
    char text[128];
    json_t *host = json_pack("{s:i}", "cores", parallel_cores());
    if (read_line("/proc/cpuinfo", "model name", text))
        json_object_set_new(host, "processor", json_string(text));
    if (read_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "", text))
        json_object_set_new(host, "governor", json_string(text));
    struct utsname system;
    if (uname(&system) == 0) {
        snprintf(text, sizeof text, "%.60s %.60s", system.sysname, system.release);
        json_object_set_new(host, "system", json_string(text));
    }
    double load[1];
    if (getloadavg(load, 1) == 1)
        json_object_set_new(host, "load", json_real(load[0]));
    return host;
}
