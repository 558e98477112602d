/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What libnvidia-ml tells of a GPU: its clocks, power and what holds them down. The library comes
 * with the driver; without it everything here is 0 or "".
 */
#ifndef NVML_H
#define NVML_H

#include <stdint.h>

typedef struct nvml nvml;

/* The GPU at a PCI address as CUDA writes it. NULL where libnvidia-ml does not tell of it. */
nvml *nvml_open(const char *bus);

/* This and the functions below accept NULL. */
void nvml_close(nvml *n);

typedef struct nvml_facts {
    char driver[80];         /* version of the kernel driver */
    unsigned sm_mhz_max;     /* clock of the multiprocessors */
    unsigned memory_mhz;     /* clock of the memory */
    unsigned power_limit_mw; /* milliwatts */
} nvml_facts;

void nvml_describe(const nvml *n, nvml_facts *facts);

/* At one moment. */
typedef struct nvml_state {
    unsigned sm_mhz, memory_mhz;
    unsigned power_mw, temperature_c;
    uint64_t holds; /* what holds the clocks down: nvmlClocksEventReasons, a bit each */
} nvml_state;

void nvml_get_state(const nvml *n, nvml_state *state);

/* Names the bits of `holds` from the lowest: NULL for bits that have none and from 64 on. */
enum { NVML_HOLDS = 64 };
const char *nvml_hold_name(int bit);

#endif
