/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "gpu_ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "base/device.h"
#include "cuda/device.h"

/* ---- which GPUs there are ---- */

typedef struct gpus {
    int32_t usable;
    char why[512]; /* the next one is not */
} gpus;

static megamoe_device *open_gpu(int32_t ordinal, int32_t max_ctas) {
    char name[32];
    snprintf(name, sizeof name, "cuda:%d", ordinal);
    megamoe_device_options options = MEGAMOE_INIT(megamoe_device_options);
    options.threads = 1;
    options.no_pinning = true;
    options.max_ctas = max_ctas;
    megamoe_device *device = NULL;
    (void)!megamoe_device_open(name, &options, &device);
    return device;
}

static void count(void *argument) {
    gpus *found = argument;
    megamoe_device *device;
    while (found->usable < MAX_RANKS && (device = open_gpu(found->usable, 0))) {
        megamoe_device_close(device);
        found->usable++;
    }
    snprintf(found->why, sizeof found->why, "%s", megamoe_last_error());
}

int32_t gpu_count(int32_t least, int32_t most) {
    if (mm_cu.cuInit)
        T_SKIP("this process has used the driver, so it cannot fork ranks: run the case alone");
    gpus *found = crew_share(sizeof *found);
    int status;
    const pid_t child = t_fork(count, found);
    T_REQUIRE(waitpid(child, &status, 0) == child && status == 0);
    const gpus copy = *found;
    crew_unshare(found, sizeof *found);
    T_REQUIRE(copy.usable || !getenv("MEGAMOE_TEST_GPU"));
    if (copy.usable < least)
        T_SKIP("%d GPUs, this needs %d (%s)", copy.usable, least, copy.why);
    return copy.usable < most ? copy.usable : most;
}

/* ---- ranks ---- */

static void enter(const gpu_rank *g) {
    gpu_check(mm_cu.cuCtxSetCurrent(g->r.device->cuda->context), "cuCtxSetCurrent");
}

void gpu_rank_open(gpu_rank *g, const setup *s, int32_t ordinal, int32_t max_ctas) {
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    T_OK(megamoe_weights_describe(s->weights, &desc));
    rank *r = &g->r;
    r->device = open_gpu(ordinal, max_ctas);
    if (!r->device) {
        T_CHECK_MSG(false, "cuda:%d: %s", ordinal, megamoe_last_error());
        t_leave();
    }
    r->shape = (megamoe_shape){.struct_size = sizeof r->shape,
                               .hidden = desc.hidden,
                               .intermediate = desc.intermediate,
                               .experts = desc.experts,
                               .topk = s->topk,
                               .input_scale = s->input_scale,
                               .physical_experts = s->options.physical_experts};
    r->capacity = (megamoe_capacity){.struct_size = sizeof r->capacity,
                                     .tokens = s->tokens,
                                     .pool_rows = s->pool_rows,
                                     .deadline_ms = s->deadline_ms};
    enter(g);
    gpu_check(mm_cu.cuStreamCreate(&g->stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    g->memory = gpu_batch_open(s->tokens, desc.hidden, s->topk);
}

void gpu_rank_create(gpu_rank *g, const setup *s) {
    rank *r = &g->r;
    megamoe_layer_options options = s->options;
    options.struct_size = sizeof options;
    T_STATUS(megamoe_layer_create(r->comm, r->device, s->weights, &options, &r->layer), MEGAMOE_OK);
    T_STATUS(megamoe_workspace_create(r->comm, r->device, &r->shape, &r->capacity, &r->workspace),
             MEGAMOE_OK);
}

void gpu_rank_close(gpu_rank *g) {
    enter(g);
    megamoe_workspace_close(g->r.workspace);
    megamoe_layer_close(g->r.layer);
    gpu_batch_close(&g->memory);
    gpu_check(mm_cu.cuStreamDestroy(g->stream), "cuStreamDestroy");
    megamoe_device_close(g->r.device);
}

void gpu_rank_stage(gpu_rank *g, const batch *part) {
    enter(g);
    gpu_batch *b = &g->memory;
    gpu_batch_put(b, part);
    const int64_t stride = gpu_batch_y(b, 0, 0).stride;
    const megamoe_view x = {b->x, MEGAMOE_DTYPE_BF16, part->tokens, stride};
    const megamoe_view ids = {b->ids, MEGAMOE_DTYPE_I32, part->tokens, 0};
    const megamoe_view weights = {b->weights, MEGAMOE_DTYPE_F32, part->tokens, 0};
    T_OK(megamoe_stage(g->r.workspace, &x, &ids, &weights, part->tokens, g->stream));
}

megamoe_status gpu_rank_forward(gpu_rank *g) {
    const megamoe_view y = gpu_batch_y(&g->memory, 0, g->memory.tokens);
    return megamoe_forward(g->r.layer, g->r.workspace, &y, g->stream);
}

void gpu_rank_result(gpu_rank *g, uint16_t *y) {
    enter(g);
    gpu_batch_result(&g->memory, y);
}

void gpu_rank_wait(gpu_rank *g) {
    enter(g);
    gpu_check(mm_cu.cuStreamSynchronize(g->stream), "cuStreamSynchronize");
}

void gpu_member_open(const member *m, const setup *s, int32_t ordinal, int32_t max_ctas,
                     gpu_rank *g) {
    *g = (gpu_rank){.r = {.rank = m->rank, .ranks = m->size}};
    T_OK(crew_meet(m, 0, &g->r.comm));
    gpu_rank_open(g, s, ordinal, max_ctas);
    gpu_rank_create(g, s);
    T_REQUIRE(g->r.workspace);
    T_OK(megamoe_prewarm(g->r.layer, g->r.workspace));
}
