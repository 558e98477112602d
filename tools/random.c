/* SPDX-License-Identifier: Apache-2.0 */
#include "random.h"

#include <math.h>
#include <pthread.h>

/* Quantiles of the distribution at the middle of QUANTILES equal parts, the negative half last. */
enum { QUANTILES = 8192 };
static float quantiles[QUANTILES];
static pthread_once_t quantiles_once = PTHREAD_ONCE_INIT;

static const uint64_t golden_ratio = 0x9e3779b97f4a7c15;

/* The finalizer of SplitMix64: a bijection in which every bit depends on every other. */
static uint64_t mix(uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9;
    x ^= x >> 27;
    x *= 0x94d049bb133111eb;
    return x ^ x >> 31;
}

uint64_t random_key(uint64_t key, uint64_t part) {
    return mix(mix(key + golden_ratio) ^ (part + 1) * golden_ratio);
}

uint64_t random_bits(uint64_t key, uint64_t index) {
    return mix(key + (index + 1) * golden_ratio);
}

static uint32_t below(uint64_t key, uint64_t index, uint32_t n) {
    return (uint32_t)((random_bits(key, index) >> 32) * n >> 32);
}

uint64_t random_below(uint64_t key, uint64_t index, uint64_t n) {
    return n <= UINT32_MAX ? below(key, index, (uint32_t)n) : random_bits(key, index) % n;
}

double random_uniform(uint64_t key, uint64_t index) {
    return ((double)(random_bits(key, index) >> 12) + 0.5) * 0x1p-52;
}

/* R. W. Floyd's algorithm. */
void random_choose(uint64_t key, int32_t n, int32_t k, int32_t *chosen) {
    for (int32_t i = 0; i < k; i++) {
        const int32_t newest = n - k + i;
        int32_t id = (int32_t)below(key, (uint64_t)i, (uint32_t)newest + 1);
        for (int32_t j = 0; j < i; j++)
            if (chosen[j] == id)
                id = newest;
        chosen[i] = id;
    }
}

void random_shuffle(uint64_t key, int32_t n, int32_t *order) {
    for (int32_t i = 0; i < n; i++) {
        const int32_t at = (int32_t)below(key, (uint64_t)i, (uint32_t)i + 1);
        order[i] = order[at];
        order[at] = i;
    }
}

/* The probability that a value is farther from zero than x. */
static double beyond(double x) {
    return 0.999 * erfc(x / sqrt(2)) + 0.001 * erfc(x / sqrt(2) / 6);
}

static void fill_quantiles(void) {
    static const int half = QUANTILES / 2;
    for (int i = 0; i < half; i++) {
        const double probability = 1 - (i + 0.5) / half;
        double low = 0, high = 64;
        for (int step = 0; step < 40; step++) {
            const double middle = (low + high) / 2;
            if (beyond(middle) > probability)
                low = middle;
            else
                high = middle;
        }
        quantiles[i] = (float)high;
        quantiles[half + i] = -(float)high;
    }
}

void random_normals(uint64_t key, size_t n, float *values) {
    pthread_once(&quantiles_once, fill_quantiles);
    for (size_t i = 0; i < n; i += 4) {
        const uint64_t bits = random_bits(key, i / 4);
        for (size_t j = 0; j < 4 && i + j < n; j++)
            values[i + j] = quantiles[(bits >> 16 * j) % QUANTILES];
    }
}

float random_normal(uint64_t key) {
    float value;
    random_normals(key, 1, &value);
    return value;
}
