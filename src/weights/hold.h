/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weights of files are in memory only for the experts that are held: the first user of an expert
 * has it read into a buffer, which the last one leaves to the next expert. So a layer larger than
 * memory can be packed, and a file that has been cut is an error rather than a signal. Weights in
 * the caller's memory are always there.
 */
#ifndef MM_WEIGHTS_HOLD_H
#define MM_WEIGHTS_HOLD_H

#include "base/file.h"
#include "megamoe/weights.h"

/*
 * Matrices, rows, biases and the blob of an expert can be read from here on until mm_weights_drop,
 * with which every success is paired. MEGAMOE_EIO, MEGAMOE_ENOMEM, or MEGAMOE_EFORMAT where scales
 * are no longer what they were. Thread: any.
 */
MEGAMOE_CHECKED megamoe_status mm_weights_hold(const megamoe_weights *weights, int32_t expert);
void mm_weights_drop(const megamoe_weights *weights, int32_t expert);

/* Holds an expert until the weights are closed. */
MEGAMOE_CHECKED megamoe_status mm_weights_keep(const megamoe_weights *weights, int32_t expert);

/* Reads the blob of one expert of prepared weights. Thread: any. */
MEGAMOE_CHECKED megamoe_status mm_weights_read_blob(const megamoe_weights *weights, int32_t expert,
                                                    uint8_t *blob);

/* Maps the blobs of all experts of prepared weights; see mm_file_map. */
MEGAMOE_CHECKED megamoe_status mm_weights_map_blobs(const megamoe_weights *weights,
                                                    mm_mapping *mapping);

/*
 * What weights of files need for it, once all else of them is set. Closing accepts what was not
 * opened.
 */
MEGAMOE_CHECKED megamoe_status mm_holds_open(megamoe_weights *weights);
void mm_holds_close(megamoe_weights *weights);

/* A matrix of an expert that is held, for weights in checkpoint form. */
const megamoe_matrix *mm_held_matrix(const megamoe_weights *weights, int32_t expert,
                                     megamoe_projection projection);

/* The bytes that were read of an expert that is held. */
const uint8_t *mm_held_bytes(const megamoe_weights *weights, int32_t expert);

#endif
