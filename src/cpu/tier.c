/* SPDX-License-Identifier: Apache-2.0 */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cpu/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

static const mm_kernels kernels[MM_TIERS] = {
#define X(name, arguments) .name = mm_##name##_scalar,
    [MM_TIER_SCALAR] = {.tier = "scalar", MM_KERNEL_LIST(X)},
#undef X
#if defined(__x86_64__)
#define X(name, arguments) .name = mm_##name##_avx2,
    [MM_TIER_AVX2] = {.tier = "avx2", MM_KERNEL_LIST(X)},
#undef X
#define X(name, arguments) .name = mm_##name##_avx512,
    [MM_TIER_AVX512] = {.tier = "avx512", MM_KERNEL_LIST(X)},
#undef X
#endif
};

#if defined(__x86_64__)

/* The registers that the operating system saves: XCR0. */
static unsigned enabled_state(void) {
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static bool has(unsigned word, unsigned bits) {
    return (word & bits) == bits;
}

static mm_tier best_tier(void) {
    const unsigned ymm_state = 0x06, zmm_state = 0xE6;
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) ||
        !has(ecx, bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C))
        return MM_TIER_SCALAR;
    const unsigned state = enabled_state();
    unsigned subleaves;
    if (!has(state, ymm_state) || !__get_cpuid_count(7, 0, &subleaves, &ebx, &ecx, &edx) ||
        !has(ebx, bit_AVX2))
        return MM_TIER_SCALAR;
    if (!has(state, zmm_state) ||
        !has(ebx, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL) ||
        !has(ecx, bit_AVX512VBMI | bit_AVX512VNNI) || subleaves < 1 ||
        !__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !has(eax, bit_AVX512BF16))
        return MM_TIER_AVX2;
    return MM_TIER_AVX512;
}

#else

static mm_tier best_tier(void) {
    return MM_TIER_SCALAR;
}

#endif

int mm_tier_runs(mm_tier tier) {
    return tier <= best_tier();
}

const mm_kernels *mm_kernels_of(mm_tier tier) {
    return &kernels[tier];
}

megamoe_status mm_tier_detect(mm_tier *tier) {
    static const char *const words[MM_TIERS] = {"scalar", "avx2", "avx512"};
    const mm_tier best = best_tier();
    *tier = best;
    const char *cap = getenv("MEGAMOE_CPU");
    if (!cap || !*cap)
        return MEGAMOE_OK;
    for (mm_tier t = MM_TIER_SCALAR; t < MM_TIERS; t++) {
        if (strcmp(cap, words[t]) == 0) {
            *tier = t < best ? t : best;
            return MEGAMOE_OK;
        }
    }
    return mm_fail(MEGAMOE_EINVAL, "MEGAMOE_CPU is '%s': expected scalar, avx2 or avx512", cap);
}
