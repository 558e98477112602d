/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "megamoe/version.h"

static _Thread_local char last_error[MM_ERROR_TEXT];

megamoe_status(mm_fail)(megamoe_status status, const char *format, ...) {
    char text[sizeof last_error];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    /* Names that come from files must not control a terminal. */
    for (char *c = text; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 0x7F)
            *c = '?';
    snprintf(last_error, sizeof last_error, "%s", text);
    mm_log(MEGAMOE_LOG_ERROR, "%s: %s", megamoe_status_name(status), text);
    return status;
}

void mm_carry(mm_carried *carried, megamoe_status status) {
    if (status == MEGAMOE_OK || atomic_exchange(&carried->taken, true))
        return;
    carried->status = status;
    memcpy(carried->text, last_error, sizeof carried->text);
}

megamoe_status mm_carried_status(const mm_carried *carried) {
    if (carried->status != MEGAMOE_OK)
        memcpy(last_error, carried->text, sizeof last_error);
    return carried->status;
}

const char *megamoe_last_error(void) {
    return last_error;
}

const char *megamoe_status_name(megamoe_status status) {
    switch (status) {
#define X(name, value, sentence)                                                                   \
    case name:                                                                                     \
        return #name;
        MEGAMOE_STATUS_LIST(X)
#undef X
    }
    return "unknown status";
}

const char *megamoe_status_text(megamoe_status status) {
    switch (status) {
#define X(name, value, sentence)                                                                   \
    case name:                                                                                     \
        return sentence;
        MEGAMOE_STATUS_LIST(X)
#undef X
    }
    return "unknown status";
}

#define MM_TEXT(x) #x
#define MM_DOTTED(major, minor, patch) MM_TEXT(major) "." MM_TEXT(minor) "." MM_TEXT(patch)

const char *megamoe_version(void) {
    return MM_DOTTED(MEGAMOE_VERSION_MAJOR, MEGAMOE_VERSION_MINOR, MEGAMOE_VERSION_PATCH);
}
