/* SPDX-License-Identifier: Apache-2.0 */
/* What the test kernel of reciprocals is given and finds. */
#ifndef TESTS_CUDA_RECIPROCALS_H
#define TESTS_CUDA_RECIPROCALS_H

#include <stdint.h>

enum { RECIPROCALS_THREADS = 256, RECIPROCALS_BLOCKS = (1 << 23) / RECIPROCALS_THREADS };

typedef struct reciprocals_found {
    uint64_t tried, wrong;
    uint32_t last; /* FP32 bits of a y whose reciprocal was wrong */
    uint32_t unused;
} reciprocals_found;

#endif
