/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Synthetic expert layers and inputs with the statistics of real ones: normal weights whose scale
 * varies by row and by channel, with outliers. Everything is a function of the seed and of its
 * place in the model, so that it does not depend on threads or order.
 */
#ifndef SYNTH_H
#define SYNTH_H

#include <megamoe/megamoe.h>

typedef struct synth synth;

enum { SYNTH_MAX_COLUMNS = 1 << 16, SYNTH_MAX_TOPK = 64 };

/*
 * Weights of `desc`, no wider than SYNTH_MAX_COLUMNS; `threads` threads make them. NULL: out of
 * memory.
 */
synth *synth_open(const megamoe_layer_desc *desc, uint64_t seed, int32_t threads);

/* Accepts NULL. */
void synth_close(synth *s);

/* Bytes of the codes or scales of one matrix. */
size_t synth_code_bytes(const megamoe_layer_desc *desc);
size_t synth_scale_bytes(const megamoe_layer_desc *desc);

/* The global scale of a matrix, 1 for MXFP4; gate and up share theirs. */
float synth_global(synth *s, int32_t expert, megamoe_projection projection);

/* Fills one matrix: codes [out][in / 2], scales [out][in / block]. */
void synth_matrix(synth *s, int32_t expert, megamoe_projection projection, uint8_t *codes,
                  uint8_t *scales);

/* Biases of one matrix, BF16 [out], `stride` elements apart. */
void synth_matrix_bias(const synth *s, int32_t expert, megamoe_projection projection, size_t stride,
                       uint16_t *bias);

/* Router parts: weight BF16 [experts, hidden], bias F32 [experts], table I64 [vocabulary, topk]. */
void synth_router_weight(const synth *s, uint16_t *weight);
void synth_router_bias(const synth *s, uint64_t which, float *bias);
/* Of the logits: BF16 [experts]. */
void synth_router_linear_bias(const synth *s, uint16_t *bias);
void synth_hash_table(const synth *s, int64_t vocabulary, int64_t *table);

/* Input rows, BF16 [n, hidden]. False: out of memory. */
bool synth_input(uint64_t seed, int64_t n, int32_t hidden, uint16_t *x);

/* Token ids below `vocabulary`. */
void synth_input_ids(uint64_t seed, int64_t n, int64_t vocabulary, int64_t *ids);

/* k different experts out of n for each of `tokens` tokens, all equally likely. */
void synth_routes(uint64_t seed, int64_t tokens, int32_t n, int32_t k, int32_t *ids);

#endif
