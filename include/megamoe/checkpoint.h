/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checkpoints: a directory with safetensors files (single or sharded with an index) and
 * config.json, or one .safetensors file; a GGUF file, one of its parts if it is split, or a
 * directory with one.
 *
 * A family is a naming scheme with its format and routers. It is detected from tensor names,
 * dtypes and shapes and checked against the config; a disagreement is an error, never a guess.
 *   "deepseek-v4"     DeepSeek-V4 / V4.1 original FP4 (MXFP4)
 *   "modelopt-nvfp4"  NVIDIA ModelOpt NVFP4 under DeepSeek-V3, Qwen3-MoE, DeepSeek-V4 and related
 *                     names
 *   "compressed-tensors"  llm-compressor's NVFP4 and MXFP4 under the same names
 *   "gpt-oss"         OpenAI gpt-oss MXFP4 with biases, under its names of Hugging Face or its own
 *   "mimo-mxfp4"      MXFP4 in U8 tensors, as MiMo-V2.5-Pro-FP4
 *   "fp8", "bf16"     wider experts: run once they are quantized (megamoe_checkpoint_quantize)
 *   "gguf"            GGUF files with experts in MXFP4 or NVFP4, of the architectures in
 *                     docs/formats.md
 */
#ifndef MEGAMOE_CHECKPOINT_H
#define MEGAMOE_CHECKPOINT_H

#include "router.h"
#include "types.h"
#include "weights.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct megamoe_checkpoint megamoe_checkpoint;

/*
 * Opens a checkpoint; every header is checked (docs/formats.md). Its files stay open and are read,
 * not mapped: one that is cut in the meantime is MEGAMOE_EIO where it is missed. Owns: the caller
 * closes *checkpoint. Weights taken from it keep the files open.
 * Returns: MEGAMOE_ENOTFOUND, MEGAMOE_EIO, MEGAMOE_EFORMAT (with file, tensor and reason),
 * MEGAMOE_EUNSUPPORTED (a family or format that is recognised but not run), MEGAMOE_ENOMEM.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_checkpoint_open(const char *path,
                                                                   megamoe_checkpoint **checkpoint);

/* Accepts NULL. */
MEGAMOE_API void megamoe_checkpoint_close(megamoe_checkpoint *checkpoint);

typedef struct megamoe_checkpoint_info {
    size_t struct_size;
    char family[32];
    char model_type[64]; /* of config.json, or GGUF's architecture; "" if there is none */
    uint64_t files;
    uint64_t tensors;
    uint64_t bytes; /* of the files */
    int32_t layers; /* MoE layers of which this checkpoint holds at least one expert tensor */
} megamoe_checkpoint_info;

MEGAMOE_API MEGAMOE_CHECKED megamoe_status
megamoe_checkpoint_describe(const megamoe_checkpoint *checkpoint, megamoe_checkpoint_info *info);

/*
 * The model's index of the i-th MoE layer, ascending, or -1 when i is out of range.
 * Draft (MTP) blocks are not layers here.
 */
MEGAMOE_API int32_t megamoe_checkpoint_layer(const megamoe_checkpoint *checkpoint, int32_t i);

/*
 * The weights of a layer. All three projections of all experts must be there, with every scale;
 * scales are checked as in megamoe_weights_from_tensors. Codes are read later, expert by expert,
 * and kept in memory only while they are used: a layer may be larger than memory. Without a config
 * the geometry comes from the tensors, and topk is 0 where they do not show it. Owns: the caller
 * closes *weights. Returns: MEGAMOE_ENOTFOUND (no such layer), MEGAMOE_EFORMAT,
 * MEGAMOE_EUNSUPPORTED (this layer's format is not run, is to be quantized by name, or an unknown
 * tensor stands beside an expert), MEGAMOE_ENOMEM. Thread: a checkpoint may be shared by threads.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_checkpoint_weights(
    const megamoe_checkpoint *checkpoint, int32_t layer, megamoe_weights **weights);

/* How a layer's experts are stored. */
typedef struct megamoe_stored_layer {
    size_t struct_size;
    char family[32];
    char format[16]; /* "mxfp4", "nvfp4"; "fp8", "bf16": megamoe_checkpoint_quantize reads them */
    bool wide;       /* the latter two */
    bool has_bias;
    int32_t hidden;
    int32_t intermediate;
    int32_t experts;
    int32_t topk;       /* 0: not known */
    int32_t block_rows; /* values that share a scale; both 0 where there are no scales */
    int32_t block_columns;
    megamoe_activation activation;
} megamoe_stored_layer;

/*
 * Describes a layer, a wide one too, from names, shapes and the config.
 * Returns what megamoe_checkpoint_weights or megamoe_checkpoint_quantize would refuse.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_checkpoint_stored(
    const megamoe_checkpoint *checkpoint, int32_t layer, megamoe_stored_layer *stored);

typedef struct megamoe_quantize_options {
    size_t struct_size;
    megamoe_format format;
    int32_t threads; /* 0: one per core available */
    megamoe_progress progress;
} megamoe_quantize_options;

/*
 * The weights of a layer that is stored in FP8 (E4M3 with a scale for each block of
 * weight_block_size) or BF16, rounded to 4 bits. Every weight is first taken exactly: code times
 * block scale. Then (docs/numerics.md, item 8)
 *   MXFP4  each 32 of a row get the smallest power of two under which none exceeds 6
 *   NVFP4  each matrix gets the global scale FP32(largest / 2688), each 16 of a row the scale
 *          E4M3(largest of them / (6 * global scale)), at least 2^-9
 * and each weight the code nearest to its exact quotient, ties to even. The result does not depend
 * on threads. It takes about 0.53 (NVFP4: 0.56) bytes for each weight of memory.
 * Owns: the caller closes *weights.
 * Returns: MEGAMOE_EUNSUPPORTED (the layer is stored in 4 bits already, or in a form that is not
 * read), MEGAMOE_EFORMAT (also a weight that is NaN or infinite, named by tensor, row and column),
 * MEGAMOE_ENOTFOUND (no such layer; FP8 without weight_block_size), MEGAMOE_EINVAL, MEGAMOE_ENOMEM.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status
megamoe_checkpoint_quantize(const megamoe_checkpoint *checkpoint, int32_t layer,
                            const megamoe_quantize_options *options, megamoe_weights **weights);

/*
 * The router of a layer, a copy. Owns: the caller closes *router.
 * Returns: MEGAMOE_ENOTFOUND if the checkpoint holds no router for the layer, no config.json, or
 * not a key that the router needs (named), MEGAMOE_EFORMAT, MEGAMOE_EUNSUPPORTED, MEGAMOE_ENOMEM.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_checkpoint_router(
    const megamoe_checkpoint *checkpoint, int32_t layer, megamoe_router **router);

/* One tensor of a file. */
typedef struct megamoe_tensor {
    char dtype[16]; /* as the file spells it */
    int32_t rank;
    int64_t shape[8]; /* the last dimension varies fastest, of GGUF too */
    const void *data; /* borrowed from the checkpoint; aligned as malloc does it */
    uint64_t bytes;
} megamoe_tensor;

/*
 * Opens one safetensors or GGUF file for its tensors alone, without a family or config.
 * megamoe_checkpoint_weights, _router and _layer find nothing in it.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_tensors_open(const char *path,
                                                                megamoe_checkpoint **checkpoint);

/*
 * Finds a tensor by name and reads it. Its bytes stay in memory until the checkpoint is closed.
 * Returns: MEGAMOE_ENOTFOUND (naming file and tensor), MEGAMOE_EIO, MEGAMOE_ENOMEM.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_checkpoint_tensor(
    const megamoe_checkpoint *checkpoint, const char *name, megamoe_tensor *tensor);

/* ---- Writing ---- */

typedef struct megamoe_tensor_spec {
    const char *name;
    const char *dtype; /* as safetensors spells it: "BF16", "F8_E8M0", ... */
    int32_t rank;
    int64_t shape[8];
} megamoe_tensor_spec;

/* Fills the bytes of tensor `index`; called for each tensor once, in file order. */
typedef megamoe_status (*megamoe_tensor_fill_fn)(void *user, size_t index, void *data,
                                                 uint64_t bytes);

/*
 * Writes a safetensors file (a temporary file beside it, fsync, rename). Only one tensor is in
 * memory at a time, zeroed before `fill`. Tensors lie in the order of descending element size, else
 * in the given one, behind a header padded to 8 bytes, so each is aligned to its element. A failure
 * of `fill` ends the writing with its status.
 * Returns: MEGAMOE_EINVAL (names that repeat, unknown dtype, shapes that overflow), MEGAMOE_EIO.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status
megamoe_tensors_save(const char *path, const megamoe_tensor_spec *specs, size_t n,
                     megamoe_tensor_fill_fn fill, void *user, megamoe_progress progress);

/* ---- Converting ---- */

typedef struct megamoe_convert_options {
    size_t struct_size;
    const char *family;    /* "deepseek-v4", "modelopt-nvfp4", "compressed-tensors", "gpt-oss" */
    megamoe_format format; /* 0: the first layer's if the family has it, else the family's own */
    megamoe_progress progress;
} megamoe_convert_options;

/*
 * Writes the expert layers of a checkpoint, their routers and its config.json as another family
 * stores them, into the new directory `path` (a temporary one beside it, fsync, rename; an empty
 * directory is replaced). All weights keep their values: MXFP4 stays as it is under any family's
 * names, or becomes NVFP4 where each matrix's scales lie within 17 binades; global scales of NVFP4
 * are inverted for compressed-tensors where FP32 has the reciprocal; FP32 biases become gpt-oss's
 * BF16 where that holds them. Of a GGUF file the config.json is made from the metadata; GGUF itself
 * is not written. Dense parts of the model and draft blocks are not written. Before it gets its
 * name, what was written is opened, and layers and routers are compared with the source's.
 * Returns: MEGAMOE_EINEXACT (a scale, global scale or bias that the family cannot hold, named by
 * tensor and value), MEGAMOE_EUNSUPPORTED (the family or format; a model that the family's names
 * would give another meaning; wide experts), MEGAMOE_EINVAL, MEGAMOE_EFORMAT, MEGAMOE_EIO,
 * MEGAMOE_ENOMEM.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_checkpoint_convert(
    const megamoe_checkpoint *checkpoint, const megamoe_convert_options *options, const char *path);

#ifdef __cplusplus
}
#endif
#endif
