/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/names.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

const char *const mm_name_prefixes[] = {"",
                                        "model.",
                                        "language_model.",
                                        "language_model.model.",
                                        "model.language_model.",
                                        "model.language_model.model.",
                                        NULL};

static const char *const blocks[] = {"ffn.", "mlp.", "block_sparse_moe.", NULL};

/* By megamoe_projection. */
static const char *const named_projections[] = {"gate_proj.", "up_proj.", "down_proj.", NULL};
static const char *const numbered_projections[] = {"w1.", "w3.", "w2.", NULL};

static bool take(const char **at, const char *word) {
    const size_t bytes = strlen(word);
    if (strncmp(*at, word, bytes) != 0)
        return false;
    *at += bytes;
    return true;
}

static int take_one_of(const char **at, const char *const *words) {
    for (int i = 0; words[i]; i++)
        if (take(at, words[i]))
            return i;
    return -1;
}

bool mm_name_take_index(const char **at, int32_t *index) {
    const char *digit = *at;
    int64_t value = 0;
    for (; *digit >= '0' && *digit <= '9'; digit++) {
        value = value * 10 + (*digit - '0');
        if (value > INT32_MAX || (**at == '0' && digit > *at))
            return false;
    }
    if (digit == *at || *digit != '.')
        return false;
    *at = digit + 1;
    *index = (int32_t)value;
    return true;
}

static bool take_prefix(const char **at) {
    for (int i = 0; mm_name_prefixes[i]; i++) {
        const char *after = *at;
        if (take(&after, mm_name_prefixes[i]) && take(&after, "layers.")) {
            *at = after;
            return true;
        }
    }
    return false;
}

bool mm_expert_name_parse(const char *name, mm_expert_name *parsed) {
    const char *at = name;
    *parsed = (mm_expert_name){.expert = MM_EXPERTS_FUSED};
    if (!take_prefix(&at) || !mm_name_take_index(&at, &parsed->layer) ||
        take_one_of(&at, blocks) < 0)
        return false;
    parsed->block_bytes = (size_t)(at - name);
    if (!take(&at, "experts."))
        return false;
    if (*at >= '0' && *at <= '9') {
        if (!mm_name_take_index(&at, &parsed->expert))
            return false;
        int projection = take_one_of(&at, named_projections);
        parsed->numbered = projection < 0;
        if (parsed->numbered)
            projection = take_one_of(&at, numbered_projections);
        if (projection < 0)
            return false;
        parsed->projection = (megamoe_projection)projection;
    }
    parsed->part = at;
    return true;
}

void mm_expert_name_form(const char *name, const mm_expert_name *like, int32_t expert,
                         megamoe_projection projection, const char *part, char text[MM_NAME_TEXT]) {
    const char *const *projections = like->numbered ? numbered_projections : named_projections;
    if (like->expert == MM_EXPERTS_FUSED)
        snprintf(text, MM_NAME_TEXT, "%.*sexperts.%s", (int)like->block_bytes, name, part);
    else
        snprintf(text, MM_NAME_TEXT, "%.*sexperts.%" PRId32 ".%s%s", (int)like->block_bytes, name,
                 expert, projections[projection], part);
}

void mm_block_name_form(const char *name, const mm_expert_name *like, const char *part,
                        char text[MM_NAME_TEXT]) {
    snprintf(text, MM_NAME_TEXT, "%.*s%s", (int)like->block_bytes, name, part);
}
