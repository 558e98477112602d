/* SPDX-License-Identifier: Apache-2.0 */
/* Token tiles of the forward kernels, and which suits a batch. Needs no device. */
#ifndef MM_CUDA_TILES_H
#define MM_CUDA_TILES_H

#include <stdbool.h>

#include "plan/plan.h"
#include "weights/cuda_layout.h"

enum { MM_CUDA_TILES_MAX = 16 }; /* widths of one format and accumulation */

/* Ascending, with their costs. Returns how many. */
int32_t mm_cuda_tiles(mm_cuda_format format, bool promote, mm_plan_tile tiles[MM_CUDA_TILES_MAX]);

/* The tile for a batch of which each expert receives so many routes (mm_plan_routes). */
int32_t mm_cuda_token_tile(mm_cuda_format format, bool promote, double routes);

#endif
