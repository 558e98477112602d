/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/hold.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/view.h"
#include "weights/object.h"

struct hold {
    pthread_mutex_t lock; /* also while reading: whoever comes second waits for the bytes */
    int32_t users;
    bool kept;      /* until the weights are closed */
    uint8_t *bytes; /* NULL when nobody holds it */
};

struct mm_holds {
    size_t buffer_bytes; /* what any expert needs, and a pointer */
    pthread_mutex_t spare_lock;
    uint8_t *spare; /* buffers that are free; each begins with a pointer to the next */
    struct hold experts[];
};

/* ---- Buffers: as many as experts were held at once ---- */

static uint8_t *take_buffer(struct mm_holds *holds) {
    pthread_mutex_lock(&holds->spare_lock);
    uint8_t *buffer = holds->spare;
    if (buffer)
        memcpy(&holds->spare, buffer, sizeof holds->spare);
    pthread_mutex_unlock(&holds->spare_lock);
    return buffer ? buffer : malloc(holds->buffer_bytes);
}

static void leave_buffer(struct mm_holds *holds, uint8_t *buffer) {
    pthread_mutex_lock(&holds->spare_lock);
    memcpy(buffer, &holds->spare, sizeof holds->spare);
    holds->spare = buffer;
    pthread_mutex_unlock(&holds->spare_lock);
}

/* ---- An expert in checkpoint form ---- */

/* Bytes of a file, and where they go in the buffer. */
typedef struct range {
    mm_place from;
    uint64_t bytes;
    size_t at;
} range;

enum { CODES, SCALES, BIAS, PARTS, RANGES = PARTS * MM_PROJECTIONS };

typedef struct ranges {
    range range[RANGES];
    int n;
    size_t bytes; /* of all of them */
} ranges;

/* The part of a matrix that begins at `from`. */
static range range_of(const megamoe_weights *weights, megamoe_projection projection, int part,
                      const megamoe_matrix *m, mm_place from) {
    const megamoe_layer_desc *desc = &weights->desc;
    const uint64_t rows = (uint64_t)mm_rows(desc, projection);
    const uint64_t columns = (uint64_t)mm_columns(desc, projection);
    switch (part) {
    case CODES:
        return (range){from, (rows - 1) * m->codes_stride + columns / 2, 0};
    case SCALES:
        return (range){
            from, (rows - 1) * m->scales_stride + columns / (uint64_t)mm_group_size(desc->format),
            0};
    default:
        return (range){from, (rows - 1) * m->bias_stride + mm_dtype_bytes(m->bias_dtype), 0};
    }
}

static bool overlap(const range *a, const range *b) {
    return a->from.file == b->from.file && a->from.offset < b->from.offset + b->bytes &&
           b->from.offset < a->from.offset + a->bytes;
}

/* Rows of gate and up may take turns, so parts that overlap become one range: it is read once. */
static void add_range(ranges *all, range added) {
    for (int i = 0; i < all->n; i++)
        if (overlap(&all->range[i], &added)) {
            range *into = &all->range[i];
            const uint64_t a = into->from.offset + into->bytes;
            const uint64_t b = added.from.offset + added.bytes;
            if (added.from.offset < into->from.offset)
                into->from.offset = added.from.offset;
            into->bytes = (a > b ? a : b) - into->from.offset;
            return;
        }
    all->range[all->n++] = added;
}

static mm_place place_of(const mm_matrix_places *places, int part) {
    return part == CODES ? places->codes : part == SCALES ? places->scales : places->bias;
}

static void places_of(const megamoe_weights *weights, int32_t expert,
                      mm_matrix_places places[MM_PROJECTIONS]) {
    for (megamoe_projection p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++)
        weights->owner.places(weights->owner.owner, expert, p, &places[p]);
}

/* What has to be read of an expert: some of CODES, SCALES, BIAS. */
static ranges ranges_of(const megamoe_weights *weights, int32_t expert,
                        const mm_matrix_places places[MM_PROJECTIONS], int first, int last) {
    ranges all = {.n = 0};
    for (megamoe_projection p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++)
        for (int part = first; part <= last; part++)
            if (part != BIAS || weights->desc.has_bias)
                add_range(&all, range_of(weights, p, part, mm_matrix_of(weights, expert, p),
                                         place_of(&places[p], part)));
    for (int i = 0; i < all.n; i++) {
        all.range[i].at = all.bytes;
        all.bytes += all.range[i].bytes;
    }
    return all;
}

/* Where a byte that is in one of the ranges lies in the buffer; NULL if it is in none. */
static const uint8_t *find_byte(const ranges *all, mm_place from, const uint8_t *buffer) {
    for (int i = 0; i < all->n; i++) {
        const range *r = &all->range[i];
        if (r->from.file == from.file && from.offset - r->from.offset < r->bytes)
            return buffer + r->at + (from.offset - r->from.offset);
    }
    return NULL;
}

/* Matrices belong to whoever holds their expert; without ranges their pointers become NULL. */
static void point_matrices(const megamoe_weights *weights, int32_t expert, const ranges *all,
                           const mm_matrix_places places[MM_PROJECTIONS], const uint8_t *buffer) {
    for (megamoe_projection p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++) {
        megamoe_matrix *m = &weights->matrices[(size_t)expert * MM_PROJECTIONS + p];
        m->codes = find_byte(all, places[p].codes, buffer);
        m->scales = find_byte(all, places[p].scales, buffer);
        m->bias = weights->desc.has_bias ? find_byte(all, places[p].bias, buffer) : NULL;
    }
}

/* Bytes of a matrix: codes, and with its scales. All three have as many. */
static size_t codes_bytes(const megamoe_layer_desc *desc) {
    return (size_t)desc->hidden * (size_t)desc->intermediate / 2;
}

static size_t matrix_bytes(const megamoe_layer_desc *desc) {
    return codes_bytes(desc) + 2 * codes_bytes(desc) / (size_t)mm_group_size(desc->format);
}

/* Matrices in blocks: the three of them, room for the blocks of one, and the biases. */
static megamoe_status read_blocks(const megamoe_weights *weights, int32_t expert,
                                  const mm_matrix_places places[MM_PROJECTIONS], uint8_t *buffer) {
    const megamoe_layer_desc *desc = &weights->desc;
    const mm_matrix_owner *owner = &weights->owner;
    const size_t bytes = matrix_bytes(desc);
    uint8_t *blocks = buffer + MM_PROJECTIONS * bytes, *bias = blocks + bytes;
    for (megamoe_projection p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++) {
        megamoe_matrix *m = &weights->matrices[(size_t)expert * MM_PROJECTIONS + p];
        uint8_t *codes = buffer + (size_t)p * bytes, *scales = codes + codes_bytes(desc);
        MM_TRY(owner->read(owner->owner, places[p].codes, blocks, bytes));
        owner->unpack(desc->format, blocks, bytes, codes, scales);
        m->codes = codes;
        m->scales = scales;
        if (!desc->has_bias)
            continue;
        const range biases = range_of(weights, p, BIAS, m, places[p].bias);
        MM_TRY(owner->read(owner->owner, biases.from, bias, biases.bytes));
        m->bias = bias;
        bias += biases.bytes;
    }
    return MEGAMOE_OK;
}

/* Reads the parts first..last of an expert. */
static megamoe_status read_ranges(const megamoe_weights *weights, int32_t expert,
                                  const mm_matrix_places places[MM_PROJECTIONS], int first,
                                  int last, uint8_t *buffer) {
    const ranges all = ranges_of(weights, expert, places, first, last);
    for (int i = 0; i < all.n; i++)
        MM_TRY(weights->owner.read(weights->owner.owner, all.range[i].from,
                                   buffer + all.range[i].at, all.range[i].bytes));
    point_matrices(weights, expert, &all, places, buffer);
    return MEGAMOE_OK;
}

/* The same, or all of one in blocks; then checks its scales, which are among them. */
static megamoe_status read_matrices(const megamoe_weights *weights, int32_t expert, int first,
                                    int last, uint8_t *buffer) {
    mm_matrix_places places[MM_PROJECTIONS] = {0};
    places_of(weights, expert, places);
    MM_TRY(weights->owner.unpack ? read_blocks(weights, expert, places, buffer)
                                 : read_ranges(weights, expert, places, first, last, buffer));
    return mm_expert_scales_check(weights, expert);
}

/* ---- Holding ---- */

static size_t bytes_of(const megamoe_weights *weights, int32_t expert) {
    if (!weights->matrices)
        return weights->blob_bytes;
    mm_matrix_places places[MM_PROJECTIONS] = {0};
    places_of(weights, expert, places);
    if (weights->owner.unpack)
        return (MM_PROJECTIONS + 1) * matrix_bytes(&weights->desc) +
               ranges_of(weights, expert, places, BIAS, BIAS).bytes;
    return ranges_of(weights, expert, places, CODES, BIAS).bytes;
}

megamoe_status mm_holds_open(megamoe_weights *weights) {
    const int32_t experts = weights->desc.experts;
    struct mm_holds *holds = mm_alloc(sizeof *holds + (size_t)experts * sizeof holds->experts[0]);
    if (!holds)
        return mm_fail(MEGAMOE_ENOMEM, "weights: out of memory for %d experts", experts);
    pthread_mutex_init(&holds->spare_lock, NULL);
    holds->buffer_bytes = sizeof holds->spare;
    for (int32_t i = 0; i < experts; i++) {
        pthread_mutex_init(&holds->experts[i].lock, NULL);
        const size_t bytes = bytes_of(weights, i);
        if (bytes > holds->buffer_bytes)
            holds->buffer_bytes = bytes;
    }
    weights->holds = holds;
    return MEGAMOE_OK;
}

void mm_holds_close(megamoe_weights *weights) {
    struct mm_holds *holds = weights->holds;
    if (!holds)
        return;
    for (int32_t i = 0; i < weights->desc.experts; i++) {
        free(holds->experts[i].bytes);
        pthread_mutex_destroy(&holds->experts[i].lock);
    }
    uint8_t *next;
    for (uint8_t *buffer = holds->spare; buffer; buffer = next) {
        memcpy(&next, buffer, sizeof next);
        free(buffer);
    }
    pthread_mutex_destroy(&holds->spare_lock);
    free(holds);
    weights->holds = NULL;
}

/* These two are called with the lock of the hold. */
static void let_go(const megamoe_weights *weights, int32_t expert) {
    static const ranges none = {.n = 0};
    static const mm_matrix_places nowhere[MM_PROJECTIONS];
    struct hold *hold = &weights->holds->experts[expert];
    if (weights->matrices)
        point_matrices(weights, expert, &none, nowhere, NULL);
    leave_buffer(weights->holds, hold->bytes);
    hold->bytes = NULL;
}

static megamoe_status bring(const megamoe_weights *weights, int32_t expert, int first, int last) {
    struct hold *hold = &weights->holds->experts[expert];
    hold->bytes = take_buffer(weights->holds);
    if (!hold->bytes)
        return mm_fail(MEGAMOE_ENOMEM, "weights: out of memory for %zu bytes of an expert",
                       weights->holds->buffer_bytes);
    /* The scales have been checked before, but the file may have been written to since. */
    const megamoe_status status = weights->matrices
                                      ? read_matrices(weights, expert, first, last, hold->bytes)
                                      : mm_weights_read_blob(weights, expert, hold->bytes);
    if (status != MEGAMOE_OK)
        let_go(weights, expert);
    return status;
}

static megamoe_status hold_parts(const megamoe_weights *weights, int32_t expert, int first,
                                 int last) {
    struct hold *hold = &weights->holds->experts[expert];
    pthread_mutex_lock(&hold->lock);
    const megamoe_status status = hold->bytes ? MEGAMOE_OK : bring(weights, expert, first, last);
    if (status == MEGAMOE_OK)
        hold->users++;
    pthread_mutex_unlock(&hold->lock);
    return status;
}

megamoe_status mm_weights_hold(const megamoe_weights *weights, int32_t expert) {
    return weights->holds ? hold_parts(weights, expert, CODES, BIAS) : MEGAMOE_OK;
}

void mm_weights_drop(const megamoe_weights *weights, int32_t expert) {
    if (!weights->holds)
        return;
    struct hold *hold = &weights->holds->experts[expert];
    pthread_mutex_lock(&hold->lock);
    if (--hold->users == 0 && !hold->kept)
        let_go(weights, expert);
    pthread_mutex_unlock(&hold->lock);
}

megamoe_status mm_weights_keep(const megamoe_weights *weights, int32_t expert) {
    MM_TRY(mm_weights_hold(weights, expert));
    if (!weights->holds)
        return MEGAMOE_OK;
    struct hold *hold = &weights->holds->experts[expert];
    pthread_mutex_lock(&hold->lock);
    hold->kept = true;
    pthread_mutex_unlock(&hold->lock);
    mm_weights_drop(weights, expert);
    return MEGAMOE_OK;
}

const megamoe_matrix *mm_held_matrix(const megamoe_weights *weights, int32_t expert,
                                     megamoe_projection projection) {
    return mm_matrix_of(weights, expert, projection);
}

const uint8_t *mm_held_bytes(const megamoe_weights *weights, int32_t expert) {
    return weights->holds->experts[expert].bytes;
}

megamoe_status mm_scales_check(const megamoe_weights *weights) {
    for (int32_t expert = 0; expert < weights->desc.experts; expert++) {
        if (!weights->holds) {
            MM_TRY(mm_expert_scales_check(weights, expert));
            continue;
        }
        MM_TRY(hold_parts(weights, expert, SCALES, SCALES)); /* which checks them */
        mm_weights_drop(weights, expert);
    }
    return MEGAMOE_OK;
}
