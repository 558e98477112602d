/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/cubins.h"

#include <string.h>

#include "cuda/cubin_list.h"

/* The driver reads a cubin as an ELF file; its structures want no more than 8 bytes of alignment.
 */
#define X(name, path)                                                                              \
    __asm__(".pushsection .rodata\n"                                                               \
            ".balign 64\n"                                                                         \
            ".hidden mm_cubin_" #name "\n"                                                         \
            ".globl mm_cubin_" #name "\n"                                                          \
            "mm_cubin_" #name ":\n"                                                                \
            ".incbin \"" path "\"\n"                                                               \
            ".hidden mm_cubin_end_" #name "\n"                                                     \
            ".globl mm_cubin_end_" #name "\n"                                                      \
            "mm_cubin_end_" #name ":\n"                                                            \
            ".byte 0\n"                                                                            \
            ".popsection\n");                                                                      \
    extern const uint8_t mm_cubin_##name[] __attribute__((visibility("hidden")));                  \
    extern const uint8_t mm_cubin_end_##name[] __attribute__((visibility("hidden")));
MM_CUBIN_LIST(X)
#undef X

const mm_cubin mm_cubins[] = {
#define X(name, path) {#name, mm_cubin_##name, mm_cubin_end_##name},
    MM_CUBIN_LIST(X)
#undef X
        {NULL, NULL, NULL}};

const int32_t mm_cubin_count = sizeof mm_cubins / sizeof *mm_cubins - 1;
const int32_t mm_cubin_cuda_version = MM_CUBIN_CUDA_VERSION;

const mm_cubin *mm_cubin_find(const char *name) {
    for (int32_t i = 0; i < mm_cubin_count; i++)
        if (strcmp(mm_cubins[i].name, name) == 0)
            return &mm_cubins[i];
    return NULL;
}

const mm_forward_variant mm_forward_variants[] = {
#define X(name, format, tile_tokens, promote) {#name, format, tile_tokens, promote},
    MM_FORWARD_LIST(X)
#undef X
};

const int32_t mm_forward_variant_count = sizeof mm_forward_variants / sizeof *mm_forward_variants;

const mm_forward_variant *mm_forward_variant_find(mm_cuda_format format, int32_t tile_tokens,
                                                  bool promote) {
    for (int32_t i = 0; i < mm_forward_variant_count; i++) {
        const mm_forward_variant *v = &mm_forward_variants[i];
        if (v->format == format && v->tile_tokens == tile_tokens && v->promote == promote)
            return v;
    }
    return NULL;
}
