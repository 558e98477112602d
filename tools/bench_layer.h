/* SPDX-License-Identifier: Apache-2.0 */
/* The layer that `megamoe bench` measures: from PATH, or synthetic weights made in memory. */
#ifndef BENCH_LAYER_H
#define BENCH_LAYER_H

#include "source.h"

typedef struct bench_layer {
    char name[256];
    megamoe_layer_desc desc;  /* with the experts that the layer has here */
    int32_t all_experts;      /* those of the model */
    uint64_t expert_bytes;    /* of one expert's packed weights; as planned if only described */
    uint64_t stored_bytes;    /* of one expert in checkpoint form: codes and block scales */
    megamoe_nvfp4_mode nvfp4; /* as packed */
    megamoe_layer *layer;
} bench_layer;

typedef struct bench_target {
    megamoe_comm *comm;
    megamoe_device *device;
    megamoe_nvfp4_mode nvfp4;
    megamoe_accumulate accumulate;
    bool mapped;      /* use a prepared file in place */
    uint64_t memory;  /* most bytes of weights; a larger layer is cut to its first experts */
    int32_t experts;  /* 0: those of the source */
    int32_t distinct; /* 0: all; else synthetic experts repeat after so many */
    uint64_t seed;
    int32_t threads; /* to make weights */
    bool describe;   /* make no layer: no communicator and no device are needed */
} bench_target;

/* These print their error and return an exit code. Close the layer in any case. */
int bench_layer_synthetic(const bench_target *target, const char *name,
                          const megamoe_layer_desc *desc, bench_layer *b);
int bench_layer_from_path(const bench_target *target, const char *path, int64_t layer_index,
                          bench_layer *b);

#endif
