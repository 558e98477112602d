/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The dot kernels on one thread, beside the ceilings of the same run.
 *   hot   one tile, again and again from cache: share of the tier's dot peak
 *   cold  tiles from memory: GB/s of weight bytes, share of the read bandwidth
 */
#define _GNU_SOURCE
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/memory.h"
#include "cpu/kernels.h"
#include "megamoe/device.h"

enum { PASSES = 9, EXPERT_TILES = 48 };
static const double seconds_of_pass = 0.02;
static const size_t cold_bytes = (size_t)512 << 20;

static const char *const tier_names[MM_TIERS] = {"scalar", "avx2", "avx512"};

/* A kernel: the tiles that it reads, and its activations. */
typedef struct arm {
    mm_tile_format format;
    bool int8;
    const char *name;
} arm;

static const arm arms[] = {
    {MM_TILE_MXFP4, false, "mxfp4"},     {MM_TILE_NVFP4, false, "nvfp4"},
    {MM_TILE_E4M3, false, "e4m3"},       {MM_TILE_MXFP4, true, "mxfp4-int8"},
    {MM_TILE_NVFP4, true, "nvfp4-int8"},
};
enum { ARMS = sizeof arms / sizeof *arms };

struct setting {
    bool json;
    int32_t k;
    int32_t expert_tiles; /* tiles of one call when cold */
    mm_tier tier;         /* MM_TIERS: all that run */
    bool hot, cold;
    bool first_row; /* of the JSON array */
};

static size_t tile_bytes_of(mm_tile_format format, int32_t k) {
    const size_t chunks = (size_t)mm_ceil_div(k, MM_CHUNK_K);
    switch (format) {
    case MM_TILE_MXFP4:
        return chunks * MM_MXFP4_SCALE_BYTES + (size_t)k * MM_TILE_HALF;
    case MM_TILE_NVFP4:
        return chunks * MM_NVFP4_SCALE_BYTES + (size_t)k * MM_TILE_HALF;
    default:
        return (size_t)k * MM_TILE_ROWS;
    }
}

static void (*kernel_of(mm_tier tier, const arm *a))(const mm_dot *) {
    const mm_kernels *kernels = mm_kernels_of(tier);
    switch (a->format) {
    case MM_TILE_MXFP4:
        return a->int8 ? kernels->dot_mxfp4_int8 : kernels->dot_mxfp4;
    case MM_TILE_NVFP4:
        return a->int8 ? kernels->dot_nvfp4_int8 : kernels->dot_nvfp4;
    default:
        return kernels->dot_e4m3;
    }
}

static void *need(size_t bytes) {
    void *memory = mm_reserve(bytes);
    if (!memory) {
        fprintf(stderr, "kernel_bench: no %zu bytes\n", bytes);
        exit(1);
    }
    return memory;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int n) {
    qsort(values, (size_t)n, sizeof *values, compare);
    return values[n / 2];
}

static megamoe_device_ceilings measure(mm_tier tier) {
    setenv("MEGAMOE_CPU", tier_names[tier], 1);
    const megamoe_device_options options = {.struct_size = sizeof options, .threads = 1};
    megamoe_device_ceilings ceilings = MEGAMOE_INIT(megamoe_device_ceilings);
    megamoe_device *device;
    if (megamoe_device_open("cpu", &options, &device) != MEGAMOE_OK ||
        megamoe_device_measure(device, &ceilings) != MEGAMOE_OK) {
        fprintf(stderr, "kernel_bench: %s\n", megamoe_last_error());
        exit(1);
    }
    megamoe_device_close(device);
    return ceilings;
}

/* Codes, scales in the middle of their range, and small activations. */
static void fill(uint8_t *weights, size_t bytes, uint32_t *x, size_t pairs) {
    uint64_t state = 1;
    for (size_t i = 0; i < bytes; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        weights[i] = (uint8_t)(70 + (state >> 33) % 32);
    }
    for (size_t i = 0; i < pairs; i++)
        x[i] = 0x3F803F00u;
}

static void report(struct setting *setting, const char *what, mm_tier tier, const arm *a,
                   int32_t tokens, double gflops, double gbs, megamoe_device_ceilings ceilings) {
    const double peak = a->int8 ? ceilings.int8_gops : ceilings.dot_gflops;
    if (!setting->json) {
        printf("%-4s  %-6s  %-10s  %6d  %8.1f  %5.1f %%  %6.1f  %5.1f %%\n", what, tier_names[tier],
               a->name, tokens, gflops, 100 * gflops / peak, gbs, 100 * gbs / ceilings.read_gbs);
        fflush(stdout);
        return;
    }
    printf("%s\n  {\"where\": \"%s\", \"tier\": \"%s\", \"format\": \"%s\", \"k\": %d, "
           "\"tokens\": %d, "
           "\"gflops\": %.2f, \"dot_peak_gflops\": %.2f, \"gbs\": %.2f, \"read_gbs\": %.2f}",
           setting->first_row ? "" : ",", what, tier_names[tier], a->name, setting->k, tokens,
           gflops, peak, gbs, ceilings.read_gbs);
    setting->first_row = false;
}

static void bench_hot(struct setting *setting, mm_tier tier, const arm *a) {
    const int32_t k = setting->k;
    const int32_t tiles = 4; /* enough for side by side; in the second-level cache */
    const size_t tile_bytes = tile_bytes_of(a->format, k);
    const size_t pairs = (size_t)k / 2 * MM_PANEL_TOKENS;
    uint8_t *weights = need((size_t)tiles * tile_bytes);
    uint32_t *x = need(pairs * sizeof *x);
    float *chunk_scale = need(pairs * sizeof *chunk_scale);
    float *out = need((size_t)tiles * MM_PANEL_TOKENS * MM_TILE_ROWS * sizeof *out);
    fill(weights, (size_t)tiles * tile_bytes, x, pairs);
    const megamoe_device_ceilings ceilings = measure(tier);
    for (int32_t tokens = 1; tokens <= MM_PANEL_TOKENS; tokens++) {
        const mm_dot dot = {.weights = weights,
                            .tile_bytes = tile_bytes,
                            .tiles = tiles,
                            .k = k,
                            .tokens = tokens,
                            .x = x,
                            .chunk_scale = a->int8 ? chunk_scale : NULL,
                            .out = out};
        double gflops[PASSES];
        const double flops = 2.0 * MM_TILE_ROWS * k * tokens * tiles;
        int64_t calls = 1;
        for (int pass = 0; pass < PASSES; pass++) {
            double seconds;
            for (;;) {
                const double start = now();
                for (int64_t i = 0; i < calls; i++)
                    kernel_of(tier, a)(&dot);
                seconds = now() - start;
                if (seconds >= seconds_of_pass)
                    break;
                calls *= 2;
            }
            gflops[pass] = 1e-9 * flops * (double)calls / seconds;
        }
        const double rate = median(gflops, PASSES);
        const double bytes_per_flop = (double)tile_bytes / (2.0 * MM_TILE_ROWS * k * tokens);
        report(setting, "hot", tier, a, tokens, rate, rate * bytes_per_flop, ceilings);
    }
    mm_unreserve(weights, (size_t)tiles * tile_bytes);
    mm_unreserve(x, pairs * sizeof *x);
    mm_unreserve(chunk_scale, pairs * sizeof *chunk_scale);
    mm_unreserve(out, (size_t)tiles * MM_PANEL_TOKENS * MM_TILE_ROWS * sizeof *out);
}

static void bench_cold(struct setting *setting, mm_tier tier, const arm *a) {
    static const int32_t token_counts[] = {1, 2, 3, 4, 8, 12};
    const int32_t k = setting->k, tiles = setting->expert_tiles;
    const size_t tile_bytes = tile_bytes_of(a->format, k);
    const size_t expert_bytes = (size_t)tiles * tile_bytes;
    const size_t experts = cold_bytes / expert_bytes;
    const size_t pairs = (size_t)k / 2 * MM_PANEL_TOKENS;
    uint8_t *weights = need(experts * expert_bytes);
    uint32_t *x = need(pairs * sizeof *x);
    float *chunk_scale = need(pairs * sizeof *chunk_scale);
    float *out = need((size_t)tiles * MM_PANEL_TOKENS * MM_TILE_ROWS * sizeof *out);
    fill(weights, experts * expert_bytes, x, pairs);
    for (size_t n = 0; n < sizeof token_counts / sizeof *token_counts; n++) {
        const int32_t tokens = token_counts[n];
        const megamoe_device_ceilings ceilings = measure(tier);
        double gbs[PASSES];
        for (int pass = 0; pass < PASSES; pass++) {
            const double start = now();
            for (size_t expert = 0; expert < experts; expert++) {
                const mm_dot dot = {.weights = weights + expert * expert_bytes,
                                    .tile_bytes = tile_bytes,
                                    .tiles = tiles,
                                    .k = k,
                                    .tokens = tokens,
                                    .x = x,
                                    .chunk_scale = a->int8 ? chunk_scale : NULL,
                                    .out = out};
                kernel_of(tier, a)(&dot);
            }
            gbs[pass] = 1e-9 * (double)(experts * expert_bytes) / (now() - start);
        }
        const double rate = median(gbs, PASSES);
        const double flops_per_byte = 2.0 * MM_TILE_ROWS * k * tokens / (double)tile_bytes;
        report(setting, "cold", tier, a, tokens, rate * flops_per_byte, rate, ceilings);
    }
    mm_unreserve(weights, experts * expert_bytes);
    mm_unreserve(x, pairs * sizeof *x);
    mm_unreserve(chunk_scale, pairs * sizeof *chunk_scale);
    mm_unreserve(out, (size_t)tiles * MM_PANEL_TOKENS * MM_TILE_ROWS * sizeof *out);
}

static int usage(void) {
    fprintf(stderr,
            "usage: kernel_bench [--hot] [--cold] [--tier scalar|avx2|avx512] [--k K]\n"
            "                    [--tiles N] [--json]\n"
            "  --k K      columns of a tile, a multiple of %d (2048)\n"
            "  --tiles N  tiles of one call when cold (%d)\n",
            MM_K_MULTIPLE, EXPERT_TILES);
    return 2;
}

int main(int argc, char **argv) {
    static const struct option options[] = {{"hot", no_argument, NULL, 'h'},
                                            {"cold", no_argument, NULL, 'c'},
                                            {"tier", required_argument, NULL, 't'},
                                            {"k", required_argument, NULL, 'k'},
                                            {"tiles", required_argument, NULL, 'n'},
                                            {"json", no_argument, NULL, 'j'},
                                            {0}};
    struct setting setting = {
        .k = 2048, .expert_tiles = EXPERT_TILES, .tier = MM_TIERS, .first_row = true};
    int option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 'h':
            setting.hot = true;
            break;
        case 'c':
            setting.cold = true;
            break;
        case 'j':
            setting.json = true;
            break;
        case 'k':
            setting.k = (int)strtol(optarg, NULL, 10);
            break;
        case 'n':
            setting.expert_tiles = (int)strtol(optarg, NULL, 10);
            break;
        case 't':
            for (setting.tier = MM_TIER_SCALAR; setting.tier < MM_TIERS; setting.tier++)
                if (strcmp(optarg, tier_names[setting.tier]) == 0)
                    break;
            if (setting.tier == MM_TIERS || !mm_tier_runs(setting.tier))
                return usage();
            break;
        default:
            return usage();
        }
    }
    if (optind < argc || setting.k < MM_K_MULTIPLE || setting.k % MM_K_MULTIPLE ||
        setting.expert_tiles < 1)
        return usage();
    if (!setting.hot && !setting.cold)
        setting.hot = setting.cold = true;
    if (setting.json)
        printf("[");
    else
        printf("where tier    weights     tokens  GFLOP/s  of dot    GB/s  of read\n");
    for (mm_tier tier = MM_TIER_SCALAR; tier < MM_TIERS; tier++) {
        if (!mm_tier_runs(tier) || (setting.tier != MM_TIERS && setting.tier != tier))
            continue;
        for (int i = 0; i < ARMS; i++) {
            if (setting.hot)
                bench_hot(&setting, tier, &arms[i]);
            if (setting.cold)
                bench_cold(&setting, tier, &arms[i]);
        }
    }
    if (setting.json)
        printf("\n]\n");
    return 0;
}
