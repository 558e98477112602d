/* SPDX-License-Identifier: Apache-2.0 */
#include "rank.h"

#include <stdlib.h>

#include "monotonic.h"

/* Long enough for the scalar kernels on a shared core; on a GPU for ranks that take turns. */
enum { DEADLINE_MS = 600000, GPU_DEADLINE_MS = 60000 };

int64_t rank_part_begin(int64_t n, int32_t parts, int32_t r) {
    const int64_t longer = n % parts;
    return n / parts * r + (r < longer ? r : longer);
}

static megamoe_view rows(void *data, megamoe_dtype dtype, int64_t columns, int64_t begin,
                         int64_t end) {
    const int64_t element = dtype == MEGAMOE_DTYPE_BF16 ? 2 : dtype == MEGAMOE_DTYPE_I64 ? 8 : 4;
    return (megamoe_view){(char *)data + begin * columns * element, dtype, end - begin, 0};
}

void rank_take_part(rank *r, const rank_memory *memory) {
    const inputs *in = r->inputs;
    const int32_t index = megamoe_comm_rank(r->comm), ranks = r->options->ranks;
    const int64_t hidden = r->source->layer.hidden;
    const int64_t begin = rank_part_begin(in->tokens, ranks, index);
    const int64_t end = rank_part_begin(in->tokens, ranks, index + 1);
    r->tokens = end - begin;
    r->x = rows(memory->x, MEGAMOE_DTYPE_BF16, hidden, begin, end);
    r->topk_ids = rows(memory->topk_ids, in->topk_ids_dtype, in->topk, begin, end);
    r->topk_weights = rows(memory->topk_weights, MEGAMOE_DTYPE_F32, in->topk, begin, end);
    r->y = rows(memory->y, MEGAMOE_DTYPE_BF16, hidden, begin, end);
}

megamoe_status rank_create(rank *r, int64_t pool_rows) {
    const megamoe_layer_desc *desc = &r->source->layer;
    megamoe_layer_options options = MEGAMOE_INIT(megamoe_layer_options);
    options.nvfp4 = r->options->nvfp4;
    options.accumulate = r->options->accumulate;
    megamoe_shape shape = MEGAMOE_INIT(megamoe_shape);
    shape.hidden = desc->hidden;
    shape.intermediate = desc->intermediate;
    shape.experts = desc->experts;
    shape.topk = r->inputs->topk;
    shape.input_scale = r->options->input_scale;
    shape.activations = r->options->activations;
    megamoe_capacity capacity = MEGAMOE_INIT(megamoe_capacity);
    const int64_t longest = rank_part_begin(r->inputs->tokens, r->options->ranks, 1);
    capacity.tokens = longest > 0 ? longest : 1;
    capacity.pool_rows = pool_rows;
    capacity.deadline_ms = ranks_on_gpu(r->options->device) ? GPU_DEADLINE_MS : DEADLINE_MS;
    const double start = monotonic_ms();
    megamoe_status status =
        megamoe_layer_create(r->comm, r->device, r->source->weights, &options, &r->layer);
    r->create_ms = monotonic_ms() - start;
    if (status == MEGAMOE_OK)
        status = megamoe_workspace_create(r->comm, r->device, &shape, &capacity, &r->workspace);
    return status;
}

megamoe_status rank_stage(rank *r, void *stream) {
    return megamoe_stage(r->workspace, &r->x, &r->topk_ids, &r->topk_weights, r->tokens, stream);
}

megamoe_status rank_forward(rank *r) {
    const double start = monotonic_ms();
    megamoe_status status = rank_stage(r, NULL);
    if (status == MEGAMOE_OK)
        status = megamoe_forward(r->layer, r->workspace, &r->y, NULL);
    /* What a forward finds while it computes is pending until somebody asks. */
    if (status == MEGAMOE_OK)
        status = megamoe_workspace_status(r->workspace, NULL);
    r->forward_ms = monotonic_ms() - start;
    return status;
}

megamoe_status rank_count_received(rank *r) {
    const int32_t index = megamoe_comm_rank(r->comm), ranks = r->options->ranks;
    const int32_t experts = r->source->layer.experts;
    const int32_t n = (int32_t)(rank_part_begin(experts, ranks, index + 1) -
                                rank_part_begin(experts, ranks, index));
    int64_t *counts = calloc((size_t)n + 1, sizeof *counts);
    if (counts == NULL)
        return MEGAMOE_ENOMEM;
    const megamoe_status status = megamoe_workspace_receive_counts(r->workspace, counts, n);
    r->expert_min = INT64_MAX; /* also where a rank has no experts */
    for (int32_t i = 0; i < n; i++) {
        r->routes += counts[i];
        r->expert_min = counts[i] < r->expert_min ? counts[i] : r->expert_min;
        r->expert_max = counts[i] > r->expert_max ? counts[i] : r->expert_max;
    }
    free(counts);
    return status;
}
