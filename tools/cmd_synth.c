/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe synth: a checkpoint of a public model's geometry with synthetic weights. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "commands.h"
#include "models.h"
#include "options.h"
#include "parallel.h"
#include "progress.h"
#include "quantize.h"
#include "report.h"
#include "synth.h"
#include "synth_gguf.h"

/*
 * A file holds one layer, or a part of its experts where the layer is larger than this and its
 * experts have tensors of their own.
 */
static const uint64_t largest_file = 4000000000;

typedef enum content {
    CODES,
    SCALES,
    GLOBAL_SCALE,
    INPUT_SCALE,
    FUSED_CODES,
    FUSED_SCALES,
    FUSED_BIAS,
    ROUTER_WEIGHT,
    ROUTER_BIAS,
    ROUTER_LINEAR_BIAS,
    ROUTER_IMAGE_BIAS,
    HASH_TABLE
} content;

typedef struct tensor {
    content content;
    int32_t expert;
    megamoe_projection projection;
    char name[MODEL_NAME_BYTES + 32]; /* with the part behind the matrix or router */
} tensor;

/* By the words of --container. */
enum { SAFETENSORS, GGUF };

typedef struct checkpoint {
    const model *model;
    int container;
    megamoe_format format;
    int64_t seed;
    int32_t threads;
    int32_t first_layer, layers;
    int32_t files_per_layer, experts_per_file;
    const char *directory;
    json_t *weight_map;
    uint64_t bytes; /* of all tensors written */
} checkpoint;

/* One file in the making. */
typedef struct file {
    const model *model;
    megamoe_layer_desc layer;
    synth *weights;
    tensor *tensors;
    megamoe_tensor_spec *specs;
    size_t n;
    uint64_t bytes; /* written */
    /* The matrix that was made last: its codes and scales are two tensors. */
    int32_t expert;
    megamoe_projection projection;
    uint8_t *codes, *scales;
    uint8_t
        *fused_scales; /* of all experts, for the tensor behind their codes; NULL if not fused */
} file;

static void add(file *f, content what, const char *name, const char *part, const char *dtype,
                int32_t rank, int64_t rows, int64_t columns) {
    tensor *t = &f->tensors[f->n];
    t->content = what;
    snprintf(t->name, sizeof t->name, "%s%s", name, part);
    f->specs[f->n++] = (megamoe_tensor_spec){
        .name = t->name, .dtype = dtype, .rank = rank, .shape = {rows, columns}};
}

static void add_matrix(file *f, int32_t expert, megamoe_projection projection) {
    const megamoe_layer_desc *layer = &f->layer;
    const int64_t rows = projection == MEGAMOE_DOWN ? layer->hidden : layer->intermediate;
    const int64_t columns = projection == MEGAMOE_DOWN ? layer->intermediate : layer->hidden;
    char name[MODEL_NAME_BYTES];
    model_matrix_name(f->model, layer->layer, expert, projection, name);
    const size_t first = f->n;
    if (layer->format == MEGAMOE_FORMAT_MXFP4) {
        add(f, CODES, name, ".weight", "I8", 2, rows, columns / 2);
        add(f, SCALES, name, ".scale", "F8_E8M0", 2, rows, columns / MXFP4_BLOCK);
    } else {
        add(f, CODES, name, ".weight", "U8", 2, rows, columns / 2);
        add(f, SCALES, name, ".weight_scale", "F8_E4M3", 2, rows, columns / NVFP4_BLOCK);
        add(f, GLOBAL_SCALE, name, ".weight_scale_2", "F32", 0, 0, 0);
        add(f, INPUT_SCALE, name, ".input_scale", "F32", 0, 0, 0);
    }
    for (size_t i = first; i < f->n; i++) {
        f->tensors[i].expert = expert;
        f->tensors[i].projection = projection;
    }
}

/* The tensors that hold a matrix of all experts. */
static void add_fused(file *f, megamoe_projection projection) {
    const megamoe_layer_desc *layer = &f->layer;
    const bool down = projection == MEGAMOE_DOWN;
    const int64_t rows = down ? layer->hidden : 2 * (int64_t)layer->intermediate;
    const int64_t blocks = (down ? layer->intermediate : layer->hidden) / MXFP4_BLOCK;
    const struct {
        content content;
        const char *part, *dtype;
        int32_t rank;
    } parts[] = {{FUSED_CODES, "_blocks", "U8", 4},
                 {FUSED_SCALES, "_scales", "U8", 3},
                 {FUSED_BIAS, "_bias", "BF16", 2}};
    char name[MODEL_NAME_BYTES];
    model_fused_name(layer->layer, projection, name);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        add(f, parts[i].content, name, parts[i].part, parts[i].dtype, parts[i].rank, layer->experts,
            rows);
        f->specs[f->n - 1].shape[2] = blocks;
        f->specs[f->n - 1].shape[3] = MXFP4_BLOCK / 2;
        f->tensors[f->n - 1].projection = projection;
    }
}

static void add_router(file *f) {
    const model *m = f->model;
    const megamoe_layer_desc *layer = &f->layer;
    char name[MODEL_NAME_BYTES];
    model_router_name(m, layer->layer, "", name);
    add(f, ROUTER_WEIGHT, name, "weight", "BF16", 2, layer->experts, layer->hidden);
    if (m->has_bias)
        add(f, ROUTER_LINEAR_BIAS, name, "bias", "BF16", 1, layer->experts, 0);
    const char *bias = model_selection_bias(m, layer->layer);
    if (bias != NULL)
        add(f, ROUTER_BIAS, name, bias, "F32", 1, layer->experts, 0);
    if (m->text_type != NULL)
        add(f, ROUTER_IMAGE_BIAS, name, "bias_vl", "F32", 1, layer->experts, 0);
    if (layer->layer < m->hash_layers)
        add(f, HASH_TABLE, name, "tid2eid", "I64", 2, m->vocabulary, layer->topk);
}

static void make_matrix(file *f, const tensor *t) {
    if (f->expert == t->expert && f->projection == t->projection)
        return;
    synth_matrix(f->weights, t->expert, t->projection, f->codes, f->scales);
    f->expert = t->expert;
    f->projection = t->projection;
}

/* Gives the n rows of a matrix every `turns`-th place of `out`, which begins with its first row. */
static void take_turns(const uint8_t *rows, size_t n, size_t bytes, size_t turns, uint8_t *out) {
    for (size_t row = 0; row < n; row++)
        memcpy(out + row * turns * bytes, rows + row * bytes, bytes);
}

static void make_fused_codes(file *f, const tensor *t, uint8_t *codes) {
    const megamoe_layer_desc *layer = &f->layer;
    const bool down = t->projection == MEGAMOE_DOWN;
    const size_t turns = down ? 1 : 2;
    const size_t rows = (size_t)(down ? layer->hidden : layer->intermediate);
    const size_t columns = (size_t)(down ? layer->intermediate : layer->hidden);
    const size_t codes_row = columns / 2, scales_row = columns / MXFP4_BLOCK;
    for (size_t expert = 0; expert < (size_t)layer->experts; expert++)
        for (size_t turn = 0; turn < turns; turn++) {
            const size_t row = expert * rows * turns + turn;
            synth_matrix(f->weights, (int32_t)expert, t->projection + (megamoe_projection)turn,
                         f->codes, f->scales);
            take_turns(f->codes, rows, codes_row, turns, codes + row * codes_row);
            take_turns(f->scales, rows, scales_row, turns, f->fused_scales + row * scales_row);
        }
}

static void make_fused_bias(file *f, const tensor *t, uint16_t *biases) {
    const megamoe_layer_desc *layer = &f->layer;
    const bool down = t->projection == MEGAMOE_DOWN;
    const size_t turns = down ? 1 : 2;
    const size_t rows = (size_t)(down ? layer->hidden : layer->intermediate);
    for (size_t expert = 0; expert < (size_t)layer->experts; expert++)
        for (size_t turn = 0; turn < turns; turn++)
            synth_matrix_bias(f->weights, (int32_t)expert, t->projection + (megamoe_projection)turn,
                              turns, biases + expert * rows * turns + turn);
}

static megamoe_status fill(void *user, size_t index, void *data, uint64_t bytes) {
    /* What calibration finds where activations reach about 20: amax / (6 * 448). */
    static const float input_scale = 0.0075f;
    file *f = user;
    const tensor *t = &f->tensors[index];
    f->bytes += bytes;
    switch (t->content) {
    case CODES:
        make_matrix(f, t);
        memcpy(data, f->codes, bytes);
        break;
    case SCALES:
        make_matrix(f, t);
        memcpy(data, f->scales, bytes);
        break;
    case GLOBAL_SCALE: {
        const float global = synth_global(f->weights, t->expert, t->projection);
        memcpy(data, &global, sizeof global);
        break;
    }
    case INPUT_SCALE:
        memcpy(data, &input_scale, sizeof input_scale);
        break;
    case FUSED_CODES:
        make_fused_codes(f, t, data);
        break;
    case FUSED_SCALES:
        memcpy(data, f->fused_scales, bytes);
        break;
    case FUSED_BIAS:
        make_fused_bias(f, t, data);
        break;
    case ROUTER_WEIGHT:
        synth_router_weight(f->weights, data);
        break;
    case ROUTER_BIAS:
        synth_router_bias(f->weights, 0, data);
        break;
    case ROUTER_LINEAR_BIAS:
        synth_router_linear_bias(f->weights, data);
        break;
    case ROUTER_IMAGE_BIAS:
        synth_router_bias(f->weights, 1, data);
        break;
    case HASH_TABLE:
        synth_hash_table(f->weights, f->model->vocabulary, data);
        break;
    }
    return MEGAMOE_OK;
}

static void file_close(file *f) {
    synth_close(f->weights);
    free(f->tensors);
    free(f->specs);
    free(f->codes);
    free(f->scales);
    free(f->fused_scales);
}

static bool file_open(const checkpoint *c, int32_t layer, file *f) {
    const size_t most = (size_t)c->experts_per_file * 3 * 4 + 4;
    *f = (file){.model = c->model, .layer = model_layer(c->model, layer, c->format), .expert = -1};
    f->weights = synth_open(&f->layer, (uint64_t)c->seed, c->threads);
    f->tensors = calloc(most, sizeof *f->tensors);
    f->specs = calloc(most, sizeof *f->specs);
    f->codes = malloc(synth_code_bytes(&f->layer));
    f->scales = malloc(synth_scale_bytes(&f->layer));
    const bool fused = model_is_fused(c->model);
    if (fused)
        f->fused_scales = malloc((size_t)f->layer.experts * 2 * synth_scale_bytes(&f->layer));
    return f->weights && f->tensors && f->specs && f->codes && f->scales &&
           (!fused || f->fused_scales);
}

/* Part `part` of a layer. Returns an exit code. */
static int write_file(checkpoint *c, int32_t layer, int32_t part) {
    file f;
    char name[64] = "model.safetensors";
    char *path = NULL;
    int code = EXIT_BAD_INPUT;
    const int32_t files = c->layers * c->files_per_layer;
    if (!file_open(c, layer, &f)) {
        report_error("out of memory");
        goto done;
    }
    if (part == 0)
        add_router(&f);
    if (model_is_fused(c->model)) {
        add_fused(&f, MEGAMOE_GATE);
        add_fused(&f, MEGAMOE_DOWN);
    }
    for (int32_t i = 0; i < c->experts_per_file && !model_is_fused(c->model); i++) {
        const int32_t expert = part * c->experts_per_file + i;
        for (megamoe_projection p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++)
            if (expert < f.layer.experts)
                add_matrix(&f, expert, p);
    }
    if (files > 1)
        snprintf(name, sizeof name, "model-%05" PRId32 "-of-%05" PRId32 ".safetensors",
                 (layer - c->first_layer) * c->files_per_layer + part + 1, files);
    if (asprintf(&path, "%s/%s", c->directory, name) < 0) {
        path = NULL;
        goto done;
    }
    progress bar;
    const megamoe_status status =
        megamoe_tensors_save(path, f.specs, f.n, fill, &f, progress_begin(&bar, name));
    progress_end(&bar);
    if (status != MEGAMOE_OK) {
        report_failure(status);
        goto done;
    }
    for (size_t i = 0; i < f.n; i++)
        json_object_set_new(c->weight_map, f.tensors[i].name, json_string(name));
    c->bytes += f.bytes;
    code = EXIT_DONE;
done:
    free(path);
    file_close(&f);
    return code;
}

/* Gives up the reference to `object`. */
static int write_json(const checkpoint *c, const char *name, json_t *object) {
    char *path = NULL;
    int code = EXIT_BAD_INPUT;
    if (object == NULL || asprintf(&path, "%s/%s", c->directory, name) < 0)
        report_error("out of memory");
    else if (json_dump_file(object, path, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) != 0)
        report_error("%s: cannot be written", path);
    else
        code = EXIT_DONE;
    json_decref(object);
    free(path);
    return code;
}

/* All layers in one file, which holds the config too. */
static int write_gguf(checkpoint *c) {
    char *path = NULL;
    if (asprintf(&path, "%s/model.gguf", c->directory) < 0)
        return report_error("out of memory");
    const int code = synth_write_gguf(c->model, c->format, (uint64_t)c->seed, c->threads,
                                      c->first_layer, c->layers, path, &c->bytes);
    free(path);
    return code;
}

static int write_checkpoint(checkpoint *c) {
    if (c->container == GGUF)
        return write_gguf(c);
    int code = EXIT_DONE;
    for (int32_t layer = 0; code == EXIT_DONE && layer < c->layers; layer++)
        for (int32_t part = 0; code == EXIT_DONE && part < c->files_per_layer; part++)
            code = write_file(c, c->first_layer + layer, part);
    if (code == EXIT_DONE && c->layers * c->files_per_layer > 1)
        code = write_json(c, "model.safetensors.index.json",
                          json_pack("{s:{s:I}, s:O}", "metadata", "total_size",
                                    (json_int_t)c->bytes, "weight_map", c->weight_map));
    if (code == EXIT_DONE)
        code = write_json(c, "config.json",
                          model_config(c->model, c->format, c->first_layer, c->layers));
    if (code == EXIT_DONE && c->format == MEGAMOE_FORMAT_NVFP4)
        code = write_json(c, "hf_quant_config.json",
                          model_quant_config(c->model, c->first_layer, c->layers));
    return code;
}

static void remove_directory(const char *path) {
    DIR *directory = opendir(path);
    if (directory == NULL)
        return;
    const struct dirent *entry;
    while ((entry = readdir(directory)) != NULL)
        unlinkat(dirfd(directory), entry->d_name, 0);
    closedir(directory);
    rmdir(path);
}

/* Whether `path` is free, or an empty directory, which a rename replaces. */
static bool may_replace(const char *path) {
    DIR *directory = opendir(path);
    if (directory == NULL)
        return errno == ENOENT;
    int entries = 0;
    while (readdir(directory) != NULL)
        entries++;
    closedir(directory);
    return entries <= 2; /* . and .. */
}

/* Writes beside `out` and renames, so that `out` is whole or not there. */
static int write_out(checkpoint *c, const char *out) {
    size_t length = strlen(out);
    while (length > 1 && out[length - 1] == '/')
        length--;
    char *temporary = NULL;
    if (asprintf(&temporary, "%.*s.tmp-XXXXXX", (int)length, out) < 0)
        return report_error("out of memory");
    int code = EXIT_BAD_INPUT;
    if (!may_replace(out)) {
        report_error("%s: exists and is no empty directory", out);
    } else if (mkdtemp(temporary) == NULL) {
        report_error("%s: cannot be made: %s", out, strerror(errno));
    } else {
        const mode_t mask = umask(0);
        umask(mask);
        c->directory = temporary;
        code = write_checkpoint(c);
        if (code == EXIT_DONE &&
            (chmod(temporary, 0777 & ~mask) != 0 || rename(temporary, out) != 0))
            code = report_error("%s: cannot be made: %s", out, strerror(errno));
        if (code != EXIT_DONE)
            remove_directory(temporary);
    }
    free(temporary);
    return code;
}

static int list_models(bool json) {
    json_t *list = json_array();
    if (!json)
        printf("%-20s %-7s %6s %6s %8s %6s %7s\n", "model", "format", "hidden", "inter", "experts",
               "top-k", "layers");
    const model *m;
    for (size_t i = 0; (m = model_at(i)) != NULL; i++) {
        const char *format = megamoe_format_name(m->published);
        const int32_t layers = m->layers - m->dense_layers;
        if (json)
            json_array_append_new(list, json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:i}", "model",
                                                  m->name, "format", format, "hidden", m->hidden,
                                                  "intermediate", m->intermediate, "experts",
                                                  m->experts, "topk", m->topk, "layers", layers));
        else
            printf("%-20s %-7s %6d %6d %8d %6d %7d\n", m->name, format, m->hidden, m->intermediate,
                   m->experts, m->topk, layers);
    }
    if (json)
        return report_json(json_pack("{s:o}", "models", list));
    json_decref(list);
    return EXIT_DONE;
}

static int report(const checkpoint *c, const char *out, bool json) {
    const model *m = c->model;
    const int32_t files = c->container == GGUF ? 1 : c->layers * c->files_per_layer;
    if (json)
        return report_json(
            json_pack("{s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:I, s:I}", "path", out,
                      "model", m->name, "format", megamoe_format_name(c->format), "first_layer",
                      c->first_layer, "layers", c->layers, "hidden", m->hidden, "intermediate",
                      m->intermediate, "experts", m->experts, "topk", m->topk, "files", files,
                      "bytes", (json_int_t)c->bytes, "seed", (json_int_t)c->seed));
    char size[REPORT_SIZE_BYTES];
    report_line("wrote", "%s: %" PRId32 " file%s, %s", out, files, files == 1 ? "" : "s",
                report_size(c->bytes, size));
    report_line("model", "%s, %s, hidden %d, intermediate %d, %d experts, top-%d", m->name,
                megamoe_format_name(c->format), m->hidden, m->intermediate, m->experts, m->topk);
    report_line("layers", "%" PRId32 "..%" PRId32, c->first_layer, c->first_layer + c->layers - 1);
    return EXIT_DONE;
}

int cmd_synth(int argc, char **argv) {
    const char *name = NULL, *out = NULL;
    int format = -1, container = SAFETENSORS;
    int64_t layers = 1, seed = 1, threads = parallel_cores();
    double scale = 1;
    bool list = false, json = false;
    const option_spec options[] = {
        {"model", OPTION_TEXT, &name, "NAME", "public model, one of --list", 0, 0},
        {"out", OPTION_TEXT, &out, "DIR", "the checkpoint's directory, new or empty", 0, 0},
        {"layers", OPTION_INTEGER, &layers, "N", "its first N expert layers (1)", 1, 1000},
        {"format", OPTION_CHOICE, &format, "mxfp4|nvfp4", "(as published)", 0, 0},
        {"container", OPTION_CHOICE, &container, "safetensors|gguf", "of the files (safetensors)",
         0, 0},
        {"scale", OPTION_NUMBER, &scale, "S", "multiplies hidden, intermediate and experts (1)",
         1e-6, 8},
        {"seed", OPTION_INTEGER, &seed, "N", "of the random weights (1)", 0, (double)INT64_MAX},
        {"threads", OPTION_INTEGER, &threads, "T", "(one per core)", 1, 64},
        {"list", OPTION_FLAG, &list, NULL, "list the models", 0, 0},
        OPTION_JSON(&json)};
    const command_syntax syntax = {
        "synth",
        "",
        "Writes a checkpoint of a public model's geometry with synthetic weights.",
        "megamoe synth --model deepseek-v4-flash --layers 1 --scale 0.25 --out flash",
        options,
        sizeof options / sizeof *options,
        0,
        0};
    const char *arguments[OPTION_MAX_ARGUMENTS];
    int code;
    if (!options_parse(&syntax, argc, argv, arguments, &code))
        return code;
    if (list)
        return list_models(json);
    if (name == NULL || out == NULL)
        return report_error("synth: --%s is missing", name == NULL ? "model" : "out");
    const model *full = model_find(name);
    if (full == NULL)
        return report_error("--model %s: unknown; megamoe synth --list shows the models", name);
    if (layers > full->layers - full->dense_layers)
        return report_error("--layers %" PRId64 ": %s has %d expert layers", layers, name,
                            full->layers - full->dense_layers);
    const model m = model_scaled(full, scale);
    checkpoint c = {.model = &m,
                    .container = container,
                    .format = format < 0 ? m.published : (megamoe_format)(format + 1),
                    .seed = seed,
                    .threads = (int32_t)threads,
                    .first_layer = m.dense_layers,
                    .layers = (int32_t)layers,
                    .weight_map = json_object()};
    if (c.container == SAFETENSORS && !model_has_format(&m, c.format)) {
        json_decref(c.weight_map);
        return report_error("--format %s: no checkpoint of %s names its tensors in that format; %s",
                            megamoe_format_name(c.format), name, megamoe_format_name(m.published));
    }
    const megamoe_layer_desc layer = model_layer(&m, m.dense_layers, c.format);
    const uint64_t expert_bytes = 3 * (synth_code_bytes(&layer) + synth_scale_bytes(&layer));
    const uint64_t fit = expert_bytes < largest_file ? largest_file / expert_bytes : 1;
    c.experts_per_file = fit < (uint64_t)m.experts ? (int32_t)fit : m.experts;
    if (model_is_fused(&m) || c.container == GGUF)
        c.experts_per_file = m.experts;
    c.files_per_layer = (m.experts + c.experts_per_file - 1) / c.experts_per_file;
    code = write_out(&c, out);
    json_decref(c.weight_map);
    return code == EXIT_DONE ? report(&c, out, json) : code;
}
