/* SPDX-License-Identifier: Apache-2.0 */
/* What link.cu and the host that launches it agree on. */
#ifndef MM_CUDA_KERNELS_LINK_H
#define MM_CUDA_KERNELS_LINK_H

#include <stdint.h>

enum {
    MM_LINK_THREADS = 512,
    MM_LINK_LINE = 32,         /* words from one flag to the next */
    MM_LINK_BULK_BYTES = 8192, /* of a bulk copy */
    MM_LINK_BULK_DEPTH = 8     /* copies that may be under way */
};

/* Words between two GPUs. The flag of each is written by the other alone. */
typedef struct mm_link_words {
    uint32_t flag[MM_LINK_LINE];
    uint64_t elapsed_ns;
    uint32_t stuck; /* the other did not answer in time */
} mm_link_words;

typedef struct mm_link_exchange {
    mm_link_words *own, *peer;
    uint32_t from, rounds; /* flags count from + 1 .. from + rounds */
    int32_t begins;        /* who stores first; both in a barrier */
    uint64_t deadline_ns;
} mm_link_exchange;

#endif
