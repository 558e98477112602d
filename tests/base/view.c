/* SPDX-License-Identifier: Apache-2.0 */
#include "base/view.h"

#include "t.h"

T_CASE(sizes_of_dtypes) {
    T_EQ_INT(mm_dtype_bytes(MEGAMOE_DTYPE_NONE), 0);
    T_EQ_INT(mm_dtype_bytes(MEGAMOE_DTYPE_BF16), 2);
    T_EQ_INT(mm_dtype_bytes(MEGAMOE_DTYPE_F32), 4);
    T_EQ_INT(mm_dtype_bytes(MEGAMOE_DTYPE_E4M3), 1);
    T_EQ_INT(mm_dtype_bytes(MEGAMOE_DTYPE_E8M0), 1);
    T_EQ_INT(mm_dtype_bytes(MEGAMOE_DTYPE_I32), 4);
    T_EQ_INT(mm_dtype_bytes(MEGAMOE_DTYPE_I64), 8);
    T_EQ_INT(mm_dtype_bytes(MEGAMOE_DTYPE_I8), 1);
    T_EQ_INT(mm_dtype_bytes((megamoe_dtype)99), 0);
}

static float data[12];

static megamoe_status check(megamoe_view view) {
    return mm_view_check(&view, "the view", MEGAMOE_DTYPE_F32, MEGAMOE_DTYPE_I32, 3, 4);
}

T_CASE(good_views_pass) {
    T_OK(check((megamoe_view){data, MEGAMOE_DTYPE_F32, 3, 0}));
    T_OK(check((megamoe_view){data, MEGAMOE_DTYPE_I32, 3, 4}));
    T_OK(check((megamoe_view){data, MEGAMOE_DTYPE_F32, 100, 5}));
    T_OK(mm_view_check(NULL, "none", MEGAMOE_DTYPE_F32, MEGAMOE_DTYPE_NONE, 0, 4));
}

T_CASE(bad_views_are_named) {
    const megamoe_view bad[] = {
        {NULL, MEGAMOE_DTYPE_F32, 3, 0},
        {data, MEGAMOE_DTYPE_BF16, 3, 0},
        {data, MEGAMOE_DTYPE_NONE, 3, 0},
        {data, (megamoe_dtype)99, 3, 0},
        {data, MEGAMOE_DTYPE_F32, 2, 0},
        {data, MEGAMOE_DTYPE_F32, -3, 0},
        {data, MEGAMOE_DTYPE_F32, 3, 3},
        {data, MEGAMOE_DTYPE_F32, 3, -4},
        {(char *)data + 1, MEGAMOE_DTYPE_F32, 3, 0},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        T_STATUS(check(bad[i]), MEGAMOE_EINVAL);
        T_CONTAINS(megamoe_last_error(), "the view: ");
    }
    T_STATUS(mm_view_check(NULL, "none", MEGAMOE_DTYPE_F32, MEGAMOE_DTYPE_NONE, 1, 4),
             MEGAMOE_EINVAL);
    const megamoe_view narrow = {data, MEGAMOE_DTYPE_NONE, 1, 0};
    T_STATUS(mm_view_check(&narrow, "none", MEGAMOE_DTYPE_F32, MEGAMOE_DTYPE_NONE, 1, 4),
             MEGAMOE_EINVAL);
}

T_CASE(elements_are_found_by_stride) {
    int32_t narrow[2][5] = {{0}};
    int64_t wide[2][3] = {{0}};
    uint16_t half[2][4] = {{0}};
    float full[2][3] = {{0}};
    narrow[1][2] = -7;
    wide[1][2] = INT64_MIN;
    half[1][3] = 0xC040;
    full[1][1] = 2.5f;
    T_EQ_INT(mm_view_integer(&(megamoe_view){narrow, MEGAMOE_DTYPE_I32, 2, 5}, 1, 2, 3), -7);
    T_EQ_INT(mm_view_integer(&(megamoe_view){wide, MEGAMOE_DTYPE_I64, 2, 0}, 1, 2, 3), INT64_MIN);
    T_EQ_F64((double)mm_view_float(&(megamoe_view){half, MEGAMOE_DTYPE_BF16, 2, 0}, 1, 3, 4), -3.0);
    T_EQ_F64((double)mm_view_float(&(megamoe_view){full, MEGAMOE_DTYPE_F32, 2, 3}, 1, 1, 2), 2.5);
    T_CHECK(mm_view_row(&(megamoe_view){full, MEGAMOE_DTYPE_F32, 2, 3}, 1, 2) == full[1]);
}
