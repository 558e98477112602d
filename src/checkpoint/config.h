/* SPDX-License-Identifier: Apache-2.0 */
/* config.json and hf_quant_config.json beside a checkpoint, read with type and range checks. */
#ifndef MM_CHECKPOINT_CONFIG_H
#define MM_CHECKPOINT_CONFIG_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "megamoe/status.h"

/* Zero-initialised: neither file is there, and no key is found. */
typedef struct mm_config {
    char *path; /* of config.json; NULL if it is not there */
    json_t *root;
    json_t *text;     /* text_config inside it, or root; borrowed */
    char *quant_path; /* of hf_quant_config.json */
    json_t *quant;
} mm_config;

/* Reads what is there of both files. Needs mm_config_close in any case. */
MEGAMOE_CHECKED megamoe_status mm_config_open(const char *directory, mm_config *config);
void mm_config_close(mm_config *config);

/*
 * A key of the model: in text_config if there is one and it holds the key, else at the top. These
 * leave *value as it is when the key is absent or null; a wrong type or range is MEGAMOE_EFORMAT.
 * Integers are 0..INT32_MAX, numbers finite.
 */
MEGAMOE_CHECKED megamoe_status mm_config_int(const mm_config *config, const char *key,
                                             int32_t *value);
MEGAMOE_CHECKED megamoe_status mm_config_float(const mm_config *config, const char *key,
                                               float *value);
MEGAMOE_CHECKED megamoe_status mm_config_bool(const mm_config *config, const char *key,
                                              bool *value);
/* Borrowed from the config. */
MEGAMOE_CHECKED megamoe_status mm_config_string(const mm_config *config, const char *key,
                                                const char **value);

bool mm_config_has(const mm_config *config, const char *key);

/* A key of quantization_config, wherever that stands; NULL if absent or null. Borrowed. */
const json_t *mm_config_quantization(const mm_config *config, const char *key);

/* A key of hf_quant_config.json's "quantization"; NULL if absent or null. Borrowed. */
const json_t *mm_config_hf_quantization(const mm_config *config, const char *key);

#endif
