/* SPDX-License-Identifier: Apache-2.0 */
/* A checkpoint written as another family: what is lossless is found out before a byte is written.
 */
#define _GNU_SOURCE
#include "checkpoint/convert.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/directory.h"
#include "base/error.h"
#include "base/file.h"
#include "base/memory.h"
#include "checkpoint/json.h"
#include "router/router.h"

/*
 * A file holds one layer, or a part of its experts where the layer is larger than this and its
 * experts have tensors of their own.
 */
static const uint64_t largest_file = 4000000000;

typedef struct writing {
    const megamoe_checkpoint *checkpoint;
    const mm_target *target;
    mm_output_directory directory;
    json_t *config, *quant; /* mm_converted_config */
    json_t *weight_map;
    int32_t files; /* all of them */
    int32_t file;  /* counts those that are written */
    uint64_t total, written;
    megamoe_progress progress;
} writing;

/* How many experts go to a file. */
static int32_t experts_per_file(const mm_conversion *c) {
    const megamoe_layer_desc *desc = &c->source.desc;
    if (c->target->fused)
        return desc->experts;
    /* 9/16 bytes for each weight in NVFP4, less in MXFP4. */
    const uint64_t expert = 27 * (uint64_t)desc->hidden * (uint64_t)desc->intermediate / 16;
    const uint64_t fit = expert < largest_file ? largest_file / expert : 1;
    return (int32_t)mm_min((int64_t)fit, desc->experts);
}

typedef megamoe_status (*with_file)(writing *w, mm_converted_file *file);

/* Opens each file of a layer in turn. */
static megamoe_status for_files(writing *w, const mm_conversion *c, with_file fn) {
    const int32_t step = experts_per_file(c);
    for (int32_t first = 0; first < c->source.desc.experts; first += step) {
        const int32_t end = (int32_t)mm_min(first + step, c->source.desc.experts);
        mm_converted_file file;
        megamoe_status status = mm_converted_file_open(c, first, end, &file);
        if (status == MEGAMOE_OK)
            status = fn(w, &file);
        mm_converted_file_close(&file);
        MM_TRY(status);
    }
    return MEGAMOE_OK;
}

static megamoe_status for_layers(writing *w, with_file fn) {
    for (int32_t i = 0; i < w->checkpoint->n_layers; i++) {
        mm_conversion conversion;
        megamoe_status status =
            mm_conversion_open(w->checkpoint, &w->checkpoint->layers[i], w->target, &conversion);
        if (status == MEGAMOE_OK)
            status = for_files(w, &conversion, fn);
        mm_conversion_close(&conversion);
        MM_TRY(status);
    }
    return MEGAMOE_OK;
}

static megamoe_status count_file(writing *w, mm_converted_file *file) {
    w->files++;
    w->total += file->bytes;
    return MEGAMOE_OK;
}

static void on_file(void *user, uint64_t done, uint64_t total) {
    (void)total;
    const writing *w = user;
    w->progress.fn(w->progress.user, w->written + done, w->total);
}

static megamoe_status path_of(const writing *w, const char *name, char **path) {
    if (asprintf(path, "%s/%s", w->directory.temporary, name) >= 0)
        return MEGAMOE_OK;
    *path = NULL;
    return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", w->directory.path);
}

static megamoe_status write_file(writing *w, mm_converted_file *file) {
    char name[64] = "model.safetensors";
    w->file++;
    if (w->files > 1)
        snprintf(name, sizeof name, "model-%05" PRId32 "-of-%05" PRId32 ".safetensors", w->file,
                 w->files);
    char *path;
    MM_TRY(path_of(w, name, &path));
    const megamoe_progress progress = {w->progress.fn ? on_file : NULL, w};
    const megamoe_status status =
        megamoe_tensors_save(path, file->specs, file->n, mm_converted_fill, file, progress);
    free(path);
    MM_TRY(status);
    w->written += file->bytes;
    for (size_t i = 0; i < file->n; i++)
        if (json_object_set_new(w->weight_map, file->specs[i].name, json_string(name)) != 0)
            return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", w->directory.path);
    return MEGAMOE_OK;
}

/* Gives up the reference to `object`. */
static megamoe_status write_json(const writing *w, const char *name, json_t *object) {
    /* 17 digits bring every double back. */
    char *text = object ? mm_json_text(object, JSON_INDENT(2) | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(object);
    char *path = NULL;
    mm_output output = {.fd = -1};
    megamoe_status status =
        text ? path_of(w, name, &path)
             : mm_fail(MEGAMOE_ENOMEM, "%s: out of memory for %s", w->directory.path, name);
    if (status == MEGAMOE_OK)
        status = mm_output_open(path, &output);
    if (status == MEGAMOE_OK)
        status = mm_output_write(&output, 0, text, strlen(text));
    if (status == MEGAMOE_OK)
        status = mm_output_commit(&output);
    mm_output_discard(&output);
    free(path);
    free(text);
    return status;
}

static megamoe_status write_configs(const writing *w) {
    megamoe_status status = write_json(w, "config.json", json_incref(w->config));
    if (status == MEGAMOE_OK && w->quant)
        status = write_json(w, "hf_quant_config.json", json_incref(w->quant));
    if (status == MEGAMOE_OK && w->files > 1)
        status = write_json(w, "model.safetensors.index.json",
                            json_pack("{s:{s:I}, s:O}", "metadata", "total_size",
                                      (json_int_t)w->total, "weight_map", w->weight_map));
    return status;
}

/* Both NULL, or of the same bytes as a prepared file would keep. */
static megamoe_status compare_routers(const writing *w, const megamoe_router *a,
                                      const megamoe_router *b, bool *same) {
    *same = !a && !b;
    if (!a || !b || mm_router_saved_bytes(a) != mm_router_saved_bytes(b))
        return MEGAMOE_OK;
    const size_t bytes = mm_router_saved_bytes(a);
    uint8_t *saved = malloc(2 * bytes);
    if (!saved)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory for a router", w->checkpoint->path);
    mm_router_save(a, saved);
    mm_router_save(b, saved + bytes);
    *same = memcmp(saved, saved + bytes, bytes) == 0;
    free(saved);
    return MEGAMOE_OK;
}

megamoe_status mm_router_if_any(const megamoe_checkpoint *checkpoint, int32_t layer,
                                megamoe_router **router) {
    const megamoe_status status = megamoe_checkpoint_router(checkpoint, layer, router);
    return status == MEGAMOE_ENOTFOUND ? MEGAMOE_OK : status;
}

static bool same_layer(const megamoe_stored_layer *a, const megamoe_stored_layer *b) {
    const megamoe_activation *x = &a->activation, *y = &b->activation;
    return a->has_bias == b->has_bias && a->hidden == b->hidden &&
           a->intermediate == b->intermediate && a->experts == b->experts && a->topk == b->topk &&
           x->alpha == y->alpha && x->offset == y->offset && x->limit == y->limit;
}

/* What was written means what was read. */
static megamoe_status compare_layer(const writing *w, const megamoe_checkpoint *made,
                                    int32_t layer) {
    megamoe_stored_layer from = MEGAMOE_INIT(megamoe_stored_layer), to = from;
    MM_TRY(megamoe_checkpoint_stored(w->checkpoint, layer, &from));
    MM_TRY(megamoe_checkpoint_stored(made, layer, &to));
    megamoe_router *of_source = NULL, *of_made = NULL;
    megamoe_status status = mm_router_if_any(w->checkpoint, layer, &of_source);
    if (status == MEGAMOE_OK)
        status = mm_router_if_any(made, layer, &of_made);
    bool router = false;
    if (status == MEGAMOE_OK)
        status = compare_routers(w, of_source, of_made, &router);
    if (status == MEGAMOE_OK && (!router || !same_layer(&from, &to)))
        status = mm_fail(MEGAMOE_EUNSUPPORTED,
                         "%s: layer %" PRId32 ": under the names of %s its %s would be read as "
                         "another one",
                         w->checkpoint->path, layer, w->target->family->name,
                         router ? "geometry or activation" : "router");
    megamoe_router_close(of_source);
    megamoe_router_close(of_made);
    return status;
}

static megamoe_status compare(const writing *w) {
    megamoe_checkpoint *made;
    MM_TRY(megamoe_checkpoint_open(w->directory.temporary, &made));
    megamoe_status status = MEGAMOE_OK;
    for (int32_t i = 0; status == MEGAMOE_OK && i < w->checkpoint->n_layers; i++)
        status = compare_layer(w, made, w->checkpoint->layers[i].index);
    megamoe_checkpoint_close(made);
    return status;
}

static megamoe_status choose_target(const megamoe_checkpoint *checkpoint,
                                    const megamoe_convert_options *options,
                                    const mm_target **target) {
    megamoe_format format = options->format;
    if (!options->family)
        return mm_fail(
            MEGAMOE_EINVAL,
            "megamoe_convert_options: family is NULL; expected one of " MM_TARGET_FAMILIES);
    if (checkpoint->n_layers == 0)
        return mm_fail(MEGAMOE_EUNSUPPORTED, "%s: was opened without its layers", checkpoint->path);
    if (format == 0) {
        megamoe_stored_layer stored = MEGAMOE_INIT(megamoe_stored_layer);
        MM_TRY(megamoe_checkpoint_stored(checkpoint, checkpoint->layers[0].index, &stored));
        format = strcmp(stored.format, megamoe_format_name(MEGAMOE_FORMAT_NVFP4)) == 0
                     ? MEGAMOE_FORMAT_NVFP4
                     : MEGAMOE_FORMAT_MXFP4;
    }
    *target = mm_target_find(options->family, format);
    if (!*target && options->format == 0)
        *target = mm_target_find(options->family, 0);
    if (*target)
        return MEGAMOE_OK;
    if (mm_target_find(options->family, 0))
        return mm_fail(MEGAMOE_EUNSUPPORTED, "%s has no %s", options->family,
                       megamoe_format_name(format));
    return mm_fail(MEGAMOE_EUNSUPPORTED, "family \"%s\" is not written; " MM_TARGET_FAMILIES " are",
                   options->family);
}

megamoe_status megamoe_checkpoint_convert(const megamoe_checkpoint *checkpoint,
                                          const megamoe_convert_options *options,
                                          const char *path) {
    if (!checkpoint || !options || !path)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_checkpoint_convert: arguments must not be NULL");
    megamoe_convert_options o;
    MM_TRY(mm_take_struct(&o, sizeof o, options, "megamoe_convert_options"));
    writing w = {.checkpoint = checkpoint, .progress = o.progress};
    MM_TRY(choose_target(checkpoint, &o, &w.target));
    MM_TRY(for_layers(&w, count_file));
    megamoe_status status = mm_converted_config(checkpoint, w.target, &w.config, &w.quant);
    if (status == MEGAMOE_OK)
        status = mm_output_directory_open(path, &w.directory);
    w.weight_map = json_object();
    if (status == MEGAMOE_OK && !w.weight_map)
        status = mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", path);
    if (status == MEGAMOE_OK)
        status = for_layers(&w, write_file);
    if (status == MEGAMOE_OK)
        status = write_configs(&w);
    if (status == MEGAMOE_OK)
        status = compare(&w);
    json_decref(w.config);
    json_decref(w.quant);
    json_decref(w.weight_map);
    if (status == MEGAMOE_OK)
        return mm_output_directory_commit(&w.directory);
    mm_output_directory_discard(&w.directory);
    return status;
}
