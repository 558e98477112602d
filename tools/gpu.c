/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"

/* Types of the driver's interface, as its ABI has them. */
typedef unsigned long long device_address;
typedef struct CUctx_st *context_handle;
typedef struct CUstream_st *stream_handle;
typedef struct CUevent_st *event_handle;
typedef struct CUgraph_st *graph_handle;
typedef struct CUgraphExec_st *executable_handle;
typedef struct CUmod_st *module_handle;
typedef struct CUfunc_st *function_handle;

/* X(name, symbol, arguments) */
#define DRIVER_LIST(X)                                                                             \
    X(init, "cuInit", (unsigned flags))                                                            \
    X(error_name, "cuGetErrorName", (int result, const char **name))                               \
    X(error_text, "cuGetErrorString", (int result, const char **text))                             \
    X(device_get, "cuDeviceGet", (int *device, int ordinal))                                       \
    X(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, int device))           \
    X(device_bus, "cuDeviceGetPCIBusId", (char *text, int bytes, int device))                      \
    X(context_retain, "cuDevicePrimaryCtxRetain", (context_handle * context, int device))          \
    X(context_release, "cuDevicePrimaryCtxRelease_v2", (int device))                               \
    X(context_set, "cuCtxSetCurrent", (context_handle context))                                    \
    X(allocate, "cuMemAlloc_v2", (device_address * memory, size_t bytes))                          \
    X(free, "cuMemFree_v2", (device_address memory))                                               \
    X(upload, "cuMemcpyHtoDAsync_v2",                                                              \
      (device_address to, const void *from, size_t bytes, stream_handle stream))                   \
    X(download, "cuMemcpyDtoHAsync_v2",                                                            \
      (void *to, device_address from, size_t bytes, stream_handle stream))                         \
    X(fill, "cuMemsetD8Async",                                                                     \
      (device_address memory, unsigned char byte, size_t bytes, stream_handle stream))             \
    X(stream_create, "cuStreamCreate", (stream_handle * stream, unsigned flags))                   \
    X(stream_destroy, "cuStreamDestroy_v2", (stream_handle stream))                                \
    X(stream_wait, "cuStreamSynchronize", (stream_handle stream))                                  \
    X(capture_begin, "cuStreamBeginCapture_v2", (stream_handle stream, int mode))                  \
    X(capture_end, "cuStreamEndCapture", (stream_handle stream, graph_handle * graph))             \
    X(graph_instantiate, "cuGraphInstantiateWithFlags",                                            \
      (executable_handle * executable, graph_handle graph, unsigned long long flags))              \
    X(graph_launch, "cuGraphLaunch", (executable_handle executable, stream_handle stream))         \
    X(graph_destroy, "cuGraphDestroy", (graph_handle graph))                                       \
    X(executable_destroy, "cuGraphExecDestroy", (executable_handle executable))                    \
    X(module_load, "cuModuleLoadData", (module_handle * module, const void *image))                \
    X(module_unload, "cuModuleUnload", (module_handle module))                                     \
    X(module_function, "cuModuleGetFunction",                                                      \
      (function_handle * function, module_handle module, const char *name))                        \
    X(launch, "cuLaunchKernel",                                                                    \
      (function_handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z,                \
       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,                \
       stream_handle stream, void **arguments, void **extra))                                      \
    X(event_create, "cuEventCreate", (event_handle * event, unsigned flags))                       \
    X(event_destroy, "cuEventDestroy_v2", (event_handle event))                                    \
    X(event_record, "cuEventRecord", (event_handle event, stream_handle stream))                   \
    X(event_elapsed, "cuEventElapsedTime", (float *ms, event_handle from, event_handle to))

enum {
    NON_BLOCKING = 1, /* CU_STREAM_NON_BLOCKING */
    CAPTURE_THREAD_LOCAL = 1 /* CU_STREAM_CAPTURE_MODE_THREAD_LOCAL */,
    L2_CACHE_SIZE = 38,   /* CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE */
    MULTIPROCESSORS = 16, /* CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT */
    MAX_ALLOCATIONS = 16,
    BUS_BYTES = 32,
    READ_BYTES = 16, /* of one load */
    READ_THREADS = 512,
    READ_BLOCKS_PER_MULTIPROCESSOR = 4
};

struct gpu_graph {
    executable_handle executable;
};

struct gpu {
    struct {
#define X(name, symbol, arguments) int(*name) arguments;
        DRIVER_LIST(X)
#undef X
    } cu;
    nvml *nvml;
    int device;
    context_handle context;
    stream_handle stream;
    device_address allocations[MAX_ALLOCATIONS];
    int n_allocations;
    event_handle marks[GPU_MAX_MARKS];
    module_handle module; /* of the kernel that reads, once it is needed */
    function_handle read, pause;
};

/* ISO C has no conversion between pointers to objects and to functions; POSIX has. */
static bool find(void *library, const char *symbol, void *function, size_t bytes) {
    void *found = dlsym(library, symbol);
    memcpy(function, &found, bytes);
    return found != NULL;
}

static int fail(const gpu *g, int result, const char *what) {
    const char *name = NULL, *text = NULL;
    if (g->cu.error_name(result, &name) != 0 || name == NULL)
        name = "unknown error";
    if (g->cu.error_text(result, &text) != 0 || text == NULL)
        text = "no description";
    return report_error("%s: %s (%d, %s)", what, name, result, text);
}

#define TRY_DRIVER(g, call, what)                                                                  \
    do {                                                                                           \
        const int result_ = (call);                                                                \
        if (result_ != 0)                                                                          \
            return fail((g), result_, (what));                                                     \
    } while (0)

static device_address address_of(const void *memory) {
    return (device_address)(uintptr_t)memory;
}

/* The driver is never closed: it has threads of its own. */
static int load_driver(gpu *g) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return report_error("no CUDA driver: %s", dlerror());
#define X(name, symbol, arguments)                                                                 \
    if (!find(library, symbol, &g->cu.name, sizeof g->cu.name))                                    \
        return report_error("libcuda.so.1 lacks %s: expected the driver of CUDA 12 or later",      \
                            symbol);
    DRIVER_LIST(X)
#undef X
    return EXIT_DONE;
}

int gpu_open(const megamoe_device_info *device, gpu **opened) {
    gpu *g = *opened = calloc(1, sizeof *g);
    if (g == NULL)
        return report_error("out of memory");
    static const char prefix[] = "cuda:";
    if (strncmp(device->name, prefix, sizeof prefix - 1) != 0)
        return report_error("%s: is no CUDA device", device->name);
    const int ordinal = (int)strtol(device->name + sizeof prefix - 1, NULL, 10);
    const int code = load_driver(g);
    if (code != EXIT_DONE)
        return code;
    TRY_DRIVER(g, g->cu.init(0), "initialising the CUDA driver");
    TRY_DRIVER(g, g->cu.device_get(&g->device, ordinal), device->name);
    TRY_DRIVER(g, g->cu.context_retain(&g->context, g->device), "a CUDA context");
    TRY_DRIVER(g, g->cu.context_set(g->context), "a CUDA context");
    TRY_DRIVER(g, g->cu.stream_create(&g->stream, NON_BLOCKING), "a CUDA stream");
    char bus[BUS_BYTES];
    if (g->cu.device_bus(bus, sizeof bus, g->device) == 0)
        g->nvml = nvml_open(bus);
    return EXIT_DONE;
}

int gpu_use(gpu *g) {
    TRY_DRIVER(g, g->cu.context_set(g->context), "a CUDA context");
    return EXIT_DONE;
}

void gpu_close(gpu *g) {
    if (g == NULL)
        return;
    if (g->context != NULL)
        g->cu.context_set(g->context);
    if (g->stream != NULL) {
        g->cu.stream_wait(g->stream);
        g->cu.stream_destroy(g->stream);
    }
    for (int i = 0; i < GPU_MAX_MARKS; i++)
        if (g->marks[i] != NULL)
            g->cu.event_destroy(g->marks[i]);
    for (int i = 0; i < g->n_allocations; i++)
        g->cu.free(g->allocations[i]);
    if (g->module != NULL)
        g->cu.module_unload(g->module);
    if (g->context != NULL) {
        g->cu.context_set(NULL);
        g->cu.context_release(g->device);
    }
    nvml_close(g->nvml);
    free(g);
}

void *gpu_stream(const gpu *g) {
    return g->stream;
}

int gpu_allocate(gpu *g, const char *what, size_t bytes, void **memory) {
    char text[128], size[REPORT_SIZE_BYTES];
    snprintf(text, sizeof text, "%s of device memory for %s", report_size(bytes, size), what);
    if (g->n_allocations == MAX_ALLOCATIONS)
        return report_error("%s: more than %d allocations", text, MAX_ALLOCATIONS);
    device_address *address = &g->allocations[g->n_allocations];
    TRY_DRIVER(g, g->cu.allocate(address, bytes > 0 ? bytes : 1), text);
    g->n_allocations++;
    *memory = (void *)(uintptr_t)*address;
    return EXIT_DONE;
}

int gpu_upload(gpu *g, void *to, const void *from, size_t bytes) {
    if (bytes > 0)
        TRY_DRIVER(g, g->cu.upload(address_of(to), from, bytes, g->stream), "copying to the GPU");
    return gpu_wait(g);
}

int gpu_download(gpu *g, void *to, const void *from, size_t bytes) {
    if (bytes > 0)
        TRY_DRIVER(g, g->cu.download(to, address_of(from), bytes, g->stream),
                   "copying from the GPU");
    return gpu_wait(g);
}

int gpu_fill(gpu *g, void *memory, unsigned char byte, size_t bytes) {
    TRY_DRIVER(g, g->cu.fill(address_of(memory), byte, bytes, g->stream), "filling device memory");
    return EXIT_DONE;
}

/*
 * read_through reads words of 16 bytes, `step` threads one after the other each. Volatile loads
 * bypass L1 and are made although nothing uses what they bring. pause waits by the clock that all
 * multiprocessors have in common.
 */
static const char ptx[] = ".version 8.0\n"
                          ".target sm_90\n"
                          ".address_size 64\n"
                          ".visible .entry pause(.param .u64 nanoseconds)\n"
                          "{\n"
                          ".reg .pred %p;\n"
                          ".reg .b64 %begin, %now, %nanoseconds;\n"
                          "ld.param.u64 %nanoseconds, [nanoseconds];\n"
                          "mov.u64 %begin, %globaltimer;\n"
                          "wait:\n"
                          "mov.u64 %now, %globaltimer;\n"
                          "sub.u64 %now, %now, %begin;\n"
                          "setp.lt.u64 %p, %now, %nanoseconds;\n"
                          "@%p bra wait;\n"
                          "ret;\n"
                          "}\n"
                          ".visible .entry read_through(.param .u64 memory, .param .u64 words)\n"
                          "{\n"
                          ".reg .pred %p;\n"
                          ".reg .b32 %r<5>, %v<4>;\n"
                          ".reg .b64 %word, %words, %step, %memory, %address;\n"
                          "ld.param.u64 %memory, [memory];\n"
                          "ld.param.u64 %words, [words];\n"
                          "cvta.to.global.u64 %memory, %memory;\n"
                          "mov.u32 %r0, %ctaid.x;\n"
                          "mov.u32 %r1, %ntid.x;\n"
                          "mov.u32 %r2, %tid.x;\n"
                          "mov.u32 %r3, %nctaid.x;\n"
                          "mad.lo.u32 %r0, %r0, %r1, %r2;\n"
                          "mul.lo.u32 %r4, %r1, %r3;\n"
                          "cvt.u64.u32 %word, %r0;\n"
                          "cvt.u64.u32 %step, %r4;\n"
                          "next:\n"
                          "setp.ge.u64 %p, %word, %words;\n"
                          "@%p bra done;\n"
                          "shl.b64 %address, %word, 4;\n"
                          "add.u64 %address, %memory, %address;\n"
                          "ld.volatile.global.v4.u32 {%v0, %v1, %v2, %v3}, [%address];\n"
                          "add.u64 %word, %word, %step;\n"
                          "bra next;\n"
                          "done:\n"
                          "ret;\n"
                          "}\n";

static int load_kernels(gpu *g) {
    if (g->module != NULL)
        return EXIT_DONE;
    TRY_DRIVER(g, g->cu.module_load(&g->module, ptx), "the benchmark's kernels");
    TRY_DRIVER(g, g->cu.module_function(&g->read, g->module, "read_through"),
               "a kernel that reads memory");
    TRY_DRIVER(g, g->cu.module_function(&g->pause, g->module, "pause"), "a kernel that waits");
    return EXIT_DONE;
}

int gpu_pause(gpu *g, double microseconds) {
    TRY(load_kernels(g));
    unsigned long long nanoseconds = (unsigned long long)(microseconds * 1e3);
    void *arguments[] = {&nanoseconds};
    TRY_DRIVER(g, g->cu.launch(g->pause, 1, 1, 1, 1, 1, 1, 0, g->stream, arguments, NULL),
               "waiting on the GPU");
    return EXIT_DONE;
}

int gpu_read(gpu *g, const void *memory, size_t bytes) {
    TRY(load_kernels(g));
    int multiprocessors;
    TRY_DRIVER(g, g->cu.device_attribute(&multiprocessors, MULTIPROCESSORS, g->device),
               "the number of multiprocessors");
    device_address address = address_of(memory);
    unsigned long long words = bytes / READ_BYTES;
    void *arguments[] = {&address, &words};
    TRY_DRIVER(g,
               g->cu.launch(g->read, (unsigned)multiprocessors * READ_BLOCKS_PER_MULTIPROCESSOR, 1,
                            1, READ_THREADS, 1, 1, 0, g->stream, arguments, NULL),
               "reading device memory");
    return EXIT_DONE;
}

int gpu_wait(gpu *g) {
    TRY_DRIVER(g, g->cu.stream_wait(g->stream), "waiting for the GPU");
    return EXIT_DONE;
}

int gpu_capture_begin(gpu *g) {
    TRY_DRIVER(g, g->cu.capture_begin(g->stream, CAPTURE_THREAD_LOCAL), "capturing a CUDA graph");
    return EXIT_DONE;
}

int gpu_capture_end(gpu *g, gpu_graph **graph) {
    graph_handle captured = NULL;
    *graph = NULL;
    TRY_DRIVER(g, g->cu.capture_end(g->stream, &captured), "capturing a CUDA graph");
    executable_handle executable = NULL;
    const int result = g->cu.graph_instantiate(&executable, captured, 0);
    g->cu.graph_destroy(captured);
    TRY_DRIVER(g, result, "instantiating a CUDA graph");
    *graph = malloc(sizeof **graph);
    if (*graph == NULL) {
        g->cu.executable_destroy(executable);
        return report_error("out of memory");
    }
    (*graph)->executable = executable;
    return EXIT_DONE;
}

int gpu_replay(gpu *g, const gpu_graph *graph) {
    TRY_DRIVER(g, g->cu.graph_launch(graph->executable, g->stream), "launching a CUDA graph");
    return EXIT_DONE;
}

void gpu_graph_close(gpu *g, gpu_graph *graph) {
    if (graph == NULL)
        return;
    g->cu.executable_destroy(graph->executable);
    free(graph);
}

int gpu_mark(gpu *g, int mark) {
    if (g->marks[mark] == NULL)
        TRY_DRIVER(g, g->cu.event_create(&g->marks[mark], 0), "a CUDA event");
    TRY_DRIVER(g, g->cu.event_record(g->marks[mark], g->stream), "recording a CUDA event");
    return EXIT_DONE;
}

int gpu_microseconds(gpu *g, int from, int to, double *us) {
    float ms;
    TRY_DRIVER(g, g->cu.event_elapsed(&ms, g->marks[from], g->marks[to]), "a measured time");
    *us = 1e3 * (double)ms;
    return EXIT_DONE;
}

void gpu_describe(const gpu *g, gpu_facts *facts) {
    *facts = (gpu_facts){0};
    int l2_bytes;
    if (g->cu.device_attribute(&l2_bytes, L2_CACHE_SIZE, g->device) == 0)
        facts->l2_bytes = (size_t)l2_bytes;
    nvml_describe(g->nvml, &facts->nvml);
}

void gpu_get_state(const gpu *g, nvml_state *state) {
    nvml_get_state(g->nvml, state);
}
