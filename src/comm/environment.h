/* SPDX-License-Identifier: Apache-2.0 */
/* What a launcher has told this process through its environment. */
#ifndef MM_COMM_ENVIRONMENT_H
#define MM_COMM_ENVIRONMENT_H

#include "megamoe/comm.h"

/*
 * Fills rank, size, address, port and job; the strings belong to the environment or are static.
 * Returns: MEGAMOE_ENOTFOUND (no launcher's variables), MEGAMOE_EINVAL (one of them is malformed).
 */
MEGAMOE_CHECKED megamoe_status mm_environment_read(megamoe_comm_tcp_options *options);

#endif
