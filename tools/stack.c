/* SPDX-License-Identifier: Apache-2.0 */
#include "stack.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "monotonic.h"
#include "random.h"
#include "ranks.h"
#include "report.h"
#include "synth.h"

/* Steps before the first that counts, which bring clocks and caches to where they stay. */
enum { WARM_UPS = 3 };

enum { RANKS_MAX = 1024 };

/* The largest value that a rank has. Returns when all have come. */
static int most_of_ranks(const stack *s, double mine, double *most) {
    double all[RANKS_MAX] = {0};
    *most = mine;
    if (s->ranks == 1)
        return EXIT_DONE;
    TRY_LIBRARY(megamoe_comm_allgather(s->options.target.comm, &mine, all, sizeof mine));
    for (int32_t r = 0; r < s->ranks; r++)
        *most = all[r] > *most ? all[r] : *most;
    return EXIT_DONE;
}

/* ---- Layers ---- */

static int open_synthetic_layer(stack *s, int32_t index) {
    bench_target target = s->options.target;
    target.seed = index > 0 ? random_key(target.seed, (uint64_t)index) : target.seed;
    return bench_layer_synthetic(&target, s->options.name, &s->options.desc, &s->layers[index]);
}

/* `file` has been opened for its list of layers. */
static int open_stored_layer(stack *s, const source *file, int32_t index) {
    const int64_t layer =
        file->prepared ? ONLY_LAYER : megamoe_checkpoint_layer(file->checkpoint, index);
    return bench_layer_from_path(&s->options.target, file->path, layer, &s->layers[index]);
}

/* file: NULL for synthetic weights. */
static int open_some_layers(stack *s, const source *file) {
    int32_t most = s->options.layers;
    if (file != NULL && file->prepared)
        most = 1;
    else if (file != NULL && file->info.layers < most)
        most = file->info.layers;
    if (most == 0)
        return report_error("%s: no expert layer", file->path);
    double fit = 1; /* layers, on the rank that holds most of one */
    while (s->distinct < most && s->distinct < fit) {
        const int32_t index = s->distinct++;
        TRY(file != NULL ? open_stored_layer(s, file, index) : open_synthetic_layer(s, index));
        double bytes = 0;
        TRY(most_of_ranks(s, (double)megamoe_layer_bytes(s->layers[index].layer), &bytes));
        fit = floor((double)s->options.target.memory / bytes);
    }
    s->options.desc = s->layers[0].desc;
    return EXIT_DONE;
}

static int open_layers(stack *s) {
    s->layers = calloc((size_t)s->options.layers, sizeof *s->layers);
    if (s->layers == NULL)
        return report_error("out of memory for %" PRId32 " layers", s->options.layers);
    if (s->options.path == NULL)
        return open_some_layers(s, NULL);
    source file = {.path = s->options.path};
    int code = source_open(s->options.path, &file);
    if (code == EXIT_DONE)
        code = open_some_layers(s, &file);
    source_close(&file);
    return code;
}

static megamoe_layer *layer_at(const stack *s, int32_t index) {
    return s->layers[index % s->distinct].layer;
}

static int open_workspace(stack *s) {
    const megamoe_layer_desc *desc = &s->options.desc;
    megamoe_shape shape = MEGAMOE_INIT(megamoe_shape);
    shape.hidden = desc->hidden;
    shape.intermediate = desc->intermediate;
    shape.experts = desc->experts;
    shape.topk = desc->topk;
    shape.input_scale = s->options.input_scale;
    shape.activations = s->options.activations;
    megamoe_capacity capacity = MEGAMOE_INIT(megamoe_capacity);
    capacity.tokens = s->options.tokens;
    capacity.pool_rows = s->ranks * s->options.tokens * desc->topk; /* whatever the routes are */
    TRY_LIBRARY(megamoe_workspace_create(s->options.target.comm, s->options.target.device, &shape,
                                         &capacity, &s->workspace));
    for (int32_t i = 0; i < s->distinct; i++)
        TRY_LIBRARY(megamoe_prewarm(s->layers[i].layer, s->workspace));
    return EXIT_DONE;
}

/* ---- Buffers ---- */

/* Memory of the device that holds what lies at *host, which it takes over. */
static int move_to_device(stack *s, const char *what, void *host, size_t bytes, void **memory) {
    if (s->gpu == NULL) {
        *memory = host;
        return EXIT_DONE;
    }
    int code = gpu_allocate(s->gpu, what, bytes, memory);
    if (code == EXIT_DONE)
        code = gpu_upload(s->gpu, *memory, host, bytes);
    free(host);
    return code;
}

static int open_buffers(stack *s) {
    const int64_t tokens = s->options.tokens;
    const int32_t hidden = s->options.desc.hidden;
    const size_t slots = (size_t)tokens * (size_t)s->options.desc.topk;
    const size_t row_bytes = (size_t)tokens * (size_t)hidden * sizeof(uint16_t);
    const size_t ids_bytes = (size_t)s->options.layers * slots * sizeof *s->host_ids;
    uint16_t *x = malloc(row_bytes), *y = calloc(row_bytes, 1);
    float *weights = malloc(slots * sizeof *weights);
    s->host_ids = calloc(ids_bytes, 1);
    s->drawn = malloc((size_t)s->ranks * slots * sizeof *s->drawn);
    if (x == NULL || y == NULL || weights == NULL || s->host_ids == NULL || s->drawn == NULL ||
        !synth_input(s->options.target.seed + (uint64_t)s->rank, tokens, hidden, x)) {
        free(x);
        free(y);
        free(weights);
        return report_error("out of memory for %" PRId64 " tokens", tokens);
    }
    for (size_t i = 0; i < slots; i++)
        weights[i] = 1.0f / (float)s->options.desc.topk;
    int code = move_to_device(s, "the input", x, row_bytes, &s->x);
    int next = move_to_device(s, "the output", y, row_bytes, &s->y);
    code = code != EXIT_DONE ? code : next;
    next = move_to_device(s, "routing weights", weights, slots * sizeof *weights, &s->weights);
    code = code != EXIT_DONE ? code : next;
    s->all_ids = s->host_ids;
    if (code == EXIT_DONE && s->gpu != NULL)
        code = gpu_allocate(s->gpu, "expert ids", ids_bytes, &s->all_ids);
    return code;
}

static int warm_up(stack *s) {
    double ignored;
    for (int i = 1; i <= WARM_UPS; i++)
        TRY(stack_step(s, -i, s->options.tokens, &ignored));
    s->active = s->imbalance = 0;
    s->measured = 0;
    return EXIT_DONE;
}

int stack_open(const stack_options *options, const megamoe_device_info *device,
               routing_profile *routes, stack *s) {
    *s = (stack){.options = *options,
                 .routes = routes,
                 .rank = megamoe_comm_rank(options->target.comm),
                 .ranks = megamoe_comm_size(options->target.comm)};
    if (s->ranks > RANKS_MAX)
        return report_error("%" PRId32 " ranks; expected at most %d", s->ranks, RANKS_MAX);
    TRY(open_layers(s));
    TRY(routing_fit(routes, options->target.seed, s->options.desc.experts, s->options.desc.topk));
    if (ranks_on_gpu(device->name))
        TRY(gpu_open(device, &s->gpu));
    TRY(open_workspace(s));
    TRY(open_buffers(s));
    return warm_up(s);
}

void stack_close(stack *s) {
    megamoe_workspace_close(s->workspace);
    if (s->gpu == NULL) {
        free(s->x);
        free(s->y);
        free(s->weights);
    }
    gpu_close(s->gpu);
    free(s->host_ids);
    free(s->drawn);
    for (int32_t i = 0; i < s->distinct; i++)
        megamoe_layer_close(s->layers[i].layer);
    free(s->layers);
}

/* ---- A step ---- */

static int draw_routes(stack *s, int64_t step, int64_t tokens) {
    const int64_t slots = tokens * s->options.desc.topk;
    for (int32_t i = 0; i < s->options.layers; i++) {
        for (int32_t r = 0; r < s->ranks; r++) {
            const uint64_t seed = s->options.target.seed + ((uint64_t)r << 32);
            routing_draw(s->routes, (uint64_t)i, random_key(seed, (uint64_t)step), tokens,
                         s->drawn + r * slots);
        }
        memcpy(s->host_ids + i * slots, s->drawn + s->rank * slots,
               (size_t)slots * sizeof *s->drawn);
        const routing_load load = routing_measure(s->routes, s->drawn, s->ranks * tokens);
        s->active += load.active;
        s->imbalance += load.imbalance;
        s->measured++;
    }
    if (s->gpu == NULL)
        return EXIT_DONE;
    return gpu_upload(s->gpu, s->all_ids, s->host_ids,
                      (size_t)s->options.layers * (size_t)slots * sizeof *s->host_ids);
}

static int enqueue_layers(const stack *s, int64_t tokens) {
    const int64_t slots = tokens * s->options.desc.topk;
    void *stream = s->gpu != NULL ? gpu_stream(s->gpu) : NULL;
    const megamoe_view x = {s->x, MEGAMOE_DTYPE_BF16, tokens, 0};
    const megamoe_view weights = {s->weights, MEGAMOE_DTYPE_F32, tokens, 0};
    const megamoe_view y = {s->y, MEGAMOE_DTYPE_BF16, tokens, 0};
    for (int32_t i = 0; i < s->options.layers; i++) {
        const megamoe_view ids = {(int32_t *)s->all_ids + i * slots, MEGAMOE_DTYPE_I32, tokens, 0};
        TRY_LIBRARY(megamoe_stage(s->workspace, &x, &ids, &weights, tokens, stream));
        TRY_LIBRARY(megamoe_forward(layer_at(s, i), s->workspace, &y, stream));
    }
    return EXIT_DONE;
}

static int compute_on_gpu(const stack *s, int64_t tokens, double *seconds) {
    double us = 0;
    TRY(gpu_mark(s->gpu, 0));
    TRY(enqueue_layers(s, tokens));
    TRY(gpu_mark(s->gpu, 1));
    TRY(gpu_wait(s->gpu));
    TRY(gpu_microseconds(s->gpu, 0, 1, &us));
    *seconds = us * 1e-6;
    return EXIT_DONE;
}

int stack_step(void *user, int64_t step, int64_t tokens, double *seconds) {
    stack *s = user;
    double ignored;
    TRY(draw_routes(s, step, tokens));
    TRY(most_of_ranks(s, 0, &ignored)); /* all are ready */
    if (s->gpu != NULL) {
        TRY(compute_on_gpu(s, tokens, seconds));
    } else {
        const double start = monotonic_ms();
        TRY(enqueue_layers(s, tokens));
        *seconds = (monotonic_ms() - start) * 1e-3;
    }
    TRY_LIBRARY(megamoe_workspace_status(s->workspace, NULL));
    return most_of_ranks(s, *seconds, seconds);
}
