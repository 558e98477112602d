/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include "megamoe/mpi.h"

#include <limits.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { CODE_LATE = -1, CODE_MEMORY = -2, CODE_LARGE = -3, NAP_NS = 50000, SPINS = 2000 };

typedef struct buffer {
    unsigned char *data;
    size_t bytes;
} buffer;

/*
 * What an open collective reads and writes stays until it has ended; where it does not end in time,
 * for ever (`open`). So it has buffers of its own.
 */
typedef struct messenger {
    MPI_Comm callers, own;
    MPI_Request request;
    bool open;
    bool duplicated;
    int size;
    buffer sent, received;
    int *numbers; /* [4][size]: bytes and offsets, sent and received */
} messenger;

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
static int await(messenger *m, int64_t deadline) {
    int done = 0;
    m->open = true;
    for (int spins = 0; !done; spins++) {
        const int error = MPI_Test(&m->request, &done, MPI_STATUS_IGNORE);
        if (error != MPI_SUCCESS)
            return class_of(error);
        if (done || spins < SPINS)
            continue;
        if (now_ms() > deadline)
            return CODE_LATE;
        nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
    }
    m->open = false;
    return 0;
}

static int await_if(messenger *m, int error, int64_t deadline) {
    return error != MPI_SUCCESS ? class_of(error) : await(m, deadline);
}

/* With a communicator of its own nothing of the caller's is mixed up with this. */
static int prepare(messenger *m, int64_t deadline) {
    if (m->duplicated)
        return 0;
    const int error = await_if(m, MPI_Comm_idup(m->callers, &m->own, &m->request), deadline);
    if (error != 0)
        return error;
    m->duplicated = true;
    (void)MPI_Comm_set_errhandler(m->own, MPI_ERRORS_RETURN);
    m->numbers = malloc(4 * (size_t)m->size * sizeof *m->numbers);
    return m->numbers == NULL ? CODE_MEMORY : 0;
}

static bool grow(buffer *b, size_t bytes) {
    if (bytes <= b->bytes)
        return true;
    free(b->data);
    b->data = malloc(bytes);
    b->bytes = b->data != NULL ? bytes : 0;
    return b->data != NULL;
}

static int allgather(void *user, const void *mine, void *all, size_t bytes, int32_t timeout_ms) {
    messenger *m = user;
    const int64_t deadline = now_ms() + timeout_ms;
    const size_t total = (size_t)m->size * bytes;
    int error = prepare(m, deadline);
    if (error != 0)
        return error;
    if (total > INT_MAX)
        return CODE_LARGE;
    if (!grow(&m->sent, bytes) || !grow(&m->received, total))
        return CODE_MEMORY;
    memcpy(m->sent.data, mine, bytes);
    error = await_if(m,
                     MPI_Iallgather(m->sent.data, (int)bytes, MPI_BYTE, m->received.data,
                                    (int)bytes, MPI_BYTE, m->own, &m->request),
                     deadline);
    if (error == 0)
        memcpy(all, m->received.data, total);
    return error;
}

/* Parts one after the other: their total, or more than INT_MAX where MPI cannot count them. */
static size_t count(const size_t *bytes, int size, int *counts, int *offsets) {
    size_t total = 0;
    for (int r = 0; r < size && total <= INT_MAX; r++) {
        offsets[r] = (int)total;
        total += bytes[r];
        counts[r] = (int)bytes[r];
    }
    return total;
}

static int alltoallv(void *user, const void *send, const size_t *send_bytes,
                     const size_t *send_offsets, void *receive, const size_t *receive_bytes,
                     const size_t *receive_offsets, int32_t timeout_ms) {
    messenger *m = user;
    int *sent = m->numbers, *sent_at = sent + m->size;
    int *received = sent_at + m->size, *received_at = received + m->size;
    const size_t sent_total = count(send_bytes, m->size, sent, sent_at);
    const size_t received_total = count(receive_bytes, m->size, received, received_at);
    if (sent_total > INT_MAX || received_total > INT_MAX)
        return CODE_LARGE;
    if (!grow(&m->sent, sent_total) || !grow(&m->received, received_total))
        return CODE_MEMORY;
    for (int r = 0; r < m->size && sent_total > 0; r++)
        memcpy(m->sent.data + sent_at[r], (const char *)send + send_offsets[r], send_bytes[r]);
    const int error =
        await_if(m,
                 MPI_Ialltoallv(m->sent.data, sent, sent_at, MPI_BYTE, m->received.data, received,
                                received_at, MPI_BYTE, m->own, &m->request),
                 now_ms() + timeout_ms);
    for (int r = 0; r < m->size && error == 0 && received_total > 0; r++)
        memcpy((char *)receive + receive_offsets[r], m->received.data + received_at[r],
               receive_bytes[r]);
    return error;
}

static void close_messenger(void *user) {
    messenger *m = user;
    if (m->open)
        return;
    if (m->duplicated)
        (void)MPI_Comm_free(&m->own);
    free(m->sent.data);
    free(m->received.data);
    free(m->numbers);
    free(m);
}

static messenger *open_messenger(MPI_Comm mpi, int *rank) {
    messenger *m = calloc(1, sizeof *m);
    if (m == NULL)
        return NULL;
    m->callers = mpi;
    (void)MPI_Comm_rank(mpi, rank);
    (void)MPI_Comm_size(mpi, &m->size);
    return m;
}

megamoe_status megamoe_comm_mpi(MPI_Comm mpi, const megamoe_comm_options *options,
                                megamoe_comm **comm) {
    int rank = 0;
    messenger *m = open_messenger(mpi, &rank);
    if (m == NULL)
        return MEGAMOE_ENOMEM;
    megamoe_bootstrap bootstrap = MEGAMOE_INIT(megamoe_bootstrap);
    bootstrap.rank = rank;
    bootstrap.size = m->size;
    bootstrap.creation_deadline_ms = options != NULL ? options->creation_deadline_ms : 0;
    bootstrap.user = m;
    bootstrap.allgather = allgather;
    bootstrap.close = close_messenger;
    return megamoe_comm_custom(&bootstrap, comm);
}

megamoe_status megamoe_comm_mpi_hosts(MPI_Comm mpi, const megamoe_comm_options *options,
                                      megamoe_comm **comm) {
    int rank = 0;
    messenger *m = open_messenger(mpi, &rank);
    if (m == NULL)
        return MEGAMOE_ENOMEM;
    megamoe_transport transport = MEGAMOE_INIT(megamoe_transport);
    transport.rank = rank;
    transport.size = m->size;
    transport.creation_deadline_ms = options != NULL ? options->creation_deadline_ms : 0;
    transport.user = m;
    transport.allgather = allgather;
    transport.alltoallv = alltoallv;
    transport.close = close_messenger;
    return megamoe_comm_transport(&transport, comm);
}
