/* SPDX-License-Identifier: Apache-2.0 */
/* The bootstrap that a caller brings. */
#ifndef MM_COMM_CUSTOM_H
#define MM_COMM_CUSTOM_H

#include "comm/bootstrap.h"

/* Owns: bootstrap->close calls the caller's and frees. Returns: MEGAMOE_ENOMEM. */
MEGAMOE_CHECKED megamoe_status mm_custom_open(const megamoe_bootstrap *callers,
                                              mm_bootstrap *bootstrap);

#endif
