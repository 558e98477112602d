/* SPDX-License-Identifier: Apache-2.0 */
/* Counts what the weights of a layer hold, matrix by matrix on all threads. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/pool.h"
#include "num/e2m1.h"
#include "num/e4m3.h"
#include "weights/hold.h"
#include "weights/object.h"

enum {
    /* Scale exponents, after the row exponent, outside of which nothing is exact in E4M3. */
    EXPONENT_MIN = -12,
    EXPONENT_MAX = 10,
    EXPONENTS = EXPONENT_MAX - EXPONENT_MIN + 1
};

/* By scale after the row exponent. */
struct tables {
    uint8_t exact[EXPONENTS][8];        /* mm_exact_magnitudes */
    double fold_error[EXPONENTS][8][8]; /* squared, of each code magnitude, when folded */
};

/* Sums over one matrix; added in a fixed order, so the result does not depend on the threads. */
struct energy {
    double weights;
    double folding;
};

struct analysis {
    const megamoe_weights *weights;
    struct tables tables;
    atomic_int next; /* expert */
    atomic_int done;
    mm_carried failure;      /* of a thread that could not read an expert */
    struct energy *energies; /* [experts][MM_PROJECTIONS] */
    megamoe_projection_report (*reports)[MM_PROJECTIONS]; /* [threads] */
    uint64_t expert_bytes;
    megamoe_progress progress;
};

static void fill_tables(megamoe_format format, struct tables *tables) {
    for (int e = 0; e < EXPONENTS; e++)
        for (int eighths = 0; eighths < 8; eighths++) {
            const mm_scale scale = {e + EXPONENT_MIN, eighths};
            tables->exact[e][eighths] = mm_exact_magnitudes(format, scale);
            uint8_t folded[16];
            mm_fold_codes(scale, folded);
            const double value = ldexp(1.0 + eighths / 8.0, scale.exponent);
            for (unsigned code = 0; code < 8; code++) {
                const double error = mm_e4m3_to_f32(folded[code]) - mm_e2m1_to_f32(code) * value;
                tables->fold_error[e][eighths][code] = error * error;
            }
        }
}

static int table_row(int exponent) {
    return (int)mm_max(EXPONENT_MIN, mm_min(exponent, EXPONENT_MAX)) - EXPONENT_MIN;
}

/* Adds the squared weights of a group and what folding does to them, in units of 2^2exponent. */
static void add_group_energy(const double fold_error[8], const uint8_t *codes, double scale,
                             struct energy *energy) {
    double squares = 0.0;
    for (int i = 0; i < 16; i++) {
        const unsigned code = codes[i / 2] >> 4 * (i % 2) & 7;
        const double value = mm_e2m1_to_f32(code);
        squares += value * value;
        energy->folding += fold_error[code];
    }
    energy->weights += squares * scale * scale;
}

/* One row of NVFP4, without the global scale. */
static void add_row_energy(const struct tables *tables, const uint8_t *codes, const uint8_t *scales,
                           const uint8_t *present, int32_t groups, struct energy *energy) {
    const int exponent =
        mm_row_exponent(MEGAMOE_FORMAT_NVFP4, MEGAMOE_NVFP4_FOLDED, scales, present, groups);
    struct energy row = {0};
    for (int32_t g = 0; g < groups; g++) {
        mm_scale scale;
        if (!mm_scale_split(MEGAMOE_FORMAT_NVFP4, scales[g], &scale))
            continue;
        scale.exponent -= exponent;
        add_group_energy(tables->fold_error[table_row(scale.exponent)][scale.eighths],
                         codes + g * 8, ldexp(1.0 + scale.eighths / 8.0, scale.exponent), &row);
    }
    energy->weights += ldexp(row.weights, 2 * exponent);
    energy->folding += ldexp(row.folding, 2 * exponent);
}

static void count_row(const struct analysis *a, const uint8_t *scales, const uint8_t *present,
                      int32_t groups, megamoe_projection_report *report) {
    const megamoe_format format = a->weights->desc.format;
    const int exponent = mm_row_exponent(format, MEGAMOE_NVFP4_EXACT, scales, present, groups);
    int smallest = INT32_MAX;
    int largest = INT32_MIN;
    for (int32_t g = 0; g < groups; g++) {
        mm_scale scale;
        report->scale_histogram[scales[g]]++;
        if (present[g] <= MM_ONLY_ZEROS || !mm_scale_split(format, scales[g], &scale)) {
            report->zero_groups++;
            report->inside++;
            continue;
        }
        smallest = (int)mm_min(smallest, scale.exponent);
        largest = (int)mm_max(largest, scale.exponent);
        const uint8_t exact = a->tables.exact[table_row(scale.exponent - exponent)][scale.eighths];
        const bool inside = !(present[g] & ~exact);
        report->inside += inside;
        report->inside_shifted += inside && exact != 0xFF;
        report->outside += !inside;
    }
    report->groups += (uint64_t)groups;
    report->spread_histogram[largest >= smallest ? largest - smallest : 0]++;
    report->row_exponent_min = (int32_t)mm_min(report->row_exponent_min, exponent);
    report->row_exponent_max = (int32_t)mm_max(report->row_exponent_max, exponent);
}

static void analyze_matrix(struct analysis *a, int32_t index, megamoe_projection_report *report) {
    const megamoe_layer_desc *desc = &a->weights->desc;
    const megamoe_projection projection = (megamoe_projection)(index % MM_PROJECTIONS);
    const megamoe_matrix *matrix = &a->weights->matrices[index];
    const int32_t columns = mm_columns(desc, projection);
    const int32_t groups = columns / mm_group_size(desc->format);
    struct energy energy = {0};
    uint8_t present[MM_MAX_GROUPS];
    for (int32_t row = 0; row < mm_rows(desc, projection); row++) {
        const uint8_t *codes = mm_matrix_codes(matrix, row);
        const uint8_t *scales = mm_matrix_scales(matrix, row);
        mm_row_present(desc->format, codes, columns, present);
        count_row(a, scales, present, groups, report);
        if (desc->format == MEGAMOE_FORMAT_NVFP4)
            add_row_energy(&a->tables, codes, scales, present, groups, &energy);
    }
    const double global = matrix->global_scale;
    a->energies[index] =
        (struct energy){energy.weights * global * global, energy.folding * global * global};
    report->global_min = fminf(report->global_min, matrix->global_scale);
    report->global_max = fmaxf(report->global_max, matrix->global_scale);
}

/* A report that any other can be merged into. */
static const megamoe_projection_report empty_report = {
    .row_exponent_min = INT32_MAX,
    .row_exponent_max = INT32_MIN,
    .global_min = INFINITY,
    .global_max = -INFINITY,
};

static void analyze_some(void *argument, int32_t thread, int32_t threads) {
    (void)threads;
    struct analysis *a = argument;
    const int32_t experts = a->weights->desc.experts;
    for (;;) {
        const int32_t expert = atomic_fetch_add_explicit(&a->next, 1, memory_order_relaxed);
        if (expert >= experts)
            return;
        const megamoe_status status = mm_weights_hold(a->weights, expert);
        mm_carry(&a->failure, status);
        if (status != MEGAMOE_OK)
            return;
        for (int32_t p = 0; p < MM_PROJECTIONS; p++)
            analyze_matrix(a, expert * MM_PROJECTIONS + p, &a->reports[thread][p]);
        mm_weights_drop(a->weights, expert);
        const int32_t done = atomic_fetch_add_explicit(&a->done, 1, memory_order_relaxed) + 1;
        /* Only the caller's thread reports, so calls are never concurrent. */
        if (thread == 0 && a->progress.fn && done < experts)
            a->progress.fn(a->progress.user, (uint64_t)done * a->expert_bytes,
                           (uint64_t)experts * a->expert_bytes);
    }
}

static void merge(megamoe_projection_report *to, const megamoe_projection_report *from) {
    to->groups += from->groups;
    to->zero_groups += from->zero_groups;
    to->inside += from->inside;
    to->inside_shifted += from->inside_shifted;
    to->outside += from->outside;
    for (int i = 0; i < 256; i++) {
        to->scale_histogram[i] += from->scale_histogram[i];
        to->spread_histogram[i] += from->spread_histogram[i];
    }
    to->row_exponent_min = (int32_t)mm_min(to->row_exponent_min, from->row_exponent_min);
    to->row_exponent_max = (int32_t)mm_max(to->row_exponent_max, from->row_exponent_max);
    to->global_min = fminf(to->global_min, from->global_min);
    to->global_max = fmaxf(to->global_max, from->global_max);
}

static megamoe_weights_report summarize(const struct analysis *a, int32_t threads) {
    const int32_t experts = a->weights->desc.experts;
    megamoe_weights_report report = MEGAMOE_INIT(megamoe_weights_report);
    report.bytes = (uint64_t)experts * a->expert_bytes;
    for (int p = 0; p < MM_PROJECTIONS; p++) {
        report.projection[p] = empty_report;
        for (int32_t thread = 0; thread < threads; thread++)
            merge(&report.projection[p], &a->reports[thread][p]);
        struct energy sum = {0};
        for (int32_t expert = 0; expert < experts; expert++) {
            const struct energy *energy = &a->energies[expert * MM_PROJECTIONS + p];
            sum.weights += energy->weights;
            sum.folding += energy->folding;
        }
        report.projection[p].folded_relative_rms =
            sum.weights > 0.0 ? sqrt(sum.folding / sum.weights) : 0.0;
    }
    return report;
}

/* Codes and scales of one expert. */
static uint64_t expert_bytes_of(const megamoe_layer_desc *desc) {
    const uint64_t weights = 3 * (uint64_t)desc->hidden * (uint64_t)desc->intermediate;
    return weights / 2 + weights / (uint64_t)mm_group_size(desc->format);
}

megamoe_status megamoe_weights_analyze(const megamoe_weights *weights, int32_t threads,
                                       megamoe_progress progress, megamoe_weights_report *report) {
    if (!weights || !report)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_weights_analyze: an argument is NULL");
    if (!weights->matrices)
        return mm_fail(MEGAMOE_EUNSUPPORTED, "%s: prepared weights cannot be analyzed",
                       weights->path);
    mm_pool *pool;
    MM_TRY(mm_pool_open(threads, 0, false, &pool));
    threads = mm_pool_threads(pool);
    const size_t matrices = (size_t)weights->desc.experts * MM_PROJECTIONS;
    struct analysis a = {
        .weights = weights,
        .energies = mm_alloc(matrices * sizeof *a.energies),
        .reports = mm_alloc((size_t)threads * sizeof *a.reports),
        .expert_bytes = expert_bytes_of(&weights->desc),
        .progress = progress,
    };
    megamoe_status status;
    if (a.energies && a.reports) {
        for (int32_t thread = 0; thread < threads; thread++)
            for (int p = 0; p < MM_PROJECTIONS; p++)
                a.reports[thread][p] = empty_report;
        fill_tables(weights->desc.format, &a.tables);
        mm_pool_run(pool, analyze_some, &a);
        status = mm_carried_status(&a.failure);
        const megamoe_weights_report result = summarize(&a, threads);
        if (status == MEGAMOE_OK && progress.fn)
            progress.fn(progress.user, result.bytes, result.bytes);
        if (status == MEGAMOE_OK)
            status = mm_give_struct(report, &result, sizeof result, "megamoe_weights_report");
    } else {
        status =
            mm_fail(MEGAMOE_ENOMEM, "analysis of %d experts: out of memory", weights->desc.experts);
    }
    mm_pool_close(pool);
    free(a.energies);
    free(a.reports);
    return status;
}
