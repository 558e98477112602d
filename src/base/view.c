/* SPDX-License-Identifier: Apache-2.0 */
#include "base/view.h"

#include <inttypes.h>

#include "base/error.h"

size_t mm_dtype_bytes(megamoe_dtype dtype) {
    switch (dtype) {
#define X(name, value, text, bits)                                                                 \
    case name:                                                                                     \
        return (bits) / 8;
        MEGAMOE_DTYPE_LIST(X)
#undef X
    }
    return 0;
}

megamoe_status mm_view_check(const megamoe_view *view, const char *what, megamoe_dtype dtype,
                             megamoe_dtype other, int64_t rows, int64_t columns) {
    if (rows == 0)
        return MEGAMOE_OK;
    if (!view || !view->data)
        return mm_fail(MEGAMOE_EINVAL, "%s: NULL; expected %" PRId64 " rows of %" PRId64 " %s",
                       what, rows, columns, megamoe_dtype_name(dtype));
    if (view->dtype != dtype && (other == MEGAMOE_DTYPE_NONE || view->dtype != other))
        return mm_fail(MEGAMOE_EINVAL, "%s: dtype %s; expected %s%s%s", what,
                       megamoe_dtype_name(view->dtype), megamoe_dtype_name(dtype),
                       other == MEGAMOE_DTYPE_NONE ? "" : " or ",
                       other == MEGAMOE_DTYPE_NONE ? "" : megamoe_dtype_name(other));
    if (view->rows < rows)
        return mm_fail(MEGAMOE_EINVAL, "%s: %" PRId64 " rows; expected at least %" PRId64, what,
                       view->rows, rows);
    if (view->stride < 0 || (view->stride > 0 && view->stride < columns))
        return mm_fail(MEGAMOE_EINVAL, "%s: stride %" PRId64 "; expected 0 or at least %" PRId64,
                       what, view->stride, columns);
    const size_t bytes = mm_dtype_bytes(view->dtype);
    if (bytes == 0 || (uintptr_t)view->data % bytes)
        return mm_fail(MEGAMOE_EINVAL, "%s: data is not aligned to its %zu-byte elements", what,
                       bytes);
    return MEGAMOE_OK;
}

float mm_view_float(const megamoe_view *view, int64_t row, int64_t column, int64_t columns) {
    const void *from = mm_view_row(view, row, columns);
    if (view->dtype == MEGAMOE_DTYPE_F32)
        return ((const float *)from)[column];
    const uint32_t bits = (uint32_t)((const uint16_t *)from)[column] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
