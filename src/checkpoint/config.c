/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "checkpoint/config.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/file.h"
#include "checkpoint/json.h"

/* Leaves both NULL if there is no such file. */
static megamoe_status read_if_there(const char *directory, const char *name, char **path,
                                    json_t **value) {
    if (asprintf(path, "%s/%s", directory, name) < 0) {
        *path = NULL;
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", directory);
    }
    if (!mm_file_exists(*path)) {
        free(*path);
        *path = NULL;
        return MEGAMOE_OK;
    }
    return mm_json_read(*path, value);
}

megamoe_status mm_config_open(const char *directory, mm_config *config) {
    *config = (mm_config){0};
    MM_TRY(read_if_there(directory, "config.json", &config->path, &config->root));
    MM_TRY(read_if_there(directory, "hf_quant_config.json", &config->quant_path, &config->quant));
    json_t *text = json_object_get(config->root, "text_config");
    config->text = json_is_object(text) ? text : config->root;
    return MEGAMOE_OK;
}

void mm_config_close(mm_config *config) {
    json_decref(config->root);
    json_decref(config->quant);
    free(config->path);
    free(config->quant_path);
    *config = (mm_config){0};
}

static const json_t *present(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

static const json_t *find(const mm_config *config, const char *key) {
    const json_t *value = present(config->text, key);
    return value ? value : present(config->root, key);
}

megamoe_status mm_config_int(const mm_config *config, const char *key, int32_t *value) {
    const json_t *found = find(config, key);
    if (!found)
        return MEGAMOE_OK;
    if (!json_is_integer(found))
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s must be an integer", config->path, key);
    const json_int_t number = json_integer_value(found);
    if (number < 0 || number > INT32_MAX)
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s is %" PRId64 "; it must be 0..%" PRId32,
                       config->path, key, (int64_t)number, INT32_MAX);
    *value = (int32_t)number;
    return MEGAMOE_OK;
}

megamoe_status mm_config_float(const mm_config *config, const char *key, float *value) {
    const json_t *found = find(config, key);
    if (!found)
        return MEGAMOE_OK;
    if (!json_is_number(found))
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s must be a number", config->path, key);
    const double number = json_number_value(found);
    if (fabs(number) > FLT_MAX)
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s is %g, which no FP32 holds", config->path, key,
                       number);
    *value = (float)number;
    return MEGAMOE_OK;
}

megamoe_status mm_config_bool(const mm_config *config, const char *key, bool *value) {
    const json_t *found = find(config, key);
    if (!found)
        return MEGAMOE_OK;
    if (!json_is_boolean(found))
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s must be true or false", config->path, key);
    *value = json_is_true(found);
    return MEGAMOE_OK;
}

megamoe_status mm_config_string(const mm_config *config, const char *key, const char **value) {
    const json_t *found = find(config, key);
    if (!found)
        return MEGAMOE_OK;
    if (!json_is_string(found))
        return mm_fail(MEGAMOE_EFORMAT, "%s: %s must be a string", config->path, key);
    *value = json_string_value(found);
    return MEGAMOE_OK;
}

bool mm_config_has(const mm_config *config, const char *key) {
    return find(config, key) != NULL;
}

const json_t *mm_config_quantization(const mm_config *config, const char *key) {
    const json_t *value = present(json_object_get(config->text, "quantization_config"), key);
    return value ? value : present(json_object_get(config->root, "quantization_config"), key);
}

const json_t *mm_config_hf_quantization(const mm_config *config, const char *key) {
    return present(json_object_get(config->quant, "quantization"), key);
}
