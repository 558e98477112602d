/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small model of how the ranks of a forward on a GPU order what they store (docs/architecture.md,
 * "A forward on a GPU"), for an exhaustive search over all interleavings. Each rank has one or two
 * thread blocks, one expert, and at most one token, which goes to any of the experts. What a row
 * holds is the epoch in which it was written, so that a stale one shows.
 *
 * A block makes one store, one look at a word, or one access to memory of its own at a time. What
 * is stored in order is seen in order: that is what release and acquire give, and the rules below
 * include that order, since without them it is lost.
 */
#ifndef TESTS_PROTOCOL_MODEL_H
#define TESTS_PROTOCOL_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { RANKS = 3, BLOCKS = 2, EPOCHS = 3, ROUTINGS = 1 << RANKS };

/* X(name, what): the rules. */
#define RULES(X)                                                                                   \
    X(ALL_WAIT, "a rank waits for all ranks before it leaves, even with nothing to do")            \
    X(ALL_PUBLISH, "a rank publishes every epoch, without tokens too")                             \
    X(ONLY_PUBLISH_BEFORE, "nothing but the publication is sent before the wait")                  \
    X(PARITY_CELLS, "publications exist twice, by parity of the epoch")                            \
    X(EXACT_EPOCH, "the wait is for exactly this epoch, not for at least this one")                \
    X(WORDS_BEGIN_BEFORE, "words of other ranks begin with the epoch before the first")            \
    X(CELL_AFTER_COUNTS, "a cell is stored after the counts that it stands for")                   \
    X(AGREED_ERRORS, "a bad batch is published, and all skip the forward")                         \
    X(NO_EPOCH_SKIPPED, "a rank whose batch is bad stays in step")                                 \
    X(WORD_AFTER_ROW, "an arrival word is stored after its row")                                   \
    X(ARRIVALS_BY_EPOCH, "an arrival word holds the epoch, so it need not be cleared")             \
    X(ONE_WRITER, "a word that other ranks write has one writer, which increments nothing")        \
    X(FC1_CLAIMED_FIRST, "no tile is claimed before those that it waits for")                      \
    X(TWO_COUNTERS, "local counters exist twice, by parity of the epoch")                          \
    X(IDLE_CLEARED, "the idle set of local counters is cleared in every epoch")                    \
    X(RETURN_AFTER_ROW, "a route's word is stored after its row")                                  \
    X(ROUTES_BY_EPOCH, "a route's word holds the epoch, so it need not be cleared")                \
    X(OLD_FORGOTTEN, "old words are made those of an epoch that ends before their number is back") \
    X(NO_OVERLAP, "forwards of one workspace do not overlap")                                      \
    X(LAST_ADVANCES, "the last block to have read the epoch advances it")                          \
    X(WAITS_SEE_ABORT, "every wait looks at the abort word")                                       \
    X(ABORT_TO_ALL, "a rank that gives up tells all others")                                       \
    X(DEAD_AFTER_ABORT, "after an abort a workspace is dead")                                      \
    X(FRESH_MEMORY, "a communicator is rebuilt on fresh memory")

typedef enum rule {
#define X(name, what) name,
    RULES(X)
#undef X
        RULE_COUNT
} rule;

/* X(name, what): what goes wrong. */
#define WRONGS(X)                                                                                  \
    X(RIGHT, "nothing")                                                                            \
    X(WRONG_COUNTS, "counts of another epoch are read")                                            \
    X(WRONG_ROW, "FC1 reads a row that is not this epoch's")                                       \
    X(WRONG_HALF, "FC2 reads what FC1 has not written in this epoch")                              \
    X(WRONG_RESULT, "combine sums a row that is not this epoch's")                                 \
    X(WRONG_EPOCH, "a block computes another epoch than it was launched for")                      \
    X(HANG, "ranks wait for ever")

typedef enum wrong {
#define X(name, what) name,
    WRONGS(X)
#undef X
} wrong;

/* What is searched: all interleavings of this. */
typedef struct plan {
    uint32_t without;          /* bit r: rule r is broken */
    int ranks, blocks, epochs; /* blocks: of each rank */
    uint8_t to[EPOCHS][RANKS]; /* bit d: a token of this rank goes to the expert of rank d */
    uint8_t bad[EPOCHS];       /* bit r: the batch of rank r is bad */
    int deadlines;             /* how often a wait may end with its deadline */
    bool rebuild;              /* after an abort all but rank 0 go on, with new numbers */
    bool aged; /* words of rows are as old as numbers last: the second epoch's is theirs */
} plan;

/* What other ranks write, and what only the rank itself does. Values are epochs. */
typedef struct memory {
    uint8_t counts[2][RANKS], cells[2][RANKS]; /* [parity][source] */
    uint8_t rows[RANKS];                       /* in the order of sources */
    uint8_t arrived[RANKS];                    /* [source] */
    uint8_t arrivals;                          /* without ONE_WRITER: one counter for all */
    uint8_t results[RANKS], returned[RANKS];   /* [owner] */
    uint8_t abort;

    uint8_t epoch;   /* of the last forward that all blocks have entered */
    uint8_t entered; /* blocks that have read it for the present one */
    uint8_t left;    /* blocks that have left that */
    uint8_t halves[BLOCKS];
    uint8_t counters[2]; /* [parity]: halves of FC1 that are done */
} memory;

typedef struct block {
    uint8_t phase, item, step;
    uint8_t epoch; /* as it was when the block began */
    uint8_t ended; /* forwards that it has left */
    uint8_t loaded;
} block;

typedef struct state {
    memory memories[2][RANKS]; /* [generation]: the second of a rebuilt communicator */
    block blocks[RANKS][BLOCKS];
    uint8_t deadlines; /* that have passed */
    uint8_t rebuilt;
} state;

/* Which block goes on, or what befalls it. */
typedef struct move {
    uint8_t rank, block;
    bool deadline; /* its wait ends */
} move;

enum { MOVES_MAX = 2 * RANKS * BLOCKS };

/* Memory before the first forward. */
state state_first(const plan *p);

/* The moves that are possible in a state. */
int state_moves(const plan *p, const state *s, move moves[MOVES_MAX]);

/* Makes one of them: what went wrong in it. */
wrong state_go(const plan *p, state *s, move m);

/* With no move left: RIGHT if all have done or given up what was planned, else HANG. */
wrong state_end(const plan *p, const state *s);

#endif
