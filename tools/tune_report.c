/* SPDX-License-Identifier: Apache-2.0 */
/* What `megamoe tune` has measured: a table, or one JSON object. */
#include <inttypes.h>
#include <stdio.h>

#include "tune.h"

const char *tune_lag(int32_t lag, char text[TUNE_LAG_BYTES]) {
    if (lag == INT32_MAX)
        snprintf(text, TUNE_LAG_BYTES, "all");
    else
        snprintf(text, TUNE_LAG_BYTES, "%" PRId32, lag);
    return text;
}

static json_t *plan_json(const megamoe_plan *plan) {
    return json_pack("{s:i, s:i}", "token_tile", plan->token_tile, "lag", plan->lag);
}

static json_t *candidate_json(const tune_candidate *c) {
    json_t *object = plan_json(&c->plan);
    if (c->rounds > 0) {
        json_object_set_new(object, "rounds", json_integer(c->rounds));
        json_object_set_new(object, "us", json_real(c->us));
        json_object_set_new(object, "ratio", json_real(c->ratio));
    }
    return object;
}

static json_t *point_json(const tune *t, const tune_point *p) {
    json_t *candidates = json_array();
    bool same = true;
    for (int i = 0; i < p->n; i++) {
        json_array_append_new(candidates, candidate_json(&p->candidates[i]));
        same = same && p->candidates[i].same;
    }
    if (t->dry_run)
        return json_pack("{s:I, s:o}", "tokens", (json_int_t)p->tokens, "candidates", candidates);
    return json_pack("{s:I, s:i, s:I, s:b, s:o, s:o, s:o, s:f, s:f, s:{s:f, s:f, s:f, s:f}, s:b}",
                     "tokens", (json_int_t)p->tokens, "experts_active", p->work.experts,
                     "routes_received", (json_int_t)p->work.routes, "same_bits", same, "candidates",
                     candidates, "built_in", plan_json(&p->candidates[0].plan), "best",
                     plan_json(&p->candidates[p->best].plan), "default_us", p->default_us, "us",
                     p->us, "gain", "median", p->gain.median, "low", p->gain.low, "high",
                     p->gain.high, "confidence", p->gain.confidence, "wins", p->wins);
}

static int print_json(const tune *t) {
    const bench *b = t->b;
    const bench_arm *arm = &b->arms[0];
    json_t *points = json_array();
    for (int i = 0; i < b->n_tokens; i++)
        json_array_append_new(points, point_json(t, &t->points[i]));
    json_t *geometry = b->geometry != NULL ? json_string(b->geometry->name) : json_null();
    json_t *object =
        json_pack("{s:s, s:s, s:s, s:o, s:s, s:o, s:I, s:I, s:b, s:o}", "command", b->command,
                  "date", b->date, "device_model", arm->info.model, "geometry", geometry, "layer",
                  arm->layer.name, "key", tune_key_json(&t->key), "rounds", (json_int_t)t->rounds,
                  "iterations", (json_int_t)t->iterations, "dry_run", t->dry_run, "points", points);
    json_object_update_new(object, bench_environment_json(&arm->info, &arm->record));
    return report_json(object);
}

static void print_candidates(const tune *t) {
    printf("%7s  %s\n", "tokens", "plans: tile/lag, the built-in choice first");
    for (int i = 0; i < t->b->n_tokens; i++) {
        const tune_point *p = &t->points[i];
        printf("%7" PRId64 " ", p->tokens);
        for (int j = 0; j < p->n; j++) {
            const megamoe_plan *plan = &p->candidates[j].plan;
            char lag[TUNE_LAG_BYTES];
            printf(" %" PRId32 "/%s", plan->token_tile, tune_lag(plan->lag, lag));
        }
        printf("\n");
    }
}

static void print_points(const tune *t) {
    printf("%7s  %8s %8s %10s  %8s %8s %10s  %7s  %s\n", "tokens", "built-in", "lag", "us", "best",
           "lag", "us", "gain", "of 99 %");
    for (int i = 0; i < t->b->n_tokens; i++) {
        const tune_point *p = &t->points[i];
        const megamoe_plan *built_in = &p->candidates[0].plan;
        const megamoe_plan *best = &p->candidates[p->best].plan;
        char lag[TUNE_LAG_BYTES];
        printf("%7" PRId64 "  %8" PRId32 " %8s %10.1f  ", p->tokens, built_in->token_tile,
               tune_lag(built_in->lag, lag), p->default_us);
        printf("%8" PRId32 " %8s %10.1f  ", best->token_tile, tune_lag(best->lag, lag), p->us);
        printf("%6.2f%%  %.2f..%.2f%%%s\n", 100 * (p->gain.median - 1), 100 * (p->gain.low - 1),
               100 * (p->gain.high - 1), p->wins ? "  taken" : "");
    }
}

int tune_print(const tune *t) {
    if (t->json)
        return print_json(t);
    report_line("layer", "%s", t->b->arms[0].layer.name);
    report_line("device", "%s, %s", t->b->arms[0].info.name, t->b->arms[0].info.model);
    tune_print_key(&t->key);
    printf("\n");
    if (t->dry_run)
        print_candidates(t);
    else
        print_points(t);
    return EXIT_DONE;
}
