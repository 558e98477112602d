/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Expert layers of one shape that a batch passes one after the other, on one device: what a step of
 * a model costs in them. Ranks of a communicator have a stack each, call the same functions in the
 * same order, and have as many tokens in a step as the others.
 */
#ifndef STACK_H
#define STACK_H

#include "bench_layer.h"
#include "gpu.h"
#include "routing.h"

typedef struct stack_options {
    bench_target target; /* memory is that of all layers */
    const char *path;    /* of a checkpoint or prepared file; NULL: synthetic weights of */
    const char *name;    /* ... what `desc` describes */
    megamoe_layer_desc desc;
    int32_t layers;
    int64_t tokens; /* of the largest batch */
    megamoe_input_scale input_scale;
    megamoe_activation_type activations;
} stack_options;

typedef struct stack {
    stack_options options;
    routing_profile *routes;
    bench_layer *layers; /* [distinct], used again and again if there are fewer than layers */
    int32_t distinct;
    megamoe_workspace *workspace;
    gpu *gpu; /* NULL on the CPU */
    /* Memory of the device; on the CPU all_ids is host_ids. */
    void *x, *y, *weights, *all_ids;
    int32_t *host_ids; /* [layers][tokens][topk] of a step */
    int32_t *drawn;    /* [ranks][tokens][topk] of a layer */
    int32_t rank, ranks;
    /* Sums over layers and steps, of all ranks' tokens: active experts, largest load by mean. */
    double active, imbalance;
    int64_t measured;
} stack;

/*
 * Makes as many layers as fit in memory and, of a file, as it has; has `routes` fit them, and
 * computes a few of the largest batches. Prints its error and returns an exit code; stack_close is
 * due in any case.
 */
int stack_open(const stack_options *options, const megamoe_device_info *device,
               routing_profile *routes, stack *s);

void stack_close(stack *s);

/*
 * Stages and computes `tokens` tokens in each layer, with routes of the step's own. *seconds: from
 * the first layer's staging until the last layer's output is there; on a GPU between two events; of
 * several ranks that of the slowest.
 * `user` is a stack. Prints its error and returns an exit code.
 */
int stack_step(void *user, int64_t step, int64_t tokens, double *seconds);

#endif
