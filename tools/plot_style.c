/* SPDX-License-Identifier: Apache-2.0 */
/* What the kinds of pictures have in common. */
#include <string.h>

#include "plot.h"

/* Colours that differ in brightness too; points, dashes and hatching tell more than they do. */
static const char *const colours[] = {"#0b4f8a", "#c8501e", "#2f9e6e",
                                      "#7b3294", "#b08a00", "#444444"};
static const char *const dashes[] = {"(2,4)", "(8,4)", "(8,3,2,3)", "(2,2)", "(12,3)", "(5,5)"};
static const int point_types[] = {7, 5, 9, 13, 11, 15, 6, 4, 8, 12, 10, 14};
static const int patterns[] = {3, 2, 5, 1, 6, 7, 4};

#define PICK(list, i) (list)[(i) % (int)(sizeof(list) / sizeof *(list))]

const char *plot_colour(int series) {
    return PICK(colours, series);
}

const char *plot_dashes(int series) {
    return PICK(dashes, series);
}

int plot_point_type(int series) {
    return PICK(point_types, series);
}

int plot_pattern(int series) {
    return PICK(patterns, series);
}

void plot_quote(FILE *script, const char *text) {
    fputc('\'', script);
    for (; *text != '\0'; text++) {
        if (*text == '\'')
            fputc('\'', script);
        fputc((unsigned char)*text < ' ' ? ' ' : *text, script);
    }
    fputc('\'', script);
}

double plot_number(const json_t *json, const char *keys) {
    while (*keys != '\0') {
        const size_t n = strcspn(keys, ".");
        json = json_object_getn(json, keys, n);
        keys += n + (keys[n] == '.');
    }
    if (json_is_number(json))
        return json_number_value(json);
    double sum = 0;
    for (size_t i = 0; i < json_array_size(json); i++)
        sum += json_number_value(json_array_get(json, i));
    return sum / (double)json_array_size(json); /* of nothing: NAN */
}
