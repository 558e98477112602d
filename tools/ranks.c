/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "ranks.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "parallel.h"
#include "report.h"

/* Long enough for the scalar kernels on a shared core. */
enum { DEADLINE_MS = 600000 };

enum { MESSAGE_BYTES = 1024 };

typedef struct rank {
    const source *source;
    const inputs *inputs;
    const ranks_options *options;
    megamoe_comm *comm;
    char *y;
    /* Closed after all ranks are done: a rank may still read what another has computed. */
    megamoe_device *device;
    megamoe_layer *layer;
    megamoe_workspace *workspace;
    /* Results. */
    megamoe_status status;
    char message[MESSAGE_BYTES]; /* the library's last error belongs to this thread */
    megamoe_device_info device_info;
    double create_ms, forward_ms;
    int64_t routes, expert_min, expert_max;
    uint64_t layer_bytes, workspace_bytes;
} rank;

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

/* Where the r-th of `parts` contiguous parts of n begins; the first n mod parts are one longer. */
static int64_t part_begin(int64_t n, int32_t parts, int32_t r) {
    const int64_t longer = n % parts;
    return n / parts * r + (r < longer ? r : longer);
}

static megamoe_view rows(void *data, megamoe_dtype dtype, int64_t columns, int64_t begin,
                         int64_t end) {
    const int64_t element = dtype == MEGAMOE_DTYPE_BF16 ? 2 : dtype == MEGAMOE_DTYPE_I64 ? 8 : 4;
    return (megamoe_view){(char *)data + begin * columns * element, dtype, end - begin, 0};
}

static megamoe_status open_device(rank *r) {
    const ranks_options *o = r->options;
    megamoe_device_options options = MEGAMOE_INIT(megamoe_device_options);
    options.threads = o->threads > o->ranks ? o->threads / o->ranks : 1;
    options.first_core = options.threads * megamoe_comm_rank(r->comm);
    options.no_pinning = options.threads * o->ranks > parallel_cores();
    const megamoe_status status = megamoe_device_open("cpu", &options, &r->device);
    return status == MEGAMOE_OK ? megamoe_device_describe(r->device, &r->device_info) : status;
}

static megamoe_status count_received(rank *r) {
    const int32_t index = megamoe_comm_rank(r->comm), ranks = r->options->ranks;
    const int32_t experts = r->source->layer.experts;
    const int32_t n =
        (int32_t)(part_begin(experts, ranks, index + 1) - part_begin(experts, ranks, index));
    int64_t *counts = calloc((size_t)n + 1, sizeof *counts);
    if (counts == NULL)
        return MEGAMOE_ENOMEM;
    const megamoe_status status = megamoe_workspace_receive_counts(r->workspace, counts, n);
    r->expert_min = INT64_MAX; /* also where a rank has no experts */
    for (int32_t i = 0; i < n; i++) {
        r->routes += counts[i];
        r->expert_min = counts[i] < r->expert_min ? counts[i] : r->expert_min;
        r->expert_max = counts[i] > r->expert_max ? counts[i] : r->expert_max;
    }
    free(counts);
    return status;
}

static megamoe_status forward(rank *r) {
    const inputs *in = r->inputs;
    const int32_t index = megamoe_comm_rank(r->comm), ranks = r->options->ranks;
    const int64_t hidden = r->source->layer.hidden;
    const int64_t begin = part_begin(in->tokens, ranks, index);
    const int64_t end = part_begin(in->tokens, ranks, index + 1);
    const megamoe_view x = rows(in->x, MEGAMOE_DTYPE_BF16, hidden, begin, end);
    const megamoe_view ids = rows(in->topk_ids, in->topk_ids_dtype, in->topk, begin, end);
    const megamoe_view weights = rows(in->topk_weights, MEGAMOE_DTYPE_F32, in->topk, begin, end);
    const megamoe_view y = rows(r->y, MEGAMOE_DTYPE_BF16, hidden, begin, end);
    const double start = now_ms();
    megamoe_status status = megamoe_stage(r->workspace, &x, &ids, &weights, end - begin, NULL);
    if (status == MEGAMOE_OK)
        status = megamoe_forward(r->layer, r->workspace, &y, NULL);
    /* What a forward finds while it computes is pending until somebody asks. */
    if (status == MEGAMOE_OK)
        status = megamoe_workspace_status(r->workspace, NULL);
    r->forward_ms = now_ms() - start;
    return status;
}

static megamoe_status work(rank *r) {
    const megamoe_layer_desc *desc = &r->source->layer;
    megamoe_layer_options options = MEGAMOE_INIT(megamoe_layer_options);
    options.nvfp4 = r->options->nvfp4;
    megamoe_shape shape = MEGAMOE_INIT(megamoe_shape);
    shape.hidden = desc->hidden;
    shape.intermediate = desc->intermediate;
    shape.experts = desc->experts;
    shape.topk = r->inputs->topk;
    megamoe_capacity capacity = MEGAMOE_INIT(megamoe_capacity);
    const int64_t longest = part_begin(r->inputs->tokens, r->options->ranks, 1);
    capacity.tokens = longest > 0 ? longest : 1;
    capacity.deadline_ms = DEADLINE_MS;

    megamoe_status status = open_device(r);
    const double start = now_ms();
    if (status == MEGAMOE_OK)
        status = megamoe_layer_create(r->comm, r->device, r->source->weights, &options, &r->layer);
    r->create_ms = now_ms() - start;
    if (status == MEGAMOE_OK)
        status = megamoe_workspace_create(r->comm, r->device, &shape, &capacity, &r->workspace);
    if (status == MEGAMOE_OK)
        status = megamoe_prewarm(r->layer, r->workspace);
    if (status == MEGAMOE_OK)
        status = forward(r);
    if (status == MEGAMOE_OK)
        status = count_received(r);
    if (status == MEGAMOE_OK) {
        r->layer_bytes = megamoe_layer_bytes(r->layer);
        r->workspace_bytes = megamoe_workspace_bytes(r->workspace);
    } else {
        snprintf(r->message, sizeof r->message, "%s", megamoe_last_error());
        megamoe_comm_abort(r->comm);
    }
    return status;
}

static void *run_rank(void *argument) {
    rank *r = argument;
    r->status = work(r);
    return NULL;
}

/* The error that made the other ranks give up, if any. */
static const rank *find_failed(const rank *ranks, int32_t n) {
    const rank *failed = NULL;
    for (int32_t i = 0; i < n; i++)
        if (ranks[i].status != MEGAMOE_OK && (failed == NULL || failed->status == MEGAMOE_EPEER))
            failed = &ranks[i];
    return failed;
}

static void summarize(const rank *ranks, int32_t n, ranks_report *report) {
    *report = (ranks_report){
        .device = ranks[0].device_info, .routes_min = INT64_MAX, .expert_min = INT64_MAX};
    for (int32_t i = 0; i < n; i++) {
        const rank *r = &ranks[i];
        report->create_ms = r->create_ms > report->create_ms ? r->create_ms : report->create_ms;
        report->forward_ms =
            r->forward_ms > report->forward_ms ? r->forward_ms : report->forward_ms;
        report->routes_min = r->routes < report->routes_min ? r->routes : report->routes_min;
        report->routes_max = r->routes > report->routes_max ? r->routes : report->routes_max;
        report->expert_min =
            r->expert_min < report->expert_min ? r->expert_min : report->expert_min;
        report->expert_max =
            r->expert_max > report->expert_max ? r->expert_max : report->expert_max;
        report->layer_bytes += r->layer_bytes;
        report->workspace_bytes += r->workspace_bytes;
    }
}

int ranks_forward(const source *s, const inputs *in, const ranks_options *options, void *y,
                  ranks_report *report) {
    const int32_t n = options->ranks;
    rank *ranks = calloc((size_t)n, sizeof *ranks);
    megamoe_comm **comms = calloc((size_t)n, sizeof(megamoe_comm *));
    pthread_t *threads = calloc((size_t)n, sizeof *threads);
    int32_t started = 0;
    int code = EXIT_BAD_INPUT;
    if (ranks == NULL || comms == NULL || threads == NULL) {
        report_error("out of memory");
        goto done;
    }
    const megamoe_status status = megamoe_comm_threads(n, comms);
    if (status != MEGAMOE_OK) {
        report_failure(status);
        goto done;
    }
    for (int32_t i = 0; i < n; i++) {
        ranks[i] = (rank){.source = s, .inputs = in, .options = options, .comm = comms[i], .y = y};
        ranks[i].device_info.struct_size = sizeof ranks[i].device_info;
    }
    while (started < n && pthread_create(&threads[started], NULL, run_rank, &ranks[started]) == 0)
        started++;
    if (started < n)
        megamoe_comm_abort(comms[0]);
    for (int32_t i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    const rank *failed = find_failed(ranks, started);
    if (started < n) {
        report_error("the thread of rank %d cannot be started", started);
    } else if (failed != NULL) {
        report_error("rank %d: %s", (int)(failed - ranks),
                     *failed->message ? failed->message : megamoe_status_text(failed->status));
    } else {
        summarize(ranks, n, report);
        code = EXIT_DONE;
    }
done:
    for (int32_t i = 0; ranks != NULL && i < n; i++) {
        megamoe_workspace_close(ranks[i].workspace);
        megamoe_layer_close(ranks[i].layer);
        megamoe_device_close(ranks[i].device);
    }
    for (int32_t i = 0; comms != NULL && i < n; i++)
        megamoe_comm_close(comms[i]);
    free(ranks);
    free(comms);
    free(threads);
    return code;
}
