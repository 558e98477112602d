/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The benchmark: what is asked for, the arms that are measured beside each other, and what is
 * measured. From cmd_bench.c: the arms are read (bench_arms.c) and opened (bench_open.c), measured
 * by turns (bench_measure.c), written as one JSON object (bench_json.c,
 * docs/schema/bench.schema.json), and that is printed (bench_text.c, bench_csv.c). With processes
 * of their own (bench_processes.c) their objects are pooled.
 */
#ifndef BENCH_H
#define BENCH_H

#include "bench_cpu.h"
#include "bench_environment.h"
#include "bench_geometry.h"
#include "bench_gpu.h"
#include "bench_layer.h"
#include "options.h"
#include "record.h"
#include "report.h"

enum {
    BENCH_MAX_POINTS = 48,
    BENCH_MAX_TOKENS = 1 << 16,
    BENCH_MAX_ARMS = OPTION_MAX_LIST + 1,
    BENCH_MAX_ROUNDS = 1000,
    BENCH_MAX_ITERATIONS = 1000,
    BENCH_NAME_BYTES = 256,
    BENCH_SCHEMA_VERSION = 1 /* of the JSON object; larger where a field changes its meaning */
};

/* ---- What is asked for ---- */

/* What arms may differ in: options of the command line, and keys of --arm. */
typedef struct bench_config {
    const char *device;
    const char *binary, *library; /* of another build; NULL: this one */
    int64_t ranks;                /* processes that measure together; 0: this one */
    int format, nvfp4, input_scale, accumulate, activations, tier, l2, launch;
    int64_t threads, token_tile, lag;
    bool mapped;
} bench_config;

/* format: index of a word, or this. */
enum { BENCH_FORMAT_OF_SOURCE = -1 };
/* tier: index of a word, the first of which is this. */
enum { BENCH_TIER_BEST = 0 };

typedef struct bench_request {
    const char *path, *model, *geometry, *tokens, *routing;
    bench_config base; /* the first arm */
    option_list arms;  /* the others, as text */
    int64_t layer, experts, seed, capacity, live, rounds, iterations, warm_ups, processes;
    double seconds, memory_gb, cooldown, padding;
    bool json, csv, dry_run;
} bench_request;

/* ---- Arms and results ---- */

typedef struct bench_timing {
    double median_us, min_us, p90_us;
} bench_timing;

/* One arm's times of one batch size. */
typedef struct bench_point {
    int64_t tokens;
    int64_t rounds;
    double *rounds_us; /* [rounds] the median of each */
    bench_timing forward;
    bench_work work;                       /* GPU: of the rank that has most */
    double experts;                        /* CPU: touched by a forward, mean, as are */
    double routes, imbalance;              /* CPU: those of a forward, largest load by mean */
    double gbs;                            /* CPU: packed weights of those by the time, median */
    megamoe_device_ceilings before, after; /* CPU: around this point */
    bench_timing stage;                    /* GPU, as are */
    double skew_us;                        /* median difference between ranks */
    unsigned sm_mhz_min, sm_mhz_max;       /* while forwards ran; 0: unknown */
    uint64_t holds;                        /* what held the clocks down in any round */
    megamoe_workspace_times times;         /* of the last forward */
} bench_point;

typedef struct bench_arm {
    bench_config config;
    char name[BENCH_NAME_BYTES];   /* "base", or the text of --arm */
    char values[BENCH_NAME_BYTES]; /* that text cut up, which config points into */
    bool owns_device, owns_layer;  /* else they are those of an earlier arm */
    megamoe_device *device;
    megamoe_device_info info;
    bench_layer layer;
    bench_gpu *gpu; /* one of these */
    bench_cpu *cpu;
    bench_gpu_record record;               /* around all points */
    megamoe_device_ceilings before, after; /* GPU: around all points; of the arm that owns it */
    bench_point points[BENCH_MAX_POINTS];
} bench_arm;

typedef struct bench {
    const bench_request *request;
    const bench_geometry *geometry; /* NULL for weights of a model or a file */
    bool on_gpu;
    routing_profile routing; /* fits the layer once that is open or described */
    megamoe_comm *comm;
    int32_t rank, ranks;              /* of processes that a launcher has started; else 0 and 1 */
    int64_t tokens[BENCH_MAX_POINTS]; /* batch sizes */
    int n_tokens;
    int64_t capacity; /* of a GPU's workspace */
    int n_arms;
    bench_arm arms[BENCH_MAX_ARMS];
    char date[RECORD_DATE_BYTES];
    char command[RECORD_COMMAND_BYTES];
} bench;

/* Functions below that return an int print their error and return an exit code. */

/* ---- bench_request.c ---- */

enum { BENCH_CONFIG_OPTIONS = 13, BENCH_OPTIONS = BENCH_CONFIG_OPTIONS + 21 };

bench_request bench_request_default(void);
/* All options of the command line, with targets in *r. */
void bench_request_options(bench_request *r, option_spec options[BENCH_OPTIONS]);

/* ---- bench_arms.c ---- */

/* The options among these that are keys of arms too, with targets in *config. */
void bench_config_options(bench_config *config, option_spec options[BENCH_CONFIG_OPTIONS]);

/* The arms of b->request, and what they must agree in. */
int bench_arms_read(bench *b);

/* ---- bench_tokens.c ---- */

/* Batch sizes of b->request and the capacity that holds them. */
int bench_choose_tokens(bench *b);

/* ---- bench_open.c ---- */

/* Meets the other ranks and opens devices and layers, each once for all arms that share it. */
int bench_open(bench *b);
/* After any outcome of bench_open. */
void bench_close(bench *b);

/* Makes an arm's layer, or only describes it; b->ranks is set. */
int bench_open_layer(bench *b, bench_arm *arm, bool describe);

/* The arm whose ceilings count for this one. */
const bench_arm *bench_device_owner(const bench *b, const bench_arm *arm);

/* Once the first arm's layer is open or described; then the routes of any arm's batches. */
int bench_fit_routing(bench *b);
bench_routes bench_routes_of(const bench *b);

/* ---- bench_measure.c ---- */

int bench_measure(bench *b);

/* ---- bench_plan.c ---- */

/* What would be measured: a JSON object like the result's, without times. */
int bench_plan(bench *b, json_t **result);
int bench_print_plan(const json_t *plan);

/* ---- bench_json.c ---- */

/* The result; docs/schema/bench.schema.json describes it. NULL: out of memory. */
json_t *bench_json(const bench *b);

/* ---- bench_ratios.c ---- */

/* Adds to a result of several arms the ratios of each one's times to the first one's. */
int bench_add_ratios(json_t *result);

/* ---- bench_text.c, bench_csv.c ---- */

int bench_print_text(const json_t *result);
int bench_print_csv(const json_t *result);
/* Of one arm, with the fields that it shares. */
void bench_print_layer(const json_t *arm);

/* ---- bench_processes.c ---- */

/* Whether it is asked for, or arms are of other builds. */
bool bench_wants_processes(const bench *b);

/* Measures in fresh processes, whose results it pools. */
int bench_in_processes(bench *b, json_t **result);

/* ---- bench_environment.c ---- */

/* Date and command line. */
void bench_record(bench *b, int argc, char **argv);

#endif
