/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

int(report_error)(const char *format, ...) {
    char message[2048];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    fprintf(stderr, "megamoe: %s\n", message); /* one write: ranks share standard error */
    return EXIT_BAD_INPUT;
}

int report_json_error(const char *path, const json_error_t *error) {
    if (error->line < 0) /* it was not opened */
        return report_error("%s: %s", path, error->text);
    return report_error("%s: line %d: %s", path, error->line, error->text);
}

int report_failure(megamoe_status status) {
    const char *message = megamoe_last_error();
    report_error("%s", *message != '\0' ? message : megamoe_status_text(status));
    return status == MEGAMOE_ECHECK ? EXIT_CHECK_FAILED : EXIT_BAD_INPUT;
}

void report_line(const char *label, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    printf("%-12s", label);
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
}

int report_json(json_t *object) {
    const bool good =
        object != NULL && json_dumpf(object, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) == 0;
    json_decref(object);
    if (!good)
        return report_error("no JSON: out of memory, or a name that is not UTF-8");
    printf("\n");
    return EXIT_DONE;
}

const char *report_size(uint64_t bytes, char text[REPORT_SIZE_BYTES]) {
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB"};
    double value = (double)bytes;
    int unit = 0;
    while (value >= 1000 && unit < 4) {
        value /= 1000;
        unit++;
    }
    snprintf(text, REPORT_SIZE_BYTES, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
    return text;
}
