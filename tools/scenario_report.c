/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"
#include "report.h"
#include "scenario.h"
#include "statistics.h"

/* How one quantity is spread over steps or requests. */
typedef struct distribution {
    int64_t n;
    double mean, p50, p90, p99, max;
} distribution;

/* Steps of more than half of `most` tokens up to `most`. */
typedef struct batch_class {
    int64_t most, steps;
    double p50_us;
} batch_class;

enum { CLASSES = 24 };

/* Of the JSON object, docs/schema/scenario.schema.json; larger where a field changes its meaning.
 */
enum { SCHEMA_VERSION = 1 };

typedef struct summary {
    double busy; /* seconds of steps */
    int64_t decoded, prefilled;
    distribution step_us, tokens, running, waiting;
    distribution wait_ms, answer_ms, request_ms;
    batch_class classes[CLASSES];
    int n_classes;
} summary;

/* Sorts the values. */
static distribution distribution_of(double *values, int64_t n) {
    distribution d = {.n = n};
    if (n == 0)
        return d;
    for (int64_t i = 0; i < n; i++)
        d.mean += values[i] / (double)n;
    d.p50 = statistics_quantile(values, (size_t)n, 0.5);
    d.p90 = statistics_quantile(values, (size_t)n, 0.9);
    d.p99 = statistics_quantile(values, (size_t)n, 0.99);
    d.max = statistics_quantile(values, (size_t)n, 1);
    return d;
}

static double step_us(const simulation_step *s) {
    return s->seconds * 1e6;
}

static double step_tokens(const simulation_step *s) {
    return (double)(s->decoded + s->prefilled);
}

static double step_running(const simulation_step *s) {
    return (double)s->running;
}

static double step_waiting(const simulation_step *s) {
    return (double)s->waiting;
}

static distribution of_steps(const simulation *s, double (*value)(const simulation_step *step),
                             double *scratch) {
    for (int64_t i = 0; i < s->n_steps; i++)
        scratch[i] = value(&s->steps[i]);
    return distribution_of(scratch, s->n_steps);
}

/* When something happened to a request; negative: not yet. */
static double request_started(const simulation_request *r) {
    return r->started;
}

static double request_answered(const simulation_request *r) {
    return r->answered;
}

static double request_ended(const simulation_request *r) {
    return r->ended;
}

/* Milliseconds from arrival, of the requests that have got so far. */
static distribution of_requests(const simulation *s, double (*when)(const simulation_request *r),
                                double *scratch) {
    int64_t n = 0;
    for (int64_t i = 0; i < s->n_requests; i++)
        if (when(&s->requests[i]) >= 0)
            scratch[n++] = 1e3 * (when(&s->requests[i]) - s->requests[i].arrived);
    return distribution_of(scratch, n);
}

static void classify(const simulation *s, summary *sum, double *scratch) {
    for (int64_t most = 1; most <= 2 * LENGTH_MAX && sum->n_classes < CLASSES; most *= 2) {
        int64_t n = 0;
        for (int64_t i = 0; i < s->n_steps; i++) {
            const int64_t tokens = s->steps[i].decoded + s->steps[i].prefilled;
            if (tokens <= most && tokens > most / 2)
                scratch[n++] = step_us(&s->steps[i]);
        }
        if (n > 0)
            sum->classes[sum->n_classes++] =
                (batch_class){most, n, statistics_quantile(scratch, (size_t)n, 0.5)};
    }
}

/* False: out of memory. */
static bool summarize(const simulation *s, summary *sum) {
    const int64_t most = s->n_steps > s->n_requests ? s->n_steps : s->n_requests;
    double *scratch = malloc((size_t)most * sizeof *scratch);
    *sum = (summary){0};
    if (scratch == NULL)
        return false;
    for (int64_t i = 0; i < s->n_steps; i++) {
        sum->busy += s->steps[i].seconds;
        sum->decoded += s->steps[i].decoded;
        sum->prefilled += s->steps[i].prefilled;
    }
    sum->step_us = of_steps(s, step_us, scratch);
    sum->tokens = of_steps(s, step_tokens, scratch);
    sum->running = of_steps(s, step_running, scratch);
    sum->waiting = of_steps(s, step_waiting, scratch);
    sum->wait_ms = of_requests(s, request_started, scratch);
    sum->answer_ms = of_requests(s, request_answered, scratch);
    sum->request_ms = of_requests(s, request_ended, scratch);
    classify(s, sum, scratch);
    free(scratch);
    return true;
}

static double tokens_per_second(const summary *sum) {
    return (double)(sum->decoded + sum->prefilled) / sum->busy;
}

/* ---- JSON ---- */

static json_t *distribution_json(const distribution *d) {
    return json_pack("{s:I, s:f, s:f, s:f, s:f, s:f}", "n", (json_int_t)d->n, "mean", d->mean,
                     "p50", d->p50, "p90", d->p90, "p99", d->p99, "max", d->max);
}

/* What the layers are taken from. */
static const char *layers_name(const scenario *s) {
    return s->request->path != NULL ? s->request->path : s->stack.layers[0].name;
}

static const char *nvfp4_name(const scenario *s) {
    return s->stack.layers[0].nvfp4 == MEGAMOE_NVFP4_FOLDED ? "folded" : "exact";
}

static json_t *layer_json(const scenario *s) {
    const stack *k = &s->stack;
    const megamoe_layer_desc *desc = &k->options.desc;
    json_t *object = json_pack(
        "{s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:I}", "layer", layers_name(s), "format",
        megamoe_format_name(desc->format), "hidden", desc->hidden, "intermediate",
        desc->intermediate, "experts", desc->experts, "experts_of_model", k->layers[0].all_experts,
        "topk", desc->topk, "layers", k->options.layers, "layers_distinct", k->distinct,
        "layer_bytes", (json_int_t)megamoe_layer_bytes(k->layers[0].layer));
    if (k->ranks > 1)
        json_object_set_new(object, "ranks", json_integer(k->ranks));
    if (desc->format == MEGAMOE_FORMAT_NVFP4)
        json_object_set_new(object, "nvfp4", json_string(nvfp4_name(s)));
    json_object_update_new(object,
                           json_pack("{s:s, s:s, s:s}", "activations",
                                     s->request->activations ? "int8" : "e4m3", "input_scale",
                                     s->request->input_scale ? "block" : "token", "accumulate",
                                     s->request->accumulate ? "promote" : "mma"));
    return object;
}

static json_t *load_json(const scenario *s) {
    const scenario_request *r = s->request;
    const simulation_options *o = &s->options;
    json_t *object =
        json_pack("{s:I, s:I, s:f, s:s, s:I, s:I}", "sequences", (json_int_t)o->sequences,
                  "requests", (json_int_t)o->requests, "arrivals_per_s", o->arrivals, "routing",
                  s->routing.name, "seed", (json_int_t)r->seed, "most_steps", (json_int_t)o->steps);
    if (o->workload != WORKLOAD_DECODE)
        json_object_update_new(object, json_pack("{s:s, s:I}", "prompt_tokens", r->prompt, "chunk",
                                                 (json_int_t)o->chunk));
    if (o->workload != WORKLOAD_PREFILL)
        json_object_set_new(object, "output_tokens", json_string(r->output));
    return object;
}

static const char *workload_name(const scenario *s) {
    static const char *const names[] = {"decode", "prefill", "mixed"};
    return names[s->options.workload];
}

static json_t *batches_json(const summary *sum) {
    json_t *batches = json_array();
    for (int i = 0; i < sum->n_classes; i++) {
        const batch_class *c = &sum->classes[i];
        json_array_append_new(batches, json_pack("{s:I, s:I, s:I, s:f}", "tokens_min",
                                                 (json_int_t)(c->most / 2 + 1), "tokens_max",
                                                 (json_int_t)c->most, "steps", (json_int_t)c->steps,
                                                 "step_us_p50", c->p50_us));
    }
    return batches;
}

int scenario_print_json(const scenario *s) {
    const simulation *m = &s->simulation;
    summary sum;
    if (!summarize(m, &sum))
        return report_error("out of memory");
    json_t *object =
        json_pack("{s:i, s:s}", "schema_version", SCHEMA_VERSION, "scenario", workload_name(s));
    json_object_update_new(object, layer_json(s));
    json_object_update_new(object, load_json(s));
    json_object_update_new(object,
                           json_pack("{s:s, s:s, s:s, s:i, s:s, s:s}", "device", s->device.name,
                                     "model", s->device.model, "tier", s->device.tier, "threads",
                                     s->device.threads, "date", s->date, "command", s->command));
    json_object_update_new(
        object, bench_environment_json(&s->device, s->stack.gpu != NULL ? &s->record : NULL));
    json_object_update_new(
        object,
        json_pack("{s:I, s:I, s:f, s:f, s:I, s:I, s:f, s:f, s:f}", "steps", (json_int_t)m->n_steps,
                  "requests_ended", (json_int_t)m->ended, "seconds", m->seconds, "busy_seconds",
                  sum.busy, "tokens_decoded", (json_int_t)sum.decoded, "tokens_prefilled",
                  (json_int_t)sum.prefilled, "tokens_per_s", tokens_per_second(&sum),
                  "experts_active_mean", s->stack.active / (double)s->stack.measured,
                  "load_imbalance_mean", s->stack.imbalance / (double)s->stack.measured));
    json_object_update_new(
        object,
        json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "step_us",
                  distribution_json(&sum.step_us), "step_tokens", distribution_json(&sum.tokens),
                  "running", distribution_json(&sum.running), "waiting",
                  distribution_json(&sum.waiting), "wait_ms", distribution_json(&sum.wait_ms),
                  "answer_ms", distribution_json(&sum.answer_ms), "request_ms",
                  distribution_json(&sum.request_ms), "batches", batches_json(&sum)));
    return report_json(object);
}

/* ---- Text ---- */

static void print_setting(const scenario *s) {
    const stack *k = &s->stack;
    const megamoe_layer_desc *desc = &k->options.desc;
    const simulation_options *o = &s->options;
    char size[REPORT_SIZE_BYTES];
    report_line(
        "layers", "%d of %s: %s%s%s, hidden %d, intermediate %d, %d experts, top-%d, %s each",
        k->options.layers, layers_name(s), megamoe_format_name(desc->format),
        desc->format == MEGAMOE_FORMAT_NVFP4 ? " " : "",
        desc->format == MEGAMOE_FORMAT_NVFP4 ? nvfp4_name(s) : "", desc->hidden, desc->intermediate,
        desc->experts, desc->topk, report_size(megamoe_layer_bytes(k->layers[0].layer), size));
    if (desc->experts < k->layers[0].all_experts)
        report_line("", "a share: the first %d of %d experts", desc->experts,
                    k->layers[0].all_experts);
    if (k->distinct < k->options.layers)
        report_line("", "weights of %d layer%s, used again for the others%s", k->distinct,
                    k->distinct == 1 ? "" : "s", s->request->path == NULL ? "; see --memory" : "");
    report_line("device", "%s, %s, %s", s->device.name, s->device.model, s->device.tier);
    if (k->ranks > 1)
        report_line("ranks",
                    "%d processes, each with the requests below; a step's time is that of "
                    "the slowest",
                    k->ranks);
    if (o->arrivals > 0)
        report_line("requests", "%" PRId64 " arriving at random, %g in a second", o->requests,
                    o->arrivals);
    else
        report_line("requests", "%" PRId64 ", all there at the beginning", o->requests);
    if (o->workload != WORKLOAD_DECODE)
        report_line("", "prompts of %s tokens, computed %" PRId64 " at a time", s->request->prompt,
                    o->chunk);
    if (o->workload != WORKLOAD_PREFILL)
        report_line("", "outputs of %s tokens", s->request->output);
    report_line("", "at most %" PRId64 " at once", o->sequences);
    report_line("routing",
                "%s; mean of steps and layers: %.1f experts active, the largest load "
                "%.2f times the mean one",
                s->routing.name, s->stack.active / (double)s->stack.measured,
                s->stack.imbalance / (double)s->stack.measured);
    report_line("seed", "%" PRId64, s->request->seed);
}

static void print_distribution(const char *name, const distribution *d) {
    if (d->n > 0)
        printf("%-18s %10.1f %10.1f %10.1f %10.1f %10.1f\n", name, d->mean, d->p50, d->p90, d->p99,
               d->max);
}

int scenario_print_text(const scenario *s) {
    const simulation *m = &s->simulation;
    summary sum;
    if (!summarize(m, &sum))
        return report_error("out of memory");
    print_setting(s);
    printf("\n%-18s %10s %10s %10s %10s %10s\n", workload_name(s), "mean", "p50", "p90", "p99",
           "max");
    print_distribution("step us", &sum.step_us);
    print_distribution("tokens in a step", &sum.tokens);
    print_distribution("requests running", &sum.running);
    print_distribution("requests waiting", &sum.waiting);
    print_distribution("ms until started", &sum.wait_ms);
    print_distribution("ms until answered", &sum.answer_ms);
    print_distribution("ms until ended", &sum.request_ms);
    printf("\n%-18s %10s %10s %10s\n", "tokens in a step", "steps", "of all", "p50 us");
    for (int i = 0; i < sum.n_classes; i++) {
        const batch_class *c = &sum.classes[i];
        const int64_t least = c->most / 2 + 1;
        char range[48];
        snprintf(range, sizeof range, least < c->most ? "%" PRId64 "..%" PRId64 : "%" PRId64, least,
                 c->most);
        printf("%-18s %10" PRId64 " %8.1f %% %10.1f\n", range, c->steps,
               100 * (double)c->steps / (double)m->n_steps, c->p50_us);
    }
    printf("\n");
    report_line("steps", "%" PRId64 " in %.3f s, busy for %.3f s (%.0f %%)", m->n_steps, m->seconds,
                sum.busy, 100 * sum.busy / m->seconds);
    report_line("ended", "%" PRId64 " of %" PRId64 " requests", m->ended, m->n_requests);
    report_line("tokens", "%.0f in a second of steps%s, through all layers",
                tokens_per_second(&sum), s->stack.ranks > 1 ? ", of each rank" : "");
    return EXIT_DONE;
}
