/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "nvml.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Types of its interface, as the ABI has them. */
typedef struct nvmlDevice_st *device_handle;

/* X(name, symbol, arguments) */
#define NVML_LIST(X)                                                                               \
    X(init, "nvmlInit_v2", (void))                                                                 \
    X(by_bus, "nvmlDeviceGetHandleByPciBusId_v2", (const char *bus, device_handle *device))        \
    X(driver, "nvmlSystemGetDriverVersion", (char *text, unsigned bytes))                          \
    X(clock, "nvmlDeviceGetClockInfo", (device_handle device, int type, unsigned *mhz))            \
    X(max_clock, "nvmlDeviceGetMaxClockInfo", (device_handle device, int type, unsigned *mhz))     \
    X(power_limit, "nvmlDeviceGetPowerManagementLimit", (device_handle device, unsigned *mw))      \
    X(power, "nvmlDeviceGetPowerUsage", (device_handle device, unsigned *mw))                      \
    X(temperature, "nvmlDeviceGetTemperature",                                                     \
      (device_handle device, int sensor, unsigned *celsius))                                       \
    X(holds, "nvmlDeviceGetCurrentClocksThrottleReasons",                                          \
      (device_handle device, unsigned long long *reasons))

enum {
    CLOCK_SM = 1,     /* NVML_CLOCK_SM */
    CLOCK_MEMORY = 2, /* NVML_CLOCK_MEM */
    SENSOR_GPU = 0    /* NVML_TEMPERATURE_GPU */
};

struct nvml {
#define X(name, symbol, arguments) int(*name) arguments;
    NVML_LIST(X)
#undef X
    device_handle device;
};

/* ISO C has no conversion between pointers to objects and to functions; POSIX has. */
static bool find(void *library, const char *symbol, void *function, size_t bytes) {
    void *found = dlsym(library, symbol);
    memcpy(function, &found, bytes);
    return found != NULL;
}

/* The library is never closed: it has state of its own. */
static bool load(nvml *n) {
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return false;
    bool good = true;
#define X(name, symbol, arguments) good = good && find(library, symbol, &n->name, sizeof n->name);
    NVML_LIST(X)
#undef X
    return good;
}

nvml *nvml_open(const char *bus) {
    nvml *n = calloc(1, sizeof *n);
    if (n != NULL && load(n) && n->init() == 0 && n->by_bus(bus, &n->device) == 0)
        return n;
    free(n);
    return NULL;
}

void nvml_close(nvml *n) {
    free(n);
}

static unsigned clock_of(const nvml *n, int type) {
    unsigned mhz;
    return n->clock(n->device, type, &mhz) == 0 ? mhz : 0;
}

void nvml_describe(const nvml *n, nvml_facts *facts) {
    *facts = (nvml_facts){0};
    if (n == NULL)
        return;
    if (n->driver(facts->driver, sizeof facts->driver) != 0)
        facts->driver[0] = '\0';
    if (n->max_clock(n->device, CLOCK_SM, &facts->sm_mhz_max) != 0)
        facts->sm_mhz_max = 0;
    if (n->power_limit(n->device, &facts->power_limit_mw) != 0)
        facts->power_limit_mw = 0;
    facts->memory_mhz = clock_of(n, CLOCK_MEMORY);
}

void nvml_get_state(const nvml *n, nvml_state *state) {
    *state = (nvml_state){0};
    if (n == NULL)
        return;
    unsigned long long holds;
    state->sm_mhz = clock_of(n, CLOCK_SM);
    state->memory_mhz = clock_of(n, CLOCK_MEMORY);
    if (n->power(n->device, &state->power_mw) != 0)
        state->power_mw = 0;
    if (n->temperature(n->device, SENSOR_GPU, &state->temperature_c) != 0)
        state->temperature_c = 0;
    if (n->holds(n->device, &holds) == 0)
        state->holds = holds;
}

const char *nvml_hold_name(int bit) {
    static const char *const names[] = {"gpu_idle",
                                        "applications_clocks_setting",
                                        "sw_power_cap",
                                        "hw_slowdown",
                                        "sync_boost",
                                        "sw_thermal_slowdown",
                                        "hw_thermal_slowdown",
                                        "hw_power_brake_slowdown",
                                        "display_clock_setting"};
    return bit < (int)(sizeof names / sizeof *names) ? names[bit] : NULL;
}
