/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/driver.h"

#include <string.h>

#include "cuda/cubins.h"
#include "t.h"

T_CASE(a_missing_library_is_named) {
    mm_cuda_driver driver;
    T_STATUS(mm_cuda_driver_load("libmegamoe-nothing.so.1", &driver), MEGAMOE_EUNSUPPORTED);
    T_CONTAINS(megamoe_last_error(), "no CUDA driver: libmegamoe-nothing.so.1");
}

T_CASE(a_library_without_the_functions_is_refused) {
    mm_cuda_driver driver;
    T_STATUS(mm_cuda_driver_load("libm.so.6", &driver), MEGAMOE_EUNSUPPORTED);
    T_CONTAINS(megamoe_last_error(), "libm.so.6 lacks cuInit");
}

T_CASE(opening_twice_finds_the_same) {
    const megamoe_status first = mm_cuda_driver_open();
    char message[256];
    strncpy(message, first == MEGAMOE_OK ? "" : megamoe_last_error(), sizeof message - 1);
    message[sizeof message - 1] = '\0';
    T_STATUS(mm_cuda_driver_open(), first);
    if (first != MEGAMOE_OK) {
        T_EQ_STR(megamoe_last_error(), message);
        T_SKIP("%s", message);
    }
    T_CHECK(mm_cu.cuInit != NULL);
}

T_CASE(cubins_are_elf_images) {
    if (mm_cubin_count == 0)
        T_SKIP("this build has no kernels");
    T_CHECK(mm_cubin_cuda_version >= 12000);
    for (int32_t i = 0; i < mm_cubin_count; i++) {
        const mm_cubin *cubin = &mm_cubins[i];
        T_CHECK_MSG(cubin->end - cubin->data > 64, "%s", cubin->name);
        T_EQ_MEM(cubin->data, "\177ELF", 4);
        T_EQ_INT((uintptr_t)cubin->data % 64, 0);
        T_CHECK(mm_cubin_find(cubin->name) == cubin);
    }
    T_CHECK(mm_cubin_find("forward") == NULL);
}

T_CASE(every_variant_has_its_cubin) {
    for (int32_t i = 0; i < mm_forward_variant_count; i++) {
        const mm_forward_variant *v = &mm_forward_variants[i];
        T_CHECK(mm_forward_variant_find(v->format, v->tile_tokens, v->promote) == v);
        T_CHECK_MSG(mm_cubin_count == 0 || mm_cubin_find(v->cubin), "%s", v->cubin);
        const mm_forward_variant *next = v + 1;
        if (i + 1 < mm_forward_variant_count && next->format == v->format &&
            next->promote == v->promote)
            T_CHECK_MSG(next->tile_tokens > v->tile_tokens, "%s", next->cubin);
    }
    T_EQ_STR(mm_forward_variant_find(MM_CUDA_MXFP4, 8, false)->cubin, "forward_mxfp4_n8");
    T_EQ_STR(mm_forward_variant_find(MM_CUDA_NVFP4_EXACT, 16, true)->cubin,
             "forward_nvfp4_exact_n16_promote");
    for (int32_t i = 0; i < 6; i++) /* every format, both ways to sum */
        T_CHECK(mm_forward_variant_find((mm_cuda_format)(i / 2), 16, i % 2 != 0) != NULL);
    T_CHECK(mm_forward_variant_find(MM_CUDA_MXFP4, 12, false) == NULL);
}
