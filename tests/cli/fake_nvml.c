/* SPDX-License-Identifier: Apache-2.0 */
/* A libnvidia-ml.so.1 for the tool's tests, beside fake_cuda.c: one GPU whose power is capped. */
#include <stdio.h>
#include <string.h>

typedef struct nvmlDevice_st *device_handle;

int nvmlInit_v2(void);
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, device_handle *device);
int nvmlSystemGetDriverVersion(char *text, unsigned bytes);
int nvmlDeviceGetClockInfo(device_handle device, int type, unsigned *mhz);
int nvmlDeviceGetMaxClockInfo(device_handle device, int type, unsigned *mhz);
int nvmlDeviceGetPowerManagementLimit(device_handle device, unsigned *mw);
int nvmlDeviceGetPowerUsage(device_handle device, unsigned *mw);
int nvmlDeviceGetTemperature(device_handle device, int sensor, unsigned *celsius);
int nvmlDeviceGetCurrentClocksThrottleReasons(device_handle device, unsigned long long *reasons);

enum { DONE = 0, NOT_FOUND = 6, CLOCK_SM = 1, SW_POWER_CAP = 4, GPU_IDLE = 1 };

static unsigned sm_mhz = 1700;

/* NOLINTBEGIN(misc-unused-parameters): the library's signatures */
#pragma GCC diagnostic ignored "-Wunused-parameter"

int nvmlInit_v2(void) {
    return DONE;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, device_handle *device) {
    *device = NULL;
    return strcmp(bus, "0000:1B:00.0") == 0 ? DONE : NOT_FOUND;
}

int nvmlSystemGetDriverVersion(char *text, unsigned bytes) {
    snprintf(text, bytes, "999.1");
    return DONE;
}

/* Slower by 10 MHz from one question to the next. */
int nvmlDeviceGetClockInfo(device_handle device, int type, unsigned *mhz) {
    *mhz = type == CLOCK_SM ? (sm_mhz -= 10) : 3201;
    return DONE;
}

int nvmlDeviceGetMaxClockInfo(device_handle device, int type, unsigned *mhz) {
    *mhz = 1980;
    return DONE;
}

int nvmlDeviceGetPowerManagementLimit(device_handle device, unsigned *mw) {
    *mw = 700000;
    return DONE;
}

int nvmlDeviceGetPowerUsage(device_handle device, unsigned *mw) {
    *mw = 695500;
    return DONE;
}

int nvmlDeviceGetTemperature(device_handle device, int sensor, unsigned *celsius) {
    *celsius = 61;
    return DONE;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(device_handle device, unsigned long long *reasons) {
    *reasons = GPU_IDLE | SW_POWER_CAP | 1ULL << 40;
    return DONE;
}
/* NOLINTEND(misc-unused-parameters) */
