/* SPDX-License-Identifier: Apache-2.0 */
#include "fixture.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

built built_start(void) {
    static uint64_t stream;
    return (built){.random = t_random_start(stream++)};
}

void built_free(built *model) {
    for (size_t i = 0; i < model->n; i++)
        free(model->tensors[i].data);
    free(model->tensors);
    *model = (built){0};
}

static uint64_t element_bytes(const char *dtype) {
    const char *digits = dtype + strcspn(dtype, "0123456789");
    return strtoull(digits, NULL, 10) /
           8; /* every type here spells its width first: F8_E4M3, BF16 */
}

built_tensor *built_add(built *model, const char *dtype, const int64_t *shape, const char *format,
                        ...) {
    built_tensor added = {0};
    va_list args;
    va_start(args, format);
    vsnprintf(added.name, sizeof added.name, format, args);
    va_end(args);
    model->tensors = realloc(model->tensors, (model->n + 1) * sizeof *model->tensors);
    built_tensor *tensor = &model->tensors[model->n++];
    *tensor = added;
    snprintf(tensor->dtype, sizeof tensor->dtype, "%s", dtype);
    tensor->bytes = element_bytes(dtype);
    for (; shape[tensor->rank] >= 0; tensor->rank++) {
        tensor->shape[tensor->rank] = shape[tensor->rank];
        tensor->bytes *= (uint64_t)shape[tensor->rank];
    }
    tensor->data = calloc(1, tensor->bytes ? tensor->bytes : 1);
    return tensor;
}

built_tensor *built_find(const built *model, const char *name) {
    for (size_t i = 0; i < model->n; i++)
        if (strcmp(model->tensors[i].name, name) == 0)
            return &model->tensors[i];
    T_CHECK_MSG(false, "the fixture has no %s", name);
    t_leave();
}

void built_remove(built *model, const char *name) {
    built_tensor *tensor = built_find(model, name);
    free(tensor->data);
    const size_t after = model->n - 1 - (size_t)(tensor - model->tensors);
    memmove(tensor, tensor + 1, after * sizeof *tensor);
    model->n--;
}

void built_rename(built *model, const char *from, const char *to) {
    built_tensor *tensor = built_find(model, from);
    snprintf(tensor->name, sizeof tensor->name, "%s", to);
}

static megamoe_status fill(void *user, size_t index, void *data, uint64_t bytes) {
    const built *model = user;
    memcpy(data, model->tensors[index].data, bytes);
    return MEGAMOE_OK;
}

void built_save(const built *model, const char *path) {
    megamoe_tensor_spec *specs = calloc(model->n + 1, sizeof *specs);
    for (size_t i = 0; i < model->n; i++) {
        specs[i] = (megamoe_tensor_spec){.name = model->tensors[i].name,
                                         .dtype = model->tensors[i].dtype,
                                         .rank = model->tensors[i].rank};
        memcpy(specs[i].shape, model->tensors[i].shape, sizeof specs[i].shape);
    }
    const megamoe_status status =
        megamoe_tensors_save(path, specs, model->n, fill, (void *)model, (megamoe_progress){0});
    free(specs);
    T_OK(status);
}

const char *save_model(const built *model, const char *config) {
    mkdir(t_path("model"), 0777);
    built_save(model, t_path("model/model.safetensors"));
    unlink(t_path("model/config.json"));
    unlink(t_path("model/hf_quant_config.json"));
    if (config)
        write_text(t_path("model/config.json"), config);
    return t_path("model");
}

void randomize(built *model, built_tensor *tensor, uint32_t low, uint32_t high) {
    for (uint64_t i = 0; i < tensor->bytes; i++)
        tensor->data[i] = (uint8_t)(low + t_below(&model->random, high - low + 1));
}

void write_text(const char *path, const char *text) {
    t_write_file(path, text, strlen(text));
}

void fails(megamoe_status is, megamoe_status must, const char *const *parts, const char *file,
           int line, const char *call) {
    if (!t_status(is, must, megamoe_status_name, megamoe_last_error, file, line, call))
        return;
    for (; *parts; parts++)
        t_contains(megamoe_last_error(), *parts, file, line, call);
}

megamoe_checkpoint *opened(const char *path) {
    megamoe_checkpoint *checkpoint = NULL;
    T_OK(megamoe_checkpoint_open(path, &checkpoint));
    return checkpoint;
}

megamoe_status try_open(const char *path) {
    megamoe_checkpoint *checkpoint = NULL;
    const megamoe_status status = megamoe_checkpoint_open(path, &checkpoint);
    T_CHECK((checkpoint != NULL) == (status == MEGAMOE_OK));
    megamoe_checkpoint_close(checkpoint);
    return status;
}

megamoe_status try_weights(const char *path, int32_t layer) {
    megamoe_checkpoint *checkpoint = opened(path);
    megamoe_weights *weights = NULL;
    const megamoe_status status = megamoe_checkpoint_weights(checkpoint, layer, &weights);
    T_CHECK((weights != NULL) == (status == MEGAMOE_OK));
    megamoe_checkpoint_close(checkpoint);
    megamoe_weights_close(weights);
    return status;
}

megamoe_status try_router(const char *path, int32_t layer) {
    megamoe_checkpoint *checkpoint = opened(path);
    megamoe_router *router = NULL;
    const megamoe_status status = megamoe_checkpoint_router(checkpoint, layer, &router);
    T_CHECK((router != NULL) == (status == MEGAMOE_OK));
    megamoe_checkpoint_close(checkpoint);
    megamoe_router_close(router);
    return status;
}
