/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every function of the driver, for those that fake_driver.c does not define. They fail and look at
 * no argument.
 */
#include "cuda/driver.h"

#define X(name, symbol, arguments)                                                                 \
    CUresult fake_##name(void) __asm__(symbol) __attribute__((weak));                              \
    CUresult fake_##name(void) {                                                                   \
        return CUDA_ERROR_NOT_FOUND;                                                               \
    }
MM_CUDA_FUNCTIONS(X)
#undef X
