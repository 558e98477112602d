/* SPDX-License-Identifier: Apache-2.0 */
#include "inputs.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"
#include "synth.h"
#include "tensor_field.h"

enum { MAX_TOPK = 64 };

static int check_rows(const char *path, const tensor_field *f, int64_t tokens) {
    if (f->shape[0] == tokens)
        return EXIT_DONE;
    return report_error("%s: %s: %" PRId64 " rows; hidden_states has %" PRId64, path, f->name,
                        f->shape[0], tokens);
}

static int64_t hash_vocabulary(const source *s) {
    megamoe_router_desc router = MEGAMOE_INIT(megamoe_router_desc);
    if (s->router == NULL || megamoe_router_describe(s->router, &router) != MEGAMOE_OK)
        return 0;
    return router.hash_vocab;
}

enum { HIDDEN_STATES, TOPK_IDS, TOPK_WEIGHTS, INPUT_IDS, FIELDS };

static int check_fields(const char *path, const tensor_field fields[FIELDS], const source *s) {
    const tensor_field *x = &fields[HIDDEN_STATES], *ids = &fields[TOPK_IDS];
    const tensor_field *weights = &fields[TOPK_WEIGHTS], *input_ids = &fields[INPUT_IDS];
    if (x->data == NULL)
        return report_error("%s: hidden_states: missing", path);
    if (x->shape[1] != s->layer.hidden)
        return report_error("%s: hidden_states: %" PRId64 " columns; the layer's hidden size is %d",
                            path, x->shape[1], s->layer.hidden);
    if ((ids->data == NULL) != (weights->data == NULL))
        return report_error("%s: %s: missing, though %s is there", path,
                            ids->data == NULL ? ids->name : weights->name,
                            ids->data == NULL ? weights->name : ids->name);
    if (ids->data != NULL) {
        TRY(check_rows(path, ids, x->shape[0]));
        TRY(check_rows(path, weights, x->shape[0]));
        if (ids->shape[1] < 1 || ids->shape[1] > MAX_TOPK)
            return report_error("%s: topk_ids: %" PRId64 " columns; expected 1..%d", path,
                                ids->shape[1], MAX_TOPK);
        if (weights->shape[1] != ids->shape[1])
            return report_error("%s: topk_weights: %" PRId64 " columns; topk_ids has %" PRId64,
                                path, weights->shape[1], ids->shape[1]);
        TRY(tensor_field_check_ids(path, ids, -1, s->layer.experts));
        return EXIT_DONE;
    }
    const int64_t vocabulary = hash_vocabulary(s);
    if (vocabulary == 0)
        return EXIT_DONE;
    if (input_ids->data == NULL)
        return report_error("%s: input_ids: missing; layer %d routes by token id", path,
                            s->layer.layer);
    TRY(check_rows(path, input_ids, x->shape[0]));
    return tensor_field_check_ids(path, input_ids, 0, vocabulary);
}

int inputs_read(const char *path, const source *s, inputs *in) {
    *in = (inputs){0};
    tensor_field fields[FIELDS] = {
        [HIDDEN_STATES] = {"hidden_states", 2, {MEGAMOE_DTYPE_BF16}, 0, {0}, NULL},
        [TOPK_IDS] = {"topk_ids", 2, {MEGAMOE_DTYPE_I32, MEGAMOE_DTYPE_I64}, 0, {0}, NULL},
        [TOPK_WEIGHTS] = {"topk_weights", 2, {MEGAMOE_DTYPE_F32}, 0, {0}, NULL},
        [INPUT_IDS] = {"input_ids", 1, {MEGAMOE_DTYPE_I32, MEGAMOE_DTYPE_I64}, 0, {0}, NULL},
    };
    megamoe_checkpoint *file = NULL;
    const megamoe_status status = megamoe_tensors_open(path, &file);
    if (status != MEGAMOE_OK)
        return report_failure(status);
    int code = EXIT_DONE;
    for (int i = 0; code == EXIT_DONE && i < FIELDS; i++)
        code = tensor_field_read(path, file, &fields[i]);
    megamoe_checkpoint_close(file);
    *in = (inputs){.tokens = fields[HIDDEN_STATES].shape[0],
                   .topk = (int32_t)fields[TOPK_IDS].shape[1],
                   .x = fields[HIDDEN_STATES].data,
                   .topk_ids = fields[TOPK_IDS].data,
                   .topk_weights = fields[TOPK_WEIGHTS].data,
                   .input_ids = fields[INPUT_IDS].data,
                   .topk_ids_dtype = fields[TOPK_IDS].dtype,
                   .input_ids_dtype = fields[INPUT_IDS].dtype};
    return code == EXIT_DONE ? check_fields(path, fields, s) : code;
}

int inputs_draw(int64_t tokens, uint64_t seed, const source *s, inputs *in) {
    const size_t n = (size_t)tokens, hidden = (size_t)s->layer.hidden;
    *in = (inputs){.tokens = tokens, .input_ids_dtype = MEGAMOE_DTYPE_I64};
    in->x = malloc(n * hidden * sizeof(uint16_t) + 1);
    const int64_t vocabulary = hash_vocabulary(s);
    if (vocabulary > 0)
        in->input_ids = malloc(n * sizeof(int64_t) + 1);
    if (in->x == NULL || (vocabulary > 0 && in->input_ids == NULL) ||
        !synth_input(seed, tokens, s->layer.hidden, in->x))
        return report_error("out of memory for %" PRId64 " tokens", tokens);
    if (vocabulary > 0)
        synth_input_ids(seed, tokens, vocabulary, in->input_ids);
    return EXIT_DONE;
}

int inputs_route(const source *s, int32_t threads, inputs *in) {
    if (in->topk_ids != NULL)
        return EXIT_DONE;
    if (s->router == NULL)
        return report_error("%s: holds no router for layer %d; give topk_ids and topk_weights with "
                            "--input",
                            s->path, s->layer.layer);
    in->topk = s->layer.topk;
    in->topk_ids_dtype = MEGAMOE_DTYPE_I32;
    const size_t slots = (size_t)in->tokens * (size_t)in->topk;
    in->topk_ids = malloc(slots * sizeof(int32_t) + 1);
    in->topk_weights = malloc(slots * sizeof(float) + 1);
    if (in->topk_ids == NULL || in->topk_weights == NULL)
        return report_error("out of memory for %" PRId64 " tokens", in->tokens);
    megamoe_device_options options = MEGAMOE_INIT(megamoe_device_options);
    options.threads = threads;
    megamoe_device *device = NULL;
    megamoe_status status = megamoe_device_open("cpu", &options, &device);
    const megamoe_view x = {in->x, MEGAMOE_DTYPE_BF16, in->tokens, 0};
    const megamoe_view input_ids = {in->input_ids, in->input_ids_dtype, 1, 0};
    const megamoe_view topk_ids = {in->topk_ids, in->topk_ids_dtype, in->tokens, 0};
    const megamoe_view topk_weights = {in->topk_weights, MEGAMOE_DTYPE_F32, in->tokens, 0};
    if (status == MEGAMOE_OK)
        status =
            megamoe_router_route(s->router, device, &x, in->input_ids != NULL ? &input_ids : NULL,
                                 in->tokens, &topk_ids, &topk_weights);
    megamoe_device_close(device);
    return status == MEGAMOE_OK ? EXIT_DONE : report_failure(status);
}

void inputs_close(inputs *in) {
    free(in->x);
    free(in->topk_ids);
    free(in->topk_weights);
    free(in->input_ids);
}
