/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a caller of the library needs of CUDA: memory, a stream, graphs and times. The driver is
 * opened here for the commands' own use; the library has its own way to it. Functions that return
 * an int print their error and return an exit code. One thread uses a gpu, whose context is
 * current.
 */
#ifndef GPU_H
#define GPU_H

#include <megamoe/device.h>
#include <stddef.h>

#include "nvml.h"

typedef struct gpu gpu;

/* The GPU of a device that the library has opened. gpu_close is due in any case. */
int gpu_open(const megamoe_device_info *device, gpu **g);

/* Makes its context current: due when the thread has used another gpu in between. */
int gpu_use(gpu *g);

/* Accepts NULL. Waits for the stream, then frees all memory and events; no context is current. */
void gpu_close(gpu *g);

/* The CUstream that everything below uses; it does not wait for the default stream. */
void *gpu_stream(const gpu *g);

/* Device memory that lives until gpu_close. */
int gpu_allocate(gpu *g, const char *what, size_t bytes, void **memory);

/* These two block until the copy is done. */
int gpu_upload(gpu *g, void *to, const void *from, size_t bytes);
int gpu_download(gpu *g, void *to, const void *from, size_t bytes);

int gpu_fill(gpu *g, void *memory, unsigned char byte, size_t bytes);
/* Reads it through, a multiple of 16 bytes, so that L2 holds its end, unchanged, and no other. */
int gpu_read(gpu *g, const void *memory, size_t bytes);

/* Enqueues a kernel that does nothing for so long. */
int gpu_pause(gpu *g, double microseconds);
int gpu_wait(gpu *g);

/* A graph of what is enqueued on the stream between begin and end, which pair in any case. */
typedef struct gpu_graph gpu_graph;
int gpu_capture_begin(gpu *g);
int gpu_capture_end(gpu *g, gpu_graph **graph);
int gpu_replay(gpu *g, const gpu_graph *graph);
/* Accepts NULL. */
void gpu_graph_close(gpu *g, gpu_graph *graph);

/* Marks are places in the stream, numbered from 0. */
enum { GPU_MAX_MARKS = 2048 };
int gpu_mark(gpu *g, int mark);
/* After gpu_wait. */
int gpu_microseconds(gpu *g, int from, int to, double *us);

/* What reports say about the GPU; 0 or "" where the driver does not tell. */
typedef struct gpu_facts {
    size_t l2_bytes;
    nvml_facts nvml;
} gpu_facts;

void gpu_describe(const gpu *g, gpu_facts *facts);

/* Its clocks and power now. */
void gpu_get_state(const gpu *g, nvml_state *state);

#endif
