/* SPDX-License-Identifier: Apache-2.0 */
/* The ceilings of a device: memory read bandwidth and the rate of the dots' multiply-add. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "base/memory.h"
#include "cpu/device.h"
#include "cpu/kernels.h"

/* Each measurement is repeated; its median counts, as medians count in benchmarks. */
enum { PASSES = 9 };
static const double seconds_of_pass = 0.01;

/* Read: every thread streams through a part of its own, together far beyond any cache, in 1, 2 and
 * 4 places side by side; the fastest counts. */
static const size_t bytes_per_thread = (size_t)64 << 20;
static const size_t least_bytes = (size_t)256 << 20, most_bytes = (size_t)4 << 30;

enum { LINE_WORDS = MM_CACHE_LINE / sizeof(uint64_t), MOST_STREAMS = 4 };

struct reading {
    uint64_t *buffer;
    size_t words;   /* of one thread, whole lines in each stream */
    size_t streams; /* places at which a thread reads side by side */
};

/* Untouched pages would all be one page of zeros; the thread that reads a page places it. */
static void touch_part(void *argument, int32_t thread, int32_t threads) {
    (void)threads;
    const struct reading *reading = argument;
    memset(reading->buffer + (size_t)thread * reading->words, 1, reading->words * sizeof(uint64_t));
}

static void read_part(void *argument, int32_t thread, int32_t threads) {
    (void)threads;
    const struct reading *reading = argument;
    const uint64_t *part = reading->buffer + (size_t)thread * reading->words;
    const size_t stream_words = reading->words / reading->streams;
    uint64_t sum[LINE_WORDS] = {0};
    for (size_t i = 0; i < stream_words; i += LINE_WORDS)
        for (size_t s = 0; s < reading->streams; s++)
            for (size_t w = 0; w < LINE_WORDS; w++)
                sum[w] += part[s * stream_words + i + w];
    for (size_t w = 1; w < LINE_WORDS; w++)
        sum[0] += sum[w];
    volatile uint64_t keep = sum[0];
    (void)keep;
}

struct multiplying {
    void (*peak)(int64_t rounds, double *flops);
    int64_t rounds;
    double flops; /* of one thread; every thread does as many */
};

static void multiply(void *argument, int32_t thread, int32_t threads) {
    (void)threads;
    struct multiplying *multiplying = argument;
    double flops;
    multiplying->peak(multiplying->rounds, &flops);
    if (thread == 0)
        multiplying->flops = flops;
}

static double seconds_of(mm_pool *pool, mm_pool_fn fn, void *argument) {
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    mm_pool_run(pool, fn, argument);
    clock_gettime(CLOCK_MONOTONIC, &end);
    return (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_seconds(mm_pool *pool, mm_pool_fn fn, void *argument) {
    double seconds[PASSES];
    for (int i = 0; i < PASSES; i++)
        seconds[i] = seconds_of(pool, fn, argument);
    qsort(seconds, PASSES, sizeof *seconds, compare);
    return seconds[PASSES / 2];
}

static megamoe_status measure_read(mm_pool *pool, double *gbs) {
    const size_t threads = (size_t)mm_pool_threads(pool);
    size_t bytes = threads * bytes_per_thread;
    bytes = bytes < least_bytes ? least_bytes : bytes > most_bytes ? most_bytes : bytes;
    const size_t line_words = MOST_STREAMS * LINE_WORDS;
    struct reading reading = {.words =
                                  bytes / threads / sizeof(uint64_t) / line_words * line_words};
    reading.buffer = mm_reserve(bytes);
    if (!reading.buffer)
        return mm_fail(MEGAMOE_ENOMEM, "measuring the read bandwidth: no %zu bytes", bytes);
    mm_advise_huge(reading.buffer, bytes);
    mm_pool_run(pool, touch_part, &reading);
    const double read = (double)(reading.words * sizeof(uint64_t) * threads);
    double best = 0.0;
    for (reading.streams = 1; reading.streams <= MOST_STREAMS; reading.streams *= 2) {
        const double rate = read / median_seconds(pool, read_part, &reading);
        best = rate > best ? rate : best;
    }
    *gbs = 1e-9 * best;
    mm_unreserve(reading.buffer, bytes);
    return MEGAMOE_OK;
}

static double measure_dot(mm_pool *pool, void (*peak)(int64_t rounds, double *flops)) {
    struct multiplying multiplying = {.peak = peak, .rounds = 1000};
    while (seconds_of(pool, multiply, &multiplying) < seconds_of_pass)
        multiplying.rounds *= 2;
    const double seconds = median_seconds(pool, multiply, &multiplying);
    return 1e-9 * multiplying.flops * mm_pool_threads(pool) / seconds;
}

megamoe_status mm_cpu_measure(megamoe_device *device, megamoe_device_ceilings *ceilings) {
    MM_TRY(measure_read(device->pool, &ceilings->read_gbs));
    ceilings->dot_gflops = measure_dot(device->pool, device->kernels->dot_peak);
    ceilings->int8_gops = measure_dot(device->pool, device->kernels->dot_peak_int8);
    return MEGAMOE_OK;
}
