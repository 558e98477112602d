/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures plans by turns. A first round has all candidates, a few more have those that are left,
 * and then the fastest one alone is measured beside the built-in choice: it was chosen for being
 * fast in the rounds before, so only new ones tell how fast it is. A GPU's clocks change meanwhile;
 * so the built-in choice is measured again and again, and candidates are compared with what it
 * takes before and after them.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "monotonic.h"
#include "progress.h"
#include "tune.h"

enum {
    SCREENING_ROUNDS = 3,
    GROUP = 8, /* candidates between two turns of the built-in choice */
    RANKS_MAX = 64
};

/* Candidates that are slower than the fastest by more than this are given up after a round. */
static const double NEAR = 0.95;
/* The least gain that is worth a plan of its own, and how sure it has to be. */
static const double WORTH = 1.005, SURE = 0.99;
/* For a GPU that has rested and then meets its power limit, calls become slower for 100 ms. */
static const double SETTLING_MS = 200;

/* What the rounds of a point have found, on its way to medians. */
typedef struct screening {
    double ratios[TUNE_MAX_CANDIDATES][SCREENING_ROUNDS]; /* as those of tune_candidate */
    double built_in_us[SCREENING_ROUNDS];
    bool given_up[TUNE_MAX_CANDIDATES];
} screening;

static bench_gpu *gpu_of(const tune *t) {
    return t->b->arms[0].gpu;
}

/* ---- Candidates ---- */

static int list_candidates(const tune *t, tune_point *p) {
    megamoe_plan plans[TUNE_MAX_CANDIDATES];
    p->n = megamoe_plan_candidates(t->b->arms[0].layer.layer, bench_gpu_workspace(gpu_of(t)),
                                   p->tokens, plans, TUNE_MAX_CANDIDATES);
    if (p->n > TUNE_MAX_CANDIDATES)
        p->n = TUNE_MAX_CANDIDATES;
    for (int i = 0; i < p->n; i++)
        p->candidates[i] = (tune_candidate){.plan = plans[i]};
    return EXIT_DONE;
}

/* ---- Bits ---- */

/* Whether all ranks say yes. */
static int agree(const tune *t, bool mine, bool *all) {
    bool answers[RANKS_MAX];
    TRY_LIBRARY(megamoe_comm_allgather(t->b->comm, &mine, answers, sizeof mine));
    *all = true;
    for (int32_t r = 0; r < t->b->ranks; r++)
        *all = *all && answers[r];
    return EXIT_DONE;
}

/* The output of a plan, which starts from one that no forward leaves. */
static int compute(const tune *t, const megamoe_plan *plan, int64_t tokens, uint16_t *y) {
    TRY(bench_gpu_set_plan(gpu_of(t), plan));
    TRY(bench_gpu_spoil_output(gpu_of(t)));
    TRY(bench_gpu_set_batch(gpu_of(t), tokens));
    return bench_gpu_get_output(gpu_of(t), y);
}

static int compare_with(const tune *t, tune_point *p, const uint16_t *expected, uint16_t *y,
                        size_t bytes) {
    for (int i = 1; i < p->n; i++) {
        tune_candidate *c = &p->candidates[i];
        TRY(compute(t, &c->plan, p->tokens, y));
        TRY(agree(t, memcmp(y, expected, bytes) == 0, &c->same));
    }
    return EXIT_DONE;
}

/* Compares the output of every candidate with that of the built-in choice. */
static int check_bits(const tune *t, tune_point *p) {
    const size_t bytes =
        (size_t)p->tokens * (size_t)t->b->arms[0].layer.desc.hidden * sizeof(uint16_t);
    uint16_t *expected = malloc(bytes), *y = malloc(bytes);
    const megamoe_plan built_in = MEGAMOE_INIT(megamoe_plan);
    int code = expected != NULL && y != NULL
                   ? compute(t, &built_in, p->tokens, expected)
                   : report_error("out of memory for %" PRId64 " tokens", p->tokens);
    if (code == EXIT_DONE)
        code = compare_with(t, p, expected, y, bytes);
    p->candidates[0].same = true;
    free(y);
    free(expected);
    return code;
}

/* ---- Times ---- */

/* The median time of a plan in one round. `scratch` holds the iterations. */
static int measure(const tune *t, const megamoe_plan *plan, double *scratch, double *us) {
    TRY(bench_gpu_set_plan(gpu_of(t), plan));
    TRY(bench_gpu_time(gpu_of(t), BENCH_FORWARD, (int)t->iterations, scratch, NULL, NULL));
    *us = statistics_median(scratch, (size_t)t->iterations);
    return EXIT_DONE;
}

/* Turns of the built-in choice that do not count: measured first, it would be at an advantage. */
static int settle(const tune *t, const tune_point *p, double *scratch) {
    const double begin = monotonic_ms();
    for (bool settled = false; !settled;) {
        double us;
        TRY(measure(t, &p->candidates[0].plan, scratch, &us));
        TRY(agree(t, monotonic_ms() - begin >= SETTLING_MS, &settled));
    }
    return EXIT_DONE;
}

/* Medians over the rounds that a candidate was in; its time at the clocks of the built-in choice's.
 */
static void summarize(tune_point *p, const screening *s, int i) {
    tune_candidate *c = &p->candidates[i];
    double us[SCREENING_ROUNDS], ratios[SCREENING_ROUNDS];
    for (int r = 0; r < c->rounds; r++) {
        us[r] = s->built_in_us[r] / s->ratios[i][r];
        ratios[r] = s->ratios[i][r];
    }
    c->us = statistics_median(us, (size_t)c->rounds);
    c->ratio = statistics_median(ratios, (size_t)c->rounds);
}

/* The next candidates from `*j` on that are left, in the order of the round; how many. */
static int next_group(const tune_point *p, const screening *s, int round, int *j,
                      int group[GROUP]) {
    int n = 0;
    for (; *j < p->n && n < GROUP; ++*j) {
        const int i = round % 2 == 0 ? *j : p->n - *j;
        if (!s->given_up[i])
            group[n++] = i;
    }
    return n;
}

/* One turn of each candidate that is left, in the other order in every second round. */
static int screen_round(const tune *t, tune_point *p, screening *s, int round, double *scratch) {
    double built_in[TUNE_MAX_CANDIDATES / GROUP + 2];
    size_t turns = 0;
    TRY(measure(t, &p->candidates[0].plan, scratch, &built_in[turns++]));
    int group[GROUP], n;
    for (int j = 1; (n = next_group(p, s, round, &j, group)) > 0;) {
        double us[GROUP];
        for (int k = 0; k < n; k++)
            TRY(measure(t, &p->candidates[group[k]].plan, scratch, &us[k]));
        TRY(measure(t, &p->candidates[0].plan, scratch, &built_in[turns++]));
        const double before = built_in[turns - 2], after = built_in[turns - 1];
        for (int k = 0; k < n; k++) {
            s->ratios[group[k]][round] = (before + (after - before) * (k + 1) / (n + 1)) / us[k];
            p->candidates[group[k]].rounds++;
        }
    }
    s->built_in_us[round] = statistics_median(built_in, turns);
    s->ratios[0][round] = 1;
    p->candidates[0].rounds++;
    return EXIT_DONE;
}

/* Finds the fastest and gives up the slow ones; the built-in choice stays to be compared with. */
static void sort_out(tune_point *p, screening *s) {
    p->best = 0;
    for (int i = 0; i < p->n; i++) {
        if (s->given_up[i])
            continue;
        summarize(p, s, i);
        if (p->candidates[i].ratio > p->candidates[p->best].ratio)
            p->best = i;
    }
    for (int i = 1; i < p->n; i++)
        s->given_up[i] |= p->candidates[i].ratio < NEAR * p->candidates[p->best].ratio;
}

static int screen(const tune *t, tune_point *p, screening *s, double *scratch) {
    for (int i = 0; i < p->n; i++)
        s->given_up[i] = !p->candidates[i].same;
    TRY(settle(t, p, scratch));
    for (int round = 0; round < SCREENING_ROUNDS; round++) {
        TRY(screen_round(t, p, s, round, scratch));
        sort_out(p, s);
    }
    return EXIT_DONE;
}

/* The fastest against the built-in choice, which goes first in every second round. */
static int duel(const tune *t, tune_point *p, double *scratch, double *ratios) {
    const size_t rounds = (size_t)t->rounds;
    double *us = ratios + rounds, *default_us = us + rounds;
    if (p->best == 0) {
        p->gain = (statistics_interval){1, 1, 1, 1};
        p->default_us = p->us = p->candidates[0].us;
        return EXIT_DONE;
    }
    for (size_t round = 0; round < rounds; round++) {
        for (int turn = 0; turn < 2; turn++) {
            const bool built_in = (turn + (int)round) % 2 == 0;
            const tune_candidate *c = &p->candidates[built_in ? 0 : p->best];
            TRY(measure(t, &c->plan, scratch, built_in ? &default_us[round] : &us[round]));
        }
        ratios[round] = default_us[round] / us[round];
    }
    p->gain = statistics_of_pairs(ratios, rounds, SURE);
    p->default_us = statistics_median(default_us, rounds);
    p->us = statistics_median(us, rounds);
    p->wins = p->gain.low > 1 && p->gain.median >= WORTH;
    return EXIT_DONE;
}

static int measure_point(const tune *t, tune_point *p) {
    const bench_routes routes = bench_routes_of(t->b);
    if (!bench_routes_count(&routes, p->tokens, t->b->ranks, 0, 0, &p->work))
        return report_error("out of memory for %" PRId64 " tokens", p->tokens);
    TRY(check_bits(t, p));
    screening *s = calloc(1, sizeof *s);
    double *scratch = malloc((size_t)t->iterations * sizeof *scratch);
    double *ratios = malloc(3 * (size_t)t->rounds * sizeof *ratios);
    int code = s != NULL && scratch != NULL && ratios != NULL
                   ? screen(t, p, s, scratch)
                   : report_error("out of memory for %" PRId64 " rounds", t->rounds);
    if (code == EXIT_DONE)
        code = duel(t, p, scratch, ratios);
    free(ratios);
    free(scratch);
    free(s);
    return code;
}

int tune_measure(tune *t) {
    const bench *b = t->b;
    progress bar;
    const megamoe_progress shown =
        b->rank == 0 && !t->dry_run ? progress_begin(&bar, "measuring") : (megamoe_progress){0};
    int code = EXIT_DONE;
    for (int i = 0; code == EXIT_DONE && i < b->n_tokens; i++) {
        if (shown.fn != NULL)
            shown.fn(shown.user, (uint64_t)i, (uint64_t)b->n_tokens);
        t->points[i].tokens = b->tokens[i];
        code = list_candidates(t, &t->points[i]);
        if (code == EXIT_DONE && !t->dry_run)
            code = measure_point(t, &t->points[i]);
    }
    if (shown.fn != NULL)
        progress_end(&bar);
    return code;
}
