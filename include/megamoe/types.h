/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Element types, tensor views and progress.
 *
 * Structs that callers fill and that may grow begin with `struct_size`; set it with
 * MEGAMOE_INIT(type). Zero is the default of every other member. A struct that is larger than the
 * library knows is accepted if the extra bytes are zero; a smaller one is extended with zeros.
 */
#ifndef MEGAMOE_TYPES_H
#define MEGAMOE_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An initializer: megamoe_layer_options o = MEGAMOE_INIT(megamoe_layer_options); */
#ifdef __cplusplus
#define MEGAMOE_INIT(type)                                                                         \
    { sizeof(type) }
#else
#define MEGAMOE_INIT(type)                                                                         \
    { .struct_size = sizeof(type) }
#endif

/* X(name, value, text, bits per element) */
#define MEGAMOE_DTYPE_LIST(X)                                                                      \
    X(MEGAMOE_DTYPE_NONE, 0, "none", 0)                                                            \
    X(MEGAMOE_DTYPE_BF16, 1, "BF16", 16)                                                           \
    X(MEGAMOE_DTYPE_F32, 2, "F32", 32)                                                             \
    X(MEGAMOE_DTYPE_E4M3, 3, "F8_E4M3", 8)                                                         \
    X(MEGAMOE_DTYPE_E8M0, 4, "F8_E8M0", 8)                                                         \
    X(MEGAMOE_DTYPE_I32, 5, "I32", 32)                                                             \
    X(MEGAMOE_DTYPE_I64, 6, "I64", 64)                                                             \
    X(MEGAMOE_DTYPE_I8, 7, "I8", 8)

typedef enum megamoe_dtype {
#define X(name, value, text, bits) name = value,
    MEGAMOE_DTYPE_LIST(X)
#undef X
} megamoe_dtype;

/* "BF16", "F32", ...; "unknown" for other values. */
MEGAMOE_API const char *megamoe_dtype_name(megamoe_dtype dtype);

/*
 * A matrix in row-major order. The number of columns follows from what the view is used for.
 * `stride` counts elements between the starts of two rows; 0 means rows lie without gaps.
 * `data` is borrowed for the duration of the call and must be aligned to its element.
 */
typedef struct megamoe_view {
    void *data;
    megamoe_dtype dtype;
    int64_t rows;
    int64_t stride;
} megamoe_view;

/*
 * Called during long work with `done` of `total` units (bytes). It may be called from a thread
 * of the library, never concurrently.
 */
typedef void (*megamoe_progress_fn)(void *user, uint64_t done, uint64_t total);

typedef struct megamoe_progress {
    megamoe_progress_fn fn; /* NULL: none */
    void *user;
} megamoe_progress;

#ifdef __cplusplus
}
#endif
#endif
