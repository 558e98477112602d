/* SPDX-License-Identifier: Apache-2.0 */
/* Synthetic checkpoints as GGUF files. */
#ifndef SYNTH_GGUF_H
#define SYNTH_GGUF_H

#include "models.h"

/*
 * Writes the layers first_layer..first_layer+layers-1 of a model into one file; the weights are
 * those of the same model, format and seed in other files. *bytes gets the size of all tensors.
 * Returns an exit code.
 */
int synth_write_gguf(const model *m, megamoe_format format, uint64_t seed, int32_t threads,
                     int32_t first_layer, int32_t layers, const char *path, uint64_t *bytes);

#endif
