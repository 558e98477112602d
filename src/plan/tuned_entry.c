/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "plan/tuned_entry.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"

/* The members of a key, by what they are in JSON. X(member) */
#define TEXTS(X) X(library) X(routing)
#define NUMBERS(X)                                                                                 \
    X(layout)                                                                                      \
    X(capability_major)                                                                            \
    X(capability_minor)                                                                            \
    X(multiprocessors)                                                                             \
    X(max_ctas)                                                                                    \
    X(l2_bytes)                                                                                    \
    X(clock_khz)                                                                                   \
    X(memory_clock_khz)                                                                            \
    X(memory_bus_bits)                                                                             \
    X(hidden)                                                                                      \
    X(intermediate)                                                                                \
    X(experts)                                                                                     \
    X(topk)                                                                                        \
    X(ranks)
/* X(member, type, words by value) */
#define WORDS(X)                                                                                   \
    X(format, megamoe_format, "", "mxfp4", "nvfp4")                                                \
    X(nvfp4, megamoe_nvfp4_mode, "exact", "folded")                                                \
    X(accumulate, megamoe_accumulate, "mma", "promote")                                            \
    X(input_scale, megamoe_input_scale, "token", "block", "block_f32")

#define X(member, type, ...) static const char *const words_of_##member[] = {__VA_ARGS__};
WORDS(X)
#undef X

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* ---- Reading ---- */

static megamoe_status missing(const char *member, const char *expected) {
    return mm_fail(MEGAMOE_EFORMAT, "\"%s\" must be %s", member, expected);
}

static megamoe_status read_text(const json_t *object, const char *member, char *to, size_t bytes) {
    const char *text = json_string_value(json_object_get(object, member));
    if (!text || strlen(text) >= bytes)
        return missing(member, "a short text");
    snprintf(to, bytes, "%s", text);
    return MEGAMOE_OK;
}

static megamoe_status read_number(const json_t *object, const char *member, int32_t *to) {
    const json_t *value = json_object_get(object, member);
    const json_int_t number = json_integer_value(value);
    if (!json_is_integer(value) || number < 0 || number > INT32_MAX)
        return missing(member, "a whole number from 0 to 2147483647");
    *to = (int32_t)number;
    return MEGAMOE_OK;
}

static megamoe_status read_real(const json_t *object, const char *member, double *to) {
    const json_t *value = json_object_get(object, member);
    if (!json_is_number(value))
        return missing(member, "a number");
    *to = json_number_value(value);
    return MEGAMOE_OK;
}

static megamoe_status read_word(const json_t *object, const char *member, const char *const *words,
                                int n, int *to) {
    const char *text = json_string_value(json_object_get(object, member));
    for (int i = 0; text && i < n; i++)
        if (*words[i] && strcmp(text, words[i]) == 0) {
            *to = i;
            return MEGAMOE_OK;
        }
    return missing(member, "one of its words");
}

static megamoe_status read_key(const json_t *object, megamoe_tuned_key *key) {
    *key = (megamoe_tuned_key)MEGAMOE_INIT(megamoe_tuned_key);
    if (!json_is_object(object))
        return missing("key", "an object");
    int32_t capacity = 0;
    MM_TRY(read_number(object, "capacity", &capacity));
    key->capacity = capacity;
#define X(member) MM_TRY(read_text(object, #member, key->member, sizeof key->member));
    TEXTS(X)
#undef X
#define X(member) MM_TRY(read_number(object, #member, &key->member));
    NUMBERS(X)
#undef X
    int word = 0;
#define X(member, type, ...)                                                                       \
    MM_TRY(read_word(object, #member, words_of_##member, COUNT(words_of_##member), &word));        \
    key->member = (type)word;
    WORDS(X)
#undef X
    return MEGAMOE_OK;
}

static megamoe_status read_plan(const json_t *object, megamoe_tuned_plan *plan) {
    int32_t tokens = 0;
    MM_TRY(read_number(object, "tokens", &tokens));
    plan->tokens = tokens;
    MM_TRY(read_number(object, "token_tile", &plan->token_tile));
    MM_TRY(read_number(object, "lag", &plan->lag));
    MM_TRY(read_real(object, "default_us", &plan->default_us));
    MM_TRY(read_real(object, "us", &plan->us));
    return read_real(object, "gain", &plan->gain);
}

static megamoe_status read_plans(const json_t *array, mm_tuned *tuned) {
    const size_t n = json_array_size(array);
    if (n < 1 || n > MM_TUNED_PLANS_MAX)
        return missing("plans", "an array of 1 to 1024");
    tuned->plans = mm_alloc(n * sizeof *tuned->plans);
    if (!tuned->plans)
        return mm_fail(MEGAMOE_ENOMEM, "measured plans: out of memory");
    for (size_t i = 0; i < n; i++)
        MM_TRY(read_plan(json_array_get(array, i), &tuned->plans[i]));
    tuned->n = (int32_t)n;
    return MEGAMOE_OK;
}

megamoe_status mm_tuned_entry_read(const json_t *value, mm_tuned_entry *entry) {
    *entry = (mm_tuned_entry){.tuned.n = 0};
    const json_t *version = json_object_get(value, "version");
    if (!json_is_integer(version))
        return missing("version", "a whole number");
    if (json_integer_value(version) != MM_TUNED_VERSION)
        return mm_fail(MEGAMOE_EFORMAT, "its version is %" PRId64 ", this library reads %d",
                       (int64_t)json_integer_value(version), MM_TUNED_VERSION);
    megamoe_status status;
    MM_TRY_GOTO(read_key(json_object_get(value, "key"), &entry->key), fail);
    MM_TRY_GOTO(read_plans(json_object_get(value, "plans"), &entry->tuned), fail);
    const char *fault = mm_tuned_entry_fault(entry);
    if (!fault)
        return MEGAMOE_OK;
    status = mm_fail(MEGAMOE_EFORMAT, "%s", fault);
fail:
    mm_tuned_entry_close(entry);
    return status;
}

void mm_tuned_entry_close(mm_tuned_entry *entry) {
    free(entry->tuned.plans);
    entry->tuned = (mm_tuned){0};
}

/* ---- Writing ---- */

/* Takes the value over; false when out of memory. */
static bool set(json_t *object, const char *member, json_t *value) {
    return json_object_set_new(object, member, value) == 0;
}

static json_t *key_json(const megamoe_tuned_key *key) {
    json_t *object = json_object();
    bool good = object != NULL;
#define X(member) good = good && set(object, #member, json_string(key->member));
    TEXTS(X)
#undef X
#define X(member) good = good && set(object, #member, json_integer(key->member));
    NUMBERS(X)
#undef X
#define X(member, type, ...)                                                                       \
    good = good && set(object, #member, json_string(words_of_##member[key->member]));
    WORDS(X)
#undef X
    good = good && set(object, "capacity", json_integer(key->capacity));
    if (good)
        return object;
    json_decref(object);
    return NULL;
}

static json_t *plan_json(const megamoe_tuned_plan *plan) {
    json_t *object = json_object();
    if (object && set(object, "tokens", json_integer(plan->tokens)) &&
        set(object, "token_tile", json_integer(plan->token_tile)) &&
        set(object, "lag", json_integer(plan->lag)) &&
        set(object, "default_us", json_real(plan->default_us)) &&
        set(object, "us", json_real(plan->us)) && set(object, "gain", json_real(plan->gain)))
        return object;
    json_decref(object);
    return NULL;
}

json_t *mm_tuned_entry_json(const mm_tuned_entry *entry) {
    json_t *object = json_object(), *plans = json_array();
    bool good = object && set(object, "version", json_integer(MM_TUNED_VERSION)) &&
                set(object, "key", key_json(&entry->key));
    for (int32_t i = 0; good && i < entry->tuned.n; i++)
        good = json_array_append_new(plans, plan_json(&entry->tuned.plans[i])) == 0;
    if (good && json_object_set(object, "plans", plans) == 0) {
        json_decref(plans);
        return object;
    }
    json_decref(plans);
    json_decref(object);
    return NULL;
}

/* ---- What is sound ---- */

/* A word of printable ASCII. */
static bool is_word(const char *text, size_t room) {
    const size_t n = strnlen(text, room);
    for (size_t i = 0; i < n; i++)
        if (text[i] <= ' ' || text[i] > '~')
            return false;
    return n > 0 && n < room;
}

static bool is_time(double us) {
    return isfinite(us) && us >= 0;
}

static const char *key_fault(const megamoe_tuned_key *key) {
#define X(member)                                                                                  \
    if (!is_word(key->member, sizeof key->member))                                                 \
        return "\"" #member "\" must be a word of printable ASCII";
    TEXTS(X)
#undef X
#define X(member)                                                                                  \
    if (key->member < 0)                                                                           \
        return "\"" #member "\" is negative";
    NUMBERS(X)
#undef X
#define X(member, type, ...)                                                                       \
    if ((int)key->member < 0 || (int)key->member >= COUNT(words_of_##member) ||                    \
        !*words_of_##member[key->member])                                                          \
        return "\"" #member "\" is none of its values";
    WORDS(X)
#undef X
    return key->capacity < 1 || key->capacity > INT32_MAX ? "\"capacity\" is out of range" : NULL;
}

const char *mm_tuned_entry_fault(const mm_tuned_entry *entry) {
    const char *fault = key_fault(&entry->key);
    const megamoe_tuned_plan *plans = entry->tuned.plans;
    for (int32_t i = 0; !fault && i < entry->tuned.n; i++) {
        const megamoe_tuned_plan *plan = &plans[i];
        if (plan->tokens < 1 || plan->tokens > INT32_MAX)
            fault = "\"tokens\" is out of range";
        else if (i > 0 && plan->tokens <= plans[i - 1].tokens)
            fault = "\"tokens\" must ascend";
        else if (plan->token_tile < 0 || plan->lag < 0)
            fault = "\"token_tile\" or \"lag\" is negative";
        else if (!is_time(plan->default_us) || !is_time(plan->us) || !is_time(plan->gain))
            fault = "a time or gain is negative or not finite";
    }
    return fault;
}

static int by_tokens(const void *a, const void *b) {
    const megamoe_tuned_plan *x = a, *y = b;
    return (x->tokens > y->tokens) - (x->tokens < y->tokens);
}

static bool has_tokens(const megamoe_tuned_plan *plans, int32_t n, int64_t tokens) {
    for (int32_t i = 0; i < n; i++)
        if (plans[i].tokens == tokens)
            return true;
    return false;
}

megamoe_status mm_tuned_entry_add(mm_tuned_entry *entry, const megamoe_tuned_plan *plans,
                                  int32_t n) {
    mm_tuned all = {.plans = mm_alloc(((size_t)n + (size_t)entry->tuned.n) * sizeof *all.plans)};
    if (!all.plans)
        return mm_fail(MEGAMOE_ENOMEM, "measured plans: out of memory");
    for (int32_t i = 0; i < n; i++)
        all.plans[all.n++] = plans[i];
    for (int32_t i = 0; i < entry->tuned.n; i++)
        if (!has_tokens(plans, n, entry->tuned.plans[i].tokens))
            all.plans[all.n++] = entry->tuned.plans[i];
    qsort(all.plans, (size_t)all.n, sizeof *all.plans, by_tokens);
    mm_tuned_entry_close(entry);
    entry->tuned = all;
    if (all.n > MM_TUNED_PLANS_MAX)
        return mm_fail(MEGAMOE_EINVAL, "measured plans: %d for one key; at most %d are kept", all.n,
                       MM_TUNED_PLANS_MAX);
    const char *fault = mm_tuned_entry_fault(entry);
    return fault ? mm_fail(MEGAMOE_EINVAL, "measured plans: %s", fault) : MEGAMOE_OK;
}

bool mm_tuned_same_kind(const megamoe_tuned_key *a, const megamoe_tuned_key *b) {
#define X(member) strcmp(a->member, b->member) == 0 &&
    const bool same_texts = TEXTS(X) true;
#undef X
#define X(member, ...) a->member == b->member &&
    return same_texts && NUMBERS(X) WORDS(X) true;
#undef X
}
