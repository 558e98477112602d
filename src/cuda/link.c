/* SPDX-License-Identifier: Apache-2.0 */
/* What the link between two GPUs can do, measured with memory like that of windows. */
#include <inttypes.h>
#include <stdlib.h>

#include "base/memory.h"
#include "cuda/device.h"
#include "cuda/kernels/link.h"
#include "cuda/shared.h"

enum { PASSES = 9, FLAG_ROUNDS = 2000, WARM_UP_ROUNDS = 200 };

static const size_t push_bytes = (size_t)256 << 20;
static const uint64_t deadline_ns = 2000000000;

/* One of the two GPUs. Its memory holds the words, then what the other pushes. */
typedef struct side {
    mm_cuda_device *device;
    megamoe_comm *comm;
    mm_cuda_shared memory;
    CUdeviceptr memories[2]; /* of both, as this one has them */
    CUstream stream;
    CUevent start, end;
    CUfunction flags, stores, bulk;
} side;

enum { WORDS_BYTES = 4096 };

_Static_assert(sizeof(mm_link_words) <= WORDS_BYTES, "they come first");

static megamoe_status open_current(side *s) {
    MM_CUDA_TRY(mm_cu.cuStreamCreate(&s->stream, CU_STREAM_NON_BLOCKING), "a CUDA stream");
    MM_CUDA_TRY(mm_cu.cuEventCreate(&s->start, CU_EVENT_DEFAULT), "a CUDA event");
    MM_CUDA_TRY(mm_cu.cuEventCreate(&s->end, CU_EVENT_DEFAULT), "a CUDA event");
    MM_TRY(mm_cuda_function(s->device, "link", "mm_link_flags", &s->flags));
    MM_TRY(mm_cuda_function(s->device, "link", "mm_link_push_stores", &s->stores));
    MM_TRY(mm_cuda_function(s->device, "link", "mm_link_push_bulk", &s->bulk));
    MM_TRY(mm_cuda_shared_open(s->comm, s->device, WORDS_BYTES + push_bytes, &s->memory));
    MM_CUDA_TRY(mm_cu.cuMemsetD8Async(s->memory.own, 0, WORDS_BYTES, s->stream),
                "clearing memory to measure a link");
    MM_CUDA_TRY(mm_cu.cuStreamSynchronize(s->stream), "clearing memory to measure a link");
    return MEGAMOE_OK;
}

static void close_current(side *s) {
    if (s->stream)
        (void)mm_cu.cuStreamSynchronize(s->stream);
    mm_cuda_shared_close(&s->memory);
    if (s->end)
        (void)mm_cu.cuEventDestroy(s->end);
    if (s->start)
        (void)mm_cu.cuEventDestroy(s->start);
    if (s->stream)
        (void)mm_cu.cuStreamDestroy(s->stream);
}

/* Runs fn with the side's context current. */
static megamoe_status at(side *s, megamoe_status (*fn)(side *s)) {
    CUcontext previous;
    MM_TRY(mm_cuda_enter(s->device, &previous));
    const megamoe_status status = fn(s);
    mm_cuda_leave(previous);
    return status;
}

static megamoe_status meet(side sides[2]) {
    mm_cuda_shared_card cards[2];
    for (int i = 0; i < 2; i++)
        cards[i] = mm_cuda_shared_card_of(&sides[i].memory, sides[i].device);
    for (int i = 0; i < 2; i++) {
        side *s = &sides[i];
        CUcontext previous;
        MM_TRY(mm_cuda_enter(s->device, &previous));
        const megamoe_status status =
            mm_cuda_shared_meet(s->comm, s->device, &s->memory, cards, s->memories);
        mm_cuda_leave(previous);
        MM_TRY(status);
    }
    return MEGAMOE_OK;
}

static megamoe_status launch_current(const side *s, CUfunction function, int32_t blocks,
                                     int32_t threads, void **arguments) {
    const CUlaunchConfig config = {.gridDimX = (unsigned)blocks,
                                   .gridDimY = 1,
                                   .gridDimZ = 1,
                                   .blockDimX = (unsigned)threads,
                                   .blockDimY = 1,
                                   .blockDimZ = 1,
                                   .hStream = s->stream};
    MM_CUDA_TRY(mm_cu.cuEventRecord(s->start, s->stream), "measuring a link");
    MM_CUDA_TRY(mm_cu.cuLaunchKernelEx(&config, function, arguments, NULL), "measuring a link");
    MM_CUDA_TRY(mm_cu.cuEventRecord(s->end, s->stream), "measuring a link");
    return MEGAMOE_OK;
}

static megamoe_status launch(const side *s, CUfunction function, int32_t blocks, int32_t threads,
                             void **arguments) {
    CUcontext previous;
    MM_TRY(mm_cuda_enter(s->device, &previous));
    const megamoe_status status = launch_current(s, function, blocks, threads, arguments);
    mm_cuda_leave(previous);
    return status;
}

static megamoe_status wait(side *s) {
    MM_CUDA_TRY(mm_cu.cuStreamSynchronize(s->stream), "measuring a link");
    return MEGAMOE_OK;
}

/* ---- flags ---- */

static void *pointer(CUdeviceptr address) {
    return (void *)(uintptr_t)address;
}

static megamoe_status exchange(side sides[2], bool both_begin, uint32_t from, uint32_t rounds) {
    for (int i = 0; i < 2; i++) {
        mm_link_exchange x = {.own = pointer(sides[i].memories[i]),
                              .peer = pointer(sides[i].memories[1 - i]),
                              .from = from,
                              .rounds = rounds,
                              .begins = both_begin || i == 0,
                              .deadline_ns = deadline_ns};
        void *arguments[] = {&x};
        MM_TRY(launch(&sides[i], sides[i].flags, 1, 1, arguments));
    }
    MM_TRY(at(&sides[0], wait));
    return at(&sides[1], wait);
}

static megamoe_status read_words(const side *s, mm_link_words *words) {
    CUcontext previous;
    MM_TRY(mm_cuda_enter(s->device, &previous));
    const CUresult result = mm_cu.cuMemcpyDtoH(words, s->memory.own, sizeof *words);
    mm_cuda_leave(previous);
    MM_CUDA_TRY(result, "reading what a link can do");
    return MEGAMOE_OK;
}

/* The first rounds also wait for the other GPU's launch. */
static megamoe_status measure_flags(side sides[2], bool both_begin, uint32_t *count, double *us) {
    mm_link_words words;
    MM_TRY(exchange(sides, both_begin, *count, WARM_UP_ROUNDS));
    *count += WARM_UP_ROUNDS;
    double best = 0;
    for (int i = 0; i < PASSES; i++) {
        MM_TRY(exchange(sides, both_begin, *count, FLAG_ROUNDS));
        *count += FLAG_ROUNDS;
        MM_TRY(read_words(&sides[1], &words));
        if (words.stuck)
            return mm_fail(MEGAMOE_EDEVICE,
                           "cuda:%" PRId32 " does not see what cuda:%" PRId32 " stores in time",
                           sides[1].device->ordinal, sides[0].device->ordinal);
        const double each = (double)words.elapsed_ns / 1e3 / FLAG_ROUNDS;
        best = i == 0 || each < best ? each : best;
    }
    *us = best;
    return MEGAMOE_OK;
}

/* ---- pushing ---- */

static megamoe_status start_push(const side sides[2], int from, bool bulk, int32_t blocks) {
    const side *s = &sides[from];
    void *to = pointer(s->memories[1 - from] + WORDS_BYTES);
    uint64_t bytes = push_bytes;
    void *arguments[] = {&to, &bytes};
    return launch(s, bulk ? s->bulk : s->stores, blocks, MM_LINK_THREADS, arguments);
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Bandwidth of each direction: the slower of the two where both push at once. */
static megamoe_status measure_push(side sides[2], bool bulk, bool both, int32_t blocks,
                                   double *gbs) {
    double rates[PASSES];
    for (int i = 0; i < PASSES; i++) {
        MM_TRY(start_push(sides, 0, bulk, blocks));
        if (both)
            MM_TRY(start_push(sides, 1, bulk, blocks));
        float longest = 0;
        for (int k = 0; k <= both; k++) {
            float milliseconds = 0;
            MM_TRY(at(&sides[k], wait));
            MM_CUDA_TRY(mm_cu.cuEventElapsedTime(&milliseconds, sides[k].start, sides[k].end),
                        "a measured time");
            longest = milliseconds > longest ? milliseconds : longest;
        }
        rates[i] = 1e-6 * (double)push_bytes / longest;
    }
    qsort(rates, PASSES, sizeof *rates, compare);
    *gbs = rates[PASSES / 2];
    return MEGAMOE_OK;
}

static megamoe_status measure_pushes(side sides[2], megamoe_link_speed *speed) {
    static const int32_t counts[MEGAMOE_LINK_POINTS - 1] = {1, 2, 4, 8, 16, 32, 64};
    const int32_t all =
        (int32_t)mm_min(sides[0].device->multiprocessors, sides[1].device->multiprocessors);
    for (int i = 0; i < MEGAMOE_LINK_POINTS; i++) {
        const int32_t blocks = i < MEGAMOE_LINK_POINTS - 1 ? (int32_t)mm_min(counts[i], all) : all;
        speed->push[i].multiprocessors = blocks;
        MM_TRY(measure_push(sides, true, false, blocks, &speed->push[i].bulk_gbs));
        MM_TRY(measure_push(sides, false, false, blocks, &speed->push[i].store_gbs));
        MM_TRY(measure_push(sides, true, true, blocks, &speed->push[i].bulk_both_gbs));
        MM_TRY(measure_push(sides, false, true, blocks, &speed->push[i].store_both_gbs));
    }
    return MEGAMOE_OK;
}

/* ---- all ---- */

static megamoe_status measure(side sides[2], megamoe_link_speed *speed) {
    uint32_t count = 0;
    MM_TRY(at(&sides[0], open_current));
    MM_TRY(at(&sides[1], open_current));
    MM_TRY(meet(sides));
    MM_TRY(measure_flags(sides, false, &count, &speed->round_trip_us));
    MM_TRY(measure_flags(sides, true, &count, &speed->barrier_us));
    return measure_pushes(sides, speed);
}

megamoe_status mm_cuda_measure_link(mm_cuda_device *a, mm_cuda_device *b,
                                    megamoe_link_speed *speed) {
    megamoe_comm *comms[2];
    MM_TRY(megamoe_comm_folded(2, comms));
    side sides[2] = {{.device = a, .comm = comms[0], .memory.fd = -1},
                     {.device = b, .comm = comms[1], .memory.fd = -1}};
    const megamoe_status status = measure(sides, speed);
    for (int i = 0; i < 2; i++) {
        CUcontext previous;
        if (mm_cuda_enter(sides[i].device, &previous) == MEGAMOE_OK) {
            (void)mm_cu.cuCtxSynchronize(); /* before either one's memory goes */
            mm_cuda_leave(previous);
        }
    }
    for (int i = 0; i < 2; i++) {
        CUcontext previous;
        if (mm_cuda_enter(sides[i].device, &previous) == MEGAMOE_OK) {
            close_current(&sides[i]);
            mm_cuda_leave(previous);
        }
        megamoe_comm_close(comms[i]);
    }
    return status;
}
