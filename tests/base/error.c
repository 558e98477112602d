/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "megamoe/megamoe.h"
#include "t.h"

T_CASE(the_first_message_is_empty) {
    T_EQ_STR(megamoe_last_error(), "");
}

T_CASE(fail_records_its_text_and_returns_its_status) {
    T_STATUS(mm_fail(MEGAMOE_EFORMAT, "%s: %d", "file", 7), MEGAMOE_EFORMAT);
    T_EQ_STR(megamoe_last_error(), "file: 7");
    /* A message may quote the previous one. */
    T_STATUS(mm_fail(MEGAMOE_EIO, "outer: %s", megamoe_last_error()), MEGAMOE_EIO);
    T_EQ_STR(megamoe_last_error(), "outer: file: 7");
}

T_CASE(long_messages_are_cut) {
    char text[5000];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = 0;
    T_STATUS(mm_fail(MEGAMOE_EIO, "%s", text), MEGAMOE_EIO);
    const size_t length = strlen(megamoe_last_error());
    T_CHECK(length >= 500 && length < sizeof text);
    T_CHECK(strspn(megamoe_last_error(), "x") == length);
}

static void *fail_elsewhere(void *unused) {
    (void)unused;
    T_EQ_STR(megamoe_last_error(), "");
    T_STATUS(mm_fail(MEGAMOE_EINVAL, "elsewhere"), MEGAMOE_EINVAL);
    T_EQ_STR(megamoe_last_error(), "elsewhere");
    return NULL;
}

T_CASE(messages_belong_to_a_thread) {
    T_STATUS(mm_fail(MEGAMOE_EINVAL, "here"), MEGAMOE_EINVAL);
    pthread_t thread;
    T_REQUIRE(pthread_create(&thread, NULL, fail_elsewhere, NULL) == 0);
    pthread_join(thread, NULL);
    T_EQ_STR(megamoe_last_error(), "here");
}

T_CASE(every_status_has_a_name_and_a_sentence) {
#define X(code, value, sentence)                                                                   \
    T_EQ_STR(megamoe_status_name(code), #code);                                                    \
    T_EQ_STR(megamoe_status_text(code), sentence);                                                 \
    T_EQ_INT(code, value);                                                                         \
    T_CHECK((code) <= 0);
    MEGAMOE_STATUS_LIST(X)
#undef X
    T_EQ_STR(megamoe_status_name((megamoe_status)-1000), "unknown status");
    T_EQ_STR(megamoe_status_text((megamoe_status)1), "unknown status");
}

static megamoe_status try_both(bool *reached) {
    MM_TRY(MEGAMOE_OK);
    MM_TRY(MEGAMOE_EIO);
    *reached = true;
    return MEGAMOE_OK;
}

T_CASE(try_propagates) {
    bool reached = false;
    T_STATUS(try_both(&reached), MEGAMOE_EIO);
    T_CHECK(!reached);
}

T_CASE(version_is_that_of_the_header) {
    char expected[32];
    snprintf(expected, sizeof expected, "%d.%d.%d", MEGAMOE_VERSION_MAJOR, MEGAMOE_VERSION_MINOR,
             MEGAMOE_VERSION_PATCH);
    T_EQ_STR(megamoe_version(), expected);
}

typedef struct sink {
    int count;
    megamoe_log_level level;
    char text[64];
} sink;

static void collect(void *user, megamoe_log_level level, const char *message) {
    sink *s = user;
    s->count++;
    s->level = level;
    snprintf(s->text, sizeof s->text, "%s", message);
}

T_CASE(log_goes_to_the_callback_up_to_its_level) {
    sink s = {0};
    mm_log(MEGAMOE_LOG_ERROR, "to nobody");
    megamoe_log_set(collect, &s, MEGAMOE_LOG_WARN);
    mm_log(MEGAMOE_LOG_INFO, "too detailed");
    T_EQ_INT(s.count, 0);
    mm_log(MEGAMOE_LOG_WARN, "value %d", 5);
    T_EQ_INT(s.count, 1);
    T_EQ_INT(s.level, MEGAMOE_LOG_WARN);
    T_EQ_STR(s.text, "value 5");
    T_STATUS(mm_fail(MEGAMOE_EIO, "broken"), MEGAMOE_EIO);
    T_EQ_INT(s.level, MEGAMOE_LOG_ERROR);
    T_EQ_STR(s.text, "MEGAMOE_EIO: broken");
    megamoe_log_set(NULL, NULL, MEGAMOE_LOG_DEBUG);
    mm_log(MEGAMOE_LOG_ERROR, "silence");
    T_EQ_INT(s.count, 2);
}

static void *carry_elsewhere(void *argument) {
    mm_carried *carried = argument;
    mm_carry(carried, MEGAMOE_OK);
    mm_carry(carried, mm_fail(MEGAMOE_EIO, "the file of %s", "a thread"));
    mm_carry(carried, mm_fail(MEGAMOE_ENOMEM, "too late"));
    return NULL;
}

T_CASE(a_failure_is_carried_to_another_thread) {
    mm_carried carried = {0};
    pthread_t thread;
    T_STATUS(mm_carried_status(&carried), MEGAMOE_OK);
    T_REQUIRE(pthread_create(&thread, NULL, carry_elsewhere, &carried) == 0);
    pthread_join(thread, NULL);
    T_STATUS(mm_fail(MEGAMOE_EINVAL, "mine"), MEGAMOE_EINVAL);
    T_STATUS(mm_carried_status(&carried), MEGAMOE_EIO);
    T_EQ_STR(megamoe_last_error(), "the file of a thread");
}
