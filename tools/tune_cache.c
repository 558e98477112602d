/* SPDX-License-Identifier: Apache-2.0 */
/* The file of measured plans: shown, and entries of it removed. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "tune.h"

static const char *const nvfp4_words[] = {"exact", "folded"};
static const char *const accumulate_words[] = {"mma", "promote"};
static const char *const scale_words[] = {"token", "block", "block_f32"};

/* ---- Keys ---- */

json_t *tune_key_json(const megamoe_tuned_key *key) {
    return json_pack(
        "{s:s, s:i, s:[i, i], s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:s, s:s, s:s, s:s, "
        "s:i, s:I, s:s}",
        "library", key->library, "layout", key->layout, "capability", key->capability_major,
        key->capability_minor, "multiprocessors", key->multiprocessors, "max_ctas", key->max_ctas,
        "l2_bytes", key->l2_bytes, "clock_khz", key->clock_khz, "memory_clock_khz",
        key->memory_clock_khz, "memory_bus_bits", key->memory_bus_bits, "hidden", key->hidden,
        "intermediate", key->intermediate, "experts", key->experts, "topk", key->topk, "format",
        megamoe_format_name(key->format), "nvfp4", nvfp4_words[key->nvfp4], "accumulate",
        accumulate_words[key->accumulate], "input_scale", scale_words[key->input_scale], "ranks",
        key->ranks, "capacity", (json_int_t)key->capacity, "routing", key->routing);
}

void tune_print_key(const megamoe_tuned_key *key) {
    const bool nvfp4 = key->format == MEGAMOE_FORMAT_NVFP4;
    report_line("for", "%s%s%s, %" PRId32 " x %" PRId32 ", %" PRId32 " experts, top %" PRId32,
                megamoe_format_name(key->format), nvfp4 ? " " : "",
                nvfp4 ? nvfp4_words[key->nvfp4] : "", key->hidden, key->intermediate, key->experts,
                key->topk);
    report_line("", "%s, one scale per %s, capacity %" PRId64 ", %" PRId32 " rank%s, routing %s",
                accumulate_words[key->accumulate], scale_words[key->input_scale], key->capacity,
                key->ranks, key->ranks == 1 ? "" : "s", key->routing);
    report_line("on",
                "sm_%" PRId32 "%" PRId32 ", %" PRId32 " thread blocks on %" PRId32
                " multiprocessors, megamoe %s",
                key->capability_major, key->capability_minor, key->max_ctas, key->multiprocessors,
                key->library);
}

static bool passes(const tune_filter *filter, const megamoe_tuned_key *key) {
    const bench_geometry *g = filter->geometry;
    if (g != NULL && (key->hidden != g->hidden || key->intermediate != g->intermediate ||
                      key->experts != g->experts || key->topk != g->topk))
        return false;
    return (filter->format == 0 || key->format == filter->format) &&
           (filter->capacity == 0 || key->capacity == filter->capacity) &&
           (filter->routing == NULL || strcmp(key->routing, filter->routing) == 0);
}

/* ---- Showing ---- */

typedef struct listing {
    const tune_filter *filter;
    json_t *entries; /* NULL: as text */
    int shown;
} listing;

static void print_entry(const megamoe_tuned_key *key, const megamoe_tuned_plan *plans, int32_t n) {
    printf("\n");
    tune_print_key(key);
    printf("%7s  %8s %8s %10s %14s %8s\n", "tokens", "tile", "lag", "us", "built-in us", "gain");
    for (int32_t i = 0; i < n; i++) {
        const megamoe_tuned_plan *p = &plans[i];
        char lag[TUNE_LAG_BYTES];
        if (p->token_tile == 0)
            printf("%7" PRId64 "  %8s %8s %10.1f\n", p->tokens, "built-in", "", p->us);
        else
            printf("%7" PRId64 "  %8" PRId32 " %8s %10.1f %14.1f %7.2f%%\n", p->tokens,
                   p->token_tile, tune_lag(p->lag, lag), p->us, p->default_us, 100 * (p->gain - 1));
    }
}

static void list_entry(void *user, const megamoe_tuned_key *key, const megamoe_tuned_plan *plans,
                       int32_t n) {
    listing *l = user;
    if (!passes(l->filter, key))
        return;
    l->shown++;
    if (l->entries == NULL) {
        print_entry(key, plans, n);
        return;
    }
    json_t *array = json_array();
    for (int32_t i = 0; i < n; i++)
        json_array_append_new(array, json_pack("{s:I, s:i, s:i, s:f, s:f, s:f}", "tokens",
                                               (json_int_t)plans[i].tokens, "token_tile",
                                               plans[i].token_tile, "lag", plans[i].lag,
                                               "default_us", plans[i].default_us, "us", plans[i].us,
                                               "gain", plans[i].gain));
    json_array_append_new(l->entries,
                          json_pack("{s:o, s:o}", "key", tune_key_json(key), "plans", array));
}

int tune_show(const char *path, const tune_filter *filter, bool json) {
    listing l = {.filter = filter, .entries = json ? json_array() : NULL};
    if (!json)
        report_line("plans", "%s", path);
    TRY_LIBRARY(megamoe_tuned_each(path, list_entry, &l));
    if (json)
        return report_json(json_pack("{s:s, s:o}", "path", path, "entries", l.entries));
    if (l.shown == 0)
        report_line("", "none");
    return EXIT_DONE;
}

/* ---- Forgetting ---- */

static bool is_unwanted(void *user, const megamoe_tuned_key *key) {
    return passes(user, key);
}

int tune_forget(const char *path, const tune_filter *filter, bool json) {
    tune_filter copy = *filter;
    const bool all = filter->geometry == NULL && filter->format == 0 && filter->capacity == 0 &&
                     filter->routing == NULL;
    int32_t removed;
    TRY_LIBRARY(megamoe_tuned_forget(path, all ? NULL : is_unwanted, &copy, &removed));
    if (json)
        return report_json(json_pack("{s:s, s:i}", "path", path, "removed", removed));
    report_line("plans", "%s: %" PRId32 " entr%s removed", path, removed,
                removed == 1 ? "y" : "ies");
    return EXIT_DONE;
}
