/* SPDX-License-Identifier: Apache-2.0 */
#include "fixture.h"

#include <stdlib.h>

static const model_recipe small = {MEGAMOE_FORMAT_MXFP4, HIDDEN,   32, 4,
                                   MEGAMOE_DTYPE_NONE,   {0, 0, 0}};

fixture *open_fixture(uint64_t stream) {
    t_random r = t_random_start(stream);
    fixture *x = calloc(1, sizeof *x);
    T_REQUIRE(x);
    x->m = model_open(&small, &r);
    x->b = batch_random(&x->m, TOKENS, TOPK, ROUTING_RANDOM, &r);
    const setup s = {.weights = x->m.weights};
    run_once(&s, &x->b, x->want);
    return x;
}

void close_fixture(fixture *x) {
    batch_free(&x->b);
    model_close(&x->m);
    free(x);
}

void check_recovery(fleet *f, fixture *x) {
    fleet_forward(f, &x->b, x->y);
    T_EQ_MEM(x->y, x->want, sizeof x->y);
}
