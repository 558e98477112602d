/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "bench.h"
#include "parallel.h"

bench_request bench_request_default(void) {
    return (bench_request){
        .base = {.device = "cpu", .format = BENCH_FORMAT_OF_SOURCE, .threads = parallel_cores()},
        .layer = ONLY_LAYER,
        .routing = "random",
        .seed = 1,
        .warm_ups = -1,
        .seconds = -1};
}

void bench_request_options(bench_request *r, option_spec options[BENCH_OPTIONS]) {
    bench_config_options(&r->base, options);
    const option_spec others[BENCH_OPTIONS - BENCH_CONFIG_OPTIONS] = {
        {"arm", OPTION_LIST, &r->arms, "KEYS",
         "another arm: key=value,... of the options above, or ranks=, binary=, library=", 0, 0},
        {"layer", OPTION_INTEGER, &r->layer, "L", "layer of PATH (its only one)", 0, INT32_MAX},
        {"model", OPTION_TEXT, &r->model, "NAME", "synthetic weights of a public model", 0, 0},
        {"geometry", OPTION_TEXT, &r->geometry, "NAME",
         "synthetic weights: A, B, C, flash, pro, ... (A; GPU: flash)", 0, 0},
        {"experts", OPTION_INTEGER, &r->experts, "N", "experts of the layer", 1, 65536},
        {"memory", OPTION_NUMBER, &r->memory_gb, "GB", "most weights to hold (2; GPU: all)", 1e-6,
         1e6},
        {"tokens", OPTION_TEXT, &r->tokens, "LIST|curve", "batch sizes; GPU: curve", 0, 0},
        OPTION_ROUTING(&r->routing),
        {"live", OPTION_INTEGER, &r->live, "N", "tokens of a batch that go to experts (all)", 1,
         BENCH_MAX_TOKENS},
        {"capacity", OPTION_INTEGER, &r->capacity, "N", "GPU: of the workspace (8192)", 1,
         BENCH_MAX_TOKENS},
        {"rounds", OPTION_INTEGER, &r->rounds, "N", "of all arms (10; CPU: as time allows)", 1,
         BENCH_MAX_ROUNDS},
        {"iterations", OPTION_INTEGER, &r->iterations, "N",
         "timed forwards of an arm in a round (20; CPU: 1)", 1, BENCH_MAX_ITERATIONS},
        {"warm-up", OPTION_INTEGER, &r->warm_ups, "N", "forwards before those (10; CPU: 0)", 0,
         BENCH_MAX_ITERATIONS},
        {"cooldown", OPTION_NUMBER, &r->cooldown, "S", "seconds to rest before them (0)", 0, 3600},
        {"padding", OPTION_NUMBER, &r->padding, "US", "microseconds to rest before each (0)", 0,
         1e6},
        {"seconds", OPTION_NUMBER, &r->seconds, "S", "CPU: for each batch size and arm (2)", 0,
         3600},
        {"processes", OPTION_INTEGER, &r->processes, "N",
         "fresh processes to measure in (0: this one)", 0, 100},
        {"seed", OPTION_INTEGER, &r->seed, "N", "of weights, input, routes and order (1)", 0,
         (double)INT64_MAX},
        {"dry-run", OPTION_FLAG, &r->dry_run, NULL, "show the plan and do not measure", 0, 0},
        {"csv", OPTION_FLAG, &r->csv, NULL, "print comma-separated values", 0, 0},
        OPTION_JSON(&r->json)};
    memcpy(options + BENCH_CONFIG_OPTIONS, others, sizeof others);
}
