/* SPDX-License-Identifier: Apache-2.0 */
#include "base/memory.h"

#include <stdlib.h>
#include <string.h>

#include "t.h"

T_CASE(alloc_is_zeroed_and_aligned) {
    const size_t sizes[] = {0, 1, 63, 64, 65, 4095, 100000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        unsigned char *memory = mm_alloc(sizes[i]);
        T_REQUIRE(memory != NULL);
        T_EQ_INT((uintptr_t)memory % MM_CACHE_LINE, 0);
        for (size_t b = 0; b < sizes[i]; b++)
            if (!T_CHECK(memory[b] == 0))
                break;
        memset(memory, 0xFF, sizes[i]);
        free(memory);
    }
    T_CHECK(mm_alloc(SIZE_MAX) == NULL);
    T_CHECK(mm_alloc(SIZE_MAX - MM_CACHE_LINE + 1) == NULL);
}

T_CASE(reserved_pages_are_zero) {
    const size_t bytes = (size_t)1 << 33;
    unsigned char *memory = mm_reserve(bytes);
    T_REQUIRE(memory != NULL);
    T_EQ_INT(memory[0], 0);
    T_EQ_INT(memory[bytes - 1], 0);
    memory[bytes / 2] = 1;
    mm_unreserve(memory, bytes);
    mm_unreserve(mm_reserve(0), 0);
    mm_unreserve(NULL, 5);
}

T_CASE(rounding_and_checked_arithmetic) {
    T_EQ_INT(mm_round_up(0, 64), 0);
    T_EQ_INT(mm_round_up(1, 64), 64);
    T_EQ_INT(mm_round_up(64, 64), 64);
    T_EQ_INT(mm_round_up(65, 3), 66);
    T_EQ_INT(mm_ceil_div(0, 5), 0);
    T_EQ_INT(mm_ceil_div(10, 5), 2);
    T_EQ_INT(mm_ceil_div(11, 5), 3);
    T_EQ_INT(mm_min(-1, 2), -1);
    T_EQ_INT(mm_max(-1, 2), 2);
    size_t result = 0;
    T_CHECK(mm_mul_size((size_t)1 << 31, (size_t)1 << 31, &result) && result == (size_t)1 << 62);
    T_CHECK(!mm_mul_size((size_t)1 << 32, (size_t)1 << 32, &result));
    T_CHECK(mm_add_size(SIZE_MAX - 1, 1, &result) && result == SIZE_MAX);
    T_CHECK(!mm_add_size(SIZE_MAX, 1, &result));
}

typedef struct small_struct {
    size_t struct_size;
    int32_t a;
    int32_t b;
} small_struct;

typedef struct large_struct {
    size_t struct_size;
    int32_t a;
    int32_t b;
    int64_t c;
    int64_t d;
} large_struct;

T_CASE(an_older_caller_is_extended_with_zeros) {
    const small_struct from = {sizeof from, 1, 2};
    large_struct to;
    memset(&to, 0xFF, sizeof to);
    T_OK(mm_take_struct(&to, sizeof to, &from, "large_struct"));
    T_EQ_INT(to.struct_size, sizeof to);
    T_EQ_INT(to.a, 1);
    T_EQ_INT(to.b, 2);
    T_EQ_INT(to.c, 0);
    T_EQ_INT(to.d, 0);
}

T_CASE(a_newer_caller_is_accepted_while_its_extra_is_zero) {
    large_struct from = {sizeof from, 1, 2, 0, 0};
    small_struct to;
    T_OK(mm_take_struct(&to, sizeof to, &from, "small_struct"));
    T_EQ_INT(to.struct_size, sizeof to);
    T_EQ_INT(to.a, 1);
    T_EQ_INT(to.b, 2);
    from.d = (int64_t)1 << 56; /* the last byte of all */
    T_STATUS(mm_take_struct(&to, sizeof to, &from, "small_struct"), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "small_struct");
}

T_CASE(no_struct_is_all_zero) {
    small_struct to;
    memset(&to, 0xFF, sizeof to);
    T_OK(mm_take_struct(&to, sizeof to, NULL, "small_struct"));
    T_EQ_INT(to.struct_size, sizeof to);
    T_EQ_INT(to.a, 0);
    T_EQ_INT(to.b, 0);
}

T_CASE(a_missing_struct_size_is_refused) {
    small_struct to;
    for (size_t n = 0; n < sizeof n; n++) {
        const small_struct from = {n, 1, 2};
        T_STATUS(mm_take_struct(&to, sizeof to, &from, "small_struct"), MEGAMOE_EINVAL);
        T_CONTAINS(megamoe_last_error(), "MEGAMOE_INIT(small_struct)");
        small_struct given = {n, 1, 2};
        T_STATUS(mm_give_struct(&given, &to, sizeof to, "small_struct"), MEGAMOE_EINVAL);
        T_EQ_INT(given.a, 1);
    }
    const small_struct nothing_else = {sizeof nothing_else.struct_size, 9, 9};
    T_OK(mm_take_struct(&to, sizeof to, &nothing_else, "small_struct"));
    T_EQ_INT(to.a, 0);
}

T_CASE(giving_writes_at_most_what_the_caller_has) {
    const large_struct from = {sizeof from, 1, 2, 3, 4};
    struct {
        small_struct given;
        uint64_t guard;
    } to = {{sizeof to.given, 0, 0}, 0x1234};
    T_OK(mm_give_struct(&to.given, &from, sizeof from, "large_struct"));
    T_EQ_INT(to.given.struct_size, sizeof to.given);
    T_EQ_INT(to.given.a, 1);
    T_EQ_INT(to.given.b, 2);
    T_EQ_HEX(to.guard, 0x1234);
}

T_CASE(giving_to_a_newer_caller_zeroes_the_rest) {
    const small_struct from = {sizeof from, 1, 2};
    large_struct to = {sizeof to, 9, 9, 9, 9};
    T_OK(mm_give_struct(&to, &from, sizeof from, "small_struct"));
    T_EQ_INT(to.struct_size, sizeof to);
    T_EQ_INT(to.a, 1);
    T_EQ_INT(to.b, 2);
    T_EQ_INT(to.c, 0);
    T_EQ_INT(to.d, 0);
}

T_CASE(names_of_dtypes) {
#define X(name, value, text, bits) T_EQ_STR(megamoe_dtype_name(name), text);
    MEGAMOE_DTYPE_LIST(X)
#undef X
    T_EQ_STR(megamoe_dtype_name((megamoe_dtype)77), "unknown");
}
