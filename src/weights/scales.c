/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "base/error.h"
#include "num/e4m3.h"
#include "num/e8m0.h"
#include "weights/object.h"

/* Accepted bytes are 0..this: above it lie E8M0's NaN, E4M3's NaN and every negative E4M3. */
static uint8_t largest_scale(megamoe_format format) {
    return format == MEGAMOE_FORMAT_MXFP4 ? MM_E8M0_NAN - 1 : MM_E4M3_NAN - 1;
}

static const char *what_is_wrong(megamoe_format format, uint8_t byte) {
    if (format == MEGAMOE_FORMAT_MXFP4 || (byte & 0x7F) == MM_E4M3_NAN)
        return "NaN";
    return byte == 0x80 ? "-0" : "negative";
}

static megamoe_status check_row(const megamoe_weights *weights, int32_t expert,
                                megamoe_projection projection, int32_t row, int32_t groups) {
    const megamoe_format format = weights->desc.format;
    const uint8_t *scales = mm_matrix_scales(mm_matrix_of(weights, expert, projection), row);
    const uint8_t accepted = largest_scale(format);
    uint8_t largest = 0;
    for (int32_t g = 0; g < groups; g++)
        largest = scales[g] > largest ? scales[g] : largest;
    if (largest <= accepted)
        return MEGAMOE_OK;
    int32_t block = 0;
    while (scales[block] <= accepted)
        block++;
    return mm_matrix_fail(weights, MEGAMOE_EFORMAT, expert, projection, true,
                          "row %d, block %d: scale byte 0x%02x is %s; expected 0x00..0x%02x", row,
                          block, scales[block], what_is_wrong(format, scales[block]), accepted);
}

megamoe_status mm_expert_scales_check(const megamoe_weights *weights, int32_t expert) {
    const megamoe_layer_desc *desc = &weights->desc;
    for (megamoe_projection p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++) {
        const float global = mm_weights_global(weights, expert, p);
        if (!(global > 0.0f) || isinf(global))
            return mm_matrix_fail(weights, MEGAMOE_EFORMAT, expert, p, true,
                                  "global scale %g; expected a positive finite number",
                                  (double)global);
        const int32_t groups = mm_columns(desc, p) / mm_group_size(desc->format);
        for (int32_t row = 0; row < mm_rows(desc, p); row++)
            MM_TRY(check_row(weights, expert, p, row, groups));
    }
    return MEGAMOE_OK;
}
