/* SPDX-License-Identifier: Apache-2.0 */
/* The result as tables. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "bench.h"
#include "bench_result.h"

/* ---- What was measured ---- */

static bool is_int8(const json_t *arm) {
    return strcmp(result_text(arm, "activations"), "int8") == 0;
}

void bench_print_layer(const json_t *arm) {
    const char *nvfp4 = result_text(arm, "nvfp4");
    const double experts = result_number(arm, "experts");
    char size[REPORT_SIZE_BYTES];
    report_line("layer", "%s: %s%s%s, hidden %.0f, intermediate %.0f, %.0f experts, top-%.0f, %s",
                result_text(arm, "layer"), result_text(arm, "format"), *nvfp4 != '\0' ? " " : "",
                nvfp4, result_number(arm, "hidden"), result_number(arm, "intermediate"), experts,
                result_number(arm, "topk"),
                report_size((uint64_t)(experts * result_number(arm, "expert_bytes")), size));
    if (experts < result_number(arm, "experts_of_model"))
        report_line("", "a share: the first %.0f of %.0f experts", experts,
                    result_number(arm, "experts_of_model"));
    if (is_int8(arm))
        report_line("options", "activations int8, scales per 128 channels");
    else
        report_line("options", "input scale per %s, accumulate %s",
                    strcmp(result_text(arm, "input_scale"), "token") == 0 ? "token"
                                                                          : "128 channels",
                    result_text(arm, "accumulate"));
    if (result_has(arm, "routing"))
        report_line("routing", "%s", result_text(arm, "routing"));
    if (result_has(arm, "live"))
        report_line("tokens", "live: the first %.0f of each batch, the others go to no expert",
                    result_number(arm, "live"));
}

static void print_workspace(const json_t *arm) {
    char size[REPORT_SIZE_BYTES];
    report_line("workspace", "%s for %.0f tokens:",
                report_size((uint64_t)result_number(arm, "workspace_bytes"), size),
                result_number(arm, "capacity"));
    size_t i;
    const json_t *part;
    json_array_foreach(json_object_get(arm, "workspace_parts"), i, part) {
        report_line("", "%9s  %s", report_size((uint64_t)result_number(part, "bytes"), size),
                    result_text(part, "what"));
    }
}

static void print_state(const char *label, const json_t *state) {
    char held[256] = "nothing holds them";
    size_t used = 0, i;
    const json_t *name;
    json_array_foreach(json_object_get(state, "clocks_held_by"), i, name) {
        if (used < sizeof held)
            used += (size_t)snprintf(held + used, sizeof held - used, "%s%s",
                                     i > 0 ? ", " : "held by ", json_string_value(name));
    }
    report_line("", "%s: %.0f MHz, memory %.0f MHz, %.0f W, %.0f C, %s", label,
                result_number(state, "sm_mhz"), result_number(state, "memory_mhz"),
                result_number(state, "power_w"), result_number(state, "temperature_c"), held);
}

static void print_gpu(const json_t *arm) {
    const json_t *of_gpu = json_object_get(arm, "gpu");
    const char *driver = result_text(of_gpu, "driver");
    if (result_has(arm, "ranks"))
        report_line(
            "ranks",
            "%.0f processes; a forward's time is that of the slowest rank, skew is how much "
            "longer that takes than the fastest",
            result_number(arm, "ranks"));
    report_line("device", "%s, %s, %.0f multiprocessors, driver %s", result_text(arm, "model"),
                result_text(arm, "tier"), result_number(of_gpu, "multiprocessors"),
                *driver != '\0' ? driver : "unknown");
    if (result_has(of_gpu, "sm_mhz_max")) {
        report_line("clocks", "up to %.0f MHz, limit %.0f W", result_number(of_gpu, "sm_mhz_max"),
                    result_number(of_gpu, "power_limit_w"));
        print_state("before", json_object_get(of_gpu, "before"));
        print_state("after", json_object_get(of_gpu, "after"));
    }
    report_line("L2", "%s, forwards by %s", result_text(arm, "l2"),
                strcmp(result_text(arm, "launch"), "graph") == 0 ? "graph replay" : "calls");
    if (result_has(arm, "token_tile") || result_has(arm, "lag"))
        report_line("plan", "token tile %.0f, lag %.0f (0: chosen for each batch)",
                    result_number(arm, "token_tile"), result_number(arm, "lag"));
}

static void print_host(const json_t *result) {
    const json_t *host = json_object_get(result, "host");
    report_line("host", "%s, %.0f cores, governor %s, %s, load %.2f",
                result_text(host, "processor"), result_number(host, "cores"),
                result_has(host, "governor") ? result_text(host, "governor") : "unknown",
                result_text(host, "system"), result_number(host, "load"));
}

static void print_method(const json_t *arm, const json_t *points) {
    const json_t *first = json_array_get(points, 0);
    const size_t rounds = json_array_size(json_object_get(first, "rounds_us"));
    report_line(
        "rounds", "%zu%s of %.0f, each by %.0f untimed, cooldown %g s, padding %g us, seed %.0f",
        rounds, result_has(first, "runs") ? " or more" : "", result_number(arm, "iterations"),
        result_number(arm, "warm_ups"), result_number(arm, "cooldown_s"),
        result_number(arm, "padding_us"), result_number(arm, "seed"));
}

static void print_build(const json_t *arm) {
    const char *commit = result_text(arm, "commit");
    report_line("build", "megamoe %s%s%s, %s", result_text(arm, "version"),
                *commit != '\0' ? ", commit " : "", commit, result_text(arm, "date"));
}

/* ---- Points of a GPU ---- */

/* "97.4   78 %", or blanks. */
static void print_share(double floor_us, double us) {
    if (floor_us > 0)
        printf(" %8.1f %3.0f %%", floor_us, 100 * floor_us / us);
    else
        printf(" %8s %5s", "", "");
}

static void print_gpu_points(const json_t *arm, const json_t *points) {
    const bool several = result_has(arm, "ranks");
    printf("\n%6s %7s %5s %9s %9s %9s %8s %14s %14s %8s %8s", "tokens", "experts", "load",
           "median us", "min us", "p90 us", "stage us", "floor us   of", "nominal   of", "GB/s",
           "TFLOP/s");
    if (several)
        printf(" %9s\n", "skew us");
    else
        printf(" %9s %6s %9s\n", "public us", "times", "target us");
    size_t i;
    const json_t *p;
    json_array_foreach(points, i, p) {
        const double us = result_median_us(p);
        printf("%6.0f %7.0f %5.2f %9.1f %9.1f %9.1f %8.1f", result_number(p, "tokens"),
               result_number(p, "experts_active"), result_number(p, "load_imbalance"), us,
               result_min_us(p), result_p90_us(p), result_number_in(p, "stage_us", "median"));
        print_share(result_number(p, "floor_us"), us);
        print_share(result_number(p, "nominal_floor_us"), us);
        printf(" %8.0f %8.1f", result_number(p, "weight_gbs"), result_number(p, "tflops"));
        if (result_has(p, "public_us"))
            printf(" %9.1f %6.2f %9.0f", result_number(p, "public_us"),
                   result_number(p, "public_us") / us, result_number(p, "target_us"));
        if (several)
            printf(" %9.1f", result_number(p, "skew_us"));
        printf("\n");
    }
    printf("\n");
}

/* Where the time goes, of one forward: means over thread blocks. */
static void print_gpu_times(const json_t *points) {
    static const char *const names[] = {"begin",   "dispatch", "fc1",  "fc2",
                                        "combine", "idle",     "total"};
    printf("%6s %9s %9s %9s %9s %9s %9s %9s\n", "tokens", "begin us", "dispatch", "FC1", "FC2",
           "combine", "idle", "total us");
    size_t i;
    const json_t *p;
    json_array_foreach(points, i, p) {
        printf("%6.0f", result_number(p, "tokens"));
        for (size_t j = 0; j < sizeof names / sizeof *names; j++)
            printf(" %9.1f", result_number_in(p, "times_us", names[j]));
        printf("\n");
    }
    printf("\n");
}

static double number_at(const json_t *object, const char *name, size_t i) {
    return json_number_value(json_array_get(json_object_get(object, name), i));
}

static void print_gpu_ceilings(const json_t *arm, bool first) {
    const json_t *ceilings = json_object_get(arm, "ceilings");
    report_line("ceilings",
                "read %.0f and %.0f GB/s, E4M3 %.0f and %.0f TFLOP/s, measured before and after",
                number_at(ceilings, "read_gbs", 0), number_at(ceilings, "read_gbs", 1),
                number_at(ceilings, "mma_tflops", 0), number_at(ceilings, "mma_tflops", 1));
    if (!first || !result_has(arm, "nominal"))
        return;
    report_line("nominal", "read %.0f GB/s, E4M3 %.0f TFLOP/s",
                result_number_in(arm, "nominal", "read_gbs"),
                result_number_in(arm, "nominal", "mma_tflops"));
    report_line("public", "%s", result_text(arm, "public_source"));
}

/* ---- Points of the CPU ---- */

/* Widens a range that starts empty. */
static void include(double range[2], double value) {
    range[0] = value < range[0] ? value : range[0];
    range[1] = value > range[1] ? value : range[1];
}

static void print_cpu_points(const json_t *points) {
    printf("\n%7s %10s %10s %10s %8s %6s %7s %7s %9s %7s %7s\n", "tokens", "median ms", "min ms",
           "p90 ms", "experts", "load", "GB/s", "of read", "GFLOP/s", "of dot", "runs");
    double read[2] = {1e300, 0}, dot[2] = {1e300, 0};
    size_t i;
    const json_t *p;
    json_array_foreach(points, i, p) {
        printf("%7.0f %10.3f %10.3f %10.3f %8.1f %6.2f %7.1f %5.0f %% %9.1f %5.0f %% %7.0f\n",
               result_number(p, "tokens"), result_number(p, "median_ms"),
               result_number(p, "min_ms"), result_number(p, "p90_ms"),
               result_number(p, "experts_touched"), result_number(p, "load_imbalance"),
               result_number(p, "weight_gbs"), 100 * result_number(p, "read_share"),
               result_number(p, "gflops"), 100 * result_number(p, "dot_share"),
               result_number(p, "runs"));
        for (size_t j = 0; j < 2; j++) {
            include(read, number_at(p, "read_gbs", j));
            include(dot, number_at(p, "dot_gflops", j));
        }
    }
    printf("\n");
    report_line("ceilings",
                "read %.1f..%.1f GB/s, dot %.0f..%.0f GFLOP/s, measured before and after each line",
                read[0], read[1], dot[0], dot[1]);
}

/* ---- Arms ---- */

/* What it is measured with is told of the first arm alone. */
static void print_arm(const json_t *arm, bool first) {
    const json_t *points = json_object_get(arm, "points");
    bench_print_layer(arm);
    if (!result_has(arm, "gpu")) {
        const double threads = result_number(arm, "threads");
        report_line("device", "%s, %s, %.0f thread%s", result_text(arm, "model"),
                    result_text(arm, "tier"), threads, threads == 1 ? "" : "s");
        print_method(arm, points);
        print_build(arm);
        print_cpu_points(points);
        return;
    }
    print_gpu(arm);
    print_method(arm, points);
    print_build(arm);
    if (first)
        print_workspace(arm);
    print_gpu_points(arm, points);
    print_gpu_times(points);
    print_gpu_ceilings(arm, first);
}

static void print_ratios(const json_t *result) {
    const json_t *ratios = json_object_get(result, "ratios");
    report_line("ratios",
                "time of an arm by the first one's, of each %s; median, and where it lies with the "
                "confidence",
                result_text(result, "paired_by"));
    printf("\n%7s %8s %8s %8s %7s %6s  %s\n", "tokens", "ratio", "from", "to", "confid.", "pairs",
           "arm");
    size_t i;
    const json_t *r;
    json_array_foreach(ratios, i, r) {
        printf("%7.0f %8.4f %8.4f %8.4f %5.1f %% %6.0f  %s\n", result_number(r, "tokens"),
               result_number(r, "median"), result_number(r, "low"), result_number(r, "high"),
               100 * result_number(r, "confidence"), result_number(r, "pairs"),
               result_text(r, "arm"));
    }
}

int bench_print_text(const json_t *result) {
    const size_t n = result_arms(result);
    print_host(result);
    if (result_has(result, "processes"))
        report_line("processes", "%.0f", result_number(result, "processes"));
    for (size_t i = 0; i < n; i++) {
        json_t *arm = result_arm(result, i);
        if (n > 1)
            report_line(i > 0 ? "\narm" : "arm", "%s", result_text(arm, "arm"));
        print_arm(arm, i == 0);
        json_decref(arm);
    }
    if (n > 1) {
        printf("\n");
        print_ratios(result);
    }
    return EXIT_DONE;
}
