/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/config_groups.h"

#include <inttypes.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "checkpoint/declared.h"
#include "checkpoint/names.h"

enum { PATTERN_LONGEST = 512, MATCH_LIMIT = 100000 };

static const char pattern_mark[] = "re:";
static const char class_of_projections[] = "Linear";

/* The names that the config may have for a projection: with any of the prefixes. */
typedef struct module_names {
    char text[8][MM_NAME_TEXT];
    int n;
} module_names;

static void module_names_of(const mm_layer *layer, megamoe_projection projection,
                            module_names *names) {
    mm_expert_name like;
    mm_expert_name_parse(layer->first->name, &like);
    const char *unprefixed = strstr(layer->first->name, "layers.");
    const int unprefixed_bytes = (int)(layer->first->name + like.block_bytes - unprefixed);
    names->n = 0;
    for (int i = 0; mm_name_prefixes[i] && names->n < 8; i++) {
        char block[MM_NAME_TEXT];
        like.block_bytes = (size_t)snprintf(block, sizeof block, "%s%.*s", mm_name_prefixes[i],
                                            unprefixed_bytes, unprefixed);
        char *name = names->text[names->n++];
        mm_expert_name_form(block, &like, like.expert, projection, "", name);
        name[strlen(name) - 1] = 0; /* the dot before a part */
    }
}

/* What pcre2_match says; a pattern of a checkpoint may be meant to try forever. */
static int match_names(const pcre2_code *code, const module_names *names) {
    int error = PCRE2_ERROR_NOMEMORY;
    pcre2_match_data *data = pcre2_match_data_create(1, NULL);
    pcre2_match_context *limits = pcre2_match_context_create(NULL);
    if (data && limits) {
        pcre2_set_match_limit(limits, MATCH_LIMIT);
        error = PCRE2_ERROR_NOMATCH;
    }
    for (int i = 0; i < names->n && error == PCRE2_ERROR_NOMATCH; i++)
        error = pcre2_match(code, (PCRE2_SPTR)names->text[i], strlen(names->text[i]), 0, 0, data,
                            limits);
    pcre2_match_context_free(limits);
    pcre2_match_data_free(data);
    return error;
}

/* Tries a pattern on the names as re.match() does; *readable: unless that cannot be done. */
static megamoe_status try_pattern(const char *pattern, const module_names *names, bool *matches,
                                  bool *readable) {
    int error = 0;
    size_t at;
    pcre2_code *code = NULL;
    *matches = *readable = false;
    if (strlen(pattern) <= PATTERN_LONGEST)
        code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_ANCHORED, &error,
                             &at, NULL);
    if (code) {
        error = match_names(code, names);
        *matches = error >= 0;
        *readable = error >= 0 || error == PCRE2_ERROR_NOMATCH;
        pcre2_code_free(code);
    }
    return error == PCRE2_ERROR_NOMEMORY || error == PCRE2_ERROR_HEAP_FAILED
               ? mm_fail(MEGAMOE_ENOMEM, "out of memory for the pattern \"%s\"", pattern)
               : MEGAMOE_OK;
}

/* Whether a target is one of the names or matches one. *readable: unless it could not be tried. */
static megamoe_status target_matches(const char *target, const module_names *names, bool *matches,
                                     bool *readable) {
    *readable = true;
    if (strncmp(target, pattern_mark, sizeof pattern_mark - 1) == 0)
        return try_pattern(target + sizeof pattern_mark - 1, names, matches, readable);
    *matches = strcmp(target, class_of_projections) == 0;
    for (int i = 0; i < names->n && !*matches; i++)
        *matches = strcmp(target, names->text[i]) == 0;
    return MEGAMOE_OK;
}

/* Whether a list of targets matches. *unread becomes a target that could not be tried. */
static megamoe_status list_matches(const json_t *targets, const module_names *names, bool *matches,
                                   const char **unread) {
    *matches = false;
    for (size_t i = 0; i < json_array_size(targets) && !*matches; i++) {
        const char *target = json_string_value(json_array_get(targets, i));
        bool readable = true;
        if (target)
            MM_TRY(target_matches(target, names, matches, &readable));
        if (!readable)
            *unread = target;
    }
    return MEGAMOE_OK;
}

/* The format of a group, or of the whole where it is silent. NULL: no word of it. */
static const char *format_of(const json_t *group, const char *top) {
    const char *own = json_string_value(json_object_get(group, "format"));
    return own ? own : top && strcmp(top, "mixed-precision") != 0 ? top : NULL;
}

static bool silent_or(const json_t *number, json_int_t value) {
    return !json_is_integer(number) || json_integer_value(number) == value;
}

static bool agrees(const json_t *group, const char *format, const mm_packed_format *is) {
    const json_t *weights = json_object_get(group, "weights");
    const char *type = json_string_value(json_object_get(weights, "type"));
    return (format ? strcmp(format, is->format) == 0 : !is->must_be_declared) &&
           silent_or(json_object_get(weights, "num_bits"), 4) &&
           silent_or(json_object_get(weights, "group_size"), is->group_size) &&
           (!type || strcmp(type, "float") == 0);
}

static megamoe_status undeclared(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                                 const mm_packed_format *is) {
    const char *path = checkpoint->config.path;
    return mm_fail(MEGAMOE_ENOTFOUND,
                   "%s: %s: the tensors of layer %" PRId32 " may be %s, but U8 scales mean that "
                   "only where quantization_config gives the format \"%s\", and %s does not",
                   layer->first->file->path, layer->first->name, layer->index, is->name, is->format,
                   path ? path : "no config.json");
}

static megamoe_status check_module(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                                   json_t *groups, const module_names *names, const char *top,
                                   const mm_packed_format *is) {
    const mm_tensor *first = layer->first;
    const char *path = checkpoint->config.path;
    const char *unread = NULL, *other = NULL, *other_format = NULL;
    const char *key;
    json_t *group;
    json_object_foreach(groups, key, group) {
        bool targeted;
        MM_TRY(list_matches(json_object_get(group, "targets"), names, &targeted, &unread));
        if (!targeted)
            continue;
        const char *format = format_of(group, top);
        if (agrees(group, format, is))
            return MEGAMOE_OK;
        other = key;
        other_format = format;
    }
    if (unread)
        return mm_fail(
            MEGAMOE_EUNSUPPORTED,
            "%s: %s: no config group of %s is known to describe it, and the pattern "
            "\"%s\" there cannot be tried (it is not valid, too long, or takes too many steps)",
            first->file->path, first->name, path, unread);
    if (other)
        return mm_fail(MEGAMOE_EFORMAT,
                       "%s: %s: the tensors of layer %" PRId32 " are %s (%s, group_size %" PRId32
                       "), but config_groups.%s of %s, which targets them, has other weights "
                       "(format: %s)",
                       first->file->path, first->name, layer->index, is->name, is->format,
                       is->group_size, other, path, other_format ? other_format : "none");
    return mm_fail(MEGAMOE_EFORMAT,
                   "%s: %s: the tensors of layer %" PRId32
                   " are %s, but no config group of %s targets %s",
                   first->file->path, first->name, layer->index, is->name, path, names->text[0]);
}

megamoe_status mm_config_groups_check(const megamoe_checkpoint *checkpoint, const mm_layer *layer,
                                      const mm_packed_format *is) {
    const mm_config *config = &checkpoint->config;
    const char *top = json_string_value(mm_config_quantization(config, "format"));
    const json_t *ignore = mm_config_quantization(config, "ignore");
    json_t *groups =
        json_object_get(json_object_get(config->text, "quantization_config"), "config_groups");
    if (!groups)
        groups =
            json_object_get(json_object_get(config->root, "quantization_config"), "config_groups");
    if (json_object_size(groups) == 0) {
        if (top && strcmp(top, is->format) != 0)
            return mm_declared_fail(layer, config->path, "the format", top, is->name);
        return top || !is->must_be_declared ? MEGAMOE_OK : undeclared(checkpoint, layer, is);
    }
    for (megamoe_projection p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++) {
        module_names names;
        module_names_of(layer, p, &names);
        const char *unread = NULL;
        bool ignored;
        MM_TRY(list_matches(ignore, &names, &ignored, &unread));
        if (ignored)
            return mm_fail(MEGAMOE_EFORMAT,
                           "%s: %s: the tensors of layer %" PRId32
                           " are %s, but \"ignore\" of %s says that %s is not quantized",
                           layer->first->file->path, layer->first->name, layer->index, is->name,
                           config->path, names.text[0]);
        MM_TRY(check_module(checkpoint, layer, groups, &names, top, is));
    }
    return MEGAMOE_OK;
}
