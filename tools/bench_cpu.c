/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_cpu.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "monotonic.h"
#include "report.h"
#include "synth.h"

struct bench_cpu {
    bench_cpu_options options;
    megamoe_workspace *workspace;
    int64_t tokens;
    uint16_t *x, *y;
    int32_t *ids;
    float *weights;
};

int bench_cpu_open(const bench_cpu_options *options, bench_cpu **opened) {
    bench_cpu *m = *opened = calloc(1, sizeof *m);
    if (m == NULL)
        return report_error("out of memory");
    m->options = *options;
    const size_t tokens = (size_t)options->tokens;
    const size_t elements = tokens * (size_t)options->shape.hidden;
    const size_t slots = tokens * (size_t)options->shape.topk;
    m->x = malloc(elements * sizeof *m->x);
    m->y = malloc(elements * sizeof *m->y);
    m->ids = malloc(slots * sizeof *m->ids);
    m->weights = malloc(slots * sizeof *m->weights);
    if (m->x == NULL || m->y == NULL || m->ids == NULL || m->weights == NULL ||
        !synth_input(options->seed, options->tokens, options->shape.hidden, m->x))
        return report_error("out of memory for %" PRId64 " tokens", options->tokens);
    for (size_t i = 0; i < slots; i++)
        m->weights[i] = 1.0f / (float)options->shape.topk;
    return EXIT_DONE;
}

void bench_cpu_close(bench_cpu *m) {
    if (m == NULL)
        return;
    megamoe_workspace_close(m->workspace);
    free(m->x);
    free(m->y);
    free(m->ids);
    free(m->weights);
    free(m);
}

int bench_cpu_set_batch(bench_cpu *m, int64_t tokens) {
    const bench_cpu_options *o = &m->options;
    megamoe_workspace_close(m->workspace);
    m->workspace = NULL;
    m->tokens = tokens;
    megamoe_capacity capacity = MEGAMOE_INIT(megamoe_capacity);
    capacity.tokens = tokens;
    TRY_LIBRARY(megamoe_workspace_create(o->comm, o->device, &o->shape, &capacity, &m->workspace));
    TRY_LIBRARY(megamoe_prewarm(o->layer, m->workspace));
    return EXIT_DONE;
}

int bench_cpu_time(bench_cpu *m, uint64_t draw, bench_cpu_sample *sample) {
    const megamoe_view x = {m->x, MEGAMOE_DTYPE_BF16, m->tokens, 0};
    const megamoe_view ids = {m->ids, MEGAMOE_DTYPE_I32, m->tokens, 0};
    const megamoe_view weights = {m->weights, MEGAMOE_DTYPE_F32, m->tokens, 0};
    const megamoe_view y = {m->y, MEGAMOE_DTYPE_BF16, m->tokens, 0};
    bench_routes_draw(&m->options.routes, m->tokens, 0, draw, m->ids);
    sample->load = routing_measure(m->options.routes.routing, m->ids, m->tokens);
    const double start = monotonic_ms();
    megamoe_status status = megamoe_stage(m->workspace, &x, &ids, &weights, m->tokens, NULL);
    if (status == MEGAMOE_OK)
        status = megamoe_forward(m->options.layer, m->workspace, &y, NULL);
    sample->us = 1e3 * (monotonic_ms() - start);
    if (status == MEGAMOE_OK)
        status = megamoe_workspace_status(m->workspace, NULL);
    return status == MEGAMOE_OK ? EXIT_DONE : report_failure(status);
}
