/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranks that have found each other through MPI. In a library of its own for each MPI, because their
 * binary interfaces differ: libmegamoe-mpi-openmpi, libmegamoe-mpi-mpich.
 */
#ifndef MEGAMOE_MPI_H
#define MEGAMOE_MPI_H

#include <mpi.h>

#include "megamoe/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Collective over `mpi`: a communicator of megamoe of the same ranks, on one host. MPI, which is
 * initialized, is used inside this call only, by the calling thread and over a duplicate of `mpi`;
 * megamoe_comm says what holds from then on. After a failure with MEGAMOE_ETIMEDOUT or
 * MEGAMOE_EPEER other ranks may not have come, so that MPI has a collective open that does not end:
 * only MPI_Abort is left.
 * `options` may be NULL. Owns: the caller closes *comm. Blocks until all ranks have come.
 * Returns: as megamoe_comm_custom; where MPI fails the message has its error class, and -1 where
 * the creation deadline has passed.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_comm_mpi(MPI_Comm mpi,
                                                            const megamoe_comm_options *options,
                                                            megamoe_comm **comm);

/*
 * Collective over `mpi`: ranks on any hosts, for CPU devices, as megamoe_comm_transport. MPI
 * carries all messages as long as the communicator lives, over a duplicate of `mpi`: it is called
 * by the threads that create workspaces and compute forwards, so several of those need
 * MPI_THREAD_SERIALIZED, and it is finalized after *comm is closed, which is collective too. A rank
 * can send and receive less than 2 GiB in one forward. MPI does not go on after a death: a forward
 * then ends with its deadline, and only MPI_Abort is left.
 * `options` may be NULL. Owns: the caller closes *comm. Blocks until all ranks have come.
 * Returns: as megamoe_comm_transport; messages as of megamoe_comm_mpi.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status
megamoe_comm_mpi_hosts(MPI_Comm mpi, const megamoe_comm_options *options, megamoe_comm **comm);

#ifdef __cplusplus
}
#endif
#endif
