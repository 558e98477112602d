/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MM_WEIGHTS_CUDA_PACK_H
#define MM_WEIGHTS_CUDA_PACK_H

#include "weights/cuda_layout.h"
#include "weights/inexact.h"

/*
 * Packs one expert of checkpoint weights into a zeroed blob of layout->blob_bytes. A group that
 * E4M3 operands cannot hold exactly, even with its codes doubled or halved, is counted in *inexact
 * and left zero. With `round_outside`, groups below the window are instead given the scale and
 * codes that are nearest to them; what stays counted are groups above the window and those of rows
 * whose exponent is -96, for which there is no bound on the error. Fails only where a file cannot
 * be read. Thread: any.
 */
MEGAMOE_CHECKED megamoe_status mm_cuda_pack(const megamoe_weights *weights,
                                            const mm_cuda_layout *layout, int32_t expert,
                                            uint8_t *blob, bool round_outside, mm_inexact *inexact);

#endif
