/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Message passing between GPUs. Each group of thread blocks of the writing GPU sends messages to a
 * block of the reading one: bytes, then a word that says they are there. Every word of message n is
 * n, so the reader sees when it reads what is not there yet. Messages go round a few slots; the
 * reader tells the writers how far it is.
 */
#ifndef TESTS_CUDA_LITMUS_H
#define TESTS_CUDA_LITMUS_H

#include <stdint.h>

enum {
    LITMUS_GROUPS = 32,
    LITMUS_TEAM = 4, /* blocks that write a message together, where they do */
    LITMUS_SLOTS = 16,
    LITMUS_THREADS = 128,
    LITMUS_BYTES = 8192, /* of a message */
    LITMUS_LINE = 32     /* words from one flag to the next */
};

typedef enum litmus_mode {
    LITMUS_STORES,        /* ordinary stores, then a release for the system */
    LITMUS_BULK,          /* bulk copies, completed, then a release for the system */
    LITMUS_COUNTED,       /* several blocks, counted on their GPU, then a fence and a plain word */
    LITMUS_WRONG_RELAXED, /* as STORES with no release at all */
    LITMUS_WRONG_BLOCK,   /* ... with a release for the thread block */
    LITMUS_WRONG_GPU,     /* ... with a release for the GPU */
    LITMUS_WRONG_BULK,    /* as BULK, but the copies are only read, not completed */
    LITMUS_MODES
} litmus_mode;

/* Memory of the reading GPU. */
typedef struct litmus_inbox {
    uint32_t flags[LITMUS_GROUPS][LITMUS_SLOTS][LITMUS_LINE];
    uint32_t data[LITMUS_GROUPS][LITMUS_SLOTS][LITMUS_BYTES / 4];
    uint64_t wrong; /* messages that were not there when their flag was */
    uint32_t stuck; /* a block gave up waiting */
} litmus_inbox;

/* Memory of the writing GPU. */
typedef struct litmus_outbox {
    uint32_t read[LITMUS_GROUPS][LITMUS_LINE]; /* how far the reader is */
    uint32_t counters[LITMUS_GROUPS][LITMUS_SLOTS];
    uint32_t stuck;
} litmus_outbox;

typedef struct litmus_args {
    int32_t mode, messages; /* of each group */
    litmus_inbox *inbox;
    litmus_outbox *outbox;
    uint64_t deadline_ns;
} litmus_args;

#endif
