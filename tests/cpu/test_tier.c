/* SPDX-License-Identifier: Apache-2.0 */
/* MEGAMOE_CPU caps the tier; the device says which one is in use. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "cpu/device.h"
#include "cpu/kernels.h"
#include "t.h"

static const char *const words[MM_TIERS] = {"scalar", "avx2", "avx512"};

static mm_tier best(void) {
    mm_tier tier = MM_TIER_SCALAR;
    for (mm_tier t = MM_TIER_SCALAR; t < MM_TIERS; t++)
        if (mm_tier_runs(t))
            tier = t;
    return tier;
}

T_CASE(detects_the_best) {
    mm_tier tier;
    unsetenv("MEGAMOE_CPU");
    T_OK(mm_tier_detect(&tier));
    T_EQ_INT(tier, best());
    setenv("MEGAMOE_CPU", "", 1);
    T_OK(mm_tier_detect(&tier));
    T_EQ_INT(tier, best());
}

T_CASE(runs_all_below_the_best) {
    for (mm_tier t = MM_TIER_SCALAR; t < MM_TIERS; t++)
        T_EQ_INT(mm_tier_runs(t) != 0, t <= best());
}

T_CASE(caps) {
    for (mm_tier cap = MM_TIER_SCALAR; cap < MM_TIERS; cap++) {
        mm_tier tier;
        setenv("MEGAMOE_CPU", words[cap], 1);
        T_OK(mm_tier_detect(&tier));
        T_EQ_INT(tier, cap < best() ? cap : best());
    }
}

T_CASE(refuses_unknown_words) {
    static const char *const wrong[] = {"AVX2", "sse", "avx5122", "avx", " avx2"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        mm_tier tier;
        setenv("MEGAMOE_CPU", wrong[i], 1);
        T_STATUS(mm_tier_detect(&tier), MEGAMOE_EINVAL);
        T_CONTAINS(megamoe_last_error(), wrong[i]);
        T_CONTAINS(megamoe_last_error(), "scalar, avx2 or avx512");
        megamoe_device *device;
        T_STATUS(mm_cpu_open(&(megamoe_device_options){0}, &device), MEGAMOE_EINVAL);
        T_CHECK(device == NULL);
    }
}

T_CASE(tables_are_whole_and_their_own) {
    for (mm_tier t = MM_TIER_SCALAR; t <= best(); t++) {
        const mm_kernels *kernels = mm_kernels_of(t);
        T_EQ_STR(kernels->tier, words[t]);
#define X(name, arguments) T_CHECK_MSG(kernels->name, "%s has no " #name, words[t]);
        MM_KERNEL_LIST(X)
#undef X
        if (t > MM_TIER_SCALAR)
            T_CHECK(kernels->dot_mxfp4 != mm_kernels_of(MM_TIER_SCALAR)->dot_mxfp4);
    }
}
