/* SPDX-License-Identifier: Apache-2.0 */
/* What goes wrong on a GPU: the ranks agree, are told once, and the context goes on working. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/device.h"
#include "cuda/device.h"
#include "cuda/workspace.h"
#include "gpu.h"

enum { TOKENS = 37, TOPK = 2, HIDDEN = 160, EXPERTS = 6 };

static const model_recipe recipe = {MEGAMOE_FORMAT_MXFP4, HIDDEN,        96, EXPERTS,
                                    MEGAMOE_DTYPE_BF16,   {1.702f, 1, 7}};

typedef struct subject {
    gpu g;
    model m;
    batch b;
    setup s;
    fleet f;
    gpu_batch buffers;
    uint16_t *want, *y;
} subject;

/* Everything but the fleet. */
static subject open_subject(uint64_t stream) {
    subject x = {.g = gpu_start()};
    t_random r = t_random_start(stream);
    x.m = model_open(&recipe, &r);
    x.b = batch_random(&x.m, TOKENS, TOPK, ROUTING_RANDOM, &r);
    x.s = (setup){.weights = x.m.weights,
                  .device = "cuda:0",
                  .deadline_ms = GPU_DEADLINE_MS,
                  .topk = TOPK,
                  .tokens = TOKENS};
    x.buffers = gpu_batch_open(TOKENS, HIDDEN, TOPK);
    x.want = gpu_rows(&x.b);
    x.y = gpu_rows(&x.b);
    gpu_reference(&x.s, &x.b, x.want);
    return x;
}

static void close_subject(subject *x) {
    gpu_batch_close(&x->buffers);
    free(x->want);
    free(x->y);
    batch_free(&x->b);
    model_close(&x->m);
    gpu_end(&x->g);
}

/* After an error the fleet computes the batch as if nothing had been. */
static void check_recovery(subject *x) {
    gpu_forward(&x->f, &x->buffers, &x->b, x->y, x->g.stream);
    gpu_same(x->y, x->want, &x->b, "after the error");
}

/* Computes a batch that must fail: the same detail on every rank, y untouched. */
static megamoe_workspace_detail fail_with(subject *x, const batch *b, megamoe_status status) {
    megamoe_workspace_detail first = MEGAMOE_INIT(megamoe_workspace_detail);
    gpu_batch_put(&x->buffers, b);
    gpu_stage(&x->f, &x->buffers, x->g.stream);
    T_OK(gpu_compute(&x->f, &x->buffers, x->g.stream));
    gpu_wait();
    for (int32_t r = 0; r < x->f.ranks; r++) {
        megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
        T_STATUS(megamoe_workspace_status(x->f.rank[r].workspace, &d), status);
        T_EQ_INT(d.status, status);
        if (!r)
            first = d;
        T_EQ_STR(d.message, first.message);
        T_EQ_INT(d.rank, first.rank);
        T_EQ_INT(d.value, first.value);
        T_EQ_HEX(d.epoch, first.epoch);
        T_OK(megamoe_workspace_status(x->f.rank[r].workspace, NULL));
    }
    T_CHECK_MSG(gpu_batch_untouched(&x->buffers), "y was written");
    return first;
}

static int32_t *copy_ids(const batch *b) {
    int32_t *ids = malloc((size_t)(b->tokens * b->topk) * sizeof *ids);
    T_REQUIRE(ids);
    memcpy(ids, b->ids, (size_t)(b->tokens * b->topk) * sizeof *ids);
    return ids;
}

T_CASE(errors_expert_ids_out_of_range) {
    for (int32_t ranks = 1; ranks <= 8; ranks *= 2) {
        subject x = open_subject(10);
        x.s.ranks = ranks;
        x.s.folded = true;
        x.s.pool_rows = TOKENS * TOPK;
        x.f = fleet_open(&x.s);
        static const int32_t bad[] = {EXPERTS, -2, INT32_MAX, INT32_MIN};
        for (int i = 0; i < 4; i++) {
            batch b = x.b;
            b.ids = copy_ids(&x.b);
            b.ids[20 * TOPK + 1] = bad[i];
            b.ids[30 * TOPK] = EXPERTS + 1; /* of a later token, or of a later rank */
            const megamoe_workspace_detail d = fail_with(&x, &b, MEGAMOE_EID);
            int32_t owner = 0;
            int64_t first = 0;
            while (owner + 1 < ranks) {
                (void)share_of(&b, owner + 1, ranks, &first);
                if (first > 20)
                    break;
                owner++;
            }
            (void)share_of(&b, owner, ranks, &first);
            T_EQ_INT(d.rank, owner);
            T_EQ_INT(d.token, 20 - first);
            T_EQ_INT(d.slot, 1);
            T_EQ_INT(d.value, bad[i]);
            T_EQ_INT(d.phase, MEGAMOE_PHASE_COUNT);
            free(b.ids);
            if (i % 2)
                check_recovery(&x);
        }
        check_recovery(&x);
        fleet_close(&x.f);
        close_subject(&x);
    }
}

/* The call after a failed forward returns its error, once. */
T_CASE(errors_the_next_call_tells) {
    subject x = open_subject(11);
    x.f = fleet_open(&x.s);
    megamoe_workspace *ws = x.f.rank[0].workspace;
    batch b = x.b;
    b.ids = copy_ids(&x.b);
    b.ids[5] = 77;
    gpu_batch_put(&x.buffers, &b);
    gpu_stage(&x.f, &x.buffers, x.g.stream);
    T_OK(gpu_compute(&x.f, &x.buffers, x.g.stream));
    gpu_wait();
    T_STATUS(gpu_compute(&x.f, &x.buffers, x.g.stream), MEGAMOE_EID);
    T_CONTAINS(megamoe_last_error(), "77");
    T_OK(gpu_compute(&x.f, &x.buffers, x.g.stream)); /* the same batch again */
    gpu_wait();
    T_STATUS(megamoe_commit_staged(ws, 0, x.g.stream), MEGAMOE_EID);
    check_recovery(&x);
    free(b.ids);
    fleet_close(&x.f);
    close_subject(&x);
}

T_CASE(errors_scale_bytes_out_of_range) {
    subject x = open_subject(12);
    x.s.input_scale = MEGAMOE_SCALE_BLOCK;
    gpu_reference(&x.s, &x.b, x.want);
    x.f = fleet_open(&x.s);
    megamoe_workspace *ws = x.f.rank[0].workspace;
    gpu_forward(&x.f, &x.buffers, &x.b, x.y, x.g.stream);
    megamoe_workspace_views v = MEGAMOE_INIT(megamoe_workspace_views);
    T_OK(megamoe_workspace_get_views(ws, &v));
    const uint8_t byte = 175;
    gpu_write((uint8_t *)v.scales.data + 9 * v.scales.stride + 1, &byte, 1);
    gpu_batch_put(&x.buffers, &x.b);
    T_OK(megamoe_commit_staged(ws, TOKENS, x.g.stream));
    T_OK(gpu_compute(&x.f, &x.buffers, x.g.stream));
    gpu_wait();
    megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
    T_STATUS(megamoe_workspace_status(ws, &d), MEGAMOE_EID);
    T_EQ_INT(d.token, 9);
    T_EQ_INT(d.slot, -1);
    T_EQ_INT(d.value, 175);
    T_CHECK(gpu_batch_untouched(&x.buffers));
    check_recovery(&x);
    fleet_close(&x.f);
    close_subject(&x);
}

/* Every route to one expert: twice an even share is not enough from three ranks on. */
T_CASE(errors_pools_overflow_on_all_ranks_together) {
    subject x = open_subject(13);
    x.s.ranks = 4;
    x.s.folded = true;
    x.s.tokens = (TOKENS + 3) / 4;
    x.f = fleet_open(&x.s);
    batch b = x.b;
    b.ids = copy_ids(&x.b);
    for (int32_t i = 0; i < TOKENS * TOPK; i++)
        b.ids[i] = 4; /* of rank 2, which has experts 4 */
    const megamoe_workspace_detail d = fail_with(&x, &b, MEGAMOE_ECAPACITY);
    T_EQ_INT(d.rank, 2);
    T_EQ_INT(d.value, TOKENS * TOPK);
    T_CONTAINS(d.message, "pool");
    free(b.ids);
    /* An even spread fits. */
    check_recovery(&x);
    fleet_close(&x.f);
    close_subject(&x);
}

T_CASE(errors_layers_that_differ_between_ranks) {
    subject x = open_subject(14);
    x.s.ranks = 2;
    x.s.folded = true;
    x.s.pool_rows = TOKENS * TOPK;
    x.f = fleet_open(&x.s);
    rank *second = &x.f.rank[1];
    megamoe_layer *right = second->layer;
    megamoe_layer_options options = MEGAMOE_INIT(megamoe_layer_options);
    options.weight_after_fc2 = true;
    T_OK(megamoe_layer_create(second->comm, second->device, x.m.weights, &options, &second->layer));
    const megamoe_workspace_detail d = fail_with(&x, &x.b, MEGAMOE_EINVAL);
    T_EQ_INT(d.rank, 1);
    megamoe_layer_close(second->layer);
    second->layer = right;
    check_recovery(&x);
    fleet_close(&x.f);
    close_subject(&x);
}

/* ---- ranks that are threads, each with half of the GPU ---- */

static fleet open_halves(subject *x, int32_t deadline_ms) {
    x->s.ranks = 2;
    x->s.folded = false;
    x->s.deadline_ms = deadline_ms;
    x->s.pool_rows = TOKENS * TOPK;
    return gpu_fleet_open(&x->s, x->g.device->cuda->multiprocessors / 2);
}

struct calls {
    subject *x;
    CUstream streams[2];
};

static void forward_rank(rank *r, void *argument) {
    const struct calls *c = argument;
    const gpu_batch *g = &c->x->buffers;
    int64_t first;
    const batch part = share_of(&c->x->b, r->rank, 2, &first);
    uint8_t *rows = g->x;
    const int64_t stride = gpu_batch_y(g, 0, 0).stride;
    const megamoe_view x = {rows + first * stride * 2, MEGAMOE_DTYPE_BF16, part.tokens, stride};
    const megamoe_view ids = {(int32_t *)g->ids + first * TOPK, MEGAMOE_DTYPE_I32, part.tokens, 0};
    const megamoe_view weights = {(float *)g->weights + first * TOPK, MEGAMOE_DTYPE_F32,
                                  part.tokens, 0};
    const megamoe_view y = gpu_batch_y(g, first, part.tokens);
    T_STATUS(megamoe_stage(r->workspace, &x, &ids, &weights, part.tokens, c->streams[r->rank]),
             MEGAMOE_OK);
    T_STATUS(megamoe_forward(r->layer, r->workspace, &y, c->streams[r->rank]), MEGAMOE_OK);
}

static void open_streams(struct calls *c) {
    for (int i = 0; i < 2; i++)
        gpu_check(mm_cu.cuStreamCreate(&c->streams[i], CU_STREAM_NON_BLOCKING), "cuStreamCreate");
}

static void close_streams(struct calls *c) {
    for (int i = 0; i < 2; i++)
        gpu_check(mm_cu.cuStreamDestroy(c->streams[i]), "cuStreamDestroy");
}

/* Fresh communicator, layers and workspaces on the same GPU: both ranks, launched on their own. */
static void check_halves(subject *x) {
    struct calls c = {.x = x};
    open_streams(&c);
    x->f = open_halves(x, GPU_DEADLINE_MS);
    for (int i = 0; i < 20; i++) {
        gpu_batch_put(&x->buffers, &x->b);
        fleet_each(&x->f, forward_rank, &c);
        gpu_batch_result(&x->buffers, x->y);
        for (int32_t r = 0; r < 2; r++)
            T_OK(megamoe_workspace_status(x->f.rank[r].workspace, NULL));
        gpu_same(x->y, x->want, &x->b, "two launches, call %d", i);
    }
    fleet_close(&x->f);
    close_streams(&c);
}

T_CASE(errors_ranks_that_are_threads) {
    subject x = open_subject(20);
    check_halves(&x);
    close_subject(&x);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Rank 0 has waited in vain: its workspace is dead, and so is what is left of the others. */
static void check_dead(subject *x, megamoe_status status, int32_t waited_for) {
    rank *r = x->f.rank;
    megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
    T_STATUS(megamoe_workspace_status(r[0].workspace, &d), status);
    T_EQ_INT(d.phase, MEGAMOE_PHASE_COUNT);
    T_EQ_INT(d.rank, waited_for);
    T_EQ_INT(d.epoch, 1);
    T_CHECK_MSG(gpu_batch_untouched(&x->buffers), "y was written");
    const megamoe_view y = gpu_batch_y(&x->buffers, 0, TOKENS);
    T_STATUS(megamoe_forward(r[0].layer, r[0].workspace, &y, NULL), MEGAMOE_ESTATE);
    T_CONTAINS(megamoe_last_error(), "dead");
    T_OK(megamoe_stage(r[1].workspace, NULL, NULL, NULL, 0, NULL));
    T_STATUS(megamoe_forward(r[1].layer, r[1].workspace, &y, NULL), MEGAMOE_EPEER);
    gpu_wait();
}

T_CASE(errors_a_deadline_passes) {
    subject x = open_subject(21);
    struct calls c = {.x = &x};
    open_streams(&c);
    x.f = open_halves(&x, 200);
    gpu_batch_put(&x.buffers, &x.b);
    const double start = seconds();
    forward_rank(&x.f.rank[0], &c);
    gpu_wait();
    const double waited = seconds() - start;
    T_CHECK_MSG(waited > 0.19 && waited < 5, "%g seconds", waited);
    check_dead(&x, MEGAMOE_ETIMEDOUT, 1);
    fleet_close(&x.f);
    close_streams(&c);
    check_halves(&x);
    close_subject(&x);
}

/* Kernels of all ranks run, and one is in another epoch: nobody is told what it waits for. */
T_CASE(errors_a_deadline_ends_all_ranks) {
    for (int32_t ranks = 2; ranks <= 8; ranks *= 2) {
        subject x = open_subject(23);
        x.s.ranks = ranks;
        x.s.folded = true;
        x.s.pool_rows = TOKENS * TOPK;
        x.s.deadline_ms = 200;
        const fleet f = fleet_open(&x.s);
        x.f = f;
        T_OK(mm_cuda_workspace_set_epoch(f.rank[ranks / 2].workspace->cuda, 5));
        gpu_batch_put(&x.buffers, &x.b);
        gpu_stage(&x.f, &x.buffers, x.g.stream);
        const double start = seconds();
        T_OK(gpu_compute(&x.f, &x.buffers, x.g.stream));
        gpu_wait();
        const double waited = seconds() - start;
        T_CHECK_MSG(waited > 0.19 && waited < 5, "%d ranks: %g seconds", ranks, waited);
        for (int32_t r = 0; r < ranks; r++) {
            megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
            const megamoe_status status = megamoe_workspace_status(x.f.rank[r].workspace, &d);
            T_CHECK_MSG(status == MEGAMOE_ETIMEDOUT || status == MEGAMOE_EPEER, "rank %d of %d: %s",
                        r, ranks, megamoe_status_name(status));
            T_EQ_INT(d.phase, MEGAMOE_PHASE_COUNT);
            T_EQ_INT(d.epoch, r == ranks / 2 ? 6 : 1);
        }
        T_CHECK_MSG(gpu_batch_untouched(&x.buffers), "%d ranks: y was written", ranks);
        fleet_close(&x.f);
        x.s.deadline_ms = GPU_DEADLINE_MS;
        x.f = fleet_open(&x.s);
        check_recovery(&x);
        fleet_close(&x.f);
        close_subject(&x);
    }
}

T_CASE(errors_an_abort_ends_a_wait) {
    subject x = open_subject(22);
    struct calls c = {.x = &x};
    open_streams(&c);
    x.f = open_halves(&x, 30000);
    gpu_batch_put(&x.buffers, &x.b);
    const double start = seconds();
    forward_rank(&x.f.rank[0], &c);
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    T_EQ_INT(mm_cu.cuStreamQuery(c.streams[0]), CUDA_ERROR_NOT_READY);
    megamoe_comm_abort(x.f.rank[1].comm);
    gpu_wait();
    const double waited = seconds() - start;
    T_CHECK_MSG(waited > 0.09 && waited < 5, "%g seconds", waited);
    megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
    T_STATUS(megamoe_workspace_status(x.f.rank[0].workspace, &d), MEGAMOE_EPEER);
    T_EQ_INT(d.phase, MEGAMOE_PHASE_COUNT);
    T_EQ_INT(d.rank, 1);
    T_CONTAINS(d.message, "rank 1 has aborted");
    T_CHECK_MSG(gpu_batch_untouched(&x.buffers), "y was written");
    fleet_close(&x.f);
    close_streams(&c);
    check_halves(&x);
    close_subject(&x);
}

/* ---- layers and workspaces in turn ---- */

T_CASE(errors_two_layers_and_three_workspaces) {
    enum { RANKS = 2, LAYERS = 2, WORKSPACES = 3 };
    subject x = open_subject(30);
    t_random r = t_random_start(31);
    model other = model_open(&recipe, &r);
    x.s.ranks = RANKS;
    x.s.folded = true;
    x.s.pool_rows = TOKENS * TOPK;
    x.f = fleet_open(&x.s);
    megamoe_layer *layers[LAYERS][RANKS];
    megamoe_workspace *workspaces[WORKSPACES][RANKS];
    for (int w = 0; w < WORKSPACES; w++)
        for (int32_t k = 0; k < RANKS; k++) {
            rank *one = &x.f.rank[k];
            layers[0][k] = one->layer;
            workspaces[0][k] = one->workspace;
            if (w == 1)
                T_OK(megamoe_layer_create(one->comm, one->device, other.weights, NULL,
                                          &layers[1][k]));
            if (w)
                T_OK(megamoe_workspace_create(one->comm, one->device, &one->shape, &one->capacity,
                                              &workspaces[w][k]));
        }
    uint16_t *want = gpu_rows(&x.b);
    const setup by_other = {.weights = other.weights};
    gpu_reference(&by_other, &x.b, want);
    for (int i = 0; i < 60; i++) {
        const int layer = (int)t_below(&r, LAYERS), workspace = (int)t_below(&r, WORKSPACES);
        for (int32_t k = 0; k < RANKS; k++) {
            x.f.rank[k].layer = layers[layer][k];
            x.f.rank[k].workspace = workspaces[workspace][k];
            T_OK(megamoe_prewarm(x.f.rank[k].layer, x.f.rank[k].workspace));
        }
        gpu_forward(&x.f, &x.buffers, &x.b, x.y, x.g.stream);
        gpu_same(x.y, layer ? want : x.want, &x.b, "layer %d in workspace %d", layer, workspace);
    }
    for (int32_t k = 0; k < RANKS; k++) {
        x.f.rank[k].layer = layers[0][k];
        x.f.rank[k].workspace = workspaces[0][k];
        megamoe_layer_close(layers[1][k]);
        for (int w = 1; w < WORKSPACES; w++)
            megamoe_workspace_close(workspaces[w][k]);
    }
    fleet_close(&x.f);
    free(want);
    model_close(&other);
    close_subject(&x);
}

T_CASE(errors_more_memory_than_there_is) {
    subject x = open_subject(40);
    x.f = fleet_open(&x.s);
    rank *r = &x.f.rank[0];
    megamoe_capacity capacity = r->capacity;
    capacity.tokens = 1 << 24;
    capacity.pool_rows = INT32_MAX;
    megamoe_workspace *ws;
    T_STATUS(megamoe_workspace_create(r->comm, r->device, &r->shape, &capacity, &ws),
             MEGAMOE_ENOMEM);
    T_CONTAINS(megamoe_last_error(), "bytes");
    check_recovery(&x);
    fleet_close(&x.f);
    close_subject(&x);
}

T_CASE(errors_fewer_thread_blocks_than_ranks) {
    subject x = open_subject(41);
    x.s.ranks = 4;
    x.s.folded = true;
    x.s.pool_rows = TOKENS * TOPK;
    x.f = gpu_fleet_open(&x.s, 3);
    gpu_batch_put(&x.buffers, &x.b);
    gpu_stage(&x.f, &x.buffers, x.g.stream);
    T_STATUS(gpu_compute(&x.f, &x.buffers, x.g.stream), MEGAMOE_EUNSUPPORTED);
    T_CONTAINS(megamoe_last_error(), "max_ctas");
    fleet_close(&x.f);
    x.f = gpu_fleet_open(&x.s, 4);
    check_recovery(&x);
    fleet_close(&x.f);
    close_subject(&x);
}
