/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests that arrive, wait, and share the steps of an engine that batches continuously, in
 * virtual time: the clock goes on by what each step costs, which a callback says, and jumps where
 * there is nothing to do. So a result depends on the options and on those costs alone.
 *
 * Requests are taken in the order of arrival, at most `sequences` at a time. In each step
 *   decode    each of them computes one token, as often as it has output tokens
 *   prefill   they compute their prompts, in order, at most `chunk` tokens of all together
 *   mixed     those whose prompt is done compute one token each, and the prompts of the others fill
 *             the step up to `chunk` tokens; a prompt's last token gives the first output token
 */
#ifndef SIMULATION_H
#define SIMULATION_H

#include <stdbool.h>
#include <stdint.h>

typedef enum workload { WORKLOAD_DECODE, WORKLOAD_PREFILL, WORKLOAD_MIXED } workload;

#define WORKLOADS "decode|prefill|mixed"

enum { LENGTH_MAX = 1 << 20 };

/* What numbers of tokens are drawn from, all in 1..LENGTH_MAX. */
typedef struct lengths {
    enum { LENGTHS_UNIFORM, LENGTHS_LOGNORMAL } kind;
    double a, b; /* first and last; median and deviation of the logarithm */
} lengths;

/* "N", "A-B" (uniform) or "lognormal:MEDIAN:SIGMA". False: none of them. */
bool lengths_parse(const char *text, lengths *l);

typedef struct simulation_options {
    workload workload;
    int64_t requests;
    double arrivals; /* per second, a Poisson process; 0: all are there at the beginning */
    lengths prompt, output;
    int64_t sequences;
    int64_t chunk; /* mixed: at least `sequences` */
    int64_t steps; /* ends after so many, if it has not before */
    uint64_t seed;
} simulation_options;

/* Tokens of the largest step that there can be. */
int64_t simulation_most_tokens(const simulation_options *options);

typedef struct simulation_request {
    int64_t prompt, output; /* tokens; those that the workload does not compute are 0 */
    /* Virtual seconds; negative: not yet. */
    double arrived, started;
    double answered; /* the first output token, or the end of the prompt, was there */
    double ended;
} simulation_request;

typedef struct simulation_step {
    double begun, seconds;
    int64_t decoded, prefilled; /* tokens */
    int64_t running, waiting;   /* requests */
} simulation_step;

/* The time of a step of `tokens` tokens; a code that is not 0 ends the simulation. */
typedef int (*simulation_cost_fn)(void *user, int64_t step, int64_t tokens, double *seconds);

typedef struct simulation {
    simulation_request *requests; /* in the order of arrival */
    int64_t n_requests;
    simulation_step *steps;
    int64_t n_steps;
    int64_t ended; /* requests */
    double seconds;
} simulation;

enum { SIMULATION_NO_MEMORY = -1 };

/* Returns 0, SIMULATION_NO_MEMORY or the cost's code. simulation_close is due in any case. */
int simulation_run(const simulation_options *options, simulation_cost_fn cost, void *user,
                   simulation *s);

void simulation_close(simulation *s);

#endif
