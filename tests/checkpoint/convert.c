/* SPDX-License-Identifier: Apache-2.0 */
/* Conversion between families: what is lossless keeps every value, all else is refused. */
#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint/convert.h"
#include "fixture.h"

static const sizes odd = {.hidden = 96, .intermediate = 64, .experts = 3};
enum { WEIGHTS = 96 * 64 };

static const char *const families[] = {"deepseek-v4", "compressed-tensors", "modelopt-nvfp4",
                                       "gpt-oss"};

#define ROUTED "\"num_experts_per_tok\":2,\"routed_scaling_factor\":1.5"

/* A new name each time. */
static const char *out_path(void) {
    static int n;
    char name[32];
    snprintf(name, sizeof name, "converted-%d", n++);
    return t_path(name);
}

static megamoe_status try_convert(const char *path, const char *family, megamoe_format format,
                                  const char *out) {
    megamoe_checkpoint *checkpoint = opened(path);
    megamoe_convert_options options = MEGAMOE_INIT(megamoe_convert_options);
    options.family = family;
    options.format = format;
    const megamoe_status status = megamoe_checkpoint_convert(checkpoint, &options, out);
    megamoe_checkpoint_close(checkpoint);
    return status;
}

static void add_router(built *model, const char *block, const char *bias) {
    randomize(model,
              built_add(model, "BF16", SHAPE(odd.experts, odd.hidden), "%sgate.weight", block), 0,
              63);
    randomize(model, built_add(model, "F32", SHAPE(odd.experts), "%s%s", block, bias), 0, 63);
}

/* A layer whose scales lie within the 17 binades that NVFP4 holds. */
static void add_layer(built *model, const char *block, int32_t layer,
                      const char *const *projections) {
    add_mxfp4(model, block, layer, projections, "scale", odd);
    for (size_t i = 0; i < model->n; i++)
        if (strcmp(model->tensors[i].dtype, "F8_E8M0") == 0)
            randomize(model, &model->tensors[i], 113, 130);
}

static built v4(void) {
    built model = built_start();
    add_layer(&model, "layers.%d.ffn.", 3, numbered);
    add_router(&model, "layers.3.ffn.", "gate.bias");
    return model;
}

#define V4_CONFIG "{\"model_type\":\"deepseek_v4\",\"expert_dtype\":\"fp4\"," ROUTED "}"

static megamoe_weights *weights_of(const char *path) {
    megamoe_checkpoint *checkpoint = opened(path);
    megamoe_weights *weights = NULL;
    T_OK(megamoe_checkpoint_weights(checkpoint, 3, &weights));
    megamoe_checkpoint_close(checkpoint);
    return weights;
}

static megamoe_router_desc router_of(const char *path) {
    megamoe_checkpoint *checkpoint = opened(path);
    megamoe_router *router = NULL;
    megamoe_router_desc desc = MEGAMOE_INIT(megamoe_router_desc);
    T_OK(megamoe_checkpoint_router(checkpoint, 3, &router));
    T_OK(megamoe_router_describe(router, &desc));
    megamoe_router_close(router);
    megamoe_checkpoint_close(checkpoint);
    return desc;
}

/* All values, biases, the description but the format, and the router's. */
static void same(const char *from, const char *to, int32_t experts) {
    static double a[WEIGHTS], b[WEIGHTS];
    megamoe_weights *x = weights_of(from), *y = weights_of(to);
    megamoe_layer_desc p = MEGAMOE_INIT(megamoe_layer_desc), q = p;
    T_OK(megamoe_weights_describe(x, &p));
    T_OK(megamoe_weights_describe(y, &q));
    q.format = p.format;
    T_EQ_MEM(&p, &q, sizeof p);
    for (int32_t e = 0; e < experts; e++)
        for (megamoe_projection m = MEGAMOE_GATE; m <= MEGAMOE_DOWN; m++) {
            T_OK(megamoe_weights_unpack(x, e, m, a));
            T_OK(megamoe_weights_unpack(y, e, m, b));
            for (int i = 0; i < WEIGHTS; i++)
                T_REQUIRE(T_EQ_F64(b[i], a[i]) && T_EQ_INT(signbit(b[i]) != 0, signbit(a[i]) != 0));
            megamoe_matrix s, t;
            T_OK(megamoe_weights_matrix(x, e, m, &s));
            T_OK(megamoe_weights_matrix(y, e, m, &t));
            for (int32_t row = 0; p.has_bias && row < (m == MEGAMOE_DOWN ? 96 : 64); row++)
                T_EQ_MEM((const uint8_t *)t.bias + (size_t)row * t.bias_stride,
                         (const uint8_t *)s.bias + (size_t)row * s.bias_stride, 2);
        }
    megamoe_weights_close(x);
    megamoe_weights_close(y);
    megamoe_router_desc r = router_of(from), s = router_of(to);
    T_EQ_MEM(&r, &s, sizeof r);
}

static int files_in(const char *path) {
    DIR *stream = opendir(path);
    T_REQUIRE(stream != NULL);
    int count = -2; /* . and .. */
    while (readdir(stream))
        count++;
    closedir(stream);
    return count;
}

/* From every family that holds a model of DeepSeek-V4's to every other, in both formats. */
T_CASE(every_way_keeps_every_value) {
    built model = v4();
    const char *first = save_model(&model, V4_CONFIG);
    for (int from = 0; from < 2; from++) {
        char middle[512];
        snprintf(middle, sizeof middle, "%s", out_path());
        T_OK(try_convert(first, families[from], MEGAMOE_FORMAT_MXFP4, middle));
        same(first, middle, odd.experts);
        for (int to = 0; to < 3; to++)
            for (megamoe_format format = 0; format <= MEGAMOE_FORMAT_NVFP4; format++) {
                const bool has =
                    format == 0 || to == 1 || (to == 0) == (format == MEGAMOE_FORMAT_MXFP4);
                const char *out = out_path();
                if (!has) {
                    FAILS(try_convert(middle, families[to], format, out), MEGAMOE_EUNSUPPORTED,
                          families[to], megamoe_format_name(format));
                    continue;
                }
                T_OK(try_convert(middle, families[to], format, out));
                megamoe_checkpoint *checkpoint = opened(out);
                megamoe_checkpoint_info info = MEGAMOE_INIT(megamoe_checkpoint_info);
                T_OK(megamoe_checkpoint_describe(checkpoint, &info));
                T_EQ_STR(info.family, families[to]);
                megamoe_checkpoint_close(checkpoint);
                same(first, out, odd.experts);
                T_EQ_INT(files_in(out), to == 2 ? 3 : 2);
            }
    }
    built_free(&model);
}

/* ---- gpt-oss ---- */

static built gpt_oss(const char *block, const char *experts, const char *router, bool original) {
    built model = built_start();
    for (int down = 0; down < 2; down++) {
        static const char *const stems[2][2] = {{"gate_up_proj", "down_proj"}, {"mlp1", "mlp2"}};
        static const char *const parts[2][3] = {{"_blocks", "_scales", "_bias"},
                                                {"_weight.blocks", "_weight.scales", "_bias"}};
        const char *stem = stems[original][down], *const *part = parts[original];
        const int64_t rows = down ? odd.hidden : 2 * odd.intermediate;
        const int64_t blocks = (down ? odd.intermediate : odd.hidden) / 32;
        randomize(&model,
                  built_add(&model, "U8", SHAPE(odd.experts, rows, blocks, 16), "%s%s%s%s", block,
                            experts, stem, part[0]),
                  0, 255);
        randomize(&model,
                  built_add(&model, "U8", SHAPE(odd.experts, rows, blocks), "%s%s%s%s", block,
                            experts, stem, part[1]),
                  113, 130);
        randomize(&model,
                  built_add(&model, "BF16", SHAPE(odd.experts, rows), "%s%s%s%s", block, experts,
                            stem, part[2]),
                  0, 63);
    }
    randomize(
        &model,
        built_add(&model, "BF16", SHAPE(odd.experts, odd.hidden), "%s%s.weight", block, router), 0,
        63);
    randomize(&model, built_add(&model, "BF16", SHAPE(odd.experts), "%s%s.bias", block, router), 0,
              63);
    return model;
}

T_CASE(gpt_oss_goes_everywhere_and_comes_back) {
    static const char *const configs[] = {
        "{\"model_type\":\"gpt_oss\",\"num_experts_per_tok\":2}",
        "{\"experts_per_token\":2,\"num_experts\":3,\"swiglu_limit\":6.5}"};
    for (int original = 0; original < 2; original++) {
        built model = original ? gpt_oss("block.3.mlp.", "", "gate", true)
                               : gpt_oss("model.layers.3.mlp.", "experts.", "router", false);
        const char *first = save_model(&model, configs[original]);
        for (int to = 0; to < 4; to++) {
            char middle[512];
            snprintf(middle, sizeof middle, "%s", out_path());
            T_OK(try_convert(first, families[to], 0, middle));
            same(first, middle, odd.experts);
            const char *back = out_path();
            if (to == 2) { /* NVFP4 */
                FAILS(try_convert(middle, "gpt-oss", 0, back), MEGAMOE_EINEXACT, "layer 3",
                      "NVFP4");
                continue;
            }
            T_OK(try_convert(middle, "gpt-oss", 0, back));
            same(first, back, odd.experts);
            /* Rows alternate again: the bytes are the first ones. */
            char path[600];
            snprintf(path, sizeof path, "%s/model.safetensors", back);
            megamoe_checkpoint *file = NULL;
            T_OK(megamoe_tensors_open(path, &file));
            megamoe_tensor tensor;
            T_OK(megamoe_checkpoint_tensor(file, "model.layers.3.mlp.experts.gate_up_proj_blocks",
                                           &tensor));
            T_EQ_INT((int64_t)tensor.bytes, (int64_t)model.tensors[0].bytes);
            T_EQ_MEM(tensor.data, model.tensors[0].data, model.tensors[0].bytes);
            megamoe_checkpoint_close(file);
        }
        built_free(&model);
    }
}

T_CASE(models_that_names_would_change_are_refused) {
    built model = v4();
    FAILS(try_convert(save_model(&model, V4_CONFIG), "gpt-oss", 0, out_path()),
          MEGAMOE_EUNSUPPORTED, "layers.3.ffn", "no biases", "deepseek_v4");
    built_free(&model);
    /* Under other names than ffn nothing says that it is not DeepSeek-V4. */
    model = built_start();
    add_mxfp4(&model, "model.layers.%d.mlp.", 3, named, "weight_scale", odd);
    for (size_t i = 0; i < model.n; i++)
        strcpy(model.tensors[i].dtype, "U8");
    static const char silent[] = "{\"quantization_config\":{\"store_dtype\":\"mxfp4\"}}";
    const char *out = out_path();
    FAILS(try_convert(save_model(&model, silent), "deepseek-v4", 0, out), MEGAMOE_EUNSUPPORTED,
          "model_type", "taken for DeepSeek-V4");
    T_CHECK(access(out, F_OK) != 0);
    T_OK(try_convert(save_model(&model, silent), "compressed-tensors", 0, out));
    T_OK(try_weights(out, 3));
    built_free(&model);
    /* gpt-oss holds BF16. */
    model = built_start();
    add_layer(&model, "model.layers.%d.mlp.", 3, named);
    for (int32_t e = 0; e < odd.experts; e++)
        for (int p = 0; p < 3; p++)
            built_add(&model, "F32", SHAPE(p == 2 ? 96 : 64),
                      "model.layers.3.mlp.experts.%d.%s.bias", e, named[p]);
    T_OK(try_convert(save_model(&model, "{\"model_type\":\"gpt_oss\"}"), "gpt-oss", 0, out_path()));
    static const char bias[] = "model.layers.3.mlp.experts.1.up_proj.bias";
    const float between = nextafterf(1, 2);
    memcpy(built_find(&model, bias)->data + sizeof between * 5, &between, sizeof between);
    FAILS(try_convert(save_model(&model, "{\"model_type\":\"gpt_oss\"}"), "gpt-oss", 0, out_path()),
          MEGAMOE_EINEXACT, bias, "expert 1, row 5", "1.00000012", "BF16");
    T_OK(try_convert(save_model(&model, "{\"model_type\":\"gpt_oss\"}"), "modelopt-nvfp4", 0,
                     out_path()));
    built_free(&model);
}

/* ---- MXFP4 to NVFP4 ---- */

static built_tensor *scales_of(const built *model, const char *matrix) {
    char name[96];
    snprintf(name, sizeof name, "layers.3.ffn.experts.1.%s.scale", matrix);
    return built_find(model, name);
}

static built_tensor *codes_of(const built *model, const char *matrix) {
    char name[96];
    snprintf(name, sizeof name, "layers.3.ffn.experts.1.%s.weight", matrix);
    return built_find(model, name);
}

/* Exact if and only if the exponents of a matrix lie within 17 of its largest. */
T_CASE(nvfp4_holds_17_binades) {
    static const int most[] = {0, 9, 17, 127, 254}, spreads[] = {0, 1, 9, 17, 18};
    built model = v4();
    built_tensor *scales = scales_of(&model, "w3"), *codes = codes_of(&model, "w3");
    memset(codes->data, 0x7A, codes->bytes);
    for (size_t i = 0; i < sizeof most / sizeof *most; i++)
        for (size_t j = 0; j < sizeof spreads / sizeof *spreads; j++)
            for (int family = 1; family < 3; family++) {
                const int spread = spreads[j];
                if (spread > most[i])
                    continue;
                memset(scales->data, most[i], scales->bytes);
                scales->data[3 * 5 + 2] = (uint8_t)(most[i] - spread);
                const char *path = save_model(&model, V4_CONFIG), *out = out_path();
                if (spread <= 17) {
                    T_OK(try_convert(path, families[family], MEGAMOE_FORMAT_NVFP4, out));
                    same(path, out, odd.experts);
                    continue;
                }
                char value[32];
                snprintf(value, sizeof value, "2^%d lies 18", most[i] - spread - 127);
                FAILS(try_convert(path, families[family], MEGAMOE_FORMAT_NVFP4, out),
                      MEGAMOE_EINEXACT, scales->name, "expert 1, row 5, block 2", value, "17");
                T_CHECK(access(out, F_OK) != 0);
            }
    built_free(&model);
}

/* The scale of a group of zeros says nothing. */
T_CASE(groups_of_zeros_have_any_scale) {
    built model = v4();
    built_tensor *scales = scales_of(&model, "w1"), *codes = codes_of(&model, "w1");
    memset(scales->data, 120, scales->bytes);
    for (int g = 0; g < 3; g += 2) {
        memset(codes->data + 48 * 7 + 16 * g, g ? 0x88 : 0x08, 16); /* -0 stays -0 */
        scales->data[3 * 7 + g] = g ? 254 : 0;
    }
    memset(codes_of(&model, "w2")->data, 0, codes_of(&model, "w2")->bytes);
    randomize(&model, scales_of(&model, "w2"), 0, 254);
    const char *path = save_model(&model, V4_CONFIG), *out = out_path();
    T_OK(try_convert(path, "modelopt-nvfp4", 0, out));
    same(path, out, odd.experts);
    built_free(&model);
}

/* ---- NVFP4 to NVFP4 ---- */

T_CASE(globals_are_inverted_where_a_divisor_exists) {
    built model = built_start();
    add_nvfp4(&model, "model.layers.%d.mlp.", 3, named, odd);
    add_router(&model, "model.layers.3.mlp.", "gate.e_score_correction_bias");
    static const char config[] = "{\"model_type\":\"deepseek_v3\"," ROUTED "}";
    /* Reciprocals of FP32 numbers, so each has a divisor. */
    static const char part[] = ".weight_scale_2";
    for (size_t i = 0; i < model.n; i++) {
        const size_t length = strlen(model.tensors[i].name);
        if (length < sizeof part ||
            strcmp(model.tensors[i].name + length - sizeof part + 1, part) != 0)
            continue;
        const float global = 1.0f / (float)(1e4 * (1 + t_uniform(&model.random)));
        memcpy(model.tensors[i].data, &global, sizeof global);
    }
    const char *path = save_model(&model, config);
    char there[512];
    snprintf(there, sizeof there, "%s", out_path());
    T_OK(try_convert(path, "compressed-tensors", 0, there));
    same(path, there, odd.experts);
    const char *back = out_path();
    T_OK(try_convert(there, "modelopt-nvfp4", 0, back));
    same(path, back, odd.experts);

    /* Just below a power of two neighbours lie closer than reciprocals do. */
    const float none = nextafterf(nextafterf(nextafterf(0.5f, 0), 0), 0);
    T_CHECK(1 / (1 / none) != none);
    memcpy(built_find(&model, "model.layers.3.mlp.experts.2.up_proj.weight_scale_2")->data, &none,
           sizeof none);
    const char *out = out_path();
    FAILS(try_convert(save_model(&model, config), "compressed-tensors", 0, out), MEGAMOE_EINEXACT,
          "experts.2.up_proj", "0.49999991", "divisor");
    T_CHECK(access(out, F_OK) != 0);
    for (int to = 0; to < 2; to++)
        FAILS(try_convert(save_model(&model, config), families[to], MEGAMOE_FORMAT_MXFP4, out),
              MEGAMOE_EINEXACT, "layer 3", "NVFP4", "16", "32");
    built_free(&model);
}

T_CASE(fused_experts_get_tensors_of_their_own) {
    built model = built_start();
    static const char block[] = "model.layers.3.mlp.";
    for (int down = 0; down < 2; down++) {
        const char *name = down ? "down_proj" : "gate_up_proj";
        const int64_t rows = down ? odd.hidden : 2 * odd.intermediate;
        const int64_t columns = down ? odd.intermediate : odd.hidden;
        randomize(&model,
                  built_add(&model, "U8", SHAPE(odd.experts, rows, columns / 2), "%sexperts.%s",
                            block, name),
                  0, 255);
        randomize(&model,
                  built_add(&model, "F8_E4M3", SHAPE(odd.experts, rows, columns / 16),
                            "%sexperts.%s_weight_scale", block, name),
                  0, 0x7E);
        built_tensor *globals =
            built_add(&model, "F32", down ? SHAPE(odd.experts) : SHAPE(odd.experts, 2),
                      "%sexperts.%s_weight_scale_2", block, name);
        for (uint64_t i = 0; i < globals->bytes / 4; i++) {
            const float global = ldexpf(1, -(int)i); /* powers of two have reciprocals */
            memcpy(globals->data + 4 * i, &global, sizeof global);
        }
    }
    add_router(&model, block, "gate.e_score_correction_bias");
    const char *path = save_model(&model, "{\"model_type\":\"deepseek_v3\"," ROUTED "}");
    for (int to = 1; to < 3; to++) {
        const char *out = out_path();
        T_OK(try_convert(path, families[to], 0, out));
        same(path, out, odd.experts);
    }
    built_free(&model);
}

/* ---- Writing ---- */

/* Layers of more than 4 GB are written in parts, of which the first has the router. */
T_CASE(a_file_may_hold_a_part_of_the_experts) {
    built model = v4();
    megamoe_checkpoint *checkpoint = opened(save_model(&model, V4_CONFIG));
    mm_conversion conversion;
    T_OK(mm_conversion_open(checkpoint, &checkpoint->layers[0],
                            mm_target_find("compressed-tensors", MEGAMOE_FORMAT_MXFP4),
                            &conversion));
    mm_converted_file parts[2];
    T_OK(mm_converted_file_open(&conversion, 0, 1, &parts[0]));
    T_OK(mm_converted_file_open(&conversion, 1, 3, &parts[1]));
    T_EQ_INT((int64_t)parts[0].n, 2 + 6);
    T_EQ_STR(parts[0].specs[0].name, "layers.3.ffn.gate.bias");
    T_EQ_STR(parts[0].specs[2].name, "layers.3.ffn.experts.0.w1.weight_packed");
    T_EQ_INT((int64_t)parts[1].n, 12);
    T_EQ_STR(parts[1].specs[0].name, "layers.3.ffn.experts.1.w1.weight_packed");
    T_EQ_STR(parts[1].specs[11].name, "layers.3.ffn.experts.2.w2.weight_scale");
    T_EQ_INT((int64_t)parts[1].bytes, 2 * 3 * (WEIGHTS / 2 + WEIGHTS / 32));
    mm_converted_file_close(&parts[0]);
    mm_converted_file_close(&parts[1]);
    mm_conversion_close(&conversion);
    megamoe_checkpoint_close(checkpoint);
    built_free(&model);
}

typedef struct seen {
    uint64_t done, total;
    bool ordered;
} seen;

static void see(void *user, uint64_t done, uint64_t total) {
    seen *s = user;
    s->ordered = s->ordered && done >= s->done && done <= total && (!s->total || total == s->total);
    s->done = done;
    s->total = total;
}

T_CASE(progress_runs_over_all_files) {
    built model = v4();
    for (int32_t layer = 4; layer < 7; layer++)
        add_mxfp4(&model, "layers.%d.ffn.", layer, numbered, "scale", odd);
    megamoe_checkpoint *checkpoint = opened(save_model(&model, V4_CONFIG));
    seen s = {.ordered = true};
    megamoe_convert_options options = MEGAMOE_INIT(megamoe_convert_options);
    options.family = "compressed-tensors";
    options.progress = (megamoe_progress){see, &s};
    const char *out = out_path();
    T_OK(megamoe_checkpoint_convert(checkpoint, &options, out));
    megamoe_checkpoint_close(checkpoint);
    T_CHECK(s.ordered && s.done == s.total && s.total > 0);
    checkpoint = opened(out);
    megamoe_checkpoint_info info = MEGAMOE_INIT(megamoe_checkpoint_info);
    T_OK(megamoe_checkpoint_describe(checkpoint, &info));
    T_EQ_INT((int64_t)info.files, 4);
    T_EQ_INT(info.layers, 4);
    T_CHECK(info.bytes > s.total && info.bytes < s.total + 4 * 65536);
    megamoe_checkpoint_close(checkpoint);
    same(save_model(&model, V4_CONFIG), out, odd.experts);
    T_EQ_INT(files_in(out), 6); /* four parts, the index, the config */
    built_free(&model);
}

/* The last layer cannot be converted: nothing is written of the first. */
T_CASE(a_refused_layer_leaves_nothing) {
    built model = v4();
    add_layer(&model, "layers.%d.ffn.", 4, numbered);
    built_find(&model, "layers.4.ffn.experts.2.w2.scale")->data[7] = 3;
    const char *path = save_model(&model, V4_CONFIG);
    const int before = files_in(t_path(""));
    FAILS(try_convert(path, "modelopt-nvfp4", 0, out_path()), MEGAMOE_EINEXACT,
          "layers.4.ffn.experts.2.w2.scale", "row 3, block 1", "2^-124");
    built_find(&model, "layers.4.ffn.experts.2.w2.scale")->data[7] = 255;
    FAILS(try_convert(save_model(&model, V4_CONFIG), "compressed-tensors", 0, out_path()),
          MEGAMOE_EFORMAT, "layers.4.ffn.experts.2.w2.scale", "0xff");
    T_EQ_INT(files_in(t_path("")), before);
    built_free(&model);
}

T_CASE(what_is_asked_is_checked) {
    built model = v4();
    const char *path = save_model(&model, V4_CONFIG);
    FAILS(try_convert(path, NULL, 0, out_path()), MEGAMOE_EINVAL, "family");
    FAILS(try_convert(path, "gguf", 0, out_path()), MEGAMOE_EUNSUPPORTED, "\"gguf\"",
          "compressed-tensors");
    FAILS(try_convert(path, "mimo-mxfp4", 0, out_path()), MEGAMOE_EUNSUPPORTED, "mimo-mxfp4");
    FAILS(try_convert(path, "compressed-tensors", 0, path), MEGAMOE_EIO, path, "not empty");
    T_OK(try_weights(path, 3));
    built_free(&model);
    model = built_start();
    for (int p = 0; p < 3; p++)
        built_add(&model, "BF16", SHAPE(64, 64), "model.layers.3.mlp.experts.0.%s.weight",
                  named[p]);
    FAILS(try_convert(save_model(&model, NULL), "deepseek-v4", 0, out_path()), MEGAMOE_EUNSUPPORTED,
          "BF16", "--quantize");
    built_free(&model);
}
