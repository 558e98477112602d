/* SPDX-License-Identifier: Apache-2.0 */
/* Layers of experts for the fixture, and their values. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "fixture.h"

const char *const named[3] = {"gate_proj", "up_proj", "down_proj"};
const char *const numbered[3] = {"w1", "w3", "w2"};

void add_mxfp4(built *model, const char *block, int32_t layer, const char *const *projections,
               const char *scale, sizes s) {
    char prefix[96];
    snprintf(prefix, sizeof prefix, block, layer);
    for (int32_t e = 0; e < s.experts; e++)
        for (int p = 0; p < 3; p++) {
            const int64_t rows = p == 2 ? s.hidden : s.intermediate;
            const int64_t columns = p == 2 ? s.intermediate : s.hidden;
            randomize(model,
                      built_add(model, "I8", SHAPE(rows, columns / 2), "%sexperts.%d.%s.weight",
                                prefix, e, projections[p]),
                      0, 255);
            randomize(model,
                      built_add(model, "F8_E8M0", SHAPE(rows, columns / 32), "%sexperts.%d.%s.%s",
                                prefix, e, projections[p], scale),
                      110, 130);
        }
}

void add_nvfp4(built *model, const char *block, int32_t layer, const char *const *projections,
               sizes s) {
    char prefix[96];
    snprintf(prefix, sizeof prefix, block, layer);
    for (int32_t e = 0; e < s.experts; e++)
        for (int p = 0; p < 3; p++) {
            const int64_t rows = p == 2 ? s.hidden : s.intermediate;
            const int64_t columns = p == 2 ? s.intermediate : s.hidden;
            randomize(model,
                      built_add(model, "U8", SHAPE(rows, columns / 2), "%sexperts.%d.%s.weight",
                                prefix, e, projections[p]),
                      0, 255);
            randomize(model,
                      built_add(model, "F8_E4M3", SHAPE(rows, columns / 16),
                                "%sexperts.%d.%s.weight_scale", prefix, e, projections[p]),
                      0, 0x7E);
            const float global = (float)(1e-5 * (1 + t_uniform(&model->random)));
            memcpy(built_add(model, "F32", SCALAR, "%sexperts.%d.%s.weight_scale_2", prefix, e,
                             projections[p])
                       ->data,
                   &global, sizeof global);
            const float unused = 0.0f; /* not a scale of anything that is computed here */
            memcpy(built_add(model, "F32", SCALAR, "%sexperts.%d.%s.input_scale", prefix, e,
                             projections[p])
                       ->data,
                   &unused, sizeof unused);
        }
}

double element(const built_tensor *codes, const built_tensor *scales, float global, int64_t row,
               int64_t k) {
    static const double magnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const int64_t bytes = codes->shape[codes->rank - 1];
    const int64_t groups = scales->shape[scales->rank - 1];
    const uint8_t byte = codes->data[row * bytes + k / 2];
    const unsigned code = k % 2 ? byte >> 4 : byte & 15u;
    const double value = code & 8u ? -magnitudes[code & 7u] : magnitudes[code & 7u];
    const unsigned scale = scales->data[row * groups + k / (2 * bytes / groups)];
    if (strcmp(scales->dtype, "F8_E8M0") == 0)
        return ldexp(value, (int)scale - 127);
    const double mantissa = scale & 7u, exponent = scale >> 3 & 15u;
    const double decoded =
        exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, (int)exponent - 10);
    return value * decoded * (double)global;
}
