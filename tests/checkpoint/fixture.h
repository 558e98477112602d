/* SPDX-License-Identifier: Apache-2.0 */
/* Small checkpoints built tensor by tensor, broken on purpose, and written as files. */
#ifndef FIXTURE_H
#define FIXTURE_H

#include "megamoe/checkpoint.h"
#include "t.h"

typedef struct built_tensor {
    char name[160];
    char dtype[16];
    int32_t rank;
    int64_t shape[8];
    uint8_t *data;
    uint64_t bytes;
} built_tensor;

typedef struct built {
    built_tensor *tensors;
    size_t n;
    t_random random;
} built;

built built_start(void);
void built_free(built *model);

/* Bytes are zero. `shape` is {sizes..., -1}. The pointer is valid until the next one is added. */
built_tensor *built_add(built *model, const char *dtype, const int64_t *shape, const char *format,
                        ...) __attribute__((format(printf, 4, 5)));
#define SHAPE(...) ((const int64_t[]){__VA_ARGS__, -1})
#define SCALAR ((const int64_t[]){-1})

built_tensor *built_find(const built *model,
                         const char *name); /* ends the case if it is not there */
void built_remove(built *model, const char *name);
void built_rename(built *model, const char *from, const char *to);
void built_save(const built *model, const char *path);

/* Writes the directory "model": model.safetensors and, if given, config.json, but no other config.
 */
const char *save_model(const built *model, const char *config);

/* The sizes of a layer. */
typedef struct sizes {
    int32_t hidden, intermediate, experts;
} sizes;

/* Gives every byte of a tensor a random value in low..high. */
void randomize(built *model, built_tensor *tensor, uint32_t low, uint32_t high);

/*
 * The experts of a layer with random codes and scales. `block` is a format with one %d for the
 * layer's number; `projections` are three words, `scale` the last part of the scales' names.
 */
void add_mxfp4(built *model, const char *block, int32_t layer, const char *const *projections,
               const char *scale, sizes s);
void add_nvfp4(built *model, const char *block, int32_t layer, const char *const *projections,
               sizes s);
extern const char *const named[3];    /* gate_proj, up_proj, down_proj */
extern const char *const numbered[3]; /* w1, w3, w2 */

/* A matrix element by plain table and exponent arithmetic; `global` counts for NVFP4 only. */
double element(const built_tensor *codes, const built_tensor *scales, float global, int64_t row,
               int64_t k);

/* Writes text as a file of the program's own directory. */
void write_text(const char *path, const char *text);

/* A call failed with `status` and a message that holds each of the parts (NULL ends them). */
#define FAILS(call, status, ...)                                                                   \
    fails((call), (status), (const char *const[]){__VA_ARGS__, NULL}, __FILE__, __LINE__, #call)
void fails(megamoe_status is, megamoe_status must, const char *const *parts, const char *file,
           int line, const char *call);

/* Ends the case if the checkpoint cannot be opened. */
megamoe_checkpoint *opened(const char *path);

/* Try, and close what was opened. The last two end the case if the checkpoint cannot be opened. */
megamoe_status try_open(const char *path);
megamoe_status try_weights(const char *path, int32_t layer);
megamoe_status try_router(const char *path, int32_t layer);

#endif
