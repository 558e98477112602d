/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MM_WEIGHTS_CPU_PACK_H
#define MM_WEIGHTS_CPU_PACK_H

#include "weights/cpu_layout.h"
#include "weights/inexact.h"

/*
 * mm_cpu_pack_expert that counts groups instead of failing: adds to *inexact. Fails only where a
 * file cannot be read. Thread: any.
 */
MEGAMOE_CHECKED megamoe_status mm_cpu_pack(const megamoe_weights *weights,
                                           const mm_cpu_layout *layout, int32_t expert,
                                           uint8_t *blob, mm_inexact *inexact);

#endif
