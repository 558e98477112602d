/* SPDX-License-Identifier: Apache-2.0 */
/* The operation against the scalar reference, to the bit, in every tier. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fleet.h"

static void *need(int64_t n, size_t size) {
    void *memory = calloc((size_t)n + 1, size);
    T_REQUIRE(memory);
    return memory;
}

typedef struct variant {
    model_recipe recipe;
    int32_t topk;
    megamoe_accumulate accumulate;
    megamoe_nvfp4_mode nvfp4;
    bool weight_after_fc2;
    megamoe_input_scale input_scale;
    megamoe_activation_type activations;
} variant;

static uint16_t *reference_of(const model *m, const variant *v, const batch *b) {
    uint16_t *y = need(b->tokens * b->hidden, sizeof *y);
    megamoe_reference_options options = MEGAMOE_INIT(megamoe_reference_options);
    options.accumulate = v->accumulate;
    options.nvfp4 = v->nvfp4;
    options.weight_after_fc2 = v->weight_after_fc2;
    options.input_scale = v->input_scale;
    options.activations = v->activations;
    const megamoe_view x = view_x(b), ids = view_ids(b), weights = view_weights(b);
    const megamoe_view vy = view_y(y, b);
    T_OK(megamoe_reference_forward(m->weights, &options, b->topk, &x, &ids, &weights, b->tokens,
                                   &vy));
    return y;
}

/* Rows that quantization treats in ways of their own. */
static void put_special_rows(batch *b, t_random *r) {
    const int64_t h = b->hidden;
    for (int64_t i = 0; i < h; i++) {
        b->x[0 * h + i] = t_below(r, 2) ? 0x8000 : 0;                      /* zeros */
        b->x[1 * h + i] = to_bf16(ldexp(t_normal(r), -110));               /* below 2^-100 */
        b->x[2 * h + i] = to_bf16(ldexp(t_normal(r), (int)(i % 96) - 48)); /* all scales */
        b->x[3 * h + i] = (uint16_t)(t_u64(r) & 0x807F);                   /* subnormal */
    }
    b->x[4 * h + 5] = 0x7FC0;
    b->x[5 * h + h - 1] = 0xFF80;
}

static void check_variant(const variant *v, uint64_t stream) {
    t_random r = t_random_start(stream);
    model m = model_open(&v->recipe, &r);
    batch b = batch_random(&m, 31, v->topk, ROUTING_RANDOM, &r);
    batch_mask(&b, 7, &r);
    put_special_rows(&b, &r);
    uint16_t *want = reference_of(&m, v, &b);
    for (int i = 0; tiers[i]; i++) {
        uint16_t *y = need(b.tokens * b.hidden, sizeof *y);
        const setup s = {.weights = m.weights,
                         .tier = tiers[i],
                         .input_scale = v->input_scale,
                         .activations = v->activations,
                         .options = {.accumulate = v->accumulate,
                                     .nvfp4 = v->nvfp4,
                                     .weight_after_fc2 = v->weight_after_fc2}};
        run_once(&s, &b, y);
        for (int64_t t = 0; t < b.tokens; t++)
            T_CHECK_MSG(same_rows(y + t * b.hidden, want + t * b.hidden, b.hidden),
                        "%s, stream %d, token %d", tiers[i], (int)stream, (int)t);
        free(y);
    }
    free(want);
    batch_free(&b);
    model_close(&m);
}

/* Every combination of what the layer decides; geometry and activation move along. */
static void check_format(megamoe_format format, megamoe_nvfp4_mode nvfp4,
                         megamoe_activation_type type, uint64_t stream) {
    static const megamoe_activation activations[] = {{0}, {0, 0, 10}, {1.702f, 1, 7}};
    static const megamoe_dtype biases[] = {MEGAMOE_DTYPE_NONE, MEGAMOE_DTYPE_BF16,
                                           MEGAMOE_DTYPE_F32};
    static const int32_t mxfp4_sizes[] = {32, 96, 160, 288, 128, 352};
    static const int32_t nvfp4_sizes[] = {16, 48, 112, 272, 128, 336};
    const int32_t *sizes = format == MEGAMOE_FORMAT_MXFP4 ? mxfp4_sizes : nvfp4_sizes;
    for (int i = 0; i < 16; i++) {
        const variant v = {
            .recipe = {.format = format,
                       .hidden = sizes[(i + 3) % 6],
                       .intermediate = sizes[i % 5],
                       .experts = 4 + i % 3,
                       .bias_dtype = biases[i % 3],
                       .activation = activations[(i / 2) % 3]},
            .topk = 1 + i % 4,
            .accumulate = (megamoe_accumulate)(i & 1),
            .nvfp4 = nvfp4,
            .weight_after_fc2 = i & 2,
            .input_scale = i & 4 && type == MEGAMOE_ACTIVATIONS_E4M3 ? MEGAMOE_SCALE_BLOCK
                                                                     : MEGAMOE_SCALE_TOKEN,
            .activations = type,
        };
        check_variant(&v, stream + (uint64_t)i);
    }
}

T_CASE(mxfp4_equals_the_reference) {
    check_format(MEGAMOE_FORMAT_MXFP4, MEGAMOE_NVFP4_EXACT, MEGAMOE_ACTIVATIONS_E4M3, 100);
}

T_CASE(nvfp4_exact_equals_the_reference) {
    check_format(MEGAMOE_FORMAT_NVFP4, MEGAMOE_NVFP4_EXACT, MEGAMOE_ACTIVATIONS_E4M3, 200);
}

T_CASE(nvfp4_folded_equals_the_reference) {
    check_format(MEGAMOE_FORMAT_NVFP4, MEGAMOE_NVFP4_FOLDED, MEGAMOE_ACTIVATIONS_E4M3, 300);
}

/* The layer's way to accumulate moves along too, and changes nothing. */
T_CASE(mxfp4_int8_equals_the_reference) {
    check_format(MEGAMOE_FORMAT_MXFP4, MEGAMOE_NVFP4_EXACT, MEGAMOE_ACTIVATIONS_INT8, 400);
}

T_CASE(nvfp4_int8_equals_the_reference) {
    check_format(MEGAMOE_FORMAT_NVFP4, MEGAMOE_NVFP4_EXACT, MEGAMOE_ACTIVATIONS_INT8, 450);
}

static const model_recipe small = {MEGAMOE_FORMAT_MXFP4, 160,       96, 5,
                                   MEGAMOE_DTYPE_BF16,   {0, 0, 10}};

/* Tokens below 2^-100 that large weights bring back: the token's second factor counts. */
static void check_tiny_tokens(megamoe_activation_type type) {
    enum { T = 9, H = 160 };
    t_random r = t_random_start(350);
    model m = model_open(&small, &r);
    for (int32_t i = 0; i < 3 * small.experts; i++) {
        const megamoe_projection projection = (megamoe_projection)(i % 3);
        for (int32_t row = 0; row < small.intermediate && projection != MEGAMOE_DOWN; row++)
            for (int32_t g = 0; g < H / 32; g++)
                layer_scales(&m.layer, i / 3, projection, row)[g] += 95;
    }
    model_reload(&m);
    batch b = batch_random(&m, T, 2, ROUTING_RANDOM, &r);
    double x[T * H], want[T * H], got[T * H];
    uint16_t y[T * H];
    for (int i = 0; i < T * H; i++)
        b.x[i] = to_bf16(ldexp(t_normal(&r), -96 - 2 * (i / H))); /* both sides of 2^-100 */
    const bool int8 = type == MEGAMOE_ACTIVATIONS_INT8;
    for (int t = 0; t < T; t++)
        if (int8)
            quantized_token_int8(b.x + t * H, H, x + t * H);
        else
            quantized_token(b.x + t * H, H, MEGAMOE_SCALE_TOKEN, x + t * H);
    const variant v = {.recipe = small, .topk = 2, .activations = type};
    uint16_t *reference = reference_of(&m, &v, &b);
    const setup s = {.weights = m.weights, .activations = type};
    run_once(&s, &b, y);
    T_CHECK(same_rows(y, reference, T * H));
    model_forward(&m,
                  &(exactness){.values = m.values, .quantize_hidden = true, .activations = type},
                  &b, x, want);
    for (int i = 0; i < T * H; i++)
        got[i] = from_bf16(y[i]);
    for (int t = 0; t < T; t++)
        T_CHECK_MSG(distance(got + t * H, want + t * H, H) < 5e-3, "token %d: distance %g", t,
                    distance(got + t * H, want + t * H, H));
    free(reference);
    batch_free(&b);
    model_close(&m);
}

T_CASE(tiny_tokens_times_large_weights) {
    check_tiny_tokens(MEGAMOE_ACTIVATIONS_E4M3);
}

T_CASE(tiny_tokens_times_large_weights_int8) {
    check_tiny_tokens(MEGAMOE_ACTIVATIONS_INT8);
}

/* Every dtype and stride that stage and forward take. */
T_CASE(views_of_every_kind) {
    t_random r = t_random_start(400);
    model m = model_open(&small, &r);
    batch b = batch_random(&m, 13, 3, ROUTING_RANDOM, &r);
    batch_mask(&b, 5, &r);
    enum { T = 13, H = 160, K = 3, X_STRIDE = 176, K_STRIDE = 5, Y_STRIDE = 163, POISON = 0x7E57 };
    uint16_t x[T * X_STRIDE], short_weights[T * K_STRIDE], y[T * Y_STRIDE], want[T * H];
    int64_t ids[T * K_STRIDE];
    memset(x, 0xFF, sizeof x);
    for (int i = 0; i < T * K_STRIDE; i++) {
        ids[i] = 1000;
        short_weights[i] = 0x7FC0;
    }
    for (int t = 0; t < T; t++) {
        memcpy(x + t * X_STRIDE, b.x + t * H, H * sizeof *x);
        for (int k = 0; k < K; k++) {
            ids[t * K_STRIDE + k] = b.ids[t * K + k];
            short_weights[t * K_STRIDE + k] = to_bf16((double)b.weights[t * K + k]);
            b.weights[t * K + k] = (float)from_bf16(short_weights[t * K_STRIDE + k]);
        }
    }
    for (int i = 0; i < T * Y_STRIDE; i++)
        y[i] = POISON;
    const setup s = {.weights = m.weights, .topk = K};
    run_once(&s, &b, want);
    fleet f = fleet_open(&s);
    const megamoe_view vx = {x, MEGAMOE_DTYPE_BF16, T, X_STRIDE};
    const megamoe_view vi = {ids, MEGAMOE_DTYPE_I64, T, K_STRIDE};
    const megamoe_view vw = {short_weights, MEGAMOE_DTYPE_BF16, T, K_STRIDE};
    const megamoe_view vy = {y, MEGAMOE_DTYPE_BF16, T, Y_STRIDE};
    T_OK(megamoe_stage(f.rank[0].workspace, &vx, &vi, &vw, T, NULL));
    T_OK(megamoe_forward(f.rank[0].layer, f.rank[0].workspace, &vy, NULL));
    for (int t = 0; t < T; t++) {
        T_CHECK(same_rows(y + t * Y_STRIDE, want + t * H, H));
        for (int i = H; i < Y_STRIDE; i++)
            T_EQ_HEX(y[t * Y_STRIDE + i], POISON);
    }
    fleet_close(&f);
    batch_free(&b);
    model_close(&m);
}

/* Copies what a workspace has staged into the views of another. */
static void copy_staged(megamoe_workspace *from, megamoe_workspace *to, int64_t tokens,
                        int32_t hidden, int32_t topk) {
    megamoe_workspace_views a = MEGAMOE_INIT(megamoe_workspace_views), b = a;
    T_OK(megamoe_workspace_get_views(from, &a));
    T_OK(megamoe_workspace_get_views(to, &b));
    const size_t scale_bytes = a.scales.dtype == MEGAMOE_DTYPE_F32 ? 4 : 1;
    const size_t scale_row = (size_t)a.scales.stride * scale_bytes;
    for (int64_t t = 0; t < tokens; t++) {
        memcpy((uint8_t *)b.codes.data + t * b.codes.stride,
               (uint8_t *)a.codes.data + t * a.codes.stride, (size_t)hidden);
        memcpy((uint8_t *)b.scales.data + (size_t)(t * b.scales.stride) * scale_bytes,
               (uint8_t *)a.scales.data + (size_t)(t * a.scales.stride) * scale_bytes, scale_row);
        memcpy((int32_t *)b.topk_ids.data + t * b.topk_ids.stride,
               (int32_t *)a.topk_ids.data + t * a.topk_ids.stride, (size_t)topk * 4);
        memcpy((float *)b.topk_weights.data + t * b.topk_weights.stride,
               (float *)a.topk_weights.data + t * a.topk_weights.stride, (size_t)topk * 4);
    }
}

T_CASE(commit_staged_equals_stage) {
    static const megamoe_dtype scale_dtypes[] = {MEGAMOE_DTYPE_F32, MEGAMOE_DTYPE_E8M0,
                                                 MEGAMOE_DTYPE_F32};
    for (int mode = 0; mode < 3; mode++) {
        const bool int8 = mode == 2;
        t_random r = t_random_start(500 + (uint64_t)mode);
        model m = model_open(&small, &r);
        batch b = batch_random(&m, 21, 2, ROUTING_RANDOM, &r);
        b.x[3 * 160 + 140] = 0x7FC0;
        uint16_t want[21 * 160], y[21 * 160];
        const setup s = {.weights = m.weights,
                         .input_scale = mode == 1 ? MEGAMOE_SCALE_BLOCK : MEGAMOE_SCALE_TOKEN,
                         .activations = int8 ? MEGAMOE_ACTIVATIONS_INT8 : MEGAMOE_ACTIVATIONS_E4M3};
        fleet f = fleet_open(&s), g = fleet_open(&s);
        fleet_forward(&f, &b, want);
        megamoe_workspace_views views = MEGAMOE_INIT(megamoe_workspace_views);
        T_OK(megamoe_workspace_get_views(f.rank[0].workspace, &views));
        T_EQ_INT(views.codes.dtype, int8 ? MEGAMOE_DTYPE_I8 : MEGAMOE_DTYPE_E4M3);
        T_EQ_INT(views.scales.dtype, scale_dtypes[mode]);
        T_EQ_INT(views.scales.stride, mode ? 2 : 1);
        copy_staged(f.rank[0].workspace, g.rank[0].workspace, 21, 160, 2);
        T_OK(megamoe_commit_staged(g.rank[0].workspace, 21, NULL));
        megamoe_status status[MAX_RANKS];
        fleet_compute(&g, &b, y, status);
        T_STATUS(status[0], MEGAMOE_OK);
        T_CHECK(same_rows(y, want, 21 * 160));
        fleet_close(&f);
        fleet_close(&g);
        batch_free(&b);
        model_close(&m);
    }
}

/* F32 scales per 128 channels: codes and scales are the caller's. */
T_CASE(block_f32_scales) {
    enum { T = 9, H = 288, BLOCKS = 3 };
    static const double e4m3_mean = 20;
    for (int powers = 0; powers < 2; powers++) {
        t_random r = t_random_start(600 + (uint64_t)powers);
        const model_recipe recipe = {MEGAMOE_FORMAT_NVFP4, H, 192, 4, MEGAMOE_DTYPE_F32, {0, 0, 0}};
        model m = model_open(&recipe, &r);
        batch b = batch_random(&m, T, 2, ROUTING_RANDOM, &r);
        uint8_t codes[T * H];
        float scales[T * BLOCKS];
        double x[T * H], want[T * H], got[T * H];
        uint16_t y[T * H], by_bytes[T * H];
        for (int i = 0; i < T * BLOCKS; i++)
            scales[i] = powers ? ldexpf(1.0f, -7 + (int)t_below(&r, 6))
                               : (float)((0.5 + t_uniform(&r)) / e4m3_mean);
        for (int i = 0; i < T * H; i++) {
            codes[i] = (uint8_t)(t_below(&r, 2) << 7 | (0x48 + t_below(&r, 24))); /* 4..30 */
            x[i] = decode_e4m3(codes[i]) * (double)scales[i / H * BLOCKS + i % H / 128];
        }
        setup s = {.weights = m.weights,
                   .input_scale = MEGAMOE_SCALE_BLOCK_F32,
                   .options = {.accumulate = MEGAMOE_ACCUMULATE_PROMOTE}};
        for (int kind = 0; kind < 1 + powers; kind++) {
            if (kind)
                s.input_scale = MEGAMOE_SCALE_BLOCK;
            fleet f = fleet_open(&s);
            megamoe_workspace_views v = MEGAMOE_INIT(megamoe_workspace_views);
            T_OK(megamoe_workspace_get_views(f.rank[0].workspace, &v));
            T_EQ_INT(v.scales.dtype, kind ? MEGAMOE_DTYPE_E8M0 : MEGAMOE_DTYPE_F32);
            for (int t = 0; t < T; t++) {
                memcpy((uint8_t *)v.codes.data + t * v.codes.stride, codes + t * H, H);
                memcpy((int32_t *)v.topk_ids.data + t * v.topk_ids.stride, b.ids + 2 * t, 8);
                memcpy((float *)v.topk_weights.data + t * v.topk_weights.stride, b.weights + 2 * t,
                       8);
                for (int i = 0; i < BLOCKS; i++)
                    if (kind)
                        ((uint8_t *)v.scales.data)[t * v.scales.stride + i] =
                            (uint8_t)(127 + ilogbf(scales[t * BLOCKS + i]));
                    else
                        ((float *)v.scales.data)[t * v.scales.stride + i] = scales[t * BLOCKS + i];
            }
            T_OK(megamoe_commit_staged(f.rank[0].workspace, T, NULL));
            megamoe_status status[MAX_RANKS];
            fleet_compute(&f, &b, kind ? by_bytes : y, status);
            T_STATUS(status[0], MEGAMOE_OK);
            fleet_close(&f);
        }
        if (powers)
            T_EQ_MEM(y, by_bytes, sizeof y);
        const exactness how = {.values = m.values, .quantize_hidden = true};
        model_forward(&m, &how, &b, x, want);
        for (int i = 0; i < T * H; i++)
            got[i] = from_bf16(y[i]);
        T_CHECK_MSG(distance(got, want, T * H) < 5e-3, "distance %g", distance(got, want, T * H));
        batch_free(&b);
        model_close(&m);
    }
}

T_CASE(prepared_weights_give_the_same_bits) {
    for (int kind = 0; kind < 3; kind++) {
        t_random r = t_random_start(700 + (uint64_t)kind);
        model_recipe recipe = small;
        recipe.format = kind ? MEGAMOE_FORMAT_NVFP4 : MEGAMOE_FORMAT_MXFP4;
        const megamoe_nvfp4_mode mode = kind == 2 ? MEGAMOE_NVFP4_FOLDED : MEGAMOE_NVFP4_EXACT;
        model m = model_open(&recipe, &r);
        batch b = batch_random(&m, 17, 3, ROUTING_RANDOM, &r);
        uint16_t want[17 * 160], y[17 * 160];
        setup s = {.weights = m.weights, .options = {.nvfp4 = mode}};
        run_once(&s, &b, want);
        megamoe_prepare_options options = MEGAMOE_INIT(megamoe_prepare_options);
        options.nvfp4 = mode;
        const char *path = t_path("layer.mm");
        T_OK(megamoe_weights_prepare(m.weights, NULL, &options, path));
        megamoe_weights *prepared;
        T_OK(megamoe_weights_open(path, &prepared));
        for (int round = 0; round < 4; round++) {
            s.weights = prepared;
            s.ranks = round < 2 ? 0 : 3;
            s.options.map_prepared = round % 2;
            s.options.nvfp4 = MEGAMOE_NVFP4_EXACT; /* fixed when the weights were prepared */
            memset(y, 0, sizeof y);
            run_once(&s, &b, y);
            T_EQ_MEM(y, want, sizeof y);
        }
        /* A layer keeps what it needs of weights that are closed. */
        s.ranks = 0;
        s.topk = 3;
        s.options.map_prepared = true;
        fleet f = fleet_open(&s);
        megamoe_weights_close(prepared);
        memset(y, 0, sizeof y);
        fleet_forward(&f, &b, y);
        T_EQ_MEM(y, want, sizeof y);
        fleet_close(&f);
        batch_free(&b);
        model_close(&m);
    }
}

/* One workspace serves layers in turn, and a layer several workspaces. */
T_CASE(layers_and_workspaces_mix) {
    t_random r = t_random_start(800);
    model m[2] = {model_open(&small, &r), model_open(&small, &r)};
    batch b = batch_random(&m[0], 19, 2, ROUTING_RANDOM, &r);
    batch c = batch_random(&m[0], 6, 2, ROUTING_RANDOM, &r);
    uint16_t want[2][2][19 * 160], y[19 * 160];
    for (int i = 0; i < 2; i++) {
        const setup s = {.weights = m[i].weights};
        run_once(&s, &b, want[i][0]);
        run_once(&s, &c, want[i][1]);
    }
    const setup s = {.weights = m[0].weights, .ranks = 2};
    fleet f = fleet_open(&s), g = fleet_open(&s);
    megamoe_layer *first[2], *second[2];
    for (int rank_index = 0; rank_index < 2; rank_index++) {
        first[rank_index] = f.rank[rank_index].layer;
        T_OK(megamoe_layer_create(f.rank[rank_index].comm, f.rank[rank_index].device, m[1].weights,
                                  NULL, &second[rank_index]));
    }
    /* The layers of f in the workspaces of f, and those of g, whose ranks are the same. */
    for (int round = 0; round < 12; round++) {
        fleet *at = round % 3 == 2 ? &g : &f;
        const int layer = round % 2;
        const batch *staged = round % 4 < 2 ? &b : &c;
        megamoe_layer *own[2] = {at->rank[0].layer, at->rank[1].layer};
        for (int i = 0; i < 2; i++)
            at->rank[i].layer = layer ? second[i] : first[i];
        memset(y, 0, sizeof y);
        fleet_forward(at, staged, y);
        T_EQ_MEM(y, want[layer][staged == &c], (size_t)staged->tokens * 160 * sizeof *y);
        /* The batch stays staged: the other layer computes it too. */
        megamoe_status status[MAX_RANKS];
        for (int i = 0; i < 2; i++)
            at->rank[i].layer = layer ? first[i] : second[i];
        fleet_compute(at, staged, y, status);
        T_EQ_MEM(y, want[!layer][staged == &c], (size_t)staged->tokens * 160 * sizeof *y);
        for (int i = 0; i < 2; i++)
            at->rank[i].layer = own[i];
    }
    for (int i = 0; i < 2; i++)
        megamoe_layer_close(second[i]);
    fleet_close(&f);
    fleet_close(&g);
    batch_free(&b);
    batch_free(&c);
    model_close(&m[0]);
    model_close(&m[1]);
}

T_CASE(no_tokens_and_no_routes) {
    t_random r = t_random_start(900);
    model m = model_open(&small, &r);
    batch b = batch_random(&m, 5, 2, ROUTING_RANDOM, &r);
    uint16_t y[5 * 160];
    const setup s = {.weights = m.weights};
    fleet f = fleet_open(&s);
    megamoe_workspace *ws = f.rank[0].workspace;
    T_OK(megamoe_stage(ws, NULL, NULL, NULL, 0, NULL));
    T_OK(megamoe_forward(f.rank[0].layer, ws, NULL, NULL));
    for (int i = 0; i < 10; i++)
        b.ids[i] = -1;
    b.x[7] = 0x7FC0; /* without a route a NaN row gives zeros too */
    memset(y, 0xFF, sizeof y);
    fleet_forward(&f, &b, y);
    for (int i = 0; i < 5 * 160; i++)
        T_EQ_HEX(y[i], 0);
    int64_t counts[5] = {-1, -1, -1, -1, -1};
    T_OK(megamoe_workspace_receive_counts(ws, counts, 5));
    for (int e = 0; e < 5; e++)
        T_EQ_INT(counts[e], 0);
    fleet_close(&f);
    batch_free(&b);
    model_close(&m);
}

T_CASE(nan_rows_stay_alone) {
    t_random r = t_random_start(901);
    model m = model_open(&small, &r);
    batch b = batch_random(&m, 26, 2, ROUTING_HOT, &r);
    uint16_t want[26 * 160], y[26 * 160];
    for (int mode = 0; mode < 3; mode++) {
        const setup s = {.weights = m.weights,
                         .input_scale = mode == 1 ? MEGAMOE_SCALE_BLOCK : MEGAMOE_SCALE_TOKEN,
                         .activations =
                             mode == 2 ? MEGAMOE_ACTIVATIONS_INT8 : MEGAMOE_ACTIVATIONS_E4M3,
                         .ranks = 2};
        for (int64_t i = 0; i < 26 * 160; i++)
            if (i % 160 == 70 && i / 160 % 5 == 1)
                b.x[i] = 0x3F80;
        run_once(&s, &b, want);
        for (int64_t i = 0; i < 26 * 160; i++)
            if (i % 160 == 70 && i / 160 % 5 == 1)
                b.x[i] = (uint16_t)(i / 160 % 2 ? 0xFFC1 : 0x7F80);
        run_once(&s, &b, y);
        for (int t = 0; t < 26; t++)
            for (int i = 0; i < 160; i++)
                if (t % 5 == 1)
                    T_CHECK((y[t * 160 + i] & 0x7FFF) > 0x7F80);
                else
                    T_EQ_HEX(y[t * 160 + i], want[t * 160 + i]);
    }
    batch_free(&b);
    model_close(&m);
}

T_CASE(receive_counts_by_physical_expert) {
    t_random r = t_random_start(902);
    model m = model_open(&small, &r);
    batch b = batch_random(&m, 23, 3, ROUTING_RANDOM, &r);
    batch_mask(&b, 6, &r);
    const int32_t map[] = {4, 0, 1, 2, 3, 4, 0}; /* experts 0 and 4 twice */
    const setup s = {.weights = m.weights,
                     .ranks = 3,
                     .topk = 3,
                     .options = {.physical_to_logical = map, .physical_experts = 7}};
    fleet f = fleet_open(&s);
    uint16_t y[23 * 160];
    fleet_forward(&f, &b, y);
    int64_t want[7] = {0}, got[7];
    for (int32_t rank_index = 0; rank_index < 3; rank_index++) {
        int64_t first;
        const batch part = share_of(&b, rank_index, 3, &first);
        for (int64_t t = 0; t < part.tokens; t++)
            for (int slot = 0; slot < 3; slot++) {
                const int32_t id = part.ids[t * 3 + slot], replica = (int32_t)(rank_index + t) % 2;
                if (id == 4)
                    want[replica ? 5 : 0]++;
                else if (id == 0)
                    want[replica ? 6 : 1]++;
                else if (id > 0)
                    want[id + 1]++;
            }
    }
    T_OK(megamoe_workspace_receive_counts(f.rank[0].workspace, got, 3));
    T_OK(megamoe_workspace_receive_counts(f.rank[1].workspace, got + 3, 2));
    T_OK(megamoe_workspace_receive_counts(f.rank[2].workspace, got + 5, 2));
    for (int p = 0; p < 7; p++)
        T_EQ_INT(got[p], want[p]);
    T_STATUS(megamoe_workspace_receive_counts(f.rank[0].workspace, got, 2), MEGAMOE_EINVAL);
    /* Ranks 0, 1 and 2 hold three, two and two experts. */
    const uint64_t two = megamoe_layer_bytes(f.rank[1].layer);
    T_CHECK(two > 0 && megamoe_layer_bytes(f.rank[2].layer) == two);
    T_EQ_INT((int64_t)(2 * megamoe_layer_bytes(f.rank[0].layer)), (int64_t)(3 * two));
    fleet_close(&f);
    batch_free(&b);
    model_close(&m);
}
