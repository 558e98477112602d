/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_result.h"

#include <stdint.h>
#include <stdlib.h>

double result_number(const json_t *object, const char *name) {
    return json_number_value(json_object_get(object, name));
}

const char *result_text(const json_t *object, const char *name) {
    const char *text = json_string_value(json_object_get(object, name));
    return text != NULL ? text : "";
}

bool result_has(const json_t *object, const char *name) {
    return json_object_get(object, name) != NULL;
}

double result_number_in(const json_t *object, const char *inner, const char *name) {
    return result_number(json_object_get(object, inner), name);
}

double *result_numbers(const json_t *object, const char *name, size_t *n) {
    const json_t *array = json_object_get(object, name);
    *n = json_array_size(array);
    if (!json_is_array(array))
        return NULL;
    double *values = malloc((*n + 1) * sizeof *values);
    for (size_t i = 0; values != NULL && i < *n; i++)
        values[i] = json_number_value(json_array_get(array, i));
    return values;
}

size_t result_arms(const json_t *result) {
    return result_has(result, "arms") ? json_array_size(json_object_get(result, "arms")) : 1;
}

json_t *result_arm(const json_t *result, size_t i) {
    json_t *arm = json_copy((json_t *)(uintptr_t)result);
    json_t *own = json_array_get(json_object_get(result, "arms"), i);
    json_object_del(arm, "arms");
    json_object_del(arm, "ratios");
    if (own != NULL)
        json_object_update(arm, own);
    return arm;
}

/* A CPU's times are in milliseconds. */
static double time_of(const json_t *point, const char *name, const char *ms_name) {
    return result_has(point, "forward_us") ? result_number_in(point, "forward_us", name)
                                           : result_number(point, ms_name) * 1e3;
}

double result_median_us(const json_t *point) {
    return time_of(point, "median", "median_ms");
}

double result_p90_us(const json_t *point) {
    return time_of(point, "p90", "p90_ms");
}

double result_min_us(const json_t *point) {
    return time_of(point, "min", "min_ms");
}
