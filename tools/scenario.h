/* SPDX-License-Identifier: Apache-2.0 */
/* What `megamoe scenario` asks for, runs and reports. */
#ifndef SCENARIO_H
#define SCENARIO_H

#include "bench_environment.h"
#include "record.h"
#include "simulation.h"
#include "stack.h"

typedef struct scenario_request {
    const char *path, *device, *model, *geometry, *routing, *prompt, *output;
    int64_t layers, experts, sequences, requests, chunk, steps, threads, seed;
    double arrivals, memory_gb;
    int workload, format, nvfp4, input_scale, accumulate, activations;
    bool json;
} scenario_request;

typedef struct scenario {
    const scenario_request *request;
    simulation_options options;
    simulation simulation;
    routing_profile routing;
    stack stack;
    megamoe_device_info device;
    bench_gpu_record record; /* of a GPU */
    char date[RECORD_DATE_BYTES];
    char command[RECORD_COMMAND_BYTES];
} scenario;

/* Of a simulation that is done. These return an exit code. */
int scenario_print_text(const scenario *s);
int scenario_print_json(const scenario *s);

#endif
