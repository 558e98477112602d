/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A router in the prepared file: the header below, then weight [experts][hidden] in the
 * checkpoint's dtype, selection bias and linear bias F32 [experts], hash table I32
 * [hash_vocab][topk], the last three where the header says so. Each part is padded with zeros to a
 * multiple of PART_MULTIPLE bytes.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/view.h"
#include "num/bf16.h"
#include "router/router.h"

enum { HAS_SELECTION_BIAS = 1, HAS_LINEAR_BIAS = 2, NORMALIZES = 4, FLAGS = 7 };

typedef struct saved_header {
    char magic[8];
    uint32_t version;
    uint32_t flags;
    int32_t rule;
    int32_t weight_dtype;
    int32_t hidden;
    int32_t experts;
    int32_t topk;
    int32_t groups;
    int32_t groups_kept;
    float normalize_epsilon;
    float scaling;
    float gate_temperature;
    int64_t hash_vocab;
} saved_header;

_Static_assert(sizeof(saved_header) == 64, "the saved form has no padding");

static const char magic[8] = "mmrouter";
enum { VERSION = 1, PART_MULTIPLE = 8 };

/* Bytes of each part with its padding. */
typedef struct saved_sizes {
    size_t weight;
    size_t selection_bias;
    size_t linear_bias;
    size_t hash_table;
    size_t total;
} saved_sizes;

/* False if it does not fit a size_t. */
static bool measure_part(int64_t rows, int64_t columns, size_t element_bytes, size_t *part,
                         size_t *total) {
    size_t row_bytes;
    if (!mm_mul_size((size_t)columns, element_bytes, &row_bytes) ||
        !mm_mul_size((size_t)rows, row_bytes, part) || *part > SIZE_MAX - PART_MULTIPLE)
        return false;
    *part = mm_round_up(*part, PART_MULTIPLE);
    return mm_add_size(*total, *part, total);
}

static bool measure(const megamoe_router_desc *desc, megamoe_dtype weight_dtype, uint32_t flags,
                    saved_sizes *sizes) {
    *sizes = (saved_sizes){.total = sizeof(saved_header)};
    return measure_part(desc->experts, desc->hidden, mm_dtype_bytes(weight_dtype), &sizes->weight,
                        &sizes->total) &&
           measure_part(flags & HAS_SELECTION_BIAS ? 1 : 0, desc->experts, sizeof(float),
                        &sizes->selection_bias, &sizes->total) &&
           measure_part(flags & HAS_LINEAR_BIAS ? 1 : 0, desc->experts, sizeof(float),
                        &sizes->linear_bias, &sizes->total) &&
           measure_part(desc->hash_vocab, desc->topk, sizeof(int32_t), &sizes->hash_table,
                        &sizes->total);
}

static uint32_t flags_of(const megamoe_router *router) {
    return (router->selection_bias ? (uint32_t)HAS_SELECTION_BIAS : 0) |
           (router->linear_bias ? (uint32_t)HAS_LINEAR_BIAS : 0) |
           (router->desc.normalize ? (uint32_t)NORMALIZES : 0);
}

size_t mm_router_saved_bytes(const megamoe_router *router) {
    saved_sizes sizes;
    /* What is in memory is larger than what is saved, so this cannot overflow. */
    (void)measure(&router->desc, router->weight_dtype, flags_of(router), &sizes);
    return sizes.total;
}

static void save_weight(const megamoe_router *router, uint8_t *to) {
    const size_t bytes = mm_dtype_bytes(router->weight_dtype);
    for (int32_t e = 0; e < router->desc.experts; e++) {
        const float *from = mm_router_weight_row(router, e);
        for (int32_t k = 0; k < router->desc.hidden; k++, from += MM_ROUTER_LANES, to += bytes) {
            /* The upper half of a widened BF16 is the BF16 itself, NaN payloads included. */
            const uint32_t bits = mm_f32_bits(*from);
            const uint16_t upper = (uint16_t)(bits >> 16);
            memcpy(to, bytes == sizeof upper ? (const void *)&upper : &bits, bytes);
        }
    }
}

void mm_router_save(const megamoe_router *router, void *bytes) {
    const megamoe_router_desc *desc = &router->desc;
    saved_header header = {.version = VERSION,
                           .flags = flags_of(router),
                           .rule = (int32_t)desc->rule,
                           .weight_dtype = (int32_t)router->weight_dtype,
                           .hidden = desc->hidden,
                           .experts = desc->experts,
                           .topk = desc->topk,
                           .groups = desc->groups,
                           .groups_kept = desc->groups_kept,
                           .normalize_epsilon = desc->normalize_epsilon,
                           .scaling = desc->scaling,
                           .gate_temperature = desc->gate_temperature,
                           .hash_vocab = desc->hash_vocab};
    memcpy(header.magic, magic, sizeof magic);
    saved_sizes sizes;
    (void)measure(desc, router->weight_dtype, header.flags, &sizes);
    memset(bytes, 0, sizes.total);
    uint8_t *to = bytes;
    memcpy(to, &header, sizeof header);
    to += sizeof header;
    save_weight(router, to);
    to += sizes.weight;
    const size_t bias_bytes = (size_t)desc->experts * sizeof(float);
    if (router->selection_bias)
        memcpy(to, router->selection_bias, bias_bytes);
    to += sizes.selection_bias;
    if (router->linear_bias)
        memcpy(to, router->linear_bias, bias_bytes);
    to += sizes.linear_bias;
    if (router->hash_table)
        memcpy(to, router->hash_table,
               (size_t)desc->hash_vocab * (size_t)desc->topk * sizeof(int32_t));
}

static megamoe_status check_header(const saved_header *header, const char *what) {
    if (memcmp(header->magic, magic, sizeof magic) != 0)
        return mm_fail(MEGAMOE_EFORMAT, "%s: does not begin with \"%.8s\"", what, magic);
    if (header->version != VERSION)
        return mm_fail(MEGAMOE_EUNSUPPORTED, "%s: version %" PRIu32 ", this library reads %d", what,
                       header->version, VERSION);
    if (header->flags & ~(uint32_t)FLAGS)
        return mm_fail(MEGAMOE_EFORMAT, "%s: unknown flags 0x%" PRIx32, what, header->flags);
    if (header->weight_dtype != MEGAMOE_DTYPE_BF16 && header->weight_dtype != MEGAMOE_DTYPE_F32)
        return mm_fail(MEGAMOE_EFORMAT, "%s: weight dtype %" PRId32 " is neither BF16 nor F32",
                       what, header->weight_dtype);
    return MEGAMOE_OK;
}

megamoe_status mm_router_load(const void *bytes, size_t n, const char *path,
                              megamoe_router **router) {
    *router = NULL;
    char what[512];
    snprintf(what, sizeof what, "%s: router", path);
    saved_header header;
    if (n < sizeof header)
        return mm_fail(MEGAMOE_EFORMAT, "%s: %zu bytes, expected %zu or more", what, n,
                       sizeof header);
    if ((uintptr_t)bytes % PART_MULTIPLE)
        return mm_fail(MEGAMOE_EFORMAT, "%s: not aligned to %d bytes", what, PART_MULTIPLE);
    memcpy(&header, bytes, sizeof header);
    MM_TRY(check_header(&header, what));
    megamoe_router_desc desc = {.struct_size = sizeof desc,
                                .rule = (megamoe_router_rule)header.rule,
                                .hidden = header.hidden,
                                .experts = header.experts,
                                .topk = header.topk,
                                .groups = header.groups,
                                .groups_kept = header.groups_kept,
                                .normalize = (header.flags & NORMALIZES) != 0,
                                .normalize_epsilon = header.normalize_epsilon,
                                .scaling = header.scaling,
                                .gate_temperature = header.gate_temperature,
                                .hash_vocab = header.hash_vocab};
    MM_TRY(mm_router_check_desc(&desc, what, MEGAMOE_EFORMAT));
    const megamoe_dtype weight_dtype = (megamoe_dtype)header.weight_dtype;
    saved_sizes sizes;
    if (!measure(&desc, weight_dtype, header.flags, &sizes) || sizes.total != n)
        return mm_fail(MEGAMOE_EFORMAT, "%s: its shape does not fit its %zu bytes", what, n);

    /* Views are not const because callers also receive results through them; these are read. */
    uint8_t *weight = (uint8_t *)(uintptr_t)bytes + sizeof header;
    uint8_t *selection_bias = weight + sizes.weight;
    uint8_t *linear_bias = selection_bias + sizes.selection_bias;
    uint8_t *hash_table = linear_bias + sizes.linear_bias;
    mm_router_parts parts = {.weight = {weight, weight_dtype, desc.experts, 0}};
    if (sizes.selection_bias)
        parts.selection_bias = (megamoe_view){selection_bias, MEGAMOE_DTYPE_F32, 1, 0};
    if (sizes.linear_bias)
        parts.linear_bias = (megamoe_view){linear_bias, MEGAMOE_DTYPE_F32, 1, 0};
    if (sizes.hash_table)
        parts.hash_table = (megamoe_view){hash_table, MEGAMOE_DTYPE_I32, desc.hash_vocab, 0};
    return mm_router_build(&desc, &parts, what, router);
}
