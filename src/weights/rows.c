/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/rows.h"

#include <math.h>

#include "num/e2m1.h"
#include "num/e4m3.h"
#include "num/e8m0.h"

bool mm_scale_split(megamoe_format format, uint8_t byte, mm_scale *scale) {
    if (format == MEGAMOE_FORMAT_MXFP4) {
        *scale = (mm_scale){byte - MM_E8M0_BIAS, 0};
        return true;
    }
    const int field = byte >> 3 & 15;
    const int mantissa = byte & 7;
    if (field) {
        *scale = (mm_scale){field - 7, mantissa};
        return true;
    }
    if (!mantissa) {
        *scale = (mm_scale){0, 0};
        return false;
    }
    /* Subnormal: mantissa * 2^-9, its leading bit made implicit. */
    const int leading = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
    *scale = (mm_scale){leading - 9, (mantissa << (3 - leading)) & 7};
    return true;
}

static const float high_terms[8] = {0.0f, 0.5f, 1.0f, 1.0f, 2.0f, 2.0f, 4.0f, 4.0f};
static const float low_terms[8] = {0.0f, 0.0f, 0.0f, 0.5f, 0.0f, 1.0f, 0.0f, 2.0f};

float mm_e2m1_high(unsigned code) {
    return code & 8u ? -high_terms[code & 7u] : high_terms[code & 7u];
}

float mm_e2m1_low(unsigned code) {
    return code & 8u ? -low_terms[code & 7u] : low_terms[code & 7u];
}

void mm_row_present(megamoe_format format, const uint8_t *codes, int32_t columns,
                    uint8_t *present) {
    const int32_t group = mm_group_size(format);
    for (int32_t g = 0; g < columns / group; g++) {
        const uint8_t *bytes = codes + g * (group / 2);
        unsigned set = 0;
        for (int32_t i = 0; i < group / 2; i++)
            set |= 1u << (bytes[i] & 7) | 1u << (bytes[i] >> 4 & 7);
        present[g] = (uint8_t)set;
    }
}

static double scale_value(mm_scale scale) {
    return ldexp(1.0 + scale.eighths / 8.0, scale.exponent);
}

int mm_row_exponent(megamoe_format format, megamoe_nvfp4_mode mode, const uint8_t *scales,
                    const uint8_t *present, int32_t groups) {
    const bool split = format == MEGAMOE_FORMAT_NVFP4 && mode == MEGAMOE_NVFP4_EXACT;
    double largest = 0.0;
    for (int32_t g = 0; g < groups; g++) {
        mm_scale scale;
        if (!mm_scale_split(format, scales[g], &scale))
            continue;
        /* Terms grow with the code, so the largest code has the largest term. */
        unsigned code = 7;
        while (!(present[g] >> code & 1))
            code--;
        const double term =
            scale_value(scale) * (split ? mm_e2m1_high(code) : mm_e2m1_to_f32(code));
        largest = term > largest ? term : largest;
    }
    if (largest == 0.0)
        return 0;
    int exponent;
    const double fraction = frexp(largest, &exponent);
    exponent -= fraction <= 0.875 ? 9 : 8; /* 448 is 0.875 * 2^9 */
    if (exponent < -MM_ROW_EXPONENT_MAX)
        return -MM_ROW_EXPONENT_MAX;
    return exponent > MM_ROW_EXPONENT_MAX ? MM_ROW_EXPONENT_MAX : exponent;
}

static bool exact_in_e4m3(double value) {
    return value <= MM_E4M3_MAX && (double)mm_e4m3_to_f32(mm_e4m3_from_f32((float)value)) == value;
}

uint8_t mm_exact_magnitudes(megamoe_format format, mm_scale scale) {
    const bool split = format == MEGAMOE_FORMAT_NVFP4;
    const double value = scale_value(scale);
    unsigned set = 0;
    for (unsigned code = 0; code < 8; code++) {
        const double high = split ? mm_e2m1_high(code) : mm_e2m1_to_f32(code);
        const double low = split ? mm_e2m1_low(code) : 0.0;
        if (exact_in_e4m3(high * value) && exact_in_e4m3(low * value))
            set |= 1u << code;
    }
    return (uint8_t)set;
}

void mm_fold_codes(mm_scale scale, uint8_t folded[16]) {
    const float factor = scale_value(scale) > MM_E4M3_MAX ? 2.0f : 1.0f;
    const float rounded = mm_e4m3_to_f32(mm_e4m3_from_f32((float)scale_value(scale) / factor));
    for (unsigned code = 0; code < 16; code++)
        folded[code] = mm_e4m3_from_f32(mm_e2m1_to_f32(code) * factor * rounded);
}
