/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "routing.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "random.h"
#include "report.h"
#include "synth.h"

static const struct {
    const char *name;
    bool has_parameter;
    double parameter, min, max; /* default and range */
} profiles[] = {
    [ROUTING_RANDOM] = {"random", false, 0, 0, 0},
    [ROUTING_BALANCED] = {"balanced", false, 0, 0, 0},
    [ROUTING_PERMUTED] = {"permuted", true, 0, 1, 1 << 20},
    [ROUTING_ZIPF] = {"zipf", true, 1, 0, 10},
    [ROUTING_HOT] = {"hot", true, 1, 0, 1},
    [ROUTING_FILE] = {"file", false, 0, 0, 0},
};

enum { PROFILES = sizeof profiles / sizeof *profiles };

static int read_file(const char *path, routing_profile *r) {
    r->recorded =
        (tensor_field){"topk_ids", 2, {MEGAMOE_DTYPE_I32, MEGAMOE_DTYPE_I64}, 0, {0}, NULL};
    megamoe_checkpoint *file = NULL;
    const megamoe_status status = megamoe_tensors_open(path, &file);
    if (status != MEGAMOE_OK)
        return report_failure(status);
    int code = tensor_field_read(path, file, &r->recorded);
    megamoe_checkpoint_close(file);
    if (code == EXIT_DONE && r->recorded.data == NULL)
        code = report_error("%s: topk_ids: missing", path);
    if (code == EXIT_DONE && r->recorded.shape[0] == 0)
        code = report_error("%s: topk_ids: no tokens", path);
    return code;
}

static int set_parameter(const char *text, const char *value, routing_profile *r) {
    const double min = profiles[r->kind].min, max = profiles[r->kind].max;
    char *end;
    r->parameter = strtod(value, &end);
    if (end == value || *end != '\0' || !(r->parameter >= min && r->parameter <= max) ||
        (r->kind == ROUTING_PERMUTED && r->parameter != floor(r->parameter)))
        return report_error("--routing %s: expected a%s number from %.15g to %.15g after the colon",
                            text, r->kind == ROUTING_PERMUTED ? " whole" : "", min, max);
    return EXIT_DONE;
}

/* What equal profiles share, however they were written. */
static int set_name(const char *text, routing_profile *r) {
    const char *word = profiles[r->kind].name;
    int bytes;
    if (r->kind == ROUTING_FILE)
        bytes = asprintf(&r->name, "%s", text);
    else if (r->kind == ROUTING_ZIPF || r->kind == ROUTING_HOT || r->parameter > 0)
        bytes = asprintf(&r->name, "%s:%.15g", word, r->parameter);
    else
        bytes = asprintf(&r->name, "%s", word);
    if (bytes >= 0)
        return EXIT_DONE;
    r->name = NULL;
    return report_error("out of memory");
}

int routing_open(const char *text, routing_profile *r) {
    *r = (routing_profile){0};
    const size_t length = strcspn(text, ":");
    const char *value = text[length] == ':' ? text + length + 1 : NULL;
    int kind = 0;
    while (kind < PROFILES && (strlen(profiles[kind].name) != length ||
                               strncmp(profiles[kind].name, text, length) != 0))
        kind++;
    if (kind == PROFILES)
        return report_error("--routing %s: not one of %s", text, ROUTING_PROFILES);
    r->kind = (routing_kind)kind;
    r->parameter = profiles[kind].parameter;
    if (kind == ROUTING_FILE && (value == NULL || *value == '\0'))
        return report_error("--routing %s: expected file:PATH", text);
    if (value != NULL && kind != ROUTING_FILE && !profiles[kind].has_parameter)
        return report_error("--routing %s: %s takes no number", text, profiles[kind].name);
    if (value != NULL && profiles[kind].has_parameter)
        TRY(set_parameter(text, value, r));
    TRY(set_name(text, r));
    return kind == ROUTING_FILE ? read_file(value, r) : EXIT_DONE;
}

int routing_fit(routing_profile *r, uint64_t seed, int32_t experts, int32_t topk) {
    r->seed = seed;
    r->experts = experts;
    r->topk = topk;
    if (r->kind == ROUTING_FILE) {
        const char *path = strchr(r->name, ':') + 1;
        if (r->recorded.shape[1] != topk)
            return report_error("%s: topk_ids: %" PRId64 " columns; the layer has top-%" PRId32,
                                path, r->recorded.shape[1], topk);
        TRY(tensor_field_check_ids(path, &r->recorded, -1, experts));
    }
    if (r->kind == ROUTING_PERMUTED && r->parameter == 0)
        r->parameter = ceil((double)experts / topk);
    r->order = malloc((size_t)experts * sizeof *r->order);
    r->rarity = malloc((size_t)experts * sizeof *r->rarity);
    r->arrivals = malloc((size_t)experts * sizeof *r->arrivals);
    r->received = malloc((size_t)experts * sizeof *r->received);
    if (r->order == NULL || r->rarity == NULL || r->arrivals == NULL || r->received == NULL)
        return report_error("out of memory for %" PRId32 " experts", experts);
    for (int32_t i = 0; i < experts; i++)
        r->rarity[i] = pow(i + 1, r->parameter);
    return EXIT_DONE;
}

void routing_close(routing_profile *r) {
    free(r->name);
    free(r->recorded.data);
    free(r->order);
    free(r->rarity);
    free(r->arrivals);
    free(r->received);
}

/* Deals out the experts in the order in force, again and again. */
static void deal(const routing_profile *r, int64_t tokens, int32_t *ids) {
    for (int64_t i = 0; i < tokens * r->topk; i++)
        ids[i] = r->order[i % r->experts];
}

static void draw_permuted(const routing_profile *r, uint64_t key, int64_t tokens, int32_t *ids) {
    const int64_t block = (int64_t)r->parameter;
    for (int64_t begin = 0; begin < tokens; begin += block) {
        random_shuffle(random_key(key, (uint64_t)(begin / block)), r->experts, r->order);
        deal(r, begin + block < tokens ? block : tokens - begin, ids + begin * r->topk);
    }
}

/*
 * Chosen one after the other without putting back is what first arrivals are, of independent
 * exponential waiting times whose rates are the popularities.
 */
static void draw_zipf(const routing_profile *r, uint64_t key, int64_t tokens, int32_t *ids) {
    for (int64_t token = 0; token < tokens; token++) {
        const uint64_t token_key = random_key(key, (uint64_t)token);
        int32_t *chosen = ids + token * r->topk;
        for (int32_t i = 0; i < r->experts; i++)
            r->arrivals[i] = -log(random_uniform(token_key, (uint64_t)i)) * r->rarity[i];
        for (int32_t slot = 0; slot < r->topk; slot++) {
            int32_t first = 0;
            for (int32_t i = 1; i < r->experts; i++)
                if (r->arrivals[i] < r->arrivals[first])
                    first = i;
            r->arrivals[first] = INFINITY;
            chosen[slot] = r->order[first];
        }
    }
}

static void draw_hot(const routing_profile *r, uint64_t key, int64_t tokens, int32_t *ids) {
    const int32_t hot = r->order[0];
    for (int64_t token = 0; token < tokens; token++) {
        const uint64_t token_key = random_key(key, (uint64_t)token);
        int32_t *chosen = ids + token * r->topk;
        const bool is_hot =
            r->topk == r->experts || random_uniform(token_key, UINT32_MAX) < r->parameter;
        if (is_hot)
            *chosen++ = hot;
        const int32_t others = r->topk - is_hot;
        random_choose(token_key, r->experts - 1, others, chosen);
        for (int32_t i = 0; i < others; i++)
            chosen[i] += chosen[i] >= hot;
    }
}

static void draw_recorded(const routing_profile *r, uint64_t key, int64_t tokens, int32_t *ids) {
    const int64_t rows = r->recorded.shape[0];
    const int64_t begin = (int64_t)random_below(key, 0, (uint64_t)rows);
    for (int64_t token = 0; token < tokens; token++)
        for (int32_t slot = 0; slot < r->topk; slot++)
            ids[token * r->topk + slot] =
                (int32_t)tensor_field_id(&r->recorded, (begin + token) % rows * r->topk + slot);
}

void routing_draw(const routing_profile *r, uint64_t layer, uint64_t seed, int64_t tokens,
                  int32_t *ids) {
    /* The first layer's are those of the seed alone. */
    const uint64_t batch = layer > 0 ? random_key(seed, layer) : seed;
    const uint64_t key = random_key(batch, KEY_ROUTES);
    const uint64_t popularity = random_key(random_key(r->seed, KEY_POPULARITY), layer);
    switch (r->kind) {
    case ROUTING_RANDOM:
        synth_routes(batch, tokens, r->experts, r->topk, ids);
        break;
    case ROUTING_BALANCED:
        random_shuffle(key, r->experts, r->order);
        deal(r, tokens, ids);
        break;
    case ROUTING_PERMUTED:
        draw_permuted(r, key, tokens, ids);
        break;
    case ROUTING_ZIPF:
        random_shuffle(popularity, r->experts, r->order);
        draw_zipf(r, key, tokens, ids);
        break;
    case ROUTING_HOT:
        random_shuffle(popularity, r->experts, r->order);
        draw_hot(r, key, tokens, ids);
        break;
    case ROUTING_FILE:
        draw_recorded(r, key, tokens, ids);
        break;
    }
}

routing_load routing_measure(const routing_profile *r, const int32_t *ids, int64_t tokens) {
    routing_load load = {0};
    memset(r->received, 0, (size_t)r->experts * sizeof *r->received);
    for (int64_t i = 0; i < tokens * r->topk; i++) {
        if (ids[i] < 0)
            continue;
        const int64_t received = ++r->received[ids[i]];
        load.active += received == 1;
        load.largest = received > load.largest ? received : load.largest;
        load.routes++;
    }
    if (load.routes > 0)
        load.imbalance = (double)load.largest * r->experts / (double)load.routes;
    return load;
}
