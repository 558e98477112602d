/* SPDX-License-Identifier: Apache-2.0 */
#include "trace_json.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static const char *const phases[] = {"count", "dispatch", "fc1", "fc2", "combine"};
static const char *const titles[] = {"count", "dispatch", "FC1", "FC2", "combine"};
static const char *const parts[] = {"", "wait", "load", "multiply", "finish", "store"};
static const char *const lanes[] = {"", "dispatch", "load", "multiply", "store"};

enum { LANES_PER_TEAM = 3, LANES_MAX = 16 }; /* of a worker */

/* A number for each worker and lane, which orders them too. */
static int64_t thread_of(const megamoe_span *s) {
    const int64_t lane = s->team < 0 ? s->lane : LANES_PER_TEAM * s->team + s->lane;
    return (int64_t)s->worker * LANES_MAX + lane;
}

static json_t *about(const char *what, int32_t rank, int64_t thread, const char *key,
                     json_t *value) {
    return json_pack("{s:s, s:s, s:i, s:I, s:{s:o}}", "ph", "M", "name", what, "pid", rank, "tid",
                     (json_int_t)thread, "args", key, value);
}

static void name_thread(const megamoe_span *s, int32_t rank, bool gpu, json_t *events) {
    char name[64];
    int used = snprintf(name, sizeof name, "%s %" PRId32, gpu ? "SM" : "thread", s->worker);
    if (s->team >= 0)
        used += snprintf(name + used, sizeof name - (size_t)used, " team %" PRId32, s->team);
    if (s->lane != MEGAMOE_LANE_WORKER)
        snprintf(name + used, sizeof name - (size_t)used, " %s", lanes[s->lane]);
    const int64_t thread = thread_of(s);
    json_array_append_new(events, about("thread_name", rank, thread, "name", json_string(name)));
    json_array_append_new(events, about("thread_sort_index", rank, thread, "sort_index",
                                        json_integer((json_int_t)thread)));
}

static json_t *event_of(const megamoe_span *s, int32_t rank) {
    char name[96];
    const bool tile = s->expert >= 0, part = s->part != MEGAMOE_PART_WHOLE;
    int used =
        snprintf(name, sizeof name, "%s%s%s", parts[s->part], part ? " " : "", titles[s->phase]);
    if (tile)
        snprintf(name + used, sizeof name - (size_t)used, " e%" PRId32 " tile %" PRId32, s->expert,
                 s->tile);
    json_t *arguments = json_pack("{s:i}", "worker", s->worker);
    if (s->team >= 0)
        json_object_set_new(arguments, "team", json_integer(s->team));
    if (tile)
        json_object_update_new(arguments, json_pack("{s:i, s:i, s:i}", "expert", s->expert, "tile",
                                                    s->tile, "tokens", s->tokens));
    return json_pack("{s:s, s:s, s:s, s:f, s:f, s:i, s:I, s:o}", "name", name, "cat",
                     part ? parts[s->part] : phases[s->phase], "ph", "X", "ts", s->begin_us, "dur",
                     s->end_us - s->begin_us, "pid", rank, "tid", (json_int_t)thread_of(s), "args",
                     arguments);
}

/* By thread, then what begins first and, of these, what contains the others. */
static int in_order(const void *a, const void *b) {
    const megamoe_span *x = a, *y = b;
    const int64_t by_thread = thread_of(x) - thread_of(y);
    if (by_thread != 0)
        return by_thread < 0 ? -1 : 1;
    if (x->begin_us != y->begin_us)
        return x->begin_us < y->begin_us ? -1 : 1;
    if (x->end_us != y->end_us)
        return x->end_us > y->end_us ? -1 : 1;
    return (int)x->part - (int)y->part;
}

void trace_events(const trace_rank *t, int32_t rank, bool gpu, json_t *events) {
    qsort(t->spans, (size_t)t->n, sizeof *t->spans, in_order);
    char name[128];
    snprintf(name, sizeof name, "rank %" PRId32 ": %s", rank, t->device);
    json_array_append_new(events, about("process_name", rank, 0, "name", json_string(name)));
    for (int64_t i = 0; i < t->n; i++) {
        if (i == 0 || thread_of(&t->spans[i]) != thread_of(&t->spans[i - 1]))
            name_thread(&t->spans[i], rank, gpu, events);
        json_array_append_new(events, event_of(&t->spans[i], rank));
    }
}
