/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_layer.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "progress.h"
#include "quantize.h"
#include "random.h"
#include "report.h"
#include "synth.h"

static int32_t block_of(megamoe_format format) {
    return format == MEGAMOE_FORMAT_MXFP4 ? MXFP4_BLOCK : NVFP4_BLOCK;
}

/* Bits that a packed weight may take, with its share of the block scale. */
static double weight_bits(megamoe_format format, megamoe_nvfp4_mode mode) {
    if (format == MEGAMOE_FORMAT_NVFP4 && mode == MEGAMOE_NVFP4_FOLDED)
        return 8;
    return 4 + 8.0 / block_of(format);
}

/* Takes the layer's description and cuts it to what is wanted and fits. */
static int set_size(const bench_target *target, const megamoe_layer_desc *desc, bench_layer *b) {
    const uint64_t weights = 3 * (uint64_t)desc->hidden * (uint64_t)desc->intermediate;
    b->desc = *desc;
    b->all_experts = desc->experts;
    b->stored_bytes = weights / 2 + weights / (uint64_t)block_of(desc->format);
    if (target->experts > 0)
        b->desc.experts = target->experts;
    if (b->desc.experts > b->all_experts)
        b->all_experts = b->desc.experts;
    if (b->desc.experts < desc->topk)
        return report_error("bench: %d experts; top-%d needs as many", b->desc.experts, desc->topk);
    const uint64_t expert_bytes =
        (uint64_t)((double)weights * weight_bits(desc->format, target->nvfp4) / 8);
    b->expert_bytes = expert_bytes;
    b->nvfp4 = target->nvfp4;
    const uint64_t fit = target->memory / expert_bytes;
    if (fit < (uint64_t)b->desc.experts)
        b->desc.experts = (int32_t)fit;
    if (b->desc.experts < desc->topk) {
        char size[REPORT_SIZE_BYTES];
        return report_error("bench: --memory must hold %d experts, %s", desc->topk,
                            report_size((uint64_t)desc->topk * expert_bytes, size));
    }
    return EXIT_DONE;
}

static int create(const bench_target *target, const megamoe_weights *weights, bench_layer *b) {
    progress bar;
    megamoe_layer_options options = MEGAMOE_INIT(megamoe_layer_options);
    options.nvfp4 = target->nvfp4;
    options.accumulate = target->accumulate;
    options.map_prepared = target->mapped;
    options.progress = progress_begin(&bar, "layer");
    const megamoe_status status =
        megamoe_layer_create(target->comm, target->device, weights, &options, &b->layer);
    progress_end(&bar);
    if (status != MEGAMOE_OK)
        return report_failure(status);
    const int32_t ranks = megamoe_comm_size(target->comm), rank = megamoe_comm_rank(target->comm);
    const int32_t local = b->desc.experts / ranks + (rank < b->desc.experts % ranks);
    if (local > 0)
        b->expert_bytes = megamoe_layer_bytes(b->layer) / (uint64_t)local;
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

/* One matrix in checkpoint form, its codes and scales at `memory`. */
static megamoe_matrix make_matrix(synth *s, const megamoe_layer_desc *desc, int32_t expert,
                                  megamoe_projection projection, uint8_t *memory, float *bias) {
    const bool down = projection == MEGAMOE_DOWN;
    const size_t columns = (size_t)(down ? desc->intermediate : desc->hidden);
    const size_t rows = (size_t)(down ? desc->hidden : desc->intermediate);
    uint8_t *scales = memory + synth_code_bytes(desc);
    synth_matrix(s, expert, projection, memory, scales);
    megamoe_matrix matrix = {.codes = memory,
                             .codes_stride = columns / 2,
                             .scales = scales,
                             .scales_stride = columns / (size_t)block_of(desc->format),
                             .global_scale = synth_global(s, expert, projection)};
    if (desc->has_bias) {
        random_normals(random_key((uint64_t)expert, projection), rows, bias);
        matrix.bias = bias;
        matrix.bias_dtype = MEGAMOE_DTYPE_F32;
        matrix.bias_stride = sizeof *bias;
    }
    return matrix;
}

int bench_layer_synthetic(const bench_target *target, const char *name,
                          const megamoe_layer_desc *desc, bench_layer *b) {
    *b = (bench_layer){0};
    snprintf(b->name, sizeof b->name, "%s, synthetic", name);
    int code = set_size(target, desc, b);
    if (code != EXIT_DONE || target->describe)
        return code;
    const size_t matrix_bytes = synth_code_bytes(&b->desc) + synth_scale_bytes(&b->desc);
    const size_t longest =
        (size_t)(desc->hidden > desc->intermediate ? desc->hidden : desc->intermediate);
    const size_t n = (size_t)b->desc.experts * 3;
    size_t distinct = n;
    if (target->distinct > 0 && target->distinct < b->desc.experts)
        distinct = (size_t)target->distinct * 3;
    synth *s = synth_open(&b->desc, target->seed, target->threads);
    uint8_t *memory = malloc(distinct * matrix_bytes);
    float *biases = malloc(distinct * longest * sizeof *biases);
    megamoe_matrix *matrices = calloc(n, sizeof *matrices);
    if (s == NULL || memory == NULL || biases == NULL || matrices == NULL) {
        code = report_error("out of memory for %d experts; see --memory", b->desc.experts);
        goto done;
    }
    progress bar;
    const megamoe_progress shown = progress_begin(&bar, "weights");
    for (size_t i = 0; i < distinct; i++) {
        matrices[i] = make_matrix(s, &b->desc, (int32_t)(i / 3), (megamoe_projection)(i % 3),
                                  memory + i * matrix_bytes, biases + i * longest);
        if (shown.fn != NULL)
            shown.fn(shown.user, i, distinct);
    }
    progress_end(&bar);
    for (size_t i = distinct; i < n; i++)
        matrices[i] = matrices[i - distinct];
    code = create_from_matrices(target, matrices, b);
done:
    synth_close(s);
    free(memory);
    free(biases);
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

static int open_path(const bench_target *target, source *s, int64_t layer_index, bench_layer *b) {
    TRY(source_open(s->path, s));
    TRY(source_open_layer(s, layer_index));
    if (target->experts > s->layer.experts)
        return report_error("--experts %" PRId32 ": layer %" PRId32 " of %s has %" PRId32,
                            target->experts, s->layer.layer, s->path, s->layer.experts);
    bench_target limits = *target;
    if (s->prepared) /* packed as it is, all or nothing */
        limits.memory = UINT64_MAX;
    snprintf(b->name, sizeof b->name, "layer %" PRId32 " of %s", s->layer.layer, s->path);
    TRY(set_size(&limits, &s->layer, b));
    if (s->prepared)
        b->nvfp4 = megamoe_weights_nvfp4(s->weights);
    if (target->describe)
        return EXIT_DONE;
    return b->desc.experts == b->all_experts ? create(target, s->weights, b)
                                             : create_share(target, s, b);
}

int bench_layer_from_path(const bench_target *target, const char *path, int64_t layer_index,
                          bench_layer *b) {
    *b = (bench_layer){0};
    source s = {.path = path};
    const int code = open_path(target, &s, layer_index, b);
    source_close(&s);
    return code;
}
