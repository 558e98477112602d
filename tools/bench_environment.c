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

void bench_gpu_record_begin(const gpu *g, bench_gpu_record *record) {
    gpu_describe(g, &record->facts);
    gpu_get_state(g, &record->before);
}

void bench_gpu_record_end(const gpu *g, bench_gpu_record *record) {
    gpu_get_state(g, &record->after);
}

json_t *bench_holds_json(uint64_t holds) {
    json_t *names = json_array();
    for (int bit = 0; bit < NVML_HOLDS; bit++)
        if (holds >> bit & 1 && nvml_hold_name(bit) != NULL)
            json_array_append_new(names, json_string(nvml_hold_name(bit)));
    return names;
}

static json_t *state_json(const nvml_state *s) {
    return json_pack("{s:i, s:i, s:f, s:i, s:o}", "sm_mhz", (int)s->sm_mhz, "memory_mhz",
                     (int)s->memory_mhz, "power_w", s->power_mw / 1e3, "temperature_c",
                     (int)s->temperature_c, "clocks_held_by", bench_holds_json(s->holds));
}

json_t *bench_gpu_json(const megamoe_device_info *device, const bench_gpu_record *record) {
    const nvml_facts *facts = &record->facts.nvml;
    json_t *object = json_pack(
        "{s:i, s:i, s:i, s:I, s:I}", "multiprocessors", device->multiprocessors, "max_ctas",
        device->max_ctas, "cuda_driver", device->driver_version, "memory_bytes",
        (json_int_t)device->memory_bytes, "l2_bytes", (json_int_t)record->facts.l2_bytes);
    if (facts->driver[0] != '\0')
        json_object_set_new(object, "driver", json_string(facts->driver));
    if (facts->sm_mhz_max > 0)
        json_object_update_new(
            object, json_pack("{s:i, s:i, s:f, s:o, s:o}", "sm_mhz_max", (int)facts->sm_mhz_max,
                              "memory_mhz", (int)facts->memory_mhz, "power_limit_w",
                              facts->power_limit_mw / 1e3, "before", state_json(&record->before),
                              "after", state_json(&record->after)));
    return object;
}

json_t *bench_environment_json(const megamoe_device_info *device, const bench_gpu_record *record) {
    json_t *object = json_pack("{s:o, s:s, s:s}", "host", bench_host_json(), "version",
                               megamoe_version(), "commit", megamoe_build_commit());
    if (record != NULL)
        json_object_set_new(object, "gpu", bench_gpu_json(device, record));
    return object;
}
