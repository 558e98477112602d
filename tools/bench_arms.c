/* SPDX-License-Identifier: Apache-2.0 */
/* Reads --arm "key=value,key=value": what an arm changes in the base command line. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "ranks.h"

enum { KEYS = BENCH_CONFIG_OPTIONS + 3, MAX_RANKS = 64 };

void bench_config_options(bench_config *config, option_spec options[BENCH_CONFIG_OPTIONS]) {
    const option_spec all[BENCH_CONFIG_OPTIONS] = {
        {"device", OPTION_TEXT, &config->device, "cpu|cuda|cuda:N", "(cpu)", 0, 0},
        {"format", OPTION_CHOICE, &config->format, "mxfp4|nvfp4", "of synthetic weights", 0, 0},
        {"nvfp4", OPTION_CHOICE, &config->nvfp4, "exact|folded", "form of NVFP4 weights (exact)", 0,
         0},
        {"input-scale", OPTION_CHOICE, &config->input_scale, "token|block",
         "one scale per token, or per 128 channels (token)", 0, 0},
        {"accumulate", OPTION_CHOICE, &config->accumulate, "mma|promote",
         "sums over all of K, or over 128 each (mma)", 0, 0},
        OPTION_ACTIVATIONS(&config->activations),
        {"threads", OPTION_INTEGER, &config->threads, "T", "(one per core)", 1, 1024},
        {"tier", OPTION_CHOICE, &config->tier, "best|scalar|avx2|avx512",
         "CPU: instructions (best)", 0, 0},
        {"mapped", OPTION_FLAG, &config->mapped, NULL,
         "CPU: use a prepared file in place, mapped, instead of reading it into huge pages", 0, 0},
        {"token-tile", OPTION_INTEGER, &config->token_tile, "N",
         "GPU: tokens of a tile (chosen for each batch)", 1, 1024},
        {"lag", OPTION_INTEGER, &config->lag, "N",
         "GPU: token tiles by which FC2 follows FC1 (chosen for each batch)", 1, INT32_MAX},
        {"l2", OPTION_CHOICE, &config->l2, "cold|clean|warm",
         "GPU: overwritten, then read through too, or as it is (cold)", 0, 0},
        {"launch", OPTION_CHOICE, &config->launch, "graph|eager",
         "GPU: from CUDA graphs, or by calls (graph)", 0, 0},
    };
    memcpy(options, all, sizeof all);
}

/* All keys of an arm. */
static void keys_of(bench_config *config, option_spec keys[KEYS]) {
    bench_config_options(config, keys);
    const option_spec others[KEYS - BENCH_CONFIG_OPTIONS] = {
        {"ranks", OPTION_INTEGER, &config->ranks, "N", "", 1, MAX_RANKS},
        {"binary", OPTION_TEXT, &config->binary, "FILE", "", 0, 0},
        {"library", OPTION_TEXT, &config->library, "FILE", "", 0, 0}};
    memcpy(keys + BENCH_CONFIG_OPTIONS, others, sizeof others);
}

static int unknown_key(const char *arm, const char *key, const option_spec *keys) {
    char names[256];
    size_t used = 0;
    for (int i = 0; i < KEYS && used < sizeof names; i++)
        used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i > 0 ? ", " : "",
                                 keys[i].name);
    return report_error("--arm %s: no key '%s'; expected %s", arm, key, names);
}

/* Of flags, which have no value on a command line. */
static int set_flag(const char *arm, const option_spec *key, const char *value) {
    const bool yes = strcmp(value, "yes") == 0;
    if (!yes && strcmp(value, "no") != 0)
        return report_error("--arm %s: %s=%s is not one of yes, no", arm, key->name, value);
    *(bool *)key->target = yes;
    return EXIT_DONE;
}

static int set_key(const char *arm, char *text, const option_spec *keys) {
    char *value = strchr(text, '=');
    if (value == NULL)
        return report_error("--arm %s: '%s' is no key=value", arm, text);
    *value++ = '\0';
    const option_spec *key = option_find(keys, KEYS, text);
    if (key == NULL)
        return unknown_key(arm, text, keys);
    if (key->kind == OPTION_FLAG)
        return set_flag(arm, key, value);
    return option_set(key, value) ? EXIT_DONE : EXIT_BAD_INPUT;
}

/* The values point into the arm's text, which it keeps. */
static int read_arm(const char *text, bench_arm *arm) {
    option_spec keys[KEYS];
    keys_of(&arm->config, keys);
    if (strlen(text) >= sizeof arm->name)
        return report_error("--arm %s: longer than %d characters", text, BENCH_NAME_BYTES - 1);
    snprintf(arm->name, sizeof arm->name, "%s", text);
    snprintf(arm->values, sizeof arm->values, "%s", text);
    char *rest = arm->values;
    for (char *pair; (pair = strsep(&rest, ",")) != NULL;)
        TRY(set_key(text, pair, keys));
    return EXIT_DONE;
}

/* Of one arm. The base's options are named as the command line has them. */
static int check_arm(const bench_arm *arm, bool on_gpu, const char *what) {
    const bench_config *c = &arm->config;
    const char *of_cpu = c->mapped                    ? "mapped"
                         : c->activations             ? "activations int8"
                         : c->tier != BENCH_TIER_BEST ? "tier"
                                                      : NULL;
    const char *of_gpu = c->token_tile > 0 ? "token-tile"
                         : c->lag > 0      ? "lag"
                         : c->l2           ? "l2"
                         : c->launch       ? "launch"
                         : c->ranks > 1    ? "ranks"
                                           : NULL;
    if (on_gpu && of_cpu != NULL)
        return report_error("bench%s: --%s is for the CPU, not for --device %s", what, of_cpu,
                            c->device);
    if (!on_gpu && of_gpu != NULL)
        return report_error("bench%s: --%s is for a GPU, not for --device %s", what, of_gpu,
                            c->device);
    if (c->activations && c->input_scale)
        return report_error("bench%s: --input-scale block is for E4M3, not for --activations int8",
                            what);
    return EXIT_DONE;
}

int bench_arms_read(bench *b) {
    const bench_request *request = b->request;
    b->n_arms = 1 + request->arms.n;
    b->on_gpu = ranks_on_gpu(request->base.device);
    snprintf(b->arms[0].name, sizeof b->arms[0].name, "base");
    for (int i = 0; i < b->n_arms; i++) {
        bench_arm *arm = &b->arms[i];
        char what[BENCH_NAME_BYTES + 8] = "";
        arm->config = request->base;
        if (i > 0) {
            TRY(read_arm(request->arms.items[i - 1], arm));
            snprintf(what, sizeof what, " --arm %s", arm->name);
        }
        if (ranks_on_gpu(arm->config.device) != b->on_gpu)
            return report_error("bench%s: device %s beside %s: the arms of one run are all on the "
                                "CPU or all on GPUs",
                                what, arm->config.device, request->base.device);
        TRY(check_arm(arm, b->on_gpu, what));
        for (int j = 1; j < i; j++)
            if (strcmp(b->arms[j].name, arm->name) == 0)
                return report_error("bench%s: given twice", what);
    }
    return EXIT_DONE;
}
