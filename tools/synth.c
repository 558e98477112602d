/* SPDX-License-Identifier: Apache-2.0 */
#include "synth.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "parallel.h"
#include "quantize.h"
#include "random.h"

/* Deviations, in binades, of the scale of rows and channels. */
static const float row_spread = 0.5f, channel_spread = 0.25f, input_spread = 0.5f;

static const float bias_deviation = 0.1f, router_bias_deviation = 0.05f;

struct synth {
    megamoe_layer_desc desc;
    uint64_t key;
    int32_t threads;
    float *channels[3]; /* scale of each input channel, by projection */
    float *globals;     /* [experts][2]: of gate and up, of down; 0: not known yet */
    float *largest;     /* by row of the matrix that is being measured */
};

static int32_t rows_of(const megamoe_layer_desc *desc, megamoe_projection projection) {
    return projection == MEGAMOE_DOWN ? desc->hidden : desc->intermediate;
}

static int32_t columns_of(const megamoe_layer_desc *desc, megamoe_projection projection) {
    return projection == MEGAMOE_DOWN ? desc->intermediate : desc->hidden;
}

static int32_t block_of(const megamoe_layer_desc *desc) {
    return desc->format == MEGAMOE_FORMAT_MXFP4 ? MXFP4_BLOCK : NVFP4_BLOCK;
}

size_t synth_code_bytes(const megamoe_layer_desc *desc) {
    return (size_t)desc->hidden * (size_t)desc->intermediate / 2;
}

size_t synth_scale_bytes(const megamoe_layer_desc *desc) {
    return (size_t)desc->hidden * (size_t)desc->intermediate / (size_t)block_of(desc);
}

static void fill_gains(uint64_t key, float spread, size_t n, float *gains) {
    random_normals(key, n, gains);
    for (size_t i = 0; i < n; i++)
        gains[i] = exp2f(spread * gains[i]);
}

synth *synth_open(const megamoe_layer_desc *desc, uint64_t seed, int32_t threads) {
    synth *s = calloc(1, sizeof *s);
    if (s == NULL)
        return NULL;
    s->desc = *desc;
    s->key = random_key(seed, (uint64_t)desc->layer);
    s->threads = threads;
    s->globals = calloc((size_t)desc->experts * 2, sizeof *s->globals);
    s->largest =
        malloc((size_t)(desc->hidden > desc->intermediate ? desc->hidden : desc->intermediate) *
               sizeof *s->largest);
    bool complete = s->globals != NULL && s->largest != NULL;
    for (int p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++) {
        const size_t columns = (size_t)columns_of(desc, p);
        s->channels[p] = malloc(columns * sizeof(float));
        if (s->channels[p] == NULL) {
            complete = false;
            continue;
        }
        /* Gate and up read the same channels. */
        fill_gains(random_key(random_key(s->key, KEY_CHANNELS), p == MEGAMOE_DOWN), channel_spread,
                   columns, s->channels[p]);
        for (size_t i = 0; i < columns; i++)
            s->channels[p][i] /= sqrtf((float)columns);
    }
    if (!complete) {
        synth_close(s);
        return NULL;
    }
    return s;
}

void synth_close(synth *s) {
    if (s == NULL)
        return;
    for (int p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++)
        free(s->channels[p]);
    free(s->globals);
    free(s->largest);
    free(s);
}

/* One matrix in the making; a thread has some of its rows. */
struct job {
    const synth *s;
    int32_t expert;
    megamoe_projection projection;
    float global;
    uint8_t *codes, *scales;
};

static void weight_row(const struct job *job, int64_t row, float *weights) {
    const int32_t columns = columns_of(&job->s->desc, job->projection);
    const uint64_t matrix = (uint64_t)job->expert * 3 + job->projection;
    const uint64_t rows_key = random_key(random_key(job->s->key, KEY_ROWS), matrix);
    const uint64_t key = random_key(random_key(job->s->key, KEY_WEIGHTS), matrix);
    const float gain = exp2f(row_spread * random_normal(random_key(rows_key, (uint64_t)row)));
    random_normals(random_key(key, (uint64_t)row), (size_t)columns, weights);
    const float *channels = job->s->channels[job->projection];
    for (int32_t i = 0; i < columns; i++)
        weights[i] *= gain * channels[i];
}

static void measure_rows(void *user, int64_t begin, int64_t end) {
    const struct job *job = user;
    float weights[SYNTH_MAX_COLUMNS];
    for (int64_t row = begin; row < end; row++) {
        weight_row(job, row, weights);
        job->s->largest[row] =
            quantize_largest(weights, (size_t)columns_of(&job->s->desc, job->projection));
    }
}

static void quantize_rows(void *user, int64_t begin, int64_t end) {
    const struct job *job = user;
    const megamoe_layer_desc *desc = &job->s->desc;
    const int64_t columns = columns_of(desc, job->projection);
    float weights[SYNTH_MAX_COLUMNS];
    for (int64_t row = begin; row < end; row++) {
        weight_row(job, row, weights);
        uint8_t *codes = job->codes + row * columns / 2;
        uint8_t *scales = job->scales + row * columns / block_of(desc);
        if (desc->format == MEGAMOE_FORMAT_MXFP4)
            quantize_mxfp4(weights, (size_t)columns, codes, scales);
        else
            quantize_nvfp4(weights, (size_t)columns, job->global, codes, scales);
    }
}

float synth_global(synth *s, int32_t expert, megamoe_projection projection) {
    if (s->desc.format == MEGAMOE_FORMAT_MXFP4)
        return 1;
    float *global = &s->globals[expert * 2 + (projection == MEGAMOE_DOWN)];
    if (*global != 0)
        return *global;
    float largest = 0;
    const megamoe_projection first = projection == MEGAMOE_DOWN ? MEGAMOE_DOWN : MEGAMOE_GATE;
    const megamoe_projection last = projection == MEGAMOE_DOWN ? MEGAMOE_DOWN : MEGAMOE_UP;
    for (megamoe_projection p = first; p <= last; p++) {
        const int32_t rows = rows_of(&s->desc, p);
        struct job job = {.s = s, .expert = expert, .projection = p};
        parallel_for(s->threads, rows, measure_rows, &job);
        largest = fmaxf(largest, quantize_largest(s->largest, (size_t)rows));
    }
    *global = quantize_nvfp4_global(largest);
    return *global;
}

void synth_matrix(synth *s, int32_t expert, megamoe_projection projection, uint8_t *codes,
                  uint8_t *scales) {
    struct job job = {.s = s, .expert = expert, .projection = projection};
    job.global = synth_global(s, expert, projection);
    job.codes = codes;
    job.scales = scales;
    parallel_for(s->threads, rows_of(&s->desc, projection), quantize_rows, &job);
}

void synth_matrix_bias(const synth *s, int32_t expert, megamoe_projection projection, size_t stride,
                       uint16_t *bias) {
    const uint64_t matrix = (uint64_t)expert * 3 + projection;
    const uint64_t key = random_key(random_key(s->key, KEY_MATRIX_BIAS), matrix);
    const size_t rows = (size_t)rows_of(&s->desc, projection);
    for (size_t row = 0; row < rows; row++)
        bias[row * stride] = quantize_bf16(bias_deviation * random_normal(random_key(key, row)));
}

void synth_router_weight(const synth *s, uint16_t *weight) {
    const size_t hidden = (size_t)s->desc.hidden;
    float row[SYNTH_MAX_COLUMNS];
    for (int32_t expert = 0; expert < s->desc.experts; expert++) {
        random_normals(random_key(random_key(s->key, KEY_ROUTER), (uint64_t)expert), hidden, row);
        for (size_t i = 0; i < hidden; i++)
            weight[(size_t)expert * hidden + i] = quantize_bf16(row[i] / sqrtf((float)hidden));
    }
}

void synth_router_bias(const synth *s, uint64_t which, float *bias) {
    random_normals(random_key(random_key(s->key, KEY_BIAS), which), (size_t)s->desc.experts, bias);
    for (int32_t i = 0; i < s->desc.experts; i++)
        bias[i] *= router_bias_deviation;
}

void synth_router_linear_bias(const synth *s, uint16_t *bias) {
    const uint64_t key = random_key(random_key(s->key, KEY_BIAS), 0);
    for (int32_t i = 0; i < s->desc.experts; i++)
        bias[i] =
            quantize_bf16(router_bias_deviation * random_normal(random_key(key, (uint64_t)i)));
}

void synth_routes(uint64_t seed, int64_t tokens, int32_t n, int32_t k, int32_t *ids) {
    const uint64_t key = random_key(seed, KEY_ROUTES);
    for (int64_t token = 0; token < tokens; token++)
        random_choose(random_key(key, (uint64_t)token), n, k, ids + token * k);
}

void synth_hash_table(const synth *s, int64_t vocabulary, int64_t *table) {
    const uint64_t key = random_key(s->key, KEY_TABLE);
    const int32_t k = s->desc.topk;
    int32_t chosen[SYNTH_MAX_TOPK];
    for (int64_t token = 0; token < vocabulary; token++) {
        random_choose(random_key(key, (uint64_t)token), s->desc.experts, k, chosen);
        for (int32_t i = 0; i < k; i++)
            table[token * k + i] = chosen[i];
    }
}

bool synth_input(uint64_t seed, int64_t n, int32_t hidden, uint16_t *x) {
    float *gains = malloc((size_t)hidden * 2 * sizeof *gains);
    if (gains == NULL)
        return false;
    float *row = gains + hidden;
    fill_gains(random_key(seed, KEY_INPUT_CHANNELS), input_spread, (size_t)hidden, gains);
    const uint64_t key = random_key(seed, KEY_INPUT);
    for (int64_t token = 0; token < n; token++) {
        random_normals(random_key(key, (uint64_t)token), (size_t)hidden, row);
        for (int32_t i = 0; i < hidden; i++)
            x[token * hidden + i] = quantize_bf16(row[i] * gains[i]);
    }
    free(gains);
    return true;
}

void synth_input_ids(uint64_t seed, int64_t n, int64_t vocabulary, int64_t *ids) {
    const uint64_t key = random_key(seed, KEY_TOKEN_IDS);
    for (int64_t token = 0; token < n; token++)
        ids[token] = (int64_t)random_below(key, (uint64_t)token, (uint64_t)vocabulary);
}
