/* SPDX-License-Identifier: Apache-2.0 */
/* The result as comma-separated values: a line for each arm and batch size. */
#include <stdio.h>
#include <string.h>

#include "bench.h"
#include "bench_result.h"

/* In quotation marks, those inside doubled (RFC 4180). */
static void print_quoted(const char *text) {
    putchar('"');
    for (; *text != '\0'; text++) {
        if (*text == '"')
            putchar('"');
        putchar(*text);
    }
    putchar('"');
}

/* The ratio of an arm at a batch size; NULL for the first arm. */
static const json_t *ratio_of(const json_t *result, const char *arm, double tokens) {
    size_t i;
    const json_t *r;
    json_array_foreach(json_object_get(result, "ratios"), i, r) {
        if (strcmp(result_text(r, "arm"), arm) == 0 && result_number(r, "tokens") == tokens)
            return r;
    }
    return NULL;
}

static void print_number(const json_t *object, const char *name) {
    printf(",");
    if (object != NULL && result_has(object, name))
        printf("%.9g", result_number(object, name));
}

static void print_point(const json_t *result, const json_t *arm, const json_t *p) {
    const char *name = result_text(arm, "arm");
    const json_t *ratio = ratio_of(result, name, result_number(p, "tokens"));
    print_quoted(name);
    printf(",%s,%s,%.0f,%.9g,%.9g,%.9g", result_text(arm, "device"), result_text(arm, "format"),
           result_number(p, "tokens"), result_median_us(p), result_min_us(p), result_p90_us(p));
    print_number(json_object_get(p, "stage_us"), "median");
    print_number(p, "floor_us");
    print_number(p, "weight_gbs");
    printf(",%.9g",
           result_has(p, "tflops") ? result_number(p, "tflops") : result_number(p, "gflops") / 1e3);
    print_number(ratio, "median");
    print_number(ratio, "low");
    print_number(ratio, "high");
    print_number(ratio, "confidence");
    printf("\n");
}

int bench_print_csv(const json_t *result) {
    printf("arm,device,format,tokens,median_us,min_us,p90_us,stage_us,floor_us,weight_gbs,tflops,"
           "ratio,ratio_low,ratio_high,confidence\n");
    for (size_t i = 0; i < result_arms(result); i++) {
        json_t *arm = result_arm(result, i);
        size_t j;
        const json_t *p;
        json_array_foreach(json_object_get(arm, "points"), j, p) {
            print_point(result, arm, p);
        }
        json_decref(arm);
    }
    return EXIT_DONE;
}
