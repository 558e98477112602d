/* SPDX-License-Identifier: Apache-2.0 */
#include "model.h"

#include <string.h>

/* Three epochs from here on pass the end of the numbers. */
enum { FIRST_EPOCH = 254 };

typedef enum phase {
    BEGIN,
    ENTER, /* counts among those that have read the epoch */
    PUBLISH,
    AWAIT, /* the one wait */
    CLEAR, /* the idle counters */
    SEND,
    FC1,
    FC2,
    COMBINE,
    LEAVE,
    GIVE_UP, /* tell the others */
    ENDED
} phase;

/* The order of a block's phases, and how it changes when rules are broken. */
static phase after(const plan *p, phase done);

static bool holds(const plan *p, rule r) {
    return !(p->without >> r & 1);
}

/* ---- who is who ---- */

/* After rebuilding rank r of the first generation is r - 1, but its memory may be the old. */
static int generation_of(const state *s, int rank) {
    return s->rebuilt && rank > 0;
}

static memory *memory_at(const plan *p, state *s, int generation, int index) {
    if (generation == 0)
        return &s->memories[0][index];
    return holds(p, FRESH_MEMORY) ? &s->memories[1][index] : &s->memories[0][index + 1];
}

/* A block as its communicator sees it. */
typedef struct view {
    const plan *p;
    state *s;
    block *b;
    int generation, rank, ranks, number;
    memory *own;
} view;

static view view_of(const plan *p, state *s, int rank, int number) {
    view v = {.p = p, .s = s, .b = &s->blocks[rank][number], .number = number};
    v.generation = generation_of(s, rank);
    v.rank = rank - v.generation;
    v.ranks = p->ranks - v.generation;
    v.own = memory_at(p, s, v.generation, v.rank);
    return v;
}

static memory *peer(const view *v, int rank) {
    return memory_at(v->p, v->s, v->generation, rank);
}

/* ---- what the routing says ---- */

static uint8_t routes(const view *v, int epochs_before, int source) {
    const uint8_t all = (uint8_t)((1u << v->ranks) - 1);
    return v->p->to[epochs_before][source] & all;
}

static uint8_t sources(const view *v, int epochs_before) {
    uint8_t found = 0;
    for (int r = 0; r < v->ranks; r++)
        found |= (uint8_t)((routes(v, epochs_before, r) >> v->rank & 1) << r);
    return found;
}

static bool bad(const view *v) {
    return v->generation == 0 && (v->p->bad[v->b->ended] != 0);
}

/* Rows lie without gaps in the order of their sources: the place of one of them at `owner`. */
static int place_of(const view *v, int owner, int source) {
    int place = 0;
    for (int r = 0; r < source; r++)
        place += routes(v, v->b->ended, r) >> owner & 1;
    return place;
}

/* Rows that this rank has been sent in all epochs up to this one. */
static uint8_t rows_so_far(const view *v) {
    int rows = 0;
    for (int e = 0; e <= v->b->ended; e++)
        rows += __builtin_popcount(sources(v, e));
    return (uint8_t)rows;
}

/* The ranks that a phase of this block deals with, one after the other. */
static uint8_t items(const view *v, phase at) {
    const int e = v->b->ended;
    const bool first = v->number == 0, last = v->number == v->p->blocks - 1;
    const uint8_t all = (uint8_t)((1u << v->ranks) - 1);
    const uint8_t own = routes(v, e, v->rank);
    const bool idle = own == 0;
    const bool skips = !holds(v->p, AGREED_ERRORS) && (v->p->bad[e] >> v->rank & 1);
    switch (at) {
    case PUBLISH:
        return !first || (idle && !holds(v->p, ALL_PUBLISH)) || skips ? 0 : all;
    case AWAIT:
        return (idle && !holds(v->p, ALL_WAIT)) || skips ? 0 : 1;
    case CLEAR:
        return first && holds(v->p, IDLE_CLEARED) ? 1 : 0;
    case SEND:
        return first && !skips ? own : 0;
    case FC1:
        return skips ? 0 : sources(v, e);
    case FC2:
        return last && !skips ? sources(v, e) : 0;
    case COMBINE:
        return first && !skips ? own : 0;
    case GIVE_UP:
        return holds(v->p, ABORT_TO_ALL) ? all & (uint8_t) ~(1u << v->rank) : 0;
    default:
        return 1;
    }
}

/* ---- from step to step ---- */

static phase after(const plan *p, phase done) {
    const bool early = !holds(p, ONLY_PUBLISH_BEFORE), fc2_first = !holds(p, FC1_CLAIMED_FIRST);
    switch (done) {
    case BEGIN:
        return ENTER;
    case ENTER:
        return PUBLISH;
    case PUBLISH:
        return early ? SEND : AWAIT;
    case AWAIT:
        return CLEAR;
    case CLEAR:
        return early ? (fc2_first ? FC2 : FC1) : SEND;
    case SEND:
        return early ? AWAIT : (fc2_first ? FC2 : FC1);
    case FC1:
        return fc2_first ? COMBINE : FC2;
    case FC2:
        return fc2_first ? FC1 : COMBINE;
    case COMBINE:
        return LEAVE;
    case LEAVE:
        return BEGIN;
    default:
        return ENDED;
    }
}

static int least(uint8_t set) {
    return __builtin_ctz(set);
}

/* To the first item of `at`, or of the first phase after it that has any. */
static void enter(view *v, phase at) {
    while (at != BEGIN && at != ENDED && items(v, at) == 0)
        at = after(v->p, at);
    v->b->phase = (uint8_t)at;
    v->b->step = 0;
    v->b->item = at == BEGIN || at == ENDED ? 0 : (uint8_t)least(items(v, at));
}

static void next_item(view *v) {
    const uint8_t rest = items(v, v->b->phase) & (uint8_t)(0xFFu << (v->b->item + 1));
    v->b->step = 0;
    if (rest)
        v->b->item = (uint8_t)least(rest);
    else
        enter(v, after(v->p, v->b->phase));
}

/* ---- waits ---- */

static bool reached(uint8_t word, uint8_t epoch, bool by_epoch) {
    return by_epoch ? word == epoch : word != FIRST_EPOCH - 1;
}

static int parity_of(const view *v) {
    return holds(v->p, PARITY_CELLS) ? v->b->epoch & 1 : 0;
}

static int counter_of(const view *v) {
    return holds(v->p, TWO_COUNTERS) ? v->b->epoch & 1 : 0;
}

static bool waits(const view *v) {
    const block *b = v->b;
    return b->step == 0 &&
           (b->phase == AWAIT || b->phase == FC1 || b->phase == FC2 || b->phase == COMBINE);
}

static bool may_go(const view *v) {
    const block *b = v->b;
    const memory *own = v->own;
    if (b->phase == ENDED)
        return false;
    if (b->phase == BEGIN && holds(v->p, NO_OVERLAP)) {
        for (int i = 0; i < v->p->blocks; i++) {
            const block *other = &(b - v->number)[i];
            if (other->ended < b->ended && other->phase != ENDED)
                return false;
        }
    }
    if (!waits(v))
        return true;
    switch (b->phase) {
    case AWAIT:
        for (int r = 0; r < v->ranks; r++) {
            const uint8_t cell = own->cells[parity_of(v)][r];
            if (holds(v->p, EXACT_EPOCH) ? cell != b->epoch : cell < b->epoch)
                return false;
        }
        return true;
    case FC1:
        return holds(v->p, ONE_WRITER)
                   ? reached(own->arrived[b->item], b->epoch, holds(v->p, ARRIVALS_BY_EPOCH))
                   : own->arrivals >= rows_so_far(v);
    case FC2:
        return own->counters[counter_of(v)] >=
               v->p->blocks * __builtin_popcount(sources(v, b->ended));
    default:
        return reached(own->returned[b->item], b->epoch, holds(v->p, ROUTES_BY_EPOCH));
    }
}

/* ---- steps ---- */

/* Two stores to another rank: the data, then the word that stands for it. */
static void store(view *v, uint8_t *data, uint8_t *word, bool word_last) {
    *((v->b->step == 0) == word_last ? data : word) = v->b->epoch;
    v->b->step++;
    if (v->b->step == 2)
        next_item(v);
}

static wrong begin(view *v) {
    if (v->own->abort) {
        v->own->abort = holds(v->p, DEAD_AFTER_ABORT);
        if (v->own->abort) {
            v->b->phase = ENDED;
            return RIGHT;
        }
    }
    v->b->epoch = (uint8_t)(v->own->epoch + 1);
    const bool skipped = !holds(v->p, NO_EPOCH_SKIPPED);
    if (v->b->epoch != (uint8_t)(FIRST_EPOCH + v->b->ended) && !skipped)
        return WRONG_EPOCH;
    enter(v, after(v->p, BEGIN));
    return RIGHT;
}

static wrong read_counts(view *v) {
    for (int r = 0; r < v->ranks; r++)
        if (v->own->counts[parity_of(v)][r] != v->b->epoch)
            return WRONG_COUNTS;
    if (bad(v) && holds(v->p, AGREED_ERRORS))
        enter(v, LEAVE);
    else
        next_item(v);
    return RIGHT;
}

static void send_row(view *v) {
    memory *to = peer(v, v->b->item);
    const int place = place_of(v, v->b->item, v->rank);
    if (holds(v->p, ONE_WRITER)) {
        store(v, &to->rows[place], &to->arrived[v->rank], holds(v->p, WORD_AFTER_ROW));
        return;
    }
    switch (v->b->step++) {
    case 0:
        to->rows[place] = v->b->epoch;
        break;
    case 1:
        v->b->loaded = to->arrivals;
        break;
    default:
        to->arrivals = (uint8_t)(v->b->loaded + 1);
        next_item(v);
    }
}

static wrong compute_fc1(view *v) {
    switch (v->b->step++) {
    case 0: /* the wait */
        return RIGHT;
    case 1:
        if (v->own->rows[place_of(v, v->rank, v->b->item)] != v->b->epoch)
            return WRONG_ROW;
        v->own->halves[v->number] = v->b->epoch;
        return RIGHT;
    default:
        v->own->counters[counter_of(v)]++;
        next_item(v);
        return RIGHT;
    }
}

static wrong compute_fc2(view *v) {
    memory *to = peer(v, v->b->item);
    if (v->b->step == 0) {
        for (int i = 0; i < v->p->blocks; i++)
            if (v->own->halves[i] != v->b->epoch)
                return WRONG_HALF;
        v->b->step = 1;
        return RIGHT;
    }
    const bool data = (v->b->step == 1) == holds(v->p, RETURN_AFTER_ROW);
    *(data ? &to->results[v->rank] : &to->returned[v->rank]) = v->b->epoch;
    if (v->b->step++ == 2)
        next_item(v);
    return RIGHT;
}

static wrong combine(view *v) {
    if (v->b->step++ == 0)
        return RIGHT;
    if (v->own->results[v->b->item] != v->b->epoch)
        return WRONG_RESULT;
    next_item(v);
    return RIGHT;
}

/* Nothing but the beginning of a forward reads the epoch. */
static void end_epoch(view *v) {
    memory *own = v->own;
    const bool last = ++own->entered == v->p->blocks;
    const bool advances = holds(v->p, LAST_ADVANCES) ? last : own->entered == 1;
    const bool skips = !holds(v->p, NO_EPOCH_SKIPPED) && (v->p->bad[v->b->ended] >> v->rank & 1);
    if (advances)
        own->epoch = (uint8_t)(own->epoch + (skips ? 2 : 1));
    if (last)
        own->entered = 0;
    next_item(v);
}

static void leave(view *v) {
    memory *own = v->own;
    const bool last = ++own->left == v->p->blocks;
    if (last)
        own->left = 0;
    if (last && v->b->epoch == FIRST_EPOCH && holds(v->p, OLD_FORGOTTEN)) {
        memset(own->arrived, v->b->epoch, sizeof own->arrived);
        memset(own->returned, v->b->epoch, sizeof own->returned);
    }
    v->b->ended++;
    v->b->phase = v->b->ended == v->p->epochs ? ENDED : BEGIN;
    v->b->item = v->b->step = v->b->loaded = 0;
}

/* The end of a block that has given up or was told to. */
static void stop(view *v) {
    if (holds(v->p, DEAD_AFTER_ABORT)) {
        *v->b = (block){.phase = ENDED, .ended = v->b->ended};
        return;
    }
    enter(v, LEAVE);
}

static void give_up(view *v) {
    peer(v, v->b->item)->abort = 1;
    const uint8_t rest = items(v, GIVE_UP) & (uint8_t)(0xFFu << (v->b->item + 1));
    if (rest)
        v->b->item = (uint8_t)least(rest);
    else
        stop(v);
}

static wrong step(view *v) {
    const int parity = parity_of(v);
    memory *to = peer(v, v->b->item);
    switch (v->b->phase) {
    case BEGIN:
        return begin(v);
    case ENTER:
        end_epoch(v);
        return RIGHT;
    case PUBLISH:
        store(v, &to->counts[parity][v->rank], &to->cells[parity][v->rank],
              holds(v->p, CELL_AFTER_COUNTS));
        return RIGHT;
    case AWAIT:
        return v->b->step++ ? read_counts(v) : RIGHT;
    case CLEAR:
        v->own->counters[holds(v->p, TWO_COUNTERS) ? ~v->b->epoch & 1 : 0] = 0;
        next_item(v);
        return RIGHT;
    case SEND:
        send_row(v);
        return RIGHT;
    case FC1:
        return compute_fc1(v);
    case FC2:
        return compute_fc2(v);
    case COMBINE:
        return combine(v);
    case LEAVE:
        leave(v);
        return RIGHT;
    default:
        give_up(v);
        return RIGHT;
    }
}

/* ---- the whole ---- */

static void memory_begin(const plan *p, memory *m) {
    const uint8_t before = FIRST_EPOCH - 1;
    const uint8_t words = holds(p, WORDS_BEGIN_BEFORE) ? before : FIRST_EPOCH;
    *m = (memory){.epoch = before};
    memset(m->cells, words, sizeof m->cells);
    memset(m->arrived, words, sizeof m->arrived);
    memset(m->returned, words, sizeof m->returned);
    if (p->aged) {
        memset(m->arrived, FIRST_EPOCH + 1, sizeof m->arrived);
        memset(m->returned, FIRST_EPOCH + 1, sizeof m->returned);
    }
}

state state_first(const plan *p) {
    state s;
    memset(&s, 0, sizeof s);
    for (int r = 0; r < p->ranks; r++)
        memory_begin(p, &s.memories[0][r]);
    for (int r = 0; r < RANKS; r++)
        for (int i = 0; i < BLOCKS; i++)
            s.blocks[r][i].phase = r < p->ranks && i < p->blocks ? BEGIN : ENDED;
    return s;
}

/* All but rank 0 have ended, one of them because of its deadline. */
static bool can_rebuild(const plan *p, const state *s) {
    if (!p->rebuild || s->rebuilt || s->deadlines == 0)
        return false;
    for (int r = 1; r < p->ranks; r++)
        for (int i = 0; i < p->blocks; i++)
            if (s->blocks[r][i].phase != ENDED)
                return false;
    return true;
}

/* Collective among the survivors, who have met for it. */
static void rebuild(const plan *p, state *s) {
    s->rebuilt = 1;
    for (int r = 1; r < p->ranks; r++) {
        memory_begin(p, memory_at(p, s, 1, r - 1));
        for (int i = 0; i < p->blocks; i++)
            s->blocks[r][i] = (block){.phase = BEGIN};
    }
}

int state_moves(const plan *p, const state *s, move moves[MOVES_MAX]) {
    int n = 0;
    state copy = *s;
    if (can_rebuild(p, s))
        moves[n++] = (move){.rank = RANKS, .block = 0};
    for (int r = 0; r < p->ranks; r++)
        for (int i = 0; i < p->blocks; i++) {
            const view v = view_of(p, &copy, r, i);
            const bool go = may_go(&v);
            const bool told = waits(&v) && v.own->abort && holds(p, WAITS_SEE_ABORT);
            if (go || told)
                moves[n++] = (move){.rank = (uint8_t)r, .block = (uint8_t)i};
            if (!go && waits(&v) && s->deadlines < p->deadlines && !(p->rebuild && r == 0))
                moves[n++] = (move){.rank = (uint8_t)r, .block = (uint8_t)i, .deadline = true};
        }
    return n;
}

wrong state_go(const plan *p, state *s, move m) {
    if (m.rank == RANKS) {
        rebuild(p, s);
        return RIGHT;
    }
    view v = view_of(p, s, m.rank, m.block);
    if (m.deadline) {
        s->deadlines++;
        v.own->abort = 1;
        if (items(&v, GIVE_UP))
            enter(&v, GIVE_UP);
        else
            stop(&v);
        return RIGHT;
    }
    if (waits(&v) && v.own->abort && holds(p, WAITS_SEE_ABORT)) {
        stop(&v);
        return RIGHT;
    }
    return step(&v);
}

wrong state_end(const plan *p, const state *s) {
    for (int r = 0; r < p->ranks; r++)
        for (int i = 0; i < p->blocks; i++)
            if (s->blocks[r][i].phase != ENDED)
                return HANG;
    return RIGHT;
}
