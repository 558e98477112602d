/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "fleet.h"

#include <pthread.h>
#include <stdlib.h>

const char *const tiers[] = {"scalar", "avx2", "avx512", NULL};

fleet fleet_open_comms(const setup *s) {
    fleet f = {.ranks = s->ranks ? s->ranks : 1, .folded = s->folded};
    megamoe_comm *comms[MAX_RANKS];
    T_REQUIRE(f.ranks <= MAX_RANKS);
    if (s->folded)
        T_OK(megamoe_comm_folded(f.ranks, comms));
    else if (s->ranks)
        T_OK(megamoe_comm_threads(f.ranks, comms));
    else
        T_OK(megamoe_comm_self(comms));
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    T_OK(megamoe_weights_describe(s->weights, &desc));
    setenv("MEGAMOE_CPU", s->tier ? s->tier : "", 1);
    for (int32_t r = 0; r < f.ranks; r++) {
        rank *one = &f.rank[r];
        *one = (rank){.rank = r, .ranks = f.ranks, .comm = comms[r]};
        megamoe_device_options options = MEGAMOE_INIT(megamoe_device_options);
        options.threads = s->threads ? s->threads : 1;
        options.no_pinning = true; /* ranks would share cores */
        T_OK(megamoe_device_open(s->device ? s->device : "cpu", &options, &one->device));
        one->shape = (megamoe_shape){
            .struct_size = sizeof one->shape,
            .hidden = desc.hidden,
            .intermediate = desc.intermediate,
            .experts = desc.experts,
            .topk = s->topk ? s->topk : 2,
            .input_scale = s->input_scale,
            .physical_experts = s->options.physical_experts,
            .activations = s->activations,
        };
        one->capacity = (megamoe_capacity){
            .struct_size = sizeof one->capacity,
            .tokens = s->tokens ? s->tokens : 64,
            .pool_rows = s->pool_rows,
            .deadline_ms = s->deadline_ms,
            .trace = s->trace,
        };
    }
    return f;
}

static void open_rank(rank *r, void *argument) {
    const setup *s = argument;
    megamoe_layer_options options = s->options;
    options.struct_size = sizeof options;
    T_STATUS(megamoe_layer_create(r->comm, r->device, s->weights, &options, &r->layer), MEGAMOE_OK);
    T_STATUS(megamoe_workspace_create(r->comm, r->device, &r->shape, &r->capacity, &r->workspace),
             MEGAMOE_OK);
}

fleet fleet_open(const setup *s) {
    fleet f = fleet_open_comms(s);
    setup copy = *s;
    fleet_each(&f, open_rank, &copy);
    for (int32_t r = 0; r < f.ranks; r++) {
        T_REQUIRE(f.rank[r].layer && f.rank[r].workspace);
        T_OK(megamoe_prewarm(f.rank[r].layer, f.rank[r].workspace));
    }
    return f;
}

void fleet_close(fleet *f) {
    for (int32_t r = 0; r < f->ranks; r++)
        megamoe_workspace_close(f->rank[r].workspace);
    for (int32_t r = 0; r < f->ranks; r++) {
        megamoe_layer_close(f->rank[r].layer);
        megamoe_device_close(f->rank[r].device);
        megamoe_comm_close(f->rank[r].comm);
    }
}

struct visit {
    rank *r;
    void (*fn)(rank *r, void *argument);
    void *argument;
};

static void *visit(void *argument) {
    const struct visit *v = argument;
    v->fn(v->r, v->argument);
    return NULL;
}

void fleet_each(fleet *f, void (*fn)(rank *r, void *argument), void *argument) {
    pthread_t threads[MAX_RANKS] = {0};
    struct visit visits[MAX_RANKS];
    for (int32_t r = 0; r < f->ranks; r++) {
        visits[r] = (struct visit){&f->rank[r], fn, argument};
        if (f->folded)
            visit(&visits[r]);
        else
            T_REQUIRE(pthread_create(&threads[r], NULL, visit, &visits[r]) == 0);
    }
    for (int32_t r = 0; r < f->ranks && !f->folded; r++)
        pthread_join(threads[r], NULL);
}

batch share_of(const batch *b, int32_t rank_index, int32_t ranks, int64_t *first) {
    const int64_t each = b->tokens / ranks, longer = b->tokens % ranks;
    *first = rank_index * each + (rank_index < longer ? rank_index : longer);
    return batch_part(b, *first, each + (rank_index < longer));
}

static void stage_rank(rank *r, void *argument) {
    int64_t first;
    const batch part = share_of(argument, r->rank, r->ranks, &first);
    const megamoe_view x = view_x(&part), ids = view_ids(&part), weights = view_weights(&part);
    T_STATUS(megamoe_stage(r->workspace, &x, &ids, &weights, part.tokens, NULL), MEGAMOE_OK);
}

void fleet_stage(fleet *f, const batch *b) {
    batch copy = *b;
    fleet_each(f, stage_rank, &copy);
}

struct computation {
    const batch *b;
    uint16_t *y;
    megamoe_status *status;
};

static megamoe_view result_of(const rank *r, const struct computation *c) {
    int64_t first;
    const batch part = share_of(c->b, r->rank, r->ranks, &first);
    return view_y(c->y + first * c->b->hidden, &part);
}

static void compute_rank(rank *r, void *argument) {
    const struct computation *c = argument;
    const megamoe_view y = result_of(r, c);
    c->status[r->rank] = megamoe_forward(r->layer, r->workspace, &y, NULL);
}

void fleet_compute(fleet *f, const batch *b, uint16_t *y, megamoe_status status[MAX_RANKS]) {
    struct computation c = {b, y, status};
    if (!f->folded) {
        fleet_each(f, compute_rank, &c);
        return;
    }
    megamoe_forward_call calls[MAX_RANKS];
    megamoe_view views[MAX_RANKS];
    for (int32_t r = 0; r < f->ranks; r++) {
        views[r] = result_of(&f->rank[r], &c);
        calls[r] = (megamoe_forward_call){f->rank[r].layer, f->rank[r].workspace, &views[r], NULL};
    }
    const megamoe_status all = megamoe_forward_group(calls, f->ranks);
    for (int32_t r = 0; r < f->ranks; r++)
        status[r] = all;
}

void fleet_forward(fleet *f, const batch *b, uint16_t *y) {
    megamoe_status status[MAX_RANKS];
    fleet_stage(f, b);
    fleet_compute(f, b, y, status);
    for (int32_t r = 0; r < f->ranks; r++) {
        T_STATUS(status[r], MEGAMOE_OK);
        T_STATUS(megamoe_workspace_status(f->rank[r].workspace, NULL), MEGAMOE_OK);
    }
}

void run_once(const setup *s, const batch *b, uint16_t *y) {
    setup fitting = *s;
    fitting.topk = b->topk;
    fitting.tokens = s->tokens ? s->tokens : b->tokens / (s->ranks ? s->ranks : 1) + 1;
    fleet f = fleet_open(&fitting);
    fleet_forward(&f, b, y);
    fleet_close(&f);
}
