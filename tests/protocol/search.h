/* SPDX-License-Identifier: Apache-2.0 */
/* Breadth first through all interleavings of a plan. */
#ifndef TESTS_PROTOCOL_SEARCH_H
#define TESTS_PROTOCOL_SEARCH_H

#include "model.h"

typedef struct finding {
    wrong what;    /* RIGHT: in no interleaving anything goes wrong */
    size_t states; /* that were seen; they are told apart by hashes of 64 bits */
    /* The shortest way to what is wrong. The caller frees. */
    move *moves;
    int n_moves;
} finding;

finding search(const plan *p);

#endif
