/* SPDX-License-Identifier: Apache-2.0 */
/* What commands print, and how they end. */
#ifndef REPORT_H
#define REPORT_H

#include <jansson.h>
#include <megamoe/status.h>
#include <stdint.h>

/* Exit codes. */
enum { EXIT_DONE = 0, EXIT_CHECK_FAILED = 1, EXIT_BAD_INPUT = 2 };

#define REPORT_FORMAT(f, a) __attribute__((format(printf, f, a)))

/* Prints "megamoe: ..." on standard error. Returns EXIT_BAD_INPUT. */
int report_error(const char *format, ...) REPORT_FORMAT(1, 2);

/* Prints the library's last error. Returns the exit code that `status` calls for. */
int report_failure(megamoe_status status);
/* Prints why a JSON file was not read. Returns EXIT_BAD_INPUT. */
int report_json_error(const char *path, const json_error_t *error);

#ifdef __clang_analyzer__ /* which does not see into the other file */
#define report_error(...) (report_error(__VA_ARGS__), EXIT_BAD_INPUT)
#endif

/* For functions that return exit codes: passes on one that is not EXIT_DONE. */
#define TRY(call)                                                                                  \
    do {                                                                                           \
        const int code_ = (call);                                                                  \
        if (code_ != EXIT_DONE)                                                                    \
            return code_;                                                                          \
    } while (0)

/* The same for calls of the library, whose error it prints. */
#define TRY_LIBRARY(call)                                                                          \
    do {                                                                                           \
        const megamoe_status status_ = (call);                                                     \
        if (status_ != MEGAMOE_OK)                                                                 \
            return report_failure(status_);                                                        \
    } while (0)

/* Prints "label     text" on standard output. */
void report_line(const char *label, const char *format, ...) REPORT_FORMAT(2, 3);

/* Prints an object on standard output and gives up its reference. Returns EXIT_DONE. */
int report_json(json_t *object);

enum { REPORT_SIZE_BYTES = 24 };

/* "13.4 MB", in powers of ten. Returns `text`. */
const char *report_size(uint64_t bytes, char text[REPORT_SIZE_BYTES]);

#endif
