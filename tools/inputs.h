/* SPDX-License-Identifier: Apache-2.0 */
/* The tokens of `megamoe run`: read from a safetensors file or drawn from a seed, then routed. */
#ifndef INPUTS_H
#define INPUTS_H

#include "source.h"

typedef struct inputs {
    int64_t tokens;
    int32_t topk;
    void *x;            /* BF16 [tokens, hidden] */
    void *topk_ids;     /* [tokens, topk]; NULL until routed */
    void *topk_weights; /* F32 [tokens, topk] */
    void *input_ids;    /* [tokens]; NULL if there are none */
    megamoe_dtype topk_ids_dtype, input_ids_dtype;
} inputs;

/* These print their error and return an exit code. inputs_close is due in any case. */
int inputs_read(const char *path, const source *s, inputs *in);
int inputs_draw(int64_t tokens, uint64_t seed, const source *s, inputs *in);

/* Asks the layer's own router, unless the file told where the tokens go. */
int inputs_route(const source *s, int32_t threads, inputs *in);

void inputs_close(inputs *in);

#endif
