/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Under mpirun: ranks that MPI has brought together give the bits of one rank. With the argument
 * "apart" every second one moves to a network namespace of its own, which makes it another host for
 * the library, though not for MPI; with "hosts" they are on two hosts already (hosts.sh).
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "megamoe/megamoe.h"
#include "megamoe/mpi.h"

enum { HIDDEN = 64, INTERMEDIATE = 32, EXPERTS = 8, TOPK = 2, TOKENS = 13 };

static uint8_t codes[EXPERTS * 3][HIDDEN * INTERMEDIATE / 2];
static uint8_t scales[EXPERTS * 3][HIDDEN * INTERMEDIATE / 32];
static uint16_t x[TOKENS * HIDDEN];
static int32_t ids[TOKENS * TOPK];
static float weights[TOKENS * TOPK];

#define CHECK(call)                                                                                \
    do {                                                                                           \
        if ((call) != MEGAMOE_OK) {                                                                \
            fprintf(stderr, "%s: %s\n", #call, megamoe_last_error());                              \
            MPI_Abort(MPI_COMM_WORLD, 1);                                                          \
        }                                                                                          \
    } while (0)
#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);          \
            MPI_Abort(MPI_COMM_WORLD, 1);                                                          \
        }                                                                                          \
    } while (0)

static uint32_t draw(void) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 24);
}

/* The same on all ranks. */
static megamoe_weights *make_all(void) {
    megamoe_matrix matrices[EXPERTS * 3];
    for (int m = 0; m < EXPERTS * 3; m++) {
        const size_t in = m % 3 == MEGAMOE_DOWN ? INTERMEDIATE : HIDDEN;
        for (size_t i = 0; i < sizeof codes[m]; i++)
            codes[m][i] = (uint8_t)draw();
        for (size_t i = 0; i < sizeof scales[m]; i++)
            scales[m][i] = (uint8_t)(120 + draw() % 6);
        matrices[m] = (megamoe_matrix){.codes = codes[m],
                                       .codes_stride = in / 2,
                                       .scales = scales[m],
                                       .scales_stride = in / 32};
    }
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        x[i] = (uint16_t)(0x3F00u | (draw() & 0x80FFu));
    for (int i = 0; i < TOKENS * TOPK; i++) {
        ids[i] = (int32_t)(draw() % EXPERTS);
        weights[i] = 0.5f;
    }
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    desc.hidden = HIDDEN;
    desc.intermediate = INTERMEDIATE;
    desc.experts = EXPERTS;
    desc.topk = TOPK;
    desc.format = MEGAMOE_FORMAT_MXFP4;
    megamoe_weights *made;
    CHECK(megamoe_weights_from_tensors(&desc, matrices, &made));
    return made;
}

/* This rank's part of the batch into its rows of y. */
static void compute(megamoe_comm *comm, const megamoe_weights *from, uint16_t *y) {
    const int32_t rank = megamoe_comm_rank(comm), size = megamoe_comm_size(comm);
    const int64_t first = (int64_t)rank * TOKENS / size;
    const int64_t n = (int64_t)(rank + 1) * TOKENS / size - first;
    megamoe_device_options one_thread = MEGAMOE_INIT(megamoe_device_options);
    one_thread.threads = 1;
    one_thread.no_pinning = true;
    megamoe_shape shape = MEGAMOE_INIT(megamoe_shape);
    shape.hidden = HIDDEN;
    shape.intermediate = INTERMEDIATE;
    shape.experts = EXPERTS;
    shape.topk = TOPK;
    megamoe_capacity capacity = MEGAMOE_INIT(megamoe_capacity);
    capacity.tokens = TOKENS;
    const megamoe_view vx = {x + first * HIDDEN, MEGAMOE_DTYPE_BF16, n, 0};
    const megamoe_view vi = {ids + first * TOPK, MEGAMOE_DTYPE_I32, n, 0};
    const megamoe_view vw = {weights + first * TOPK, MEGAMOE_DTYPE_F32, n, 0};
    const megamoe_view vy = {y + first * HIDDEN, MEGAMOE_DTYPE_BF16, n, 0};
    megamoe_device *device;
    megamoe_layer *layer;
    megamoe_workspace *workspace;
    CHECK(megamoe_device_open("cpu", &one_thread, &device));
    CHECK(megamoe_layer_create(comm, device, from, NULL, &layer));
    CHECK(megamoe_workspace_create(comm, device, &shape, &capacity, &workspace));
    CHECK(megamoe_stage(workspace, &vx, &vi, &vw, n, NULL));
    /* Twice: before and after its experts have changed places. */
    CHECK(megamoe_forward(layer, workspace, &vy, NULL));
    CHECK(megamoe_workspace_status(workspace, NULL));
    int32_t reversed[EXPERTS];
    for (int32_t e = 0; e < EXPERTS; e++)
        reversed[e] = EXPERTS - 1 - e;
    megamoe_placement placement = MEGAMOE_INIT(megamoe_placement);
    placement.physical_to_logical = reversed;
    placement.physical_experts = EXPERTS;
    CHECK(megamoe_layer_place(comm, layer, &placement));
    memset(y + first * HIDDEN, 0xFF, (size_t)n * HIDDEN * sizeof *y);
    CHECK(megamoe_forward(layer, workspace, &vy, NULL));
    CHECK(megamoe_workspace_status(workspace, NULL));
    megamoe_workspace_close(workspace);
    megamoe_layer_close(layer);
    megamoe_device_close(device);
    megamoe_comm_close(comm);
}

typedef megamoe_status (*connect_fn)(MPI_Comm mpi, const megamoe_comm_options *options,
                                     megamoe_comm **comm);

static void check_ranks(connect_fn connect, MPI_Comm mpi, const megamoe_weights *from,
                        const uint16_t *want) {
    int rank, size;
    MPI_Comm_rank(mpi, &rank);
    MPI_Comm_size(mpi, &size);
    megamoe_comm *comm;
    CHECK(connect(mpi, NULL, &comm));
    EXPECT(megamoe_comm_rank(comm) == rank && megamoe_comm_size(comm) == size);
    uint16_t y[TOKENS * HIDDEN] = {0};
    compute(comm, from, y);
    const size_t first = (size_t)(rank * TOKENS / size) * HIDDEN;
    const size_t end = (size_t)((rank + 1) * TOKENS / size) * HIDDEN;
    EXPECT(memcmp(y + first, want + first, (end - first) * sizeof *y) == 0);
}

/* Refused where memory would have to be shared, and told so to all. */
static void check_refusal(void) {
    megamoe_comm *comm;
    EXPECT(megamoe_comm_mpi(MPI_COMM_WORLD, NULL, &comm) == MEGAMOE_EUNSUPPORTED);
    EXPECT(strstr(megamoe_last_error(), "on different hosts") != NULL);
}

/* Whether all that should have could move. */
static bool move_apart(int rank) {
    int can = rank % 2 == 0 || unshare(CLONE_NEWNET) == 0, all;
    MPI_Allreduce(&can, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    return all;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    megamoe_weights *from = make_all();
    megamoe_comm *self;
    uint16_t want[TOKENS * HIDDEN];
    CHECK(megamoe_comm_self(&self));
    compute(self, from, want);
    /* The world, and two parts of it in another order. */
    MPI_Comm part;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &part);
    const bool moves = argc > 1 && strcmp(argv[1], "apart") == 0;
    const bool apart = moves || (argc > 1 && strcmp(argv[1], "hosts") == 0);
    if (moves && !move_apart(rank)) {
        puts("skipped: no network namespace can be made here");
        MPI_Finalize();
        return 0;
    }
    static const connect_fn both[] = {megamoe_comm_mpi_hosts, megamoe_comm_mpi};
    if (apart)
        check_refusal();
    for (int i = 0; i < (apart ? 1 : 2); i++) {
        check_ranks(both[i], MPI_COMM_WORLD, from, want);
        check_ranks(both[i], part, from, want);
    }
    MPI_Comm_free(&part);
    megamoe_weights_close(from);
    MPI_Finalize();
    return 0;
}
