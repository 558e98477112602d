/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/quantize.h"

#include <float.h>
#include <math.h>

#include "base/memory.h"
#include "num/e4m3.h"
#include "num/e8m0.h"
#include "weights/rows.h"

static const double e2m1_max = 6.0;
static const double smallest_scale = 0x1p-9; /* of E4M3 */

double mm_largest(const double *weights, int32_t n) {
    double largest = 0.0;
    for (int32_t i = 0; i < n; i++) {
        const double magnitude = fabs(weights[i]);
        if (!(magnitude <= DBL_MAX))
            return magnitude;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

float mm_quantize_global(megamoe_format format, double largest) {
    if (format == MEGAMOE_FORMAT_MXFP4 || largest == 0.0)
        return 1.0f;
    return fmaxf((float)(largest / (e2m1_max * (double)MM_E4M3_MAX)), FLT_MIN);
}

/*
 * The code of weight / unit: nearest, ties to even. Midpoints have 3 bits and units 28, so the
 * products are exact where a quotient would be rounded.
 */
static uint8_t code_of(double weight, double unit) {
    const double a = fabs(weight);
    const int magnitude = (a > 0.25 * unit) + (a >= 0.75 * unit) + (a > 1.25 * unit) +
                          (a >= 1.75 * unit) + (a > 2.5 * unit) + (a >= 3.5 * unit) +
                          (a > 5.0 * unit);
    return (uint8_t)(magnitude | (signbit(weight) ? 8 : 0));
}

/* The smallest power of two under which the largest weight does not exceed 6. */
static uint8_t e8m0_of(double largest) {
    if (largest == 0.0)
        return MM_E8M0_BIAS;
    int exponent;
    const double fraction = frexp(largest, &exponent); /* in 0.5..1 */
    exponent -= fraction > 0.75 ? 2 : 3;
    return (uint8_t)mm_max(mm_min(exponent + MM_E8M0_BIAS, MM_E8M0_NAN - 1), 0);
}

static uint8_t e4m3_of(double largest, double global) {
    if (largest == 0.0)
        return mm_e4m3_from_f32(1.0f);
    const double scale = largest / (e2m1_max * global);
    return mm_e4m3_from_f32((float)fmin(fmax(scale, smallest_scale), (double)MM_E4M3_MAX));
}

void mm_quantize_row(megamoe_format format, const double *weights, int32_t n, float global,
                     uint8_t *codes, uint8_t *scales) {
    const int32_t size = mm_group_size(format);
    for (int32_t group = 0; group < n / size; group++) {
        const double *of = weights + (ptrdiff_t)group * size;
        uint8_t *to = codes + (ptrdiff_t)group * (size / 2);
        const double largest = mm_largest(of, size);
        double unit;
        if (format == MEGAMOE_FORMAT_MXFP4) {
            scales[group] = e8m0_of(largest);
            unit = (double)mm_e8m0_to_f32(scales[group]);
        } else {
            scales[group] = e4m3_of(largest, (double)global);
            unit = (double)mm_e4m3_to_f32(scales[group]) * (double)global;
        }
        for (int32_t i = 0; i < size / 2; i++)
            to[i] = (uint8_t)(code_of(of[2 * i], unit) | code_of(of[2 * i + 1], unit) << 4);
    }
}
