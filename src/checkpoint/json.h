/* SPDX-License-Identifier: Apache-2.0 */
/* JSON that comes from files, and goes to them. */
#ifndef MM_CHECKPOINT_JSON_H
#define MM_CHECKPOINT_JSON_H

#include <jansson.h>
#include <stddef.h>

#include "megamoe/status.h"

/*
 * JSON without duplicate keys; *value is to be given to json_decref. *error is filled in with
 * MEGAMOE_EFORMAT; the other failure is MEGAMOE_ENOMEM. Neither has a message yet.
 */
MEGAMOE_CHECKED megamoe_status mm_json_parse(const char *text, size_t bytes, json_t **value,
                                             json_error_t *error);

/*
 * Reads a JSON file into *value, which must be an object; duplicate keys are refused, and more
 * than 100,000,000 bytes.
 * Owns: the caller calls json_decref(*value). MEGAMOE_ENOTFOUND if there is no such file.
 */
MEGAMOE_CHECKED megamoe_status mm_json_read(const char *path, json_t **value);

/*
 * The text of a value, with jansson's flags. Owns: the caller frees it. NULL when out of memory,
 * where json_dumps may leave out a key instead.
 */
char *mm_json_text(const json_t *value, size_t flags);

#endif
