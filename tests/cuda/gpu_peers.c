/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of one process on several GPUs: folded ones, launched together, and threads. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/device.h"
#include "cuda/device.h"
#include "gpu_ranks.h"

enum { TOKENS = 130, TOPK = 3, HIDDEN = 416, BATCHES = 5 };

static const model_recipe recipes[] = {
    {MEGAMOE_FORMAT_MXFP4, HIDDEN, 224, 11, MEGAMOE_DTYPE_BF16, {1.702f, 1, 7}},
    {MEGAMOE_FORMAT_NVFP4, HIDDEN, 224, 11, MEGAMOE_DTYPE_NONE, {1, 0, 10}},
};

/* Skips with fewer than two usable GPUs. */
static void need_two(void) {
    megamoe_device *devices[2] = {NULL, NULL};
    devices[0] = gpu_open(NULL);
    if (megamoe_device_open("cuda:1", NULL, &devices[1]) != MEGAMOE_OK) {
        megamoe_device_close(devices[0]);
        T_SKIP("this needs two GPUs: %s", megamoe_last_error());
    }
    megamoe_device_close(devices[0]);
    megamoe_device_close(devices[1]);
}

typedef struct team {
    int32_t ranks;
    bool folded;
    gpu_rank g[MAX_RANKS];
    const setup *s;
    fleet visits; /* only to run creation in threads */
} team;

static void create_rank(rank *r, void *argument) {
    team *t = argument;
    gpu_rank_create(&t->g[r->rank], t->s);
}

static void team_open(team *t, const setup *s, int32_t ranks, bool folded) {
    *t = (team){.ranks = ranks, .folded = folded, .s = s};
    megamoe_comm *comms[MAX_RANKS];
    T_OK(folded ? megamoe_comm_folded(ranks, comms) : megamoe_comm_threads(ranks, comms));
    t->visits = (fleet){.ranks = ranks, .folded = folded};
    for (int32_t r = 0; r < ranks; r++) {
        t->g[r].r = (rank){.rank = r, .ranks = ranks, .comm = comms[r]};
        t->visits.rank[r].rank = r;
        gpu_rank_open(&t->g[r], s, r % 2, 0);
    }
    fleet_each(&t->visits, create_rank, t);
    for (int32_t r = 0; r < ranks; r++) {
        T_REQUIRE(t->g[r].r.workspace);
        T_OK(megamoe_prewarm(t->g[r].r.layer, t->g[r].r.workspace));
    }
}

static void team_close(team *t) {
    for (int32_t r = 0; r < t->ranks; r++) {
        gpu_check(mm_cu.cuCtxSetCurrent(t->g[r].r.device->cuda->context), "cuCtxSetCurrent");
        megamoe_workspace_close(t->g[r].r.workspace);
        t->g[r].r.workspace = NULL;
    }
    for (int32_t r = 0; r < t->ranks; r++) {
        megamoe_comm *comm = t->g[r].r.comm;
        gpu_rank_close(&t->g[r]);
        megamoe_comm_close(comm);
    }
}

/* One launch on each GPU: ranks on it share a stream. */
static megamoe_status launch(team *t) {
    megamoe_forward_call calls[MAX_RANKS];
    megamoe_view y[MAX_RANKS];
    for (int32_t r = 0; r < t->ranks; r++) {
        gpu_rank *g = &t->g[r];
        y[r] = gpu_batch_y(&g->memory, 0, g->memory.tokens);
        calls[r] = (megamoe_forward_call){g->r.layer, g->r.workspace, &y[r], t->g[r % 2].stream};
    }
    if (t->folded)
        return megamoe_forward_group(calls, t->ranks);
    megamoe_status status = MEGAMOE_OK;
    for (int32_t r = 0; r < t->ranks && status == MEGAMOE_OK; r++)
        status = gpu_rank_forward(&t->g[r]);
    return status;
}

static void forward(team *t, const batch *b, const uint16_t *want, const char *what) {
    uint16_t *y = gpu_rows(b);
    for (int32_t r = 0; r < t->ranks; r++) {
        int64_t first;
        const batch part = share_of(b, r, t->ranks, &first);
        gpu_rank_stage(&t->g[r], &part);
        gpu_rank_wait(&t->g[r]);
    }
    T_OK(launch(t));
    for (int32_t r = 0; r < t->ranks; r++) {
        int64_t first;
        (void)share_of(b, r, t->ranks, &first);
        gpu_rank_result(&t->g[r], y + first * HIDDEN);
        T_OK(megamoe_workspace_status(t->g[r].r.workspace, NULL));
    }
    gpu_same(y, want, b, "%s, %d ranks, %d tokens", what, t->ranks, (int)b->tokens);
    free(y);
}

static void check_team(int recipe, megamoe_input_scale scale, int32_t ranks, bool folded) {
    t_random r = t_random_start(100 + (uint64_t)recipe);
    model m = model_open(&recipes[recipe], &r);
    const setup s = {.weights = m.weights,
                     .deadline_ms = GPU_DEADLINE_MS,
                     .topk = TOPK,
                     .tokens = TOKENS,
                     .pool_rows = (int64_t)TOKENS * TOPK,
                     .input_scale = scale};
    static const int64_t sizes[BATCHES] = {TOKENS, 1, 0, 17, 64};
    team t;
    team_open(&t, &s, ranks, folded);
    for (int i = 0; i < BATCHES; i++) {
        batch b = batch_random(&m, sizes[i], TOPK, (routing)(i % 3), &r);
        batch_mask(&b, 7, &r);
        uint16_t *want = gpu_rows(&b);
        gpu_reference(&s, &b, want);
        for (int again = 0; again < 3; again++)
            forward(&t, &b, want, folded ? "folded" : "threads");
        free(want);
        batch_free(&b);
    }
    team_close(&t);
    model_close(&m);
}

T_CASE(peers_folded_ranks_on_two_gpus) {
    need_two();
    for (int recipe = 0; recipe < 2; recipe++)
        for (int32_t ranks = 2; ranks <= 8; ranks *= 2)
            check_team(recipe, ranks == 4 ? MEGAMOE_SCALE_TOKEN : MEGAMOE_SCALE_BLOCK, ranks, true);
}

T_CASE(peers_threads_on_two_gpus) {
    need_two();
    for (int recipe = 0; recipe < 2; recipe++)
        check_team(recipe, MEGAMOE_SCALE_BLOCK, 2, false);
}

/* A rank whose layer does not fit is an error of all, on both GPUs, and nothing else suffers. */
T_CASE(peers_agree_on_errors) {
    need_two();
    t_random r = t_random_start(120);
    model m = model_open(&recipes[0], &r);
    const setup s = {.weights = m.weights,
                     .deadline_ms = GPU_DEADLINE_MS,
                     .topk = TOPK,
                     .tokens = TOKENS,
                     .pool_rows = (int64_t)TOKENS * TOPK};
    team t;
    team_open(&t, &s, 2, true);
    batch b = batch_random(&m, 40, TOPK, ROUTING_RANDOM, &r);
    uint16_t *want = gpu_rows(&b);
    gpu_reference(&s, &b, want);
    const int32_t good = b.ids[30 * TOPK + 1];
    b.ids[30 * TOPK + 1] = 99;
    for (int32_t k = 0; k < 2; k++) {
        int64_t first;
        const batch part = share_of(&b, k, 2, &first);
        gpu_rank_stage(&t.g[k], &part);
        gpu_rank_wait(&t.g[k]);
    }
    T_OK(launch(&t));
    for (int32_t k = 0; k < 2; k++) {
        megamoe_workspace_detail d = MEGAMOE_INIT(megamoe_workspace_detail);
        gpu_rank_wait(&t.g[k]);
        T_STATUS(megamoe_workspace_status(t.g[k].r.workspace, &d), MEGAMOE_EID);
        T_EQ_INT(d.rank, 1);
        T_EQ_INT(d.token, 10);
        T_EQ_INT(d.value, 99);
    }
    b.ids[30 * TOPK + 1] = good;
    forward(&t, &b, want, "after an error");
    free(want);
    batch_free(&b);
    team_close(&t);
    model_close(&m);
}
