/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe_weights_analyze against counting by hand. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "layer.h"

static bool in_e4m3(double value) {
    for (int byte = 0; byte < 0x7F; byte++)
        if (decode_e4m3((uint8_t)byte) == fabs(value))
            return true;
    return false;
}

static bool code_is_exact(megamoe_format format, unsigned code, double scale) {
    if (format == MEGAMOE_FORMAT_MXFP4)
        return in_e4m3(decode_e2m1(code) * scale);
    return in_e4m3(decode_high(code) * scale) && in_e4m3(decode_low(code) * scale);
}

/* Adds one group; its binades go to *smallest and *largest unless it is zero. */
static void count_group(const test_layer *layer, int32_t expert, megamoe_projection projection,
                        int32_t row, int32_t first, int32_t size, int exponent,
                        megamoe_projection_report *report, int *smallest, int *largest) {
    const megamoe_format format = layer->desc.format;
    const double block_scale = layer_block_scale(layer, expert, projection, row, first);
    const double scale = ldexp(block_scale, -exponent);
    bool zero = true;
    bool inside = true;
    for (int32_t k = first; k < first + size; k++) {
        const unsigned code = layer_code(layer, expert, projection, row, k);
        zero = zero && decode_e2m1(code) * scale == 0.0;
        inside = inside && code_is_exact(format, code, scale);
    }
    bool for_all_codes = true;
    for (unsigned code = 0; code < 8; code++)
        for_all_codes = for_all_codes && code_is_exact(format, code, scale);
    report->groups++;
    report->zero_groups += zero;
    report->inside += inside || zero;
    report->inside_shifted += inside && !zero && !for_all_codes;
    report->outside += !inside && !zero;
    if (!zero) {
        const int binade = ilogb(block_scale);
        *smallest = binade < *smallest ? binade : *smallest;
        *largest = binade > *largest ? binade : *largest;
    }
}

static void count_projection(const test_layer *layer, megamoe_projection projection,
                             megamoe_projection_report *report) {
    const int32_t size = layer->desc.format == MEGAMOE_FORMAT_MXFP4 ? 32 : 16;
    *report = (megamoe_projection_report){
        .row_exponent_min = 1000, .row_exponent_max = -1000, .global_min = INFINITY};
    double error = 0.0;
    double energy = 0.0;
    for (int32_t expert = 0; expert < layer->desc.experts; expert++) {
        const float global = layer->desc.format == MEGAMOE_FORMAT_MXFP4
                                 ? 1.0f
                                 : layer_matrix(layer, expert, projection)->global_scale;
        report->global_min = fminf(report->global_min, global);
        report->global_max = fmaxf(report->global_max, global);
        for (int32_t row = 0; row < layer_rows(layer, projection); row++) {
            const int exponent =
                brute_row_exponent(layer, MEGAMOE_NVFP4_EXACT, expert, projection, row);
            int smallest = 1000;
            int largest = -1000;
            for (int32_t k = 0; k < layer_columns(layer, projection); k += size) {
                count_group(layer, expert, projection, row, k, size, exponent, report, &smallest,
                            &largest);
                report->scale_histogram[layer_scales(layer, expert, projection, row)[k / size]]++;
            }
            report->spread_histogram[largest >= smallest ? largest - smallest : 0]++;
            report->row_exponent_min =
                exponent < report->row_exponent_min ? exponent : report->row_exponent_min;
            report->row_exponent_max =
                exponent > report->row_exponent_max ? exponent : report->row_exponent_max;
            if (layer->desc.format == MEGAMOE_FORMAT_NVFP4)
                for (int32_t k = 0; k < layer_columns(layer, projection); k++) {
                    const double value = layer_value(layer, expert, projection, row, k);
                    const double folded = folded_value(layer, expert, projection, row, k);
                    error += (folded - value) * (folded - value);
                    energy += value * value;
                }
        }
    }
    report->folded_relative_rms = energy > 0.0 ? sqrt(error / energy) : 0.0;
}

struct progress {
    uint64_t done;
    uint64_t total;
};

static void on_progress(void *user, uint64_t done, uint64_t total) {
    struct progress *progress = user;
    T_CHECK(done >= progress->done && done <= total);
    *progress = (struct progress){done, total};
}

static megamoe_weights_report analyze(const megamoe_weights *weights, int32_t threads) {
    struct progress progress = {0};
    megamoe_weights_report report = MEGAMOE_INIT(megamoe_weights_report);
    T_OK(megamoe_weights_analyze(weights, threads, (megamoe_progress){on_progress, &progress},
                                 &report));
    T_EQ_INT((int64_t)progress.done, (int64_t)report.bytes);
    T_EQ_INT((int64_t)progress.total, (int64_t)report.bytes);
    return report;
}

static void check_projection(const megamoe_projection_report *found,
                             const megamoe_projection_report *wanted) {
    T_EQ_INT((int64_t)found->groups, (int64_t)wanted->groups);
    T_EQ_INT((int64_t)found->zero_groups, (int64_t)wanted->zero_groups);
    T_EQ_INT((int64_t)found->inside, (int64_t)wanted->inside);
    T_EQ_INT((int64_t)found->inside_shifted, (int64_t)wanted->inside_shifted);
    T_EQ_INT((int64_t)found->outside, (int64_t)wanted->outside);
    T_EQ_MEM(found->scale_histogram, wanted->scale_histogram, sizeof wanted->scale_histogram);
    T_EQ_MEM(found->spread_histogram, wanted->spread_histogram, sizeof wanted->spread_histogram);
    T_EQ_INT(found->row_exponent_min, wanted->row_exponent_min);
    T_EQ_INT(found->row_exponent_max, wanted->row_exponent_max);
    T_EQ_F64(found->global_min, wanted->global_min);
    T_EQ_F64(found->global_max, wanted->global_max);
    T_NEAR(found->folded_relative_rms, wanted->folded_relative_rms,
           1e-12 * wanted->folded_relative_rms);
}

T_CASE(counts) {
    static const layer_shape shapes[] = {
        {MEGAMOE_FORMAT_MXFP4, 96, 64, 3, MEGAMOE_DTYPE_NONE, 112, 130},
        {MEGAMOE_FORMAT_MXFP4, 256, 32, 2, MEGAMOE_DTYPE_BF16, 100, 150},
        {MEGAMOE_FORMAT_MXFP4, 64, 96, 2, MEGAMOE_DTYPE_NONE, 0, 254},
        {MEGAMOE_FORMAT_NVFP4, 48, 80, 3, MEGAMOE_DTYPE_NONE, 1, 126},
        {MEGAMOE_FORMAT_NVFP4, 160, 16, 2, MEGAMOE_DTYPE_NONE, 0, 40},
    };
    t_random random = t_random_start(30);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        test_layer layer = layer_random(&shapes[i], &random);
        megamoe_weights *weights;
        T_OK(megamoe_weights_from_tensors(&layer.desc, layer.matrices, &weights));
        const megamoe_weights_report one = analyze(weights, 1);
        const megamoe_weights_report three = analyze(weights, 3);
        T_EQ_MEM(&one, &three, sizeof one);
        uint64_t bytes = 0;
        for (int p = 0; p < 3; p++) {
            const megamoe_projection projection = (megamoe_projection)p;
            megamoe_projection_report wanted;
            count_projection(&layer, projection, &wanted);
            check_projection(&one.projection[p], &wanted);
            bytes += wanted.groups * (shapes[i].format == MEGAMOE_FORMAT_MXFP4 ? 17 : 9);
        }
        T_EQ_INT((int64_t)one.bytes, (int64_t)bytes);
        megamoe_weights_close(weights);
        layer_free(&layer);
    }
}

/* One row of two groups: the first is fixed, the second lies k binades under the row exponent. */
static void check_window(int k, uint8_t codes, int inside, int shifted) {
    const layer_shape shape = {.format = MEGAMOE_FORMAT_MXFP4,
                               .hidden = 64,
                               .intermediate = 32,
                               .experts = 1,
                               .scale_min = 127,
                               .scale_max = 127};
    t_random random = t_random_start(31);
    test_layer layer = layer_random(&shape, &random);
    for (int32_t row = 0; row < 32; row++) {
        memset(layer_codes(&layer, 0, MEGAMOE_GATE, row), 0x66, 16);
        memset(layer_codes(&layer, 0, MEGAMOE_GATE, row) + 16, codes, 16);
        layer_scales(&layer, 0, MEGAMOE_GATE, row)[0] = 127 + 6; /* row exponent 0 */
        layer_scales(&layer, 0, MEGAMOE_GATE, row)[1] = (uint8_t)(127 + k);
    }
    megamoe_weights *weights;
    T_OK(megamoe_weights_from_tensors(&layer.desc, layer.matrices, &weights));
    const megamoe_weights_report report = analyze(weights, 1);
    const megamoe_projection_report *gate = &report.projection[MEGAMOE_GATE];
    T_EQ_INT(gate->row_exponent_max, 0);
    T_CHECK_MSG((int)gate->inside == 32 + 32 * inside, "k %d codes 0x%02x", k, codes);
    T_CHECK_MSG((int)gate->inside_shifted == 32 * shifted, "k %d codes 0x%02x", k, codes);
    T_EQ_INT((int64_t)gate->outside, 32 - 32 * inside);
    megamoe_weights_close(weights);
    layer_free(&layer);
}

/* The window of numerics.md: k in -8..6 for any code, 7..9 and -9..-11 for some. */
T_CASE(edges_of_the_window) {
    check_window(6, 0x77, 1, 0);
    check_window(-8, 0x11, 1, 0);
    check_window(7, 0x44, 1, 1);
    check_window(8, 0x22, 1, 1);
    check_window(9, 0x11, 1, 1);
    check_window(-9, 0x22, 1, 1);
    check_window(-9, 0x11, 0, 0);
    check_window(-9, 0x33, 0, 0);
    check_window(-10, 0x44, 1, 1);
    check_window(-11, 0x66, 1, 1);
    check_window(-11, 0x44, 0, 0);
    check_window(-12, 0x77, 0, 0);
    check_window(-12, 0x66, 0, 0);
    check_window(-12, 0x80, 1, 0);
    check_window(-100, 0x77, 0, 0);
}

T_CASE(prepared_weights_are_refused) {
    const layer_shape shape = {.format = MEGAMOE_FORMAT_NVFP4,
                               .hidden = 16,
                               .intermediate = 16,
                               .experts = 1,
                               .scale_min = 1,
                               .scale_max = 126};
    t_random random = t_random_start(32);
    test_layer layer = layer_random(&shape, &random);
    megamoe_weights *weights;
    T_OK(megamoe_weights_from_tensors(&layer.desc, layer.matrices, &weights));
    const char *path = t_path("file");
    T_OK(megamoe_weights_prepare(weights, NULL, NULL, path));
    megamoe_weights_close(weights);
    T_OK(megamoe_weights_open(path, &weights));
    megamoe_weights_report report = MEGAMOE_INIT(megamoe_weights_report);
    T_STATUS(megamoe_weights_analyze(weights, 1, (megamoe_progress){0}, &report),
             MEGAMOE_EUNSUPPORTED);
    megamoe_weights_close(weights);
    layer_free(&layer);
}
