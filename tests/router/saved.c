/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "router/router.h"

static const megamoe_router_desc hashed = {.rule = MEGAMOE_ROUTER_SQRT_SOFTPLUS,
                                           .hidden = 21,
                                           .experts = 19,
                                           .topk = 5,
                                           .normalize = true,
                                           .normalize_epsilon = 1e-20f,
                                           .scaling = 1.5f,
                                           .gate_temperature = 0.75f,
                                           .hash_vocab = 31};

static const megamoe_router_desc grouped = {.rule = MEGAMOE_ROUTER_SIGMOID,
                                            .hidden = 9,
                                            .experts = 32,
                                            .topk = 4,
                                            .groups = 8,
                                            .groups_kept = 3,
                                            .scaling = 2.5f};

static uint8_t *save(const megamoe_router *router, size_t *n) {
    *n = mm_router_saved_bytes(router);
    /* Exactly as long as needed, so that a sanitizer sees a byte too many. */
    uint8_t *bytes = malloc(*n);
    mm_router_save(router, bytes);
    return bytes;
}

static void check_round_trip(megamoe_router_desc desc, int biases) {
    t_random random = t_random_start(20);
    fixture f = fixture_open(desc, biases, &random);
    size_t n;
    uint8_t *bytes = save(f.router, &n);
    fixture loaded = f;
    T_OK(mm_router_load(bytes, n, "test", &loaded.router));

    enum { N = 40, MAX_TOPK = 5 };
    uint16_t *x = fixture_tokens(&f, N, &random);
    int64_t input_ids[N];
    for (int t = 0; t < N; t++)
        input_ids[t] = desc.hash_vocab ? t_below(&random, (uint32_t)desc.hash_vocab) : 0;
    int32_t ids[2][N * MAX_TOPK] = {{0}};
    float weights[2][N * MAX_TOPK] = {{0}};
    fixture_route(&f, 0, x, input_ids, N, ids[0], weights[0]);
    fixture_route(&loaded, 0, x, input_ids, N, ids[1], weights[1]);
    T_EQ_MEM(ids[0], ids[1], sizeof ids[0]);
    T_EQ_MEM(weights[0], weights[1], sizeof weights[0]);

    /* The same bytes again: every member of the desc came through. */
    size_t again_n;
    uint8_t *again = save(loaded.router, &again_n);
    T_EQ_INT(again_n, n);
    T_EQ_MEM(again, bytes, n);
    free(again);
    free(x);
    megamoe_router_close(loaded.router);
    free(bytes);
    fixture_close(&f);
}

T_CASE(round_trip) {
    check_round_trip(hashed, 0);
    check_round_trip(grouped, WITH_SELECTION_BIAS);
    check_round_trip(grouped, WITH_LINEAR_BIAS);
    check_round_trip(grouped, WITH_LINEAR_BIAS | WITH_SELECTION_BIAS);
}

T_CASE(bf16_weights_take_two_bytes) {
    t_random random = t_random_start(21);
    megamoe_router_desc desc = grouped;
    desc.hidden = 1000;
    fixture f = fixture_open(desc, 0, &random);
    T_CHECK(mm_router_saved_bytes(f.router) < 32 * 1000 * 2 + 128);
    fixture_close(&f);
}

T_CASE(f32_weights_keep_all_bits) {
    t_random random = t_random_start(22);
    float weight[7][3];
    for (int i = 0; i < 21; i++)
        weight[i / 3][i % 3] = (float)t_normal(&random);
    megamoe_router_desc desc = {.struct_size = sizeof desc,
                                .rule = MEGAMOE_ROUTER_SOFTMAX,
                                .hidden = 3,
                                .experts = 7,
                                .topk = 2};
    const megamoe_view view = {weight, MEGAMOE_DTYPE_F32, 7, 0};
    megamoe_router *router;
    megamoe_router *loaded;
    T_OK(megamoe_router_create(&desc, &view, NULL, NULL, NULL, &router));
    size_t n;
    uint8_t *bytes = save(router, &n);
    T_OK(mm_router_load(bytes, n, "test", &loaded));
    T_EQ_MEM(loaded->weight, router->weight, sizeof(float) * 3 * MM_ROUTER_LANES);
    free(bytes);
    megamoe_router_close(loaded);
    megamoe_router_close(router);
}

T_CASE(every_truncation_is_refused) {
    t_random random = t_random_start(23);
    fixture f = fixture_open(hashed, WITH_SELECTION_BIAS, &random);
    size_t n;
    uint8_t *bytes = save(f.router, &n);
    for (size_t shorter = 0; shorter < n; shorter++) {
        uint8_t *copy = malloc(shorter + 1);
        memcpy(copy, bytes, shorter);
        megamoe_router *router = (megamoe_router *)1;
        T_STATUS(mm_router_load(copy, shorter, "some/file", &router), MEGAMOE_EFORMAT);
        T_CHECK(router == NULL);
        T_CONTAINS(megamoe_last_error(), "some/file: router");
        free(copy);
    }
    free(bytes);
    fixture_close(&f);
}

T_CASE(extra_bytes_are_refused) {
    t_random random = t_random_start(24);
    fixture f = fixture_open(hashed, 0, &random);
    size_t n;
    uint8_t *bytes = save(f.router, &n);
    uint8_t *longer = calloc(1, n + 8);
    memcpy(longer, bytes, n);
    megamoe_router *router;
    T_STATUS(mm_router_load(longer, n + 8, "test", &router), MEGAMOE_EFORMAT);
    free(longer);
    free(bytes);
    fixture_close(&f);
}

T_CASE(misaligned_bytes_are_refused) {
    t_random random = t_random_start(25);
    fixture f = fixture_open(grouped, 0, &random);
    size_t n;
    uint8_t *bytes = save(f.router, &n);
    uint8_t *moved = malloc(n + 1);
    memcpy(moved + 1, bytes, n);
    megamoe_router *router;
    T_STATUS(mm_router_load(moved + 1, n, "test", &router), MEGAMOE_EFORMAT);
    T_CONTAINS(megamoe_last_error(), "aligned");
    free(moved);
    free(bytes);
    fixture_close(&f);
}

/* A refused byte stream must leave no router; an accepted one must route without a fault. */
static void load_and_use(const uint8_t *bytes, size_t n) {
    megamoe_router *router = (megamoe_router *)1;
    const megamoe_status status = mm_router_load(bytes, n, "test", &router);
    if (status != MEGAMOE_OK) {
        T_CHECK(router == NULL);
        T_CHECK(status == MEGAMOE_EFORMAT || status == MEGAMOE_EUNSUPPORTED);
        return;
    }
    fixture f = {.router = router};
    f.desc.struct_size = sizeof f.desc;
    T_OK(megamoe_router_describe(router, &f.desc));
    uint16_t *x = calloc((size_t)f.desc.hidden, sizeof *x);
    int32_t *ids = calloc((size_t)f.desc.topk, sizeof *ids);
    float *weights = calloc((size_t)f.desc.topk, sizeof *weights);
    const int64_t input_id = 0;
    fixture_route(&f, 0, x, &input_id, 1, ids, weights);
    for (int32_t slot = 0; slot < f.desc.topk; slot++)
        T_CHECK(ids[slot] >= 0 && ids[slot] < f.desc.experts);
    free(weights);
    free(ids);
    free(x);
    megamoe_router_close(router);
}

T_CASE(damaged_headers_do_no_harm) {
    t_random random = t_random_start(26);
    fixture f = fixture_open(hashed, WITH_LINEAR_BIAS, &random);
    size_t n;
    uint8_t *bytes = save(f.router, &n);
    for (size_t at = 0; at < 64; at++)
        for (int value = 0; value < 256; value += at < 16 ? 1 : 3) {
            const uint8_t kept = bytes[at];
            bytes[at] = (uint8_t)value;
            load_and_use(bytes, n);
            bytes[at] = kept;
        }
    for (int round = 0; round < 4000; round++) {
        uint8_t header[64];
        memcpy(header, bytes, sizeof header);
        for (int i = 0; i < 3; i++)
            bytes[16 + t_below(&random, 48)] = (uint8_t)t_u64(&random);
        load_and_use(bytes, n);
        memcpy(bytes, header, sizeof header);
    }
    free(bytes);
    fixture_close(&f);
}

T_CASE(shapes_that_wrap_are_refused) {
    t_random random = t_random_start(27);
    fixture f = fixture_open(hashed, 0, &random);
    size_t n;
    uint8_t *bytes = save(f.router, &n);
    const int64_t huge_vocab[4] = {INT64_MAX, (int64_t)1 << 62, (int64_t)1 << 60, -1};
    for (int i = 0; i < 4; i++) {
        memcpy(bytes + 56, &huge_vocab[i], sizeof huge_vocab[i]);
        megamoe_router *router;
        T_STATUS(mm_router_load(bytes, n, "test", &router), MEGAMOE_EFORMAT);
    }
    const int64_t vocab = hashed.hash_vocab;
    memcpy(bytes + 56, &vocab, sizeof vocab);
    const int32_t largest = INT32_MAX;
    memcpy(bytes + 24, &largest, sizeof largest); /* hidden */
    memcpy(bytes + 28, &largest, sizeof largest); /* experts */
    megamoe_router *router;
    T_STATUS(mm_router_load(bytes, n, "test", &router), MEGAMOE_EFORMAT);
    free(bytes);
    fixture_close(&f);
}

T_CASE(a_bad_hash_entry_is_named) {
    t_random random = t_random_start(28);
    fixture f = fixture_open(hashed, 0, &random);
    size_t n;
    uint8_t *bytes = save(f.router, &n);
    const int32_t expert = 19;
    const size_t table = n - ((31 * 5 * 4 + 7) / 8 * 8);
    memcpy(bytes + table + (30 * 5 + 4) * 4, &expert, sizeof expert);
    megamoe_router *router;
    T_STATUS(mm_router_load(bytes, n, "dir/file.mm", &router), MEGAMOE_EFORMAT);
    T_CONTAINS(megamoe_last_error(), "dir/file.mm: router: hash table: token id 30, slot 4");
    free(bytes);
    fixture_close(&f);
}

T_CASE(another_version_is_named) {
    t_random random = t_random_start(29);
    fixture f = fixture_open(grouped, 0, &random);
    size_t n;
    uint8_t *bytes = save(f.router, &n);
    bytes[8] = 2;
    megamoe_router *router;
    T_STATUS(mm_router_load(bytes, n, "test", &router), MEGAMOE_EUNSUPPORTED);
    T_CONTAINS(megamoe_last_error(), "version 2");
    free(bytes);
    fixture_close(&f);
}
