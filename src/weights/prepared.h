/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The prepared file: one layer, packed for a device, in the byte order of the machine.
 *
 *   header          4096 bytes, below
 *   hashes          one mm_hash for each expert's blob
 *   router          mm_router_save; empty if the layer came without one
 *   blobs           one for each expert, all of blob_bytes
 *
 * Every part begins at a multiple of 4096. All offsets and sizes follow from the geometry and the
 * size of the router; the reader computes them again and compares.
 */
#ifndef MM_WEIGHTS_PREPARED_H
#define MM_WEIGHTS_PREPARED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "weights/cpu_layout.h"
#include "weights/cuda_layout.h"

#define MM_PREPARED_MAGIC "MEGAMOE" /* with its zero: 8 bytes */
#define MM_PREPARED_DEVICES "\"cpu\" or \"cuda\""

enum {
    MM_PREPARED_VERSION = 1,
    MM_PREPARED_BYTE_ORDER = 0x01020304,
    MM_PREPARED_HEADER_BYTES = 4096,
    MM_PREPARED_ROUTER_MAX = INT32_MAX
};

/* What a file is prepared for. */
typedef struct mm_prepared_kind {
    char device[16];
    char layout[16]; /* the name of what stands in cpu_layout.h or cuda_layout.h */
    bool cuda;
} mm_prepared_kind;

/* By the device's name; NULL if there is none. */
const mm_prepared_kind *mm_prepared_kind_of(const char *device);

/* XXH3, 128 bits, canonical form. */
typedef struct mm_hash {
    uint8_t bytes[16];
} mm_hash;

mm_hash mm_hash_of(const void *data, size_t bytes);

/* X(name): what follows from the geometry and router_bytes. Offsets and sizes count bytes. */
#define MM_PREPARED_EXTENT_LIST(X)                                                                 \
    X(hidden_k)                                                                                    \
    X(intermediate_k)                                                                              \
    X(fc1_tiles)                                                                                   \
    X(fc2_tiles)                                                                                   \
    X(hashes_offset)                                                                               \
    X(router_offset)                                                                               \
    X(router_bytes)                                                                                \
    X(blobs_offset)                                                                                \
    X(blob_bytes)                                                                                  \
    X(file_bytes)

typedef struct mm_prepared_extents {
#define X(name) uint64_t name;
    MM_PREPARED_EXTENT_LIST(X)
#undef X
} mm_prepared_extents;

typedef struct mm_prepared_fields {
    char magic[8];
    uint32_t byte_order;
    uint32_t version;
    char device[16];
    char layout[16];
    int32_t layer;
    int32_t hidden;
    int32_t intermediate;
    int32_t experts;
    int32_t topk;
    uint32_t format;
    uint32_t nvfp4;
    uint32_t has_bias;
    float alpha;
    float offset;
    float limit;
    uint32_t unused;
    mm_prepared_extents extents;
    mm_hash hashes_hash;
    mm_hash router_hash;
} mm_prepared_fields;

typedef struct mm_prepared_header {
    mm_prepared_fields fields;
    uint8_t zero[MM_PREPARED_HEADER_BYTES - sizeof(mm_prepared_fields) - sizeof(mm_hash)];
    mm_hash hash; /* of everything before it */
} mm_prepared_header;

_Static_assert(sizeof(mm_prepared_header) == MM_PREPARED_HEADER_BYTES, "no padding");

/* Sets the header's own hash. */
void mm_prepared_seal(mm_prepared_header *header);

/* The extents of a file with this geometry; router_bytes at most a file's size. */
mm_prepared_extents mm_prepared_extents_of(const megamoe_layer_desc *desc,
                                           const mm_prepared_kind *kind, megamoe_nvfp4_mode mode,
                                           uint64_t router_bytes);

/* The router belongs to the layer's geometry. A failure has `status` and begins with `where`. */
MEGAMOE_CHECKED megamoe_status mm_prepared_check_router(const megamoe_router *router,
                                                        const megamoe_layer_desc *desc,
                                                        megamoe_status status, const char *where);

#endif
