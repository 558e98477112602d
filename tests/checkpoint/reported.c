/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Mistakes that readers of other projects made with these formats, as small inputs with their right
 * values or their refusal: in every family, as read and as packed for both devices. What is tested
 * elsewhere already:
 *
 *   published row of DeepSeek-V4.1    deepseek_v4.c, gpt_oss.c, num/formats.c, weights/decode.c
 *   activation at 12 and -12          num/exp.c, cpu/test_reference.c, cli/test_values.py
 *   sqrt(softplus) at 0, 1, -1        router/rules.c
 *   E4M3 windows of 15 and 18 powers  num/formats.c, weights/analyze.c, convert.c
 *   a scale or tensor that is missing every_missing_tensor_is_named of each family
 *   scales above 448 stored as NaN    block_scales_that_are_no_scale_are_refused; wide.c
 *   names that hold others' names     suffixes_that_are_not_known_are_refused
 *   config groups that overlap        compressed_tensors.c
 *   mixed repositories, draft blocks  modelopt.c, deepseek_v4.c
 *   shapes, offsets, types, padding   safetensors.c
 *   clamps, overflow before globals   cli/test_values.py
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

enum { H = 160, I = 96, E = 2, LAYER = 3 };

typedef enum naming { ONE_EXPERT, FUSED_HALVES, FUSED_ROWS_IN_TURN } naming;

/* A family, and the names of the parts of its matrices. */
static const struct family {
    naming naming;
    megamoe_format format;
    const char *block;
    const char *const *projections;
    const char *codes, *codes_dtype, *scales, *scales_dtype;
    const char *global; /* NULL: none */
    bool reciprocal;
    const char *config;
} families[] = {{ONE_EXPERT, MEGAMOE_FORMAT_MXFP4, "layers.3.ffn.", numbered, "weight", "I8",
                 "scale", "F8_E8M0", NULL, false, NULL},
                {ONE_EXPERT, MEGAMOE_FORMAT_MXFP4, "model.layers.3.mlp.", named, "weight_packed",
                 "U8", "weight_scale", "U8", NULL, false,
                 "{\"quantization_config\":{\"format\":\"mxfp4-pack-quantized\"}}"},
                {FUSED_ROWS_IN_TURN, MEGAMOE_FORMAT_MXFP4, "model.layers.3.mlp.", named, "_blocks",
                 "U8", "_scales", "U8", NULL, false, NULL},
                {ONE_EXPERT, MEGAMOE_FORMAT_MXFP4, "model.layers.3.mlp.", named, "weight", "U8",
                 "weight_scale", "U8", NULL, false,
                 "{\"quantization_config\":{\"store_dtype\":\"mxfp4\"}}"},
                {ONE_EXPERT, MEGAMOE_FORMAT_NVFP4, "model.layers.3.mlp.", named, "weight", "U8",
                 "weight_scale", "F8_E4M3", "weight_scale_2", false, NULL},
                {FUSED_HALVES, MEGAMOE_FORMAT_NVFP4, "model.layers.3.mlp.", named, "", "U8",
                 "_weight_scale", "F8_E4M3", "_weight_scale_2", false, NULL},
                {ONE_EXPERT, MEGAMOE_FORMAT_NVFP4, "model.layers.3.mlp.", named, "weight_packed",
                 "U8", "weight_scale", "F8_E4M3", "weight_global_scale", true, NULL}};
enum { FAMILIES = sizeof families / sizeof *families };

static int64_t rows_of(int p) {
    return p == MEGAMOE_DOWN ? H : I;
}

static int64_t columns_of(int p) {
    return p == MEGAMOE_DOWN ? I : H;
}

static int64_t group_of(const struct family *f) {
    return f->format == MEGAMOE_FORMAT_MXFP4 ? 32 : 16;
}

static void name_of(const struct family *f, int e, int p, const char *part, char name[160]) {
    if (f->naming == ONE_EXPERT)
        snprintf(name, 160, "%sexperts.%d.%s.%s", f->block, e, f->projections[p], part);
    else
        snprintf(name, 160, "%sexperts.%s%s", f->block,
                 p == MEGAMOE_DOWN ? "down_proj" : "gate_up_proj", part);
}

static void set_float(built_tensor *tensor, int64_t index, float value) {
    memcpy(tensor->data + 4 * index, &value, sizeof value);
}

/* All codes are 1, all scales and globals 1, biases 0. */
static built layer_of(const struct family *f) {
    built model = built_start();
    const bool fused = f->naming != ONE_EXPERT;
    for (int e = 0; e < (fused ? 1 : E); e++)
        for (int p = 0; p < 3; p++) {
            char name[160];
            if (fused && p == MEGAMOE_UP)
                continue;
            const int64_t rows = rows_of(p) * (fused && p != MEGAMOE_DOWN ? 2 : 1);
            const int64_t bytes = columns_of(p) / 2, groups = columns_of(p) / group_of(f);
            name_of(f, e, p, f->codes, name);
            built_tensor *codes =
                f->naming == ONE_EXPERT
                    ? built_add(&model, f->codes_dtype, SHAPE(rows, bytes), "%s", name)
                : f->naming == FUSED_HALVES
                    ? built_add(&model, f->codes_dtype, SHAPE(E, rows, bytes), "%s", name)
                    : built_add(&model, f->codes_dtype, SHAPE(E, rows, groups, 16), "%s", name);
            memset(codes->data, 0x22, codes->bytes);
            name_of(f, e, p, f->scales, name);
            built_tensor *scales =
                fused ? built_add(&model, f->scales_dtype, SHAPE(E, rows, groups), "%s", name)
                      : built_add(&model, f->scales_dtype, SHAPE(rows, groups), "%s", name);
            memset(scales->data, f->format == MEGAMOE_FORMAT_MXFP4 ? 127 : 0x38, scales->bytes);
            if (f->naming == FUSED_ROWS_IN_TURN) {
                name_of(f, e, p, "_bias", name);
                built_add(&model, "BF16", SHAPE(E, rows), "%s", name);
            }
            if (!f->global)
                continue;
            name_of(f, e, p, f->global, name);
            built_tensor *global =
                !fused ? built_add(&model, "F32", f->reciprocal ? SHAPE(1) : SCALAR, "%s", name)
                : p == MEGAMOE_DOWN ? built_add(&model, "F32", SHAPE(E), "%s", name)
                                    : built_add(&model, "F32", SHAPE(E, 2), "%s", name);
            for (uint64_t i = 0; i < global->bytes / 4; i++)
                set_float(global, (int64_t)i, 1);
        }
    return model;
}

/* A row of one part of a matrix. */
static uint8_t *row_of(const built *model, const struct family *f, int e, int p, const char *part,
                       int64_t row) {
    char name[160];
    name_of(f, e, p, part, name);
    built_tensor *tensor = built_find(model, name);
    const bool down = p == MEGAMOE_DOWN;
    const int64_t rows = rows_of(p);
    int64_t at = row, all = rows;
    if (f->naming != ONE_EXPERT) {
        all = E * rows * (down ? 1 : 2);
        at = f->naming == FUSED_HALVES || down
                 ? e * rows * (down ? 1 : 2) + (p == MEGAMOE_UP ? rows : 0) + row
                 : (e * rows + row) * 2 + (p == MEGAMOE_UP);
    }
    return tensor->data + at * (int64_t)tensor->bytes / all;
}

static void set_global(const built *model, const struct family *f, int e, int p, float multiplier) {
    char name[160];
    name_of(f, e, p, f->global, name);
    const int64_t index = f->naming == ONE_EXPERT ? 0 : p == MEGAMOE_DOWN ? e : 2 * e + p;
    set_float(built_find(model, name), index, f->reciprocal ? 1 / multiplier : multiplier);
}

static megamoe_weights *read_layer(const built *model, const struct family *f) {
    megamoe_checkpoint *checkpoint = opened(save_model(model, f->config));
    megamoe_weights *weights = NULL;
    T_OK(megamoe_checkpoint_weights(checkpoint, LAYER, &weights));
    megamoe_checkpoint_close(checkpoint);
    return weights;
}

static megamoe_weights *prepared(const megamoe_weights *weights, const char *device) {
    megamoe_prepare_options options = MEGAMOE_INIT(megamoe_prepare_options);
    options.device = device;
    T_OK(megamoe_weights_prepare(weights, NULL, &options, t_path("l.mmoe")));
    megamoe_weights *packed = NULL;
    T_OK(megamoe_weights_open(t_path("l.mmoe"), &packed));
    return packed;
}

typedef void (*check_fn)(const megamoe_weights *weights, const void *expected);

/* As read, and packed for both devices. */
static void check_all(const built *model, const struct family *f, check_fn check,
                      const void *expected) {
    megamoe_weights *weights = read_layer(model, f);
    check(weights, expected);
    static const char *const devices[] = {"cpu", "cuda"};
    for (int d = 0; d < 2; d++) {
        megamoe_weights *packed = prepared(weights, devices[d]);
        check(packed, expected);
        megamoe_weights_close(packed);
    }
    megamoe_weights_close(weights);
}

static double values[H * I];

/* ---- gate before up, halves or rows in turn; low nibble first ---- */

static void check_constants(const megamoe_weights *weights, const void *expected) {
    const double *constants = expected; /* gate, up, down */
    for (int e = 0; e < E; e++)
        for (int p = 0; p < 3; p++) {
            T_OK(megamoe_weights_unpack(weights, e, (megamoe_projection)p, values));
            for (int i = 0; i < H * I; i++)
                T_REQUIRE(T_EQ_F64(values[i], constants[p]));
        }
}

T_CASE(gate_is_gate_and_up_is_up) {
    static const double constants[3] = {1, 2, 3};
    static const uint8_t codes[3] = {0x22, 0x44, 0x55};
    for (int i = 0; i < FAMILIES; i++) {
        built model = layer_of(&families[i]);
        for (int e = 0; e < E; e++)
            for (int p = 0; p < 3; p++)
                for (int64_t row = 0; row < rows_of(p); row++)
                    memset(row_of(&model, &families[i], e, p, families[i].codes, row), codes[p],
                           (size_t)columns_of(p) / 2);
        check_all(&model, &families[i], check_constants, constants);
        built_free(&model);
    }
}

static void check_nibbles(const megamoe_weights *weights, const void *expected) {
    (void)expected;
    T_OK(megamoe_weights_unpack(weights, 1, MEGAMOE_UP, values));
    for (int k = 0; k < H; k++)
        T_REQUIRE(T_EQ_F64(values[7 * H + k], k == 33            ? 0.5
                                              : k == 34          ? 6
                                              : k < 32 || k > 35 ? 1
                                                                 : 0));
}

/* 0x10 is 0 and 0.5. */
T_CASE(the_low_nibble_is_the_even_column) {
    for (int i = 0; i < FAMILIES; i++) {
        built model = layer_of(&families[i]);
        uint8_t *row = row_of(&model, &families[i], 1, MEGAMOE_UP, families[i].codes, 7);
        row[16] = 0x10;
        row[17] = 0x07;
        check_all(&model, &families[i], check_nibbles, NULL);
        built_free(&model);
    }
}

/* ---- Scale bytes are exponents ---- */

static const uint8_t scale_bytes[] = {120, 125, 127, 130, 134, 140, 0, 1, 254};
enum { SCALES = sizeof scale_bytes };

static void check_exponents(const megamoe_weights *weights, const void *expected) {
    (void)expected;
    T_OK(megamoe_weights_unpack(weights, 0, MEGAMOE_DOWN, values));
    for (int row = 0; row < SCALES; row++)
        for (int k = 0; k < I; k++)
            T_REQUIRE(T_EQ_F64(values[row * I + k], ldexp(1, scale_bytes[row] - 127)));
}

/*
 * Cast to an integer 2^-7 becomes 0 and 2^13 wraps, taken as linear 127 is no 1, shifted into place
 * 0 and 255 become 0 and infinity.
 */
T_CASE(e8m0_bytes_are_exponents) {
    for (int i = 0; i < FAMILIES && families[i].format == MEGAMOE_FORMAT_MXFP4; i++) {
        const struct family *f = &families[i];
        built model = layer_of(f);
        /* A row exponent reaches from -96 to 96; beyond that only the checkpoint holds it. */
        for (int row = 0; row < SCALES; row++)
            memset(row_of(&model, f, 0, MEGAMOE_DOWN, f->scales, row), scale_bytes[row], I / 32);
        megamoe_weights *weights = read_layer(&model, f);
        check_exponents(weights, NULL);
        megamoe_weights_close(weights);
        for (int row = 6; row < SCALES; row++)
            memset(row_of(&model, f, 0, MEGAMOE_DOWN, f->scales, row), 127, I / 32);
        weights = read_layer(&model, f);
        for (int d = 0; d < 2; d++) {
            megamoe_weights *packed = prepared(weights, d ? "cuda" : "cpu");
            T_OK(megamoe_weights_unpack(packed, 0, MEGAMOE_DOWN, values));
            for (int row = 0; row < 6; row++)
                T_EQ_F64(values[row * I + 5], ldexp(1, scale_bytes[row] - 127));
            megamoe_weights_close(packed);
        }
        megamoe_weights_close(weights);
        row_of(&model, f, 0, MEGAMOE_DOWN, f->scales, 5)[2] = 255;
        FAILS(try_weights(save_model(&model, f->config), LAYER), MEGAMOE_EFORMAT, "row 5, block 2",
              "0xff", "NaN");
        built_free(&model);
    }
}

/* Scales that somebody has turned into numbers, 120.0 for byte 120, are another dtype. */
T_CASE(scales_as_floats_are_refused) {
    built model = layer_of(&families[0]);
    static const char name[] = "layers.3.ffn.experts.1.w2.scale";
    built_remove(&model, name);
    built_tensor *scales = built_add(&model, "F32", SHAPE(H, I / 32), "%s", name);
    for (int i = 0; i < H * I / 32; i++)
        set_float(scales, i, 120);
    FAILS(try_weights(save_model(&model, NULL), LAYER), MEGAMOE_EFORMAT, name, "F32", "F8_E8M0");
    built_free(&model);
}

/* ---- Global scales ---- */

typedef struct globals {
    double of[3], scale;
} globals;

static void check_globals(const megamoe_weights *weights, const void *expected) {
    const globals *g = expected;
    T_OK(megamoe_weights_unpack(weights, 0, MEGAMOE_GATE, values));
    T_EQ_F64(values[0], 1);
    for (int p = 0; p < 3; p++) {
        T_OK(megamoe_weights_unpack(weights, 1, (megamoe_projection)p, values));
        T_EQ_F64(values[5 * columns_of(p) + 17], 6 * g->scale * g->of[p]);
        T_EQ_F64(values[6 * columns_of(p) + 17], g->scale * g->of[p]);
    }
}

/*
 * Gate's and up's differ; 2e-5 would push block scales into E4M3's subnormals; 2^-7 is a small
 * block scale under a global of 1, 448 the largest; 3584 and 2 are divisors of compressed-tensors.
 */
T_CASE(each_matrix_has_its_own_global_scale) {
    static const struct {
        float of[3];
        uint8_t scale;
        double value;
    } cases[] = {{{3.85e-5f, 4.83e-5f, 1}, 0x38, 1},
                 {{2e-5f, 2e-5f, 2e-5f}, 0x01, 0x1p-9},
                 {{1, 1, 1}, 0x08, 0x1p-6},
                 {{1, 1, 1}, 0x04, 0x1p-7},
                 {{1.0f / 3584, 0.5f, 1}, 0x7E, 448.0},
                 {{2e-5f, 1, 100}, 0x7E, 448.0}};
    for (int i = 0; i < FAMILIES; i++) {
        const struct family *f = &families[i];
        if (f->format != MEGAMOE_FORMAT_NVFP4)
            continue;
        for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
            built model = layer_of(f);
            globals g = {.scale = cases[c].value};
            for (int p = 0; p < 3; p++) {
                const float of = cases[c].of[p];
                g.of[p] = (double)(f->reciprocal ? 1 / (1 / of) : of);
                set_global(&model, f, 1, p, of);
                row_of(&model, f, 1, p, f->codes, 5)[8] = 0x77;
                for (int64_t row = 5; row < 7; row++)
                    memset(row_of(&model, f, 1, p, f->scales, row), cases[c].scale,
                           (size_t)columns_of(p) / 16);
            }
            check_all(&model, f, check_globals, &g);
            built_free(&model);
        }
    }
}

/* One expert's input scale may be 0, denormal, infinite, far from 1 or absent: weights stay. */
T_CASE(input_scales_change_no_weight) {
    static const float inputs[] = {0, 1e-42f, INFINITY, NAN, 2400, 1.0f / 2400};
    static const double ones[3] = {1, 1, 1};
    for (int i = 0; i < FAMILIES; i++) {
        const struct family *f = &families[i];
        if (f->format != MEGAMOE_FORMAT_NVFP4 || f->naming != ONE_EXPERT)
            continue;
        for (size_t n = 0; n < sizeof inputs / sizeof *inputs; n++) {
            built model = layer_of(f); /* without any */
            char name[160];
            name_of(f, 1, MEGAMOE_UP, f->reciprocal ? "input_global_scale" : "input_scale", name);
            set_float(built_add(&model, "F32", f->reciprocal ? SHAPE(1) : SCALAR, "%s", name), 0,
                      inputs[n]);
            check_all(&model, f, check_constants, ones);
            built_free(&model);
        }
    }
}

/* ---- Scales far apart, odd sizes, odd addresses ---- */

static void check_apart(const megamoe_weights *weights, const void *expected) {
    (void)expected;
    T_OK(megamoe_weights_unpack(weights, 1, MEGAMOE_GATE, values));
    for (int k = 0; k < H; k++)
        T_EQ_F64(values[9 * H + k], k < 32 ? 6 : k < 64 ? 0.5 * 0x1p-17 : 1);
}

/* 127 and 110 in one row: one 8-bit block scale for both would round the small group to zero. */
T_CASE(scales_17_binades_apart_are_exact_or_refused) {
    for (int i = 0; i < FAMILIES && families[i].format == MEGAMOE_FORMAT_MXFP4; i++) {
        const struct family *f = &families[i];
        built model = layer_of(f);
        uint8_t *codes = row_of(&model, f, 1, MEGAMOE_GATE, f->codes, 9);
        memset(codes, 0x77, 16);
        memset(codes + 16, 0x11, 16);
        row_of(&model, f, 1, MEGAMOE_GATE, f->scales, 9)[1] = 110;
        megamoe_weights *weights = read_layer(&model, f);
        check_apart(weights, NULL);
        megamoe_weights *packed = prepared(weights, "cpu");
        check_apart(packed, NULL);
        megamoe_weights_close(packed);
        megamoe_prepare_options options = MEGAMOE_INIT(megamoe_prepare_options);
        options.device = "cuda";
        FAILS(megamoe_weights_prepare(weights, NULL, &options, t_path("c.mmoe")), MEGAMOE_EINEXACT,
              "row 9, block 1", "groups outside: 1");
        megamoe_weights_close(weights);
        built_free(&model);
    }
}

/*
 * Widths that fill no tile: 96 is packed in 128, 160 in 256. Biases stay with their rows, and those
 * of padded rows are 0: the reference forward of cli/test_values.py would see them.
 */
T_CASE(biases_of_padded_layers_stay_with_their_rows) {
    const struct family *f = &families[2];
    built model = layer_of(f);
    for (int e = 0; e < E; e++)
        for (int p = 0; p < 3; p++)
            for (int64_t row = 0; row < rows_of(p); row++) {
                const float bias = (float)(e * 64 + p * 16 + row % 16 + 1); /* exact in BF16 */
                uint8_t bytes[4];
                memcpy(bytes, &bias, sizeof bytes);
                memcpy(row_of(&model, f, e, p, "_bias", row), bytes + 2, 2);
            }
    megamoe_weights *weights = read_layer(&model, f);
    for (int e = 0; e < E; e++)
        for (int p = 0; p < 3; p++) {
            megamoe_matrix matrix;
            T_OK(megamoe_weights_matrix(weights, e, (megamoe_projection)p, &matrix));
            for (int64_t row = 0; row < rows_of(p); row++) {
                uint32_t bits = 0;
                memcpy((uint8_t *)&bits + 2,
                       (const uint8_t *)matrix.bias + (size_t)row * matrix.bias_stride, 2);
                float bias;
                memcpy(&bias, &bits, sizeof bias);
                T_EQ_F64((double)bias, e * 64 + p * 16 + (double)(row % 16) + 1);
            }
        }
    static const double ones[3] = {1, 1, 1};
    megamoe_weights_close(weights);
    check_all(&model, f, check_constants, ones);
    built_free(&model);
}

/* A share of 48 over two ranks is 24: no whole block, so no layer. */
T_CASE(sizes_without_whole_blocks_are_refused) {
    static const struct {
        megamoe_format format;
        int32_t hidden, intermediate;
        const char *says; /* NULL: it is one */
    } shapes[] = {{MEGAMOE_FORMAT_MXFP4, 64, 48, "intermediate 48"},
                  {MEGAMOE_FORMAT_MXFP4, 64, 80, "intermediate 80"},
                  {MEGAMOE_FORMAT_MXFP4, 48, 64, "hidden 48"},
                  {MEGAMOE_FORMAT_MXFP4, 64, 96, NULL},
                  {MEGAMOE_FORMAT_NVFP4, 64, 24, "intermediate 24"},
                  {MEGAMOE_FORMAT_NVFP4, 64, 48, NULL},
                  {MEGAMOE_FORMAT_NVFP4, 48, 80, NULL}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const sizes s = {shapes[i].hidden, shapes[i].intermediate, 2};
        built model = built_start();
        if (shapes[i].format == MEGAMOE_FORMAT_MXFP4)
            add_mxfp4(&model, "layers.%d.ffn.", LAYER, numbered, "scale", s);
        else
            add_nvfp4(&model, "layers.%d.ffn.", LAYER, numbered, s);
        const char *path = save_model(&model, NULL);
        if (shapes[i].says)
            FAILS(try_weights(path, LAYER), MEGAMOE_EFORMAT, shapes[i].says, "multiple of");
        else
            T_OK(try_weights(path, LAYER));
        built_free(&model);
    }
}

/* Files whose data starts at an address that is no multiple of anything: the header's length is. */
T_CASE(data_at_odd_addresses_is_read) {
    for (int i = 0; i < FAMILIES; i++) {
        const struct family *f = &families[i];
        built model = layer_of(f);
        if (f->global)
            set_global(&model, f, 1, MEGAMOE_UP, 0.25f);
        const char *path = save_model(&model, f->config);
        size_t bytes;
        uint8_t *file = t_read_file(t_path("model/model.safetensors"), &bytes);
        for (size_t shift = 1; shift < 4; shift++) {
            uint8_t *moved = malloc(bytes + shift);
            const size_t header = (size_t)file[0] | (size_t)file[1] << 8 | (size_t)file[2] << 16;
            memcpy(moved, file, 8 + header);
            memset(moved + 8 + header, ' ', shift);
            memcpy(moved + 8 + header + shift, file + 8 + header, bytes - 8 - header);
            moved[0] = (uint8_t)(header + shift);
            T_REQUIRE(header % 256 + shift < 256);
            t_write_file(t_path("model/model.safetensors"), moved, bytes + shift);
            free(moved);
            megamoe_checkpoint *checkpoint = opened(path);
            megamoe_weights *weights = NULL;
            T_OK(megamoe_checkpoint_weights(checkpoint, LAYER, &weights));
            T_OK(megamoe_weights_unpack(weights, 1, MEGAMOE_UP, values));
            for (int n = 0; n < H * I; n++)
                T_REQUIRE(T_EQ_F64(values[n], f->global ? 0.25 : 1));
            megamoe_weights_close(prepared(weights, "cpu"));
            megamoe_weights_close(weights);
            megamoe_checkpoint_close(checkpoint);
        }
        free(file);
        built_free(&model);
    }
}
