/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The expert weights of one layer, as a checkpoint stores them or prepared for a device.
 *
 * A weight is  E2M1 code * block scale * global scale  (docs/numerics.md, item 2):
 *   MXFP4  one E8M0 scale for 32 consecutive k, no global scale
 *   NVFP4  one E4M3 scale for 16 consecutive k, one F32 global scale per matrix
 * Two codes share a byte: the low nibble is the even k.
 */
#ifndef MEGAMOE_WEIGHTS_H
#define MEGAMOE_WEIGHTS_H

#include "router.h"
#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum megamoe_format { MEGAMOE_FORMAT_MXFP4 = 1, MEGAMOE_FORMAT_NVFP4 = 2 } megamoe_format;

/* "mxfp4", "nvfp4"; "unknown" for other values. */
MEGAMOE_API const char *megamoe_format_name(megamoe_format format);

/* Gate and up are [intermediate, hidden], down is [hidden, intermediate]. */
typedef enum megamoe_projection {
    MEGAMOE_GATE = 0,
    MEGAMOE_UP = 1,
    MEGAMOE_DOWN = 2
} megamoe_projection;

/*
 * g = min(g, limit); u = clamp(u, -limit, limit);
 * h = g * (1 / (1 + exp(-alpha * g))) * (u + offset)
 */
typedef struct megamoe_activation {
    float alpha;  /* 0 means 1 */
    float offset; /* added to up */
    float limit;  /* 0 means no limit */
} megamoe_activation;

typedef struct megamoe_layer_desc {
    size_t struct_size;
    int32_t layer; /* index in the model */
    int32_t hidden;
    int32_t intermediate;
    int32_t experts;
    int32_t topk; /* the model's own */
    megamoe_format format;
    megamoe_activation activation;
    bool has_bias;
} megamoe_layer_desc;

/* One projection of one expert. Pointers need no alignment. */
typedef struct megamoe_matrix {
    const void *codes;        /* [out][in / 2] */
    size_t codes_stride;      /* bytes between rows */
    const void *scales;       /* MXFP4: E8M0 [out][in / 32]; NVFP4: E4M3 [out][in / 16] */
    size_t scales_stride;     /* bytes between rows */
    float global_scale;       /* NVFP4: a multiplier; ignored for MXFP4 */
    const void *bias;         /* [out], or NULL */
    megamoe_dtype bias_dtype; /* BF16 or F32 */
    size_t bias_stride;       /* bytes between elements */
} megamoe_matrix;

typedef struct megamoe_weights megamoe_weights;

/*
 * Weights from the caller's memory: `matrices` holds experts * 3 entries, expert-major, in the
 * order gate, up, down. All scales are checked here.
 * Owns: the matrices' memory stays the caller's and must outlive *weights; the array itself is
 * copied. The caller closes *weights.
 * Returns: MEGAMOE_EINVAL (geometry, strides), MEGAMOE_EFORMAT (a scale that docs/numerics.md
 * refuses, named by expert, projection, row and block), MEGAMOE_ENOMEM.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_weights_from_tensors(
    const megamoe_layer_desc *desc, const megamoe_matrix *matrices, megamoe_weights **weights);

/*
 * Opens a prepared file. The header, the router and the table of hashes are read and checked now;
 * the experts are read when they are used, and their hashes checked by megamoe_weights_verify.
 * Returns: MEGAMOE_ENOTFOUND, MEGAMOE_EIO, MEGAMOE_EFORMAT, MEGAMOE_ECHECK, MEGAMOE_EUNSUPPORTED,
 * MEGAMOE_ENOMEM.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_weights_open(const char *path,
                                                                megamoe_weights **weights);

/* Accepts NULL. Layers that were created from `weights` keep what they need. */
MEGAMOE_API void megamoe_weights_close(megamoe_weights *weights);

MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_weights_describe(const megamoe_weights *weights,
                                                                    megamoe_layer_desc *desc);

/* Whether the weights are prepared for a device rather than in their checkpoint's own form. */
MEGAMOE_API bool megamoe_weights_prepared(const megamoe_weights *weights);

/* "cpu" or "cuda", what the weights are prepared for; NULL for weights in checkpoint form. */
MEGAMOE_API const char *megamoe_weights_device(const megamoe_weights *weights);

/* How NVFP4 weights become E4M3 multiplier operands. */
typedef enum megamoe_nvfp4_mode {
    MEGAMOE_NVFP4_EXACT = 0, /* two exact terms */
    MEGAMOE_NVFP4_FOLDED = 1 /* one term, rounded: about 2 % of weight energy */
} megamoe_nvfp4_mode;

/* How prepared weights were packed; MEGAMOE_NVFP4_EXACT for weights in checkpoint form. */
MEGAMOE_API megamoe_nvfp4_mode megamoe_weights_nvfp4(const megamoe_weights *weights);

/*
 * One matrix in checkpoint form. Owns: the memory belongs to `weights`. Of a checkpoint, the whole
 * expert is read, and stays in memory until `weights` are closed (MEGAMOE_EIO, MEGAMOE_ENOMEM).
 * Returns MEGAMOE_EUNSUPPORTED for prepared weights (see megamoe_weights_unpack).
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_weights_matrix(const megamoe_weights *weights,
                                                                  int32_t expert,
                                                                  megamoe_projection projection,
                                                                  megamoe_matrix *matrix);

/*
 * The values of one matrix, exact: out[row * in + k]. Works on all kinds of weights; prepared ones
 * give what they hold, so what folding or round_outside_window left.
 * `values` holds rows * in doubles: the global scale is included.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_weights_unpack(const megamoe_weights *weights,
                                                                  int32_t expert,
                                                                  megamoe_projection projection,
                                                                  double *values);

/* The router that came with prepared weights; NULL if there is none. Borrowed from `weights`. */
MEGAMOE_API const megamoe_router *megamoe_weights_router(const megamoe_weights *weights);

typedef struct megamoe_prepare_options {
    size_t struct_size;
    const char *device; /* NULL or "cpu", or "cuda"; the machine needs no GPU */
    megamoe_nvfp4_mode nvfp4;
    int32_t threads; /* 0: one per core available */
    megamoe_progress progress;
    /*
     * For "cuda": groups whose scale lies too far below their row's for E4M3 operands get the
     * nearest values that these hold, off by at most 2^-15 (MXFP4: 2^-16) of the largest weight of
     * the row.
     */
    bool round_outside_window;
} megamoe_prepare_options;

/*
 * Packs all experts for a device and writes the prepared file `path` (a temporary file beside it,
 * fsync, rename: no partial file under that name). `router` may be NULL; it travels in the file.
 * Returns: MEGAMOE_EINEXACT if a group lies outside what the device represents (the message counts
 * them), MEGAMOE_EINVAL (an option), MEGAMOE_EIO, MEGAMOE_ENOMEM, MEGAMOE_EUNSUPPORTED (weights are
 * prepared already; another device).
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status
megamoe_weights_prepare(const megamoe_weights *weights, const megamoe_router *router,
                        const megamoe_prepare_options *options, const char *path);

/*
 * Compares every hash of prepared weights with its bytes.
 * Returns MEGAMOE_ECHECK naming the first expert that differs.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_weights_verify(const megamoe_weights *weights,
                                                                  megamoe_progress progress);

/* What megamoe_weights_analyze finds in one projection over all experts. */
typedef struct megamoe_projection_report {
    uint64_t groups;         /* scale groups */
    uint64_t zero_groups;    /* of them, groups whose codes are all zero or whose scale is zero */
    uint64_t inside;         /* exact under the row exponent (zero groups included) */
    uint64_t inside_shifted; /* of them, exact only because of the codes they hold */
    uint64_t outside;        /* groups that the GPU's E4M3 operands cannot hold exactly */
    uint64_t scale_histogram[256];  /* by scale byte */
    uint64_t spread_histogram[256]; /* rows by binades between their largest and smallest scale */
    int32_t row_exponent_min;
    int32_t row_exponent_max;
    float global_min; /* NVFP4; 1 for MXFP4 */
    float global_max;
    double folded_relative_rms; /* NVFP4: what folding would round, relative to weight energy */
} megamoe_projection_report;

typedef struct megamoe_weights_report {
    size_t struct_size;
    megamoe_projection_report projection[3];
    uint64_t bytes; /* codes and scales */
} megamoe_weights_report;

/* Reads all weights once. Returns MEGAMOE_EUNSUPPORTED for prepared weights. */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_weights_analyze(const megamoe_weights *weights,
                                                                   int32_t threads,
                                                                   megamoe_progress progress,
                                                                   megamoe_weights_report *report);

#ifdef __cplusplus
}
#endif
#endif
