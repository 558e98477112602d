/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rules by which the ranks of a forward are ordered: with all of them no interleaving goes
 * wrong; without any one of them some interleaving does, and this is how.
 */
#include <stdio.h>
#include <stdlib.h>

#include "search.h"
#include "t.h"

static const char *const rule_names[] = {
#define X(name, what) #name,
    RULES(X)
#undef X
};

static const char *const rule_texts[] = {
#define X(name, what) what,
    RULES(X)
#undef X
};

static const char *const wrong_texts[] = {
#define X(name, what) what,
    WRONGS(X)
#undef X
};

/* ---- with all rules ---- */

static size_t check_right(const plan *p) {
    finding f = search(p);
    T_CHECK_MSG(f.what == RIGHT, "%d ranks of %d blocks, %d epochs: %s after %d moves", p->ranks,
                p->blocks, p->epochs, wrong_texts[f.what], f.n_moves);
    free(f.moves);
    return f.states;
}

/* Rank r sends to the experts in bits r * ranks and up of `routing`. */
static void set_routing(plan *p, int epoch, unsigned routing) {
    const unsigned all = (1u << p->ranks) - 1;
    for (int r = 0; r < p->ranks; r++)
        p->to[epoch][r] = (uint8_t)(routing >> (r * p->ranks) & all);
}

T_CASE(two_ranks_all_routings) {
    size_t states = 0;
    for (unsigned all = 0; all < 16 * 16 * 16; all++) {
        plan p = {.ranks = 2, .blocks = 1, .epochs = 3};
        for (int e = 0; e < 3; e++)
            set_routing(&p, e, all >> 4 * e);
        states += check_right(&p);
    }
    printf("  %zu states\n", states);
}

T_CASE(two_ranks_of_two_blocks) {
    size_t states = 0;
    for (unsigned all = 0; all < 16 * 16; all += 3) {
        plan p = {.ranks = 2, .blocks = 2, .epochs = 2};
        set_routing(&p, 0, all);
        set_routing(&p, 1, all >> 4);
        states += check_right(&p);
    }
    printf("  %zu states\n", states);
}

/* Numbers of epochs come back: words that nobody has written for all of them are still there. */
T_CASE(words_of_long_ago) {
    size_t states = 0;
    for (unsigned all = 0; all < 16 * 16; all++) {
        plan p = {.ranks = 2, .blocks = 1, .epochs = 3, .aged = true};
        set_routing(&p, 0, all);
        set_routing(&p, 1, all >> 4);
        set_routing(&p, 2, 15);
        states += check_right(&p);
        p.blocks = p.epochs = 2;
        if (all % 5 == 0)
            states += check_right(&p);
    }
    printf("  %zu states\n", states);
}

/* Every third routing; each is followed by another one and then by itself. */
T_CASE(three_ranks) {
    size_t states = 0;
    for (unsigned routing = 0; routing < 512; routing += 3) {
        plan p = {.ranks = 3, .blocks = 1, .epochs = 3};
        set_routing(&p, 0, routing);
        set_routing(&p, 1, 37 * routing + 11);
        set_routing(&p, 2, routing);
        states += check_right(&p);
    }
    printf("  %zu states\n", states);
}

T_CASE(bad_batches_and_deadlines) {
    size_t states = 0;
    for (unsigned routing = 1; routing < 16; routing += 2)
        for (unsigned bad = 0; bad < 4; bad++)
            for (int epoch = 0; epoch < 2; epoch++) {
                plan p = {.ranks = 2, .blocks = 2, .epochs = 2, .deadlines = 2};
                set_routing(&p, 0, routing);
                set_routing(&p, 1, routing ^ 0x6);
                p.bad[epoch] = (uint8_t)bad;
                states += check_right(&p);
            }
    printf("  %zu states\n", states);
}

T_CASE(survivors_rebuild_while_the_lost_rank_still_stores) {
    size_t states = 0;
    for (unsigned routing = 0; routing < 512; routing += 13) {
        plan p = {.ranks = 3, .blocks = 1, .epochs = 1, .deadlines = 1, .rebuild = true};
        set_routing(&p, 0, routing);
        states += check_right(&p);
    }
    printf("  %zu states\n", states);
}

/* ---- without one of them ---- */

typedef struct counter_example {
    rule without;
    wrong what;
    plan p;
} counter_example;

#define BOTH                                                                                       \
    { 3, 3, 3 } /* to all of two ranks */

static const counter_example examples[] = {
    {ALL_WAIT,
     WRONG_COUNTS,
     {.ranks = 2, .blocks = 1, .epochs = 3, .to = {{0, 2}, {0, 2}, {0, 2}}}},
    {ALL_PUBLISH, HANG, {.ranks = 2, .blocks = 1, .epochs = 1, .to = {{0, 3}}}},
    {ONLY_PUBLISH_BEFORE,
     WRONG_ROW,
     {.ranks = 2, .blocks = 1, .epochs = 2, .to = {{1, 0}, {0, 1}}}},
    {PARITY_CELLS, WRONG_COUNTS, {.ranks = 2, .blocks = 1, .epochs = 2, .to = {{0}}}},
    {EXACT_EPOCH, WRONG_COUNTS, {.ranks = 2, .blocks = 1, .epochs = 3, .to = {BOTH, BOTH, BOTH}}},
    {WORDS_BEGIN_BEFORE, WRONG_COUNTS, {.ranks = 2, .blocks = 1, .epochs = 1, .to = {BOTH}}},
    {CELL_AFTER_COUNTS, WRONG_COUNTS, {.ranks = 2, .blocks = 1, .epochs = 1, .to = {BOTH}}},
    {AGREED_ERRORS, HANG, {.ranks = 2, .blocks = 1, .epochs = 1, .to = {BOTH}, .bad = {1}}},
    {NO_EPOCH_SKIPPED, HANG, {.ranks = 2, .blocks = 1, .epochs = 2, .to = {BOTH}, .bad = {1}}},
    {WORD_AFTER_ROW, WRONG_ROW, {.ranks = 2, .blocks = 1, .epochs = 1, .to = {BOTH}}},
    {ARRIVALS_BY_EPOCH, WRONG_ROW, {.ranks = 2, .blocks = 1, .epochs = 2, .to = {BOTH, BOTH}}},
    {ONE_WRITER, HANG, {.ranks = 2, .blocks = 1, .epochs = 1, .to = {BOTH}}},
    {FC1_CLAIMED_FIRST, HANG, {.ranks = 2, .blocks = 1, .epochs = 1, .to = {BOTH}}},
    {TWO_COUNTERS, HANG, {.ranks = 2, .blocks = 2, .epochs = 1, .to = {{0, 1}}}},
    {IDLE_CLEARED, WRONG_HALF, {.ranks = 2, .blocks = 2, .epochs = 3, .to = {{1}, {1}, {1}}}},
    {RETURN_AFTER_ROW, WRONG_RESULT, {.ranks = 2, .blocks = 1, .epochs = 1, .to = {BOTH}}},
    {ROUTES_BY_EPOCH, WRONG_RESULT, {.ranks = 2, .blocks = 1, .epochs = 2, .to = {BOTH, BOTH}}},
    {OLD_FORGOTTEN,
     WRONG_ROW,
     {.ranks = 2, .blocks = 1, .epochs = 2, .to = {{0}, BOTH}, .aged = true}},
    {NO_OVERLAP, WRONG_EPOCH, {.ranks = 2, .blocks = 2, .epochs = 2, .to = {{0}}}},
    {LAST_ADVANCES, WRONG_EPOCH, {.ranks = 2, .blocks = 2, .epochs = 1, .to = {{0}}}},
    {WAITS_SEE_ABORT, HANG, {.ranks = 2, .blocks = 1, .epochs = 1, .to = {BOTH}, .deadlines = 1}},
    {ABORT_TO_ALL, HANG, {.ranks = 2, .blocks = 1, .epochs = 1, .to = {BOTH}, .deadlines = 1}},
    {DEAD_AFTER_ABORT,
     HANG,
     {.ranks = 2, .blocks = 1, .epochs = 2, .to = {BOTH, BOTH}, .deadlines = 1}},
    {FRESH_MEMORY,
     WRONG_COUNTS,
     {.ranks = 3, .blocks = 1, .epochs = 1, .to = {{6, 6, 6}}, .deadlines = 1, .rebuild = true}},
};

/* The moves lead where they are said to. */
static void check_moves(const plan *p, const finding *f) {
    state s = state_first(p);
    wrong what = RIGHT;
    for (int i = 0; i < f->n_moves; i++) {
        T_REQUIRE(what == RIGHT);
        what = state_go(p, &s, f->moves[i]);
    }
    if (what == RIGHT) {
        move moves[MOVES_MAX];
        T_EQ_INT(state_moves(p, &s, moves), 0);
        what = state_end(p, &s);
    }
    T_EQ_INT(what, f->what);
}

T_CASE(each_rule_is_needed) {
    T_EQ_INT(sizeof examples / sizeof *examples, RULE_COUNT);
    for (int i = 0; i < RULE_COUNT; i++) {
        const counter_example *example = &examples[i];
        T_EQ_INT(example->without, i);
        (void)check_right(&example->p);
        plan broken = example->p;
        broken.without = 1u << example->without;
        finding f = search(&broken);
        printf("  without %s (%s): %s, after %d moves\n", rule_names[i], rule_texts[i],
               wrong_texts[f.what], f.n_moves);
        T_CHECK_MSG(f.what == example->what, "without %s: %s; expected: %s", rule_names[i],
                    wrong_texts[f.what], wrong_texts[example->what]);
        if (f.what != RIGHT)
            check_moves(&broken, &f);
        free(f.moves);
    }
}
