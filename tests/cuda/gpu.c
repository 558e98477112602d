/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/device.h"
#include "cuda/cubins.h"
#include "cuda/device.h"
#include "layer/layer.h"

enum {
    ROW_GAP = 8, /* elements between rows of x and y */
    MARGIN = 2   /* rows before and after y */
};

megamoe_device *gpu_open(const megamoe_device_options *options) {
    megamoe_device *device;
    const megamoe_status status = megamoe_device_open("cuda:0", options, &device);
    if (status == MEGAMOE_EUNSUPPORTED && !getenv("MEGAMOE_TEST_GPU"))
        T_SKIP("%s", megamoe_last_error());
    T_OK(status);
    return device;
}

gpu gpu_start(void) {
    gpu g = {.device = gpu_open(NULL)};
    T_OK(mm_cuda_enter(g.device->cuda, &g.before));
    gpu_check(mm_cu.cuStreamCreate(&g.stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    return g;
}

void gpu_end(gpu *g) {
    gpu_check(mm_cu.cuStreamDestroy(g->stream), "cuStreamDestroy");
    mm_cuda_leave(g->before);
    megamoe_device_close(g->device);
}

/* ---- memory ---- */

void gpu_check(CUresult result, const char *what) {
    const char *name = NULL;
    if (result != CUDA_SUCCESS)
        (void)mm_cu.cuGetErrorName(result, &name);
    if (!T_CHECK_MSG(result == CUDA_SUCCESS, "%s: %s (%d)", what, name ? name : "?", result))
        t_leave();
}

static CUdeviceptr address(const void *memory) {
    return (CUdeviceptr)(uintptr_t)memory;
}

void *gpu_memory(size_t bytes) {
    CUdeviceptr memory = 0;
    gpu_check(mm_cu.cuMemAlloc(&memory, bytes), "cuMemAlloc");
    gpu_fill((void *)(uintptr_t)memory, 0xFF, bytes);
    return (void *)(uintptr_t)memory;
}

void *gpu_copy(const void *from, size_t bytes) {
    void *memory = gpu_memory(bytes);
    gpu_write(memory, from, bytes);
    return memory;
}

void gpu_free(void *memory) {
    if (memory)
        gpu_check(mm_cu.cuMemFree(address(memory)), "cuMemFree");
}

void gpu_write(void *to, const void *from, size_t bytes) {
    gpu_check(mm_cu.cuMemcpyHtoD(address(to), from, bytes), "cuMemcpyHtoD");
    /* The copy from unpinned memory may end after the call; streams of ours do not wait for it. */
    gpu_check(mm_cu.cuStreamSynchronize(NULL), "cuStreamSynchronize");
}

void gpu_read(void *to, const void *from, size_t bytes) {
    gpu_check(mm_cu.cuMemcpyDtoH(to, address(from), bytes), "cuMemcpyDtoH");
}

void gpu_fill(void *to, uint8_t byte, size_t bytes) {
    gpu_check(mm_cu.cuMemsetD8Async(address(to), byte, bytes, NULL), "cuMemsetD8Async");
    gpu_check(mm_cu.cuStreamSynchronize(NULL), "cuStreamSynchronize");
}

void gpu_wait(void) {
    gpu_check(mm_cu.cuCtxSynchronize(), "cuCtxSynchronize");
}

/* ---- batches ---- */

static int64_t row_stride(const gpu_batch *b) {
    return (b->hidden + 7) / 8 * 8 + ROW_GAP;
}

static size_t y_bytes(const gpu_batch *b) {
    return (size_t)((b->room + 2 * MARGIN) * row_stride(b)) * sizeof(uint16_t);
}

static uint8_t *moved(const void *memory, int64_t bytes) {
    return (uint8_t *)(uintptr_t)memory + bytes;
}

gpu_batch gpu_batch_open(int64_t room, int32_t hidden, int32_t topk) {
    gpu_batch b = {.room = room, .hidden = hidden, .topk = topk};
    b.x = gpu_memory((size_t)(room * row_stride(&b)) * sizeof(uint16_t));
    b.ids = gpu_memory((size_t)(room * topk) * sizeof(int32_t));
    b.weights = gpu_memory((size_t)(room * topk) * sizeof(float));
    b.y = gpu_memory(y_bytes(&b));
    return b;
}

void gpu_batch_close(gpu_batch *b) {
    gpu_free(b->x);
    gpu_free(b->ids);
    gpu_free(b->weights);
    gpu_free(b->y);
}

void gpu_batch_put(gpu_batch *b, const batch *from) {
    T_REQUIRE(from->tokens <= b->room && from->hidden == b->hidden && from->topk == b->topk);
    const int64_t stride = row_stride(b), routes = from->tokens * b->topk;
    b->tokens = from->tokens;
    gpu_fill(b->y, 0xFF, y_bytes(b));
    if (!from->tokens)
        return;
    uint16_t *x = malloc((size_t)(from->tokens * stride) * sizeof *x);
    T_REQUIRE(x);
    memset(x, 0xFF, (size_t)(from->tokens * stride) * sizeof *x);
    for (int64_t t = 0; t < from->tokens; t++)
        memcpy(x + t * stride, from->x + t * b->hidden, (size_t)b->hidden * sizeof *x);
    gpu_write(b->x, x, (size_t)(from->tokens * stride) * sizeof *x);
    free(x);
    gpu_write(b->ids, from->ids, (size_t)routes * sizeof *from->ids);
    gpu_write(b->weights, from->weights, (size_t)routes * sizeof *from->weights);
}

megamoe_view gpu_batch_y(const gpu_batch *b, int64_t first, int64_t tokens) {
    const int64_t stride = row_stride(b);
    return (megamoe_view){moved(b->y, (MARGIN + first) * stride * (int64_t)sizeof(uint16_t)),
                          MEGAMOE_DTYPE_BF16, tokens, stride};
}

static bool all_ones(const uint16_t *from, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (from[i] != 0xFFFF)
            return false;
    return true;
}

static uint16_t *read_y(const gpu_batch *b) {
    uint16_t *all = malloc(y_bytes(b));
    T_REQUIRE(all);
    gpu_wait();
    gpu_read(all, b->y, y_bytes(b));
    return all;
}

void gpu_batch_result(const gpu_batch *b, uint16_t *y) {
    uint16_t *all = read_y(b);
    const int64_t stride = row_stride(b);
    const uint16_t *rows = all + MARGIN * stride, *end = rows + b->tokens * stride;
    T_CHECK_MSG(all_ones(all, MARGIN * stride), "something was written before y");
    T_CHECK_MSG(all_ones(end, (MARGIN + b->room - b->tokens) * stride),
                "something was written after y");
    for (int64_t t = 0; t < b->tokens; t++, rows += stride) {
        memcpy(y + t * b->hidden, rows, (size_t)b->hidden * sizeof *y);
        T_CHECK_MSG(all_ones(rows + b->hidden, stride - b->hidden),
                    "something was written behind row %d of y", (int)t);
    }
    free(all);
}

bool gpu_batch_untouched(const gpu_batch *b) {
    uint16_t *all = read_y(b);
    const bool untouched = all_ones(all, (int64_t)(y_bytes(b) / sizeof *all));
    free(all);
    return untouched;
}

/* ---- fleets ---- */

static void open_rank(rank *r, void *argument) {
    const setup *s = argument;
    megamoe_layer_options options = s->options;
    options.struct_size = sizeof options;
    T_STATUS(megamoe_layer_create(r->comm, r->device, s->weights, &options, &r->layer), MEGAMOE_OK);
    T_STATUS(megamoe_workspace_create(r->comm, r->device, &r->shape, &r->capacity, &r->workspace),
             MEGAMOE_OK);
}

fleet gpu_fleet_open(const setup *s, int32_t max_ctas) {
    setup how = *s;
    how.device = "cuda:0";
    fleet f = fleet_open_comms(&how);
    megamoe_device_options options = MEGAMOE_INIT(megamoe_device_options);
    options.threads = 1;
    options.no_pinning = true;
    options.max_ctas = max_ctas;
    for (int32_t r = 0; r < f.ranks; r++) {
        megamoe_device_close(f.rank[r].device);
        f.rank[r].device = gpu_open(&options);
    }
    fleet_each(&f, open_rank, &how);
    for (int32_t r = 0; r < f.ranks; r++) {
        T_REQUIRE(f.rank[r].layer && f.rank[r].workspace);
        T_OK(megamoe_prewarm(f.rank[r].layer, f.rank[r].workspace));
    }
    return f;
}

void gpu_stage(fleet *f, const gpu_batch *b, CUstream stream) {
    const int64_t stride = row_stride(b);
    for (int32_t r = 0; r < f->ranks; r++) {
        int64_t first;
        const batch all = {.tokens = b->tokens};
        const int64_t tokens = share_of(&all, r, f->ranks, &first).tokens;
        const int64_t row = first * b->topk;
        const megamoe_view x = {moved(b->x, first * stride * (int64_t)sizeof(uint16_t)),
                                MEGAMOE_DTYPE_BF16, tokens, stride};
        const megamoe_view ids = {moved(b->ids, row * (int64_t)sizeof(int32_t)), MEGAMOE_DTYPE_I32,
                                  tokens, 0};
        const megamoe_view weights = {moved(b->weights, row * (int64_t)sizeof(float)),
                                      MEGAMOE_DTYPE_F32, tokens, 0};
        T_OK(megamoe_stage(f->rank[r].workspace, &x, &ids, &weights, tokens, stream));
    }
}

megamoe_status gpu_compute(fleet *f, const gpu_batch *b, CUstream stream) {
    megamoe_forward_call calls[MAX_RANKS];
    megamoe_view views[MAX_RANKS];
    for (int32_t r = 0; r < f->ranks; r++) {
        int64_t first;
        const batch all = {.tokens = b->tokens};
        const int64_t tokens = share_of(&all, r, f->ranks, &first).tokens;
        views[r] = gpu_batch_y(b, first, tokens);
        calls[r] =
            (megamoe_forward_call){f->rank[r].layer, f->rank[r].workspace, &views[r], stream};
    }
    if (f->folded)
        return megamoe_forward_group(calls, f->ranks);
    T_REQUIRE(f->ranks == 1);
    return megamoe_forward(f->rank[0].layer, f->rank[0].workspace, &views[0], stream);
}

void gpu_forward(fleet *f, gpu_batch *g, const batch *b, uint16_t *y, CUstream stream) {
    gpu_batch_put(g, b);
    gpu_stage(f, g, stream);
    T_OK(gpu_compute(f, g, stream));
    gpu_batch_result(g, y);
    for (int32_t r = 0; r < f->ranks; r++)
        T_OK(megamoe_workspace_status(f->rank[r].workspace, NULL));
}

int32_t gpu_tiles(const fleet *f, int32_t tiles[GPU_TILES_MAX]) {
    const mm_cuda_layer *layer = &f->rank[0].layer->cuda;
    const bool promote = layer->accumulate == MEGAMOE_ACCUMULATE_PROMOTE;
    int32_t n = 0;
    for (int32_t i = 0; i < mm_forward_variant_count; i++) {
        const mm_forward_variant *v = &mm_forward_variants[i];
        if (v->format != layer->layout.format || v->promote != promote)
            continue;
        T_REQUIRE(n < GPU_TILES_MAX);
        tiles[n++] = v->tile_tokens;
    }
    return n;
}

void gpu_force_tile(fleet *f, int32_t tile) {
    for (int32_t r = 0; r < f->ranks; r++)
        f->rank[r].workspace->plan.token_tile = tile;
}

/* ---- results ---- */

void gpu_reference(const setup *s, const batch *b, uint16_t *y) {
    megamoe_reference_options options = MEGAMOE_INIT(megamoe_reference_options);
    options.sum = MEGAMOE_SUM_WGMMA;
    options.accumulate = s->options.accumulate;
    options.nvfp4 = s->options.nvfp4;
    options.weight_after_fc2 = s->options.weight_after_fc2;
    options.input_scale = s->input_scale;
    const megamoe_view x = view_x(b), ids = view_ids(b), weights = view_weights(b);
    const megamoe_view vy = view_y(y, b);
    T_OK(megamoe_reference_forward(s->weights, &options, b->topk, &x, &ids, &weights, b->tokens,
                                   &vy));
}

void gpu_reference_repeated(const setup *s, const batch *b, int64_t distinct, uint16_t *y) {
    const batch first = batch_part(b, 0, distinct);
    gpu_reference(s, &first, y);
    const size_t row = (size_t)b->hidden;
    for (size_t t = (size_t)distinct; t < (size_t)b->tokens; t++)
        memcpy(y + t * row, y + (t - (size_t)distinct) * row, row * sizeof *y);
}

uint16_t *gpu_rows(const batch *b) {
    uint16_t *rows = calloc((size_t)(b->tokens * b->hidden) + 1, sizeof *rows);
    T_REQUIRE(rows);
    return rows;
}

bool gpu_same(const uint16_t *y, const uint16_t *want, const batch *b, const char *format, ...) {
    char what[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    int64_t elements = 0, tokens = 0, token = -1, channel = 0;
    double difference = 0, norm = 0; /* squares, where both are finite */
    for (int64_t t = 0; t < b->tokens; t++) {
        const uint16_t *got = y + t * b->hidden, *wanted = want + t * b->hidden;
        if (same_rows(got, wanted, b->hidden))
            continue;
        tokens++;
        for (int64_t i = 0; i < b->hidden; i++) {
            const double x = from_bf16(got[i]), z = from_bf16(wanted[i]);
            if (isfinite(x) && isfinite(z)) {
                difference += (x - z) * (x - z);
                norm += z * z;
            }
            if (same_rows(got + i, wanted + i, 1))
                continue;
            elements++;
            if (token < 0) {
                token = t;
                channel = i;
            }
        }
    }
    if (token < 0)
        return T_CHECK(true);
    const uint16_t got = y[token * b->hidden + channel], wanted = want[token * b->hidden + channel];
    return T_CHECK_MSG(
        false,
        "%s: %d elements of %d tokens differ (of %d tokens, %d channels), by %.1e of "
        "these tokens' length; first token %d, channel %d: %g (0x%04X), expected %g "
        "(0x%04X)",
        what, (int)elements, (int)tokens, (int)b->tokens, b->hidden,
        sqrt(difference / fmax(norm, 1e-300)), (int)token, (int)channel, from_bf16(got), got,
        from_bf16(wanted), wanted);
}
