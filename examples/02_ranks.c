/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Spreads the experts of a prepared file over ranks, each a thread with its own device, and
 * compares with one rank to the bit: 02_ranks FILE RANKS
 */
#include <megamoe/megamoe.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS_PER_RANK = 3, MAX_RANKS = 16 };

/* What all ranks share. */
static const char *path;
static megamoe_layer_desc desc;
static uint16_t *x, *y;
static int32_t *ids;
static float *weights;

typedef struct rank {
    megamoe_comm *comm;
    megamoe_device *device;
    megamoe_layer *layer;
    megamoe_workspace *workspace;
    int first_token, tokens;
} rank;

static megamoe_status forward(rank *r) {
    const megamoe_device_options one_thread = {
        .struct_size = sizeof one_thread, .threads = 1, .first_core = megamoe_comm_rank(r->comm)};
    const megamoe_shape shape = {.struct_size = sizeof shape,
                                 .hidden = desc.hidden,
                                 .intermediate = desc.intermediate,
                                 .experts = desc.experts,
                                 .topk = desc.topk};
    const megamoe_capacity capacity = {.struct_size = sizeof capacity, .tokens = r->tokens};
    const int64_t first = r->first_token;
    const megamoe_view x_view = {x + first * desc.hidden, MEGAMOE_DTYPE_BF16, r->tokens, 0};
    const megamoe_view y_view = {y + first * desc.hidden, MEGAMOE_DTYPE_BF16, r->tokens, 0};
    const megamoe_view id_view = {ids + first * desc.topk, MEGAMOE_DTYPE_I32, r->tokens, 0};
    const megamoe_view weight_view = {weights + first * desc.topk, MEGAMOE_DTYPE_F32, r->tokens, 0};
    /* The layer reads this rank's experts and needs the file no longer. */
    megamoe_weights *file = NULL;
    megamoe_status status = megamoe_weights_open(path, &file);
    if (status == MEGAMOE_OK)
        status = megamoe_device_open("cpu", &one_thread, &r->device);
    if (status == MEGAMOE_OK)
        status = megamoe_layer_create(r->comm, r->device, file, NULL, &r->layer);
    megamoe_weights_close(file);
    if (status == MEGAMOE_OK)
        status = megamoe_workspace_create(r->comm, r->device, &shape, &capacity, &r->workspace);
    if (status == MEGAMOE_OK)
        status = megamoe_stage(r->workspace, &x_view, &id_view, &weight_view, r->tokens, NULL);
    if (status == MEGAMOE_OK)
        status = megamoe_forward(r->layer, r->workspace, &y_view, NULL);
    if (status == MEGAMOE_OK)
        status = megamoe_workspace_status(r->workspace, NULL);
    return status;
}

static void *run(void *argument) {
    rank *r = argument;
    if (forward(r) == MEGAMOE_OK)
        return r;
    fprintf(stderr, "rank %d: %s\n", megamoe_comm_rank(r->comm), megamoe_last_error());
    megamoe_comm_abort(r->comm); /* or the others would wait for this one */
    return NULL;
}

/* All tokens over `n` ranks, into y. */
static bool run_ranks(int n, int tokens) {
    rank ranks[MAX_RANKS] = {0};
    megamoe_comm *comms[MAX_RANKS] = {0};
    pthread_t threads[MAX_RANKS] = {0};
    if (megamoe_comm_threads(n, comms) != MEGAMOE_OK)
        return false;
    bool good = true;
    for (int i = 0; i < n; i++) {
        ranks[i] = (rank){.comm = comms[i], .first_token = tokens / n * i, .tokens = tokens / n};
        if (pthread_create(&threads[i], NULL, run, &ranks[i]) != 0)
            abort();
    }
    for (int i = 0; i < n; i++) {
        void *result;
        pthread_join(threads[i], &result);
        good = good && result != NULL;
    }
    /* Only now: a rank may still read what another has computed. */
    for (int i = 0; i < n; i++) {
        megamoe_workspace_close(ranks[i].workspace);
        megamoe_layer_close(ranks[i].layer);
        megamoe_device_close(ranks[i].device);
        megamoe_comm_close(comms[i]);
    }
    return good;
}

/* Made-up rows, routes and weights. */
static void fill_batch(int tokens) {
    for (size_t i = 0; i < (size_t)tokens * (size_t)desc.hidden; i++)
        x[i] = (uint16_t)(0x3f00 + i * 7 % 256); /* BF16 from 0.5 up to 2 */
    for (int i = 0; i < tokens * desc.topk; i++) {
        ids[i] = i * 5 % desc.experts;
        weights[i] = 1.0f / (float)desc.topk;
    }
}

int main(int argc, char **argv) {
    const int n = argc == 3 ? (int)strtol(argv[2], NULL, 10) : 0;
    if (n < 1 || n > MAX_RANKS)
        return EXIT_FAILURE;
    path = argv[1];
    megamoe_weights *file;
    desc.struct_size = sizeof desc;
    if (megamoe_weights_open(path, &file) != MEGAMOE_OK ||
        megamoe_weights_describe(file, &desc) != MEGAMOE_OK) {
        fprintf(stderr, "%s\n", megamoe_last_error());
        return EXIT_FAILURE;
    }
    megamoe_weights_close(file);

    const int tokens = n * TOKENS_PER_RANK;
    const size_t row_bytes = (size_t)desc.hidden * sizeof *y, bytes = (size_t)tokens * row_bytes;
    const size_t slots = (size_t)tokens * (size_t)desc.topk;
    uint16_t *alone = malloc(bytes);
    x = malloc(bytes);
    y = malloc(bytes);
    ids = malloc(slots * sizeof *ids);
    weights = malloc(slots * sizeof *weights);
    bool equal = false;
    if (x && y && alone && ids && weights) {
        fill_batch(tokens);
        const bool first = run_ranks(1, tokens);
        memcpy(alone, y, bytes);
        equal = first && run_ranks(n, tokens) && memcmp(alone, y, bytes) == 0;
        printf("%d tokens over %d ranks: %s\n", tokens, n,
               equal ? "equal to one rank, bit for bit" : "failed, or different from one rank");
    }
    free(alone);
    free(x);
    free(y);
    free(ids);
    free(weights);
    return equal ? EXIT_SUCCESS : EXIT_FAILURE;
}
