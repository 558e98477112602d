/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks on GPUs: folded ones on one GPU in one launch, and one that is a process. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu.h"
#include "monotonic.h"
#include "parallel.h"
#include "rank.h"
#include "report.h"

static int open_device(rank *ranks) {
    const ranks_options *o = ranks[0].options;
    megamoe_device_options options = MEGAMOE_INIT(megamoe_device_options);
    options.threads = o->threads;
    TRY_LIBRARY(megamoe_device_open(o->device, &options, &ranks[0].device));
    TRY_LIBRARY(megamoe_device_describe(ranks[0].device, &ranks[0].device_info));
    for (int32_t i = 1; i < o->ranks; i++) {
        ranks[i].device = ranks[0].device;
        ranks[i].device_info = ranks[0].device_info;
    }
    return EXIT_DONE;
}

static size_t y_bytes(const rank *r) {
    return (size_t)r->inputs->tokens * (size_t)r->source->layer.hidden * sizeof(uint16_t);
}

static int upload(gpu *g, const char *what, const void *from, size_t bytes, void **to) {
    TRY(gpu_allocate(g, what, bytes, to));
    return gpu_upload(g, *to, from, bytes);
}

static int upload_batch(gpu *g, rank *ranks, rank_memory *memory) {
    const inputs *in = ranks[0].inputs;
    const size_t slots = (size_t)in->tokens * (size_t)in->topk;
    const size_t id_bytes = in->topk_ids_dtype == MEGAMOE_DTYPE_I64 ? 8 : 4;
    TRY(upload(g, "the input", in->x, y_bytes(ranks), &memory->x));
    TRY(upload(g, "expert ids", in->topk_ids, slots * id_bytes, &memory->topk_ids));
    TRY(upload(g, "routing weights", in->topk_weights, slots * sizeof(float),
               &memory->topk_weights));
    TRY(gpu_allocate(g, "the output", y_bytes(ranks), &memory->y));
    /* NaN: rows that nobody writes do not pass for results. */
    TRY(gpu_fill(g, memory->y, 0xFF, y_bytes(ranks)));
    for (int32_t i = 0; i < ranks[0].options->ranks; i++)
        rank_take_part(&ranks[i], memory);
    return EXIT_DONE;
}

static int launch(gpu *g, rank *ranks, megamoe_forward_call *calls) {
    const int32_t n = ranks[0].options->ranks;
    const double start = monotonic_ms();
    for (int32_t i = 0; i < n; i++) {
        calls[i] =
            (megamoe_forward_call){ranks[i].layer, ranks[i].workspace, &ranks[i].y, gpu_stream(g)};
        TRY_LIBRARY(rank_stage(&ranks[i], gpu_stream(g)));
    }
    TRY_LIBRARY(megamoe_forward_group(calls, n));
    TRY(gpu_wait(g));
    ranks[0].forward_ms = monotonic_ms() - start;
    for (int32_t i = 0; i < n; i++)
        TRY_LIBRARY(megamoe_workspace_status(ranks[i].workspace, NULL));
    return EXIT_DONE;
}

static int run(gpu *g, rank *ranks, megamoe_forward_call *calls, void *y) {
    const int32_t n = ranks[0].options->ranks;
    const inputs *in = ranks[0].inputs;
    /* The bound: whatever the routes are, they fit. */
    const int64_t routes = in->tokens * in->topk;
    for (int32_t i = 0; i < n; i++)
        TRY_LIBRARY(rank_create(&ranks[i], routes > 0 ? routes : 1));
    for (int32_t i = 0; i < n; i++)
        TRY_LIBRARY(megamoe_prewarm(ranks[i].layer, ranks[i].workspace));
    rank_memory memory;
    TRY(upload_batch(g, ranks, &memory));
    TRY(launch(g, ranks, calls));
    for (int32_t i = 0; i < n; i++)
        TRY_LIBRARY(rank_count_received(&ranks[i]));
    return gpu_download(g, y, memory.y, y_bytes(ranks));
}

int ranks_run_folded(rank *ranks, void *y) {
    gpu *g = NULL;
    megamoe_forward_call *calls = calloc((size_t)ranks[0].options->ranks, sizeof *calls);
    int code = calls != NULL ? open_device(ranks) : report_error("out of memory");
    if (code == EXIT_DONE)
        code = gpu_open(&ranks[0].device_info, &g);
    if (code == EXIT_DONE)
        code = run(g, ranks, calls, y);
    gpu_close(g);
    free(calls);
    return code;
}

/* ---- a rank that is a process ---- */

enum { DEVICE_BYTES = 32 };

/* The number of this rank among those of this machine, which is all of them if nobody says. */
static long local_rank(const megamoe_comm *comm) {
    static const char *const names[] = {"LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "MPI_LOCALRANKID"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *text = getenv(names[i]);
        if (text != NULL)
            return strtol(text, NULL, 10);
    }
    return megamoe_comm_rank(comm);
}

static int choose_gpu(const megamoe_comm *comm, char chosen[DEVICE_BYTES]) {
    const long local = local_rank(comm);
    int32_t gpus = 0;
    TRY_LIBRARY(megamoe_device_count("cuda", &gpus));
    snprintf(chosen, DEVICE_BYTES, "cuda:%ld", local > 0 && gpus > 0 ? local % gpus : 0);
    return EXIT_DONE;
}

/* Ranks that may use exactly the cores that this one may: all of them, and those before it. */
static int find_sharers(megamoe_comm *comm, int32_t *all, int32_t *before) {
    const int32_t size = megamoe_comm_size(comm), own = megamoe_comm_rank(comm);
    cpu_set_t mine, *sets = calloc((size_t)size, sizeof *sets);
    if (sets == NULL)
        return report_error("out of memory");
    CPU_ZERO(&mine);
    (void)sched_getaffinity(0, sizeof mine, &mine);
    const megamoe_status status = megamoe_comm_allgather(comm, &mine, sets, sizeof mine);
    *all = 1;
    *before = 0;
    for (int32_t r = 0; status == MEGAMOE_OK && r < size; r++)
        if (r != own && CPU_EQUAL(&mine, &sets[r])) {
            *all += 1;
            *before += r < own;
        }
    free(sets);
    return status == MEGAMOE_OK ? EXIT_DONE : report_failure(status);
}

int rank_open_device(const char *name, int32_t threads, megamoe_comm *comm,
                     megamoe_device **device) {
    char chosen[DEVICE_BYTES];
    if (strcmp(name, "cuda") == 0) {
        TRY(choose_gpu(comm, chosen));
        name = chosen;
    }
    megamoe_device_options options = MEGAMOE_INIT(megamoe_device_options);
    int32_t sharers, before;
    TRY(find_sharers(comm, &sharers, &before));
    const int32_t cores = parallel_cores();
    if (threads == 0)
        threads = cores > sharers ? cores / sharers : 1;
    options.threads = threads;
    options.first_core = threads * before;
    options.no_pinning = threads * sharers > cores;
    TRY_LIBRARY(megamoe_device_open(name, &options, device));
    return EXIT_DONE;
}

static size_t view_bytes(const rank *r, const megamoe_view *view) {
    const size_t element = view->dtype == MEGAMOE_DTYPE_BF16  ? 2
                           : view->dtype == MEGAMOE_DTYPE_I64 ? 8
                                                              : 4;
    const bool wide = view->dtype == MEGAMOE_DTYPE_BF16;
    return (size_t)r->tokens * element * (size_t)(wide ? r->source->layer.hidden : r->inputs->topk);
}

static int forward_in_memory(gpu *g, rank *r) {
    megamoe_view *const views[] = {&r->x, &r->topk_ids, &r->topk_weights};
    static const char *const names[] = {"the input", "expert ids", "routing weights"};
    for (int i = 0; i < 3; i++)
        TRY(upload(g, names[i], views[i]->data, view_bytes(r, views[i]), &views[i]->data));
    void *const host = r->y.data;
    const size_t bytes = view_bytes(r, &r->y);
    TRY(gpu_allocate(g, "the output", bytes, &r->y.data));
    TRY(gpu_fill(g, r->y.data, 0xFF, bytes));
    TRY(gpu_wait(g));
    const double start = monotonic_ms();
    TRY_LIBRARY(rank_stage(r, gpu_stream(g)));
    TRY_LIBRARY(megamoe_forward(r->layer, r->workspace, &r->y, gpu_stream(g)));
    TRY(gpu_wait(g));
    r->forward_ms = monotonic_ms() - start;
    TRY_LIBRARY(megamoe_workspace_status(r->workspace, NULL));
    TRY(gpu_download(g, host, r->y.data, bytes));
    r->y.data = host;
    return EXIT_DONE;
}

int rank_forward_on_gpu(rank *r) {
    gpu *g = NULL;
    int code = gpu_open(&r->device_info, &g);
    if (code == EXIT_DONE)
        code = forward_in_memory(g, r);
    gpu_close(g);
    return code;
}
