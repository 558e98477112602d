/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include "megamoe/mpi.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { CODE_LATE = -1, CODE_MEMORY = -2, NAP_NS = 100000 };

/*
 * What an open collective writes into stays until it has ended; where it does not end in time, for
 * ever (`open`).
 */
typedef struct gathering {
    MPI_Comm callers, own;
    MPI_Request request;
    bool open;
    bool duplicated;
    unsigned char *mine, *all;
} gathering;

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int class_of(int error) {
    int class = error;
    (void)MPI_Error_class(error, &class);
    return class;
}

/* MPI has no collectives with a deadline, but some that can be looked at. */
static int await(gathering *g, int64_t deadline) {
    int done = 0;
    g->open = true;
    while (!done) {
        const int error = MPI_Test(&g->request, &done, MPI_STATUS_IGNORE);
        if (error != MPI_SUCCESS)
            return class_of(error);
        if (!done && now_ms() > deadline)
            return CODE_LATE;
        if (!done)
            nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
    }
    g->open = false;
    return 0;
}

/* With a communicator of its own nothing of the caller's is mixed up with this. */
static int duplicate(gathering *g, int64_t deadline) {
    int error = MPI_Comm_idup(g->callers, &g->own, &g->request);
    error = error != MPI_SUCCESS ? class_of(error) : await(g, deadline);
    if (error == 0) {
        g->duplicated = true;
        (void)MPI_Comm_set_errhandler(g->own, MPI_ERRORS_RETURN);
    }
    return error;
}

static int allgather(void *user, const void *mine, void *all, size_t bytes, int32_t timeout_ms) {
    gathering *g = user;
    const int64_t deadline = now_ms() + timeout_ms;
    int size = 0, error = g->duplicated ? 0 : duplicate(g, deadline);
    if (error != 0)
        return error;
    (void)MPI_Comm_size(g->own, &size);
    free(g->mine);
    free(g->all);
    g->mine = malloc(bytes);
    g->all = malloc((size_t)size * bytes);
    if (g->mine == NULL || g->all == NULL)
        return CODE_MEMORY;
    memcpy(g->mine, mine, bytes);
    error = MPI_Iallgather(g->mine, (int)bytes, MPI_BYTE, g->all, (int)bytes, MPI_BYTE, g->own,
                           &g->request);
    error = error != MPI_SUCCESS ? class_of(error) : await(g, deadline);
    if (error == 0)
        memcpy(all, g->all, (size_t)size * bytes);
    return error;
}

static void close_gathering(void *user) {
    gathering *g = user;
    if (g->open)
        return;
    if (g->duplicated)
        (void)MPI_Comm_free(&g->own);
    free(g->mine);
    free(g->all);
    free(g);
}

megamoe_status megamoe_comm_mpi(MPI_Comm mpi, const megamoe_comm_options *options,
                                megamoe_comm **comm) {
    int rank = 0, size = 0;
    (void)MPI_Comm_rank(mpi, &rank);
    (void)MPI_Comm_size(mpi, &size);
    gathering *g = calloc(1, sizeof *g);
    if (g == NULL)
        return MEGAMOE_ENOMEM;
    g->callers = mpi;
    megamoe_bootstrap bootstrap = MEGAMOE_INIT(megamoe_bootstrap);
    bootstrap.rank = rank;
    bootstrap.size = size;
    bootstrap.creation_deadline_ms = options != NULL ? options->creation_deadline_ms : 0;
    bootstrap.user = g;
    bootstrap.allgather = allgather;
    bootstrap.close = close_gathering;
    return megamoe_comm_custom(&bootstrap, comm);
}
