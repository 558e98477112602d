/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_layer.h"

#include <stdio.h>
#include <stdlib.h>

#include "progress.h"
#include "quantize.h"
#include "report.h"
#include "synth.h"

/* Bits of a weight with its share of the block scale. */
static double weight_bits(megamoe_format format, megamoe_nvfp4_mode mode) {
    if (format == MEGAMOE_FORMAT_MXFP4)
        return 4 + 8.0 / MXFP4_BLOCK;
    return mode == MEGAMOE_NVFP4_FOLDED ? 8 : 4 + 8.0 / NVFP4_BLOCK;
}

/* Takes the layer's description and cuts it to what fits. */
static int set_size(const bench_target *target, const megamoe_layer_desc *desc, bench_layer *b) {
    b->desc = *desc;
    b->all_experts = desc->experts;
    const uint64_t expert_bytes = (uint64_t)(3.0 * desc->hidden * desc->intermediate *
                                             weight_bits(desc->format, target->nvfp4) / 8);
    const uint64_t fit = target->memory / expert_bytes;
    if (fit < (uint64_t)desc->experts)
        b->desc.experts = (int32_t)fit;
    if (b->desc.experts < desc->topk) {
        char size[REPORT_SIZE_BYTES];
        return report_error("bench: --memory must hold %d experts, %s", desc->topk,
                            report_size((uint64_t)desc->topk * expert_bytes, size));
    }
    return EXIT_DONE;
}

static int create(const bench_target *target, const megamoe_weights *weights, bench_layer *b) {
    megamoe_layer_options options = MEGAMOE_INIT(megamoe_layer_options);
    options.nvfp4 = target->nvfp4;
    options.copy_prepared = !target->mapped;
    const megamoe_status status =
        megamoe_layer_create(target->comm, target->device, weights, &options, &b->layer);
    if (status != MEGAMOE_OK)
        return report_failure(status);
    b->expert_bytes = megamoe_layer_bytes(b->layer) / (uint64_t)b->desc.experts;
    return EXIT_DONE;
}

static int create_from_matrices(const bench_target *target, const megamoe_matrix *matrices,
                                bench_layer *b) {
    megamoe_weights *weights = NULL;
    const megamoe_status status = megamoe_weights_from_tensors(&b->desc, matrices, &weights);
    const int code = status == MEGAMOE_OK ? create(target, weights, b) : report_failure(status);
    megamoe_weights_close(weights);
    return code;
}

int bench_layer_synthetic(const bench_target *target, const model *m, megamoe_format format,
                          bench_layer *b) {
    *b = (bench_layer){0};
    snprintf(b->name, sizeof b->name, "%s, synthetic", m->name);
    const megamoe_layer_desc desc = model_layer(m, m->dense_layers, format);
    int code = set_size(target, &desc, b);
    if (code != EXIT_DONE)
        return code;
    const size_t codes = synth_code_bytes(&b->desc), scales = synth_scale_bytes(&b->desc);
    const size_t n = (size_t)b->desc.experts * 3;
    synth *s = synth_open(&b->desc, target->seed, target->threads);
    uint8_t *memory = malloc(n * (codes + scales));
    megamoe_matrix *matrices = calloc(n, sizeof *matrices);
    if (s == NULL || memory == NULL || matrices == NULL) {
        code = report_error("out of memory for %d experts; see --memory", b->desc.experts);
        goto done;
    }
    progress bar;
    const megamoe_progress shown = progress_begin(&bar, "weights");
    for (size_t i = 0; i < n; i++) {
        const int32_t expert = (int32_t)(i / 3);
        const megamoe_projection projection = (megamoe_projection)(i % 3);
        const size_t columns =
            (size_t)(projection == MEGAMOE_DOWN ? b->desc.intermediate : b->desc.hidden);
        uint8_t *at = memory + i * (codes + scales);
        synth_matrix(s, expert, projection, at, at + codes);
        matrices[i] = (megamoe_matrix){
            .codes = at,
            .codes_stride = columns / 2,
            .scales = at + codes,
            .scales_stride = columns / (format == MEGAMOE_FORMAT_MXFP4 ? MXFP4_BLOCK : NVFP4_BLOCK),
            .global_scale = synth_global(s, expert, projection)};
        if (shown.fn != NULL)
            shown.fn(shown.user, i, n);
    }
    progress_end(&bar);
    code = create_from_matrices(target, matrices, b);
done:
    synth_close(s);
    free(memory);
    free(matrices);
    return code;
}

/* The first experts of a layer that is too large. */
static int create_share(const bench_target *target, const source *s, bench_layer *b) {
    const size_t n = (size_t)b->desc.experts * 3;
    megamoe_matrix *matrices = calloc(n, sizeof *matrices);
    if (matrices == NULL)
        return report_error("out of memory");
    megamoe_status status = MEGAMOE_OK;
    for (size_t i = 0; status == MEGAMOE_OK && i < n; i++)
        status = megamoe_weights_matrix(s->weights, (int32_t)(i / 3), (megamoe_projection)(i % 3),
                                        &matrices[i]);
    const int code =
        status == MEGAMOE_OK ? create_from_matrices(target, matrices, b) : report_failure(status);
    free(matrices);
    return code;
}

int bench_layer_from_path(const bench_target *target, const char *path, int64_t layer_index,
                          bench_layer *b) {
    *b = (bench_layer){0};
    source s;
    int code = source_open(path, &s);
    if (code == EXIT_DONE)
        code = source_open_layer(&s, layer_index);
    if (code == EXIT_DONE) {
        bench_target limits = *target;
        if (s.prepared) /* mapped: it takes no memory of its own */
            limits.memory = UINT64_MAX;
        snprintf(b->name, sizeof b->name, "layer %d of %s", s.layer.layer, path);
        code = set_size(&limits, &s.layer, b);
    }
    if (code == EXIT_DONE)
        code = b->desc.experts == b->all_experts ? create(target, s.weights, b)
                                                 : create_share(target, &s, b);
    source_close(&s);
    return code;
}
