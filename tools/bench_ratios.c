/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compares the arms of one result: ratios of times that were measured beside each other, never of
 * independent medians.
 */
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "bench_result.h"
#include "statistics.h"

static json_t *ratio_json(const char *arm, const char *base, int64_t tokens, const char *paired_by,
                          size_t pairs, const statistics_interval *ratio) {
    return json_pack("{s:s, s:s, s:I, s:s, s:I, s:f, s:f, s:f, s:f}", "arm", arm, "base", base,
                     "tokens", (json_int_t)tokens, "paired_by", paired_by, "pairs",
                     (json_int_t)pairs, "median", ratio->median, "low", ratio->low, "high",
                     ratio->high, "confidence", ratio->confidence);
}

/* Where each arm had processes of its own only those are pairs. */
static int add_ratio(const json_t *result, const json_t *base, const json_t *arm, size_t point,
                     json_t *ratios) {
    const char *paired_by = result_text(result, "paired_by");
    const char *field = strcmp(paired_by, "process") == 0 ? "processes_us" : "rounds_us";
    const json_t *p = json_array_get(json_object_get(base, "points"), point);
    const json_t *q = json_array_get(json_object_get(arm, "points"), point);
    size_t n, m;
    double *a = result_numbers(p, field, &n), *b = result_numbers(q, field, &m);
    int code = EXIT_DONE;
    if (a == NULL || b == NULL || n != m || n == 0) {
        code = report_error("bench: %zu times of %s and %zu of %s are no pairs", n,
                            result_text(base, "arm"), m, result_text(arm, "arm"));
    } else {
        for (size_t i = 0; i < n; i++)
            b[i] /= a[i];
        const statistics_interval ratio = statistics_of_pairs(b, n, RESULT_CONFIDENCE);
        json_array_append_new(ratios, ratio_json(result_text(arm, "arm"), result_text(base, "arm"),
                                                 (int64_t)result_number(p, "tokens"), paired_by, n,
                                                 &ratio));
    }
    free(a);
    free(b);
    return code;
}

int bench_add_ratios(json_t *result) {
    const json_t *arms = json_object_get(result, "arms");
    const json_t *base = json_array_get(arms, 0);
    json_t *ratios = json_array();
    int code = EXIT_DONE;
    if (json_object_get(result, "paired_by") == NULL)
        json_object_set_new(result, "paired_by", json_string("round"));
    for (size_t i = 1; code == EXIT_DONE && i < json_array_size(arms); i++) {
        const size_t points = json_array_size(json_object_get(base, "points"));
        for (size_t j = 0; code == EXIT_DONE && j < points; j++)
            code = add_ratio(result, base, json_array_get(arms, i), j, ratios);
    }
    json_object_set_new(result, "ratios", ratios);
    return code;
}
