/* SPDX-License-Identifier: Apache-2.0 */
/* The simulation of arriving requests, with a clock and step times of its own. */
#include "simulation.h"

#include <string.h>

#include "t.h"

/* A step takes a second, or a millisecond for each token. */
static int one_second(void *user, int64_t step, int64_t tokens, double *seconds) {
    (void)user;
    (void)step;
    T_CHECK(tokens > 0);
    *seconds = 1;
    return 0;
}

static int by_tokens(void *user, int64_t step, int64_t tokens, double *seconds) {
    int64_t *sum = user;
    (void)step;
    *sum += tokens;
    *seconds = 1e-3 * (double)tokens;
    return 0;
}

static int fails_at_two(void *user, int64_t step, int64_t tokens, double *seconds) {
    (void)user;
    (void)tokens;
    *seconds = 1;
    return step == 2 ? 17 : 0;
}

static lengths parsed(const char *text) {
    lengths l;
    T_REQUIRE(lengths_parse(text, &l));
    return l;
}

static void run(const simulation_options *options, simulation *s) {
    T_REQUIRE(simulation_run(options, one_second, NULL, s) == 0);
}

T_CASE(decode_takes_turns) {
    const simulation_options options = {.workload = WORKLOAD_DECODE,
                                        .requests = 5,
                                        .output = parsed("3"),
                                        .sequences = 2,
                                        .steps = 100};
    T_EQ_INT(simulation_most_tokens(&options), 2);
    simulation s;
    run(&options, &s);
    T_REQUIRE(s.n_steps == 9);
    T_EQ_F64(s.seconds, 9);
    T_EQ_INT(s.ended, 5);
    for (int i = 0; i < 9; i++) {
        T_EQ_INT(s.steps[i].decoded, i < 6 ? 2 : 1);
        T_EQ_INT(s.steps[i].prefilled, 0);
        T_EQ_INT(s.steps[i].running, s.steps[i].decoded);
        T_EQ_INT(s.steps[i].waiting, i < 3 ? 3 : i < 6 ? 1 : 0);
        T_EQ_F64(s.steps[i].begun, i);
    }
    for (int i = 0; i < 5; i++) {
        const int turn = i / 2 * 3;
        T_EQ_F64(s.requests[i].started, turn);
        T_EQ_F64(s.requests[i].answered, turn + 1);
        T_EQ_F64(s.requests[i].ended, turn + 3);
        T_EQ_INT(s.requests[i].prompt, 0);
    }
    simulation_close(&s);
}

T_CASE(prompts_share_chunks) {
    const simulation_options options = {.workload = WORKLOAD_PREFILL,
                                        .requests = 3,
                                        .prompt = parsed("7"),
                                        .sequences = 2,
                                        .chunk = 10,
                                        .steps = 100};
    T_EQ_INT(simulation_most_tokens(&options), 10);
    simulation s;
    run(&options, &s);
    T_REQUIRE(s.n_steps == 3);
    static const int prefilled[] = {10, 10, 1};
    for (int i = 0; i < 3; i++) {
        T_EQ_INT(s.steps[i].prefilled, prefilled[i]);
        T_EQ_INT(s.steps[i].decoded, 0);
        T_EQ_F64(s.requests[i].ended, i + 1);
        T_EQ_F64(s.requests[i].answered, i + 1);
    }
    T_EQ_F64(s.requests[2].started, 1);
    simulation_close(&s);
}

T_CASE(mixed_fills_up_with_prompts) {
    const simulation_options options = {.workload = WORKLOAD_MIXED,
                                        .requests = 2,
                                        .prompt = parsed("5"),
                                        .output = parsed("3"),
                                        .sequences = 2,
                                        .chunk = 8,
                                        .steps = 100};
    simulation s;
    run(&options, &s);
    static const int expected[4][2] = {{0, 8}, {1, 2}, {2, 0}, {1, 0}}; /* decoded, prefilled */
    T_REQUIRE(s.n_steps == 4);
    for (int i = 0; i < 4; i++) {
        T_EQ_INT(s.steps[i].decoded, expected[i][0]);
        T_EQ_INT(s.steps[i].prefilled, expected[i][1]);
    }
    T_EQ_F64(s.requests[0].answered, 1);
    T_EQ_F64(s.requests[0].ended, 3);
    T_EQ_F64(s.requests[1].answered, 2);
    T_EQ_F64(s.requests[1].ended, 4);
    simulation_close(&s);
}

/* All tokens are computed once, and a request is started, answered and ended in this order. */
T_CASE(nothing_is_lost) {
    for (workload w = WORKLOAD_DECODE; w <= WORKLOAD_MIXED; w++) {
        const simulation_options options = {.workload = w,
                                            .requests = 500,
                                            .arrivals = 3,
                                            .prompt = parsed("lognormal:60:1"),
                                            .output = parsed("1-40"),
                                            .sequences = 16,
                                            .chunk = 64,
                                            .steps = 100000,
                                            .seed = 5};
        simulation s, again;
        int64_t sum = 0, ignored = 0, expected = 0, steps = 0;
        T_REQUIRE(simulation_run(&options, by_tokens, &sum, &s) == 0);
        T_REQUIRE(simulation_run(&options, by_tokens, &ignored, &again) == 0);
        T_EQ_INT(s.ended, 500);
        T_EQ_INT(s.n_steps, again.n_steps);
        T_EQ_MEM(s.steps, again.steps, (size_t)s.n_steps * sizeof *s.steps);
        T_EQ_MEM(s.requests, again.requests, 500 * sizeof *s.requests);
        double arrived = 0;
        for (int i = 0; i < 500; i++) {
            const simulation_request *r = &s.requests[i];
            /* The first output token of a prompt comes with its last one. */
            expected += r->prompt + r->output - (w == WORKLOAD_MIXED);
            T_CHECK(arrived <= r->arrived && r->arrived <= r->started);
            T_CHECK(r->started < r->answered && r->answered <= r->ended);
            arrived = r->arrived;
        }
        for (int64_t i = 0; i < s.n_steps; i++) {
            const int64_t tokens = s.steps[i].decoded + s.steps[i].prefilled;
            T_CHECK(tokens >= 1 && tokens <= simulation_most_tokens(&options));
            T_CHECK(s.steps[i].running <= 16);
            steps += tokens;
        }
        T_EQ_INT(sum, expected);
        T_EQ_INT(sum, steps);
        T_NEAR(500 / s.requests[499].arrived, 3, 0.7); /* five deviations */
        simulation_close(&s);
        simulation_close(&again);
    }
}

/* Between requests the clock jumps. */
T_CASE(time_without_work) {
    const simulation_options options = {.workload = WORKLOAD_DECODE,
                                        .requests = 20,
                                        .arrivals = 1e-3,
                                        .output = parsed("1"),
                                        .sequences = 4,
                                        .steps = 100};
    simulation s;
    run(&options, &s);
    double busy = 0;
    for (int64_t i = 0; i < s.n_steps; i++)
        busy += s.steps[i].seconds;
    T_CHECK(busy <= 20);
    T_CHECK(s.seconds > 1000);
    T_CHECK(s.steps[0].begun == s.requests[0].arrived && s.requests[0].arrived > 0);
    simulation_close(&s);
}

T_CASE(ends_early) {
    simulation_options options = {.workload = WORKLOAD_DECODE,
                                  .requests = 3,
                                  .output = parsed("10"),
                                  .sequences = 1,
                                  .steps = 15};
    simulation s;
    run(&options, &s);
    T_EQ_INT(s.n_steps, 15);
    T_EQ_INT(s.ended, 1);
    T_CHECK(s.requests[1].answered == 11 && s.requests[1].ended < 0);
    T_CHECK(s.requests[2].started < 0);
    simulation_close(&s);
    T_EQ_INT(simulation_run(&options, fails_at_two, NULL, &s), 17);
    T_EQ_INT(s.n_steps, 2);
    simulation_close(&s);
}

T_CASE(lengths_are_read) {
    const lengths uniform = parsed("3-5"), median = parsed("lognormal:100:0.5");
    T_CHECK(uniform.a == 3 && uniform.b == 5);
    T_CHECK(median.kind == LENGTHS_LOGNORMAL && median.a == 100 && median.b == 0.5);
    static const char *const bad[] = {"",      "0",           "x",
                                      "5-3",   "1-",          "-3",
                                      "1.5",   "2000000",     "lognormal",
                                      "1-2-3", "lognormal:5", "lognormal:0:1",
                                      "3 ",    "nan-nan",     "lognormal:5:-1"};
    lengths l;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        T_CHECK_MSG(!lengths_parse(bad[i], &l), "'%s'", bad[i]);
    const simulation_options options = {.workload = WORKLOAD_PREFILL,
                                        .requests = 10000,
                                        .prompt = median,
                                        .sequences = 1,
                                        .chunk = 1,
                                        .steps = 1};
    simulation s;
    run(&options, &s);
    int below = 0, below_half = 0;
    for (int i = 0; i < 10000; i++) {
        below += s.requests[i].prompt < 100;
        below_half += s.requests[i].prompt < 61; /* one deviation */
    }
    T_NEAR(below, 5000, 300);
    T_NEAR(below_half, 1587, 200);
    simulation_close(&s);
}
