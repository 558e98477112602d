/* SPDX-License-Identifier: Apache-2.0 */
/* A small layer, a batch and what comes out of it on one rank. */
#ifndef TESTS_LAYER_FIXTURE_H
#define TESTS_LAYER_FIXTURE_H

#include "fleet.h"

enum { TOKENS = 21, HIDDEN = 64, TOPK = 2 };

typedef struct fixture {
    model m;
    batch b;
    uint16_t want[TOKENS * HIDDEN];
    uint16_t y[TOKENS * HIDDEN];
} fixture;

fixture *open_fixture(uint64_t stream);
void close_fixture(fixture *x);

/* After an error the fleet computes the batch as if nothing had been. */
void check_recovery(fleet *f, fixture *x);

#endif
