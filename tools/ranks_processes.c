/* SPDX-License-Identifier: Apache-2.0 */
/* This process as one rank among those that a launcher has started. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rank.h"
#include "report.h"

enum { GATHER_BYTES = 1 << 20 };

static int open_device(rank *r) {
    const ranks_options *o = r->options;
    const int32_t threads = o->threads > 0 && o->threads < o->ranks ? 1 : o->threads / o->ranks;
    TRY(rank_open_device(o->device, threads, r->comm, &r->device));
    TRY_LIBRARY(megamoe_device_describe(r->device, &r->device_info));
    return EXIT_DONE;
}

static int work(rank *r) {
    const bool gpu = ranks_on_gpu(r->options->device);
    /* On a GPU rows take memory whether they are used or not, and whatever the routes are fits. */
    const int64_t routes = gpu ? r->inputs->tokens * r->inputs->topk : 0;
    TRY(open_device(r));
    TRY_LIBRARY(rank_create(r, gpu && routes == 0 ? 1 : routes));
    TRY_LIBRARY(megamoe_prewarm(r->layer, r->workspace));
    if (gpu)
        TRY(rank_forward_on_gpu(r));
    else
        TRY_LIBRARY(rank_forward(r));
    TRY_LIBRARY(rank_count_received(r));
    return EXIT_DONE;
}

/* Every rank's rows into y of rank 0, some rows of each rank at a time. */
static int gather_rows(const rank *r, void *y) {
    const int32_t ranks = r->options->ranks;
    const size_t row_bytes = (size_t)r->source->layer.hidden * sizeof(uint16_t);
    const int64_t longest = rank_part_begin(r->inputs->tokens, ranks, 1);
    const int64_t step = (int64_t)(GATHER_BYTES / row_bytes) + 1;
    const size_t bytes = (size_t)step * row_bytes;
    char *mine = calloc(1, bytes), *all = malloc((size_t)ranks * bytes);
    int code = mine != NULL && all != NULL ? EXIT_DONE : report_error("out of memory");
    for (int64_t from = 0; from < longest && code == EXIT_DONE; from += step) {
        if (from < r->tokens)
            memcpy(mine, (const char *)r->y.data + (size_t)from * row_bytes,
                   (size_t)(r->tokens - from < step ? r->tokens - from : step) * row_bytes);
        const megamoe_status status = megamoe_comm_allgather(r->comm, mine, all, bytes);
        if (status != MEGAMOE_OK)
            code = report_failure(status);
        for (int32_t i = 0; i < ranks && code == EXIT_DONE; i++) {
            const int64_t begin = rank_part_begin(r->inputs->tokens, ranks, i) + from;
            const int64_t end = rank_part_begin(r->inputs->tokens, ranks, i + 1);
            const int64_t rows = end - begin < step ? end - begin : step;
            if (rows > 0)
                memcpy((char *)y + (size_t)begin * row_bytes, all + (size_t)i * bytes,
                       (size_t)rows * row_bytes);
        }
    }
    free(mine);
    free(all);
    return code;
}

static int gather_reports(const rank *r, ranks_report *report) {
    ranks_report mine;
    ranks_summarize(r, 1, &mine);
    ranks_report *all = calloc((size_t)r->options->ranks, sizeof *all);
    if (all == NULL)
        return report_error("out of memory");
    const megamoe_status status = megamoe_comm_allgather(r->comm, &mine, all, sizeof mine);
    *report = mine;
    for (int32_t i = 0; status == MEGAMOE_OK && i < r->options->ranks; i++)
        if (i != megamoe_comm_rank(r->comm))
            ranks_report_add(report, &all[i]);
    free(all);
    return status == MEGAMOE_OK ? EXIT_DONE : report_failure(status);
}

int ranks_forward_in_processes(megamoe_comm *comm, const source *s, const inputs *in,
                               const ranks_options *options, void *y, ranks_report *report) {
    const rank_memory host = {in->x, in->topk_ids, in->topk_weights, y};
    rank r = {.source = s, .inputs = in, .options = options, .comm = comm};
    r.device_info.struct_size = sizeof r.device_info;
    rank_take_part(&r, &host);
    int code = work(&r);
    if (code == EXIT_DONE)
        code = gather_rows(&r, y);
    if (code == EXIT_DONE)
        code = gather_reports(&r, report);
    if (code != EXIT_DONE)
        megamoe_comm_abort(comm);
    megamoe_workspace_close(r.workspace);
    megamoe_layer_close(r.layer);
    megamoe_device_close(r.device);
    return code;
}
