/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe inspect: what a checkpoint or prepared file holds, and how its scales lie. */
#include <inttypes.h>
#include <stdio.h>

#include "commands.h"
#include "options.h"
#include "parallel.h"
#include "progress.h"
#include "report.h"
#include "source.h"

enum { CELL_WIDTH = 25, BAR_WIDTH = 16, BYTES = 256 };

static const char *const projection_names[] = {"gate", "up", "down"};

/* ---- JSON ---- */

static json_t *histogram_json(const uint64_t counts[BYTES]) {
    json_t *object = json_object();
    for (int i = 0; i < BYTES; i++) {
        char key[16];
        snprintf(key, sizeof key, "%d", i);
        if (counts[i] > 0)
            json_object_set_new(object, key, json_integer((json_int_t)counts[i]));
    }
    return object;
}

static json_t *projection_json(const megamoe_projection_report *p, const char *name,
                               megamoe_format format) {
    json_t *object = json_pack(
        "{s:s, s:I, s:I, s:I, s:I, s:I, s:i, s:i, s:o, s:o}", "projection", name, "groups",
        (json_int_t)p->groups, "zero_groups", (json_int_t)p->zero_groups, "inside",
        (json_int_t)p->inside, "inside_shifted", (json_int_t)p->inside_shifted, "outside",
        (json_int_t)p->outside, "row_exponent_min", p->row_exponent_min, "row_exponent_max",
        p->row_exponent_max, "scale_bytes", histogram_json(p->scale_histogram),
        "row_spread_binades", histogram_json(p->spread_histogram));
    if (format == MEGAMOE_FORMAT_NVFP4)
        json_object_update_new(object,
                               json_pack("{s:f, s:f, s:f}", "global_min", (double)p->global_min,
                                         "global_max", (double)p->global_max, "folded_relative_rms",
                                         p->folded_relative_rms));
    return object;
}

static json_t *router_json(const megamoe_router *router) {
    megamoe_router_desc d = MEGAMOE_INIT(megamoe_router_desc);
    if (router == NULL || megamoe_router_describe(router, &d) != MEGAMOE_OK)
        return json_null();
    return json_pack("{s:s, s:i, s:i, s:i, s:b, s:f, s:I}", "rule",
                     megamoe_router_rule_name(d.rule), "topk", d.topk, "groups", d.groups,
                     "groups_kept", d.groups_kept, "normalize", d.normalize, "scaling",
                     (double)d.scaling, "hash_vocab", (json_int_t)d.hash_vocab);
}

/* `wide` is NULL for 4-bit weights, `report` for those that are not analyzed. */
static json_t *layer_json(const source *s, const megamoe_stored_layer *wide,
                          const megamoe_weights_report *report) {
    const megamoe_layer_desc *d = &s->layer;
    json_t *object = json_pack(
        "{s:i, s:s, s:i, s:i, s:i, s:i, s:f, s:f, s:f, s:b, s:o}", "layer", d->layer, "format",
        wide != NULL ? wide->format : megamoe_format_name(d->format), "hidden", d->hidden,
        "intermediate", d->intermediate, "experts", d->experts, "topk", d->topk, "alpha",
        (double)d->activation.alpha, "offset", (double)d->activation.offset, "limit",
        (double)d->activation.limit, "bias", d->has_bias, "router", router_json(s->router));
    if (wide != NULL && wide->block_rows > 0)
        json_object_set_new(object, "block",
                            json_pack("[i, i]", wide->block_rows, wide->block_columns));
    if (report == NULL)
        return object;
    json_t *projections = json_array();
    for (int p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++)
        json_array_append_new(
            projections, projection_json(&report->projection[p], projection_names[p], d->format));
    json_object_set_new(object, "bytes", json_integer((json_int_t)report->bytes));
    json_object_set_new(object, "projections", projections);
    return object;
}

/* ---- Text ---- */

static void print_router(const megamoe_router *router) {
    megamoe_router_desc d = MEGAMOE_INIT(megamoe_router_desc);
    if (router == NULL || megamoe_router_describe(router, &d) != MEGAMOE_OK) {
        report_line("router", "none");
        return;
    }
    char groups[64] = "", hash[64] = "";
    if (d.groups > 1)
        snprintf(groups, sizeof groups, ", %d of %d groups", d.groups_kept, d.groups);
    if (d.hash_vocab > 0)
        snprintf(hash, sizeof hash, ", hash table of %" PRId64 " tokens", d.hash_vocab);
    report_line("router", "%s, top-%d%s%s%s, scaling %g", megamoe_router_rule_name(d.rule), d.topk,
                groups, d.normalize ? ", normalized" : "", hash,
                (double)(d.scaling != 0 ? d.scaling : 1));
}

static void print_shape(const source *s, const char *format) {
    const megamoe_layer_desc *d = &s->layer;
    report_line("layer", "%d: %s, hidden %d, intermediate %d, %d experts, top-%d", d->layer, format,
                d->hidden, d->intermediate, d->experts, d->topk);
    const megamoe_activation *a = &d->activation;
    const float alpha = a->alpha != 0 ? a->alpha : 1;
    if (a->offset != 0 || alpha != 1)
        report_line("activation", "alpha %g, offset %g, limit %g", (double)alpha, (double)a->offset,
                    (double)a->limit);
    else if (a->limit > 0)
        report_line("activation", "limit %g", (double)a->limit);
    if (d->has_bias)
        report_line("biases", "of gate, up and down");
    print_router(s->router);
}

/* The binade of a scale byte. */
static int scale_exponent(megamoe_format format, int byte) {
    return format == MEGAMOE_FORMAT_MXFP4 ? byte - 127 : (byte >> 3) - 7;
}

static void print_scale_bars(const megamoe_weights_report *report, megamoe_format format) {
    uint64_t counts[BYTES][3] = {{0}};
    const int base = scale_exponent(format, 0);
    int first = BYTES, last = -1;
    for (int p = 0; p < 3; p++) {
        for (int byte = 0; byte < BYTES; byte++) {
            const int row = scale_exponent(format, byte) - base;
            counts[row][p] += report->projection[p].scale_histogram[byte];
            if (counts[row][p] > 0) {
                first = row < first ? row : first;
                last = row > last ? row : last;
            }
        }
    }
    static const char bar[BAR_WIDTH + 1] = "################";
    for (int row = last; row >= first; row--) {
        printf("  2^%-8d", row + base);
        for (int p = 0; p < 3; p++) {
            const double share = (double)counts[row][p] / (double)report->projection[p].groups;
            const int width = (int)(share * BAR_WIDTH + 0.5);
            const char *shown = width > 0 ? bar + BAR_WIDTH - width : counts[row][p] > 0 ? "." : "";
            char cell[CELL_WIDTH + 1];
            snprintf(cell, sizeof cell, "%5.1f %%%s%s", share * 100, *shown ? " " : "", shown);
            printf("%-*s", p < 2 ? CELL_WIDTH : 0, cell);
        }
        printf("\n");
    }
}

/* The smallest spread that at least half of the rows do not exceed, and the largest. */
static void spread_of(const megamoe_projection_report *p, int *median, int *largest) {
    uint64_t rows = 0, seen = 0;
    for (int i = 0; i < BYTES; i++)
        rows += p->spread_histogram[i];
    *median = -1;
    *largest = 0;
    for (int i = 0; i < BYTES; i++) {
        seen += p->spread_histogram[i];
        if (*median < 0 && 2 * seen >= rows)
            *median = i;
        if (p->spread_histogram[i] > 0)
            *largest = i;
    }
}

#define PRINT_ROW(label, format, ...)                                                              \
    do {                                                                                           \
        printf("  %-10s", label);                                                                  \
        for (int i_ = 0; i_ < 3; i_++) {                                                           \
            const megamoe_projection_report *p = &report->projection[i_];                          \
            char cell[64];                                                                         \
            snprintf(cell, sizeof cell, format, __VA_ARGS__);                                      \
            printf("%-*s", i_ < 2 ? CELL_WIDTH : 0, cell);                                         \
        }                                                                                          \
        printf("\n");                                                                              \
    } while (0)

static void print_report(const megamoe_weights_report *report, megamoe_format format) {
    char size[REPORT_SIZE_BYTES];
    report_line("weights", "%s", report_size(report->bytes, size));
    printf("  %-10s%-*s%-*s%s\n", "", CELL_WIDTH, "gate", CELL_WIDTH, "up", "down");
    PRINT_ROW("groups", "%" PRIu64, p->groups);
    PRINT_ROW("inside", "%.4f %%", 100.0 * (double)p->inside / (double)p->groups);
    PRINT_ROW("  shifted", "%" PRIu64, p->inside_shifted);
    PRINT_ROW("  zero", "%" PRIu64, p->zero_groups);
    PRINT_ROW("outside", "%" PRIu64, p->outside);
    printf("  %-10s", "spread");
    for (int i = 0; i < 3; i++) {
        int median, largest;
        char cell[64];
        spread_of(&report->projection[i], &median, &largest);
        snprintf(cell, sizeof cell, "median %d, most %d", median, largest);
        printf("%-*s", i < 2 ? CELL_WIDTH : 0, cell);
    }
    printf("\n");
    PRINT_ROW("row 2^", "%d..%d", p->row_exponent_min, p->row_exponent_max);
    if (format == MEGAMOE_FORMAT_NVFP4) {
        PRINT_ROW("global", "%.3g..%.3g", (double)p->global_min, (double)p->global_max);
        PRINT_ROW("folding", "rounds by %.2f %% rms", 100 * p->folded_relative_rms);
    }
    printf("  scales\n");
    print_scale_bars(report, format);
}

/* ---- Command ---- */

/* What packing did to the weights' values. */
static const char *form_of(const source *s) {
    return megamoe_weights_nvfp4(s->weights) == MEGAMOE_NVFP4_FOLDED ? "folded" : "exact";
}

typedef struct inspection {
    source source;
    int32_t threads;
    json_t *layers; /* NULL: print text */
} inspection;

/* A layer whose weights are not run as they are: there are no 4-bit groups to count. */
static int inspect_wide(inspection *in, const megamoe_stored_layer *stored, int32_t layer) {
    TRY(source_open_wide(&in->source, stored, layer));
    const source *s = &in->source;
    if (in->layers != NULL) {
        json_array_append_new(in->layers, layer_json(s, stored, NULL));
        return EXIT_DONE;
    }
    printf("\n");
    print_shape(s, stored->format);
    if (stored->block_rows > 0)
        report_line("scales", "one for each %d x %d weights", stored->block_rows,
                    stored->block_columns);
    report_line("weights", "not run as they are; megamoe prepare --quantize mxfp4|nvfp4 rounds "
                           "them to 4 bits");
    return EXIT_DONE;
}

static int inspect_layer(inspection *in, int64_t layer) {
    megamoe_stored_layer stored = MEGAMOE_INIT(megamoe_stored_layer);
    if (!in->source.prepared) {
        TRY_LIBRARY(megamoe_checkpoint_stored(in->source.checkpoint, (int32_t)layer, &stored));
        if (stored.wide)
            return inspect_wide(in, &stored, (int32_t)layer);
    }
    const int code = source_open_layer(&in->source, layer);
    if (code != EXIT_DONE)
        return code;
    const source *s = &in->source;
    megamoe_weights_report report = MEGAMOE_INIT(megamoe_weights_report);
    if (!s->prepared) {
        char label[32];
        progress bar;
        snprintf(label, sizeof label, "layer %d", s->layer.layer);
        const megamoe_status status =
            megamoe_weights_analyze(s->weights, in->threads, progress_begin(&bar, label), &report);
        progress_end(&bar);
        if (status != MEGAMOE_OK)
            return report_failure(status);
    }
    if (in->layers != NULL) {
        json_array_append_new(in->layers, layer_json(s, NULL, s->prepared ? NULL : &report));
        return EXIT_DONE;
    }
    printf("\n");
    print_shape(s, megamoe_format_name(s->layer.format));
    if (!s->prepared)
        print_report(&report, s->layer.format);
    return EXIT_DONE;
}

static int inspect(inspection *in, int64_t layer) {
    const source *s = &in->source;
    if (in->layers == NULL) {
        char size[REPORT_SIZE_BYTES];
        if (s->prepared)
            report_line("prepared", "%s, for %s, %s", s->path, megamoe_weights_device(s->weights),
                        form_of(s));
        else
            report_line("checkpoint", "%s: %s%s%s, %" PRIu64 " file%s, %" PRIu64 " tensors, %s",
                        s->path, s->info.family, *s->info.model_type ? ", " : "",
                        s->info.model_type, s->info.files, s->info.files == 1 ? "" : "s",
                        s->info.tensors, report_size(s->info.bytes, size));
    }
    if (s->prepared || layer != ONLY_LAYER)
        return inspect_layer(in, layer);
    int code = EXIT_DONE;
    for (int32_t i = 0; code == EXIT_DONE && i < s->info.layers; i++)
        code = inspect_layer(in, megamoe_checkpoint_layer(s->checkpoint, i));
    return code;
}

static int print_json(const inspection *in) {
    const source *s = &in->source;
    json_t *object = json_pack("{s:s, s:b, s:O}", "path", s->path, "prepared", s->prepared,
                               "layers", in->layers);
    if (s->prepared)
        json_object_update_new(object,
                               json_pack("{s:s, s:s}", "device", megamoe_weights_device(s->weights),
                                         "form", form_of(s)));
    else
        json_object_update_new(
            object, json_pack("{s:s, s:s, s:I, s:I, s:I}", "family", s->info.family, "model_type",
                              s->info.model_type, "files", (json_int_t)s->info.files, "tensors",
                              (json_int_t)s->info.tensors, "bytes", (json_int_t)s->info.bytes));
    return report_json(object);
}

int cmd_inspect(int argc, char **argv) {
    int64_t layer = ONLY_LAYER, threads = parallel_cores();
    bool json = false;
    const option_spec options[] = {
        {"layer", OPTION_INTEGER, &layer, "L", "(all layers)", 0, INT32_MAX},
        {"threads", OPTION_INTEGER, &threads, "T", "(one per core)", 1, 1024},
        OPTION_JSON(&json)};
    const command_syntax syntax = {"inspect",
                                   "PATH",
                                   "Describes a checkpoint or prepared file, layer by layer.",
                                   "megamoe inspect flash --layer 0",
                                   options,
                                   sizeof options / sizeof *options,
                                   1,
                                   1};
    const char *arguments[OPTION_MAX_ARGUMENTS];
    int code;
    if (!options_parse(&syntax, argc, argv, arguments, &code))
        return code;
    inspection in = {.threads = (int32_t)threads, .layers = json ? json_array() : NULL};
    code = source_open(arguments[0], &in.source);
    if (code == EXIT_DONE)
        code = inspect(&in, layer);
    if (code == EXIT_DONE && json)
        code = print_json(&in);
    json_decref(in.layers);
    source_close(&in.source);
    return code;
}
