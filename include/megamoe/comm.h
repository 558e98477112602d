/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Communicators: the ranks over which the experts of a layer are spread.
 */
#ifndef MEGAMOE_COMM_H
#define MEGAMOE_COMM_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct megamoe_comm megamoe_comm;

/* One rank. Owns: the caller closes *comm. */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_comm_self(megamoe_comm **comm);

/*
 * `size` ranks in this process, each driven by a thread of its own: comms[r] belongs to the thread
 * of rank r. Collective calls block until every rank has made them.
 * Owns: the caller closes each; the shared part goes with the last.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_comm_threads(int32_t size, megamoe_comm **comms);

/*
 * `size` ranks in this process, all driven by one thread through megamoe_forward_group.
 * Collective calls do not block; what they would have compared is compared by the first group call.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_comm_folded(int32_t size, megamoe_comm **comms);

/*
 * ---- Ranks that are processes ----
 *
 * Each process has one rank. The ranks of a communicator are on one host and share its network
 * namespace; they may start in any order. A communicator is created by all ranks or by none: what
 * fails on one is the error of all. Once it is there the way in which the ranks found each other is
 * not used any more: they have sockets to each other, which have no names, so that nothing is left
 * behind however a process ends.
 *
 * The death of a process is noticed at once: calls that wait for it return MEGAMOE_EPEER and name
 * it, and so do the next calls of ranks that were not in one. A process that is only late or
 * stopped is waited for until a deadline. What is left of a communicator after a death can only be
 * closed; the survivors may create another one.
 *
 * A process has one more thread for each such communicator, which sleeps. A child that was forked
 * must not use one.
 */

typedef struct megamoe_comm_options {
    size_t struct_size;
    /* Of creation, and of each later collective creation over the communicator; 0: 600000. */
    int32_t creation_deadline_ms;
} megamoe_comm_options;

/*
 * A rank as the launcher has set it in the environment:
 *   RANK, WORLD_SIZE     torchrun, megamoe launch, or a loop of the shell; else those of
 *                        Slurm (SLURM_PROCID, SLURM_NTASKS in a step), of Open MPI
 *                        (OMPI_COMM_WORLD_RANK, _SIZE) or of MPICH (PMI_RANK, PMI_SIZE)
 *   MASTER_ADDR          where rank 0 is; 127.0.0.1 if it is not set
 *   MEGAMOE_PORT         at which port rank 0 listens meanwhile; else 1000 more than
 *                        MASTER_PORT (29500 if it is not set), or 1000 less beyond 65535
 *   MEGAMOE_JOB          a word that tells jobs apart; else TORCHELASTIC_RUN_ID,
 *                        SLURM_JOB_ID or PMIX_NAMESPACE
 *
 * Two jobs with one port do not mix, but one of them fails. `options` may be NULL.
 * Owns: the caller closes *comm. Blocks until all ranks have come.
 * Returns: MEGAMOE_ENOTFOUND (no launcher), MEGAMOE_EINVAL (a malformed variable), or as
 * megamoe_comm_tcp.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status
megamoe_comm_from_env(const megamoe_comm_options *options, megamoe_comm **comm);

typedef struct megamoe_comm_tcp_options {
    size_t struct_size;
    int32_t rank, size;
    const char *address; /* name or number of rank 0; NULL: 127.0.0.1. Rank 0 listens there only */
    int32_t port;
    const char *job; /* NULL or a word of at most 63 bytes that all ranks of this job have */
    int32_t creation_deadline_ms; /* as in megamoe_comm_options */
} megamoe_comm_tcp_options;

/*
 * The ranks find each other through a TCP port of rank 0. The network is trusted.
 * Owns: the caller closes *comm. Blocks until all ranks have come.
 * Returns: MEGAMOE_EINVAL (options; ranks that contradict each other, such as two of one number;
 * different versions of the library), MEGAMOE_EUNSUPPORTED (several hosts), MEGAMOE_EIO (the port
 * is taken), MEGAMOE_ETIMEDOUT (naming the ranks that have not come), MEGAMOE_EPEER (another rank
 * failed or ended), MEGAMOE_ENOMEM.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_comm_tcp(const megamoe_comm_tcp_options *options,
                                                            megamoe_comm **comm);

/*
 * The caller's own way of bringing ranks together: of MPI, of a parallel framework, of files. It is
 * used inside megamoe_comm_custom only, by the calling thread.
 */
typedef struct megamoe_bootstrap {
    size_t struct_size;
    int32_t rank, size;
    int32_t creation_deadline_ms; /* as in megamoe_comm_options */
    void *user;
    /*
     * Collective, called twice at most: brings `bytes` (at most 1024, the same number on all ranks)
     * and fills all [size][bytes] in the order of ranks. Blocks, at best no longer than timeout_ms.
     * Returns 0, or another number for a failure, after which it is not called again.
     */
    int (*allgather)(void *user, const void *mine, void *all, size_t bytes, int32_t timeout_ms);
    /* This rank has failed: ends the waits of the others, if it can. May be NULL. */
    void (*abort)(void *user);
    /* Not used any more. May be NULL. */
    void (*close)(void *user);
} megamoe_bootstrap;

/*
 * Owns: `bootstrap` is copied, its `close` is called before this returns; the caller closes *comm.
 * Blocks until all ranks have come.
 * Returns: as megamoe_comm_tcp; MEGAMOE_EPEER where allgather fails.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_comm_custom(const megamoe_bootstrap *bootstrap,
                                                               megamoe_comm **comm);

/*
 * ---- Ranks on several hosts ----
 *
 * Ranks without memory in common, whose messages the caller carries. CPU devices only: tokens are
 * sent to the ranks of their experts and their rows back, in two exchanges for each forward after
 * one of counts. The bits are those of one rank. What the transport does not notice of a death ends
 * with a deadline. megamoe_layer_place sends experts in such exchanges too.
 */
typedef struct megamoe_transport {
    size_t struct_size;
    int32_t rank, size;
    int32_t creation_deadline_ms; /* as in megamoe_comm_options */
    void *user;
    /* As in megamoe_bootstrap, of any number of bytes. */
    int (*allgather)(void *user, const void *mine, void *all, size_t bytes, int32_t timeout_ms);
    /*
     * Collective: send_bytes[r] bytes at send + send_offsets[r] go to rank r, and as many as that
     * rank sends, receive_bytes[r], come from it to receive + receive_offsets[r]. 0 for the rank
     * itself. Blocks, at best no longer than timeout_ms. Returns as allgather.
     */
    int (*alltoallv)(void *user, const void *send, const size_t *send_bytes,
                     const size_t *send_offsets, void *receive, const size_t *receive_bytes,
                     const size_t *receive_offsets, int32_t timeout_ms);
    /* This rank has given up: ends the waits of the others, if it can. Thread: any. May be NULL. */
    void (*abort)(void *user);
    /* Not used any more. May be NULL. */
    void (*close)(void *user);
} megamoe_transport;

/*
 * The functions are called by the threads that make collective calls and compute forwards, one call
 * at a time for each communicator.
 * Owns: `transport` is copied; its `close` is called with the communicator's, or before a failure
 * is returned, unless that is of an argument. The caller closes *comm. Blocks until all ranks have
 * come.
 * Returns: MEGAMOE_EINVAL (options; ranks that contradict each other; different versions of the
 * library), MEGAMOE_EPEER, MEGAMOE_ETIMEDOUT, MEGAMOE_ENOMEM.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status
megamoe_comm_transport(const megamoe_transport *transport, megamoe_comm **comm);

/*
 * Accepts NULL. Close the workspaces of a communicator first. Other ranks that are processes keep
 * what this one has stored; calls that would need more of it return MEGAMOE_EPEER.
 */
MEGAMOE_API void megamoe_comm_close(megamoe_comm *comm);

MEGAMOE_API int32_t megamoe_comm_rank(const megamoe_comm *comm);
MEGAMOE_API int32_t megamoe_comm_size(const megamoe_comm *comm);

/*
 * Collective: brings `bytes`, the same number on all ranks and not 0, and fills all [size][bytes]
 * in the order of ranks. For what ranks tell each other beside forwards; not for folded
 * communicators. Blocks, no longer than the creation deadline. Returns: MEGAMOE_EINVAL (also where
 * ranks bring different numbers of bytes), MEGAMOE_EPEER, MEGAMOE_ETIMEDOUT, MEGAMOE_ENOMEM. After
 * a failure all ranks have aborted.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_comm_allgather(megamoe_comm *comm,
                                                                  const void *mine, void *all,
                                                                  size_t bytes);

/*
 * Tells all ranks to give up: their waits, present and future, return MEGAMOE_EPEER.
 * Thread: any.
 */
MEGAMOE_API void megamoe_comm_abort(megamoe_comm *comm);

#ifdef __cplusplus
}
#endif
#endif
