/* SPDX-License-Identifier: Apache-2.0 */
#include "search.h"

#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "t.h"

/* A state that was seen: how it was reached. */
typedef struct node {
    uint32_t from;
    move by;
} node;

typedef struct seen {
    uint64_t *hashes; /* open addressing; 0: free */
    size_t slots, used;
} seen;

static void *grown(void *array, size_t bytes) {
    void *more = realloc(array, bytes);
    T_REQUIRE(more);
    return more;
}

/* The lowest bit is set in all. */
static size_t slot_of(const seen *table, uint64_t hash) {
    return hash >> 1 & (table->slots - 1);
}

static void rehash(seen *table) {
    const seen old = *table;
    table->slots = old.slots ? 4 * old.slots : 1 << 12;
    table->hashes = calloc(table->slots, sizeof *table->hashes);
    T_REQUIRE(table->hashes);
    for (size_t i = 0; i < old.slots; i++) {
        size_t at = slot_of(table, old.hashes[i]);
        while (old.hashes[i] && table->hashes[at])
            at = (at + 1) & (table->slots - 1);
        if (old.hashes[i])
            table->hashes[at] = old.hashes[i];
    }
    free(old.hashes);
}

/* Whether the state is new. */
static bool add(seen *table, const state *s) {
    if (2 * table->used >= table->slots)
        rehash(table);
    const uint64_t hash = XXH3_64bits(s, sizeof *s) | 1; /* not 0 */
    size_t at = slot_of(table, hash);
    while (table->hashes[at] && table->hashes[at] != hash)
        at = (at + 1) & (table->slots - 1);
    if (table->hashes[at])
        return false;
    table->hashes[at] = hash;
    table->used++;
    return true;
}

/* The moves that lead to node `to`, and one more. */
static void trace(finding *f, const node *nodes, uint32_t to, const move *last) {
    int n = last ? 1 : 0;
    for (uint32_t at = to; at; at = nodes[at].from)
        n++;
    f->n_moves = n;
    f->moves = malloc((size_t)(n ? n : 1) * sizeof *f->moves);
    T_REQUIRE(f->moves);
    if (last)
        f->moves[--n] = *last;
    for (uint32_t at = to; at; at = nodes[at].from)
        f->moves[--n] = nodes[at].by;
}

/* The states whose successors are to be looked at, in the order of nodes. */
typedef struct frontier {
    state *states;
    size_t begin, end, room; /* begin..end - 1 of the nodes are in `states` */
} frontier;

static void push(frontier *f, const state *s) {
    if (f->end - f->begin == f->room) {
        f->room = f->room ? 2 * f->room : 1 << 10;
        f->states = grown(f->states, f->room * sizeof *f->states);
    }
    f->states[f->end++ - f->begin] = *s;
}

finding search(const plan *p) {
    finding found = {.what = RIGHT};
    seen table = {0};
    frontier now = {0}, next = {0};
    node *nodes = NULL;
    size_t room = 0;
    const state first = state_first(p);
    (void)add(&table, &first);
    push(&now, &first);
    next.begin = next.end = 1;
    nodes = grown(nodes, (room = 1 << 10) * sizeof *nodes);
    nodes[0] = (node){0};
    while (now.end > now.begin && found.what == RIGHT) {
        for (size_t at = now.begin; at < now.end && found.what == RIGHT; at++) {
            const state *s = &now.states[at - now.begin];
            move moves[MOVES_MAX];
            const int n = state_moves(p, s, moves);
            if (n == 0 && (found.what = state_end(p, s)) != RIGHT)
                trace(&found, nodes, (uint32_t)at, NULL);
            for (int i = 0; i < n && found.what == RIGHT; i++) {
                state to = *s;
                found.what = state_go(p, &to, moves[i]);
                if (found.what != RIGHT)
                    trace(&found, nodes, (uint32_t)at, &moves[i]);
                else if (add(&table, &to)) {
                    if (next.end == room)
                        nodes = grown(nodes, (room *= 2) * sizeof *nodes);
                    nodes[next.end] = (node){(uint32_t)at, moves[i]};
                    push(&next, &to);
                }
            }
        }
        const frontier done = now;
        now = next;
        next = done;
        next.begin = next.end = now.end;
    }
    found.states = table.used;
    free(table.hashes);
    free(now.states);
    free(next.states);
    free(nodes);
    return found;
}
