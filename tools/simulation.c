/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "simulation.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "random.h"

/* ---- Lengths ---- */

/* Reads a number up to `end`; returns what is behind it, or NULL. */
static const char *read_number(const char *text, char end, double *value) {
    char *behind;
    if (*text < '0' || *text > '9')
        return NULL;
    *value = strtod(text, &behind);
    return *behind == end ? behind + (end != '\0') : NULL;
}

static bool is_length(double value) {
    return value >= 1 && value <= LENGTH_MAX && value == floor(value);
}

bool lengths_parse(const char *text, lengths *l) {
    static const char lognormal[] = "lognormal:";
    if (strncmp(text, lognormal, sizeof lognormal - 1) == 0) {
        const char *sigma = read_number(text + sizeof lognormal - 1, ':', &l->a);
        l->kind = LENGTHS_LOGNORMAL;
        return sigma != NULL && read_number(sigma, '\0', &l->b) != NULL && l->a >= 1 &&
               l->a <= LENGTH_MAX && l->b <= 10;
    }
    l->kind = LENGTHS_UNIFORM;
    if (read_number(text, '\0', &l->a) != NULL) {
        l->b = l->a;
        return is_length(l->a);
    }
    const char *last = read_number(text, '-', &l->a);
    return last != NULL && read_number(last, '\0', &l->b) != NULL && is_length(l->a) &&
           is_length(l->b) && l->a <= l->b;
}

static int64_t draw_length(const lengths *l, uint64_t key, uint64_t index) {
    if (l->kind == LENGTHS_UNIFORM)
        return (int64_t)l->a + (int64_t)random_below(key, index, (uint64_t)(l->b - l->a) + 1);
    /* G. E. P. Box and M. E. Muller's pair of normal numbers, of which one is used. */
    const double radius = sqrt(-2 * log(random_uniform(key, 2 * index)));
    const double normal = radius * cos(2 * M_PI * random_uniform(key, 2 * index + 1));
    return (int64_t)fmin(fmax(round(l->a * exp(l->b * normal)), 1), LENGTH_MAX);
}

/* ---- Requests ---- */

/* Kinds of numbers that are drawn for each request. */
enum { DRAW_GAP, DRAW_PROMPT, DRAW_OUTPUT };

static void draw_requests(const simulation_options *o, simulation *s) {
    const uint64_t key = random_key(o->seed, KEY_ARRIVALS);
    const uint64_t gaps = random_key(key, DRAW_GAP);
    double now = 0;
    for (int64_t i = 0; i < o->requests; i++) {
        const uint64_t index = (uint64_t)i;
        if (o->arrivals > 0)
            now -= log(random_uniform(gaps, index)) / o->arrivals;
        simulation_request *r = &s->requests[i];
        *r = (simulation_request){.arrived = now, .started = -1, .answered = -1, .ended = -1};
        if (o->workload != WORKLOAD_DECODE)
            r->prompt = draw_length(&o->prompt, random_key(key, DRAW_PROMPT), index);
        if (o->workload != WORKLOAD_PREFILL)
            r->output = draw_length(&o->output, random_key(key, DRAW_OUTPUT), index);
    }
}

/* ---- Steps ---- */

/* A request that has been started and not ended. */
typedef struct sequence {
    simulation_request *request;
    int64_t prompt_left, output_left;
    int64_t share; /* of the prompt, in the step at hand */
} sequence;

typedef struct engine {
    const simulation_options *options;
    simulation *result;
    sequence *sequences; /* in the order of arrival */
    int64_t running;
    int64_t next;    /* the first request that has not been started */
    int64_t arrived; /* the first one that has not arrived */
    double now;
} engine;

static void start_requests(engine *e) {
    simulation *s = e->result;
    while (e->arrived < s->n_requests && s->requests[e->arrived].arrived <= e->now)
        e->arrived++;
    while (e->running < e->options->sequences && e->next < e->arrived) {
        simulation_request *r = &s->requests[e->next++];
        r->started = e->now;
        e->sequences[e->running++] = (sequence){r, r->prompt, r->output, 0};
    }
}

/* Says what each sequence computes. */
static void compose(engine *e, simulation_step *step) {
    for (int64_t i = 0; i < e->running; i++)
        step->decoded += e->sequences[i].prompt_left == 0;
    for (int64_t i = 0; i < e->running; i++) {
        sequence *q = &e->sequences[i];
        if (q->prompt_left == 0)
            continue;
        const int64_t room = e->options->chunk - step->decoded - step->prefilled;
        q->share = q->prompt_left < room ? q->prompt_left : room;
        step->prefilled += q->share;
    }
}

/* After the step: what its tokens were for. Sequences that have ended make room. */
static void advance(engine *e) {
    int64_t kept = 0;
    for (int64_t i = 0; i < e->running; i++) {
        sequence q = e->sequences[i];
        const bool prefilling = q.prompt_left > 0;
        if (prefilling)
            q.prompt_left -= q.share;
        if (q.prompt_left == 0) {
            if (q.request->answered < 0)
                q.request->answered = e->now;
            q.output_left -= q.output_left > 0;
        }
        if (q.prompt_left > 0 || q.output_left > 0) {
            e->sequences[kept++] = q;
        } else {
            q.request->ended = e->now;
            e->result->ended++;
        }
    }
    e->running = kept;
}

static int run_steps(engine *e, simulation_cost_fn cost, void *user) {
    simulation *s = e->result;
    while (s->n_steps < e->options->steps) {
        start_requests(e);
        if (e->running == 0 && e->next == s->n_requests)
            break;
        if (e->running == 0) {
            e->now = s->requests[e->next].arrived;
            continue;
        }
        simulation_step *step = &s->steps[s->n_steps];
        *step = (simulation_step){
            .begun = e->now, .running = e->running, .waiting = e->arrived - e->next};
        compose(e, step);
        const int code = cost(user, s->n_steps, step->decoded + step->prefilled, &step->seconds);
        if (code != 0)
            return code;
        s->n_steps++;
        e->now += step->seconds;
        advance(e);
    }
    s->seconds = e->now;
    return 0;
}

int64_t simulation_most_tokens(const simulation_options *options) {
    return options->workload == WORKLOAD_DECODE ? options->sequences : options->chunk;
}

int simulation_run(const simulation_options *options, simulation_cost_fn cost, void *user,
                   simulation *s) {
    *s = (simulation){.n_requests = options->requests};
    engine e = {.options = options, .result = s};
    s->requests = calloc((size_t)options->requests, sizeof *s->requests);
    s->steps = malloc((size_t)options->steps * sizeof *s->steps);
    e.sequences = malloc((size_t)options->sequences * sizeof *e.sequences);
    int code = SIMULATION_NO_MEMORY;
    if (s->requests != NULL && s->steps != NULL && e.sequences != NULL) {
        draw_requests(options, s);
        code = run_steps(&e, cost, user);
    }
    free(e.sequences);
    return code;
}

void simulation_close(simulation *s) {
    free(s->requests);
    free(s->steps);
}
