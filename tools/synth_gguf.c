/* SPDX-License-Identifier: Apache-2.0 */
#include "synth_gguf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gguf.h"
#include "progress.h"
#include "report.h"
#include "synth.h"

typedef enum content {
    WEIGHT,
    SCALE,
    INPUT_SCALE,
    BIAS,
    ROUTER_WEIGHT,
    ROUTER_BIAS,
    ROUTER_LINEAR_BIAS,
    HASH_TABLE
} content;

/* Beside the tensor of the file with the same index. */
typedef struct tensor {
    content content;
    int32_t layer;
    megamoe_projection projection;
} tensor;

enum { TENSORS_PER_LAYER = 3 * 4 + 3 };

/* A file in the making. */
typedef struct file {
    const model *model;
    megamoe_format format;
    uint64_t seed;
    int32_t threads;
    tensor *tensors;
    gguf_tensor *specs;
    size_t n;
    /* Of the layer that is being written. */
    megamoe_layer_desc layer;
    synth *weights;
    uint8_t *codes, *scales;
} file;

static gguf_tensor *add(file *f, content what, int32_t layer, gguf_type type, const char *name,
                        int64_t rows, int64_t columns) {
    f->tensors[f->n] = (tensor){.content = what, .layer = layer};
    gguf_tensor *spec = &f->specs[f->n++];
    *spec = (gguf_tensor){.type = type, .rank = columns ? 2 : 1, .shape = {rows, columns}};
    snprintf(spec->name, sizeof spec->name, "blk.%d.%s", layer, name);
    return spec;
}

static void add_matrices(file *f, int32_t layer, megamoe_projection projection) {
    static const char *const stems[] = {"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"};
    const model *m = f->model;
    const bool down = projection == MEGAMOE_DOWN, nvfp4 = f->format == MEGAMOE_FORMAT_NVFP4;
    const int64_t rows = down ? m->hidden : m->intermediate;
    const int64_t columns = down ? m->intermediate : m->hidden;
    const size_t first = f->n;
    char name[GGUF_NAME_BYTES / 2];
    snprintf(name, sizeof name, "%s.weight", stems[projection]);
    gguf_tensor *weight =
        add(f, WEIGHT, layer, nvfp4 ? GGUF_NVFP4 : GGUF_MXFP4, name, m->experts, rows);
    weight->rank = 3;
    weight->shape[2] = columns;
    if (nvfp4) {
        snprintf(name, sizeof name, "%s.scale", stems[projection]);
        add(f, SCALE, layer, GGUF_F32, name, m->experts, 0);
        snprintf(name, sizeof name, "%s.input_scale", stems[projection]);
        add(f, INPUT_SCALE, layer, GGUF_F32, name, m->experts, 0);
    }
    if (m->has_bias) {
        snprintf(name, sizeof name, "%s.bias", stems[projection]);
        add(f, BIAS, layer, GGUF_F32, name, m->experts, rows);
    }
    for (size_t i = first; i < f->n; i++)
        f->tensors[i].projection = projection;
}

static void add_layer(file *f, int32_t layer) {
    const model *m = f->model;
    add(f, ROUTER_WEIGHT, layer, GGUF_F32, "ffn_gate_inp.weight", m->experts, m->hidden);
    if (m->has_bias)
        add(f, ROUTER_LINEAR_BIAS, layer, GGUF_F32, "ffn_gate_inp.bias", m->experts, 0);
    if (model_selection_bias(m, layer) != NULL)
        add(f, ROUTER_BIAS, layer, GGUF_F32, "exp_probs_b.bias", m->experts, 0);
    if (layer < m->hash_layers)
        add(f, HASH_TABLE, layer, GGUF_I32, "ffn_gate_tid2eid.weight", m->vocabulary, m->topk);
    for (megamoe_projection p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++)
        add_matrices(f, layer, p);
}

static void layer_close(file *f) {
    synth_close(f->weights);
    free(f->codes);
    free(f->scales);
    f->weights = NULL;
    f->codes = NULL;
    f->scales = NULL;
}

static bool layer_open(file *f, int32_t layer) {
    if (f->weights != NULL && f->layer.layer == layer)
        return true;
    layer_close(f);
    f->layer = model_layer(f->model, layer, f->format);
    f->weights = synth_open(&f->layer, f->seed, f->threads);
    f->codes = malloc(synth_code_bytes(&f->layer));
    f->scales = malloc(synth_scale_bytes(&f->layer));
    return f->weights && f->codes && f->scales;
}

/* ---- Contents ---- */

static void fill_weight(file *f, const gguf_tensor *spec, megamoe_projection projection,
                        uint8_t *data) {
    const size_t values = synth_code_bytes(&f->layer) * 2;
    const size_t bytes = gguf_tensor_bytes(spec) / (size_t)f->layer.experts;
    for (int32_t expert = 0; expert < f->layer.experts; expert++) {
        synth_matrix(f->weights, expert, projection, f->codes, f->scales);
        gguf_pack(spec->type, f->codes, f->scales, values, data + (size_t)expert * bytes);
    }
}

static void widen(const uint16_t *bf16, size_t n, float *values) {
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = (uint32_t)bf16[i] << 16;
        memcpy(&values[i], &bits, sizeof bits);
    }
}

/* The tensors that are made in another type: BF16, or I64 for a hash table. */
static bool fill_widened(file *f, const tensor *t, size_t n, void *data) {
    void *made = calloc(n, t->content == HASH_TABLE ? sizeof(int64_t) : sizeof(uint16_t));
    if (made == NULL)
        return false;
    const size_t experts = (size_t)f->layer.experts;
    if (t->content == HASH_TABLE) {
        const int64_t *table = made;
        int32_t *narrow = data;
        synth_hash_table(f->weights, f->model->vocabulary, made);
        for (size_t i = 0; i < n; i++)
            narrow[i] = (int32_t)table[i];
    } else {
        if (t->content == ROUTER_WEIGHT)
            synth_router_weight(f->weights, made);
        else if (t->content == ROUTER_LINEAR_BIAS)
            synth_router_linear_bias(f->weights, made);
        else
            for (size_t expert = 0; expert < experts; expert++)
                synth_matrix_bias(f->weights, (int32_t)expert, t->projection, 1,
                                  (uint16_t *)made + expert * (n / experts));
        widen(made, n, data);
    }
    free(made);
    return true;
}

static bool fill(void *user, size_t index, void *data) {
    static const float input_scale = 0.0075f; /* as in other files */
    file *f = user;
    const tensor *t = &f->tensors[index];
    const gguf_tensor *spec = &f->specs[index];
    bool made = layer_open(f, t->layer);
    float *values = data;
    const int32_t experts = f->layer.experts;
    switch (t->content) {
    case WEIGHT:
        if (made)
            fill_weight(f, spec, t->projection, data);
        break;
    case SCALE:
        for (int32_t expert = 0; made && expert < experts; expert++)
            values[expert] = synth_global(f->weights, expert, t->projection);
        break;
    case INPUT_SCALE:
        for (int32_t expert = 0; expert < experts; expert++)
            values[expert] = input_scale;
        break;
    case ROUTER_BIAS:
        if (made)
            synth_router_bias(f->weights, 0, values);
        break;
    case BIAS:
    case ROUTER_WEIGHT:
    case ROUTER_LINEAR_BIAS:
    case HASH_TABLE:
        made = made && fill_widened(f, t, gguf_tensor_bytes(spec) / 4, data);
        break;
    }
    if (!made)
        report_error("out of memory");
    return made;
}

/* ---- File ---- */

static void add_keys(const file *f, gguf_writer *writer) {
    const model *m = f->model;
    const char *architecture = model_gguf_architecture(m);
    char key[96];
#define KEY(name) (snprintf(key, sizeof key, "%s.%s", architecture, name), key)
    gguf_add_string(writer, "general.architecture", architecture);
    gguf_add_string(writer, "general.type", "model");
    gguf_add_string(writer, "general.name", m->name);
    gguf_add_u32(writer, KEY("block_count"), (uint32_t)m->layers);
    gguf_add_u32(writer, KEY("leading_dense_block_count"), (uint32_t)m->dense_layers);
    gguf_add_u32(writer, KEY("embedding_length"), (uint32_t)m->hidden);
    gguf_add_u32(writer, KEY("vocab_size"), (uint32_t)m->vocabulary);
    gguf_add_u32(writer, KEY("expert_count"), (uint32_t)m->experts);
    gguf_add_u32(writer, KEY("expert_used_count"), (uint32_t)m->topk);
    gguf_add_u32(writer, KEY("expert_feed_forward_length"), (uint32_t)m->intermediate);
    if (m->rule == MEGAMOE_ROUTER_SIGMOID || m->rule == MEGAMOE_ROUTER_SQRT_SOFTPLUS) {
        gguf_add_u32(writer, KEY("expert_gating_func"), m->rule == MEGAMOE_ROUTER_SIGMOID ? 2 : 4);
        gguf_add_f32(writer, KEY("expert_weights_scale"), m->scaling);
        gguf_add_bool(writer, KEY("expert_weights_norm"), true);
    }
    if (m->groups > 0) {
        gguf_add_u32(writer, KEY("expert_group_count"), (uint32_t)m->groups);
        gguf_add_u32(writer, KEY("expert_group_used_count"), (uint32_t)m->groups_kept);
    }
    if (m->naming == NAMES_DEEPSEEK_V4) {
        gguf_add_u32(writer, KEY("hash_layer_count"), (uint32_t)m->hash_layers);
        gguf_add_f32s(writer, KEY("swiglu_clamp_exp"), m->limit, (uint64_t)m->layers);
    }
#undef KEY
    gguf_add_u32(writer, "general.quantization_version", 2);
}

int synth_write_gguf(const model *m, megamoe_format format, uint64_t seed, int32_t threads,
                     int32_t first_layer, int32_t layers, const char *path, uint64_t *bytes) {
    file f = {.model = m, .format = format, .seed = seed, .threads = threads};
    const size_t most = (size_t)layers * TENSORS_PER_LAYER;
    f.tensors = calloc(most, sizeof *f.tensors);
    f.specs = calloc(most, sizeof *f.specs);
    gguf_writer *writer = gguf_open();
    int code = EXIT_BAD_INPUT;
    *bytes = 0;
    if (f.tensors == NULL || f.specs == NULL || writer == NULL) {
        report_error("out of memory");
    } else {
        for (int32_t layer = first_layer; layer < first_layer + layers; layer++)
            add_layer(&f, layer);
        for (size_t i = 0; i < f.n; i++)
            *bytes += gguf_tensor_bytes(&f.specs[i]);
        add_keys(&f, writer);
        progress bar;
        if (gguf_save(writer, path, f.specs, f.n, fill, &f, progress_begin(&bar, "model.gguf")))
            code = EXIT_DONE;
        progress_end(&bar);
    }
    layer_close(&f);
    gguf_close(writer);
    free(f.tensors);
    free(f.specs);
    return code;
}
