/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What it costs to spread one layer over several ranks on CPUs: creation, memory, and forwards at
 * the same work in all. Prints one JSON object.
 *
 *     megamoe launch -n 4 -- ranks_bench          ranks that are processes
 *     ranks_bench --folded 4                      ranks that one thread drives, without any waiting
 */
#define _GNU_SOURCE
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "megamoe/megamoe.h"

enum { RANKS_MAX = 64, POINTS_MAX = 16, LEAST_RUNS = 10, MOST_RUNS = 20000 };

typedef struct options {
    int32_t folded; /* ranks; 0: this process is one of several, or alone */
    int32_t hidden, intermediate, experts, topk;
    int32_t threads; /* of all ranks together */
    double seconds;
    int64_t tokens[POINTS_MAX]; /* of all ranks together; 0: no route at all, waiting alone */
    int n_points;
} options;

/* One rank of this process. */
typedef struct rank {
    megamoe_comm *comm;
    megamoe_device *device;
    megamoe_layer *layer;
    megamoe_workspace *workspace;
    int64_t tokens; /* its share of a point's */
    uint16_t *x, *y;
    int32_t *ids;
    float *weights;
} rank;

typedef struct job {
    options o;
    int32_t size; /* of the communicator */
    int32_t own;  /* ranks of this process */
    rank ranks[RANKS_MAX];
    megamoe_weights *weights;
    uint8_t *codes;  /* of one matrix; all experts are packed from it */
    uint8_t *scales; /* likewise */
    double comm_ms, layer_ms, workspace_ms;
} job;

/* Of one point, on this process. */
typedef struct point {
    int64_t runs;
    double median_ms, min_ms, p90_ms;
} point;

static void check(megamoe_status status, const char *call) {
    if (status == MEGAMOE_OK)
        return;
    fprintf(stderr, "%s: %s\n", call, megamoe_last_error());
    exit(1);
}
#define CHECK(call) check((call), #call)

static void *allocate(size_t bytes) {
    void *memory = calloc(1, bytes ? bytes : 1);
    if (memory == NULL) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    return memory;
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* ---- the layer ---- */

static void make_weights(job *j) {
    const options *o = &j->o;
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    desc.hidden = o->hidden;
    desc.intermediate = o->intermediate;
    desc.experts = o->experts;
    desc.topk = o->topk;
    desc.format = MEGAMOE_FORMAT_MXFP4;
    const size_t elements = (size_t)o->hidden * (size_t)o->intermediate;
    uint64_t state = 88172645463325252u;
    j->codes = allocate(elements / 2);
    j->scales = allocate(elements / 32);
    for (size_t i = 0; i < elements / 2; i++)
        j->codes[i] = (uint8_t)(next_random(&state) >> 32);
    memset(j->scales, 121, elements / 32);
    megamoe_matrix *matrices = allocate((size_t)o->experts * 3 * sizeof *matrices);
    for (int32_t i = 0; i < o->experts * 3; i++) {
        const size_t in = (size_t)(i % 3 == MEGAMOE_DOWN ? o->intermediate : o->hidden);
        matrices[i] = (megamoe_matrix){.codes = j->codes,
                                       .codes_stride = in / 2,
                                       .scales = j->scales,
                                       .scales_stride = in / 32};
    }
    CHECK(megamoe_weights_from_tensors(&desc, matrices, &j->weights));
    free(matrices);
}

/* ---- ranks ---- */

static void meet(job *j) {
    const double start = now_ms();
    megamoe_comm *comms[RANKS_MAX];
    j->own = 1;
    if (j->o.folded) {
        j->own = j->o.folded;
        CHECK(megamoe_comm_folded(j->own, comms));
    } else if (getenv("WORLD_SIZE") != NULL)
        CHECK(megamoe_comm_from_env(NULL, comms));
    else
        CHECK(megamoe_comm_self(comms));
    for (int32_t r = 0; r < j->own; r++)
        j->ranks[r].comm = comms[r];
    j->size = megamoe_comm_size(comms[0]);
    j->comm_ms = now_ms() - start;
}

/* Folded ranks, which take turns, share the device of the first. */
static void open_device(const job *j, rank *r) {
    const int32_t processes = j->o.folded ? 1 : j->size;
    if (r != &j->ranks[0]) {
        r->device = j->ranks[0].device;
        return;
    }
    megamoe_device_options device = MEGAMOE_INIT(megamoe_device_options);
    device.threads = j->o.threads > processes ? j->o.threads / processes : 1;
    device.first_core = device.threads * (j->o.folded ? 0 : megamoe_comm_rank(r->comm));
    device.no_pinning = device.threads * processes > (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
    CHECK(megamoe_device_open("cpu", &device, &r->device));
}

/* What the ranks tell each other: the largest of their values. */
static double largest(const job *j, double value) {
    if (j->o.folded)
        return value;
    double all[RANKS_MAX] = {0}, most = value;
    CHECK(megamoe_comm_allgather(j->ranks[0].comm, &value, all, sizeof value));
    for (int32_t r = 0; r < j->size; r++)
        most = all[r] > most ? all[r] : most;
    return most;
}

static int64_t most_tokens(const options *o) {
    int64_t most = 1;
    for (int i = 0; i < o->n_points; i++)
        most = o->tokens[i] > most ? o->tokens[i] : most;
    return most;
}

static void open_rank(job *j, rank *r) {
    const options *o = &j->o;
    const int64_t tokens = (most_tokens(o) + j->size - 1) / j->size;
    megamoe_shape shape = MEGAMOE_INIT(megamoe_shape);
    shape.hidden = o->hidden;
    shape.intermediate = o->intermediate;
    shape.experts = o->experts;
    shape.topk = o->topk;
    megamoe_capacity capacity = MEGAMOE_INIT(megamoe_capacity);
    capacity.tokens = tokens;
    open_device(j, r);
    double start = now_ms();
    CHECK(megamoe_layer_create(r->comm, r->device, j->weights, NULL, &r->layer));
    j->layer_ms += now_ms() - start;
    (void)largest(j, 0); /* not to wait for another rank's layer below */
    start = now_ms();
    CHECK(megamoe_workspace_create(r->comm, r->device, &shape, &capacity, &r->workspace));
    j->workspace_ms += now_ms() - start;
    CHECK(megamoe_prewarm(r->layer, r->workspace));
    const size_t rows = (size_t)tokens;
    r->x = allocate(rows * (size_t)o->hidden * sizeof *r->x);
    r->y = allocate(rows * (size_t)o->hidden * sizeof *r->y);
    r->ids = allocate(rows * (size_t)o->topk * sizeof *r->ids);
    r->weights = allocate(rows * (size_t)o->topk * sizeof *r->weights);
    for (size_t i = 0; i < rows * (size_t)o->topk; i++)
        r->weights[i] = 1.0f / (float)o->topk;
}

static void close_rank(rank *r) {
    megamoe_workspace_close(r->workspace);
    megamoe_layer_close(r->layer);
    megamoe_comm_close(r->comm);
    free(r->x);
    free(r->y);
    free(r->ids);
    free(r->weights);
}

/* ---- forwards ---- */

/*
 * The batch of all ranks is the same whatever their number: token t of it is drawn from `run` and
 * t. Each token goes to topk different experts.
 */
static void draw(const job *j, rank *r, int64_t all, int64_t run) {
    const int32_t n = megamoe_comm_rank(r->comm);
    const int64_t first = n * (all / j->size) + (n < all % j->size ? n : all % j->size);
    r->tokens = all / j->size + (n < all % j->size);
    for (int64_t t = 0; t < r->tokens; t++) {
        uint64_t state = (uint64_t)(run * 1000003 + first + t) * 0x9E3779B97F4A7C15u + 1;
        int32_t *ids = r->ids + t * j->o.topk;
        for (int32_t k = 0; k < j->o.topk;) {
            ids[k] = (int32_t)(next_random(&state) % (uint64_t)j->o.experts);
            int32_t same = 0;
            while (ids[same] != ids[k])
                same++;
            k += same == k;
        }
        for (int32_t i = 0; run == 0 && i < j->o.hidden; i++)
            r->x[t * j->o.hidden + i] =
                (uint16_t)(0x3F00u | (next_random(&state) >> 40 & 0x80FF)); /* +-0.5..2 */
    }
}

static void stage(rank *r) {
    const megamoe_view x = {r->x, MEGAMOE_DTYPE_BF16, r->tokens, 0};
    const megamoe_view ids = {r->ids, MEGAMOE_DTYPE_I32, r->tokens, 0};
    const megamoe_view weights = {r->weights, MEGAMOE_DTYPE_F32, r->tokens, 0};
    CHECK(megamoe_stage(r->workspace, &x, &ids, &weights, r->tokens, NULL));
}

/* Stages and computes on all ranks of this process. */
static void forward(job *j) {
    megamoe_forward_call calls[RANKS_MAX] = {0};
    megamoe_view y[RANKS_MAX];
    for (int32_t r = 0; r < j->own; r++) {
        rank *one = &j->ranks[r];
        stage(one);
        y[r] = (megamoe_view){one->y, MEGAMOE_DTYPE_BF16, one->tokens, 0};
        calls[r] = (megamoe_forward_call){one->layer, one->workspace, &y[r], NULL};
    }
    if (j->o.folded)
        CHECK(megamoe_forward_group(calls, j->own));
    else
        CHECK(megamoe_forward(calls[0].layer, calls[0].workspace, &y[0], NULL));
    for (int32_t r = 0; r < j->own; r++)
        CHECK(megamoe_workspace_status(j->ranks[r].workspace, NULL));
}

static double timed_forward(job *j, int64_t tokens, int64_t run) {
    for (int32_t r = 0; r < j->own; r++)
        draw(j, &j->ranks[r], tokens, run);
    const double start = now_ms();
    forward(j);
    return now_ms() - start;
}

static int compare(const void *a, const void *b) {
    const double one = *(const double *)a, other = *(const double *)b;
    return (one > other) - (one < other);
}

static point measure(job *j, int64_t tokens) {
    point p = {0};
    double warm = 0;
    for (int run = 0; run < 3; run++)
        warm = timed_forward(j, tokens, run);
    p.runs = (int64_t)(j->o.seconds * 1e3 / largest(j, warm));
    p.runs = p.runs < LEAST_RUNS ? LEAST_RUNS : (p.runs > MOST_RUNS ? MOST_RUNS : p.runs);
    double *times = allocate((size_t)p.runs * sizeof *times);
    for (int64_t run = 0; run < p.runs; run++)
        times[run] = timed_forward(j, tokens, run + 3);
    qsort(times, (size_t)p.runs, sizeof *times, compare);
    p.median_ms = times[p.runs / 2];
    p.min_ms = times[0];
    p.p90_ms = times[p.runs * 9 / 10];
    free(times);
    return p;
}

/* ---- the program ---- */

static json_t *describe(const job *j) {
    char date[32];
    const time_t now = time(NULL);
    struct tm utc;
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    megamoe_device_info info = MEGAMOE_INIT(megamoe_device_info);
    CHECK(megamoe_device_describe(j->ranks[0].device, &info));
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i}", "date", date,
                     "version", megamoe_version(), "model", info.model, "tier", info.tier, "kind",
                     j->o.folded ? "folded" : (j->size > 1 ? "processes" : "one"), "ranks",
                     (int)j->size, "threads_per_rank", (int)info.threads, "cores",
                     (int)sysconf(_SC_NPROCESSORS_ONLN), "hidden", (int)j->o.hidden, "intermediate",
                     (int)j->o.intermediate, "experts", (int)j->o.experts, "topk", (int)j->o.topk);
}

static void run(job *j) {
    make_weights(j);
    meet(j);
    for (int32_t r = 0; r < j->own; r++)
        open_rank(j, &j->ranks[r]);
    json_t *object = describe(j), *points = json_array();
    json_object_set_new(object, "comm_ms", json_real(largest(j, j->comm_ms)));
    json_object_set_new(object, "layer_ms", json_real(largest(j, j->layer_ms)));
    json_object_set_new(object, "workspace_ms", json_real(largest(j, j->workspace_ms)));
    json_object_set_new(object, "capacity_tokens_all_ranks",
                        json_integer((json_int_t)most_tokens(&j->o)));
    json_object_set_new(object, "workspace_bytes_per_rank",
                        json_integer((json_int_t)megamoe_workspace_bytes(j->ranks[0].workspace)));
    for (int i = 0; i < j->o.n_points; i++) {
        const point p = measure(j, j->o.tokens[i]);
        json_array_append_new(points, json_pack("{s:I, s:I, s:f, s:f, s:f}", "tokens",
                                                (json_int_t)j->o.tokens[i], "runs",
                                                (json_int_t)p.runs, "median_ms", p.median_ms,
                                                "min_ms", p.min_ms, "p90_ms", p.p90_ms));
    }
    json_object_set_new(object, "points", points);
    if (megamoe_comm_rank(j->ranks[0].comm) == 0) {
        (void)json_dumpf(object, stdout, JSON_INDENT(1) | JSON_REAL_PRECISION(6));
        puts("");
    }
    json_decref(object);
    for (int32_t r = 0; r < j->own; r++)
        close_rank(&j->ranks[r]);
    megamoe_device_close(j->ranks[0].device);
    megamoe_weights_close(j->weights);
    free(j->codes);
    free(j->scales);
}

static int usage(void) {
    fprintf(stderr, "usage: ranks_bench [--folded RANKS] [--tokens N,...] [--hidden N] "
                    "[--intermediate N] [--experts N] [--topk N] [--threads N] [--seconds S]\n");
    return 2;
}

static int32_t number(const char *text) {
    const long n = strtol(text, NULL, 10);
    return n > 0 && n <= INT32_MAX ? (int32_t)n : 0;
}

static bool take_points(options *o, char *text) {
    o->n_points = 0;
    for (char *save, *word = strtok_r(text, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
        if (o->n_points == POINTS_MAX)
            return false;
        o->tokens[o->n_points++] = number(word);
    }
    return o->n_points > 0;
}

static bool take_options(int argc, char **argv, options *o) {
    static const struct option known[] = {{"folded", required_argument, NULL, 'f'},
                                          {"tokens", required_argument, NULL, 't'},
                                          {"hidden", required_argument, NULL, 'h'},
                                          {"intermediate", required_argument, NULL, 'i'},
                                          {"experts", required_argument, NULL, 'e'},
                                          {"topk", required_argument, NULL, 'k'},
                                          {"threads", required_argument, NULL, 'j'},
                                          {"seconds", required_argument, NULL, 's'},
                                          {NULL, 0, NULL, 0}};
    int c;
    bool good = true;
    while ((c = getopt_long(argc, argv, "", known, NULL)) != -1) {
        int32_t *numbers[] = {['f'] = &o->folded,  ['h'] = &o->hidden, ['i'] = &o->intermediate,
                              ['e'] = &o->experts, ['k'] = &o->topk,   ['j'] = &o->threads};
        if (c == 't')
            good = good && take_points(o, optarg);
        else if (c == 's')
            good = good && (o->seconds = strtod(optarg, NULL)) > 0;
        else if (c < (int)(sizeof numbers / sizeof *numbers) && numbers[c])
            good = good && (*numbers[c] = number(optarg)) > 0;
        else
            good = false;
    }
    return good && optind == argc && o->folded <= RANKS_MAX && o->topk <= o->experts &&
           o->hidden % 32 == 0 && o->intermediate % 32 == 0;
}

int main(int argc, char **argv) {
    static job j = {.o = {.hidden = 2048,
                          .intermediate = 768,
                          .experts = 128,
                          .topk = 8,
                          .threads = 2,
                          .seconds = 2,
                          .tokens = {0, 8, 64, 512},
                          .n_points = 4}};
    if (!take_options(argc, argv, &j.o))
        return usage();
    run(&j);
    return 0;
}
