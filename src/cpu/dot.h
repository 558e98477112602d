/* SPDX-License-Identifier: Apache-2.0 */
/* What the vector tiers' dot kernels share: loops without a loop, and the strides of a tile. */
#ifndef MM_CPU_DOT_H
#define MM_CPU_DOT_H

#include <stdint.h>

#include "weights/cpu_layout.h"

/* Bodies that are instantiated for constant arguments. */
#define INLINE static inline __attribute__((always_inline))

/* A loop to a constant bound, unrolled so that arrays indexed by it live in registers. */
#if defined(__clang__)
#define FOR_UNROLLED(i, n) _Pragma("clang loop unroll(full)") for (int i = 0; i < (n); i++)
#else
#define FOR_UNROLLED(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)
#endif

/* Columns that share one scale. */
INLINE int32_t group_k(mm_tile_format format) {
    return format == MM_TILE_NVFP4 ? 16 : 32;
}

/* Of a chunk. */
INLINE int32_t scale_bytes(mm_tile_format format) {
    return format == MM_TILE_MXFP4   ? MM_MXFP4_SCALE_BYTES
           : format == MM_TILE_NVFP4 ? MM_NVFP4_SCALE_BYTES
                                     : 0;
}

/* Of MM_SLICE_K columns. */
INLINE int32_t slice_bytes(mm_tile_format format) {
    return format == MM_TILE_E4M3 ? 2 * MM_SLICE_BYTES : MM_SLICE_BYTES;
}

#endif
