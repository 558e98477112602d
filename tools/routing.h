/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where tokens go, for commands that have no router: the profiles of --routing.
 *
 *   random           every set of k experts equally likely
 *   balanced         all experts receive the same number of routes, as nearly as whole numbers do
 *   permuted[:N]     balanced in each block of N tokens, the experts in another order for each;
 *                    without N the fewest tokens that reach every expert
 *   zipf[:S]         the r-th popular expert is chosen in proportion to 1 / r^S (S = 1)
 *   hot[:SHARE]      one expert receives this share of the tokens (1), the rest is random
 *   file:PATH        recorded: "topk_ids", I32 or I64 [tokens, topk], of a safetensors file, as
 *                    `megamoe run --output` writes it
 */
#ifndef ROUTING_H
#define ROUTING_H

#include "tensor_field.h"

/* The option of commands that have one; its target begins as "random". */
#define ROUTING_PROFILES "random|balanced|permuted|zipf|hot|file:PATH"
#define OPTION_ROUTING(target)                                                                     \
    {                                                                                              \
        "routing", OPTION_TEXT, target, ROUTING_PROFILES,                                          \
            "where tokens go; permuted:N, zipf:S, hot:SHARE (random)", 0, 0                        \
    }

typedef enum routing_kind {
    ROUTING_RANDOM,
    ROUTING_BALANCED,
    ROUTING_PERMUTED,
    ROUTING_ZIPF,
    ROUTING_HOT,
    ROUTING_FILE
} routing_kind;

typedef struct routing_profile {
    char *name; /* the profile with its parameter, so that equal names are equal profiles */
    routing_kind kind;
    double parameter; /* N (0: chosen by routing_fit), S or SHARE */
    uint64_t seed;
    int32_t experts, topk;
    tensor_field recorded;
    /* Memory for what follows, which functions change: one thread uses a profile. */
    int32_t *order;    /* experts, shuffled, while routes are drawn */
    double *rarity;    /* of the r-th popular expert, for zipf */
    double *arrivals;  /* of the r-th popular experts, while those of one token are chosen */
    int64_t *received; /* [experts] of the last routing_measure */
} routing_profile;

/* How routes spread over experts. */
typedef struct routing_load {
    int64_t routes;
    int32_t active;   /* experts that receive any */
    int64_t largest;  /* routes of the expert that receives most */
    double imbalance; /* that by the mean over all experts; 0 without routes */
} routing_load;

/*
 * Reads the profile, and its file. `text` and the path in it are borrowed. Prints its error and
 * returns an exit code; routing_close is due in any case.
 */
int routing_open(const char *text, routing_profile *r);

/*
 * Says what the routes are of, before any is drawn. `seed` decides, for each layer, which experts
 * are popular. Prints its error and returns an exit code.
 */
int routing_fit(routing_profile *r, uint64_t seed, int32_t experts, int32_t topk);

void routing_close(routing_profile *r);

/*
 * Routes of a batch: ids [tokens, topk], different within a token; recorded ones are taken as they
 * are, -1 too, in the file's order from a place that depends on the seed. Each batch has a seed of
 * its own; what does not depend on `layer` is the same for all layers under one seed.
 */
void routing_draw(const routing_profile *r, uint64_t layer, uint64_t seed, int64_t tokens,
                  int32_t *ids);

/* -1 counts as no route. `received` has what each expert received until the next call. */
routing_load routing_measure(const routing_profile *r, const int32_t *ids, int64_t tokens);

#endif
