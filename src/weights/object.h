/* SPDX-License-Identifier: Apache-2.0 */
/* What a megamoe_weights consists of; only for src/weights. */
#ifndef MM_WEIGHTS_OBJECT_H
#define MM_WEIGHTS_OBJECT_H

#include "base/file.h"
#include "base/view.h"
#include "weights/cpu_layout.h"
#include "weights/cuda_layout.h"
#include "weights/rows.h"
#include "weights/weights.h"

enum { MM_PROJECTIONS = 3 };

struct megamoe_weights {
    megamoe_layer_desc desc;
    struct mm_holds *holds; /* NULL where all is in the caller's memory */

    /* In checkpoint form. */
    megamoe_matrix *matrices; /* [experts][MM_PROJECTIONS]; NULL for prepared weights */
    mm_matrix_owner owner;

    /* Prepared. */
    char *path;
    mm_file file;
    const struct mm_prepared_kind *kind; /* the device and its layout's name */
    megamoe_nvfp4_mode nvfp4;
    mm_cpu_layout layout;                             /* for "cpu" */
    mm_cuda_layout cuda_layout;                       /* for "cuda" */
    uint8_t decode_table[MM_CUDA_DECODE_TABLE_BYTES]; /* for "cuda" */
    size_t blob_bytes;
    uint64_t blobs_offset;  /* of the first one in `file` */
    struct mm_hash *hashes; /* [experts] */
    megamoe_router *router; /* NULL if the file holds none */
};

/* An object with nothing in it; NULL when out of memory. */
megamoe_weights *mm_weights_new(void);

/* MEGAMOE_EINVAL for an expert or projection that does not exist. */
MEGAMOE_CHECKED megamoe_status mm_matrix_check_index(const megamoe_weights *weights, int32_t expert,
                                                     megamoe_projection projection);

/* The scales that docs/numerics.md refuses, in all matrices (checkpoint form). */
MEGAMOE_CHECKED megamoe_status mm_scales_check(const megamoe_weights *weights);
/* In those of one expert that is in memory. */
MEGAMOE_CHECKED megamoe_status mm_expert_scales_check(const megamoe_weights *weights,
                                                      int32_t expert);

/* mm_fail about a matrix (or its scales), which the message begins with. */
MEGAMOE_CHECKED megamoe_status mm_matrix_fail(const megamoe_weights *weights, megamoe_status status,
                                              int32_t expert, megamoe_projection projection,
                                              bool scales, const char *format, ...)
    __attribute__((format(printf, 6, 7)));

static inline const megamoe_matrix *mm_matrix_of(const megamoe_weights *weights, int32_t expert,
                                                 megamoe_projection projection) {
    return &weights->matrices[(size_t)expert * MM_PROJECTIONS + projection];
}

static inline const uint8_t *mm_matrix_codes(const megamoe_matrix *matrix, int32_t row) {
    return (const uint8_t *)matrix->codes + (size_t)row * matrix->codes_stride;
}

static inline const uint8_t *mm_matrix_scales(const megamoe_matrix *matrix, int32_t row) {
    return (const uint8_t *)matrix->scales + (size_t)row * matrix->scales_stride;
}

#endif
