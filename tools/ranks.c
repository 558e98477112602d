/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "ranks.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "parallel.h"
#include "rank.h"
#include "report.h"

bool ranks_on_gpu(const char *device) {
    return strncmp(device, "cuda", strlen("cuda")) == 0;
}

static megamoe_status open_device(rank *r) {
    const ranks_options *o = r->options;
    megamoe_device_options options = MEGAMOE_INIT(megamoe_device_options);
    options.threads = o->threads > o->ranks ? o->threads / o->ranks : 1;
    options.first_core = options.threads * megamoe_comm_rank(r->comm);
    options.no_pinning = options.threads * o->ranks > parallel_cores();
    const megamoe_status status = megamoe_device_open(o->device, &options, &r->device);
    return status == MEGAMOE_OK ? megamoe_device_describe(r->device, &r->device_info) : status;
}

static megamoe_status work(rank *r) {
    megamoe_status status = open_device(r);
    if (status == MEGAMOE_OK)
        status = rank_create(r, 0);
    if (status == MEGAMOE_OK)
        status = megamoe_prewarm(r->layer, r->workspace);
    if (status == MEGAMOE_OK)
        status = rank_forward(r);
    if (status == MEGAMOE_OK)
        status = rank_count_received(r);
    if (status != MEGAMOE_OK) {
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

/* Each rank is a thread. */
static int run_threads(rank *ranks, int32_t n) {
    pthread_t *threads = calloc((size_t)n, sizeof *threads);
    if (threads == NULL)
        return report_error("out of memory");
    int32_t started = 0;
    while (started < n && pthread_create(&threads[started], NULL, run_rank, &ranks[started]) == 0)
        started++;
    if (started < n)
        megamoe_comm_abort(ranks[0].comm);
    for (int32_t i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    free(threads);
    if (started < n)
        return report_error("the thread of rank %d cannot be started", started);
    const rank *failed = find_failed(ranks, n);
    if (failed != NULL)
        return report_error("rank %d: %s", (int)(failed - ranks),
                            *failed->message ? failed->message
                                             : megamoe_status_text(failed->status));
    return EXIT_DONE;
}

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t most(int64_t a, int64_t b) {
    return a > b ? a : b;
}

void ranks_report_add(ranks_report *report, const ranks_report *other) {
    report->create_ms = fmax(report->create_ms, other->create_ms);
    report->forward_ms = fmax(report->forward_ms, other->forward_ms);
    report->routes_min = least(report->routes_min, other->routes_min);
    report->routes_max = most(report->routes_max, other->routes_max);
    report->expert_min = least(report->expert_min, other->expert_min);
    report->expert_max = most(report->expert_max, other->expert_max);
    report->layer_bytes += other->layer_bytes;
    report->workspace_bytes += other->workspace_bytes;
}

void ranks_summarize(const rank *ranks, int32_t n, ranks_report *report) {
    for (int32_t i = 0; i < n; i++) {
        const rank *r = &ranks[i];
        const ranks_report one = {.device = r->device_info,
                                  .create_ms = r->create_ms,
                                  .forward_ms = r->forward_ms,
                                  .routes_min = r->routes,
                                  .routes_max = r->routes,
                                  .expert_min = r->expert_min,
                                  .expert_max = r->expert_max,
                                  .layer_bytes = megamoe_layer_bytes(r->layer),
                                  .workspace_bytes = megamoe_workspace_bytes(r->workspace)};
        if (i == 0)
            *report = one;
        else
            ranks_report_add(report, &one);
    }
}

int ranks_forward(const source *s, const inputs *in, const ranks_options *options, void *y,
                  ranks_report *report) {
    const int32_t n = options->ranks;
    const bool folded = ranks_on_gpu(options->device);
    const rank_memory host = {in->x, in->topk_ids, in->topk_weights, y};
    rank *ranks = calloc((size_t)n, sizeof *ranks);
    megamoe_comm **comms = calloc((size_t)n, sizeof(megamoe_comm *));
    int code = EXIT_BAD_INPUT;
    if (ranks == NULL || comms == NULL) {
        report_error("out of memory");
        goto done;
    }
    const megamoe_status status =
        folded ? megamoe_comm_folded(n, comms) : megamoe_comm_threads(n, comms);
    if (status != MEGAMOE_OK) {
        report_failure(status);
        goto done;
    }
    for (int32_t i = 0; i < n; i++) {
        ranks[i] = (rank){.source = s, .inputs = in, .options = options, .comm = comms[i]};
        ranks[i].device_info.struct_size = sizeof ranks[i].device_info;
        rank_take_part(&ranks[i], &host);
    }
    code = folded ? ranks_run_folded(ranks, y) : run_threads(ranks, n);
    if (code == EXIT_DONE)
        ranks_summarize(ranks, n, report);
done:
    for (int32_t i = 0; ranks != NULL && i < n; i++) {
        megamoe_workspace_close(ranks[i].workspace);
        megamoe_layer_close(ranks[i].layer);
    }
    /* Folded ranks share rank 0's. */
    for (int32_t i = 0; ranks != NULL && i < (folded ? 1 : n); i++)
        megamoe_device_close(ranks[i].device);
    for (int32_t i = 0; comms != NULL && i < n; i++)
        megamoe_comm_close(comms[i]);
    free(ranks);
    free(comms);
    return code;
}
