/* SPDX-License-Identifier: Apache-2.0 */
/* Checked reading of callers' tensor views. */
#ifndef MM_BASE_VIEW_H
#define MM_BASE_VIEW_H

#include <stdbool.h>
#include <string.h>

#include "megamoe/types.h"

size_t mm_dtype_bytes(megamoe_dtype dtype);

/*
 * Checks that `view` holds at least rows x columns elements of one of two dtypes (the second may be
 * MEGAMOE_DTYPE_NONE). A view of no rows may be NULL. `what` names it in the message.
 */
MEGAMOE_CHECKED megamoe_status mm_view_check(const megamoe_view *view, const char *what,
                                             megamoe_dtype dtype, megamoe_dtype other, int64_t rows,
                                             int64_t columns);

static inline int64_t mm_view_stride(const megamoe_view *view, int64_t columns) {
    return view->stride ? view->stride : columns;
}

/* The start of a row. */
static inline void *mm_view_row(const megamoe_view *view, int64_t row, int64_t columns) {
    return (unsigned char *)view->data +
           (size_t)(row * mm_view_stride(view, columns)) * mm_dtype_bytes(view->dtype);
}

/* An element of an I32 or I64 view. */
static inline int64_t mm_view_integer(const megamoe_view *view, int64_t row, int64_t column,
                                      int64_t columns) {
    const void *from = mm_view_row(view, row, columns);
    return view->dtype == MEGAMOE_DTYPE_I64 ? ((const int64_t *)from)[column]
                                            : ((const int32_t *)from)[column];
}

/* An element of an F32 or BF16 view. */
float mm_view_float(const megamoe_view *view, int64_t row, int64_t column, int64_t columns);

#endif
