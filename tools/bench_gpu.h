/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures forwards of one layer on one GPU, through a workspace of its own: an arm of `megamoe
 * bench`, and what `megamoe tune` tries plans with.
 *
 *   bench_gpu_open          workspace, buffers, input; kernels loaded
 *   bench_gpu_set_plan      of everything from then on
 *   bench_gpu_set_batch     draws and stages a batch and computes it once
 *   bench_gpu_time          times forwards, or stagings, of that batch; any number of times
 *   bench_gpu_close
 *
 * Functions that return an int print their error and return an exit code. Several may be open, on
 * one GPU or on several, and be called by turns, from one thread. The ranks of a communicator make
 * the same calls in the same order.
 */
#ifndef BENCH_GPU_H
#define BENCH_GPU_H

#include <megamoe/layer.h>

#include "bench_routes.h"
#include "gpu.h"

/* What is in L2 when a timed call begins. */
typedef enum bench_l2 {
    BENCH_L2_COLD,  /* a buffer larger than it has been overwritten: its lines are dirty */
    BENCH_L2_CLEAN, /* that buffer has been read through since: its lines are clean */
    BENCH_L2_WARM   /* what the call before has left */
} bench_l2;

typedef enum bench_launch {
    BENCH_LAUNCH_GRAPH, /* replays of a CUDA graph that holds the one call */
    BENCH_LAUNCH_EAGER  /* calls of the library */
} bench_launch;

typedef enum bench_call { BENCH_STAGE, BENCH_FORWARD, BENCH_CALLS } bench_call;

typedef struct bench_gpu_options {
    /* These stay open until bench_gpu_close. */
    megamoe_comm *comm;
    megamoe_device *device;
    megamoe_layer *layer;
    megamoe_shape shape;
    int64_t capacity; /* tokens of the workspace */
    int64_t tokens;   /* of the largest batch */
    bench_routes routes;
    uint64_t seed; /* of the input */
    bench_l2 l2;
    bench_launch launch;
    int warm_ups;      /* calls before those that are timed */
    double padding_us; /* of rest before each call */
} bench_gpu_options;

typedef struct bench_gpu bench_gpu;

/* Collective. bench_gpu_close is due in any case. */
int bench_gpu_open(const bench_gpu_options *options, bench_gpu **opened);

/* Accepts NULL. */
void bench_gpu_close(bench_gpu *m);

/* Forgets what has been captured; the batch stays. */
int bench_gpu_set_plan(bench_gpu *m, const megamoe_plan *plan);

/* Draws routes, stages tokens, computes them and checks what the device has found. */
int bench_gpu_set_batch(bench_gpu *m, int64_t tokens);

/*
 * Times n calls, n at most GPU_MAX_MARKS / 2: us[i] is the time of the i-th on the rank where it
 * took longest, skews[i] by how much longer than on the fastest (NULL: not wanted). *state gets the
 * GPU's clocks and power meanwhile (NULL: not wanted).
 */
int bench_gpu_time(bench_gpu *m, bench_call call, int n, double *us, double *skews,
                   nvml_state *state);

/* Where the time of the last forward went. */
int bench_gpu_get_times(bench_gpu *m, megamoe_workspace_times *times);

/* Fills the output with NaNs, so that a forward that left some of it as it is would be seen. */
int bench_gpu_spoil_output(bench_gpu *m);

/* The output of the last forward, BF16 [tokens of the batch, hidden], on the host. */
int bench_gpu_get_output(bench_gpu *m, uint16_t *y);

const megamoe_workspace *bench_gpu_workspace(const bench_gpu *m);
const gpu *bench_gpu_device(const bench_gpu *m);
/* Bytes that are overwritten to empty L2. */
size_t bench_gpu_flush_bytes(const bench_gpu *m);

#endif
