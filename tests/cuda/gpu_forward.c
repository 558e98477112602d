/* SPDX-License-Identifier: Apache-2.0 */
/* A forward on a GPU is, to the bit, the scalar reference with the tensor core's sum. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu.h"

/* Weights as the multiplier sees them. */
typedef struct arithmetic {
    const char *name;
    megamoe_format format;
    megamoe_nvfp4_mode nvfp4;
} arithmetic;

enum { ARITHMETICS = 3 };

static const arithmetic all[ARITHMETICS] = {
    {"mxfp4", MEGAMOE_FORMAT_MXFP4, MEGAMOE_NVFP4_EXACT},
    {"nvfp4 exact", MEGAMOE_FORMAT_NVFP4, MEGAMOE_NVFP4_EXACT},
    {"nvfp4 folded", MEGAMOE_FORMAT_NVFP4, MEGAMOE_NVFP4_FOLDED},
};

static const char *const accumulates[] = {"mma", "promote"};
static const char *const scales[] = {"scale per token", "scale per block"};

/* A setup on the GPU and the reference's result for a whole batch. */
typedef struct trial {
    const gpu *g;
    fleet f;
    gpu_batch buffers;
    const batch *b;
    uint16_t *want, *y;
} trial;

/* The batch's token t is its token t % distinct. */
static trial open_repeated(const gpu *g, const setup *s, const batch *b, int64_t distinct) {
    setup on_gpu = *s;
    on_gpu.device = "cuda:0";
    on_gpu.deadline_ms = GPU_DEADLINE_MS;
    on_gpu.topk = b->topk;
    if (!on_gpu.tokens)
        on_gpu.tokens = b->tokens ? b->tokens : 1;
    trial t = {.g = g,
               .f = fleet_open(&on_gpu),
               .buffers = gpu_batch_open(b->tokens + 1, b->hidden, b->topk),
               .b = b,
               .want = gpu_rows(b),
               .y = gpu_rows(b)};
    gpu_reference_repeated(s, b, distinct, t.want);
    return t;
}

static trial open_trial(const gpu *g, const setup *s, const batch *b) {
    return open_repeated(g, s, b, b->tokens);
}

static void close_trial(trial *t) {
    gpu_batch_close(&t->buffers);
    fleet_close(&t->f);
    free(t->want);
    free(t->y);
}

/* Tokens first..first + n - 1 by themselves. */
static bool check_part(trial *t, int64_t first, int64_t n, int32_t tile, const char *what) {
    const batch part = batch_part(t->b, first, n);
    gpu_force_tile(&t->f, tile);
    gpu_forward(&t->f, &t->buffers, &part, t->y, t->g->stream);
    return gpu_same(t->y, t->want + first * t->b->hidden, &part, "%s, %d tokens, tile %d", what,
                    (int)n, tile);
}

static void check_every_tile(trial *t, const char *what) {
    int32_t tiles[GPU_TILES_MAX];
    const int32_t n = gpu_tiles(&t->f, tiles);
    const int64_t tokens = t->b->tokens;
    for (int32_t i = -1; i < n; i++) {
        const int32_t tile = i < 0 ? 0 : tiles[i];
        check_part(t, 0, tokens, tile, what);
        check_part(t, tokens / 2, 1, tile, what);
        check_part(t, tokens / 3, (tokens + 2) / 3, tile, what);
    }
}

static void check_once(const gpu *g, const setup *s, const batch *b, const char *what) {
    trial t = open_trial(g, s, b);
    check_part(&t, 0, b->tokens, 0, what);
    close_trial(&t);
}

/* The first thing to look at when something is wrong. */
T_CASE(forward_one_token) {
    gpu g = gpu_start();
    t_random r = t_random_start(1);
    const model_recipe recipe = {MEGAMOE_FORMAT_MXFP4, 256, 128, 1, MEGAMOE_DTYPE_NONE, {0, 0, 0}};
    model m = model_open(&recipe, &r);
    batch b = batch_random(&m, 1, 1, ROUTING_RANDOM, &r);
    const setup s = {.weights = m.weights};
    check_once(&g, &s, &b, "mxfp4");
    const gpu on_default = {.device = g.device}; /* the default stream */
    check_once(&on_default, &s, &b, "mxfp4 on the default stream");
    batch_free(&b);
    model_close(&m);
    gpu_end(&g);
}

static void check_format(const gpu *g, int i) {
    const arithmetic *a = &all[i / 4];
    const bool promote = i & 1, block = i & 2;
    t_random r = t_random_start(100 + (uint64_t)i);
    const model_recipe recipe = {a->format, 320, 160, 5, MEGAMOE_DTYPE_NONE, {0, 0, 10}};
    model m = model_open(&recipe, &r);
    batch b = batch_random(&m, 101, 2, (routing)(i % 3), &r);
    batch_mask(&b, 11, &r);
    const setup s = {
        .weights = m.weights,
        .input_scale = block ? MEGAMOE_SCALE_BLOCK : MEGAMOE_SCALE_TOKEN,
        .options = {.accumulate = promote ? MEGAMOE_ACCUMULATE_PROMOTE : MEGAMOE_ACCUMULATE_MMA,
                    .nvfp4 = a->nvfp4}};
    char what[128];
    snprintf(what, sizeof what, "%s, %s, %s", a->name, accumulates[promote], scales[block]);
    trial t = open_trial(g, &s, &b);
    check_every_tile(&t, what);
    close_trial(&t);
    batch_free(&b);
    model_close(&m);
}

T_CASE(forward_every_format_scale_and_tile) {
    gpu g = gpu_start();
    for (int i = 0; i < 4 * ARITHMETICS; i++)
        check_format(&g, i);
    gpu_end(&g);
}

static void check_options(const gpu *g, int i) {
    static const megamoe_dtype biases[] = {MEGAMOE_DTYPE_NONE, MEGAMOE_DTYPE_BF16,
                                           MEGAMOE_DTYPE_F32};
    static const megamoe_activation activations[] = {{0, 0, 0}, {0, 0, 1.5f}, {1.702f, 1, 7}};
    const arithmetic *a = &all[i % 3];
    const int bias = i / 3 % 3, activation = i / 9 % 3, after = i / 27 % 2;
    const int promote = (i + i / 3) % 2, block = i / 2 % 2;
    t_random r = t_random_start(200 + (uint64_t)i);
    const model_recipe recipe = {a->format, 192, 96, 4, biases[bias], activations[activation]};
    model m = model_open(&recipe, &r);
    batch b = batch_random(&m, 21, 2, ROUTING_RANDOM, &r);
    const setup s = {.weights = m.weights,
                     .input_scale = (megamoe_input_scale)block,
                     .options = {.accumulate = (megamoe_accumulate)promote,
                                 .weight_after_fc2 = after,
                                 .nvfp4 = a->nvfp4}};
    char what[160];
    snprintf(what, sizeof what, "%s, %s, %s, bias %s, activation %d, weight %s FC2", a->name,
             accumulates[promote], scales[block], megamoe_dtype_name(biases[bias]), activation,
             after ? "after" : "before");
    check_once(g, &s, &b, what);
    batch_free(&b);
    model_close(&m);
}

/* Globals of gate, up and down differ in every NVFP4 model. */
T_CASE(forward_activation_biases_and_weights) {
    gpu g = gpu_start();
    for (int i = 0; i < 54; i++)
        check_options(&g, i);
    gpu_end(&g);
}

static void check_geometry(const gpu *g, const arithmetic *a, int32_t hidden, int32_t intermediate,
                           int64_t tokens, megamoe_dtype bias, uint64_t stream) {
    t_random r = t_random_start(stream);
    const model_recipe recipe = {a->format, hidden, intermediate, 2, bias, {0, 0, 10}};
    model m = model_open(&recipe, &r);
    batch b = batch_random(&m, tokens, 1, ROUTING_RANDOM, &r);
    char what[128];
    for (int i = 0; i < 2; i++) {
        const setup s = {.weights = m.weights,
                         .input_scale = i ? MEGAMOE_SCALE_BLOCK : MEGAMOE_SCALE_TOKEN,
                         .options = {.nvfp4 = a->nvfp4}};
        snprintf(what, sizeof what, "%s, hidden %d, intermediate %d, %s", a->name, hidden,
                 intermediate, scales[i]);
        check_once(g, &s, &b, what);
    }
    batch_free(&b);
    model_close(&m);
}

T_CASE(forward_geometries_that_are_padded) {
    static const int32_t pairs[][2] = {{32, 32},   {96, 96},   {128, 128}, {160, 288},
                                       {256, 128}, {128, 256}, {384, 640}, {992, 352},
                                       {96, 1152}, {1536, 96}, {2048, 768}};
    gpu g = gpu_start();
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (int j = 0; j < ARITHMETICS; j++)
            check_geometry(&g, &all[j], pairs[i][0], pairs[i][1], 9,
                           i % 2 ? MEGAMOE_DTYPE_F32 : MEGAMOE_DTYPE_NONE, 300 + 3 * i);
    static const int32_t narrow[][2] = {{16, 16}, {48, 80}, {144, 272}};
    for (size_t i = 0; i < sizeof narrow / sizeof *narrow; i++)
        for (int j = 1; j < ARITHMETICS; j++)
            check_geometry(&g, &all[j], narrow[i][0], narrow[i][1], 9, MEGAMOE_DTYPE_BF16,
                           400 + 3 * i);
    gpu_end(&g);
}

/* What a layer of a public model multiplies. */
static const struct shape {
    const char *models;
    int32_t hidden, intermediate;
    megamoe_dtype bias;
    megamoe_activation activation;
} shapes[] = {
    {"DeepSeek-V3, Kimi-K2", 7168, 2048, MEGAMOE_DTYPE_NONE, {0, 0, 0}},
    {"DeepSeek-V4-Flash", 4096, 2048, MEGAMOE_DTYPE_NONE, {0, 0, 10}},
    {"DeepSeek-V4-Pro", 7168, 3072, MEGAMOE_DTYPE_NONE, {0, 0, 10}},
    {"DeepSeek-V4.1-Flash", 5120, 2304, MEGAMOE_DTYPE_NONE, {0, 0, 10}},
    {"GLM-4.5", 5120, 1536, MEGAMOE_DTYPE_NONE, {0, 0, 0}},
    {"GLM-5, MiMo-V2.5-Pro", 6144, 2048, MEGAMOE_DTYPE_NONE, {0, 0, 0}},
    {"Qwen3-30B", 2048, 768, MEGAMOE_DTYPE_NONE, {0, 0, 0}},
    {"Qwen3-235B", 4096, 1536, MEGAMOE_DTYPE_NONE, {0, 0, 0}},
    {"Qwen3-Next", 2048, 512, MEGAMOE_DTYPE_NONE, {0, 0, 0}},
    {"gpt-oss", 2880, 2880, MEGAMOE_DTYPE_BF16, {1.702f, 1, 7}},
};

/* So many tokens that blocks sort their routes, whatever the tile; the reference takes long. */
enum { SHAPE_TOKENS = 2000, SHAPE_DISTINCT = 2 };

static void check_shape(const gpu *g, const struct shape *shape, int i) {
    const arithmetic *a = &all[i % ARITHMETICS];
    t_random r = t_random_start(450 + (uint64_t)i);
    const model_recipe recipe = {a->format, shape->hidden, shape->intermediate,
                                 2,         shape->bias,   shape->activation};
    model m = model_open(&recipe, &r);
    batch b = batch_random(&m, SHAPE_TOKENS, 2, ROUTING_RANDOM, &r);
    batch_repeat(&b, SHAPE_DISTINCT);
    const setup s = {.weights = m.weights,
                     .pool_rows = SHAPE_TOKENS * 2,
                     .input_scale = i / ARITHMETICS % 2 ? MEGAMOE_SCALE_BLOCK : MEGAMOE_SCALE_TOKEN,
                     .options = {.nvfp4 = a->nvfp4}};
    trial t = open_repeated(g, &s, &b, SHAPE_DISTINCT);
    char what[128];
    snprintf(what, sizeof what, "%s, %s", shape->models, a->name);
    int32_t tiles[GPU_TILES_MAX];
    const int32_t n = gpu_tiles(&t.f, tiles);
    check_part(&t, 0, 1, 0, what);
    check_part(&t, 0, 100, 0, what);
    for (int32_t j = 0; j < n; j++)
        check_part(&t, 0, SHAPE_TOKENS, tiles[j], what);
    close_trial(&t);
    batch_free(&b);
    model_close(&m);
}

T_CASE(forward_geometries_of_models) {
    gpu g = gpu_start();
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check_shape(&g, &shapes[i], (int)i);
    gpu_end(&g);
}

/* Scales as far apart as rows may have them: shifted codes, subnormal operands, row exponents. */
static void widen(model *m, t_random *r) {
    const bool nvfp4 = m->layer.desc.format == MEGAMOE_FORMAT_NVFP4;
    for (int32_t i = 0; i < 3 * m->layer.desc.experts; i++) {
        const megamoe_projection projection = (megamoe_projection)(i % 3);
        for (int32_t row = 0; row < layer_rows(&m->layer, projection); row++) {
            uint8_t *of_row = layer_scales(&m->layer, i / 3, projection, row);
            const int32_t n = layer_columns(&m->layer, projection) / (nvfp4 ? 16 : 32);
            for (int32_t k = 0; k < n; k++)
                of_row[k] = (uint8_t)(nvfp4 ? 0x08 + t_below(r, 0x58) : 112 + t_below(r, 15));
        }
    }
    model_reload(m);
}

T_CASE(forward_scales_far_apart) {
    gpu g = gpu_start();
    for (int i = 0; i < 2 * ARITHMETICS; i++) {
        t_random r = t_random_start(470 + (uint64_t)i);
        const arithmetic *a = &all[i / 2];
        const model_recipe recipe = {a->format, 448, 320, 3, MEGAMOE_DTYPE_NONE, {0, 0, 10}};
        model m = model_open(&recipe, &r);
        widen(&m, &r);
        batch b = batch_random(&m, 20, 2, ROUTING_RANDOM, &r);
        const setup s = {.weights = m.weights,
                         .options = {.accumulate = (megamoe_accumulate)(i % 2), .nvfp4 = a->nvfp4}};
        check_once(&g, &s, &b, a->name);
        batch_free(&b);
        model_close(&m);
    }
    gpu_end(&g);
}

/* Routing weights that take h all over the grid of its exponents: tokens of one, and of several. */
T_CASE(forward_hidden_of_all_sizes) {
    gpu g = gpu_start();
    for (int i = 0; i < ARITHMETICS; i++) {
        t_random r = t_random_start(480 + (uint64_t)i);
        const arithmetic *a = &all[i];
        const model_recipe recipe = {a->format, 256, 1024, 2, MEGAMOE_DTYPE_NONE, {0, 0, 10}};
        model m = model_open(&recipe, &r);
        batch b = batch_random(&m, 149, 1, ROUTING_RANDOM, &r);
        for (int64_t t = 0; t < b.tokens; t++)
            b.weights[t] *= (float)exp2(40 * t_uniform(&r) - 20);
        const setup s = {.weights = m.weights, .options = {.nvfp4 = a->nvfp4}};
        trial t = open_trial(&g, &s, &b);
        check_every_tile(&t, a->name);
        close_trial(&t);
        batch_free(&b);
        model_close(&m);
    }
    gpu_end(&g);
}

T_CASE(forward_every_batch_up_to_257_tokens) {
    gpu g = gpu_start();
    for (int kind = 0; kind < 3; kind++) {
        t_random r = t_random_start(500 + (uint64_t)kind);
        const model_recipe recipe = {all[kind].format, 160, 96, 6, MEGAMOE_DTYPE_NONE, {0, 0, 0}};
        model m = model_open(&recipe, &r);
        batch b = batch_random(&m, 257, 3, (routing)kind, &r);
        batch_mask(&b, 9, &r);
        const setup s = {.weights = m.weights, .options = {.nvfp4 = all[kind].nvfp4}};
        trial t = open_trial(&g, &s, &b);
        for (int64_t n = 0; n <= 257; n++)
            check_part(&t, (int64_t)t_below(&r, (uint32_t)(258 - n)), n, 0, all[kind].name);
        close_trial(&t);
        batch_free(&b);
        model_close(&m);
    }
    gpu_end(&g);
}

/* Rows that are not finite, tiny, zero or huge, beside ordinary ones, in all arithmetics; `mixed`:
 * also such whose blocks have several exponents. */
static void spoil(batch *b, bool mixed) {
    for (int64_t t = 0; t < b->tokens; t++) {
        uint16_t *x = b->x + t * b->hidden;
        const int64_t kind = t % 9;
        if (kind == 1)
            x[t % b->hidden] = 0x7FC0;
        else if (kind == 2)
            x[t % b->hidden] = 0xFF80;
        else if (kind == 3)
            memset(x, 0, (size_t)b->hidden * sizeof *x);
        for (int32_t i = 0; i < b->hidden && kind > 3 && kind < 6; i++)
            x[i] = to_bf16(ldexp(from_bf16(x[i]), kind == 4 ? -110 : 60));
        for (int32_t i = 0; i < b->hidden / 2 && mixed && kind > 6; i++)
            x[i] = to_bf16(ldexp(from_bf16(x[i]), kind == 7 ? -20 : 12));
    }
}

/* As many tokens as a tile or one of its narrower loops has columns, one more, and fewer; behind
 * them in the ring lie those of fuller tiles. With exponents that change on the way, too. */
T_CASE(forward_tiles_of_every_fill) {
    static const int32_t missing[] = {0, 33, 32, 1, 31, 17, 16, 15, -1};
    gpu g = gpu_start();
    for (int i = 0; i < 2 * ARITHMETICS; i++) {
        t_random r = t_random_start(540 + (uint64_t)i);
        const arithmetic *a = &all[i / 2];
        const model_recipe recipe = {a->format, 640, 384, 1, MEGAMOE_DTYPE_NONE, {0, 0, 7}};
        model m = model_open(&recipe, &r);
        batch b = batch_random(&m, 160, 1, ROUTING_RANDOM, &r);
        if (i % 2)
            spoil(&b, true);
        const setup s = {.weights = m.weights,
                         .input_scale = i % 2 ? MEGAMOE_SCALE_BLOCK : MEGAMOE_SCALE_TOKEN,
                         .options = {.nvfp4 = a->nvfp4}};
        trial t = open_trial(&g, &s, &b);
        int32_t tiles[GPU_TILES_MAX];
        const int32_t count = gpu_tiles(&t.f, tiles);
        for (int32_t j = 0; j < count; j++)
            for (size_t k = 0; k < sizeof missing / sizeof *missing; k++)
                if (missing[k] < tiles[j])
                    check_part(&t, (int64_t)t_below(&r, 16), tiles[j] - missing[k], tiles[j],
                               a->name);
        close_trial(&t);
        batch_free(&b);
        model_close(&m);
    }
    gpu_end(&g);
}

T_CASE(forward_experts_and_slots) {
    static const int32_t pairs[][2] = {{1, 1},    {2, 1},     {2, 2},    {3, 2},   {16, 16},
                                       {17, 5},   {64, 8},    {64, 16},  {300, 6}, {300, 16},
                                       {512, 10}, {1024, 10}, {1024, 16}};
    gpu g = gpu_start();
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        t_random r = t_random_start(600 + i);
        const model_recipe recipe = {MEGAMOE_FORMAT_MXFP4, 64, 32, pairs[i][0], MEGAMOE_DTYPE_BF16,
                                     {1.702f, 1, 7}};
        model m = model_open(&recipe, &r);
        char what[64];
        snprintf(what, sizeof what, "%d experts, top-%d", pairs[i][0], pairs[i][1]);
        batch b = batch_random(&m, 33, pairs[i][1], ROUTING_RANDOM, &r);
        const setup s = {.weights = m.weights};
        trial t = open_trial(&g, &s, &b);
        check_part(&t, 0, 33, 0, what);
        check_part(&t, 5, 1, 0, what);
        check_part(&t, 11, 13, 0, what);
        if (pairs[i][0] == 1024) /* tables of experts lie far back */
            check_every_tile(&t, what);
        close_trial(&t);
        batch_free(&b);
        model_close(&m);
    }
    gpu_end(&g);
}

T_CASE(forward_masked_slots) {
    gpu g = gpu_start();
    t_random r = t_random_start(700);
    const model_recipe recipe = {MEGAMOE_FORMAT_MXFP4, 96, 64, 4, MEGAMOE_DTYPE_F32, {0, 0, 0}};
    model m = model_open(&recipe, &r);
    batch b = batch_random(&m, 40, 3, ROUTING_RANDOM, &r);
    for (int64_t i = 0; i < 40 * 3; i++)
        if (i / 3 < 20 || t_below(&r, 2))
            b.ids[i] = -1;
    const setup s = {.weights = m.weights};
    trial t = open_trial(&g, &s, &b);
    check_part(&t, 0, 20, 0, "all masked");
    for (int i = 0; i < 20 * 96; i++)
        if (!T_EQ_HEX(t.y[i], 0))
            break;
    check_part(&t, 0, 40, 0, "half masked");
    check_part(&t, 0, 0, 0, "no tokens");
    check_part(&t, 20, 20, 0, "some masked");
    close_trial(&t);
    batch_free(&b);
    model_close(&m);
    gpu_end(&g);
}

T_CASE(forward_rows_that_are_not_ordinary) {
    gpu g = gpu_start();
    for (int i = 0; i < 8 * ARITHMETICS; i++) {
        const arithmetic *a = &all[i / 8];
        t_random r = t_random_start(800 + (uint64_t)i);
        const model_recipe recipe = {a->format, 288, 160, 3, MEGAMOE_DTYPE_NONE, {0, 0, 7}};
        model m = model_open(&recipe, &r);
        batch b = batch_random(&m, 60, 2, ROUTING_RANDOM, &r);
        spoil(&b, i / 4 % 2);
        const setup s = {.weights = m.weights,
                         .input_scale = (megamoe_input_scale)(i / 2 % 2),
                         .options = {.accumulate = (megamoe_accumulate)(i % 2), .nvfp4 = a->nvfp4}};
        trial t = open_trial(&g, &s, &b);
        int64_t not_numbers = 0;
        for (int64_t j = 0; j < 60; j++)
            not_numbers += isnan(from_bf16(t.want[j * 288]));
        T_CHECK_MSG(not_numbers >= 12 && not_numbers < 40, "%d rows of the reference are NaN",
                    (int)not_numbers);
        check_every_tile(&t, a->name);
        close_trial(&t);
        batch_free(&b);
        model_close(&m);
    }
    gpu_end(&g);
}

/* All tokens of all ranks to one expert, with room for them. */
T_CASE(forward_a_hot_expert) {
    gpu g = gpu_start();
    for (int32_t ranks = 1; ranks <= 8; ranks *= 2) {
        t_random r = t_random_start(900);
        const model_recipe recipe = {MEGAMOE_FORMAT_MXFP4, 128,      96, 9,
                                     MEGAMOE_DTYPE_NONE,   {0, 0, 0}};
        model m = model_open(&recipe, &r);
        batch b = batch_random(&m, 200, 2, ROUTING_RANDOM, &r);
        for (int64_t i = 0; i < 400; i++)
            b.ids[i] = i % 2 ? -1 : 7;
        const setup s = {.weights = m.weights,
                         .ranks = ranks,
                         .folded = true,
                         .tokens = 200,
                         .pool_rows = (int64_t)ranks * 200 * 2};
        trial t = open_trial(&g, &s, &b);
        check_every_tile(&t, "hot expert");
        close_trial(&t);
        batch_free(&b);
        model_close(&m);
    }
    gpu_end(&g);
}

/* Everything at once, drawn at random; the seed that is printed repeats it. */
static void check_drawn(const gpu *g, int round, t_random *r) {
    const arithmetic *a = &all[t_below(r, ARITHMETICS)];
    const int32_t unit = a->format == MEGAMOE_FORMAT_MXFP4 ? 32 : 16;
    const int32_t experts = 1 + (int32_t)t_below(r, 20);
    const model_recipe recipe = {
        .format = a->format,
        .hidden = unit * (1 + (int32_t)t_below(r, 24)),
        .intermediate = unit * (1 + (int32_t)t_below(r, 16)),
        .experts = experts,
        .bias_dtype = (megamoe_dtype[]){MEGAMOE_DTYPE_NONE, MEGAMOE_DTYPE_BF16,
                                        MEGAMOE_DTYPE_F32}[t_below(r, 3)],
        .activation = t_below(r, 2) ? (megamoe_activation){1.702f, 1, 7}
                                    : (megamoe_activation){.limit = (float)t_below(r, 2)}};
    model m = model_open(&recipe, r);
    const int32_t most = experts < 16 ? experts : 16,
                  topk = 1 + (int32_t)t_below(r, (uint32_t)most);
    const double macs = 3.0 * recipe.hidden * recipe.intermediate * topk;
    const int64_t tokens = 1 + t_below(r, 1 + (uint32_t)fmin(150, 1e7 / macs));
    batch b = batch_random(&m, tokens, topk, (routing)t_below(r, 3), r);
    batch_mask(&b, 1 + t_below(r, 10), r);
    if (t_below(r, 3) == 0)
        spoil(&b, t_below(r, 2));
    int32_t map[40];
    const int32_t physical = experts + (int32_t)t_below(r, 20);
    for (int32_t i = 0; i < physical; i++)
        map[i] = i < experts ? experts - 1 - i : (int32_t)t_below(r, (uint32_t)experts);
    setup s = {.weights = m.weights,
               .ranks = 1 + (int32_t)t_below(r, MAX_RANKS),
               .folded = true,
               .tokens = tokens,
               .pool_rows = tokens * topk,
               .input_scale = (megamoe_input_scale)t_below(r, 2),
               .options = {.accumulate = (megamoe_accumulate)t_below(r, 2),
                           .weight_after_fc2 = t_below(r, 2),
                           .nvfp4 = a->nvfp4}};
    if (t_below(r, 2)) {
        s.options.physical_to_logical = map;
        s.options.physical_experts = physical;
    }
    char what[160];
    snprintf(what, sizeof what,
             "round %d: %s, hidden %d, intermediate %d, %d experts, top-%d, %d "
             "ranks",
             round, a->name, recipe.hidden, recipe.intermediate, experts, topk, s.ranks);
    trial t = open_trial(g, &s, &b);
    int32_t tiles[GPU_TILES_MAX];
    const int32_t n = gpu_tiles(&t.f, tiles);
    check_part(&t, 0, tokens, 0, what);
    check_part(&t, 0, tokens, tiles[t_below(r, (uint32_t)n)], what);
    close_trial(&t);
    batch_free(&b);
    model_close(&m);
}

T_CASE(forward_drawn_at_random) {
    gpu g = gpu_start();
    t_random r = t_random_start(950);
    for (int round = 0; round < 60; round++)
        check_drawn(&g, round, &r);
    gpu_end(&g);
}

/* The file that megamoe_weights_prepare writes is what a layer packs. */
T_CASE(forward_weights_from_a_prepared_file) {
    gpu g = gpu_start();
    for (int i = 0; i < ARITHMETICS; i++) {
        t_random r = t_random_start(1000 + (uint64_t)i);
        const model_recipe recipe = {all[i].format, 160, 224, 5, MEGAMOE_DTYPE_BF16, {0, 0, 7}};
        model m = model_open(&recipe, &r);
        batch b = batch_random(&m, 30, 2, ROUTING_RANDOM, &r);
        setup s = {.weights = m.weights, .options = {.nvfp4 = all[i].nvfp4}};
        uint16_t *want = gpu_rows(&b), *y = gpu_rows(&b);
        gpu_reference(&s, &b, want);
        megamoe_prepare_options preparing = MEGAMOE_INIT(megamoe_prepare_options);
        preparing.device = "cuda";
        preparing.nvfp4 = all[i].nvfp4;
        const char *path = t_path("layer.mmoe");
        T_OK(megamoe_weights_prepare(m.weights, NULL, &preparing, path));
        megamoe_weights *prepared;
        T_OK(megamoe_weights_open(path, &prepared));
        s.weights = prepared;
        s.device = "cuda:0";
        s.deadline_ms = GPU_DEADLINE_MS;
        s.ranks = 2;
        s.folded = true;
        fleet f = fleet_open(&s);
        megamoe_weights_close(prepared);
        gpu_batch buffers = gpu_batch_open(b.tokens, b.hidden, b.topk);
        gpu_forward(&f, &buffers, &b, y, g.stream);
        gpu_same(y, want, &b, "%s", all[i].name);
        gpu_batch_close(&buffers);
        fleet_close(&f);
        free(want);
        free(y);
        batch_free(&b);
        model_close(&m);
    }
    gpu_end(&g);
}

/* Routes to one of an expert's `count` replicas, the `nth`: of a rank's tokens, counted by the
 * rank's own numbers, to each in turn (docs/several-ranks.md). */
static int64_t routes_to(const batch *b, int32_t ranks, int32_t expert, int32_t nth,
                         int32_t count) {
    int64_t n = 0;
    for (int32_t r = 0; r < ranks; r++) {
        int64_t first;
        const batch part = share_of(b, r, ranks, &first);
        for (int64_t i = 0; i < part.tokens * b->topk; i++)
            n += part.ids[i] == expert && (r + i / b->topk) % count == nth;
    }
    return n;
}

/* `map` NULL: every expert once. */
static void check_counts(const gpu *g, const int32_t *map, int32_t physical) {
    t_random r = t_random_start(1100);
    const model_recipe recipe = {MEGAMOE_FORMAT_MXFP4, 64, 32, 7, MEGAMOE_DTYPE_NONE, {0, 0, 0}};
    model m = model_open(&recipe, &r);
    const setup s = {
        .weights = m.weights,
        .device = "cuda:0",
        .deadline_ms = GPU_DEADLINE_MS,
        .ranks = 2,
        .folded = true,
        .topk = 3,
        .tokens = 50,
        .options = {.physical_to_logical = map, .physical_experts = map ? physical : 0}};
    fleet f = fleet_open(&s);
    for (int round = 0; round < 4; round++) {
        batch b = batch_random(&m, 10 + 29 * round, 3, (routing)(round % 3), &r);
        batch_mask(&b, 5, &r);
        gpu_batch buffers = gpu_batch_open(b.tokens, b.hidden, b.topk);
        uint16_t *y = gpu_rows(&b);
        gpu_forward(&f, &buffers, &b, y, g->stream);
        int32_t replicas[7] = {0}, nth[7] = {0};
        for (int32_t p = 0; p < physical; p++)
            replicas[map ? map[p] : p]++;
        int32_t p = 0;
        for (int32_t k = 0; k < 2; k++) {
            int64_t counts[8];
            const int32_t local = (physical + 1 - k) / 2;
            T_OK(megamoe_workspace_receive_counts(f.rank[k].workspace, counts, local));
            for (int32_t i = 0; i < local; i++, p++) {
                const int32_t expert = map ? map[p] : p;
                T_EQ_INT(counts[i], routes_to(&b, 2, expert, nth[expert]++, replicas[expert]));
            }
        }
        free(y);
        gpu_batch_close(&buffers);
        batch_free(&b);
    }
    fleet_close(&f);
    model_close(&m);
}

T_CASE(forward_receive_counts) {
    static const int32_t map[] = {6, 0, 1, 6, 2, 3, 0, 4, 5, 6, 1};
    gpu g = gpu_start();
    check_counts(&g, NULL, 7);
    check_counts(&g, map, sizeof map / sizeof *map);
    gpu_end(&g);
}
