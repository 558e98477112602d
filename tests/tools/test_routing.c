/* SPDX-License-Identifier: Apache-2.0 */
/* Profiles of routes: what they promise of every batch, and how they are named and refused. */
#include "routing.h"

#include <stdio.h>
#include <string.h>

#include "report.h"
#include "t.h"

enum { EXPERTS = 32, TOPK = 6, TOKENS = 4096 };

static int32_t ids[TOKENS * TOPK], again[TOKENS * TOPK];

static void open_profile(const char *profile, int32_t experts, int32_t topk, routing_profile *r) {
    T_REQUIRE(routing_open(profile, r) == EXIT_DONE);
    T_REQUIRE(routing_fit(r, 7, experts, topk) == EXIT_DONE);
}

static void check_valid(const char *profile, int64_t tokens, int32_t experts, int32_t topk) {
    for (int64_t token = 0; token < tokens; token++)
        for (int32_t i = 0; i < topk; i++) {
            const int32_t id = ids[token * topk + i];
            T_CHECK_MSG(id >= 0 && id < experts, "%s: id %d", profile, id);
            for (int32_t j = 0; j < i; j++)
                T_CHECK_MSG(ids[token * topk + j] != id, "%s: token %d has %d twice", profile,
                            (int)token, id);
        }
}

/* Ids are experts, different within a token, and a function of the seed. */
T_CASE(every_profile_is_valid) {
    static const char *const all[] = {"random",   "balanced", "permuted", "permuted:3", "zipf",
                                      "zipf:2.5", "zipf:10",  "hot",      "hot:0.25",   "hot:0"};
    static const int32_t shapes[][2] = {{32, 6}, {7, 3}, {4, 4}, {1, 1}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        for (size_t j = 0; j < sizeof shapes / sizeof *shapes; j++) {
            routing_profile r;
            open_profile(all[i], shapes[j][0], shapes[j][1], &r);
            routing_draw(&r, 0, 11, 500, ids);
            check_valid(all[i], 500, shapes[j][0], shapes[j][1]);
            routing_draw(&r, 0, 11, 500, again);
            T_EQ_MEM(ids, again, 500 * (size_t)shapes[j][1] * sizeof *ids);
            routing_close(&r);
        }
}

/* Stored results were measured with these. */
T_CASE(random_keeps_its_ids) {
    static const int32_t expected[] = {12, 21, 3, 0, 13, 31, 3, 12, 16, 0, 30, 2};
    routing_profile r;
    open_profile("random", EXPERTS, TOPK, &r);
    routing_draw(&r, 0, 65, 2, ids);
    for (int i = 0; i < 2 * TOPK; i++)
        T_EQ_INT(ids[i], expected[i]);
    routing_draw(&r, 1, 65, 2, again);
    T_CHECK(memcmp(ids, again, 2 * TOPK * sizeof *ids) != 0);
    routing_close(&r);
}

static int64_t least_received(const routing_profile *r) {
    int64_t least = INT64_MAX;
    for (int32_t i = 0; i < r->experts; i++)
        least = r->received[i] < least ? r->received[i] : least;
    return least;
}

T_CASE(balanced_is_even) {
    static const int64_t batches[] = {1, 2, 5, 6, 16, 100, 4096};
    routing_profile r;
    open_profile("balanced", EXPERTS, TOPK, &r);
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
        routing_draw(&r, 3, i, batches[i], ids);
        const routing_load load = routing_measure(&r, ids, batches[i]);
        T_CHECK(load.largest - least_received(&r) <= 1);
        const int64_t routes = batches[i] * TOPK;
        T_EQ_INT(load.active, routes < EXPERTS ? routes : EXPERTS);
        T_NEAR(load.imbalance, (double)load.largest * EXPERTS / (double)routes, 1e-12);
    }
    routing_close(&r);
}

T_CASE(blocks_are_even_and_differ) {
    routing_profile r;
    open_profile("permuted:16", EXPERTS, TOPK, &r); /* 16 * 6 = 3 * 32 */
    routing_draw(&r, 0, 5, 64, ids);
    for (int block = 0; block < 4; block++) {
        const routing_load load = routing_measure(&r, ids + block * 16 * TOPK, 16);
        T_EQ_INT(load.largest, 3);
        T_EQ_INT(least_received(&r), 3);
        if (block > 0)
            T_CHECK(memcmp(ids, ids + block * 16 * TOPK, 16 * TOPK * sizeof *ids) != 0);
    }
    routing_close(&r);
    open_profile("permuted", EXPERTS, TOPK, &r); /* 6 tokens reach all experts */
    T_EQ_F64(r.parameter, 6);
    routing_close(&r);
}

T_CASE(zipf_follows_its_law) {
    routing_profile r;
    open_profile("zipf:1", EXPERTS, 1, &r);
    routing_draw(&r, 0, 1, TOKENS, ids);
    routing_measure(&r, ids, TOKENS);
    double sum = 0;
    for (int i = 1; i <= EXPERTS; i++)
        sum += 1.0 / i;
    /* Within five deviations. `order` is still that of the draw. */
    for (int i = 0; i < 4; i++) {
        const double expected = TOKENS / ((i + 1) * sum);
        T_NEAR((double)r.received[r.order[i]], expected, 140);
    }
    /* Who is popular depends on the layer, not on the batch. */
    const int32_t popular = r.order[0];
    routing_draw(&r, 0, 2, 1, ids);
    T_EQ_INT(r.order[0], popular);
    bool differs = false;
    for (uint64_t layer = 1; layer < 4; layer++) {
        routing_draw(&r, layer, 2, 1, ids);
        differs = differs || r.order[0] != popular;
    }
    T_CHECK(differs);
    routing_close(&r);
    open_profile("zipf:0", EXPERTS, TOPK, &r); /* all alike */
    routing_draw(&r, 0, 1, TOKENS, ids);
    T_CHECK(routing_measure(&r, ids, TOKENS).imbalance < 1.2);
    routing_close(&r);
}

T_CASE(one_expert_is_hot) {
    routing_profile r;
    open_profile("hot", EXPERTS, TOPK, &r);
    routing_draw(&r, 0, 1, TOKENS, ids);
    T_EQ_INT(routing_measure(&r, ids, TOKENS).largest, TOKENS);
    routing_close(&r);
    open_profile("hot:0.5", EXPERTS, TOPK, &r);
    routing_draw(&r, 0, 1, TOKENS, ids);
    const routing_load load = routing_measure(&r, ids, TOKENS);
    T_NEAR((double)load.largest, TOKENS / 2.0, 160);
    T_EQ_INT(r.received[r.order[0]], load.largest);
    routing_close(&r);
}

/* A safetensors file with one tensor, two columns wide. */
static const char *record(const char *name, const char *dtype, int rows, const void *data,
                          size_t bytes) {
    char file[1024];
    const int header = snprintf(file + 8, sizeof file - 8,
                                "{\"%s\":{\"dtype\":\"%s\",\"shape\":[%d,2],"
                                "\"data_offsets\":[0,%zu]}}",
                                name, dtype, rows, bytes);
    memset(file, 0, 8);
    file[0] = (char)header;
    memcpy(file + 8 + header, data, bytes);
    const char *path = t_path("routes.safetensors");
    t_write_file(path, file, 8 + (size_t)header + bytes);
    return path;
}

T_CASE(recorded_routes) {
    static const int32_t rows[3][2] = {{0, 1}, {2, -1}, {3, 4}};
    char profile[1024];
    snprintf(profile, sizeof profile, "file:%s", record("topk_ids", "I32", 3, rows, sizeof rows));
    routing_profile r;
    open_profile(profile, 5, 2, &r);
    T_EQ_STR(r.name, profile);
    for (uint64_t seed = 0; seed < 8; seed++) {
        routing_draw(&r, 0, seed, 7, ids);
        int begin = 0;
        while (begin < 3 && memcmp(ids, rows[begin], sizeof rows[begin]) != 0)
            begin++;
        T_REQUIRE(begin < 3);
        for (int token = 0; token < 7; token++)
            T_EQ_MEM(ids + 2 * token, rows[(begin + token) % 3], sizeof rows[0]);
    }
    const routing_load load = routing_measure(&r, &rows[0][0], 3);
    T_EQ_INT(load.active, 5);
    T_EQ_INT(load.largest, 1);
    T_EQ_F64(load.imbalance, 1);
    routing_close(&r);
    T_EQ_INT(routing_open(profile, &r), EXIT_DONE);
    T_EQ_INT(routing_fit(&r, 0, 4, 2), EXIT_BAD_INPUT); /* id 4 */
    routing_close(&r);
    T_EQ_INT(routing_open(profile, &r), EXIT_DONE);
    T_EQ_INT(routing_fit(&r, 0, 5, 3), EXIT_BAD_INPUT); /* two columns */
    routing_close(&r);
    static const int64_t wide[2] = {1, 0};
    record("topk_ids", "I64", 1, wide, sizeof wide);
    open_profile(profile, 5, 2, &r);
    routing_draw(&r, 0, 0, 1, ids);
    T_EQ_INT(ids[0], 1);
    T_EQ_INT(ids[1], 0);
    routing_close(&r);
    record("ids", "I64", 1, wide, sizeof wide);
    T_EQ_INT(routing_open(profile, &r), EXIT_BAD_INPUT);
    routing_close(&r);
    record("topk_ids", "F32", 2, wide, sizeof wide);
    T_EQ_INT(routing_open(profile, &r), EXIT_BAD_INPUT);
    routing_close(&r);
}

T_CASE(names) {
    static const char *const names[][2] = {{"random", "random"},        {"zipf", "zipf:1"},
                                           {"zipf:1.0", "zipf:1"},      {"hot", "hot:1"},
                                           {"hot:0", "hot:0"},          {"permuted", "permuted"},
                                           {"permuted:8", "permuted:8"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        routing_profile r;
        T_EQ_INT(routing_open(names[i][0], &r), EXIT_DONE);
        T_EQ_STR(r.name, names[i][1]);
        routing_close(&r);
    }
    static const char *const bad[] = {"",
                                      "Random",
                                      "rand",
                                      "random:1",
                                      "balanced:2",
                                      "zipf:",
                                      "zipf:x",
                                      "hot:2",
                                      "permuted:1.5",
                                      "permuted:0",
                                      "file",
                                      "zipf:nan",
                                      "file:",
                                      "file:/does/not/exist"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        routing_profile r;
        T_CHECK_MSG(routing_open(bad[i], &r) == EXIT_BAD_INPUT, "%s", bad[i]);
        routing_close(&r);
    }
}
