/* SPDX-License-Identifier: Apache-2.0 */
/* The machine that something was measured on, as results record it. */
#ifndef BENCH_ENVIRONMENT_H
#define BENCH_ENVIRONMENT_H

#include <jansson.h>

#include "gpu.h"

/* A GPU, before and after measuring. */
typedef struct bench_gpu_record {
    gpu_facts facts;
    nvml_state before, after;
} bench_gpu_record;

void bench_gpu_record_begin(const gpu *g, bench_gpu_record *record);
void bench_gpu_record_end(const gpu *g, bench_gpu_record *record);

/* The host: processor, governor, system, load. */
json_t *bench_host_json(void);

/* A GPU: what it is, its driver, clocks and power. */
json_t *bench_gpu_json(const megamoe_device_info *device, const bench_gpu_record *record);

/* Host, GPU and the version and commit of the library. `record` is NULL on the CPU. */
json_t *bench_environment_json(const megamoe_device_info *device, const bench_gpu_record *record);

/* Names of what holds clocks down. */
json_t *bench_holds_json(uint64_t holds);

#endif
