/* SPDX-License-Identifier: Apache-2.0 */
/* What src/cuda/driver_list.h and driver.h declare for themselves is what cuda.h declares. */
#include <cuda.h>
#include <stddef.h>
#include <string.h>

#include "cuda/driver_list.h"
#include "t.h"

#define X(name, value) _Static_assert((name) == (value), #name);
MM_CUDA_CONSTANTS(X)
#undef X

#define X(type, member, bytes) _Static_assert(offsetof(type, member) == (bytes), #type);
MM_CUDA_OFFSETS(X)
#undef X
#define X(type, bytes) _Static_assert(sizeof(type) == (bytes), #type);
MM_CUDA_SIZES(X)
#undef X

#define X(name, symbol, arguments)                                                                 \
    _Static_assert(_Generic(&(name), CUresult(*) arguments : 1, default : 0), symbol);
MM_CUDA_FUNCTIONS(X)
#undef X

/* cuda.h renames a function to its newest version with a macro. */
#define TEXT(name) #name
#define X(name, symbol, arguments) {TEXT(name), symbol},
static const struct { const char *newest, *symbol; } symbols[] = {MM_CUDA_FUNCTIONS(X)};
#undef X

T_CASE(symbols_are_the_versions_declared) {
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        /* Its second version, of the same signature, is younger than CUDA 12. */
        if (strcmp(symbols[i].symbol, "cuEventElapsedTime") == 0)
            continue;
        T_EQ_STR(symbols[i].symbol, symbols[i].newest);
    }
}
