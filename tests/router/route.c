/* SPDX-License-Identifier: Apache-2.0 */
/* Batches, threads, views and special rows. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "num/bf16.h"

enum { HIDDEN = 75, EXPERTS = 53, TOPK = 6, TOKENS = 523, VOCAB = 97 };

static const megamoe_router_desc plain = {.rule = MEGAMOE_ROUTER_SQRT_SOFTPLUS,
                                          .hidden = HIDDEN,
                                          .experts = EXPERTS,
                                          .topk = TOPK,
                                          .normalize = true,
                                          .scaling = 1.5f};

typedef struct answers {
    int32_t ids[TOKENS][TOPK];
    float weights[TOKENS][TOPK];
} answers;

static void check_same(const answers *a, const answers *b) {
    T_EQ_MEM(a->ids, b->ids, sizeof a->ids);
    T_EQ_MEM(a->weights, b->weights, sizeof a->weights);
}

T_CASE(a_token_does_not_depend_on_its_batch) {
    t_random random = t_random_start(3);
    fixture f = fixture_open(plain, WITH_SELECTION_BIAS, &random);
    uint16_t *x = fixture_tokens(&f, TOKENS, &random);
    static answers together, apart;
    fixture_route(&f, 0, x, NULL, TOKENS, together.ids[0], together.weights[0]);
    for (int64_t t = 0; t < TOKENS;) {
        const int64_t n = 1 + t_below(&random, 7);
        const int64_t batch = n < TOKENS - t ? n : TOKENS - t;
        fixture_route(&f, 0, x + t * HIDDEN, NULL, batch, apart.ids[t], apart.weights[t]);
        t += batch;
    }
    check_same(&together, &apart);
    free(x);
    fixture_close(&f);
}

T_CASE(a_token_does_not_depend_on_the_threads) {
    t_random random = t_random_start(4);
    fixture f = fixture_open(plain, WITH_LINEAR_BIAS, &random);
    uint16_t *x = fixture_tokens(&f, TOKENS, &random);
    static answers alone, shared;
    fixture_route(&f, 0, x, NULL, TOKENS, alone.ids[0], alone.weights[0]);
    for (int32_t threads = 1; threads <= 7; threads += 2) {
        memset(&shared, 0xAA, sizeof shared);
        fixture_route(&f, threads, x, NULL, TOKENS, shared.ids[0], shared.weights[0]);
        check_same(&alone, &shared);
        memset(shared.ids, 0xAA, sizeof shared.ids[0]);
        fixture_route(&f, threads, x, NULL, 1, shared.ids[0], shared.weights[0]);
        check_same(&alone, &shared);
    }
    free(x);
    fixture_close(&f);
}

T_CASE(a_nan_row_gets_the_first_experts_and_nan_weights) {
    t_random random = t_random_start(5);
    const float poisons[2] = {NAN, INFINITY}; /* an infinite input meets weights of both signs */
    for (int p = 0; p < 2; p++) {
        fixture f = fixture_open(plain, WITH_SELECTION_BIAS, &random);
        uint16_t *x = fixture_tokens(&f, 9, &random);
        static answers clean, poisoned;
        fixture_route(&f, 0, x, NULL, 9, clean.ids[0], clean.weights[0]);
        x[4 * HIDDEN + 7] = mm_bf16_from_f32(poisons[p]);
        x[4 * HIDDEN + 8] = mm_bf16_from_f32(poisons[p]);
        fixture_route(&f, 2, x, NULL, 9, poisoned.ids[0], poisoned.weights[0]);
        for (int t = 0; t < 9; t++) {
            if (t == 4) {
                for (int slot = 0; slot < TOPK; slot++) {
                    T_EQ_INT(poisoned.ids[t][slot], slot);
                    T_CHECK(isnan(poisoned.weights[t][slot]));
                }
                continue;
            }
            T_EQ_MEM(poisoned.ids[t], clean.ids[t], sizeof clean.ids[t]);
            T_EQ_MEM(poisoned.weights[t], clean.weights[t], sizeof clean.weights[t]);
        }
        free(x);
        fixture_close(&f);
    }
}

static megamoe_router_desc hashed(void) {
    megamoe_router_desc desc = plain;
    desc.hash_vocab = VOCAB;
    return desc;
}

T_CASE(a_nan_row_of_a_hash_layer_keeps_its_ids) {
    t_random random = t_random_start(6);
    fixture f = fixture_open(hashed(), 0, &random);
    uint16_t *x = fixture_tokens(&f, 1, &random);
    x[0] = mm_bf16_from_f32(NAN);
    const int64_t input_id = VOCAB - 1;
    int32_t ids[TOPK];
    float weights[TOPK];
    fixture_route(&f, 0, x, &input_id, 1, ids, weights);
    for (int slot = 0; slot < TOPK; slot++) {
        T_EQ_INT(ids[slot], f.hash_table[input_id * TOPK + slot]);
        T_CHECK(isnan(weights[slot]));
    }
    free(x);
    fixture_close(&f);
}

T_CASE(token_ids_outside_the_table_are_named_and_nothing_is_written) {
    t_random random = t_random_start(7);
    fixture f = fixture_open(hashed(), 0, &random);
    uint16_t *x = fixture_tokens(&f, 3, &random);
    const int64_t bad[4] = {-1, VOCAB, INT64_MIN, INT64_MAX};
    for (int i = 0; i < 4; i++) {
        int64_t input_ids[3] = {0, 5, bad[i]};
        int32_t ids[3][TOPK];
        float weights[3][TOPK];
        memset(ids, 0x55, sizeof ids);
        memset(weights, 0x55, sizeof weights);
        const megamoe_view x_view = {x, MEGAMOE_DTYPE_BF16, 3, 0};
        const megamoe_view input_view = {input_ids, MEGAMOE_DTYPE_I64, 1, 0};
        const megamoe_view ids_view = {ids, MEGAMOE_DTYPE_I32, 3, 0};
        const megamoe_view weights_view = {weights, MEGAMOE_DTYPE_F32, 3, 0};
        T_STATUS(
            megamoe_router_route(f.router, NULL, &x_view, &input_view, 3, &ids_view, &weights_view),
            MEGAMOE_EID);
        T_CONTAINS(megamoe_last_error(), "token 2");
        char text[32];
        snprintf(text, sizeof text, "%" PRId64, bad[i]);
        T_CONTAINS(megamoe_last_error(), text);
        for (int t = 0; t < 3; t++)
            for (int slot = 0; slot < TOPK; slot++) {
                T_EQ_HEX((uint32_t)ids[t][slot], 0x55555555u);
                T_EQ_HEX(mm_f32_bits(weights[t][slot]), 0x55555555u);
            }
        T_STATUS(megamoe_router_route(f.router, NULL, &x_view, NULL, 3, &ids_view, &weights_view),
                 MEGAMOE_EINVAL);
        T_CONTAINS(megamoe_last_error(), "input_ids");
    }
    free(x);
    fixture_close(&f);
}

T_CASE(strides_and_64_bit_ids) {
    enum { N = 11, X_STRIDE = HIDDEN + 5, ID_STRIDE = TOPK + 2, WEIGHT_STRIDE = TOPK + 1 };
    t_random random = t_random_start(8);
    fixture f = fixture_open(hashed(), 0, &random);
    uint16_t *x = fixture_tokens(&f, N, &random);
    int64_t input_ids[N];
    int32_t narrow_input_ids[N];
    uint16_t strided_x[N][X_STRIDE];
    memset(strided_x, 0xFF, sizeof strided_x);
    for (int t = 0; t < N; t++) {
        input_ids[t] = t_below(&random, VOCAB);
        narrow_input_ids[t] = (int32_t)input_ids[t];
        memcpy(strided_x[t], x + t * HIDDEN, HIDDEN * sizeof *x);
    }
    int32_t ids[N][TOPK];
    float weights[N][TOPK];
    fixture_route(&f, 0, x, input_ids, N, ids[0], weights[0]);

    int64_t wide_ids[N][ID_STRIDE];
    float strided_weights[N][WEIGHT_STRIDE];
    memset(wide_ids, 0x7E, sizeof wide_ids);
    memset(strided_weights, 0x7E, sizeof strided_weights);
    const megamoe_view x_view = {strided_x, MEGAMOE_DTYPE_BF16, N, X_STRIDE};
    const megamoe_view input_view = {narrow_input_ids, MEGAMOE_DTYPE_I32, 1, 0};
    const megamoe_view ids_view = {wide_ids, MEGAMOE_DTYPE_I64, N, ID_STRIDE};
    const megamoe_view weights_view = {strided_weights, MEGAMOE_DTYPE_F32, N, WEIGHT_STRIDE};
    T_OK(megamoe_router_route(f.router, NULL, &x_view, &input_view, N, &ids_view, &weights_view));
    for (int t = 0; t < N; t++) {
        for (int slot = 0; slot < TOPK; slot++) {
            T_EQ_INT(wide_ids[t][slot], ids[t][slot]);
            T_EQ_F64((double)strided_weights[t][slot], (double)weights[t][slot]);
        }
        for (int slot = TOPK; slot < ID_STRIDE; slot++)
            T_EQ_HEX((uint64_t)wide_ids[t][slot], 0x7E7E7E7E7E7E7E7Eu);
        T_EQ_HEX(mm_f32_bits(strided_weights[t][TOPK]), 0x7E7E7E7Eu);
    }
    free(x);
    fixture_close(&f);
}

T_CASE(no_tokens) {
    t_random random = t_random_start(9);
    fixture f = fixture_open(plain, 0, &random);
    T_OK(megamoe_router_route(f.router, NULL, NULL, NULL, 0, NULL, NULL));
    fixture_close(&f);
    fixture h = fixture_open(hashed(), 0, &random);
    T_OK(megamoe_router_route(h.router, NULL, NULL, NULL, 0, NULL, NULL));
    fixture_close(&h);
}

T_CASE(bad_views_are_named) {
    t_random random = t_random_start(10);
    fixture f = fixture_open(plain, 0, &random);
    uint16_t x[2][HIDDEN] = {{0}};
    int32_t ids[2][TOPK];
    float weights[2][TOPK];
    const megamoe_view good[3] = {{x, MEGAMOE_DTYPE_BF16, 2, 0},
                                  {ids, MEGAMOE_DTYPE_I32, 2, 0},
                                  {weights, MEGAMOE_DTYPE_F32, 2, 0}};
    const char *names[3] = {"x", "topk_ids", "topk_weights"};
    for (int which = 0; which < 3; which++)
        for (int fault = 0; fault < 4; fault++) {
            megamoe_view views[3];
            memcpy(views, good, sizeof views);
            if (fault == 0)
                views[which].data = NULL;
            if (fault == 1)
                views[which].dtype = MEGAMOE_DTYPE_E8M0;
            if (fault == 2)
                views[which].rows = 1;
            if (fault == 3)
                views[which].stride = 2;
            T_STATUS(megamoe_router_route(f.router, NULL, &views[0], NULL, 2, &views[1], &views[2]),
                     MEGAMOE_EINVAL);
            T_CONTAINS(megamoe_last_error(), names[which]);
        }
    T_STATUS(megamoe_router_route(f.router, NULL, &good[0], NULL, -1, &good[1], &good[2]),
             MEGAMOE_EINVAL);
    T_STATUS(megamoe_router_route(NULL, NULL, &good[0], NULL, 2, &good[1], &good[2]),
             MEGAMOE_EINVAL);
    fixture_close(&f);
}
