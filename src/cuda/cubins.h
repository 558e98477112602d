/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels that were compiled when the library was built, as images for the driver. */
#ifndef MM_CUDA_CUBINS_H
#define MM_CUDA_CUBINS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "weights/cuda_layout.h"

typedef struct mm_cubin {
    const char *name; /* "forward_mxfp4_n8", "forward_nvfp4_exact_n16_promote", "stage", ... */
    const uint8_t *data, *end;
} mm_cubin;

/* Empty in a build without nvcc. */
extern const mm_cubin mm_cubins[];
extern const int32_t mm_cubin_count;

/* What made the cubins, as the driver numbers versions (13000 for 13.0); 0 without cubins. */
extern const int32_t mm_cubin_cuda_version;

/* NULL if there is none of that name. */
const mm_cubin *mm_cubin_find(const char *name);

/* The forward kernel, by format, tokens in a tile and how it accumulates. Any build has this list.
 */
typedef struct mm_forward_variant {
    const char *cubin;
    mm_cuda_format format;
    int32_t tile_tokens;
    bool promote;
} mm_forward_variant;

/* Tiles of one format and accumulation stand together and ascend. */
extern const mm_forward_variant mm_forward_variants[];
extern const int32_t mm_forward_variant_count;

/* NULL if it is not built in that width. */
const mm_forward_variant *mm_forward_variant_find(mm_cuda_format format, int32_t tile_tokens,
                                                  bool promote);

#endif
