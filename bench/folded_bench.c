/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What it costs to fold ranks into one launch on a GPU: a layer and a batch, the same ones, spread
 * over 1, 2, 4 and 8 ranks. Their forwards are replayed in turn, so that what disturbs one round
 * disturbs all of them, and are compared within rounds; L2 is overwritten before each. Their
 * outputs have to be the same bits. Prints one JSON object, of which bench/report_folded.py makes a
 * page.
 *
 *     folded_bench --geometry flash --tokens 8,64,512,4096 > folded.json
 */
#define _GNU_SOURCE
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "megamoe/megamoe.h"

#include "../tools/bench_geometry.h"
#include "../tools/gpu.h"
#include "../tools/report.h"
#include "../tools/synth.h"

enum { ARMS_MAX = 4, RANKS_MAX = 8, POINTS_MAX = 16, WARM_UPS = 20, CAPACITY_LEAST = 64 };

/* At least this much is overwritten, and at least this many times L2. */
enum { FLUSH_BYTES = 256 << 20, FLUSH_L2_TIMES = 4 };

static const int32_t arm_ranks[ARMS_MAX] = {1, 2, 4, 8};

typedef struct options {
    const char *device, *geometry;
    int64_t tokens[POINTS_MAX]; /* of all ranks together */
    int n_points;
    int64_t rounds;
} options;

/* Ranks that compute together, whatever the batch. */
typedef struct arm {
    int32_t ranks;
    megamoe_comm *comms[RANKS_MAX];
    megamoe_layer *layers[RANKS_MAX];
    megamoe_workspace *workspaces[RANKS_MAX];
    void *y;
    double layer_ms, workspace_ms;
} arm;

typedef struct bench {
    options o;
    megamoe_layer_desc desc;
    megamoe_device *device;
    megamoe_device_info info;
    gpu *g;
    gpu_facts facts;
    megamoe_weights *weights;
    uint8_t *codes, *scales; /* of all matrices, which begin at different places */
    arm arms[ARMS_MAX];
    int64_t most; /* tokens */
    void *x, *ids, *routing_weights, *flush;
    size_t flush_bytes;
    uint16_t *want, *got;
    gpu_graph *graphs[ARMS_MAX];
    double *us; /* [arm][round] */
    json_t *points;
} bench;

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static void *allocate(size_t bytes) {
    void *memory = calloc(1, bytes ? bytes : 1);
    if (memory == NULL) {
        report_error("out of memory");
        exit(EXIT_BAD_INPUT);
    }
    return memory;
}

/* ---- the layer ---- */

/* Codes at random; each matrix begins a little later among the same bytes. */
static int make_weights(bench *b) {
    enum { STEP = 64 };
    const megamoe_layer_desc *d = &b->desc;
    const size_t elements = (size_t)d->hidden * (size_t)d->intermediate;
    const size_t matrices = (size_t)d->experts * 3;
    const size_t bytes = elements / 2 + matrices * STEP;
    uint64_t state = 88172645463325252u;
    b->codes = allocate(bytes);
    b->scales = allocate(elements / 32);
    for (size_t i = 0; i < bytes; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        b->codes[i] = (uint8_t)(state >> 32);
    }
    memset(b->scales, 121, elements / 32);
    megamoe_matrix *all = allocate(matrices * sizeof *all);
    for (size_t i = 0; i < matrices; i++) {
        const size_t in = (size_t)(i % 3 == MEGAMOE_DOWN ? d->intermediate : d->hidden);
        all[i] = (megamoe_matrix){.codes = b->codes + i * STEP,
                                  .codes_stride = in / 2,
                                  .scales = b->scales,
                                  .scales_stride = in / 32};
    }
    const megamoe_status status = megamoe_weights_from_tensors(d, all, &b->weights);
    free(all);
    return status == MEGAMOE_OK ? EXIT_DONE : report_failure(status);
}

static int open_arm(bench *b, arm *a, int32_t ranks) {
    a->ranks = ranks;
    TRY_LIBRARY(megamoe_comm_folded(ranks, a->comms));
    double start = now_ms();
    for (int32_t r = 0; r < ranks; r++)
        TRY_LIBRARY(megamoe_layer_create(a->comms[r], b->device, b->weights, NULL, &a->layers[r]));
    a->layer_ms = now_ms() - start;
    megamoe_shape shape = MEGAMOE_INIT(megamoe_shape);
    shape.hidden = b->desc.hidden;
    shape.intermediate = b->desc.intermediate;
    shape.experts = b->desc.experts;
    shape.topk = b->desc.topk;
    megamoe_capacity capacity = MEGAMOE_INIT(megamoe_capacity);
    capacity.tokens = (b->most + ranks - 1) / ranks;
    if (capacity.tokens < CAPACITY_LEAST)
        capacity.tokens = CAPACITY_LEAST;
    start = now_ms();
    for (int32_t r = 0; r < ranks; r++)
        TRY_LIBRARY(
            megamoe_workspace_create(a->comms[r], b->device, &shape, &capacity, &a->workspaces[r]));
    for (int32_t r = 0; r < ranks; r++)
        TRY_LIBRARY(megamoe_prewarm(a->layers[r], a->workspaces[r]));
    a->workspace_ms = now_ms() - start;
    return gpu_allocate(b->g, "the output",
                        (size_t)b->most * (size_t)b->desc.hidden * sizeof(uint16_t), &a->y);
}

static void close_arm(arm *a) {
    for (int32_t r = 0; r < a->ranks; r++) {
        megamoe_workspace_close(a->workspaces[r]);
        megamoe_layer_close(a->layers[r]);
        megamoe_comm_close(a->comms[r]);
    }
}

/* ---- the batch ---- */

static int open_buffers(bench *b) {
    const size_t rows = (size_t)b->most, hidden = (size_t)b->desc.hidden;
    const size_t slots = rows * (size_t)b->desc.topk;
    b->flush_bytes = FLUSH_L2_TIMES * b->facts.l2_bytes;
    if (b->flush_bytes < FLUSH_BYTES)
        b->flush_bytes = FLUSH_BYTES;
    b->want = allocate(rows * hidden * sizeof *b->want);
    b->got = allocate(rows * hidden * sizeof *b->got);
    b->us = allocate((size_t)b->o.rounds * ARMS_MAX * sizeof *b->us);
    TRY(gpu_allocate(b->g, "the input", rows * hidden * sizeof(uint16_t), &b->x));
    TRY(gpu_allocate(b->g, "expert ids", slots * sizeof(int32_t), &b->ids));
    TRY(gpu_allocate(b->g, "routing weights", slots * sizeof(float), &b->routing_weights));
    TRY(gpu_allocate(b->g, "emptying L2", b->flush_bytes, &b->flush));
    uint16_t *x = allocate(rows * hidden * sizeof *x);
    float *weights = allocate(slots * sizeof *weights);
    for (size_t i = 0; i < slots; i++)
        weights[i] = 1.0f / (float)b->desc.topk;
    int code = synth_input(1, b->most, b->desc.hidden, x) ? EXIT_DONE : report_error("no memory");
    if (code == EXIT_DONE)
        code = gpu_upload(b->g, b->x, x, rows * hidden * sizeof *x);
    if (code == EXIT_DONE)
        code = gpu_upload(b->g, b->routing_weights, weights, slots * sizeof *weights);
    free(x);
    free(weights);
    return code;
}

static int draw_routes(const bench *b, int64_t tokens) {
    const size_t slots = (size_t)tokens * (size_t)b->desc.topk;
    int32_t *ids = allocate(slots * sizeof *ids);
    synth_routes(1 + (uint64_t)tokens, tokens, b->desc.experts, b->desc.topk, ids);
    const int code = gpu_upload(b->g, b->ids, ids, slots * sizeof *ids);
    free(ids);
    return code;
}

static int64_t first_token(int64_t tokens, int32_t ranks, int32_t r) {
    return tokens * r / ranks;
}

static megamoe_status stage(const bench *b, const arm *a, int64_t tokens) {
    const int64_t hidden = b->desc.hidden, topk = b->desc.topk;
    megamoe_status status = MEGAMOE_OK;
    for (int32_t r = 0; r < a->ranks && status == MEGAMOE_OK; r++) {
        const int64_t first = first_token(tokens, a->ranks, r);
        const int64_t n = first_token(tokens, a->ranks, r + 1) - first;
        const megamoe_view x = {(uint16_t *)b->x + first * hidden, MEGAMOE_DTYPE_BF16, n, 0};
        const megamoe_view ids = {(int32_t *)b->ids + first * topk, MEGAMOE_DTYPE_I32, n, 0};
        const megamoe_view weights = {(float *)b->routing_weights + first * topk, MEGAMOE_DTYPE_F32,
                                      n, 0};
        status = megamoe_stage(a->workspaces[r], &x, &ids, &weights, n, gpu_stream(b->g));
    }
    return status;
}

static megamoe_status forward(const bench *b, const arm *a, int64_t tokens) {
    megamoe_forward_call calls[RANKS_MAX];
    megamoe_view y[RANKS_MAX];
    for (int32_t r = 0; r < a->ranks; r++) {
        const int64_t first = first_token(tokens, a->ranks, r);
        const int64_t n = first_token(tokens, a->ranks, r + 1) - first;
        y[r] = (megamoe_view){(uint16_t *)a->y + first * b->desc.hidden, MEGAMOE_DTYPE_BF16, n, 0};
        calls[r] = (megamoe_forward_call){a->layers[r], a->workspaces[r], &y[r], gpu_stream(b->g)};
    }
    return megamoe_forward_group(calls, a->ranks);
}

static int check(const bench *b, const arm *a) {
    TRY(gpu_wait(b->g));
    for (int32_t r = 0; r < a->ranks; r++)
        TRY_LIBRARY(megamoe_workspace_status(a->workspaces[r], NULL));
    return EXIT_DONE;
}

/* ---- measuring ---- */

static int compute_once(bench *b, const arm *a, int64_t tokens) {
    const size_t bytes = (size_t)tokens * (size_t)b->desc.hidden * sizeof(uint16_t);
    uint16_t *y = a->ranks == 1 ? b->want : b->got;
    TRY_LIBRARY(stage(b, a, tokens));
    TRY_LIBRARY(forward(b, a, tokens));
    TRY(check(b, a));
    TRY(gpu_download(b->g, y, a->y, bytes));
    if (memcmp(y, b->want, bytes) != 0)
        return report_error("%lld tokens: the output of %d ranks differs from that of one",
                            (long long)tokens, (int)a->ranks);
    return EXIT_DONE;
}

static int capture(bench *b, int i, int64_t tokens) {
    gpu_graph_close(b->g, b->graphs[i]);
    b->graphs[i] = NULL;
    TRY(gpu_capture_begin(b->g));
    const megamoe_status status = forward(b, &b->arms[i], tokens);
    const int code = gpu_capture_end(b->g, &b->graphs[i]);
    return status == MEGAMOE_OK ? code : report_failure(status);
}

static int replay_all(const bench *b) {
    for (int64_t round = -WARM_UPS; round < b->o.rounds; round++)
        for (int i = 0; i < ARMS_MAX; i++) {
            const int mark = (int)(round * ARMS_MAX + i) * 2;
            TRY(gpu_fill(b->g, b->flush, (unsigned char)round, b->flush_bytes));
            if (round >= 0)
                TRY(gpu_mark(b->g, mark));
            TRY(gpu_replay(b->g, b->graphs[i]));
            if (round >= 0)
                TRY(gpu_mark(b->g, mark + 1));
        }
    for (int i = 0; i < ARMS_MAX; i++)
        TRY(check(b, &b->arms[i]));
    for (int64_t round = 0; round < b->o.rounds; round++)
        for (int i = 0; i < ARMS_MAX; i++) {
            const int mark = (int)(round * ARMS_MAX + i) * 2;
            TRY(gpu_microseconds(b->g, mark, mark + 1, &b->us[i * b->o.rounds + round]));
        }
    return EXIT_DONE;
}

static int compare(const void *a, const void *b) {
    const double one = *(const double *)a, other = *(const double *)b;
    return (one > other) - (one < other);
}

/* Of sorted values. */
static double quantile(const double *values, int64_t n, double q) {
    return values[(int64_t)(q * (double)(n - 1) + 0.5)];
}

/* Times of an arm, and their ratios to those of one rank in the same rounds. */
static json_t *summarize(const bench *b, int i) {
    const int64_t n = b->o.rounds;
    const double *alone = b->us, *us = b->us + i * n;
    double *sorted = allocate((size_t)n * sizeof *sorted);
    double *ratios = allocate((size_t)n * sizeof *ratios);
    for (int64_t round = 0; round < n; round++) {
        sorted[round] = us[round];
        ratios[round] = us[round] / alone[round];
    }
    qsort(sorted, (size_t)n, sizeof *sorted, compare);
    qsort(ratios, (size_t)n, sizeof *ratios, compare);
    json_t *object =
        json_pack("{s:i, s:f, s:f, s:f, s:f, s:f, s:f}", "ranks", (int)b->arms[i].ranks,
                  "median_us", quantile(sorted, n, 0.5), "min_us", sorted[0], "p90_us",
                  quantile(sorted, n, 0.9), "ratio", quantile(ratios, n, 0.5), "ratio_p10",
                  quantile(ratios, n, 0.1), "ratio_p90", quantile(ratios, n, 0.9));
    free(sorted);
    free(ratios);
    return object;
}

static int measure_point(bench *b, int64_t tokens) {
    TRY(draw_routes(b, tokens));
    for (int i = 0; i < ARMS_MAX; i++) {
        TRY(compute_once(b, &b->arms[i], tokens));
        TRY(capture(b, i, tokens));
    }
    TRY(replay_all(b));
    json_t *arms = json_array();
    for (int i = 0; i < ARMS_MAX; i++)
        json_array_append_new(arms, summarize(b, i));
    json_array_append_new(b->points,
                          json_pack("{s:I, s:o}", "tokens", (json_int_t)tokens, "ranks", arms));
    return EXIT_DONE;
}

/* ---- the program ---- */

static json_t *describe(const bench *b, const char *command) {
    char date[32];
    const time_t now = time(NULL);
    struct tm utc;
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    json_t *creation = json_array();
    for (int i = 0; i < ARMS_MAX; i++) {
        const arm *a = &b->arms[i];
        json_array_append_new(
            creation,
            json_pack("{s:i, s:f, s:f, s:I, s:I}", "ranks", (int)a->ranks, "layer_ms", a->layer_ms,
                      "workspace_ms", a->workspace_ms, "layer_bytes_per_rank",
                      (json_int_t)megamoe_layer_bytes(a->layers[0]), "workspace_bytes_per_rank",
                      (json_int_t)megamoe_workspace_bytes(a->workspaces[0])));
    }
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:I, s:o}", "date",
                     date, "version", megamoe_version(), "command", command, "model", b->info.model,
                     "driver", b->facts.nvml.driver, "geometry", b->o.geometry, "hidden",
                     (int)b->desc.hidden, "intermediate", (int)b->desc.intermediate, "experts",
                     (int)b->desc.experts, "topk", (int)b->desc.topk, "multiprocessors",
                     (int)b->info.multiprocessors, "rounds", (json_int_t)b->o.rounds, "creation",
                     creation);
}

static int run(bench *b, const char *command) {
    const bench_geometry *geometry = bench_geometry_find(b->o.geometry);
    if (geometry == NULL)
        return EXIT_BAD_INPUT;
    b->desc = bench_geometry_layer(geometry, MEGAMOE_FORMAT_MXFP4);
    b->desc.has_bias = false;
    b->info = (megamoe_device_info)MEGAMOE_INIT(megamoe_device_info);
    TRY_LIBRARY(megamoe_device_open(b->o.device, NULL, &b->device));
    TRY_LIBRARY(megamoe_device_describe(b->device, &b->info));
    TRY(gpu_open(&b->info, &b->g));
    gpu_describe(b->g, &b->facts);
    for (int i = 0; i < b->o.n_points; i++)
        b->most = b->o.tokens[i] > b->most ? b->o.tokens[i] : b->most;
    TRY(make_weights(b));
    TRY(open_buffers(b));
    for (int i = 0; i < ARMS_MAX; i++)
        TRY(open_arm(b, &b->arms[i], arm_ranks[i]));
    b->points = json_array();
    for (int i = 0; i < b->o.n_points; i++)
        TRY(measure_point(b, b->o.tokens[i]));
    json_t *object = describe(b, command);
    json_object_set(object, "points", b->points);
    return report_json(object);
}

static bool take_points(options *o, char *text) {
    o->n_points = 0;
    for (char *save, *word = strtok_r(text, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
        const int64_t tokens = strtol(word, NULL, 10);
        if (o->n_points == POINTS_MAX || tokens < 1 || tokens > 1 << 16)
            return false;
        o->tokens[o->n_points++] = tokens;
    }
    return o->n_points > 0;
}

static bool take_options(int argc, char **argv, options *o) {
    static const struct option known[] = {{"device", required_argument, NULL, 'd'},
                                          {"geometry", required_argument, NULL, 'g'},
                                          {"tokens", required_argument, NULL, 't'},
                                          {"rounds", required_argument, NULL, 'r'},
                                          {NULL, 0, NULL, 0}};
    int c;
    bool good = true;
    while ((c = getopt_long(argc, argv, "", known, NULL)) != -1) {
        if (c == 'd')
            o->device = optarg;
        else if (c == 'g')
            o->geometry = optarg;
        else if (c == 't')
            good = good && take_points(o, optarg);
        else if (c == 'r')
            o->rounds = strtol(optarg, NULL, 10);
        else
            good = false;
    }
    return good && optind == argc && o->rounds >= 1 && o->rounds * ARMS_MAX * 2 <= GPU_MAX_MARKS;
}

int main(int argc, char **argv) {
    static bench b = {.o = {.device = "cuda:0",
                            .geometry = "flash",
                            .rounds = 100,
                            .tokens = {8, 64, 512, 4096},
                            .n_points = 4}};
    char command[512] = "folded_bench";
    for (int i = 1; i < argc; i++)
        snprintf(command + strlen(command), sizeof command - strlen(command), " %s", argv[i]);
    if (!take_options(argc, argv, &b.o)) {
        fprintf(stderr, "usage: folded_bench [--device cuda:N] [--geometry NAME] [--tokens N,...] "
                        "[--rounds N (256 at most)]\n");
        return EXIT_BAD_INPUT;
    }
    const int code = run(&b, command);
    for (int i = 0; i < ARMS_MAX; i++) {
        gpu_graph_close(b.g, b.graphs[i]);
        close_arm(&b.arms[i]);
    }
    json_decref(b.points);
    gpu_close(b.g);
    megamoe_weights_close(b.weights);
    megamoe_device_close(b.device);
    free(b.codes);
    free(b.scales);
    free(b.want);
    free(b.got);
    free(b.us);
    return code;
}
