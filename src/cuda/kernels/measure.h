/* SPDX-License-Identifier: Apache-2.0 */
/* What measure.cu and the host that launches it agree on. */
#ifndef MM_CUDA_KERNELS_MEASURE_H
#define MM_CUDA_KERNELS_MEASURE_H

enum {
    MM_MEASURE_VECTOR_BYTES = 16,
    MM_MEASURE_READ_THREADS = 512,

    /* The forward's widest tile: two warpgroups of two blocks of 64 rows against 128 columns. */
    MM_MEASURE_MMA_THREADS = 256,
    MM_MEASURE_MMA_BLOCKS = 2,
    MM_MEASURE_MMA_COLUMNS = 128,
    MM_MEASURE_MMA_STAGES = 8,
    MM_MEASURE_MMA_STAGE_BYTES = MM_MEASURE_MMA_COLUMNS * 128, /* a K128 of the columns */
    MM_MEASURE_MMA_SHARED_BYTES = MM_MEASURE_MMA_STAGES * MM_MEASURE_MMA_STAGE_BYTES + 1024,

    /* A round is a sum over this K. */
    MM_MEASURE_MMA_K = 4096,
    MM_MEASURE_MMA_FLOPS = 2 * 256 * MM_MEASURE_MMA_COLUMNS * MM_MEASURE_MMA_K,

    MM_MEASURE_SINK_BYTES = 1024
};

#endif
