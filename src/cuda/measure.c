/* SPDX-License-Identifier: Apache-2.0 */
/* The ceilings of a GPU: reading and copying its memory, and multiplying on its tensor cores. */
#include <inttypes.h>
#include <stdlib.h>

#include "base/memory.h"
#include "cuda/device.h"
#include "cuda/kernels/measure.h"

/* Each measurement is repeated; its median counts, as medians count in benchmarks. */
enum { PASSES = 9 };

/* Far beyond any L2, so that every pass reads memory. */
static const size_t buffer_bytes = (size_t)4 << 30;

enum { READ_CTAS_PER_MULTIPROCESSOR = 4 };

/* The first launch raises the clocks and tells how many rounds take this long. */
enum { FIRST_MMA_ROUNDS = 64 };
static const float milliseconds_of_mma = 6.0F;

struct run {
    mm_cuda_device *device;
    CUstream stream;
    CUevent start, end;
    CUdeviceptr buffer;
    CUdeviceptr sink; /* what keeps the kernels' work alive */
};

typedef megamoe_status (*launch_fn)(const struct run *run, const void *argument);

static megamoe_status launch(const struct run *run, CUfunction function, int32_t ctas,
                             int32_t threads, int32_t shared_bytes, void **arguments) {
    const CUlaunchConfig config = {
        .gridDimX = (unsigned)ctas,
        .gridDimY = 1,
        .gridDimZ = 1,
        .blockDimX = (unsigned)threads,
        .blockDimY = 1,
        .blockDimZ = 1,
        .sharedMemBytes = (unsigned)shared_bytes,
        .hStream = run->stream,
    };
    MM_CUDA_TRY(mm_cu.cuLaunchKernelEx(&config, function, arguments, NULL),
                "launching a measurement");
    return MEGAMOE_OK;
}

static megamoe_status milliseconds_of(const struct run *run, launch_fn fn, const void *argument,
                                      float *milliseconds) {
    MM_CUDA_TRY(mm_cu.cuEventRecord(run->start, run->stream), "starting a measurement");
    MM_TRY(fn(run, argument));
    MM_CUDA_TRY(mm_cu.cuEventRecord(run->end, run->stream), "ending a measurement");
    MM_CUDA_TRY(mm_cu.cuEventSynchronize(run->end), "measuring");
    MM_CUDA_TRY(mm_cu.cuEventElapsedTime(milliseconds, run->start, run->end), "a measured time");
    return MEGAMOE_OK;
}

static int compare(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static megamoe_status median_milliseconds(const struct run *run, launch_fn fn, const void *argument,
                                          float *milliseconds) {
    float times[PASSES];
    for (int i = 0; i < PASSES; i++)
        MM_TRY(milliseconds_of(run, fn, argument, &times[i]));
    qsort(times, PASSES, sizeof *times, compare);
    *milliseconds = times[PASSES / 2];
    return MEGAMOE_OK;
}

static megamoe_status read_once(const struct run *run, const void *argument) {
    const CUfunction *function = argument;
    CUdeviceptr data = run->buffer, sink = run->sink;
    uint64_t vectors = buffer_bytes / MM_MEASURE_VECTOR_BYTES;
    void *arguments[] = {&data, &vectors, &sink};
    return launch(run, *function, READ_CTAS_PER_MULTIPROCESSOR * run->device->multiprocessors,
                  MM_MEASURE_READ_THREADS, 0, arguments);
}

static megamoe_status copy_once(const struct run *run, const void *argument) {
    (void)argument;
    MM_CUDA_TRY(mm_cu.cuMemcpyDtoDAsync(run->buffer + buffer_bytes / 2, run->buffer,
                                        buffer_bytes / 2, run->stream),
                "measuring the copy bandwidth");
    return MEGAMOE_OK;
}

struct multiplying {
    CUfunction function;
    int32_t rounds;
};

static megamoe_status multiply_once(const struct run *run, const void *argument) {
    const struct multiplying *m = argument;
    int32_t rounds = m->rounds;
    CUdeviceptr sink = run->sink;
    void *arguments[] = {&rounds, &sink};
    return launch(run, m->function, run->device->multiprocessors, MM_MEASURE_MMA_THREADS,
                  MM_MEASURE_MMA_SHARED_BYTES, arguments);
}

static megamoe_status measure_memory(const struct run *run, megamoe_device_ceilings *ceilings) {
    CUfunction read;
    float milliseconds;
    MM_TRY(mm_cuda_function(run->device, "measure", "mm_measure_read", &read));
    MM_TRY(median_milliseconds(run, read_once, &read, &milliseconds));
    ceilings->read_gbs = 1e-6 * (double)buffer_bytes / milliseconds;
    MM_TRY(median_milliseconds(run, copy_once, NULL, &milliseconds));
    ceilings->copy_gbs = 1e-6 * (double)buffer_bytes / milliseconds;
    return MEGAMOE_OK;
}

static megamoe_status measure_mma(const struct run *run, megamoe_device_ceilings *ceilings) {
    struct multiplying m = {.rounds = FIRST_MMA_ROUNDS};
    float milliseconds;
    MM_TRY(mm_cuda_function(run->device, "measure", "mm_measure_mma", &m.function));
    MM_TRY(mm_cuda_allow_shared(run->device, m.function, MM_MEASURE_MMA_SHARED_BYTES));
    MM_TRY(milliseconds_of(run, multiply_once, &m, &milliseconds));
    MM_TRY(milliseconds_of(run, multiply_once, &m, &milliseconds));
    const float rounds = (float)m.rounds * milliseconds_of_mma / milliseconds;
    m.rounds = (int32_t)mm_max(FIRST_MMA_ROUNDS, (int64_t)rounds);
    MM_TRY(median_milliseconds(run, multiply_once, &m, &milliseconds));
    ceilings->mma_tflops =
        1e-9 * MM_MEASURE_MMA_FLOPS * m.rounds * run->device->multiprocessors / milliseconds;
    return MEGAMOE_OK;
}

static megamoe_status open_run(struct run *run) {
    MM_CUDA_TRY(mm_cu.cuStreamCreate(&run->stream, CU_STREAM_NON_BLOCKING), "a CUDA stream");
    MM_CUDA_TRY(mm_cu.cuEventCreate(&run->start, CU_EVENT_DEFAULT), "a CUDA event");
    MM_CUDA_TRY(mm_cu.cuEventCreate(&run->end, CU_EVENT_DEFAULT), "a CUDA event");
    MM_CUDA_TRY(mm_cu.cuMemAlloc(&run->buffer, buffer_bytes),
                "measuring cuda:%" PRId32 ": %zu bytes", run->device->ordinal, buffer_bytes);
    MM_CUDA_TRY(mm_cu.cuMemAlloc(&run->sink, MM_MEASURE_SINK_BYTES),
                "measuring cuda:%" PRId32 ": %d bytes", run->device->ordinal,
                MM_MEASURE_SINK_BYTES);
    MM_CUDA_TRY(mm_cu.cuMemsetD8Async(run->buffer, 0x5A, buffer_bytes, run->stream),
                "filling memory to measure");
    return MEGAMOE_OK;
}

static void close_run(struct run *run) {
    if (run->stream)
        (void)mm_cu.cuStreamSynchronize(run->stream);
    if (run->sink)
        (void)mm_cu.cuMemFree(run->sink);
    if (run->buffer)
        (void)mm_cu.cuMemFree(run->buffer);
    if (run->end)
        (void)mm_cu.cuEventDestroy(run->end);
    if (run->start)
        (void)mm_cu.cuEventDestroy(run->start);
    if (run->stream)
        (void)mm_cu.cuStreamDestroy(run->stream);
}

megamoe_status mm_cuda_measure(mm_cuda_device *device, megamoe_device_ceilings *ceilings) {
    CUcontext previous;
    MM_TRY(mm_cuda_enter(device, &previous));
    struct run run = {.device = device};
    megamoe_status status = open_run(&run);
    if (status == MEGAMOE_OK)
        status = measure_memory(&run, ceilings);
    if (status == MEGAMOE_OK)
        status = measure_mma(&run, ceilings);
    close_run(&run);
    mm_cuda_leave(previous);
    return status;
}
