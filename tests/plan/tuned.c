/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "plan/tuned.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "megamoe/log.h"
#include "plan/tuned_entry.h"
#include "t.h"

static megamoe_tuned_key some_key(void) {
    return (megamoe_tuned_key){.struct_size = sizeof(megamoe_tuned_key),
                               .library = "1.2.3",
                               .layout = 1,
                               .capability_major = 9,
                               .multiprocessors = 132,
                               .max_ctas = 132,
                               .l2_bytes = 50 << 20,
                               .clock_khz = 1980000,
                               .memory_clock_khz = 3201000,
                               .memory_bus_bits = 6144,
                               .hidden = 4096,
                               .intermediate = 2048,
                               .experts = 32,
                               .topk = 6,
                               .format = MEGAMOE_FORMAT_NVFP4,
                               .nvfp4 = MEGAMOE_NVFP4_FOLDED,
                               .accumulate = MEGAMOE_ACCUMULATE_PROMOTE,
                               .input_scale = MEGAMOE_SCALE_BLOCK,
                               .ranks = 2,
                               .capacity = 1024,
                               .routing = "zipf:1.2"};
}

static const megamoe_tuned_plan some_plans[] = {
    {64, 24, INT32_MAX, 150.25, 140.5, 1.07}, {8, 8, 13, 90, 80, 1.125}, {1, 0, 0, 20, 20, 1}};

/* ---- Warnings ---- */

static int warnings;
static char warning[1024];

static void note_warning(void *user, megamoe_log_level level, const char *message) {
    (void)user;
    warnings += level == MEGAMOE_LOG_WARN;
    snprintf(warning, sizeof warning, "%s", message);
}

static void watch_warnings(void) {
    warnings = 0;
    *warning = 0;
    megamoe_log_set(note_warning, NULL, MEGAMOE_LOG_WARN);
}

static void expect_warning(const char *part) {
    T_EQ_INT(warnings, 1);
    T_CONTAINS(warning, part);
    watch_warnings();
}

/* ---- Storing and finding ---- */

static void check_found(const char *path, const megamoe_tuned_key *key, int32_t n) {
    mm_tuned found;
    T_OK(mm_tuned_find(path, key, &found));
    T_EQ_INT(found.n, n);
    free(found.plans);
}

T_CASE(what_is_stored_is_found) {
    watch_warnings();
    const char *path = t_path("deep/down/plans.json");
    const megamoe_tuned_key key = some_key();
    check_found(path, &key, 0);
    T_OK(megamoe_tuned_store(path, &key, some_plans, 3));
    mm_tuned found;
    T_OK(mm_tuned_find(path, &key, &found));
    T_REQUIRE(found.n == 3);
    for (int i = 0; i < 3; i++) {
        const megamoe_tuned_plan *a = &found.plans[i], *b = &some_plans[2 - i];
        T_CHECK(a->tokens == b->tokens && a->token_tile == b->token_tile && a->lag == b->lag);
        T_CHECK(a->default_us == b->default_us && a->us == b->us && a->gain == b->gain);
    }
    free(found.plans);

    /* New measurements take the place of old ones, the others stay. */
    const megamoe_tuned_plan newer[] = {{8, 16, 20, 90, 70, 1.28}, {16, 8, 1, 95, 94, 1.01}};
    T_OK(megamoe_tuned_store(path, &key, newer, 2));
    T_OK(mm_tuned_find(path, &key, &found));
    T_REQUIRE(found.n == 4);
    static const int64_t tokens[] = {1, 8, 16, 64};
    static const int32_t tiles[] = {0, 16, 8, 24};
    for (int i = 0; i < 4; i++) {
        T_EQ_INT(found.plans[i].tokens, tokens[i]);
        T_EQ_INT(found.plans[i].token_tile, tiles[i]);
    }
    free(found.plans);
    T_EQ_INT(warnings, 0);
}

/* Every member of a key matters. */
T_CASE(another_key_finds_nothing) {
    const char *path = t_path("keys.json");
    const megamoe_tuned_key key = some_key();
    T_OK(megamoe_tuned_store(path, &key, some_plans, 3));
    megamoe_tuned_key other = key;
#define DIFFERS(member, value)                                                                     \
    other.member = value;                                                                          \
    check_found(path, &other, 0);                                                                  \
    other = key;
    DIFFERS(layout, 2)
    DIFFERS(capability_major, 10)
    DIFFERS(capability_minor, 1)
    DIFFERS(multiprocessors, 114)
    DIFFERS(max_ctas, 66)
    DIFFERS(l2_bytes, 1)
    DIFFERS(clock_khz, 1)
    DIFFERS(memory_clock_khz, 2619000)
    DIFFERS(memory_bus_bits, 5120)
    DIFFERS(hidden, 7168)
    DIFFERS(intermediate, 3072)
    DIFFERS(experts, 48)
    DIFFERS(topk, 8)
    DIFFERS(format, MEGAMOE_FORMAT_MXFP4)
    DIFFERS(nvfp4, MEGAMOE_NVFP4_EXACT)
    DIFFERS(accumulate, MEGAMOE_ACCUMULATE_MMA)
    DIFFERS(input_scale, MEGAMOE_SCALE_TOKEN)
    DIFFERS(ranks, 1)
#undef DIFFERS
    strcpy(other.routing, "random");
    check_found(path, &other, 0);
    other = key;
    strcpy(other.library, "1.2.4");
    check_found(path, &other, 0);
    check_found(path, &key, 3);
}

T_CASE(the_next_larger_capacity_serves) {
    const char *path = t_path("capacity.json");
    megamoe_tuned_key key = some_key();
    static const int64_t capacities[] = {4096, 512, 1024};
    for (int i = 0; i < 3; i++) {
        key.capacity = capacities[i];
        T_OK(megamoe_tuned_store(path, &key, some_plans, i + 1));
    }
    static const struct {
        int64_t capacity;
        int32_t n;
    } cases[] = {{1, 2}, {512, 2}, {513, 3}, {1024, 3}, {1025, 1}, {4096, 1}, {4097, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        key.capacity = cases[i].capacity;
        check_found(path, &key, cases[i].n);
    }
}

T_CASE(the_nearest_batch_serves) {
    megamoe_tuned_plan plans[] = {{.tokens = 1}, {.tokens = 8}, {.tokens = 16}, {.tokens = 100}};
    const mm_tuned tuned = {plans, 4};
    static const struct {
        int64_t tokens, nearest; /* 0: none */
    } cases[] = {{0, 0},   {1, 1},  {2, 0},  {5, 0},    {6, 8},     {11, 8}, {12, 16},
                 {24, 16}, {25, 0}, {66, 0}, {67, 100}, {150, 100}, {151, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const megamoe_tuned_plan *plan = mm_tuned_near(&tuned, cases[i].tokens);
        T_EQ_INT(plan ? plan->tokens : 0, cases[i].nearest);
    }
    T_CHECK(!mm_tuned_near(&(mm_tuned){0}, 8));
}

/* ---- What is refused ---- */

T_CASE(unsound_plans_are_not_stored) {
    const char *path = t_path("unsound.json");
    const megamoe_tuned_key key = some_key();
    const megamoe_tuned_plan wrong[] = {
        {0, 8, 1, 1, 1, 1},   {1LL << 40, 8, 1, 1, 1, 1}, {1, -8, 1, 1, 1, 1}, {1, 8, -1, 1, 1, 1},
        {1, 8, 1, NAN, 1, 1}, {1, 8, 1, 1, INFINITY, 1},  {1, 8, 1, 1, 1, -1}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        T_STATUS(megamoe_tuned_store(path, &key, &wrong[i], 1), MEGAMOE_EINVAL);
    const megamoe_tuned_plan twice[] = {some_plans[0], some_plans[0]};
    T_STATUS(megamoe_tuned_store(path, &key, twice, 2), MEGAMOE_EINVAL);
    megamoe_tuned_plan *many = calloc(MM_TUNED_PLANS_MAX + 1, sizeof *many);
    T_REQUIRE(many != NULL);
    for (int i = 0; i <= MM_TUNED_PLANS_MAX; i++)
        many[i].tokens = i + 1;
    T_STATUS(megamoe_tuned_store(path, &key, many, MM_TUNED_PLANS_MAX + 1), MEGAMOE_EINVAL);
    free(many);

    megamoe_tuned_key bad = key;
    strcpy(bad.routing, "hot expert");
    T_STATUS(megamoe_tuned_store(path, &bad, some_plans, 1), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "routing");
    bad = key;
    memset(bad.library, 'x', sizeof bad.library);
    T_STATUS(megamoe_tuned_store(path, &bad, some_plans, 1), MEGAMOE_EINVAL);
    bad = key;
    bad.format = (megamoe_format)0;
    T_STATUS(megamoe_tuned_store(path, &bad, some_plans, 1), MEGAMOE_EINVAL);
    bad = key;
    bad.capacity = 0;
    T_STATUS(megamoe_tuned_store(path, &bad, some_plans, 1), MEGAMOE_EINVAL);
    bad = key;
    bad.struct_size = 0;
    T_STATUS(megamoe_tuned_store(path, &bad, some_plans, 1), MEGAMOE_EINVAL);
    T_STATUS(megamoe_tuned_store(path, NULL, some_plans, 1), MEGAMOE_EINVAL);
    T_STATUS(megamoe_tuned_store(path, &key, NULL, 1), MEGAMOE_EINVAL);
    T_STATUS(megamoe_tuned_store(path, &key, some_plans, 0), MEGAMOE_EINVAL);
    T_STATUS(megamoe_tuned_each(path, NULL, NULL), MEGAMOE_EINVAL);
    check_found(path, &key, 0);
}

/* A file is ignored as a whole, and storing puts a good one in its place. */
static void check_useless_file(const char *text, size_t bytes, const char *why) {
    const char *path = t_path("useless.json");
    const megamoe_tuned_key key = some_key();
    t_write_file(path, text, bytes);
    watch_warnings();
    check_found(path, &key, 0);
    expect_warning(why);
    T_OK(megamoe_tuned_store(path, &key, some_plans, 3));
    expect_warning(why);
    check_found(path, &key, 3);
    T_EQ_INT(warnings, 0);
}

T_CASE(corrupt_files_are_ignored_and_replaced) {
    const char *path = t_path("good.json");
    const megamoe_tuned_key key = some_key();
    T_OK(megamoe_tuned_store(path, &key, some_plans, 3));
    size_t bytes;
    char *text = t_read_file(path, &bytes);
    for (size_t n = 0; n < bytes; n += 1 + n / 8) /* cut anywhere */
        check_useless_file(text, n, "ignored");
    free(text);
    check_useless_file("[]", 2, "no array");
    check_useless_file("{\"tuned\": 1}", 12, "no array");
    check_useless_file("{\"tuned\": [], \"tuned\": []}", 26, "duplicate");
    check_useless_file("\xff\xfe", 2, "ignored");

    const char *huge = t_path("useless.json");
    t_write_file(huge, "", 0);
    T_REQUIRE(truncate(huge, 1LL << 33) == 0);
    watch_warnings();
    check_found(huge, &key, 0);
    expect_warning("bytes; at most");
}

static void count_plans(void *user, const megamoe_tuned_key *key, const megamoe_tuned_plan *plans,
                        int32_t n) {
    (void)key;
    for (int32_t i = 0; i < n; i++)
        *(int64_t *)user += plans[i].tokens;
}

#define X32 "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"

/* One entry after the other is spoilt: it is ignored alone, and storing keeps it as it is. */
T_CASE(foreign_entries_are_ignored_and_kept) {
    static const char *const spoilt[][3] = {
        {"\"version\": 1", "\"version\": 2", "version is 2"},
        {"\"version\": 1", "\"version\": \"1\"", "version"},
        {"\"hidden\": 4096", "\"hidden\": \"4096\"", "\"hidden\""},
        {"\"hidden\": 4096", "\"hidden\": -1", "\"hidden\""},
        {"\"hidden\": 4096", "\"hidden\": 99999999999", "\"hidden\""},
        {"\"hidden\": 4096,", "", "\"hidden\""},
        {"\"folded\"", "\"bent\"", "\"nvfp4\""},
        {"\"format\": \"nvfp4\"", "\"format\": \"\"", "\"format\""},
        {"\"zipf:1.2\"", "\"" X32 X32 X32 X32 "\"", "\"routing\""},
        {"\"capacity\": 1024", "\"capacity\": 0", "\"capacity\""},
        {"\"tokens\": 8", "\"tokens\": 64", "ascend"},
        {"\"tokens\": 8", "\"tokens\": 8.0", "\"tokens\""},
        {"\"token_tile\": 8", "\"token_tile\": null", "\"token_tile\""},
        {"\"gain\": 1.125", "\"gain\": \"much\"", "\"gain\""},
        {"\"gain\": 1.125", "\"gain\": -1.125", "gain"},
        {"\"plans\": [", "\"plans\": [], \"old\": [", "\"plans\""},
    };
    const megamoe_tuned_key key = some_key();
    for (size_t i = 0; i < sizeof spoilt / sizeof *spoilt; i++) {
        const char *path = t_path("spoilt.json");
        (void)unlink(path);
        T_OK(megamoe_tuned_store(path, &key, some_plans, 3));
        size_t bytes;
        char *text = t_read_file(path, &bytes), *changed;
        char *at = memmem(text, bytes, spoilt[i][0], strlen(spoilt[i][0]));
        T_REQUIRE(at != NULL);
        const int n = asprintf(&changed, "%.*s%s%.*s", (int)(at - text), text, spoilt[i][1],
                               (int)(bytes - (size_t)(at - text) - strlen(spoilt[i][0])),
                               at + strlen(spoilt[i][0]));
        T_REQUIRE(n > 0);
        t_write_file(path, changed, (size_t)n);
        free(changed);
        free(text);
        watch_warnings();
        check_found(path, &key, 0);
        expect_warning(spoilt[i][2]);
        T_OK(megamoe_tuned_store(path, &key, some_plans, 2));
        int64_t sum = 0;
        T_OK(megamoe_tuned_each(path, count_plans, &sum));
        T_EQ_INT(sum, 72);
        text = t_read_file(path, &bytes);
        if (spoilt[i][1][0] && !strchr(spoilt[i][1], '[')) /* which is followed by a new line */
            T_CONTAINS(text, spoilt[i][1]);
        free(text);
    }
}

T_CASE(a_file_that_cannot_be_read_is_not_replaced) {
    const char *path = t_path("directory");
    const megamoe_tuned_key key = some_key();
    T_REQUIRE(mkdir(path, 0777) == 0);
    watch_warnings();
    check_found(path, &key, 0);
    expect_warning("ignored");
    T_STATUS(megamoe_tuned_store(path, &key, some_plans, 1), MEGAMOE_EIO);
    T_STATUS(megamoe_tuned_forget(path, NULL, NULL, NULL), MEGAMOE_EIO);
    T_STATUS(megamoe_tuned_store("/proc/none/plans.json", &key, some_plans, 1), MEGAMOE_EIO);
}

/* ---- Forgetting ---- */

static bool of_two_ranks(void *user, const megamoe_tuned_key *key) {
    (void)user;
    return key->ranks == 2;
}

T_CASE(entries_are_forgotten) {
    watch_warnings();
    const char *path = t_path("forget.json");
    int32_t removed = -1;
    T_OK(megamoe_tuned_forget(path, NULL, NULL, &removed));
    T_EQ_INT(removed, 0);
    megamoe_tuned_key key = some_key();
    for (key.ranks = 1; key.ranks <= 3; key.ranks++)
        T_OK(megamoe_tuned_store(path, &key, some_plans, 3));
    T_OK(megamoe_tuned_forget(path, of_two_ranks, NULL, &removed));
    T_EQ_INT(removed, 1);
    key.ranks = 2;
    check_found(path, &key, 0);
    key.ranks = 1;
    check_found(path, &key, 3);
    T_OK(megamoe_tuned_forget(path, NULL, NULL, &removed));
    T_EQ_INT(removed, 2);
    check_found(path, &key, 0);
    T_EQ_INT(warnings, 0);
    t_write_file(path, "{", 1);
    T_OK(megamoe_tuned_forget(path, NULL, NULL, NULL));
    watch_warnings();
    check_found(path, &key, 0);
    T_EQ_INT(warnings, 0);
}

/* ---- Several processes ---- */

enum { PROCESSES = 6, STORES = 12 };

/* Each stores its own keys and tokens of a common one; none is lost. */
T_CASE(processes_store_at_once) {
    const char *path = t_path("shared.json");
    pid_t children[PROCESSES];
    for (int p = 0; p < PROCESSES; p++) {
        children[p] = fork();
        T_REQUIRE(children[p] >= 0);
        if (children[p] > 0)
            continue;
        int failed = 0;
        for (int i = 0; i < STORES; i++) {
            megamoe_tuned_key key = some_key();
            megamoe_tuned_plan plan = some_plans[0];
            plan.tokens = 1 + p * STORES + i;
            failed += megamoe_tuned_store(path, &key, &plan, 1) != MEGAMOE_OK;
            key.hidden = p;
            failed += megamoe_tuned_store(path, &key, &plan, 1) != MEGAMOE_OK;
        }
        _exit(failed != 0);
    }
    for (int p = 0; p < PROCESSES; p++) {
        int status;
        T_REQUIRE(waitpid(children[p], &status, 0) == children[p]);
        T_EQ_INT(status, 0);
    }
    megamoe_tuned_key key = some_key();
    check_found(path, &key, PROCESSES * STORES);
    for (key.hidden = 0; key.hidden < PROCESSES; key.hidden++)
        check_found(path, &key, STORES);
}

/* ---- Where it is ---- */

T_CASE(the_place_follows_the_environment) {
    char path[4096];
    static const struct {
        const char *own, *cache, *home, *path;
    } cases[] = {{"/a", "/b", "/c", "/a/plans.json"},
                 {"", "/b", "/c", "/b/megamoe/plans.json"},
                 {"", "b", "/c", "/c/.cache/megamoe/plans.json"},
                 {"", "", "/c", "/c/.cache/megamoe/plans.json"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        setenv("MEGAMOE_CACHE_DIR", cases[i].own, 1);
        setenv("XDG_CACHE_HOME", cases[i].cache, 1);
        setenv("HOME", cases[i].home, 1);
        T_OK(megamoe_tuned_path(path, sizeof path));
        T_EQ_STR(path, cases[i].path);
    }
    T_STATUS(megamoe_tuned_path(path, 10), MEGAMOE_EINVAL);
    T_STATUS(megamoe_tuned_path(NULL, 10), MEGAMOE_EINVAL);
    unsetenv("HOME");
    T_STATUS(megamoe_tuned_path(path, sizeof path), MEGAMOE_ENOTFOUND);
    const megamoe_tuned_key key = some_key();
    T_STATUS(megamoe_tuned_store(NULL, &key, some_plans, 3), MEGAMOE_ENOTFOUND);
    check_found(NULL, &key, 0);
    setenv("MEGAMOE_CACHE_DIR", t_path("cache"), 1);
    T_OK(megamoe_tuned_store(NULL, &key, some_plans, 3));
    check_found(NULL, &key, 3);
}
