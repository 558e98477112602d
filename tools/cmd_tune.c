/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe tune: measures the plans of a GPU's forwards, and keeps those that are faster. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "options.h"
#include "ranks.h"
#include "tune.h"

enum { ROUNDS = 15, LEAST_ROUNDS = 9, ITERATIONS = 20, WARM_UPS = 5 };

/* ---- Measuring ---- */

/* Only what is outside of the noise; else the built-in choice, so that no neighbour's plan serves.
 */
static int store(const tune *t) {
    megamoe_tuned_plan plans[BENCH_MAX_POINTS];
    int32_t n = 0;
    for (int i = 0; i < t->b->n_tokens; i++) {
        const tune_point *p = &t->points[i];
        megamoe_tuned_plan *plan = &plans[n++];
        *plan = (megamoe_tuned_plan){
            .tokens = p->tokens, .default_us = p->default_us, .us = p->default_us, .gain = 1};
        if (!p->wins)
            continue;
        plan->token_tile = p->candidates[p->best].plan.token_tile;
        plan->lag = p->candidates[p->best].plan.lag;
        plan->us = p->us;
        plan->gain = p->gain.median;
    }
    TRY_LIBRARY(megamoe_tuned_store(t->path, &t->key, plans, n));
    if (!t->json)
        report_line("stored", "%s", t->path);
    return EXIT_DONE;
}

/* An error for the first plan that computes something else, which no plan may. */
static int check_same(const tune *t) {
    for (int i = 0; i < t->b->n_tokens; i++)
        for (int j = 0; j < t->points[i].n; j++) {
            const tune_candidate *c = &t->points[i].candidates[j];
            char lag[TUNE_LAG_BYTES];
            if (c->same)
                continue;
            report_error("tune: %" PRId64 " tokens: the output with token tile %" PRId32
                         " and lag %s differs from that of the built-in choice",
                         t->points[i].tokens, c->plan.token_tile, tune_lag(c->plan.lag, lag));
            return EXIT_CHECK_FAILED;
        }
    return EXIT_DONE;
}

static int finish(const tune *t) {
    if (t->b->rank != 0)
        return EXIT_DONE;
    TRY(tune_print(t));
    if (t->dry_run)
        return EXIT_DONE;
    TRY(store(t));
    return check_same(t);
}

static int execute(tune *t) {
    bench *b = t->b;
    TRY(bench_open(b));
    t->key = (megamoe_tuned_key)MEGAMOE_INIT(megamoe_tuned_key);
    TRY_LIBRARY(megamoe_tuned_key_of(b->arms[0].layer.layer, bench_gpu_workspace(b->arms[0].gpu),
                                     b->routing.name, &t->key));
    TRY(tune_measure(t));
    bench_gpu_record_end(bench_gpu_device(b->arms[0].gpu), &b->arms[0].record);
    return finish(t);
}

static int measure(tune *t) {
    bench *b = t->b;
    if (!ranks_on_gpu(b->request->base.device))
        return report_error("tune: a forward on the CPU has no plan to choose; --device is cuda or "
                            "cuda:N");
    TRY(bench_arms_read(b));
    TRY(bench_choose_tokens(b));
    const int code = execute(t);
    if (code != EXIT_DONE && b->ranks > 1)
        megamoe_comm_abort(b->comm);
    bench_close(b);
    return code;
}

/* ---- The command ---- */

static int open_tune(tune **t) {
    *t = calloc(1, sizeof **t);
    if (*t != NULL)
        (*t)->b = calloc(1, sizeof *(*t)->b);
    return *t != NULL && (*t)->b != NULL ? EXIT_DONE : report_error("out of memory");
}

/* Before anything is measured: it would be lost without a place. */
static int choose_path(const char *file, tune *t) {
    if (file == NULL)
        TRY_LIBRARY(megamoe_tuned_path(t->path, sizeof t->path));
    else if (snprintf(t->path, sizeof t->path, "%s", file) >= TUNE_PATH_BYTES)
        return report_error("--cache %s: longer than %d bytes", file, TUNE_PATH_BYTES - 1);
    return EXIT_DONE;
}

static void close_tune(tune *t) {
    if (t != NULL)
        free(t->b);
    free(t);
}

/* What the options say together. */
static int check(const bench_request *request, bool show, bool forget) {
    if (show && forget)
        return report_error("tune: --show and --forget exclude each other");
    if ((show || forget) && (request->path != NULL || request->model != NULL))
        return report_error("tune: --show and --forget choose entries by --geometry, --format, "
                            "--capacity and --routing");
    if ((request->path != NULL) + (request->model != NULL) + (request->geometry != NULL) > 1)
        return report_error("tune: PATH, --model and --geometry exclude each other");
    return EXIT_DONE;
}

static int look_into_file(const tune *t, const char *routing, bool forget) {
    const bench_request *request = t->b->request;
    tune_filter filter = {.capacity = request->capacity, .routing = routing};
    if (request->base.format != BENCH_FORMAT_OF_SOURCE)
        filter.format = (megamoe_format)(request->base.format + 1);
    if (request->geometry != NULL) {
        filter.geometry = bench_geometry_find(request->geometry);
        if (filter.geometry == NULL)
            return EXIT_BAD_INPUT;
    }
    return (forget ? tune_forget : tune_show)(t->path, &filter, t->json);
}

int cmd_tune(int argc, char **argv) {
    bench_request request = bench_request_default();
    request.base.device = "cuda";
    request.rounds = ROUNDS;
    request.iterations = ITERATIONS;
    request.warm_ups = WARM_UPS;
    bench_config *base = &request.base;
    const char *file = NULL, *routing = NULL;
    bool show = false, forget = false;
    const option_spec options[] = {
        {"device", OPTION_TEXT, &base->device, "cuda|cuda:N", "(cuda)", 0, 0},
        {"layer", OPTION_INTEGER, &request.layer, "L", "layer of PATH (its only one)", 0,
         INT32_MAX},
        {"model", OPTION_TEXT, &request.model, "NAME", "synthetic weights of a public model", 0, 0},
        {"geometry", OPTION_TEXT, &request.geometry, "NAME",
         "synthetic weights: flash, pro, gpt-oss, ... (flash)", 0, 0},
        {"experts", OPTION_INTEGER, &request.experts, "N", "experts of the layer", 1, 65536},
        {"format", OPTION_CHOICE, &base->format, "mxfp4|nvfp4", "of synthetic weights", 0, 0},
        {"nvfp4", OPTION_CHOICE, &base->nvfp4, "exact|folded", "form of NVFP4 weights (exact)", 0,
         0},
        {"input-scale", OPTION_CHOICE, &base->input_scale, "token|block",
         "one scale per token, or per 128 channels (token)", 0, 0},
        {"accumulate", OPTION_CHOICE, &base->accumulate, "mma|promote",
         "sums over all of K, or over 128 each (mma)", 0, 0},
        {"tokens", OPTION_TEXT, &request.tokens, "LIST|curve", "batch sizes (1 to 8192)", 0, 0},
        OPTION_ROUTING(&routing),
        {"capacity", OPTION_INTEGER, &request.capacity, "N", "of the workspace (8192)", 1,
         BENCH_MAX_TOKENS},
        {"rounds", OPTION_INTEGER, &request.rounds, "N",
         "of the fastest plan beside the built-in choice (15)", LEAST_ROUNDS, BENCH_MAX_ROUNDS},
        {"iterations", OPTION_INTEGER, &request.iterations, "N", "of a plan in a round (20)", 1,
         BENCH_MAX_ITERATIONS},
        {"seed", OPTION_INTEGER, &request.seed, "N", "of weights, input and routes (1)", 0,
         (double)INT64_MAX},
        {"cache", OPTION_TEXT, &file, "FILE", "of plans (plans.json in the user's cache)", 0, 0},
        {"dry-run", OPTION_FLAG, &request.dry_run, NULL, "list the plans, measure none", 0, 0},
        {"show", OPTION_FLAG, &show, NULL, "print what was stored", 0, 0},
        {"forget", OPTION_FLAG, &forget, NULL, "remove what --show prints", 0, 0},
        OPTION_JSON(&request.json)};
    const command_syntax syntax = {"tune",
                                   "[PATH]",
                                   "Finds the fastest plan of a GPU's forwards and keeps it.",
                                   "megamoe tune --device cuda:0 --geometry flash --format mxfp4",
                                   options,
                                   sizeof options / sizeof *options,
                                   0,
                                   1};
    const char *arguments[OPTION_MAX_ARGUMENTS];
    int code;
    if (!options_parse(&syntax, argc, argv, arguments, &code))
        return code;
    request.path = arguments[0];
    if (routing != NULL)
        request.routing = routing;
    TRY(check(&request, show, forget));
    tune *t = NULL;
    code = open_tune(&t);
    if (code == EXIT_DONE) {
        t->b->request = &request;
        t->b->ranks = 1;
        t->rounds = request.rounds;
        t->iterations = request.iterations;
        t->json = request.json;
        t->dry_run = request.dry_run;
        bench_record(t->b, argc, argv);
        code = choose_path(file, t);
    }
    if (code == EXIT_DONE)
        code = show || forget ? look_into_file(t, routing, forget) : measure(t);
    close_tune(t);
    return code;
}
