/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_gpu.h"

#include <inttypes.h>
#include <stdlib.h>

#include "report.h"
#include "synth.h"

/* At least this much is overwritten, and at least this many times L2. */
enum { FLUSH_BYTES = 256 << 20, FLUSH_L2_TIMES = 4 };

enum { RANKS_MAX = 64 };

struct bench_gpu {
    bench_gpu_options options;
    int32_t ranks, rank;
    gpu *g;
    megamoe_workspace *workspace;
    void *x, *y, *ids, *weights, *flush; /* device memory for the largest batch */
    size_t flush_bytes;
    int32_t *routes;                /* the ids on the host */
    double *all;                    /* times of every rank, and at its end of this one */
    int64_t tokens;                 /* of the batch */
    gpu_graph *graphs[BENCH_CALLS]; /* of the batch; NULL until it is timed */
};

/* ---- Opening ---- */

static size_t row_bytes(const bench_gpu *m) {
    return (size_t)m->options.shape.hidden * sizeof(uint16_t);
}

static int upload_input(bench_gpu *m) {
    const int64_t tokens = m->options.tokens;
    const size_t bytes = (size_t)tokens * row_bytes(m);
    uint16_t *x = malloc(bytes + 1);
    int code = EXIT_DONE;
    if (x == NULL ||
        !synth_input(m->options.seed + (uint64_t)m->rank, tokens, m->options.shape.hidden, x))
        code = report_error("out of memory for %" PRId64 " tokens", tokens);
    if (code == EXIT_DONE)
        code = gpu_upload(m->g, m->x, x, bytes);
    free(x);
    return code;
}

static int upload_weights(bench_gpu *m, size_t slots) {
    float *weights = malloc((slots + 1) * sizeof *weights);
    if (weights == NULL)
        return report_error("out of memory for %zu routes", slots);
    for (size_t i = 0; i < slots; i++)
        weights[i] = 1.0f / (float)m->options.shape.topk;
    const int code = gpu_upload(m->g, m->weights, weights, slots * sizeof *weights);
    free(weights);
    return code;
}

static int open_buffers(bench_gpu *m) {
    const int64_t tokens = m->options.tokens;
    const size_t slots = (size_t)tokens * (size_t)m->options.shape.topk;
    const size_t bytes = (size_t)tokens * row_bytes(m);
    gpu_facts facts;
    gpu_describe(m->g, &facts);
    m->flush_bytes = FLUSH_L2_TIMES * facts.l2_bytes;
    if (m->flush_bytes < FLUSH_BYTES)
        m->flush_bytes = FLUSH_BYTES;
    m->routes = malloc((slots + 1) * sizeof *m->routes);
    m->all = malloc(((size_t)m->ranks + 1) * (GPU_MAX_MARKS / 2) * sizeof *m->all);
    if (m->routes == NULL || m->all == NULL)
        return report_error("out of memory for %" PRId64 " tokens", tokens);
    TRY(gpu_allocate(m->g, "the input", bytes, &m->x));
    TRY(gpu_allocate(m->g, "the output", bytes, &m->y));
    TRY(gpu_allocate(m->g, "expert ids", slots * sizeof *m->routes, &m->ids));
    TRY(gpu_allocate(m->g, "routing weights", slots * sizeof(float), &m->weights));
    TRY(gpu_allocate(m->g, "emptying L2", m->flush_bytes, &m->flush));
    if (m->options.l2 == BENCH_L2_CLEAN) /* loads what reads it, which may not happen later */
        TRY(gpu_read(m->g, m->flush, m->flush_bytes));
    TRY(upload_input(m));
    return upload_weights(m, slots);
}

static int open_workspace(bench_gpu *m) {
    const bench_gpu_options *o = &m->options;
    megamoe_capacity capacity = MEGAMOE_INIT(megamoe_capacity);
    capacity.tokens = o->capacity;
    TRY_LIBRARY(megamoe_workspace_create(o->comm, o->device, &o->shape, &capacity, &m->workspace));
    TRY_LIBRARY(megamoe_prewarm(o->layer, m->workspace));
    return EXIT_DONE;
}

int bench_gpu_open(const bench_gpu_options *options, bench_gpu **opened) {
    bench_gpu *m = *opened = calloc(1, sizeof *m);
    if (m == NULL)
        return report_error("out of memory");
    m->options = *options;
    m->rank = megamoe_comm_rank(options->comm);
    m->ranks = megamoe_comm_size(options->comm);
    megamoe_device_info info = MEGAMOE_INIT(megamoe_device_info);
    TRY_LIBRARY(megamoe_device_describe(options->device, &info));
    TRY(gpu_open(&info, &m->g));
    TRY(open_buffers(m));
    return open_workspace(m);
}

static void drop_graphs(bench_gpu *m) {
    for (int i = 0; i < BENCH_CALLS; i++) {
        gpu_graph_close(m->g, m->graphs[i]);
        m->graphs[i] = NULL;
    }
}

void bench_gpu_close(bench_gpu *m) {
    if (m == NULL)
        return;
    if (m->g != NULL)
        drop_graphs(m);
    megamoe_workspace_close(m->workspace);
    gpu_close(m->g);
    free(m->routes);
    free(m->all);
    free(m);
}

/* ---- Batches ---- */

static megamoe_status stage(const bench_gpu *m) {
    const megamoe_view x = {m->x, MEGAMOE_DTYPE_BF16, m->tokens, 0};
    const megamoe_view ids = {m->ids, MEGAMOE_DTYPE_I32, m->tokens, 0};
    const megamoe_view weights = {m->weights, MEGAMOE_DTYPE_F32, m->tokens, 0};
    return megamoe_stage(m->workspace, &x, &ids, &weights, m->tokens, gpu_stream(m->g));
}

static megamoe_status forward(const bench_gpu *m) {
    const megamoe_view y = {m->y, MEGAMOE_DTYPE_BF16, m->tokens, 0};
    return megamoe_forward(m->options.layer, m->workspace, &y, gpu_stream(m->g));
}

static megamoe_status call_library(const bench_gpu *m, bench_call call) {
    return call == BENCH_STAGE ? stage(m) : forward(m);
}

/* What the device has found in all that was enqueued. */
static int check(const bench_gpu *m) {
    TRY(gpu_wait(m->g));
    TRY_LIBRARY(megamoe_workspace_status(m->workspace, NULL));
    return EXIT_DONE;
}

int bench_gpu_set_plan(bench_gpu *m, const megamoe_plan *plan) {
    TRY(gpu_use(m->g));
    drop_graphs(m);
    TRY_LIBRARY(megamoe_workspace_set_plan(m->workspace, plan));
    return EXIT_DONE;
}

int bench_gpu_set_batch(bench_gpu *m, int64_t tokens) {
    const size_t slots = (size_t)tokens * (size_t)m->options.shape.topk;
    TRY(gpu_use(m->g));
    drop_graphs(m);
    m->tokens = tokens;
    bench_routes_draw(&m->options.routes, tokens, m->rank, 0, m->routes);
    TRY(gpu_upload(m->g, m->ids, m->routes, slots * sizeof *m->routes));
    TRY_LIBRARY(stage(m));
    TRY_LIBRARY(forward(m));
    return check(m);
}

/* ---- Timing ---- */

/* Until all ranks are here. */
static int meet(const bench_gpu *m) {
    char all[RANKS_MAX], mine = 0;
    TRY_LIBRARY(megamoe_comm_allgather(m->options.comm, &mine, all, sizeof mine));
    return EXIT_DONE;
}

static int capture(bench_gpu *m, bench_call call) {
    if (m->options.launch == BENCH_LAUNCH_EAGER || m->graphs[call] != NULL)
        return EXIT_DONE;
    TRY(gpu_capture_begin(m->g));
    const megamoe_status status = call_library(m, call);
    const int code = gpu_capture_end(m->g, &m->graphs[call]);
    return status == MEGAMOE_OK ? code : report_failure(status);
}

static int empty_l2(const bench_gpu *m, unsigned char byte) {
    if (m->options.l2 == BENCH_L2_WARM)
        return EXIT_DONE;
    TRY(gpu_fill(m->g, m->flush, byte, m->flush_bytes));
    return m->options.l2 == BENCH_L2_CLEAN ? gpu_read(m->g, m->flush, m->flush_bytes) : EXIT_DONE;
}

static int enqueue(const bench_gpu *m, bench_call call) {
    if (m->graphs[call] != NULL)
        return gpu_replay(m->g, m->graphs[call]);
    TRY_LIBRARY(call_library(m, call));
    return EXIT_DONE;
}

/* Of each call the time of the rank that took longest, and by how much longer than the fastest. */
static int gather_times(const bench_gpu *m, int n, double *us, double *skews) {
    const double *mine = m->all + (size_t)m->ranks * (size_t)n;
    TRY_LIBRARY(megamoe_comm_allgather(m->options.comm, mine, m->all, (size_t)n * sizeof *mine));
    for (int i = 0; i < n; i++) {
        double longest = 0, shortest = m->all[i];
        for (int32_t r = 0; r < m->ranks; r++) {
            const double of_rank = m->all[r * n + i];
            longest = of_rank > longest ? of_rank : longest;
            shortest = of_rank < shortest ? of_rank : shortest;
        }
        us[i] = longest;
        if (skews != NULL)
            skews[i] = longest - shortest;
    }
    return EXIT_DONE;
}

/* The calls are enqueued without waiting between them, so that launching graphs costs no time. */
int bench_gpu_time(bench_gpu *m, bench_call call, int n, double *us, double *skews,
                   nvml_state *state) {
    double *mine = m->all + (size_t)m->ranks * (size_t)n;
    TRY(gpu_use(m->g));
    TRY(capture(m, call));
    TRY(meet(m));
    for (int i = -m->options.warm_ups; i < n; i++) {
        if (m->options.padding_us > 0)
            TRY(gpu_pause(m->g, m->options.padding_us));
        TRY(empty_l2(m, (unsigned char)i));
        if (i >= 0)
            TRY(gpu_mark(m->g, 2 * i));
        TRY(enqueue(m, call));
        if (i >= 0)
            TRY(gpu_mark(m->g, 2 * i + 1));
    }
    if (state != NULL)
        gpu_get_state(m->g, state);
    TRY(check(m));
    for (int i = 0; i < n; i++)
        TRY(gpu_microseconds(m->g, 2 * i, 2 * i + 1, &mine[i]));
    return gather_times(m, n, us, skews);
}

/* ---- Results ---- */

int bench_gpu_get_times(bench_gpu *m, megamoe_workspace_times *times) {
    *times = (megamoe_workspace_times)MEGAMOE_INIT(megamoe_workspace_times);
    TRY_LIBRARY(megamoe_workspace_get_times(m->workspace, times));
    return EXIT_DONE;
}

int bench_gpu_spoil_output(bench_gpu *m) {
    TRY(gpu_use(m->g));
    return gpu_fill(m->g, m->y, 0xFF, (size_t)m->options.tokens * row_bytes(m));
}

int bench_gpu_get_output(bench_gpu *m, uint16_t *y) {
    TRY(gpu_use(m->g));
    return gpu_download(m->g, y, m->y, (size_t)m->tokens * row_bytes(m));
}

const megamoe_workspace *bench_gpu_workspace(const bench_gpu *m) {
    return m->workspace;
}

const gpu *bench_gpu_device(const bench_gpu *m) {
    return m->g;
}

size_t bench_gpu_flush_bytes(const bench_gpu *m) {
    return m->flush_bytes;
}
