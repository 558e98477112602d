/* SPDX-License-Identifier: Apache-2.0 */
/* A token's output is the same bits whatever is around it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fleet.h"

enum { TOKENS = 300, HIDDEN = 160, TOPK = 3 };

/* A layer, a batch and what one rank with one thread makes of it. */
typedef struct subject {
    model m;
    batch b;
    uint16_t *want;
} subject;

static uint16_t *rows_for(int64_t tokens) {
    uint16_t *y = malloc((size_t)tokens * HIDDEN * sizeof *y);
    T_REQUIRE(y);
    memset(y, 0xFF, (size_t)tokens * HIDDEN * sizeof *y);
    return y;
}

static subject open_subject_of(megamoe_format format, routing kind, megamoe_activation_type type,
                               uint64_t stream) {
    t_random r = t_random_start(stream);
    const model_recipe recipe = {format, HIDDEN, 96, 7, MEGAMOE_DTYPE_BF16, {1.702f, 1, 7}};
    subject s = {.m = model_open(&recipe, &r)};
    s.b = batch_random(&s.m, TOKENS, TOPK, kind, &r);
    batch_mask(&s.b, 9, &r);
    s.b.x[5 * HIDDEN + 3] = 0x7FC0;
    s.want = rows_for(TOKENS);
    const setup plain = {.weights = s.m.weights, .activations = type};
    run_once(&plain, &s.b, s.want);
    return s;
}

static subject open_subject(megamoe_format format, routing kind, uint64_t stream) {
    return open_subject_of(format, kind, MEGAMOE_ACTIVATIONS_E4M3, stream);
}

static void close_subject(subject *s) {
    free(s->want);
    batch_free(&s->b);
    model_close(&s->m);
}

static void check_run(const subject *s, const setup *how, const char *what, int number) {
    uint16_t *y = rows_for(TOKENS);
    run_once(how, &s->b, y);
    T_CHECK_MSG(same_rows(y, s->want, TOKENS * HIDDEN), "%s %d", what, number);
    free(y);
}

T_CASE(each_token_alone) {
    subject s = open_subject(MEGAMOE_FORMAT_MXFP4, ROUTING_RANDOM, 1);
    const setup how = {.weights = s.m.weights, .topk = TOPK, .tokens = 1};
    fleet f = fleet_open(&how);
    for (int64_t t = 0; t < TOKENS; t++) {
        uint16_t y[HIDDEN];
        const batch one = batch_part(&s.b, t, 1);
        fleet_forward(&f, &one, y);
        T_CHECK_MSG(same_rows(y, s.want + t * HIDDEN, HIDDEN), "token %d alone", (int)t);
    }
    fleet_close(&f);
    close_subject(&s);
}

/* Any part of the batch, so that tokens meet in panels of all sizes. */
T_CASE(every_batch_size) {
    for (int kind = 0; kind < 3; kind++) {
        t_random r = t_random_start(10 + (uint64_t)kind);
        subject s = open_subject(kind ? MEGAMOE_FORMAT_NVFP4 : MEGAMOE_FORMAT_MXFP4, (routing)kind,
                                 20 + (uint64_t)kind);
        const setup how = {.weights = s.m.weights, .topk = TOPK, .tokens = TOKENS, .threads = 2};
        fleet f = fleet_open(&how);
        uint16_t *y = rows_for(TOKENS);
        for (int64_t n = 1; n <= TOKENS; n += n < 70 ? 1 : 23) {
            const int64_t first = (int64_t)t_below(&r, (uint32_t)(TOKENS - n + 1));
            const batch part = batch_part(&s.b, first, n);
            fleet_forward(&f, &part, y);
            T_CHECK_MSG(same_rows(y, s.want + first * HIDDEN, n * HIDDEN), "routing %d, %d tokens",
                        kind, (int)n);
        }
        free(y);
        fleet_close(&f);
        close_subject(&s);
    }
}

/* In another order: slots stay, neighbours change. */
T_CASE(order_of_tokens) {
    subject s = open_subject(MEGAMOE_FORMAT_NVFP4, ROUTING_RANDOM, 30);
    t_random r = t_random_start(31);
    batch shuffled = batch_random(&s.m, TOKENS, TOPK, ROUTING_RANDOM, &r);
    int64_t from[TOKENS];
    for (int64_t t = 0; t < TOKENS; t++) {
        const int64_t other = (int64_t)t_below(&r, (uint32_t)t + 1);
        from[t] = from[other];
        from[other] = t;
    }
    for (int64_t t = 0; t < TOKENS; t++) {
        memcpy(shuffled.x + t * HIDDEN, s.b.x + from[t] * HIDDEN, HIDDEN * sizeof *s.b.x);
        memcpy(shuffled.ids + t * TOPK, s.b.ids + from[t] * TOPK, TOPK * sizeof *s.b.ids);
        memcpy(shuffled.weights + t * TOPK, s.b.weights + from[t] * TOPK,
               TOPK * sizeof *s.b.weights);
    }
    uint16_t *y = rows_for(TOKENS);
    const setup how = {.weights = s.m.weights, .ranks = 2};
    run_once(&how, &shuffled, y);
    for (int64_t t = 0; t < TOKENS; t++)
        T_CHECK(same_rows(y + t * HIDDEN, s.want + from[t] * HIDDEN, HIDDEN));
    free(y);
    batch_free(&shuffled);
    close_subject(&s);
}

/* Threads, tiers and capacity, for all routings. */
T_CASE(threads_tiers_capacity) {
    for (int kind = 0; kind < 3; kind++) {
        subject s = open_subject(MEGAMOE_FORMAT_MXFP4, (routing)kind, 40 + (uint64_t)kind);
        for (int32_t threads = 1; threads <= 3; threads++)
            for (int i = 0; tiers[i]; i++) {
                const setup how = {.weights = s.m.weights,
                                   .threads = threads,
                                   .tier = tiers[i],
                                   .tokens = TOKENS + 100 * (threads - 1)};
                check_run(&s, &how, tiers[i], threads);
            }
        close_subject(&s);
    }
}

T_CASE(ranks_as_threads_and_folded) {
    static const int32_t rank_counts[] = {1, 2, 3, 4, 8};
    for (int kind = 0; kind < 3; kind++) {
        subject s = open_subject(kind == 1 ? MEGAMOE_FORMAT_NVFP4 : MEGAMOE_FORMAT_MXFP4,
                                 (routing)kind, 50 + (uint64_t)kind);
        for (int i = 0; i < 5; i++) {
            setup how = {.weights = s.m.weights, .ranks = rank_counts[i]};
            check_run(&s, &how, "ranks", rank_counts[i]);
            how.folded = true;
            check_run(&s, &how, "folded ranks", rank_counts[i]);
            how.folded = false;
            how.threads = 2;
            how.tier = tiers[i % 3];
            check_run(&s, &how, "ranks of two threads", rank_counts[i]);
        }
        close_subject(&s);
    }
}

/* Fewer tokens than ranks: some have none. */
T_CASE(ranks_without_tokens) {
    subject s = open_subject(MEGAMOE_FORMAT_MXFP4, ROUTING_REPEATED, 60);
    for (int folded = 0; folded < 2; folded++) {
        const setup how = {.weights = s.m.weights, .ranks = 8, .folded = folded, .topk = TOPK};
        fleet f = fleet_open(&how);
        uint16_t *y = rows_for(TOKENS);
        for (int64_t n = 0; n < 20; n++) {
            const batch part = batch_part(&s.b, 100, n);
            fleet_forward(&f, &part, y);
            T_CHECK_MSG(same_rows(y, s.want + 100 * HIDDEN, n * HIDDEN), "%d tokens", (int)n);
        }
        free(y);
        fleet_close(&f);
    }
    close_subject(&s);
}

T_CASE(placement_and_replicas) {
    static const int32_t reversed[] = {6, 5, 4, 3, 2, 1, 0};
    static const int32_t replicas[] = {3, 0, 3, 1, 3, 2, 4, 5, 6, 3, 0};
    for (int kind = 0; kind < 3; kind++) {
        subject s = open_subject(MEGAMOE_FORMAT_MXFP4, (routing)kind, 70 + (uint64_t)kind);
        for (int32_t ranks = 1; ranks <= 4; ranks++) {
            setup how = {.weights = s.m.weights, .ranks = ranks, .folded = ranks % 2};
            how.options.physical_to_logical = reversed;
            how.options.physical_experts = 7;
            check_run(&s, &how, "reversed experts on ranks", ranks);
            how.options.physical_to_logical = replicas;
            how.options.physical_experts = 11;
            check_run(&s, &how, "replicas on ranks", ranks);
        }
        close_subject(&s);
    }
}

/* Int8 activations have kernels and panels of their own. */
T_CASE(int8_activations) {
    static const int32_t replicas[] = {3, 0, 3, 1, 3, 2, 4, 5, 6, 3, 0};
    for (int kind = 0; kind < 4; kind++) {
        t_random r = t_random_start(90 + (uint64_t)kind);
        subject s =
            open_subject_of(kind % 2 ? MEGAMOE_FORMAT_NVFP4 : MEGAMOE_FORMAT_MXFP4,
                            (routing)(kind % 3), MEGAMOE_ACTIVATIONS_INT8, 94 + (uint64_t)kind);
        const setup plain = {.weights = s.m.weights, .activations = MEGAMOE_ACTIVATIONS_INT8};
        setup how = plain;
        how.topk = TOPK;
        how.tokens = TOKENS;
        how.threads = 2;
        fleet f = fleet_open(&how);
        uint16_t *y = rows_for(TOKENS);
        for (int64_t n = 1; n <= TOKENS; n += n < 70 ? 1 : 23) {
            const int64_t first = (int64_t)t_below(&r, (uint32_t)(TOKENS - n + 1));
            const batch part = batch_part(&s.b, first, n);
            fleet_forward(&f, &part, y);
            T_CHECK_MSG(same_rows(y, s.want + first * HIDDEN, n * HIDDEN), "routing %d, %d tokens",
                        kind, (int)n);
        }
        free(y);
        fleet_close(&f);
        for (int32_t threads = 1; threads <= 3; threads++)
            for (int i = 0; tiers[i]; i++) {
                how = plain;
                how.threads = threads;
                how.tier = tiers[i];
                check_run(&s, &how, tiers[i], threads);
            }
        for (int32_t ranks = 1; ranks <= 8; ranks++) {
            how = plain;
            how.ranks = ranks;
            how.folded = ranks % 2;
            how.tier = tiers[ranks % 3];
            check_run(&s, &how, "ranks", ranks);
            how.options.physical_to_logical = replicas;
            how.options.physical_experts = 11;
            check_run(&s, &how, "replicas on ranks", ranks);
        }
        close_subject(&s);
    }
}

/* Promotion and scales per block go through other code; the weight after FC2 too. */
T_CASE(every_option_on_four_ranks) {
    t_random r = t_random_start(80);
    const model_recipe recipe = {MEGAMOE_FORMAT_NVFP4, HIDDEN,    176, 5,
                                 MEGAMOE_DTYPE_F32,    {0, 0, 10}};
    model m = model_open(&recipe, &r);
    batch b = batch_random(&m, 61, 2, ROUTING_RANDOM, &r);
    uint16_t *want = rows_for(61), *y = rows_for(61);
    for (int i = 0; i < 16; i++) {
        setup how = {
            .weights = m.weights,
            .input_scale = i & 1 ? MEGAMOE_SCALE_BLOCK : MEGAMOE_SCALE_TOKEN,
            .options = {.accumulate = i & 2 ? MEGAMOE_ACCUMULATE_PROMOTE : MEGAMOE_ACCUMULATE_MMA,
                        .weight_after_fc2 = i & 4,
                        .nvfp4 = i & 8 ? MEGAMOE_NVFP4_FOLDED : MEGAMOE_NVFP4_EXACT}};
        run_once(&how, &b, want);
        how.ranks = 4;
        how.threads = 2;
        how.tier = tiers[i % 3];
        run_once(&how, &b, y);
        T_CHECK_MSG(same_rows(y, want, 61 * HIDDEN), "options %d", i);
    }
    free(want);
    free(y);
    batch_free(&b);
    model_close(&m);
}
