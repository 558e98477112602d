/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe prepare: packs the experts of one layer, or of all, into files. */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "commands.h"
#include "options.h"
#include "parallel.h"
#include "progress.h"
#include "report.h"
#include "source.h"

typedef struct preparation {
    source source;
    const char *device; /* "cpu" or "cuda" */
    megamoe_nvfp4_mode nvfp4;
    megamoe_quantize_options quantize; /* of the source, if it is to be used */
    bool round_outside_window;
    int32_t threads;
    json_t *files; /* NULL: print text */
} preparation;

static int prepare_layer(preparation *p, int64_t layer, const char *path) {
    source *s = &p->source;
    char label[32];
    progress bar;
    p->quantize.progress = progress_begin(&bar, "quantize");
    const int code = source_open_layer(s, layer);
    progress_end(&bar);
    if (code != EXIT_DONE)
        return code;
    snprintf(label, sizeof label, "prepare layer %d", s->layer.layer);
    megamoe_prepare_options options = MEGAMOE_INIT(megamoe_prepare_options);
    options.device = p->device;
    options.nvfp4 = p->nvfp4;
    options.round_outside_window = p->round_outside_window;
    options.threads = p->threads;
    options.progress = progress_begin(&bar, label);
    const megamoe_status status = megamoe_weights_prepare(s->weights, s->router, &options, path);
    progress_end(&bar);
    if (status != MEGAMOE_OK)
        return report_failure(status);
    struct stat properties;
    const uint64_t bytes = stat(path, &properties) == 0 ? (uint64_t)properties.st_size : 0;
    char size[REPORT_SIZE_BYTES];
    if (p->files != NULL)
        json_array_append_new(p->files, json_pack("{s:i, s:s, s:I}", "layer", s->layer.layer,
                                                  "path", path, "bytes", (json_int_t)bytes));
    else
        report_line("prepared", "layer %d%s%s for %s: %s, %s, %s", s->layer.layer,
                    s->quantize != NULL ? " rounded to " : "",
                    s->quantize != NULL ? megamoe_format_name(s->layer.format) : "", p->device,
                    path, report_size(bytes, size),
                    s->router != NULL ? "with its router" : "without a router");
    return EXIT_DONE;
}

static int prepare_all(preparation *p, const char *directory) {
    if (mkdir(directory, 0777) != 0 && errno != EEXIST)
        return report_error("%s: cannot be made: %s", directory, strerror(errno));
    int code = EXIT_DONE;
    for (int32_t i = 0; code == EXIT_DONE && i < p->source.info.layers; i++) {
        const int32_t layer = megamoe_checkpoint_layer(p->source.checkpoint, i);
        char *path;
        if (asprintf(&path, "%s/layer-%03" PRId32 ".mmoe", directory, layer) < 0)
            return report_error("out of memory");
        code = prepare_layer(p, layer, path);
        free(path);
    }
    return code;
}

/* "all" is PREPARE_ALL. */
enum { PREPARE_ALL = -2 };

static bool parse_layer(const char *text, int64_t *layer) {
    char *end;
    if (text == NULL) {
        *layer = ONLY_LAYER;
        return true;
    }
    if (strcmp(text, "all") == 0) {
        *layer = PREPARE_ALL;
        return true;
    }
    errno = 0;
    *layer = strtoll(text, &end, 10);
    return end != text && *end == '\0' && errno == 0 && *layer >= 0 && *layer <= INT32_MAX;
}

/* A file is for a kind of device, so it does not matter which N of "cuda:N". NULL: no such kind. */
static const char *kind_of_device(const char *device) {
    if (strcmp(device, "cpu") == 0)
        return "cpu";
    if (strncmp(device, "cuda", strlen("cuda")) != 0)
        return NULL;
    const char *rest = device + strlen("cuda");
    const size_t digits = *rest == ':' ? strspn(rest + 1, "0123456789") : 0;
    return *rest == '\0' || (digits > 0 && rest[1 + digits] == '\0') ? "cuda" : NULL;
}

int cmd_prepare(int argc, char **argv) {
    const char *layer_text = NULL, *out = NULL, *device = "cpu";
    int nvfp4 = MEGAMOE_NVFP4_EXACT, quantize = -1;
    int64_t layer, threads = parallel_cores();
    bool round_outside_window = false, json = false;
    const option_spec options[] = {
        {"layer", OPTION_TEXT, &layer_text, "L|all", "layer of the checkpoint (its only one)", 0,
         0},
        {"out", OPTION_TEXT, &out, "FILE|DIR", "file; for all layers a directory", 0, 0},
        {"device", OPTION_TEXT, &device, "cpu|cuda|cuda:N", "kind of device to pack for (cpu)", 0,
         0},
        {"nvfp4", OPTION_CHOICE, &nvfp4, "exact|folded", "form of NVFP4 weights (exact)", 0, 0},
        {"quantize", OPTION_CHOICE, &quantize, "mxfp4|nvfp4", "round FP8 or BF16 weights to this",
         0, 0},
        {"round-outside-window", OPTION_FLAG, &round_outside_window, NULL,
         "cuda: round groups that it cannot hold exactly", 0, 0},
        {"threads", OPTION_INTEGER, &threads, "T", "(one per core)", 1, 1024},
        OPTION_JSON(&json)};
    const command_syntax syntax = {"prepare",
                                   "PATH",
                                   "Packs the experts of a layer for a device into a file.",
                                   "megamoe prepare flash --layer 3 --out flash-003.mmoe",
                                   options,
                                   sizeof options / sizeof *options,
                                   1,
                                   1};
    const char *arguments[OPTION_MAX_ARGUMENTS];
    int code;
    if (!options_parse(&syntax, argc, argv, arguments, &code))
        return code;
    if (!parse_layer(layer_text, &layer))
        return report_error("--layer %s: not a layer's number and not \"all\"", layer_text);
    if (out == NULL)
        return report_error("prepare: --out is missing");
    const char *kind = kind_of_device(device);
    if (kind == NULL)
        return report_error("--device %s: expected cpu, cuda or cuda:N", device);
    preparation p = {.device = kind,
                     .nvfp4 = (megamoe_nvfp4_mode)nvfp4,
                     .quantize = MEGAMOE_INIT(megamoe_quantize_options),
                     .round_outside_window = round_outside_window,
                     .threads = (int32_t)threads,
                     .files = json ? json_array() : NULL};
    p.quantize.format = (megamoe_format)(quantize + 1);
    p.quantize.threads = p.threads;
    code = source_open(arguments[0], &p.source);
    if (quantize >= 0)
        p.source.quantize = &p.quantize;
    if (code == EXIT_DONE && p.source.prepared)
        code = report_error("%s: is prepared already", arguments[0]);
    if (code == EXIT_DONE)
        code = layer == PREPARE_ALL ? prepare_all(&p, out) : prepare_layer(&p, layer, out);
    if (code == EXIT_DONE && json)
        code = report_json(json_pack(
            "{s:s, s:s, s:s, s:s?, s:O}", "path", p.source.path, "device", p.device, "nvfp4",
            nvfp4 == MEGAMOE_NVFP4_FOLDED ? "folded" : "exact", "quantized",
            quantize >= 0 ? megamoe_format_name(p.quantize.format) : NULL, "files", p.files));
    json_decref(p.files);
    source_close(&p.source);
    return code;
}
