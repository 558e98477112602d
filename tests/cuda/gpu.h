/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GPU that tests use, or the reason to skip them, and fleets (tests/layer/fleet.h) on it.
 * Functions that fail end the case, so they are called in its own thread.
 */
#ifndef TESTS_CUDA_GPU_H
#define TESTS_CUDA_GPU_H

#include "layer/layer.h" /* before fleet.h, whose type `rank` its parameters would shadow */

#include "../layer/fleet.h"
#include "cuda/driver.h"
#include "megamoe/megamoe.h"
#include "t.h"

enum {
    GPU_TILES_MAX = 16,
    GPU_DEADLINE_MS = 4000 /* a forward that hangs is not waited for as long as users do */
};

/*
 * Opens cuda:0 for a case; the case is skipped where there is none. With MEGAMOE_TEST_GPU set in
 * the environment its absence is a failure. The caller closes.
 */
megamoe_device *gpu_open(const megamoe_device_options *options);

/* A GPU whose context is current in the case's thread, and a stream of its own. */
typedef struct gpu {
    megamoe_device *device;
    CUstream stream;
    CUcontext before;
} gpu;

/* First of all in a case, so that nothing is computed where the case is skipped. */
gpu gpu_start(void);
void gpu_end(gpu *g);

/* name_image(): the cubin of name.cu, a kernel of the tests; NULL in a build without nvcc. */
#ifdef GPU_CUBINS
#define GPU_CUBIN(name)                                                                            \
    __asm__(".pushsection .rodata\n"                                                               \
            ".balign 64\n" #name "_cubin:\n"                                                       \
            ".incbin \"" GPU_CUBINS "/" #name ".cubin\"\n"                                         \
            ".byte 0\n"                                                                            \
            ".popsection\n");                                                                      \
    extern const uint8_t name##_cubin[] __attribute__((visibility("hidden")));                     \
    static const uint8_t *name##_image(void) {                                                     \
        return name##_cubin;                                                                       \
    }
#else
#define GPU_CUBIN(name)                                                                            \
    static const uint8_t *name##_image(void) {                                                     \
        return NULL;                                                                               \
    }
#endif

/* ---- Memory ---- */

void gpu_check(CUresult result, const char *what);

/* Filled with 0xFF. */
void *gpu_memory(size_t bytes);
/* Memory with that content. */
void *gpu_copy(const void *from, size_t bytes);
void gpu_free(void *memory);
/* All three wait until they have happened, and for no stream. */
void gpu_write(void *to, const void *from, size_t bytes);
void gpu_read(void *to, const void *from, size_t bytes);
void gpu_fill(void *to, uint8_t byte, size_t bytes);
/* Waits for all streams. */
void gpu_wait(void);

/* ---- Batches ---- */

/* A batch and its result on the GPU; rows have gaps between them. */
typedef struct gpu_batch {
    int64_t room, tokens;
    int32_t hidden, topk;
    void *x, *ids, *weights, *y;
} gpu_batch;

gpu_batch gpu_batch_open(int64_t room, int32_t hidden, int32_t topk);
void gpu_batch_close(gpu_batch *b);
/* Copies a batch of at most `room` tokens and fills y with 0xFF. */
void gpu_batch_put(gpu_batch *b, const batch *from);
/* y of the tokens from `first` on, as a view. */
megamoe_view gpu_batch_y(const gpu_batch *b, int64_t first, int64_t tokens);
/* Waits for the GPU; what lies around the tokens' rows must still be 0xFF. */
void gpu_batch_result(const gpu_batch *b, uint16_t *y);
/* y is as gpu_batch_put left it. */
bool gpu_batch_untouched(const gpu_batch *b);

/* ---- Fleets ---- */

/* As fleet_open, with that many thread blocks for each rank's device. */
fleet gpu_fleet_open(const setup *s, int32_t max_ctas);

/* Every rank stages its share, or all ranks compute. Fleets of one rank, and folded ones. */
void gpu_stage(fleet *f, const gpu_batch *b, CUstream stream);
megamoe_status gpu_compute(fleet *f, const gpu_batch *b, CUstream stream);
/* Both, and no rank may have found an error. */
void gpu_forward(fleet *f, gpu_batch *g, const batch *b, uint16_t *y, CUstream stream);

/* The widths of token tiles that a layer's kernels have, ascending; returns how many. */
int32_t gpu_tiles(const fleet *f, int32_t tiles[GPU_TILES_MAX]);
/* Forces a width; 0: the plan's choice. */
void gpu_force_tile(fleet *f, int32_t tile);

/* ---- Results ---- */

/* What the scalar reference with the tensor core's sum makes of a batch; rows without gaps. */
void gpu_reference(const setup *s, const batch *b, uint16_t *y);
/* Of a batch after batch_repeat. */
void gpu_reference_repeated(const setup *s, const batch *b, int64_t distinct, uint16_t *y);

/* Memory for [tokens][hidden] BF16. The caller frees. */
uint16_t *gpu_rows(const batch *b);

/*
 * The bits of y are those of `want`, any NaN being any NaN. A failure says how many elements of how
 * many tokens differ and shows the first.
 */
bool gpu_same(const uint16_t *y, const uint16_t *want, const batch *b, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#endif
